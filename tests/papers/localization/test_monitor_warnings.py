"""Oracles: runs made up by hand, and a whole call at a tenth of the size."""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd
import pytest

from tests.report.drawn import drawn, finite
from theodolite.judging import FAILS, HOLDS, UNDECIDED
from theodolite.papers import reproduce
from theodolite.papers.localization import monitor_warnings
from theodolite.papers.localization.monitor_runs import HEALTHY, compare_learning_rates
from theodolite.report.outcome import Outcome

NEVER = np.nan


def runs(healthy: list[float], failing: list[tuple[float, float]]) -> pd.DataFrame:
    """Healthy trainings with their first alarms, and failing ones with the first alarm and when the loss notices."""
    rows = [(HEALTHY, first, NEVER) for first in healthy]
    rows += [("too high", *moments) for moments in failing]
    table = pd.DataFrame(rows, columns=["pace", "first_alarm", "loss_notices"])
    table["lead"] = table["loss_notices"] - table["first_alarm"]
    return table


@pytest.mark.parametrize(
    ("healthy", "failing", "verdicts"),
    [
        ([NEVER] * 110, [(40, 200)] * 6, [HOLDS, HOLDS]),
        ([NEVER] * 110, [(40, NEVER)] * 6, [HOLDS, HOLDS]),
        ([NEVER] * 3, [(40, 200)] * 5 + [(90, 90)], [UNDECIDED, UNDECIDED]),
        ([NEVER] * 3, [(90, 90)] * 6, [FAILS, UNDECIDED]),
        ([NEVER] * 3, [(NEVER, 200)] * 6, [FAILS, UNDECIDED]),
        ([NEVER] * 3, [(NEVER, NEVER)] * 6, [FAILS, UNDECIDED]),
        ([30] * 3, [(40, 200)] * 6, [HOLDS, FAILS]),
    ],
)
def test_verdicts(healthy: list[float], failing: list[tuple[float, float]], verdicts: list[str]) -> None:
    """Oracle: who came first, read off the numbers, and the interval of a share of n: 1.96/(2√n) + 1/(2n) at most."""
    outcome = Outcome()
    monitor_warnings.judge_warnings(outcome, runs(healthy, failing))
    assert [verdict.answer for verdict in outcome.verdicts] == verdicts


@pytest.mark.slow
def test_the_experiment_is_the_same_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Determinism alone; `test_monitor_runs.py` has the training's oracle. As many rows as training runs."""
    monkeypatch.setattr(
        monitor_warnings, "compare_learning_rates", partial(compare_learning_rates, steps=8, every=4)
    )
    first, again = (reproduce("localization/monitor") for _ in range(2))
    assert len(first.tables["runs"]) == 9
    for name, table in first.tables.items():
        pd.testing.assert_frame_equal(table, again.tables[name])
    moments, course = (exhibit.figure for exhibit in first.exhibits)
    signs = first.tables["runs"][["first_alarm", "loss_notices", "behind_healthy"]]
    np.testing.assert_array_equal(drawn(moments, "x"), finite(signs))
    means = first.tables["looks"].groupby(["pace", "step"])[monitor_warnings.SHOWN[1][0]].mean()
    assert np.isin(means.to_numpy(np.float32), drawn(course).astype(np.float32)).all()
