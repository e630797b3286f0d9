"""One synthetic run and its page, shared by the report's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.drawn import checked_figures as checked_figures
from tests.report.synthetic import make_survey
from theodolite.passes.run import Run
from theodolite.report.page import write_report


@pytest.fixture(scope="session")
def run() -> Run:
    return make_survey()


@pytest.fixture(scope="session")
def page(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(run, tmp_path_factory.mktemp("report"))
