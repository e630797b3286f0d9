"""Find images and their labels: in files and folders, and in data sets with a column of images.

A picture is known by its place and is opened when it is asked for, by Pillow.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from theodolite.corpus.documents import (
    BY_FOLDER,
    Columns,
    files_of_folder,
    printable,
    rows_of_dataset,
    streamed_dataset,
)
from theodolite.errors import UsageError, first_line
from theodolite.system.wording import with_extra

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")


@dataclass(frozen=True)
class Picture:
    """One image: its name for messages, where it is (a file, or its bytes), and its label (None: no label)."""

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
        unreadable = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)
        try:
            with Image.open(source) as opened:
                return _eight_bits(ImageOps.exif_transpose(opened), Image).convert("RGB")
        except unreadable as error:
            why = "no image" if isinstance(error, UnidentifiedImageError) else first_line(error)
            raise UsageError(f"{self.name} cannot be read as an image ({why}): mend or remove it") from error


def _eight_bits(opened: Any, image: Any) -> Any:
    """Scale a grey image of 16 bits to 8, which Pillow would clip to white."""
    if not opened.mode.startswith("I"):
        return opened
    import numpy as np

    values = np.asarray(opened, dtype=np.float64)
    most = 255 if values.max(initial=0) < 256 else 65535
    return image.fromarray((values * (255 / most)).round().clip(0, 255).astype(np.uint8))


def is_image(path: Path) -> bool:
    """Tell whether a file's suffix is that of an image."""
    return path.suffix.lower() in SUFFIXES


def holds_images(path: Path) -> bool:
    """Tell whether a path is an image, or a folder with one in it; nothing is opened."""
    if path.is_dir():
        return any(is_image(file) for file in path.rglob("*"))
    return is_image(path) and path.is_file()


def pictures_at(path: str | Path, columns: Columns) -> list[Picture]:
    """List the images of a file or a folder, sorted; other files are passed over, and noted.

    The label of a file is its folder's path below `path`; directly in it, there is none; or, with labels by file, its
    own path. Hidden files do not count.
    `UsageError` where there is no image, or columns of what is no table are asked for.
    """
    path = Path(path)
    if columns.option and holds_images(path):
        raise UsageError(
            f"{printable(path)} is no table but images, each a context of its own: leave out {columns.option}"
        )
    if path.is_file() and is_image(path):
        return [Picture(printable(path), path)]
    if not path.is_dir():
        why = f"is not one of {' '.join(SUFFIXES)}" if path.exists() else "does not exist"
        raise UsageError(f"{printable(path)} {why}: give an image or a folder of images")
    files = files_of_folder(path, is_image, columns, "not named as images are")
    if not files:
        raise UsageError(f"{printable(path)} holds no image ({' '.join(SUFFIXES)}): give another folder")
    by_place = columns if columns.by_place else replace(columns, label_by=BY_FOLDER)  # which shares the notes
    return [Picture(printable(file), file, by_place.label_of_file(file, path)) for file in files]


def pictures_of_dataset(name: str, config: str | None, split: str, columns: Columns) -> Iterator[Picture]:
    """Yield the images of a data set of the hub, or of a folder of data files, as they arrive; or `UsageError`."""
    with streamed_dataset(name, config, split) as dataset:
        yield from _pictures(dataset, f"Dataset {name}", columns)


def _pictures(dataset: Any, source: str, columns: Columns) -> Iterator[Picture]:
    """Yield the images of a data set's rows; rows without one are left out."""
    import datasets

    features = dataset.features or {}
    chosen = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    if columns.text != Columns.text:
        chosen = [name for name in chosen if name == columns.text]
    if not chosen:
        raise UsageError(
            f"{source} has no column of images (it has: {', '.join(features)}); choose with --text-column"
        )
    if columns.column is not None and columns.column not in features:
        raise UsageError(
            f"{source} has no column '{columns.column}' (it has: {', '.join(features)}); choose with --label-by"
        )
    label = next((name for name in columns.of_labels if name in features), None)
    for number, row in enumerate(rows_of_dataset(dataset, chosen[0]), start=1):
        image, value = row[chosen[0]], None if label is None else row[label]
        if image is None:
            continue
        name = None if value is None else columns.labelled(f"column {label}", str(value))
        columns.notes.rows_without_label += name is None
        yield Picture(f"{source} row {number}", _source_of(image), name)


def _source_of(image: dict[str, Any]) -> Path | bytes:
    """Find the image of a row: in the row, in a file, or in what only `datasets` opens (a member of an archive)."""
    import datasets

    if image.get("bytes") is not None:
        return bytes(image["bytes"])
    if Path(image["path"]).is_file():
        return Path(image["path"])
    as_png = io.BytesIO()
    datasets.Image().decode_example(image).convert("RGB").save(as_png, "PNG")
    return as_png.getvalue()
