"""Ctrl-C that lets the work at hand come to a whole end. It knows neither screens nor what is being done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interruptible(say: Callable[[], None] = lambda: None) -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: the first time is only noted (and `say` is called), the second stops at once.

    A handler that is not Python's own is left alone, and a thread that is not the main one may not set any; then
    nothing is ever noted.
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
