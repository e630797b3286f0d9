"""When a pass is shown and when it is saved: what `Progress` calls, in order."""

from __future__ import annotations

from contextlib import nullcontext

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


@pytest.mark.parametrize(
    ("name", "stop_at", "expected"),
    [
        ("report", None, [("show", 2, 4)]),
        ("report", 2, [("show", 2, 4)]),  # the state is half there between checkpoints
        ("checkpoint", None, [("save", 2, False), ("show", 2, 4)]),
        ("checkpoint", 2, [("save", 2, False), ("show", 2, 4), ("save", 2, True)]),
    ],
)
def test_a_report_is_shown_and_a_checkpoint_saved_even_where_it_is_stopped(name, stop_at, expected):
    progress, calls = watched(stop_at)
    with pytest.raises(KeyboardInterrupt) if stop_at else nullcontext():
        getattr(progress, name)(2)
    assert calls == expected
    assert (progress.done, progress.total) == (1, 4)


def test_items_are_shown_as_they_are_done():
    calls: list[tuple[object, ...]] = []
    for item in shown("ab", "letters", lambda *what: calls.append(what)):
        calls.append((item,))
    assert calls == [("letters", 0, 2), ("a",), ("letters", 1, 2), ("b",), ("letters", 2, 2)]
