"""Cut or pack documents into contexts, reading no further than needed; take contexts out of padded and packed rows.

No padding ever reaches a model: a forward pass reads contexts of one length, each from its own first position.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from theodolite.corpus.documents import Document, printable
from theodolite.corpus.groups import Groups
from theodolite.corpus.sampling import LEAST_LENGTH, READ_AHEAD, Choice, Sample, check_length
from theodolite.corpus.special_tokens import Tokenizer, frame_of, refuse_growth
from theodolite.errors import UsageError
from theodolite.system.progress import ShowTokens

CHUNK = 32_768  # characters tokenized at a time: bounds the tokenizer's memory and time on endless lines
BREAK_WINDOW = 4_096  # characters before the end of a chunk in which white space is looked for
READ_TOKENS = 1 << 22  # of a text that has given enough contexts; some 16 MB, read in seconds

NO_TOKEN = -1
"""Behind a context that is shorter than the longest: no model has such a token, so that reading it would fail."""


class Cutter:
    """Cuts documents into the bodies of contexts of so many tokens, and remembers what it read and left out.

    Args:
        choice: of contexts; where it says how many, no more than `READ_TOKENS` are read after enough of them.
        pack: short documents of a label together, but where each row has a label of its own; without, short documents
            and remainders are contexts of their own length.
        show_tokens: is told how many tokens were read so far.
    """

    def __init__(
        self, tokenizer: Tokenizer, length: int, choice: Choice, pack: bool, show_tokens: ShowTokens
    ) -> None:
        check_length(length)
        choice.check()
        self.tokenizer, self.length, self.choice = tokenizer, length, choice
        self.pack, self.show_tokens = pack, show_tokens
        self.frame = frame_of(tokenizer, length)
        self.around = len(self.frame.before) + len(self.frame.after)
        self.body = length - self.around
        self.least = max(1, LEAST_LENGTH - self.around)
        counted = choice.contexts is not None and choice.per_label is None
        self.enough = READ_AHEAD * choice.contexts if counted and choice.contexts else None
        self.short: dict[str | None, list[int]] = {}
        self.longest = self.too_short = self.cuts = self.tokens = 0
        self.stopped = False

    def cut(self, documents: Iterable[Document]) -> Iterator[tuple[str | None, list[int]]]:
        """Yield the label and the tokens of each context, in the order of reading."""
        for document in documents:
            label, full = document.label, False
            pending: list[int] = []
            for ids in encode(self.tokenizer, document.text):
                if self.enough is not None and self.cuts >= self.enough and self.tokens >= READ_TOKENS:
                    self.stopped = True
                    return
                self.tokens += len(ids)
                self.show_tokens(self.tokens)
                pending += ids
                whole = len(pending) // self.body * self.body
                for begin in range(0, whole, self.body):
                    yield self._counted(label, pending[begin : begin + self.body])
                pending, full = pending[whole:], full or whole > 0
            if not self.pack and len(pending) >= self.least:
                yield self._counted(label, pending)
            elif not self.pack and pending:
                self.too_short += 1
                self.longest = max(self.longest, len(pending))
            elif pending and not full:
                if not self.choice.rows:
                    packed = self.short.setdefault(label, [])
                    packed += self.frame.between + pending if packed else pending
                    pending = packed
                self.longest = max(self.longest, len(pending))
                if len(pending) >= self.body:
                    yield self._counted(label, pending[: self.body])
                    self.short[label] = pending[self.body :]

    def _counted(self, label: str | None, ids: list[int]) -> tuple[str | None, list[int]]:
        self.cuts += 1
        return label, ids

    def rows(self, sample: Sample) -> list[Int[Tensor, " tokens"]]:
        """Put what the tokenizer puts around a text around each chosen context."""
        before, after = self.frame.before, self.frame.after
        return [
            torch.from_numpy(np.concatenate([before, body, after]).astype(np.int64))
            for _, body in sample.bodies
        ]

    def nothing_chosen(self, name: str, sample: Sample) -> UsageError:
        """Say why no context was chosen, and what to do."""
        if self.cuts and sample.too_short:
            count, label = sample.longest
            return UsageError(
                f"no label of {name} has {self.choice.per_label} contexts of {self.length} tokens: "
                f"'{printable(label)}' has the most, {count}; use a smaller --per-label or --length"
            )
        if self.cuts:
            return UsageError(
                f"{name} has no labels: leave out --per-label, or give a --label-by (file, folder, row, column:NAME)"
            )
        if not self.longest:
            return UsageError(f"{name} holds no text; give a text of at least {self.length} tokens.")
        return UsageError(
            f"{name} is shorter than one context of {self.length} tokens: its longest text has "
            f"{self.longest + self.around}; use a smaller --length or a longer text."
        )


def encode(tokenizer: Tokenizer, text: str) -> Iterator[list[int]]:
    """Tokenize `text` in chunks of at most `CHUNK` characters, which end before white space where there is some."""
    begin = 0
    while begin < len(text):
        end = begin + CHUNK
        if end < len(text):
            breaks = [match.start() for match in re.finditer(r"(?<=\S)\s", text[end - BREAK_WINDOW : end])]
            end += breaks[-1] - BREAK_WINDOW if breaks else 0
        chunk = text[begin:end].encode("utf-8", "replace").decode()  # JSON can hold half a surrogate pair
        refuse_growth(tokenizer, chunk)
        # verbose=False: a document is longer than the model, which is why it is cut.
        yield list(tokenizer(chunk, add_special_tokens=False, verbose=False)["input_ids"])
        begin = end


def padded(rows: Sequence[Int[Tensor, " tokens"]]) -> tuple[Tensor, Tensor | None]:
    """Pad rows with `NO_TOKEN` to the longest: (contexts, length), and their lengths; None: all alike."""
    lengths = torch.tensor([len(row) for row in rows], device="cpu")
    contexts = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=NO_TOKEN)
    return contexts, None if (lengths == contexts.shape[1]).all() else lengths


def read_order(lengths: Int[Tensor, " contexts"]) -> Int[Tensor, " contexts"]:
    """Sort contexts by length, the longest first, within each of the eight groups, which stay groups of neighbours."""
    group = Groups(len(lengths)).of(torch.arange(len(lengths), device="cpu"))
    by_length = torch.argsort(lengths, descending=True, stable=True)
    return by_length[torch.argsort(group[by_length], stable=True)]


def runs(lengths: Int[Tensor, " contexts"], first: int, last: int) -> Iterator[slice]:
    """Cut the contexts `first … last − 1` where their length changes."""
    _, counts = lengths[first:last].unique_consecutive(return_counts=True)
    for count in counts.tolist():
        yield slice(first, first + count)
        first += count


def contexts_of_rows(
    ids: Int[Tensor, "rows positions"], attention_mask: Tensor | None, position_ids: Tensor | None
) -> tuple[list[Int[Tensor, " tokens"]], list[int], int]:
    """Take the contexts out of padded or packed rows: contexts, the row of each, and how many were too short.

    Args:
        attention_mask: 0 where a row is padded, on its left or right; as `ids`. None: nowhere.
        position_ids: 0, 1, 2, … from the beginning of every context of a row on; as `ids`. None: a row is one.

    Raises:
        UsageError: a mask or positions of another shape, with holes, or that count otherwise.
    """
    mask, position_ids = (
        given if given is None else _shaped(name, given, ids)
        for name, given in (("attention_mask", attention_mask), ("position_ids", position_ids))
    )
    mask = torch.ones_like(ids) if mask is None else mask
    contexts, rows = [], []
    short = 0
    for row, own_ids in enumerate(ids):
        places = mask[row].nonzero().flatten()
        positions = places - places[:1] if position_ids is None else position_ids[row, places]
        starts = (positions == 0).nonzero().flatten().tolist()
        lengths = np.diff([*starts, len(places)]).tolist()
        counted = [position for length in lengths for position in range(length)]
        if counted != positions.tolist():
            raise UsageError(
                f"attention_mask of row {row} has a hole: give rows that are padded on the left or right, or "
                "position_ids"
                if position_ids is None
                else f"position_ids of row {row} do not count 0, 1, 2, … from the beginning of each context on; "
                "padding belongs in the attention_mask"
            )
        for context in own_ids[places].split(lengths):
            if len(context) < LEAST_LENGTH:
                short += 1
                continue
            contexts.append(context)
            rows.append(row)
    return contexts, rows, short


def _shaped(name: str, given: Tensor, ids: Tensor) -> Tensor:
    if given.ndim == 1:
        given = given.unsqueeze(0)
    if given.shape != ids.shape:
        raise UsageError(
            f"{name} has shape {tuple(given.shape)} and the token ids {tuple(ids.shape)}: give one of that shape"
        )
    return given.cpu()
