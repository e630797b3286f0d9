"""Ctrl-C as the process gets it: the signal is raised for real."""

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


def test_the_first_is_noted_and_the_second_stops():
    said = []
    with interruptible(lambda: said.append("stopping")) as stopped:
        assert not stopped()
        signal.raise_signal(signal.SIGINT)
        assert stopped()
        assert said == ["stopping"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert said == ["stopping"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


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
