"""When a pass is shown and when it is saved: what `Progress` calls, in order."""

from __future__ import annotations

import pytest

from theodolite.system.progress import Progress, shown


def watched(stop_at: int | None = None) -> tuple[Progress, list[tuple[object, ...]]]:
    """A progress of 4 steps, 1 of them done, and its calls; showing `stop_at` steps raises."""
    calls: list[tuple[object, ...]] = []

    def show(done: int, total: int) -> None:
        calls.append(("show", done, total))
        if done == stop_at:
            raise KeyboardInterrupt

    return Progress(4, 1, show, lambda done, must: calls.append(("save", done, must))), calls


def test_a_report_is_shown_and_not_saved():
    progress, calls = watched()
    progress.report(2)
    assert calls == [("show", 2, 4)]
    assert (progress.done, progress.total) == (1, 4)


def test_a_checkpoint_may_be_saved_before_it_is_shown():
    progress, calls = watched()
    progress.checkpoint(2)
    assert calls == [("save", 2, False), ("show", 2, 4)]


def test_what_stops_a_checkpoint_comes_out_after_its_state_is_saved():
    progress, calls = watched(stop_at=2)
    with pytest.raises(KeyboardInterrupt):
        progress.checkpoint(2)
    assert calls == [("save", 2, False), ("show", 2, 4), ("save", 2, True)]


def test_what_stops_a_report_saves_nothing():
    """The state is half there between checkpoints."""
    progress, calls = watched(stop_at=3)
    with pytest.raises(KeyboardInterrupt):
        progress.report(3)
    assert calls == [("show", 3, 4)]


def test_items_are_shown_as_they_are_done():
    calls: list[tuple[object, ...]] = []
    for item in shown("ab", "letters", lambda *what: calls.append(what)):
        calls.append((item,))
    assert calls == [("letters", 0, 2), ("a",), ("letters", 1, 2), ("b",), ("letters", 2, 2)]
