"""Read images of a corpus: how pixels are made of pictures, and those of the pictures that were chosen."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from theodolite.corpus.documents import Document, printable
from theodolite.corpus.patches import PatchGrid
from theodolite.corpus.pictures import Picture
from theodolite.corpus.sampling import Choice, Sample, choose
from theodolite.errors import UsageError, WorkError
from theodolite.system.progress import ShowTokens

KEPT_BYTES = 1 << 28
"""Tensors that are kept: 256 MiB, 445 images of 3 × 224 × 224 numbers."""

Tensors = Mapping[str, Tensor]
Source = TypeVar("Source", Picture, Document)


@dataclass(frozen=True)
class TransformedImages:
    """A model's way of reading images: give it to `Corpus.from_path` in place of a tokenizer.

    Of a checkpoint it is `models.image_reader(model)`; of a module of your own, make one.

    Args:
        transform: from a picture of Pillow in RGB to pixel values (channels, height, width), as those of timm and
            torchvision; the same for the same picture.
        patch: height and width of a patch in pixels.
        before: names of the tokens before the patches; () where there are none.
        mean, deviation: of each colour, by which the transform normalised; to show pictures in reports.
    """

    transform: Callable[[Any], Tensor]
    patch: tuple[int, int]
    before: tuple[str, ...] = ("[CLS]",)
    mean: Sequence[float] = (0.0,)
    deviation: Sequence[float] = (1.0,)

    def read(self, image: Any) -> Float[Tensor, "channels height width"]:
        """Make the pixel values of a picture in RGB; `UsageError` where the transform gives something else."""
        pixels = self.transform(image)
        if not isinstance(pixels, Tensor) or pixels.ndim != 3:
            raise UsageError(
                f"the transform gives {tuple(pixels.shape) if isinstance(pixels, Tensor) else type(pixels).__name__} "
                "for a picture: pixel values are (channels, height, width)"
            )
        return pixels.float()

    def shown(
        self, pixels: Float[Tensor, "images channels height width"]
    ) -> UInt8[Tensor, "images height width colours"]:
        """Turn pixel values back into a picture that can be looked at."""
        mean, deviation = (torch.tensor(of, dtype=torch.float64) for of in (self.mean, self.deviation))
        colours = pixels.movedim(1, -1).double() * deviation + mean
        return (colours * 255).round().clamp(0, 255).to(torch.uint8)


class PictureTensors(Generic[Source]):
    """What a model reads of pictures, by argument: kept while there is room, and read anew otherwise.

    `digests` are of the tensors of each, so that a file that changes between two readings is seen.
    """

    def __init__(self, read: Callable[[Source], Tensors]) -> None:
        self._read: Callable[[Source], Tensors] = read
        self.sources: list[Source] = []
        self.digests: list[bytes] = []
        self._kept: dict[bytes, Tensors] = {}
        self._room = KEPT_BYTES

    def add(self, source: Source) -> Tensors:
        """Read a picture for the first time."""
        tensors = self._read(source)
        self.sources.append(source)
        self.digests.append(_digest(tensors))
        self._room -= sum(tensor.nbytes for tensor in tensors.values())
        if self._room >= 0:
            self._kept[self.digests[-1]] = tensors
        return tensors

    def of(self, rows: Tensor) -> PictureTensors[Source]:
        """Take some of the pictures."""
        some, chosen = copy.copy(self), rows.tolist()
        some.sources = [self.sources[row] for row in chosen]
        some.digests = [self.digests[row] for row in chosen]
        return some

    def read(self, rows: slice | Tensor) -> list[Tensors]:
        """Read the tensors of some pictures; `WorkError` where a file has changed since it was first read."""
        chosen = range(len(self.sources))[rows] if isinstance(rows, slice) else rows.tolist()
        return [self._again(row) for row in chosen]

    def _again(self, row: int) -> Tensors:
        if (kept := self._kept.get(self.digests[row])) is not None:
            return kept
        tensors = self._read(self.sources[row])
        if _digest(tensors) != self.digests[row]:
            raise WorkError(f"{self.sources[row].name} has changed while it was measured: run it again")
        return tensors


def _digest(tensors: Tensors) -> bytes:
    """Hash shapes and values."""
    digest = hashlib.sha256()
    for values in tensors.values():
        digest.update(f"{tuple(values.shape)}\n".encode())
        digest.update(values.float().contiguous().numpy().astype("<f4").tobytes())
    return digest.digest()


@dataclass(frozen=True, eq=False)
class Images:
    """Pictures in order, and how they are read; `size`: height and width in pixels, as the model reads them."""

    tensors: PictureTensors[Picture]
    reader: TransformedImages
    size: tuple[int, int]

    @cached_property
    def grid(self) -> PatchGrid:
        """The tokens of each picture."""
        (height, width), (rows, columns) = self.size, self.reader.patch
        return PatchGrid(height // rows, width // columns, self.reader.before)

    @property
    def pictures(self) -> list[Picture]:
        """Where the images are, and their labels."""
        return self.tensors.sources

    @property
    def sha256(self) -> str:
        """Hash of the pixel values that the model reads."""
        return hashlib.sha256(b"".join(self.tensors.digests)).hexdigest()

    def pixels(self, rows: slice | Tensor) -> Float[Tensor, "images channels height width"]:
        """Read the pixel values of some pictures; `WorkError` where a file has changed since it was first read."""
        return torch.stack([tensors["pixels"] for tensors in self.tensors.read(rows)])

    def of(self, rows: Tensor) -> Images:
        """Take some of the pictures."""
        return replace(self, tensors=self.tensors.of(rows))


def choose_images(
    name: str, pictures: Iterable[Picture], reader: TransformedImages, choice: Choice, show: ShowTokens
) -> tuple[Images, Sample[Picture]]:
    """Choose pictures of the corpus `name` and read them, in the order of the seed; `UsageError` where none is kept."""
    choice.check()
    if choice.rows:
        raise UsageError(f"{name} holds images, each a context of its own: leave out --label-by row")
    sample = choose(((picture.label, picture) for picture in pictures), choice)
    if not sample.items and sample.too_short:
        count, label = sample.longest
        raise UsageError(
            f"no label of {name} has {choice.per_label} images: '{printable(label)}' has the most, {count}; use a "
            "smaller --per-label"
        )
    if not sample.items:
        why = "" if choice.per_label is None else " with a label: leave out --per-label"
        raise UsageError(f"{name} holds no image{why}")
    order = np.random.default_rng(choice.seed).permutation(len(sample.items))
    return _read_images([sample.items[index] for index in order], reader, show), sample


def _read_images(pictures: Sequence[Picture], reader: TransformedImages, show: ShowTokens) -> Images:
    """Read all pictures once, which `show` counts; `UsageError` where one is no picture or of another size."""
    tensors = PictureTensors[Picture](lambda picture: {"pixels": reader.read(picture.open())})
    size: tuple[int, int] | None = None
    for number, picture in enumerate(pictures, start=1):
        _, height, width = tensors.add(picture)["pixels"].shape
        if size is not None and size != (height, width):
            raise UsageError(
                f"{picture.name} has {height} × {width} pixels as the model reads it, {pictures[0].name} "
                f"{size[0]} × {size[1]}: the checkpoint's preprocessor_config.json makes images of several sizes; give "
                "images of one"
            )
        size = height, width
        show(number)
    assert size is not None
    return Images(tensors, reader, size)
