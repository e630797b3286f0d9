"""Files that are tampered with. Oracle: the same command on the untouched files, and the rule of `trials`."""

from __future__ import annotations

import sys

import pytest

from tests.chaos import files
from tests.chaos.trials import BAD, told


def _bad(share: float) -> list[str]:
    tried = list(told(files.trials(0, share), sys.stderr))
    assert len(tried) == max(1, round(share * len(files.all_trials())))
    return [f"{t.answer}: {t.command}, {t.what}: {t.said}" for t in tried if t.answer in BAD]


def test_a_handful_of_tampered_files() -> None:
    assert _bad(0.01) == []


@pytest.mark.slow
def test_a_part_of_all_tampered_files() -> None:
    assert _bad(0.15) == []
