"""A synthetic run large enough for every verdict."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.report.synthetic import make_run
from theodolite.passes.run import Run


@pytest.fixture(scope="session")
def run() -> Run:
    """Made up, every column of its layers known to a thousandth."""
    made = make_run(blocks=5, length=48, width=64, contexts=40)
    columns = made.layers.drop(columns="layer").select_dtypes("number")
    return replace(made, layers=made.layers.join(columns.abs().mul(1e-3).add_suffix("_se")))
