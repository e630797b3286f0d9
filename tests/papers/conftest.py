"""A synthetic run large enough for every verdict."""

from __future__ import annotations

import pytest

from tests.report.synthetic import make_run
from theodolite.passes.run import Run


@pytest.fixture(scope="session")
def run() -> Run:
    return make_run(blocks=5, length=48, width=64, contexts=40)
