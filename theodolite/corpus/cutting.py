"""Cut or pack documents into contexts, reading no further than needed; take contexts out of padded and packed rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional

from theodolite.corpus.documents import Document
from theodolite.corpus.groups import Groups
from theodolite.corpus.sampling import READ_AHEAD, Choice, check_length
from theodolite.corpus.special_tokens import Tokenizer, frame_of, refuse_growth
from theodolite.errors import UsageError, first_line

CHUNK = 32_768  # characters tokenized at a time: bounds the tokenizer's memory and time on endless lines
BREAK_WINDOW = 4_096  # characters before the end of a chunk in which white space is looked for
READ_TOKENS = 1 << 22  # of a text that has given enough contexts; some 16 MB, read in seconds

LARGEST_OF_BYTES = (0x7F, 0x7FF, 0xFFFF)  # the last characters that UTF-8 writes in one, two and three bytes
Tokens = Int[np.ndarray, "2 tokens"]  # ids, and how many bytes of text each stands for
NO_TOKEN = -1  # behind a context shorter than the longest; no model has it, so that reading it fails


class Cutter:
    """Cuts documents into contexts of so many tokens, as `Corpus` says, and remembers what it read."""

    def __init__(self, tokenizer: Tokenizer, length: int, choice: Choice) -> None:
        check_length(length)
        choice.check()
        self.tokenizer, self.length, self.choice = tokenizer, length, choice
        self.frame = frame_of(tokenizer, length)
        self.around = len(self.frame.before) + len(self.frame.after)
        self.body = length - self.around
        self.enough = READ_AHEAD * choice.contexts if choice.contexts and choice.per_label is None else None
        self.short: dict[str | None, Tokens] = {}
        self.longest = self.cuts = self.tokens = 0
        self.stopped = False

    def cut(self, documents: Iterable[Document]) -> Iterator[tuple[str | None, Tokens]]:
        """Yield the label and the tokens of each context, in the order of reading."""
        for document in documents:
            label, full = document.label, False
            pending = NO_TOKENS
            for tokens in encode(self.tokenizer, document.text):
                if self.enough is not None and self.cuts >= self.enough and self.tokens >= READ_TOKENS:
                    self.stopped = True
                    return
                self.tokens += tokens.shape[1]
                self.choice.show(self.tokens)
                pending = np.concatenate([pending, tokens], axis=1)
                whole = pending.shape[1] // self.body * self.body
                for begin in range(0, whole, self.body):
                    yield label, self._context(pending[:, begin : begin + self.body])
                pending, full = pending[:, whole:], full or whole > 0
            if pending.shape[1] and not full:
                if not self.choice.rows:
                    packed = self.short.get(label, NO_TOKENS)
                    between = self.frame.between if packed.shape[1] else []
                    pending = np.concatenate([packed, no_text(between), pending], axis=1)
                    self.short[label] = pending
                self.longest = max(self.longest, pending.shape[1])
                if pending.shape[1] >= self.body:
                    yield label, self._context(pending[:, : self.body])
                    self.short[label] = pending[:, self.body :]

    def _context(self, body: Tokens) -> Tokens:
        """Count a context, and put around it what the tokenizer puts around a text."""
        self.cuts += 1
        return np.concatenate([no_text(self.frame.before), body, no_text(self.frame.after)], axis=1)

    def nothing_chosen(self, name: str) -> UsageError:
        """Say why no context was chosen, and what to do."""
        if self.cuts:
            return UsageError(f"{name} has no labels: leave out --per-label, or give a --label-by")
        if not self.longest:
            return UsageError(f"{name} holds no text; give a text of at least {self.length} tokens.")
        return UsageError(
            f"{name} is shorter than one context of {self.length} tokens: its longest text has "
            f"{self.longest + self.around}; use a smaller --length or a longer text."
        )


def no_text(ids: Sequence[int]) -> Tokens:
    """Return tokens that stand for no text, as special ones do."""
    return np.array([ids, [0] * len(ids)], dtype=np.int32)


NO_TOKENS = no_text([])


def tokenized(tokenizer: Tokenizer, text: str) -> Tokens:
    """Return a text's tokens, and the bytes of UTF-8 that each stands for, from the end of the one before to its own.

    Where a tokenizer does not say where tokens stand (those that are written in Python), all have equal parts.
    """
    text = text.encode("utf-8", "replace").decode()  # JSON can hold half a surrogate pair
    refuse_growth(tokenizer, text)
    offsets = bool(getattr(tokenizer, "is_fast", False))
    asked: dict[str, Any] = {"return_offsets_mapping": True} if offsets else {}
    # verbose=False: a text is longer than the model, which is why it is cut.
    try:
        encoded = tokenizer(text, add_special_tokens=False, verbose=False, **asked)
    except Exception as error:  # whatever it raises of characters that it does not have
        raise UsageError(f"the tokenizer cannot read the text ({first_line(error)})") from error
    ids = np.array(encoded["input_ids"], dtype=np.int32)
    if not len(ids):
        return NO_TOKENS
    if offsets:
        points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        of_character = 1 + sum((points > most).astype(np.int64) for most in LARGEST_OF_BYTES)
        position = np.concatenate([[0], np.cumsum(of_character)])
        ends = position[np.maximum.accumulate([end for _, end in encoded["offset_mapping"]])]
    else:
        ends = np.arange(1, len(ids) + 1) * (len(text.encode()) / len(ids))
    ends[-1] = len(text.encode())
    return np.stack([ids, np.diff(ends.round(), prepend=0)]).astype(np.int32)


def encode(tokenizer: Tokenizer, text: str) -> Iterator[Tokens]:
    """Tokenize `text` in chunks of at most `CHUNK` characters, which end before white space where there is some."""
    begin = 0
    while begin < len(text):
        end = begin + CHUNK
        if end < len(text):
            breaks = [match.start() for match in re.finditer(r"(?<=\S)\s", text[end - BREAK_WINDOW : end])]
            end += breaks[-1] - BREAK_WINDOW if breaks else 0
        yield tokenized(tokenizer, text[begin:end])
        begin = end


def padded(rows: Iterable[Any], value: int = NO_TOKEN) -> Int[Tensor, "contexts length"]:
    """Pad rows of whole numbers to the longest one."""
    tensors = [torch.as_tensor(row, device="cpu") for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


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


def whole_ids(ids: Any) -> Int[Tensor, "rows positions"]:
    """Return token ids as a tensor of rows, a single row as one; `UsageError` where they are no whole numbers."""
    try:
        ids = ids if isinstance(ids, Tensor) else torch.as_tensor(ids, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"token ids are {type(ids).__name__}: give whole numbers") from error
    rows = torch.atleast_2d(ids)
    whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool or ids.is_meta)
    if rows.ndim != 2 or not rows.numel() or not whole:
        raise UsageError(f"token ids of shape {tuple(ids.shape)}: give whole numbers (rows, positions)")
    return rows


def positions_in_rows(
    ids: Int[Tensor, "rows positions"], attention_mask: Tensor | None, position_ids: Tensor | None
) -> Int[Tensor, "rows positions"]:
    """Return the position of each token in its own context, −1 where a row is padded; or `UsageError`."""
    if attention_mask is None and position_ids is None:
        return torch.arange(ids.shape[-1], device="cpu").expand(ids.shape)
    mask = torch.ones(ids.shape, dtype=torch.bool) if attention_mask is None else attention_mask
    mask = _shaped("attention_mask", mask, ids)
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise UsageError("attention_mask has other numbers than 0 (padding) and 1: give such a mask")
    counts = None if position_ids is None else _shaped("position_ids", position_ids, ids)
    positions = torch.full(ids.shape, -1)
    for row, in_context in enumerate(mask):
        places = in_context.nonzero().flatten()
        counted = places - places[:1] if counts is None else counts[row, places].long()
        before = functional.pad(counted[:-1], (1, 0), value=-1)
        if not bool(((counted == 0) | (counted == before + 1)).all()):
            raise UsageError(
                f"row {row} has a hole in its attention_mask, or position_ids that do not count 0, 1, 2, … in each "
                "context: give rows that are padded on the left or right"
            )
        positions[row, places] = counted
    return positions


def contexts_in_rows(
    ids: Int[Tensor, "rows positions"], attention_mask: Tensor | None, position_ids: Tensor | None
) -> Iterator[tuple[int, Int[Tensor, " tokens"]]]:
    """Yield the row of each context of padded or packed rows and its places there; as `positions_in_rows`."""
    for row, positions in enumerate(positions_in_rows(ids, attention_mask, position_ids)):
        places = (positions >= 0).nonzero().flatten()
        starts = (positions[places] == 0).nonzero().flatten()
        for context in places.tensor_split(starts[1:]):
            if len(context):
                yield row, context.to(ids.device)


def contexts_of_one_length(
    ids: Int[Tensor, "*rows positions"], attention_mask: Tensor | None, position_ids: Tensor | None
) -> Int[Tensor, "contexts length"]:
    """Take the contexts out of padded or packed rows, which must be as long as each other."""
    ids = torch.atleast_2d(ids)
    contexts = [ids[row, places] for row, places in contexts_in_rows(ids, attention_mask, position_ids)]
    lengths = [len(context) for context in contexts] or [0]
    if min(lengths) < max(max(lengths), 1):
        raise UsageError(
            f"the contexts have {min(lengths)} to {max(lengths)} tokens: give those of one length"
        )
    return torch.stack(contexts)


def _shaped(name: str, values: Any, ids: Tensor) -> Tensor:
    """Return a mask or positions as rows on the CPU; `UsageError` unless they have the shape of the token ids."""
    rows = torch.atleast_2d(torch.as_tensor(values))
    if rows.shape != ids.shape:
        raise UsageError(f"{name} has shape {tuple(rows.shape)}, not {tuple(ids.shape)} as the token ids")
    return rows.cpu()
