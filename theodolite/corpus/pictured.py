"""Read texts with a picture in each, as a model of both does: tokens, some of which are the picture's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from jaxtyping import Int
from torch import Tensor

from theodolite.corpus.documents import Document
from theodolite.corpus.images import PictureTensors, Tensors


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

    `shapes` has a number for each context, the same for those whose tensors have the same shapes.
    """

    tensors: PictureTensors[Document]
    reader: PicturedTextReader
    shapes: Int[Tensor, " contexts"]

    @classmethod
    def of_documents(
        cls, documents: Iterable[Document], reader: PicturedTextReader, after_each: Callable[[], None]
    ) -> Pictured:
        """Read the pictures; `after_each` may raise to stop."""
        tensors = PictureTensors[Document](lambda document: reader.read(document)[1])
        numbers: dict[object, int] = {}
        shapes: list[int] = []
        for document in documents:
            shape = tuple((name, values.shape) for name, values in tensors.add(document).items())
            shapes.append(numbers.setdefault(shape, len(numbers)))
            after_each()
        return cls(tensors, reader, torch.tensor(shapes))

    @property
    def first(self) -> int:
        """The id of the first token of a picture in a corpus, where the second has the next one."""
        return self.reader.vocabulary

    def inputs(self, rows: slice | Tensor, ids: Int[Tensor, "contexts positions"]) -> PicturedIds:
        """Give what the model reads of some contexts, whose tensors have the same shapes.

        Raises:
            WorkError: a file has changed since it was first read.
        """
        read = self.tensors.read(rows)
        pictures = {name: torch.cat([tensors[name] for tensors in read]) for name in read[0]}
        return PicturedIds(ids.masked_fill(ids >= self.first, self.reader.token), pictures)

    def of(self, rows: Tensor) -> Pictured:
        """Take some of the contexts."""
        return replace(self, tensors=self.tensors.of(rows), shapes=self.shapes[rows])
