"""Progress of a long computation, and Ctrl-C, SIGTERM or SIGHUP that stop it where its state can be saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

ShowProgress = Callable[[int, int], None]  # of (done, total); it may raise to stop the work
ShowStage = Callable[[str, int, int], None]
"""Called with (task, done, total); it may raise to stop, and what is complete is saved then."""

ShowTokens = Callable[[int], None]  # of the tokens read so far; it may raise to stop


class Progress:
    """Reports the progress of a pass of `total` steps, `done` of them in its restored state, and saves its state.

    `show` may raise to stop; `save` is called with (done, must) when the state is complete, and must before a stop.
    """

    def __init__(
        self,
        total: int,
        done: int = 0,
        show: ShowProgress = lambda done, total: None,
        save: Callable[[int, bool], None] = lambda done, must: None,
    ) -> None:
        self.total, self.done = total, done
        self._show, self._save = show, save

    def report(self, done: int) -> None:
        """Report `done` steps, not all in the state; an interrupt loses those since the last checkpoint."""
        self._show(done, self.total)

    def checkpoint(self, done: int) -> None:
        """Report that the state holds `done` steps: it may be saved now, and is before an interrupt stops the work."""
        self._save(done, False)
        try:
            self._show(done, self.total)
        except BaseException:
            self._save(done, True)
            raise


STOPPING = "stopping after this step; press Ctrl-C again to stop at once"
"""What is said at the first Ctrl-C: a step is a batch, a layer, a matrix, or the tables and the page as a whole."""

ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""The signals that ask a process to end; Windows has no SIGHUP."""


@contextmanager
def handling(signals: list[Any], handler: Any) -> Iterator[None]:
    """Give signals a handler for a while, and then the one that each had; only the main thread may."""
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)


@contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, too, where nobody handles them."""
    is_main = threading.current_thread() is threading.main_thread()
    left_to_the_system = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    with handling(left_to_the_system if is_main else [], signal.default_int_handler):
        yield


@contextmanager
def interruptible(say: Callable[[], None] = lambda: None) -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C was pressed: the first calls `say`, the second stops at once.

    Signals that have a handler of their own are left alone. `KeyboardInterrupt` on leaving where it was pressed.
    """
    noted = False

    def note(*_: Any) -> None:
        nonlocal noted
        if noted:
            raise KeyboardInterrupt
        noted = True
        with suppress(Exception):  # its terminal was closed, or it needs what was just being imported
            say()

    is_main = threading.current_thread() is threading.main_thread()
    with ended_as_by_ctrl_c():
        ours = [number for number in ENDING if signal.getsignal(number) is signal.default_int_handler]
        with handling(ours if is_main else [], note):
            yield lambda: noted
    if noted:
        raise KeyboardInterrupt
