"""Progress of a long computation, and when its state can be saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")

ShowProgress = Callable[[int, int], None]
"""Called with (done, total); it may raise to stop the work."""

ShowStage = Callable[[str, int, int], None]
"""Told (what is being done, steps done, steps in all); it may raise to stop, and what is whole is saved then."""

ShowTokens = Callable[[int], None]
"""Told how many tokens of a text were read so far, where nobody knows how many there are; it may raise to stop."""


def shown(items: Sequence[Item], what: str, show: ShowStage) -> Iterator[Item]:
    """Yield the items, and show how many of them are done."""
    for done, item in enumerate(items):
        show(what, done, len(items))
        yield item
    show(what, len(items), len(items))


class Progress:
    """Given to a pass, which reports its progress and when its state is complete.

    Args:
        total: steps of the pass.
        done: steps already in its restored state.
        show: called with (done, total); it may raise to stop.
        save: called with (done, must) when the state is complete; `must` when the work is about to stop.
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
        """`done` steps are finished but not all in the state; an interrupt loses those since the last checkpoint."""
        self._show(done, self.total)

    def checkpoint(self, done: int) -> None:
        """The state holds `done` steps: it may be saved now, and is before an interrupt stops the work."""
        self._save(done, False)
        try:
            self._show(done, self.total)
        except BaseException:
            self._save(done, True)
            raise
