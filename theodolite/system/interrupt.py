"""Ctrl-C that stops at the next safe point."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

STOPPING = "stopping after this step; press Ctrl-C again to stop at once"
"""What is said at the first Ctrl-C: a step is a batch, a layer, a matrix, or the tables and the page as a whole."""


@contextmanager
def interruptible(say: Callable[[], None] = lambda: None) -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C was pressed: the first calls `say`, the second stops at once.

    Outside the main thread, or where a custom handler is installed, signals are left alone and it is always False.

    Raises:
        KeyboardInterrupt: it was pressed, and nobody who asked has stopped.
    """
    noted = False

    def note(*_: Any) -> None:
        nonlocal noted
        if noted:
            raise KeyboardInterrupt
        noted = True
        say()

    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: noted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if noted:
        raise KeyboardInterrupt
