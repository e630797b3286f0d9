"""Oracle: the signal of Ctrl-C itself."""

from __future__ import annotations

import signal
import threading

import pytest

from theodolite.system.interrupt import interruptible


@pytest.fixture(autouse=True)
def default_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_is_noted_and_the_second_stops_at_once() -> None:
    said: list[str] = []

    def work() -> None:
        with interruptible(lambda: said.append("stopping")) as stopped:
            assert not stopped()
            signal.raise_signal(signal.SIGINT)
            assert stopped()
            signal.raise_signal(signal.SIGINT)
            pytest.fail("the second did not stop it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert said == ["stopping"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_nobody_has_asked_for_is_raised_at_the_end() -> None:
    """Work without steps, such as the report, is done and then stops the command."""
    done: list[str] = []

    def work() -> None:
        with interruptible():
            signal.raise_signal(signal.SIGINT)
            done.append("the work")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["the work"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_is_not_hidden_by_a_stop() -> None:
    def work() -> None:
        with interruptible():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        work()


def test_a_handler_of_the_callers_own_is_left_alone():
    caught = []
    signal.signal(signal.SIGINT, lambda *_: caught.append(True))
    with interruptible() as stopped:
        signal.raise_signal(signal.SIGINT)
        assert not stopped()
    assert caught == [True]


def test_outside_the_main_thread_signals_are_left_alone():
    answers = []

    def work() -> None:
        with interruptible() as stopped:
            answers.append((stopped(), signal.getsignal(signal.SIGINT) is signal.default_int_handler))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert answers == [(False, True)]
