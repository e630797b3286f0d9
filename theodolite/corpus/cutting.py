"""From documents to the tokens of contexts: tokenized chunk by chunk, cut or packed, and no further than needed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from theodolite.corpus.documents import Document
from theodolite.corpus.special_tokens import Tokenizer, refuse_growth
from theodolite.system.progress import ShowTokens

CHUNK = 32_768  # characters tokenized at a time: bounds the tokenizer's memory and time on endless lines
BREAK_WINDOW = 4_096  # characters before the end of a chunk in which white space is looked for
READ_TOKENS = 1 << 22  # of a text that has given enough contexts; some 16 MB, read in seconds


@dataclass
class Cutter:
    """Cuts documents into the bodies of contexts, and remembers the longest text that did not fill one."""

    tokenizer: Tokenizer
    body: int  # tokens of a context without those around it
    between: list[int]
    packs: bool = True  # short documents of a label together; not where every document has a label of its own
    least: int | None = (
        None  # tokens of a context, where short documents and remainders are some; None: dropped
    )
    enough: int | None = None  # contexts after which no more than `READ_TOKENS` are read; None: all are
    show_tokens: ShowTokens = lambda tokens: None
    longest: int = 0
    too_short: int = 0
    cuts: int = 0
    tokens: int = 0
    stopped: bool = False
    short: dict[str | None, list[int]] = field(default_factory=dict)

    def cut(self, documents: Iterable[Document]) -> Iterator[tuple[str | None, list[int]]]:
        """The label and the tokens of each context, in the order of reading."""
        for document in documents:
            pending: list[int] = []
            full = False
            for ids in encode(self.tokenizer, document.text):
                if self.enough is not None and self.cuts >= self.enough and self.tokens >= READ_TOKENS:
                    self.stopped = True
                    return
                self.tokens += len(ids)
                self.show_tokens(self.tokens)
                pending += ids
                whole = len(pending) // self.body * self.body
                for begin in range(0, whole, self.body):
                    self.cuts += 1
                    yield document.label, pending[begin : begin + self.body]
                pending, full = pending[whole:], full or whole > 0
            if self.least is not None and pending:
                if len(pending) >= self.least:
                    self.cuts += 1
                    yield document.label, pending
                else:
                    self.too_short += 1
                    self.longest = max(self.longest, len(pending))
                continue
            if full or not pending:
                continue
            if not self.packs:
                self.longest = max(self.longest, len(pending))
                continue
            packed = self.short.setdefault(document.label, [])
            packed += self.between + pending if packed else pending
            self.longest = max(self.longest, len(packed))
            if len(packed) >= self.body:
                self.cuts += 1
                yield document.label, packed[: self.body]
                self.short[document.label] = packed[self.body :]


def encode(tokenizer: Tokenizer, text: str) -> Iterator[list[int]]:
    """Token ids of `text`, in chunks of at most `CHUNK` characters.

    Chunks end before white space where there is some: there the tokenizers that split words before merging
    (byte-level BPE, WordPiece) give the same ids as for the whole text. Others may differ by one token per chunk.
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
