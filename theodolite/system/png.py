"""Pictures as PNG, written by hand because no picture library is a dependency.

Source: PNG specification, third edition, 5 and 11.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt

RGB, PALETTE = 2, 3
"""Colour types: three bytes a pixel, or the number of a colour."""


def chunk(name: bytes, data: bytes) -> bytes:
    """A part of a file: its length, name, data and checksum."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(pixels: npt.NDArray[np.uint8], colour_type: int = RGB, *before: bytes) -> bytes:
    """A picture (rows, columns, 3) in RGB; or (rows, columns) of numbers, with the chunks of their palette before."""
    height, width = pixels.shape[:2]
    rows = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))  # each line begins with its filter: 0, none
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour_type, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(rows.tobytes(), 9))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(before) + data + chunk(b"IEND", b"")
