"""Pictures as PNG, written by hand because no picture library is a dependency.

Source: PNG specification, third edition, 5 and 11.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A picture (rows, columns, 3) in RGB."""
    height, width, _ = pixels.shape
    rows = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))  # each line begins with its filter: 0, none
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))  # 2: three bytes a pixel
    data = _chunk(b"IDAT", zlib.compress(rows.tobytes(), 9))
    return b"\x89PNG\r\n\x1a\n" + header + data + _chunk(b"IEND", b"")


def _chunk(name: bytes, data: bytes) -> bytes:
    """A part of a file: its length, name, data and checksum."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
