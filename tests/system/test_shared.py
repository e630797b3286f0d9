"""Oracle: what was opened and closed, in order, written down by the context itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from theodolite.system.processor import Shared


def test_the_first_user_opens_and_the_last_one_closes_in_whatever_order():
    events: list[str] = []

    @contextmanager
    def noted() -> Iterator[None]:
        events.append("opened")
        yield
        events.append("closed")

    shared = Shared(noted)
    for _ in range(2):  # it can be opened again
        first, second = shared.entered(), shared.entered()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert events.pop() == "opened"
        second.__exit__(None, None, None)
        assert events.pop() == "closed"
        assert not events


def test_what_cannot_be_opened_has_no_user():
    @contextmanager
    def failing() -> Iterator[None]:
        raise KeyError
        yield

    shared = Shared(failing)
    for _ in range(2):
        with pytest.raises(KeyError), shared.entered():
            pass
