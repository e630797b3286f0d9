"""Find and read images of a corpus, and pictures in texts: how pixels are made of them, and those that were chosen."""

from __future__ import annotations

import copy
import hashlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from theodolite.corpus.documents import (
    BY_FOLDER,
    IMAGES,
    Columns,
    Document,
    files_of_folder,
    is_image,
    printable,
)
from theodolite.corpus.sampling import Choice, choose
from theodolite.errors import UsageError, WorkError, first_line
from theodolite.system.wording import with_extra

KEPT_BYTES = 1 << 28  # tensors that are kept: 256 MiB, 445 images of 3 × 224 × 224 numbers
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class PatchGrid:
    """Rows and columns of patches, and the names of the tokens before them ([CLS], registers; none in SigLIP)."""

    rows: int
    columns: int
    before: tuple[str, ...] = ()

    @property
    def leading(self) -> int:
        """The number of tokens before the patches."""
        return len(self.before)

    @property
    def length(self) -> int:
        """All tokens T of an image."""
        return self.leading + self.rows * self.columns

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows, self.columns

    def token_text(self, position: int) -> str:
        """Name the token at a position: as the tokens before the patches are called, or `patch ROW,COLUMN` from 0."""
        if position < self.leading:
            return self.before[position]
        row, column = divmod(position - self.leading, self.columns)
        return f"patch {row},{column}"

    def described(self) -> dict[str, Any]:
        """Describe it for the provenance."""
        return {"rows": self.rows, "columns": self.columns, "before": list(self.before)}


def grid_described(corpus: dict[str, Any]) -> PatchGrid | None:
    """Read the grid of a corpus from its provenance; None where it is text."""
    grid = corpus.get("grid")
    return None if grid is None else PatchGrid(grid["rows"], grid["columns"], tuple(grid["before"]))


@dataclass(frozen=True)
class TransformedImages:
    """A model's way of reading images: give it to `Corpus.from_path` in place of a tokenizer.

    Of a checkpoint it is `models.image_reader(model)`; of a module of your own, make one.

    Args:
        transform: from a picture of Pillow in RGB to pixel values (channels, height, width), always the same.
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
                f"the transform gives {type(pixels).__name__}, not pixel values (channels, height, width)"
            )
        return pixels.float()

    def shown(
        self, pixels: Float[Tensor, "images channels height width"]
    ) -> UInt8[Tensor, "images height width colours"]:
        """Turn pixel values back into a picture that can be looked at."""
        mean, deviation = (torch.tensor(of, dtype=torch.float64) for of in (self.mean, self.deviation))
        colours = pixels.movedim(1, -1).double() * deviation + mean
        return (colours * 255).round().clamp(0, 255).to(torch.uint8)


@dataclass(frozen=True)
class Picture:
    """One image, which Pillow opens when it is asked for: its name for messages, its place or bytes, and its label."""

    name: str
    source: Path | bytes
    label: str | None = None

    def open(self) -> Any:
        """Open the image with Pillow: upright, in RGB, of an animation the first frame; or `UsageError`."""
        try:
            from PIL import Image, ImageOps, UnidentifiedImageError
        except ImportError as error:
            raise UsageError(f"images are read by Pillow: {with_extra('images')}") from error
        source = io.BytesIO(self.source) if isinstance(self.source, bytes) else self.source
        try:
            with Image.open(source) as opened:
                if opened.mode.startswith("I"):  # which Pillow would clip to white
                    raise ValueError("of more than 8 bits a colour")
                return ImageOps.exif_transpose(opened).convert("RGB")
        except Exception as error:  # whatever Pillow raises of a broken file
            why = "no image" if isinstance(error, UnidentifiedImageError) else first_line(error)
            raise UsageError(f"{self.name} cannot be read as an image ({why}): mend or remove it") from error


def pictures_at(path: str | Path, columns: Columns) -> list[Picture]:
    """List the images of a file, or of a folder, sorted, labelled by subfolder or file; `UsageError` for none."""
    path = Path(path)
    if columns.option:
        raise UsageError(f"{printable(path)} is no table but images: leave out {columns.option}")
    if path.is_file() and is_image(path):
        return [Picture(printable(path), path)]
    if not path.is_dir():
        why = f"is not one of {' '.join(IMAGES)}" if path.exists() else "does not exist"
        raise UsageError(f"{printable(path)} {why}: give an image or a folder of images")
    files = files_of_folder(path, is_image, columns, "not named as images are")
    if not files:
        raise UsageError(f"{printable(path)} holds no image ({' '.join(IMAGES)}): give another folder")
    by_place = columns if columns.by_place else replace(columns, label_by=BY_FOLDER)  # which shares the notes
    return [Picture(printable(file), file, by_place.label_of_file(file, path)) for file in files]


class PictureTensors:
    """What a model reads of pictures, by argument: kept while there is room, else read anew, and checked by digest."""

    def __init__(self, read: Callable[[Any], Tensors]) -> None:
        self._read = read
        self.sources: list[Any] = []
        self.digests: list[bytes] = []
        self._kept: dict[bytes, Tensors] = {}
        self._room = KEPT_BYTES

    def add(self, source: Any) -> Tensors:
        """Read a picture for the first time."""
        tensors = self._read(source)
        self.sources.append(source)
        self.digests.append(_digest(tensors))
        self._room -= sum(tensor.nbytes for tensor in tensors.values())
        if self._room >= 0:
            self._kept[self.digests[-1]] = tensors
        return tensors

    def of(self, rows: Tensor) -> PictureTensors:
        """Take some of the pictures."""
        some, chosen = copy.copy(self), rows.tolist()
        some.sources = [self.sources[row] for row in chosen]
        some.digests = [self.digests[row] for row in chosen]
        return some

    def read(self, rows: slice | Tensor) -> list[Tensors]:
        """Read the tensors of some pictures; `WorkError` where a file has changed since it was first read."""
        found = []
        for row in range(len(self.sources))[rows] if isinstance(rows, slice) else rows.tolist():
            source, digest = self.sources[row], self.digests[row]
            tensors = self._kept.get(digest) or self._read(source)
            if digest not in self._kept and _digest(tensors) != digest:
                raise WorkError(f"{source.name} has changed while it was measured: run it again")
            found.append(tensors)
        return found


def _digest(tensors: Tensors) -> bytes:
    digest = hashlib.sha256()
    for values in tensors.values():
        digest.update(f"{tuple(values.shape)}\n".encode())
        digest.update(values.float().contiguous().numpy().astype("<f4").tobytes())
    return digest.digest()


@dataclass(frozen=True, eq=False)
class Images:
    """Pictures in order, and how they are read; `size`: height and width in pixels, as the model reads them."""

    tensors: PictureTensors
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

    def pixels(self, rows: slice | Tensor) -> Float[Tensor, "images channels height width"]:
        """Read the pixel values of some pictures; `WorkError` where a file has changed since it was first read."""
        return torch.stack([tensors["pixels"] for tensors in self.tensors.read(rows)])

    def of(self, rows: Tensor) -> Images:
        """Take some of the pictures."""
        return replace(self, tensors=self.tensors.of(rows))


def choose_images(
    name: str, pictures: Iterable[Picture], reader: TransformedImages, choice: Choice
) -> tuple[Images, dict[str, int]]:
    """Choose pictures of the corpus `name` and read them, in the order of the seed; and how labels were balanced."""
    _, chosen, balance = choose(((picture.label, picture) for picture in pictures), choice)
    if not chosen:
        raise UsageError(f"{name} holds no image with a label: leave out --per-label")
    order = np.random.default_rng(choice.seed).permutation(len(chosen)).tolist()
    tensors = PictureTensors(lambda picture: {"pixels": reader.read(picture.open())})
    first, size = chosen[order[0]], (0, 0)
    for number, picture in enumerate((chosen[index] for index in order), start=1):
        _, height, width = tensors.add(picture)["pixels"].shape
        if number > 1 and size != (height, width):
            raise UsageError(
                f"{picture.name} has {height} × {width} pixels as the model reads it, {first.name} {size[0]} × "
                f"{size[1]}: preprocessor_config.json makes images of several sizes"
            )
        size = height, width
        choice.show(number)
    return Images(tensors, reader, size), balance


@dataclass(frozen=True)
class PicturedTextReader:
    """A model's way of reading a text with a picture: `models.pictured_text_reader(model)`.

    It reads `token` in place of each of a picture's tokens; `vocabulary` is an id above that of any token.
    """

    tokenizer: Any
    token: int
    vocabulary: int
    read: Callable[[Document], tuple[list[int], Tensors]]


@dataclass(frozen=True)
class PicturedIds:
    """What a model reads of some contexts: their token ids, and tensors of their pictures by argument."""

    ids: Int[Tensor, "contexts positions"]
    pictures: Tensors


@dataclass(frozen=True, eq=False)
class Pictured:
    """The texts and pictures of contexts; those of one number in `shapes` have tensors of the same shapes."""

    tensors: PictureTensors
    reader: PicturedTextReader
    shapes: Int[Tensor, " contexts"]

    @classmethod
    def of_documents(
        cls, documents: Iterable[Document], reader: PicturedTextReader, after_each: Callable[[], None]
    ) -> Pictured:
        """Read the pictures; `after_each` may raise to stop."""
        tensors = PictureTensors(lambda document: reader.read(document)[1])
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
        """Give what the model reads of some contexts, whose tensors have the same shapes; errors as of `read`."""
        read = self.tensors.read(rows)
        pictures = {name: torch.cat([tensors[name] for tensors in read]) for name in read[0]}
        return PicturedIds(ids.masked_fill(ids >= self.first, self.reader.token), pictures)

    def of(self, rows: Tensor) -> Pictured:
        """Take some of the contexts."""
        return replace(self, tensors=self.tensors.of(rows), shapes=self.shapes[rows])
