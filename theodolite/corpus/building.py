"""From documents or pictures to the contexts of a corpus: tokenized, cut and chosen, or what to do where none is.

`kind` is what is made of them, `Corpus`: a function of its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from theodolite.corpus.cutting import Cutter
from theodolite.corpus.documents import Document, printable
from theodolite.corpus.images import ImageReader, choose_images
from theodolite.corpus.pictures import Picture
from theodolite.corpus.ragged import padded, read_order
from theodolite.corpus.sampling import LEAST_LENGTH, READ_AHEAD, Choice, Sample, check_length, choose
from theodolite.corpus.special_tokens import Tokenizer, frame_of
from theodolite.errors import UsageError
from theodolite.system.progress import ShowTokens

Made = TypeVar("Made")


def numbered(labels: Sequence[str | None]) -> tuple[Int[Tensor, " contexts"], list[str]]:
    """Each label's number, −1 for None, and the labels in the order of their first appearance."""
    names = list(dict.fromkeys(label for label in labels if label is not None))
    index = {label: position for position, label in enumerate(names)}
    return torch.tensor([-1 if label is None else index[label] for label in labels], device="cpu"), names


def of_rows(
    kind: Callable[..., Made],
    name: str,
    rows: Sequence[Int[Tensor, " tokens"]],
    labels: Sequence[str | None],
    seed: int,
    selection: dict[str, Any],
) -> Made:
    """Contexts that may be of unlike lengths, in the order in which they are read."""
    contexts, lengths = padded(rows)
    numbers, names = numbered(labels)
    if lengths is not None:
        order = read_order(lengths)
        contexts, numbers, lengths = contexts[order], numbers[order], lengths[order]
    return kind(name, contexts, numbers, names, seed, selection, lengths=lengths)


def left_out(short: int) -> dict[str, Any]:
    """What `selection` says of contexts that had too few tokens."""
    return {"too_short": short} if short else {}


def one_each(labels: Sequence[str] | None, count: int, noun: str) -> Sequence[str | None]:
    """The labels, one for each of `count` things called `noun`; None: no labels."""
    if labels is None:
        return [None] * count
    if len(labels) != count:
        raise UsageError(f"There are {count} {noun}s and {len(labels)} labels; give each {noun} one label.")
    given = labels.tolist() if isinstance(labels, Tensor | np.ndarray) else labels
    return [None if label is None else str(label) for label in given]


def of_images(
    kind: Callable[..., Made],
    name: str,
    pictures: Iterable[Picture],
    reader: ImageReader,
    choice: Choice,
    selection: dict[str, Any],
    show_images: ShowTokens,
) -> Made:
    """Choose, and read what was chosen."""
    images, sample = choose_images(name, pictures, reader, choice, show_images)
    contexts = torch.arange(images.grid.length).expand(len(images.pictures), -1)
    labels, names = numbered([picture.label for picture in images.pictures])
    return kind(name, contexts, labels, names, choice.seed, selection | _balance(choice, sample), images)


def _balance(choice: Choice, sample: Sample) -> dict[str, Any]:
    """What `selection` says of a corpus with as many contexts of each label."""
    if choice.per_label is None:
        return {}
    return {
        "per_label": choice.per_label,
        "labels_too_short": sample.too_short,
        "labels_not_drawn": sample.not_drawn,
    }


def of_documents(
    kind: Callable[..., Made],
    name: str,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    length: int,
    choice: Choice,
    selection: dict[str, Any] | None = None,
    show_tokens: ShowTokens = lambda tokens: None,
    *,
    pack: bool = True,
) -> Made:
    """Tokenize, cut, choose; `selection` is what is known of it beforehand."""
    check_length(length)
    choice.check()
    frame = frame_of(tokenizer, length)
    around = len(frame.before) + len(frame.after)
    enough = None
    if choice.contexts is not None and choice.per_label is None:
        enough = READ_AHEAD * choice.contexts
    cutter = Cutter(
        tokenizer,
        length - around,
        frame.between,
        packs=pack and not choice.rows,
        least=None if pack else max(1, LEAST_LENGTH - around),
        enough=enough,
        show_tokens=show_tokens,
    )
    sample = choose(cutter.cut(documents), choice)
    if not sample.bodies:
        raise _nothing_chosen(name, length, choice, sample, cutter, around)
    rows = [
        torch.from_numpy(np.concatenate([frame.before, body, frame.after]).astype(np.int64))
        for _, body in sample.bodies
    ]
    selection = (selection or {}) | left_out(cutter.too_short)
    if cutter.stopped:
        selection |= {"tokens_read": cutter.tokens}
    selection |= _balance(choice, sample)
    return of_rows(kind, name, rows, [label for label, _ in sample.bodies], choice.seed, selection)


def _nothing_chosen(
    name: str, length: int, choice: Choice, sample: Sample, cutter: Cutter, around: int
) -> UsageError:
    """Why no context was chosen, and what to do."""
    if cutter.cuts and sample.too_short:
        count, label = sample.longest
        return UsageError(
            f"no label of {name} has {choice.per_label} contexts of {length} tokens: '{printable(label)}' has the "
            f"most, {count}; use a smaller --per-label or --length"
        )
    if cutter.cuts:
        return UsageError(
            f"{name} has no labels: leave out --per-label, or give a folder of files or a table with a --label-column"
        )
    if not cutter.longest:
        return UsageError(f"{name} holds no text; give a text of at least {length} tokens.")
    return UsageError(
        f"{name} is shorter than one context of {length} tokens: its longest text has "
        f"{cutter.longest + around}; use a smaller --length or a longer text."
    )
