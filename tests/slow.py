"""Which parameters of a test are in the fast run (`make test`) or the whole one, and which in `make chaos` alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def slow_but(fast: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """The values of parameters, in their order, marked slow but for the fast ones; a tuple is of several parameters."""
    return _marked_but(fast, values, pytest.mark.slow)


def chaos_but(usual: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """The same, marked for `make chaos` but for the usual ones."""
    return _marked_but(usual, values, pytest.mark.chaos)


def _marked_but(usual: Sequence[Any], values: Sequence[Any], mark: pytest.MarkDecorator) -> list[Any]:
    assert all(value in values for value in usual)
    return [
        value
        if value in usual
        else pytest.param(*value if isinstance(value, tuple) else (value,), marks=mark)
        for value in values
    ]
