"""Files that are tampered with. Oracle: the same command on the untouched files, and the rule of `trials`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.chaos import files
from tests.chaos.trials import BAD, Trial

HANDFUL = {
    ("run/run.json", "counts.tokens = 1e9"),
    ("run/*.parquet", "zeros in the middle"),
    ("run/sinks.parquet", "share: texts, sealed anew"),
    ("run/arrays.safetensors", "a header of 2⁶⁰ bytes"),
    ("model/config.json", "n_layer = 1e9"),
    ("rows.parquet", "cut near its end"),
}


def _bad(trials: Iterable[Trial]) -> list[str]:
    return [f"{t.answer}: {t.command}, {t.what}: {t.said}" for t in trials if t.answer in BAD]


def test_a_handful_of_tampered_files() -> None:
    chosen = [way for way in files.all_trials() if (way[0], way[2]) in HANDFUL]
    assert {(way[0], way[2]) for way in chosen} == HANDFUL
    assert _bad(files.tried(chosen, 0)) == []


@pytest.mark.slow
def test_a_part_of_all_tampered_files() -> None:
    assert _bad(files.trials(0, 0.05)) == []
