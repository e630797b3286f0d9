"""Tokenize documents, and cut or pack them into contexts, reading no further than needed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from theodolite.corpus.documents import Document, printable
from theodolite.corpus.sampling import LEAST_LENGTH, READ_AHEAD, Choice, Sample, check_length
from theodolite.corpus.special_tokens import Tokenizer, frame_of, refuse_growth
from theodolite.errors import UsageError
from theodolite.system.progress import ShowTokens

CHUNK = 32_768  # characters tokenized at a time: bounds the tokenizer's memory and time on endless lines
BREAK_WINDOW = 4_096  # characters before the end of a chunk in which white space is looked for
READ_TOKENS = 1 << 22  # of a text that has given enough contexts; some 16 MB, read in seconds


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
                f"{name} has no labels: leave out --per-label, or give a folder of files or a table with a "
                "--label-column"
            )
        if not self.longest:
            return UsageError(f"{name} holds no text; give a text of at least {self.length} tokens.")
        return UsageError(
            f"{name} is shorter than one context of {self.length} tokens: its longest text has "
            f"{self.longest + self.around}; use a smaller --length or a longer text."
        )


def encode(tokenizer: Tokenizer, text: str) -> Iterator[list[int]]:
    """Tokenize `text` in chunks of at most `CHUNK` characters, which end before white space where there is some.

    There the tokenizers that split words before merging give the same ids as for the whole text.
    """
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
