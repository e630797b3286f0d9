"""Tensors in unnamed files, which the system caches in memory as far as there is room."""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING

from theodolite.system.files import disk_errors

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def kept(tensor: Tensor, before: Tensor | None, folder: Path | None) -> Tensor:
    """Store a tensor in a file of a folder, over the one stored before; without a folder it stays in memory."""
    if folder is None:
        return tensor
    in_file = zeros_in_file(tensor.shape, tensor.dtype, folder) if before is None else before
    return in_file.copy_(tensor.detach())


def zeros_in_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make zeros that take memory only where something else is written; `MemoryError` where there is not as much."""
    import torch

    if not hasattr(mmap, "MADV_HUGEPAGE"):  # elsewhere than on Linux
        return torch.zeros(tuple(shape), dtype=dtype)
    size = math.prod(shape) * dtype.itemsize
    try:
        pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size / 2**30:.1f} GiB for sums") from error
    with suppress(OSError):  # of a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(tuple(shape))


def zeros_in_file(shape: Sequence[int], dtype: torch.dtype, folder: Path) -> Tensor:
    """Make zeros in a file of their size; `WorkError` where the disk is full."""
    import torch

    size = dtype.itemsize * math.prod(shape)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            mapped = mmap.mmap(file.fileno(), size)
    _mapped.add(mapped)
    return torch.frombuffer(mapped, dtype=dtype).view(tuple(shape))


_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def forget() -> None:
    """Release the memory of what `zeros_in_file` made; what is read again comes back from its file."""
    if hasattr(mmap, "MADV_DONTNEED"):  # on Windows the system does so when it needs to
        for mapped in _mapped:
            mapped.madvise(mmap.MADV_DONTNEED)
