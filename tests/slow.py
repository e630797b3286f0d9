"""Which parameters of a test are in the fast run (`make test`); all are in the whole one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def slow_but(fast: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """The values of parameters, in their order, marked slow but for the fast ones; a tuple is of several parameters."""
    assert all(value in values for value in fast)
    return [value if value in fast else _slow(value) for value in values]


def _slow(value: Any) -> Any:
    return pytest.param(*value if isinstance(value, tuple) else (value,), marks=pytest.mark.slow)
