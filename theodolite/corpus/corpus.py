"""Make a corpus of a text or of images: non-overlapping contexts with labels, a hash and a seed."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from theodolite.corpus.cutting import NO_TOKEN, Cutter, contexts_in_rows, padded, read_order, runs, whole_ids
from theodolite.corpus.documents import IMAGE_COLUMN, Columns, Document, dataset_of, printable, read_path
from theodolite.corpus.images import (
    Images,
    PatchGrid,
    Pictured,
    PicturedIds,
    PicturedTextReader,
    TransformedImages,
    choose_images,
    pictures_at,
)
from theodolite.corpus.sampling import ALL, LEAST_LENGTH, Choice, check_length, choose
from theodolite.corpus.spec import DOCS, HELD_OUT, PYTHON_LABELS, PYTHON_TEXTS, RANDOM
from theodolite.corpus.special_tokens import Tokenizer, drawable_ids, special_ends
from theodolite.errors import UsageError
from theodolite.system.progress import ShowTokens

STREAMED_CONTEXTS = 256  # of endless sources (random tokens, streamed datasets) when no number is given


@dataclass(frozen=True, eq=False)
class Corpus:
    """C contexts of T tokens each, or of at most T, and where they come from.

    Cutting. Each document that fills a context is cut into non-overlapping contexts on its own, and the remainder is
    dropped. Shorter documents (rows of a table, lines) are packed with others of the same label, in reading order, with
    the tokenizer's end-of-sequence token between them (or its separator). What the tokenizer puts around a sequence
    ([CLS] … [SEP], a beginning-of-sequence token) is in every context, within its T tokens.

    Sampling. Of more contexts than asked for, a seeded sample without replacement is kept, in reading order. A text is
    read until it gave `READ_TOKENS` tokens and `sampling.READ_AHEAD` times the contexts asked for. With `per_label`,
    it is exactly so many contexts of each label that has them, and `contexts` at most.

    Reading. `label_by` says what labels a document: "file", "folder" (its path below the folder read), "column:NAME" of
    a table, or "row" (each has its own); None: the column `label` or `topic` of a table that has one, and titles of
    articles. Of conversations in `text_column` (lists of `{"role", "content"}`) the tokenizer's chat template makes
    texts. `encoding` is that of files that are not UTF-8 and have no byte order mark.

    Attributes:
        lengths: tokens of each context; None: all have T. Behind them `contexts` holds no tokens. Contexts of unlike
            lengths are not in reading order: the longest first, in each eighth of the corpus.
        labels: of each context the index of its label in `label_names`; −1: none.
        selection: for the provenance, what was asked of labels, what they are, and what was left out and why.
        text_bytes: bytes of the text that each token stands for; None where no text was read.
        images: where the contexts are images, whose tokens have their positions as ids.
        pictured: where each context has a picture in its text, whose tokens have the ids `pictured.first` and up.
        sources: where an encoder reads another text beside each context: their tokens, and behind them none.
    """

    name: str
    contexts: Int[Tensor, "contexts length"]
    labels: Int[Tensor, " contexts"]
    label_names: list[str]
    seed: int
    selection: dict[str, Any] = field(default_factory=dict)
    images: Images | None = None
    lengths: Int[Tensor, " contexts"] | None = None
    text_bytes: Int[Tensor, "contexts length"] | None = None
    sources: Int[Tensor, "contexts source_length"] | None = None
    pictured: Pictured | None = None

    @property
    def grid(self) -> PatchGrid | None:
        """The grid of an image's patches; None where the contexts are text."""
        return None if self.images is None else self.images.grid

    @property
    def leading(self) -> int:
        """The number of first tokens measured apart: 1 (position 0), or all before an image's patches."""
        return 1 if self.grid is None else self.grid.leading

    @property
    def text_alone(self) -> bool:
        """Whether a model reads nothing but the token ids: no images, and no sources."""
        return self.images is None and self.sources is None and self.pictured is None

    @property
    def tokens(self) -> Int[Tensor, " tokens"]:
        """All token ids, one after another."""
        return self.contexts.flatten() if self.lengths is None else self.contexts[self.contexts != NO_TOKEN]

    def trailing(self, tokenizer: Any) -> int:
        """Count the special tokens at the end of every context, which are measured apart, too."""
        return special_ends(tokenizer, self.contexts, self.lengths)[1]

    def inputs(self, rows: slice | Tensor) -> Tensor | PicturedIds:
        """Give the model's input of some contexts: ids (C, T), with sources (C, 2, longest); or pixel values."""
        if self.images is not None:
            return self.images.pixels(rows)
        if self.pictured is not None:
            return self.pictured.inputs(rows, self.ids(rows))
        if self.sources is None:
            return self.ids(rows)
        pairs = padded([*self.ids(rows), *self.sources[rows]])
        return pairs.unflatten(0, (2, -1)).transpose(0, 1)

    def keys(self, rows: slice, cross: bool) -> Int[Tensor, "some positions"]:
        """Give the ids of what some contexts of one length attend to: their own, or `cross`, those of the sources."""
        ids = self.ids(rows)
        return self.sources[rows, : ids.shape[1]] if cross and self.sources is not None else ids

    def ids(self, rows: slice | Tensor) -> Int[Tensor, "some positions"]:
        """Give the token ids of some contexts, which have one length."""
        ids = self.contexts[rows]
        longest = [] if self.lengths is None else self.lengths[rows].tolist()
        return ids[:, : max(longest, default=ids.shape[1])]

    def rows(self, cross: bool = False) -> Iterator[Int[Tensor, " tokens"]]:
        """Yield the `keys` of each context."""
        yield from (self.keys(slice(row, row + 1), cross)[0] for row in range(len(self.contexts)))

    def batches(self, batch: int) -> Iterator[slice]:
        """Yield all contexts, at most `batch` at a time."""
        for first in range(0, len(self.contexts), batch):
            yield from self.of_one_length(first, min(first + batch, len(self.contexts)))

    def of_one_length(self, first: int, last: int) -> Iterator[slice]:
        """Cut the contexts `first … last − 1` into parts that a forward pass can read at once."""
        yield from [slice(first, last)] if self._sizes is None else runs(self._sizes, first, last)

    @cached_property
    def _sizes(self) -> Int[Tensor, " contexts"] | None:
        """A number of each context, the same for those that a forward pass can read together, by length first."""
        beside = None if self.pictured is None else self.pictured.shapes
        if self.sources is not None:
            beside = (self.sources != NO_TOKEN).sum(dim=1)
        if beside is None:
            return self.lengths
        return (self.contexts != NO_TOKEN).sum(dim=1) * (1 + int(beside.max())) + beside

    def subset(self, rows: Int[Tensor, " chosen"]) -> Corpus:
        """Make a corpus of some of the contexts."""
        contexts = self.ids(rows)
        return replace(
            self,
            contexts=contexts,
            labels=self.labels[rows],
            images=None if self.images is None else self.images.of(rows),
            lengths=None if self.lengths is None else self.lengths[rows],
            text_bytes=None if self.text_bytes is None else self.text_bytes[rows][:, : contexts.shape[1]],
            sources=None if self.sources is None else self.sources[rows],
            pictured=None if self.pictured is None else self.pictured.of(rows),
        )

    @cached_property
    def sha256(self) -> str:
        """Hash of everything that was read: length, token ids or pixel values, labels and their names."""
        digest = hashlib.sha256(f"length {self.contexts.shape[1]}\n".encode())
        for name in self.label_names:
            encoded = name.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        for pictures in (self.images, self.pictured):
            if pictures is not None:
                digest.update(b"".join(pictures.tensors.digests))
        tensors = (self.contexts, self.labels, *(() if self.sources is None else (self.sources,)))
        for tensor in tensors:  # what is no token says where a context ends
            digest.update(tensor.numpy().astype("<i8").tobytes())
        return digest.hexdigest()

    @classmethod
    def from_path(
        cls,
        path: str | Path,
        tokenizer: Tokenizer | TransformedImages,
        length: int | None = None,
        contexts: int | None = None,
        seed: int = 0,
        text_column: str = "text",
        label_by: str | None = None,
        per_label: int | None = None,
        *,
        encoding: str | None = None,
    ) -> Corpus:
        """Read a file or folder of texts and tables (`documents.READERS`), also compressed (`.gz`, …).

        With `models.image_reader(model)` in place of a tokenizer, the images of a folder, labelled by its subfolders.

        The path of texts may be hf:NAME[:CONFIG[:SPLIT]], too: a data set of the Hugging Face hub, or a folder of data
        files, streamed by `datasets` until it gave `sampling.READ_AHEAD` × `contexts` contexts, of which the seed
        chooses (with `per_label`, so many times the labels that `contexts` has room for).

        A `.txt` in WikiText's format (two or more lines ` = Title = ` between empty lines) is one document an article,
        labelled by its title, and so is a table whose rows are such lines. Any other `.txt` is one document.
        """
        columns = Columns(text_column, label_by, encoding, tokenizer)
        choice = Choice(contexts, seed, per_label, columns.rows)
        return cls.from_columns(path, tokenizer, length, columns, choice)

    @classmethod
    def from_columns(
        cls,
        path: str | Path,
        tokenizer: Tokenizer | TransformedImages,
        length: int | None,
        columns: Columns,
        choice: Choice,
    ) -> Corpus:
        """Do what `from_path` does, its options gathered in `columns` and `choice`."""
        columns.check()
        choice.check()
        name = printable(path)
        if isinstance(tokenizer, TransformedImages):
            if length is not None:
                raise UsageError("an image has as many tokens as the model makes of it: leave out --length")
            images, balance = choose_images(name, pictures_at(path, columns), tokenizer, choice)
            ids = torch.arange(images.grid.length).expand(len(images.pictures), -1)
            labels = _numbered([picture.label for picture in images.pictures])
            return cls(name, ids, *labels, choice.seed, columns.described() | balance, images)
        if (dataset := dataset_of(str(path))) is not None:
            name, most = dataset[0], choice.contexts or max(STREAMED_CONTEXTS, choice.per_label or 0)
            choice = replace(choice, contexts=most, streamed=True)
        return cls.from_documents(name, read_path(path, columns), tokenizer, length, choice, columns)

    @classmethod
    def from_texts(
        cls,
        texts: Iterable[str],
        tokenizer: Tokenizer,
        length: int,
        contexts: int | None = None,
        labels: Sequence[str] | None = None,
        seed: int = 0,
        per_label: int | None = None,
    ) -> Corpus:
        """Cut texts in memory, each with its label (None: no labels)."""
        if isinstance(texts, str):
            raise UsageError("texts is one string; give a list of texts.")
        texts = list(texts)
        documents = list(map(Document, texts, _one_each(labels, len(texts), "text")))
        return cls.from_documents("texts", documents, tokenizer, length, Choice(contexts, seed, per_label))

    @classmethod
    def from_pairs(
        cls,
        path: str | Path,
        tokenizer: Any,
        length: int,
        source_column: str,
        start: int,
        *,
        alike: bool = False,
        **how: Any,
    ) -> Corpus:
        """Read a table of sources and targets (`text_column`), as an encoder-decoder is trained on them.

        Each row of the path, or of hf:NAME…, is a context, not packed: the decoder's, `start`
        (`model.source.target_start`) and all tokens of the target but the last, cut to `length`; beside it the tokens
        of the source, cut to `length`, too. Rows of fewer than 4 tokens are left out. `alike`: both are cut to the
        length of the shorter one, as numbers by the position of a key and of a query need (cross). `how`: `contexts`,
        `seed`, `text_column`, `label_by`, `per_label` and `encoding`, as of `from_path`; `show_tokens` is told how
        many tokens were read.
        """

        def pair(row: Document) -> tuple[list[int], list[int]] | str:
            target, source = (
                text.encode("utf-8", "replace").decode() for text in (row.text, row.source or "")
            )
            ids = [start, *tokenizer(text_target=target, verbose=False)["input_ids"][:-1]][:length]
            most = len(ids) if alike else length
            of_source = tokenizer(source, truncation=True, max_length=most, verbose=False)["input_ids"]
            ids = ids[: len(of_source)] if alike else ids
            return "too_short" if min(len(ids), len(of_source)) < LEAST_LENGTH else (ids, of_source)

        targets, sources, about = _chosen_rows(path, pair, length, tokenizer, source=source_column, **how)
        return cls._of_rows(printable(path), targets, *about, sources=padded(sources))

    @classmethod
    def from_pictured(
        cls,
        path: str | Path,
        reader: PicturedTextReader,
        length: int,
        image_column: str = IMAGE_COLUMN,
        **how: Any,
    ) -> Corpus:
        """Read a table of texts and pictures, one picture in each text, as a model of both reads them.

        Each row of the path, or of hf:NAME…, is a context, not packed: what `models.pictured_text_reader(model)` makes
        of it, cut to `length`. A picture is a path, from the table's folder, or its bytes, as `datasets` stores them.
        Left out are rows without a picture or a text, those whose picture has no room in a context (`picture_cut`), and
        those of fewer than 4 tokens. `how`: as of `from_pairs`.
        """

        def fitting(row: Document) -> tuple[list[int], Document] | str:
            if row.picture is None:  # a text file beside tables
                return "rows_without_image"
            ids = reader.read(row)[0]
            places = [place for place, token in enumerate(ids) if token == reader.token]
            if places and places[-1] >= length:
                return "picture_cut"
            for number, place in enumerate(places):
                ids[place] = reader.vocabulary + number
            return "too_short" if len(ids) < LEAST_LENGTH else (ids[:length], row)

        ids, documents, about = _chosen_rows(
            path, fitting, length, reader.tokenizer, image=image_column, **how
        )
        show, tokens = how.get("show_tokens", ALL.show), sum(map(len, ids))
        # Read again, so that what is kept in memory is of the chosen ones alone.
        pictured = Pictured.of_documents(documents, reader, lambda: show(tokens))
        return cls._of_rows(printable(path), ids, *about, pictured=pictured)

    @classmethod
    def python_docs(
        cls,
        tokenizer: Tokenizer,
        length: int,
        contexts: int | None = None,
        seed: int = 0,
        *,
        held_out: bool = False,
    ) -> Corpus:
        """Read Python's own language reference, labelled by topics; `held_out`: what the embedded model never read."""
        name = HELD_OUT if held_out else DOCS
        return cls.from_documents(name, PYTHON_TEXTS[name](), tokenizer, length, Choice(contexts, seed))

    @classmethod
    def random_tokens(
        cls,
        vocabulary: int | Tokenizer,
        length: int,
        contexts: int = STREAMED_CONTEXTS,
        seed: int = 0,
        *,
        below: int | None = None,
    ) -> Corpus:
        """Draw token ids uniformly and independently: from 0 … vocabulary−1, or a tokenizer's ids `below` a number.

        A tokenizer's special tokens are not drawn, and put around every context as in text.
        """
        check_length(length)
        Choice(contexts).check()
        ids, frame = drawable_ids(vocabulary, length, below)
        body = length - len(frame.before) - len(frame.after)
        rows = frame.around(np.random.default_rng(seed).choice(ids, size=(contexts, body)))
        return replace(cls.from_ids(rows, seed=seed), name=RANDOM)

    @classmethod
    def from_ids(
        cls,
        ids: Int[Tensor, "rows positions"],
        labels: Sequence[str] | None = None,
        seed: int = 0,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Corpus:
        """Take token ids in memory, each row with its label (None: no labels); no tokenizer is needed.

        A row is a context; with an `attention_mask`, without its padding on the left or right; with `position_ids` that
        begin anew at 0, several packed into one. Each is read by itself, from its own position 0, and what has fewer
        than 4 tokens is left out. The seed is recorded; nothing is drawn.
        """
        # A copy: what the caller does to the tensor later is not what was read.
        ids = whole_ids(ids).detach().to("cpu", torch.int64, copy=True)
        labels_of_rows = _one_each(labels, len(ids), "row")
        if attention_mask is None and position_ids is None:
            return cls("token ids", ids, *_numbered(labels_of_rows), seed)
        found = list(contexts_in_rows(ids, attention_mask, position_ids))
        kept = [(row, places) for row, places in found if len(places) >= LEAST_LENGTH]
        if not kept:
            raise UsageError(f"no context has {LEAST_LENGTH} tokens or more: nothing can be measured")
        short = {"too_short": len(found) - len(kept)} if len(kept) < len(found) else {}
        contexts, of_contexts = zip(
            *((ids[row, places], labels_of_rows[row]) for row, places in kept), strict=True
        )
        return cls._of_rows("token ids", contexts, of_contexts, seed, short)

    @classmethod
    def from_documents(
        cls,
        name: str,
        documents: Iterable[Document],
        tokenizer: Tokenizer,
        length: int | None,
        choice: Choice,
        columns: Columns | None = None,
    ) -> Corpus:
        """Cut documents, and choose contexts; `columns` has what the provenance says of how they were read."""
        if length is None:
            raise UsageError("text is cut into contexts of equal length: give a length in tokens")
        cutter = Cutter(tokenizer, length, choice)
        kept_labels, kept, balance = choose(cutter.cut(documents), choice)
        if not kept:
            raise cutter.nothing_chosen(name)
        selection = PYTHON_LABELS.get(name, {}) if columns is None else columns.described()
        selection = selection | ({"tokens_read": cutter.tokens} if cutter.stopped else {}) | balance
        ids, sizes = zip(*kept, strict=True)
        return cls._of_rows(name, ids, kept_labels, choice.seed, selection, text_bytes=padded(sizes, 0))

    @classmethod
    def _of_rows(
        cls,
        name: str,
        rows: Sequence[Any],
        labels: Sequence[str | None],
        seed: int,
        selection: dict[str, Any],
        **beside: Any,
    ) -> Corpus:
        """Put contexts that may be of unlike lengths in the order in which they are read."""
        contexts = padded(rows).long()
        lengths = torch.tensor([len(row) for row in rows], device="cpu")
        if (lengths < contexts.shape[1]).any():
            beside["lengths"] = lengths
        corpus = cls(name, contexts, *_numbered(labels), seed, selection, **beside)
        return corpus if corpus._sizes is None else corpus.subset(read_order(corpus._sizes))


def _chosen_rows(
    path: str | Path,
    context_of: Callable[[Document], tuple[list[int], Any] | str],
    length: int,
    tokenizer: Any,
    *,
    source: str | None = None,
    image: str | None = None,
    contexts: int | None = None,
    seed: int = 0,
    text_column: str = "text",
    label_by: str | None = None,
    per_label: int | None = None,
    encoding: str | None = None,
    show_tokens: ShowTokens = lambda tokens: None,
) -> tuple[tuple[list[int], ...], tuple[Any, ...], tuple[list[str | None], int, dict[str, Any]]]:
    """Choose among what `context_of` makes of tables' rows: ids, and what is beside them; or a word why not."""
    check_length(length)
    columns = Columns(text_column, label_by, encoding, tokenizer, source, image)
    columns.check()
    streamed = image is not None or dataset_of(str(path)) is not None
    choice = Choice(contexts, seed, per_label, columns.rows, streamed)
    choice.check()
    left_out = Counter[str]()

    def made() -> Iterator[tuple[str | None, tuple[list[int], Any]]]:
        tokens = 0
        for row in read_path(path, columns):
            context = context_of(row)
            if isinstance(context, str):
                left_out[context] += 1
                continue
            tokens += len(context[0])
            show_tokens(tokens)
            yield row.label, context

    labels, kept, balance = choose(made(), choice)
    if not kept:
        if left_out["picture_cut"]:
            raise UsageError(f"no picture has room in a context of {length} tokens: use a larger --length")
        what = f"a source and a target of {LEAST_LENGTH} tokens" if image is None else "a picture and a text"
        raise UsageError(f"no row of {printable(path)} has {what}, or its label has too few (--per-label)")
    columns.notes.counts.update(left_out)
    selection = columns.described() | balance
    selection |= {"source_column": source} if image is None else {"image_column": image}
    rows, beside = zip(*kept, strict=True)
    return rows, beside, (labels, seed, selection)


def _numbered(labels: Sequence[str | None]) -> tuple[Int[Tensor, " contexts"], list[str]]:
    """Number the labels in the order of their first appearance, −1 for None; the numbers and the names."""
    names = list(dict.fromkeys(label for label in labels if label is not None))
    index: dict[str | None, int] = {None: -1} | {label: position for position, label in enumerate(names)}
    return torch.tensor([index[label] for label in labels], device="cpu"), names


def _one_each(labels: Sequence[str] | None, count: int, noun: str) -> Sequence[str | None]:
    """Give one label for each of `count` things called `noun`; of None, none."""
    if labels is None:
        return [None] * count
    if len(labels) != count:
        raise UsageError(f"There are {count} {noun}s and {len(labels)} labels; give each {noun} one label.")
    values = labels.tolist() if isinstance(labels, Tensor | np.ndarray) else labels
    return [None if label is None else str(label) for label in values]
