"""The memory allocator: what it keeps for the next tensor."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of glibc's `mallopt`."""


def keep_pages() -> None:
    """Keep freed memory for the next tensor instead of returning it to the system.

    A statistic's temporaries are megabytes that live for milliseconds. By default the C library returns them at
    once or keeps them, as the heap happens to lie; new pages cost a survey's pass up to a quarter of its time. It
    is a setting of the whole process, so a library should not make it, and without glibc nothing is done.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
