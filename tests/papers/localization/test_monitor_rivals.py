"""Oracles: losses, norms, looks and tables written by hand; scipy's binomial distribution."""

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
    compared,
    differences,
    first_alarms,
    gradient_jumps,
    judged_runs,
    limits,
    loss_spikes,
    median_interval,
    poisson_interval,
    run_table,
    summary,
)

STEPS = np.arange(1, 301)
FALLING = 4 - 0.005 * STEPS
NEVER = dict.fromkeys(RIVALS, 9.0)


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


def watched(peak: float, of: dict[str, pd.DataFrame], seed: int = 0) -> Watched:
    return Watched("a text", "a size", str(peak), seed, peak, of)


def table(
    moments: list[tuple[float, float]], seeds: list[int] | None = None, failed: bool = True
) -> pd.DataFrame:
    """Training runs of 300 steps by the first alarms of the monitor and of the loss's rise, one a group or by seed."""
    rows = pd.DataFrame(moments, columns=[MONITOR, "loss rises"]).assign(
        text="a text", size="a size", seed=range(len(moments)) if seeds is None else seeds
    )
    others = [name for name in RIVALS if name != "loss rises"]
    return rows.assign(failed=failed, steps=300, **dict.fromkeys(others, math.nan))


def test_no_healthy_calibration_run_is_alarming_and_anything_worse_is():
    """Oracle: the definition. Each rival's limit is met by its worst healthy run, and exceeded just above it; a
    calibration run that fails, whatever it shows, sets none."""
    random = np.random.default_rng(0)
    healthy = [
        tables(FALLING + random.normal(0, 0.1, 300), random.uniform(1, 2, 300), logits)
        for logits in (4.0, 6.0)
    ]
    failing = tables(FALLING + 0.01 * STEPS, random.uniform(1, 9, 300), 99.0)
    of = limits(
        [*(watched(rate, run) for rate, run in zip((1e-3, 1e-2), healthy, strict=True)), watched(1, failing)]
    )
    assert set(of) == set(RIVALS)
    assert of["largest logit"] == 6
    for run in healthy:
        assert np.isnan(list(first_alarms(run, of).values())).all()
    tighter = {name: limit - 1e-9 for name, limit in of.items()}
    first = [first_alarms(run, tighter) for run in healthy]
    assert all(any(run[name] > 0 for run in first) for name in RIVALS)


def test_limits_of_hindsight():
    """Oracle: by hand. Of four healthy runs one exceeds the second highest of their largest logits."""
    runs = [watched(0.01, tables(logits=logits), seed) for seed, logits in enumerate((4.0, 7.0, 5.0, 6.0))]
    of = limits(runs, allowed=1)
    assert of["largest logit"] == 6
    assert [first_alarms(run.tables, of)["largest logit"] for run in runs][1] == 10
    assert judged_runs(runs, of)["largest logit"].notna().sum() == 1


def test_first_alarms():
    """Oracle: by hand. The norm jumps to five times its median at steps 60 and 200; the loss is 2 nats higher at step
    80; the logit exceeds its limit at the looks 100 and 110; a loss that is no number exceeds every limit."""
    losses, norms = FALLING.copy(), np.ones(300)
    losses[79] += 2
    norms[59:64] = norms[199] = 5.0
    looks = np.where(np.isin(STEPS[9::10], (100, 110)), 9.0, 5.0)
    run = tables(losses, norms, looks, alarms=(40, 40, 90))
    assert gradient_jumps(run)[60] == 5
    assert math.isnan(gradient_jumps(run)[20])
    # The median of the 20 losses before lies 10.5 steps back.
    assert loss_spikes(run)[80] == pytest.approx(2 - 10.5 * 0.005)
    of = {
        "loss rises": 1.0,
        "loss stalls": 0.1,
        "loss spikes": 1.9,
        "gradient norm jumps": 3.0,
        "largest logit": 6.0,
    }
    assert first_alarms(run, of) == {
        MONITOR: 40, "loss rises": pytest.approx(math.nan, nan_ok=True),
        "loss stalls": pytest.approx(math.nan, nan_ok=True), "loss spikes": 80, "gradient norm jumps": 60,
        "largest logit": 100,
    }  # fmt: skip
    broken = FALLING.copy()
    broken[149:] = np.nan
    assert first_alarms(tables(broken), of)["loss rises"] == 150


def test_which_runs_fail():
    """Oracle: by hand. The best run is that at 0.01; a lower rate is slow, a higher one within 0.1 nats as good, one
    beyond them or that is no number fails. Another seed has a best run of its own."""
    broken = FALLING.copy()
    broken[200:] = np.nan
    runs = [
        watched(0.001, tables(FALLING + 1)),
        watched(0.01, tables(FALLING)),
        watched(0.1, tables(FALLING + 0.09)),
        watched(0.2, tables(FALLING + 0.11)),
        watched(0.3, tables(broken)),
        watched(0.2, tables(FALLING + 2), seed=1),
    ]
    rows = run_table(runs)
    assert rows["failed"].tolist() == [False, False, False, True, True, False]
    assert rows["final_loss"][1] == pytest.approx(FALLING[-20:].mean())
    judged = judged_runs(runs, NEVER)
    assert judged["loss rises"].dropna().to_dict() == {4: 201}


def test_false_alarms_are_counted_by_training_run():
    """Oracle: by hand, and the definition of the exact interval: the shares at which 2 or fewer, and 2 or more, of ten
    have a probability of 2.5 %. A run with many alarms counts once."""
    runs = [watched(0.01, tables(alarms=(50, 70, 90) if seed < 2 else ()), seed) for seed in range(10)]
    row = summary(judged_runs(runs, NEVER)).set_index("detector").loc[MONITOR]
    assert (row["false_runs"], row["healthy"], row["failing"]) == (2, 10, 0)
    assert stats.binom.cdf(2, 10, row["false_high"]) == pytest.approx(0.025)
    assert stats.binom.sf(1, 10, row["false_low"]) == pytest.approx(0.025)
    # Two in 3,000 steps are 6.7 in 10,000.
    assert row["false_rate"] == pytest.approx(20 / 3)
    assert stats.poisson.cdf(2, row["rate_high"] * 0.3) == pytest.approx(0.025)
    assert stats.poisson.sf(1, row["rate_low"] * 0.3) == pytest.approx(0.025)
    assert poisson_interval(0) == (0, pytest.approx(-math.log(0.025)))


@pytest.mark.parametrize(
    ("moments", "counts", "verdict"),
    [
        ([(40, 100)] * 6, (6, 0, 0), "earlier"),
        ([(100, 40)] * 6, (0, 6, 0), "later"),
        ([(40, 100)] * 5, (5, 0, 0), "not decided"),  # by chance in one case of 16
        ([(40, 100)] * 5 + [(100, 40)], (5, 1, 0), "not decided"),
        ([(60, 60)] * 20, (0, 0, 20), "not decided"),
        ([(40, 100)] * 6 + [(60, 60)] * 6, (6, 0, 6), "not decided"),
        ([(40, math.nan)] * 6, (6, 0, 0), "earlier"),
        ([(math.nan, 100)] * 6, (0, 6, 0), "later"),
        ([(math.nan, math.nan)] * 6, (0, 0, 6), "not decided"),
    ],
)
def test_which_is_earlier(moments: list[tuple[float, float]], counts: tuple[int, int, int], verdict: str):
    """Oracle: read off the moments. A detector that never alarms is later than one that does, and is not left out."""
    row = summary(table(moments)).set_index("detector").loc["loss rises"]
    assert (row["monitor_first"], row["rival_first"], row["ties"]) == counts
    assert row["verdict"] == verdict
    assert row["caught"] == sum(not math.isnan(rival) for _, rival in moments)


def test_delays_of_runs_that_both_catch():
    """Oracle: by hand. Three of six runs have alarms of both; never counts as nothing there."""
    moments = [(40, 60), (50, 45), (20, 120), (20, math.nan), (math.nan, 30), (math.nan, math.nan)]
    row = summary(table(moments)).set_index("detector").loc["loss rises"]
    assert (row["both"], row["both_median"]) == (3, -20)


def test_differences_are_of_groups():
    """Oracle: by hand. Of one group the differences are 40 − 100 and 200 − 300 steps, as the rival is silent to the end
    of one run; six runs in three groups decide nothing."""
    moments = [(40, 100), (200, math.nan), (50, 50), (70, 90), (10, 20), (10, 30)]
    rows = table(moments, seeds=[0, 0, 1, 1, 2, 2])
    assert differences(rows, "loss rises").tolist() == [(-60 - 100) / 2, -10, -15]
    answer = compared(differences(rows, "loss rises"))
    assert (answer["monitor_first"], answer["verdict"], answer["median"]) == (3, "not decided", -15)
    assert answer["p"] == pytest.approx(2 * 0.5**3)


def test_interval_of_the_median():
    """Oracle: tables of the sign test (n = 10: second lowest to second highest; n = 5: none), and the share of samples
    of a skewed distribution whose interval has its median."""
    assert median_interval(np.arange(10.0)[::-1]) == (1, 8)
    assert median_interval(np.arange(5.0)) == median_interval(np.zeros(0)) == (-math.inf, math.inf)
    samples = np.random.default_rng(0).exponential(size=(2000, 12))
    intervals = np.array([median_interval(sample) for sample in samples])
    within = ((intervals[:, 0] <= math.log(2)) & (math.log(2) <= intervals[:, 1])).mean()
    assert within == pytest.approx(1 - 2 * stats.binom.cdf(2, 12, 0.5), abs=0.015)
    assert within > 0.95
