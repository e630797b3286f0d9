"""Oracles: runs made up by hand, and a whole call at a tenth of the size."""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd
import pytest

from tests.report.drawn import drawn, finite
from theodolite.judging import FAILS, HOLDS, UNDECIDED, UNTESTABLE
from theodolite.papers import reproduce
from theodolite.papers.localization import monitor_warnings
from theodolite.papers.localization.monitor_runs import HEALTHY, compare_learning_rates
from theodolite.report.outcome import Outcome

NEVER = np.nan


def runs(healthy: list[float], leads: list[list[float]]) -> pd.DataFrame:
    """Healthy training runs with their first alarms, and failing ones with their leads, seed by seed."""
    rows = [(HEALTHY, seed, first, NEVER, NEVER) for seed, first in enumerate(healthy)]
    rows += [("too high", seed, 40, 40 + lead, lead) for seed, of in enumerate(leads) for lead in of]
    return pd.DataFrame(rows, columns=["pace", "seed", "first_alarm", "loss_notices", "lead"])


@pytest.mark.parametrize(
    ("healthy", "leads", "verdicts"),
    [
        ([NEVER] * 110, [[300, 100], [280, 120], [320, 60]], [HOLDS, HOLDS]),
        # Means over seeds of 160, 10 and 40: their interval reaches 0, though six runs of six are earlier.
        ([NEVER] * 3, [[300, 20], [10, 10], [20, 60]], [UNDECIDED, UNDECIDED]),
        ([NEVER] * 3, [[-300, -100], [-280, -120], [-320, -60]], [FAILS, UNDECIDED]),
        ([NEVER] * 3, [[0, 0]] * 3, [UNDECIDED, UNDECIDED]),
        ([NEVER], [[300, 100]], [UNTESTABLE, UNTESTABLE]),
        ([30] * 3, [[300, 100], [280, 120], [320, 60]], [HOLDS, FAILS]),
    ],
)
def test_verdicts(healthy: list[float], leads: list[list[float]], verdicts: list[str]) -> None:
    """Oracle: Student's t over means of seeds, and the interval of a share of n: 1.96/(2√n) + 1/(2n) at most."""
    outcome = Outcome()
    monitor_warnings.judge_warnings(outcome, runs(healthy, leads))
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
