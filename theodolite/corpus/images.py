"""Read images of a corpus: how pixels are made of pictures, and those of the pictures that were chosen.

Each picture is read once to find what cannot be read and to hash what was; it is kept where all of them fit
`KEPT_BYTES`, and read anew otherwise, a batch at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from theodolite.corpus.documents import printable
from theodolite.corpus.patches import PatchGrid
from theodolite.corpus.pictures import Picture
from theodolite.corpus.sampling import Choice, Sample, choose
from theodolite.errors import UsageError, WorkError
from theodolite.system.progress import ShowTokens

KEPT_BYTES = 1 << 28
"""Pixels that are kept: 256 MiB, 445 images of 3 × 224 × 224 numbers."""


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


@dataclass(frozen=True, eq=False)
class Images:
    """Pictures in order, and how they are read.

    Attributes:
        digests: of the pixel values of each, so that a file that changes between two readings is seen.
        size: height and width in pixels, as the model reads them.
    """

    pictures: Sequence[Picture]
    reader: TransformedImages
    digests: Sequence[bytes]
    size: tuple[int, int]
    _kept: dict[bytes, Tensor] = field(default_factory=dict, repr=False)

    @cached_property
    def grid(self) -> PatchGrid:
        """The tokens of each picture."""
        (height, width), (rows, columns) = self.size, self.reader.patch
        return PatchGrid(height // rows, width // columns, self.reader.before)

    @property
    def sha256(self) -> str:
        """Hash of the pixel values that the model reads."""
        return hashlib.sha256(b"".join(self.digests)).hexdigest()

    def pixels(self, rows: slice | Tensor) -> Float[Tensor, "images channels height width"]:
        """Read the pixel values of some pictures; `WorkError` where a file has changed since it was first read."""
        chosen = range(len(self.pictures))[rows] if isinstance(rows, slice) else rows.tolist()
        return torch.stack([self._read(index) for index in chosen])

    def of(self, rows: Tensor) -> Images:
        """Take some of the pictures."""
        chosen = rows.tolist()
        return replace(
            self,
            pictures=[self.pictures[index] for index in chosen],
            digests=[self.digests[index] for index in chosen],
        )

    def _read(self, index: int) -> Tensor:
        kept = self._kept.get(self.digests[index])
        if kept is not None:
            return kept
        picture = self.pictures[index]
        pixels = self.reader.read(picture.open())
        if digest_of(pixels) != self.digests[index]:
            raise WorkError(f"{picture.name} has changed while it was measured: run it again")
        return pixels


def digest_of(*read: Tensor) -> bytes:
    """Hash the shapes and the values of what a model reads of a picture."""
    digest = hashlib.sha256()
    for values in read:
        digest.update(f"{tuple(values.shape)}\n".encode())
        digest.update(values.float().contiguous().numpy().astype("<f4").tobytes())
    return digest.digest()


def choose_images(
    name: str, pictures: Iterable[Picture], reader: TransformedImages, choice: Choice, show: ShowTokens
) -> tuple[Images, Sample]:
    """Choose pictures of the corpus `name` and read them, in the order of the seed; `UsageError` where none is kept."""
    choice.check()
    if choice.rows:
        raise UsageError(f"{name} holds images, each a context of its own: leave out --label-by row")
    seen: list[Picture] = []

    def numbered() -> Iterable[tuple[str | None, list[int]]]:
        for picture in pictures:
            seen.append(picture)
            yield picture.label, [len(seen) - 1]

    sample = choose(numbered(), choice)
    chosen = [seen[int(body[0])] for _, body in sample.bodies]
    if not chosen and sample.too_short:
        count, label = sample.longest
        raise UsageError(
            f"no label of {name} has {choice.per_label} images: '{printable(label)}' has the most, {count}; use a "
            "smaller --per-label"
        )
    if not chosen:
        raise UsageError(f"{name} holds no image{' with a label: leave out --per-label' if seen else ''}")
    order = np.random.default_rng(choice.seed).permutation(len(chosen))
    return read_images([chosen[index] for index in order], reader, show), sample


def refuse_length(length: int | None) -> None:
    """Raise `UsageError` where images are given a length."""
    if length is not None:
        raise UsageError("an image has as many tokens as the model makes of it: leave out --length")


def read_images(
    pictures: Sequence[Picture], reader: TransformedImages, show: ShowTokens = lambda images: None
) -> Images:
    """Read all pictures once, which `show` counts; `UsageError` where one is no picture or of another size."""
    digests: list[bytes] = []
    kept: dict[bytes, Tensor] = {}
    shape: tuple[int, ...] = ()
    for picture in pictures:
        pixels = reader.read(picture.open())
        if digests and tuple(pixels.shape) != shape:
            raise UsageError(
                f"{picture.name} has {pixels.shape[1]} × {pixels.shape[2]} pixels as the model reads it, "
                f"{pictures[0].name} {shape[1]} × {shape[2]}: the checkpoint's preprocessor_config.json makes images "
                "of several sizes; give images of one"
            )
        shape = tuple(pixels.shape)
        digests.append(digest_of(pixels))
        if len(pictures) * pixels.nbytes <= KEPT_BYTES:
            kept[digests[-1]] = pixels
        show(len(digests))
    return Images(pictures, reader, digests, (shape[1], shape[2]), kept)
