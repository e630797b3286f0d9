"""Past the paper: how much rank OATS should have, and where. Sweeps on copies of a model, pruned in memory.

Measured on the contexts that did not calibrate: the loss beyond the dense model's, and the share of its sinks kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from theodolite.corpus.corpus import Corpus
from theodolite.judging import Criterion, Estimate
from theodolite.papers.catch_tag_release.pruned_models import (
    SPARSITY,
    dense_measures,
    halves,
    kept_sinks,
    loss_difference,
    measure_sinks,
    part_of,
    pruned,
)
from theodolite.papers.experiment import Study, experiment
from theodolite.prune.options import RankRatio
from theodolite.report.data import Floats
from theodolite.report.drawing import pruning as drawing
from theodolite.report.measures import ZHANG
from theodolite.report.outcome import Outcome
from theodolite.sinks.trace import trace_sinks
from theodolite.system.wording import counted, listed, number, percent, with_error

SPARSITIES = (0.3, 0.5, 0.6, 0.7)
RATIOS = (0.0, 0.1, 0.25, 0.5)

PROJECTIONS = "qkv"
PUBLISHED_RATIO, RAISED_RATIO = 0.25, 0.5
"""Rank ratios: the paper's, and the one of Q, K and V where the audit says that rank is needed."""

CALIBRATIONS = 3
"""Of the calibration text: every comparison of allocations is made on each."""

GAIN = Criterion("more than", 0.0, "better than the rival plan")


def _measured_pruning(
    study: Study, calibration: Corpus, sparsity: float, ratio: RankRatio
) -> dict[str, float]:
    """One pruning measured: bytes over dense ones, loss and sinks against the dense model, with standard errors."""
    model, report = pruned(study, "oats", calibration, sparsity=sparsity, rank_ratio=ratio)
    dense, measured = dense_measures(study), measure_sinks(model, halves(study)[1])
    loss, share = loss_difference(dense, measured), kept_sinks(dense, measured)
    sizes = report.table[["compact_bytes", "dense_bytes"]].sum()
    return {
        "bytes": float(sizes["compact_bytes"] / sizes["dense_bytes"]),
        "loss_more": loss[0],
        "loss_more_se": loss[1],
        "sinks_kept": share[0],
        "sinks_kept_se": share[1],
    }


def front(cost: Floats, worth: Floats) -> Floats:
    """Which points no other one beats: none costs as little or less and is worth as much or more, but itself."""
    order = np.lexsort((-worth, cost))
    best = np.maximum.accumulate(np.concatenate([[-np.inf], worth[order][:-1]]))
    flags = np.zeros(len(cost), dtype=bool)
    flags[order] = worth[order] > best
    return flags


@experiment(
    "sinks/sweep",
    "OATS at several sparsities and rank ratios: loss, sinks kept and bytes, with the Pareto front",
    "Rank ratio 0.25 throughout (appendix C.1); the sweep is ours",
    needs=("model",),
)
def sweep(study: Study, outcome: Outcome) -> None:
    calibration, _ = halves(study)
    prunings = [
        {"sparsity": sparsity, "rank_ratio": ratio} | _measured_pruning(study, calibration, sparsity, ratio)
        for sparsity in SPARSITIES
        for ratio in RATIOS
    ]
    table = outcome.tables["prunings"] = pd.DataFrame(prunings)
    cost = table["bytes"].to_numpy()
    table["front_loss"] = front(cost, -table["loss_more"].to_numpy())
    table["front_sinks"] = front(cost, table["sinks_kept"].fillna(0).to_numpy())
    for sparsity in SPARSITIES:
        rows = table[table["sparsity"] == sparsity]
        least, most = rows.loc[rows["loss_more"].idxmin()], rows.loc[rows["sinks_kept"].fillna(0).idxmax()]
        outcome.read(
            f"{percent(sparsity)} removed, {percent(rows['bytes'].mean())} of the bytes",
            f"least loss at rank ratio {number(least['rank_ratio'])} "
            f"({with_error(least['loss_more'], least['loss_more_se'])} nats more), most sinks kept at "
            f"{number(most['rank_ratio'])} ({with_error(most['sinks_kept'], most['sinks_kept_se'])})",
            "rank ratio 0.25",
        )
    outcome.figure(
        "front",
        "Loss and sinks against bytes",
        drawing.fronts(table),
        "One dot per pruning by OATS, coloured by its rank ratio; bytes as stored (values, one bit per entry, "
        "factors). The line joins those that no other beats. Bars are standard errors over contexts.",
        "the colour of the dots on the line: how much rank pays.",
        f"{ZHANG}, section 3; the sweep is ours",
        wide=True,
    )


def tagging_layers(study: Study) -> list[int]:
    """The third of the layers (at least one) whose heads tag most: caught share times η², summed over their sinks."""
    calibration, _ = halves(study)
    trace = trace_sinks(study.require_model(), calibration, show_progress=study.show)
    traces = trace.traces.fillna({"tagged": 0.0})
    by_layer = traces.groupby("layer")["tagged"].sum().sort_values(ascending=False, kind="stable")
    most = max(1, study.require_model().layers // 3)
    return sorted(int(layer) for layer in by_layer[by_layer > 0].index[:most])


def _raised(layers: list[int]) -> RankRatio:
    return lambda layer, name: RAISED_RATIO if layer in layers and name in PROJECTIONS else PUBLISHED_RATIO


@experiment(
    "sinks/allocation",
    "More rank for Q, K and V of the layers that tag, against uniform ranks and against other layers",
    "Low-rank terms preserve the mechanism (section 3); to put them where it is needed is ours",
    needs=("model",),
)
def allocation(study: Study, outcome: Outcome) -> None:
    tagging = tagging_layers(study)
    claim = "Rank goes furthest where heads tag (ours)"
    if not tagging or len(tagging) == study.require_model().layers:
        outcome.cannot_test(claim, "no layer tags, or all do: there is nothing to choose")
        return
    others = [layer for layer in range(study.require_model().layers) if layer not in tagging]
    random = np.random.default_rng(study.provenance["seed"])
    control = sorted(random.permutation(others)[: len(tagging)].tolist())
    calibration_text, _ = halves(study)
    raised = "more where heads tag"
    plans: dict[str, RankRatio] = {
        "uniform": PUBLISHED_RATIO,
        raised: _raised(tagging),
        "more elsewhere (control)": _raised(control),
    }
    prunings: list[dict[str, Any]] = []
    for part in range(CALIBRATIONS):
        calibration = part_of(calibration_text, slice(part, None, CALIBRATIONS))
        prunings += [
            {"plan": name, "part": part} | _measured_pruning(study, calibration, SPARSITY, ratio)
            for name, ratio in plans.items()
        ]
    table = outcome.tables["prunings"] = pd.DataFrame(prunings)
    by_plan = {name: table[table["plan"] == name] for name in plans}
    outcome.read("layers whose heads tag", listed([str(layer) for layer in tagging], 20))
    outcome.read("layers of the control", listed([str(layer) for layer in control], 20))
    for name, rows in by_plan.items():
        outcome.read(
            name,
            f"sinks kept {_level(rows, 'sinks_kept')}, loss {_level(rows, 'loss_more')} nats more, bytes "
            f"{number(float(rows['bytes'].mean()))} of the dense",
        )
    for rival in plans:
        if rival == raised:
            continue
        for column, sign, what in (
            ("sinks_kept", 1, "share of sinks kept"),
            ("loss_more", -1, "loss saved, nats"),
        ):
            gains = sign * (by_plan[raised][column].to_numpy() - by_plan[rival][column].to_numpy())
            outcome.claim(
                f"{claim}: {what} against {rival}",
                f"gain, paired, over {counted(CALIBRATIONS, 'calibration')}",
                Estimate.mean(gains, "calibrations"),
                GAIN,
            )
    outcome.figure(
        "allocation",
        "Uniform ranks, and more rank in some layers' Q, K and V",
        drawing.plans(table),
        f"One dot per calibration; {percent(SPARSITY)} removed overall, rank ratio {PUBLISHED_RATIO}, "
        f"{RAISED_RATIO} where raised.",
        "dots that lie higher on the left and lower on the right than those of uniform ranks.",
        "ours",
        wide=True,
    )


def _level(rows: pd.DataFrame, name: str) -> str:
    return str(Estimate.mean(rows[name].to_numpy(np.float64), "calibrations"))
