"""Read texts with a picture in each, as a model of both does: tokens, some of which are the picture's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from jaxtyping import Int
from torch import Tensor

from theodolite.corpus.documents import Document
from theodolite.corpus.images import KEPT_BYTES, digest_of
from theodolite.corpus.sampling import LEAST_LENGTH
from theodolite.errors import WorkError

Tensors = Mapping[str, Tensor]


class PicturedTextReader(Protocol):
    """A model's way of reading a text with a picture: `models.pictured_text_reader(model)`.

    Attributes:
        tokenizer: of the text.
        token: the id that the model reads in place of each of a picture's tokens.
        vocabulary: no token of a text has this id, or a higher one.
    """

    tokenizer: Any
    token: int
    vocabulary: int

    def read(self, document: Document) -> tuple[list[int], Tensors]:
        """Make token ids, and what else the model reads of the picture; `UsageError` where that is not possible."""
        ...


@dataclass(frozen=True)
class PicturedIds:
    """What a model reads of some contexts: their token ids, and tensors of their pictures by argument."""

    ids: Int[Tensor, "contexts positions"]
    pictures: Tensors


@dataclass(frozen=True, eq=False)
class Pictured:
    """The texts and pictures of contexts, and how they are read.

    Attributes:
        digests: of the tensors of each, so that a file that changes between two readings is seen.
        shapes: a number for each context, the same for those whose tensors have the same shapes.
    """

    documents: Sequence[Document]
    reader: PicturedTextReader
    digests: Sequence[bytes]
    shapes: Int[Tensor, " contexts"]
    _kept: dict[bytes, Tensors] = field(default_factory=dict, repr=False)

    @classmethod
    def of_documents(
        cls, documents: Sequence[Document], reader: PicturedTextReader, hear: Callable[[], None]
    ) -> Pictured:
        """Read the pictures; their tensors are kept while they fit `KEPT_BYTES`. `hear` may raise to stop."""
        kept, room = dict[bytes, Tensors](), KEPT_BYTES
        digests: list[bytes] = []
        numbers: list[int] = []
        shapes: dict[object, int] = {}
        for document in documents:
            _, tensors = reader.read(document)
            digests.append(digest_of(*tensors.values()))
            shape = tuple((name, tensor.shape) for name, tensor in tensors.items())
            numbers.append(shapes.setdefault(shape, len(shapes)))
            room -= sum(tensor.nbytes for tensor in tensors.values())
            if room >= 0:
                kept[digests[-1]] = tensors
            hear()
        return cls(documents, reader, digests, torch.tensor(numbers), kept)

    @property
    def first(self) -> int:
        """The id of the first token of a picture in a corpus, where the second has the next one."""
        return self.reader.vocabulary

    def inputs(self, rows: slice | Tensor, ids: Int[Tensor, "contexts positions"]) -> PicturedIds:
        """Give what the model reads of some contexts, whose tensors have the same shapes.

        Raises:
            WorkError: a file has changed since it was first read.
        """
        chosen = range(len(self.documents))[rows] if isinstance(rows, slice) else rows.tolist()
        read = [self._read(index) for index in chosen]
        pictures = {name: torch.cat([tensors[name] for tensors in read]) for name in read[0]}
        return PicturedIds(ids.masked_fill(ids >= self.first, self.reader.token), pictures)

    def of(self, rows: Tensor) -> Pictured:
        """Take some of the contexts."""
        chosen = rows.tolist()
        documents, digests = ([of[index] for index in chosen] for of in (self.documents, self.digests))
        return replace(self, documents=documents, digests=digests, shapes=self.shapes[rows])

    def _read(self, index: int) -> Tensors:
        if (kept := self._kept.get(self.digests[index])) is not None:
            return kept
        document = self.documents[index]
        _, tensors = self.reader.read(document)
        if digest_of(*tensors.values()) != self.digests[index]:
            raise WorkError(f"the picture in {document.name} has changed while it was measured: run it again")
        return tensors


@dataclass
class PicturedRows:
    """Texts with pictures that fit a context, and the ids of each, those of a picture's tokens from `vocabulary` on.

    `cut` counts those left out because their picture has more tokens than a context, the longest `longest`, and
    `too_short` those of too few tokens; `tokens` are those of all that are kept.
    """

    reader: PicturedTextReader
    length: int
    ids: list[list[int]] = field(default_factory=list)
    documents: list[Document] = field(default_factory=list)
    cut: int = 0
    too_short: int = 0
    longest: int = 0
    tokens: int = 0

    def takes(self, document: Document) -> bool:
        """Read a text and its picture, cut to the length; tells whether it is kept."""
        ids, _ = self.reader.read(document)
        places = [place for place, token in enumerate(ids) if token == self.reader.token]
        if places and places[-1] >= self.length:
            self.cut, self.longest = self.cut + 1, max(self.longest, places[-1] + 1)
            return False
        ids = ids[: self.length]
        if len(ids) < LEAST_LENGTH:
            self.too_short += 1
            return False
        for number, place in enumerate(places):
            ids[place] = self.reader.vocabulary + number
        self.tokens += len(ids)
        self.ids.append(ids)
        self.documents.append(document)
        return True
