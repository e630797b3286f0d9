"""What a figure shows, to hold it against the numbers behind it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import plotly.graph_objects as go
import pytest

from theodolite.report import style


@pytest.fixture(scope="session", autouse=True)
def checked_figures() -> Iterator[None]:
    """Let Plotly check every figure, which the pages leave out."""
    plain = style.figure
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "figure", lambda *args, **more: go.Figure(plain(*args, **more)))
        yield


def drawn(figure: go.Figure, axis: str = "y", **where: str) -> np.ndarray:
    """The finite numbers, not names, on an axis of the traces whose attributes are as `where` says, sorted."""
    chosen = [
        trace
        for trace in figure.data
        if axis in trace and all(trace[key] == value for key, value in where.items())
    ]
    arrays = [np.asarray(trace[axis]) for trace in chosen]
    return finite(*(array for array in arrays if array.dtype.kind in "iufb"))


def finite(*values: object) -> np.ndarray:
    """All finite numbers of some arrays or columns, sorted, as `drawn` gives them."""
    numbers = np.concatenate([np.zeros(0), *(np.asarray(each, dtype=np.float64).ravel() for each in values)])
    return np.sort(numbers[np.isfinite(numbers)])
