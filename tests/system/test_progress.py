"""Oracle: the signals themselves, of Ctrl-C, of a cluster that takes its machine back, of a terminal that is closed."""

from __future__ import annotations

import signal
import threading
from contextlib import nullcontext

import pytest

from theodolite.system.progress import Progress, ended_as_by_ctrl_c, interruptible

ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def default_handlers():
    """Those of a process of its own, which a test must leave as it found them."""
    own = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in own.items()}
    yield
    after = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert after == own


@pytest.mark.parametrize("first", ENDING)
@pytest.mark.parametrize("second", ENDING)
@pytest.mark.parametrize("in_a_command", [False, True])
def test_the_first_is_noted_and_the_second_stops_at_once(first: int, second: int, in_a_command: bool) -> None:
    said: list[str] = []

    def work() -> None:
        with interruptible(lambda: said.append("stopping")) as stopped:
            assert not stopped()
            signal.raise_signal(first)
            assert stopped()
            signal.raise_signal(second)
            pytest.fail("the second did not stop it")

    with pytest.raises(KeyboardInterrupt), ended_as_by_ctrl_c() if in_a_command else nullcontext():
        work()
    assert said == ["stopping"]


@pytest.mark.parametrize("number", ENDING)
def test_where_nothing_is_saved_in_between_a_signal_stops_at_once(number: int) -> None:
    closed: list[str] = []

    def work() -> None:
        with ended_as_by_ctrl_c():
            try:
                signal.raise_signal(number)
                pytest.fail("it went on")
            finally:
                closed.append("the lock")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert closed == ["the lock"]


@pytest.mark.parametrize("number", ENDING)
def test_what_is_ignored_stays_ignored(number: int) -> None:
    """As by `nohup`; the others are heard."""
    before = signal.signal(number, signal.SIG_IGN)
    other = next(each for each in ENDING if each != number)

    def work() -> None:
        with ended_as_by_ctrl_c(), interruptible() as stopped:
            signal.raise_signal(number)
            assert not stopped()
            signal.raise_signal(other)
            assert stopped()

    with pytest.raises(KeyboardInterrupt):
        work()
    assert signal.signal(number, before) is signal.SIG_IGN


@pytest.mark.parametrize(
    "error", [None, OSError("Input/output error"), ImportError("partially initialized module")]
)
def test_work_without_steps_is_done_and_stopped_at_its_end(error: Exception | None) -> None:
    """Also where that cannot be said: a terminal is closed, or an import of what would say it is unfinished."""
    done: list[str] = []

    def say() -> None:
        if error:
            raise error

    def work() -> None:
        with interruptible(say):
            signal.raise_signal(signal.SIGHUP)
            done.append("the work")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["the work"]


def test_an_error_is_not_hidden_by_a_stop() -> None:
    def work() -> None:
        with interruptible():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        work()


@pytest.mark.parametrize("number", ENDING)
def test_a_handler_of_the_callers_own_is_left_alone(number: int) -> None:
    caught = []
    before = signal.signal(number, lambda *_: caught.append(True))
    with interruptible() as stopped:
        signal.raise_signal(number)
        assert not stopped()
    assert caught == [True]
    signal.signal(number, before)


def test_outside_the_main_thread_signals_are_left_alone():
    answers = []

    def work() -> None:
        with interruptible() as stopped:
            handlers = [signal.getsignal(number) for number in ENDING]
            answers.append((stopped(), handlers))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert answers == [(False, [signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL])]


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
