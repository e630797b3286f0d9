"""Oracles: losses, norms and looks written by hand, scipy's Poisson interval."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from theodolite.papers.localization.monitor_rivals import (
    MONITOR,
    RIVALS,
    Watched,
    gradient_jumps,
    judged_runs,
    limits,
    onsets,
    summary,
)
from theodolite.papers.localization.monitor_runs import smoothed

STEPS = np.arange(1, 301)
FALLING = 4 - 0.005 * STEPS


def tables(losses=FALLING, norms=None, logits=5.0, alarms=()) -> dict[str, pd.DataFrame]:
    """One training run; looks at every tenth step."""
    looks = pd.DataFrame({"step": STEPS[9::10]})
    looks["largest_logit_max"] = logits
    norms = np.ones(len(losses)) if norms is None else norms
    return {
        "losses": pd.DataFrame({"step": STEPS[: len(losses)], "loss": losses, "gradient_norm": norms}),
        "looks": looks,
        "alarms": pd.DataFrame({"step": list(alarms), "kind": "x"}, columns=["step", "kind"]),
    }


def test_no_calibration_run_is_alarming_and_anything_worse_is():
    """Oracle: the definition. Each rival's limit is met by its worst calibration run, and exceeded just above it."""
    random = np.random.default_rng(0)
    calibration = [
        tables(FALLING + random.normal(0, 0.1, 300), random.uniform(1, 2, 300), logits)
        for logits in (4.0, 6.0)
    ]
    of = limits(calibration)
    assert set(of) == set(RIVALS)
    assert of["largest logit"] == 6
    for run in calibration:
        assert onsets(run, of) == {MONITOR: [], **{name: [] for name in RIVALS}}
    tighter = {name: limit - 1e-9 for name, limit in of.items()}
    began = [onsets(run, tighter) for run in calibration]
    assert all(any(run[name] for run in began) for name in RIVALS)


def test_when_each_begins():
    """Oracle: by hand. The norm jumps to five times its median at step 60 for five steps, and again at 200; the logit
    exceeds its limit at the looks 100 and 110; a loss that is no number exceeds every limit of losses."""
    norms = np.ones(300)
    norms[59:64] = norms[199] = 5.0
    looks = np.where(np.isin(STEPS[9::10], (100, 110)), 9.0, 5.0)
    run = tables(norms=norms, logits=looks, alarms=(40, 40, 90))
    jumps = gradient_jumps(run)
    assert jumps[60] == 5
    assert math.isnan(jumps[20])
    of = {"loss rises": 0.1, "loss stalls": 0.1, "gradient norm jumps": 3.0, "largest logit": 6.0}
    assert onsets(run, of) == {
        MONITOR: [40, 90], "loss rises": [], "loss stalls": [], "gradient norm jumps": [60, 200],
        "largest logit": [100],
    }  # fmt: skip
    broken = FALLING.copy()
    broken[149:] = np.nan
    assert onsets(tables(broken), of)["loss rises"] == [150]


def test_rates_and_delays():
    """Oracle: by hand. Of two healthy runs of 300 steps, one at a low rate and so behind, one has two alarms; of two
    that fail one is caught 20 steps before its loss is behind, the other never."""
    failing = FALLING.copy()
    failing[100:] = 5.0
    begins = int(np.flatnonzero(smoothed(failing) > smoothed(FALLING) + 0.1)[0]) + 1
    healthy = tables(alarms=(50, 70))
    runs = [
        Watched("a", "s", "good", 0, True, healthy, tables()),
        Watched("a", "s", "slow", 1, False, tables(FALLING + 1), tables()),
        Watched("a", "s", "bad", 0, True, tables(failing, alarms=(begins - 20,)), tables()),
        Watched("a", "s", "bad", 1, True, tables(failing), tables()),
    ]
    never = {"loss rises": 9.0, "loss stalls": 9.0, "gradient norm jumps": 9.0, "largest logit": 9.0}
    rows = judged_runs(runs, never)
    of = rows[rows["detector"] == MONITOR]
    assert of["failed"].tolist() == [False, False, True, True]
    assert of["late"].tolist()[2] == -20
    row = summary(rows).set_index("detector").loc[MONITOR]
    assert (row["false_alarms"], row["healthy_steps"], row["failing"], row["caught"]) == (2, 600, 2, 1)
    assert row["false_rate"] == pytest.approx(10_000 * 2 / 600)
    # The exact interval: the means at which 2 or fewer, and 2 or more, have a probability of 2.5 %.
    assert stats.poisson.cdf(2, row["false_high"] * 600 / 10_000) == pytest.approx(0.025)
    assert stats.poisson.sf(1, row["false_low"] * 600 / 10_000) == pytest.approx(0.025)
    assert (row["before_loss"], row["late_median"], row["late_low"], row["late_high"]) == (1, -20, -20, -20)
    assert summary(rows).set_index("detector").loc["loss rises", "false_low"] == 0
