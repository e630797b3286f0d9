"""How far a piece of work is, and from where it could be resumed. It knows nothing of what is done."""

from __future__ import annotations

from collections.abc import Callable

ShowProgress = Callable[[int, int], None]
"""Told (done, total); it may raise to stop the work."""


class Progress:
    """What a pass is given: it says how far it is, and when its state is whole.

    Args:
        total: steps of the pass.
        done: steps that its restored state holds already.
        show: told (done, total); it may raise to stop.
        save: told (done, must): keep the state, which is whole; `must` when the work is about to stop.
    """

    def __init__(
        self,
        total: int,
        done: int = 0,
        show: ShowProgress = lambda done, total: None,
        save: Callable[[int, bool], None] = lambda done, must: None,
    ) -> None:
        self.total = total
        self.done = done
        self._show = show
        self._save = save

    def report(self, done: int) -> None:
        """So many steps are done, but the state holds only those before; an interrupt loses the others."""
        self._show(done, self.total)

    def checkpoint(self, done: int) -> None:
        """The state holds so many steps: it is saved now and then, and always before an interrupt stops the work."""
        self._save(done, False)
        try:
            self._show(done, self.total)
        except BaseException:
            self._save(done, True)
            raise
