"""Tables 1 to 3: averages over layers, robustness on another text, and the smoothness that the QK matrix inherits."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from theodolite import Run
from theodolite.comparison.parts import overlap
from theodolite.estimates import Estimate
from theodolite.judging import FAILS, HOLDS, Verdict, judge, untestable
from theodolite.measure.geometry import CUTOFFS
from theodolite.report import published
from theodolite.report.data import (
    OF_GROUPS,
    column,
    error_of,
    layer_average,
    layer_numbers,
    mean_over_layers,
    need,
    value_of,
)
from theodolite.system.wording import MISSING, number, percent, visible, with_error
from theodolite_papers import drawing
from theodolite_papers.experiment import Outcome, Study, declared
from theodolite_papers.hidden_geometry import criteria, layer_columns, resampling

# Quantity of Table 1 → (column of the layers table, field of a published row).
QUANTITIES = {
    "rank estimate": ("rank", "rank"),
    "relative norm": ("relative_norm", "relative_norm"),
    "inter-cluster similarity": ("similarity_between", "between"),
    "intra-cluster similarity": ("similarity_within", "within"),
    "incoherence": ("incoherence_mean", "incoherence"),
}
ROWS_OF_TABLE_3 = {
    "PPᵀ": ("pp_", "layers", published.LOW_FREQUENCY),
    "PWPᵀ": ("pwp_", "heads", published.LOW_FREQUENCY_PWP),
    "QK matrix": ("qk_", "heads", published.LOW_FREQUENCY_QK),
}


@declared("geometry/table1")
def table_1(study: Study, outcome: Outcome) -> None:
    run, model = study.run, published.closest(study.run)
    this_run, errors = {}, {}
    for quantity, (name, field) in QUANTITIES.items():
        mean, deviation = layer_average(run, name)
        errors[f"{quantity} se"] = mean.error
        here, paper = MISSING, getattr(published.AVERAGES[model], field)
        if math.isfinite(mean.value):
            this_run[quantity] = (mean.value, deviation)
            here = f"{with_error(mean.value, mean.error)} ({number(deviation)})"
        decimals = 3 if field == "incoherence" else 2  # as printed
        printed = f"{model}: {paper[0]:.{decimals}f} ({paper[1]:.2f})"
        outcome.read(f"{quantity}, mean (sd) over layers", here, printed)
    rows = {"this run": this_run}
    for row in published.TABLE_1:
        cells = {quantity: getattr(row, field) for quantity, (_, field) in QUANTITIES.items()}
        rows[f"{row.model} · {row.text}"] = {q: cell for q, cell in cells.items() if math.isfinite(cell[0])}
    table = pd.DataFrame({"row": list(rows)})
    for quantity in QUANTITIES:
        pairs = np.array([row.get(quantity, (math.nan, math.nan)) for row in rows.values()])
        table[quantity], table[f"{quantity} sd"] = pairs.T
    outcome.tables["averages"] = table.join(pd.DataFrame([errors]))
    low_rank = "The positional basis is a low-rank component (Table 1)"
    significant = "The positional basis is a significant component (Table 1, section 3.1)"
    outcome.verdicts.append(layer_columns.low_rank_verdict(study, low_rank, every=False))
    outcome.verdicts.append(layer_columns.significant_verdict(study, significant))
    _separation(outcome, run)
    outcome.judge("incoherent", layer_columns.mean_over_random(study), layers=len(run.layers))
    drawn = drawing.averages(rows, list(QUANTITIES))
    outcome.draw("table1", drawn)


def _separation(outcome: Outcome, run: Run) -> None:
    within, between = (layer_average(run, f"similarity_{name}")[0] for name in ("within", "between"))
    if not math.isfinite(within.value * between.value):
        outcome.cannot_judge("separated", "the text has no labels, or no two contexts with the same one")
        return
    numbers = np.array([within.value, within.error, between.value, between.error])
    ratio, error = map(float, layer_columns.quotient(*numbers))
    estimate = Estimate(ratio, error, within.n, within.of)
    means = {"within": within.value, "between": between.value, "layers": len(run.layers)}
    outcome.judge("separated", estimate, **means)


@declared("geometry/table2")
def table_2(study: Study, outcome: Outcome) -> None:
    first, second = runs = study.run, study.other_run()
    names = [visible(Path(run.provenance["corpus"]["name"]).name, 60) for run in runs]
    if names[0] == names[1]:
        names[1] += " (second text)"
    model = published.closest(first)
    paper = next((row for row in published.TABLE_2 if row.model == model), published.TABLE_2[1])
    printed = (
        (f"{paper.model}: {paper.trained_rank:g}", percent(published.LOW_FREQUENCY[10]) + " (GPT-2)"),
        (f"{paper.model} on {paper.text}: {paper.rank[0]:g}", percent(paper.low_frequency)),
    )
    for run, name, (rank_printed, share_printed) in zip(runs, names, printed, strict=True):
        mean, _ = layer_average(run, "rank")
        outcome.read(f"mean rank on {name}", with_error(mean.value, mean.error), rank_printed)
        share, _ = layer_average(run, "low_frequency_10")
        outcome.read(f"share of energy at K = 10 on {name}", percent(share.value), share_printed)
    shared, chance = overlap(first, second)
    outcome.read(
        "overlap of the leading positional directions, as many as the rank",
        f"{percent(float(np.nanmean(shared)))} (random directions: {percent(chance)})",
    )
    robust_verdicts(outcome, study, second)
    layers = layer_numbers(first)
    here, other = (layer_columns.columns_with_errors(run, ("rank", "low_frequency_10")) for run in runs)
    other = other.drop(columns="layer").add_prefix("other_").assign(overlap=shared)
    outcome.tables["robustness"] = here.join(other)
    for column_name, y in (("rank", "dimensions"), ("low_frequency_10", "share of energy")):
        of_runs = ((value_of(run, column_name), error_of(run, column_name)) for run in runs)
        curves = dict(zip(names, of_runs, strict=True))
        drawn = drawing.two_texts(layers, curves, y, share=column_name != "rank")
        outcome.draw(column_name.replace("_", "-"), drawn)
    if second is not first:
        outcome.runs["other"] = second.provenance


def robust_verdicts(outcome: Outcome, study: Study, second: Run) -> None:
    """Judge whether rank and smoothness are the same on the second text."""
    first = study.run
    claim = "The positional basis keeps its low rank on text unlike the training data (Table 2, section 4.1)"
    if first is second:
        outcome.cannot_test(claim, "the run itself is on random tokens: pass another text with --other")
        return
    missing = [int(np.isnan(layer_columns.found_ranks(run)).sum()) for run in (first, second)]
    if why := layer_columns.no_room(first):
        outcome.cannot_test(claim, why)
    elif any(missing):
        why = f"no rank found in {missing[0]} layers here and {missing[1]} on the other text, of {len(first.layers)}"
        outcome.cannot_test(claim, why)
    else:
        here, other = (layer_average(run, "rank")[0] for run in (first, second))
        what = f"mean rank {here.value:.3g} here, {other.value:.3g} on the other text; change"
        change = replace(here, value=other.value - here.value, error=math.hypot(here.error, other.error))
        outcome.claim(claim, what, change, criteria.RANK_CHANGE)
    smooth = "The positional basis stays smooth on text unlike the training data (Table 2, section 4.1)"
    outcome.verdicts.append(layer_columns.smooth_verdict(study, second, smooth))


def _concentrated(study: Study, name: str, claim: str) -> Verdict:
    """Judge how far a matrix of Table 3 is from positions in random order: over layers, or over heads as if drawn."""
    run = study.run
    prefix, over, _ = ROWS_OF_TABLE_3[name]
    lowest, constant = (column(getattr(run, over), f"{prefix}low_frequency_{k}") for k in (10, 1))
    if lowest is None or constant is None:
        return untestable(claim, f"missing in this run: survey again for the low-frequency shares of {name}")
    if why := layer_columns.few_positions(run):
        return untestable(claim, f"share of energy at K = 10: {np.nanmean(lowest):.3f}, but {why}")
    positions = need(run, "positional_basis").shape[1] - 1
    what = (
        f"share of energy at K = 10 {np.nanmean(lowest):.3f}; of the way to all from the most that positions in random "
        "order, with the same constant, have on average"
    )
    if over == "layers":
        errors = error_of(run, f"{prefix}low_frequency_10"), error_of(run, f"{prefix}low_frequency_1")
        beyond = layer_columns.beyond_random_order(lowest, constant, positions, errors)
        mean, _, error = mean_over_layers(*beyond)
        estimate = Estimate(mean, error, *OF_GROUPS)
    else:
        of_heads, _ = layer_columns.beyond_random_order(lowest, constant, positions)
        estimate = Estimate.mean(of_heads[np.isfinite(of_heads)], "heads")
    verdict = judge(claim, f"{what}, mean over {over}", estimate, criteria.MOSTLY)
    # The QK matrix is of single contexts: no mean of them has noise.
    if name == "QK matrix" or (over == "heads" and study.model is None):
        return verdict

    def without_noise(basis: resampling.GroupedBasis) -> float:
        if over == "layers":
            shares = resampling.gram_shares(basis, (1, 10))
        else:
            shares = resampling.product_shares(basis, study.require_model(), (1, 10))
        beyond, _ = layer_columns.beyond_random_order(shares[:, 1], shares[:, 0], positions)
        # What noise hides could be the other way.
        return float(np.nan_to_num(beyond, nan=float(verdict.answer == FAILS)).mean())

    return layer_columns.unless_noise(study, run, verdict, criteria.MOSTLY, without_noise)


@declared("geometry/table3")
def table_3(study: Study, outcome: Outcome) -> None:
    run = study.run
    claim = "The Gram matrix of positions is concentrated in low frequencies (section 3.2, Table 3)"
    smooth = _concentrated(study, "PPᵀ", claim)
    outcome.verdicts.append(smooth)
    shares_here, rows = {}, []
    for name, (prefix, over, paper) in ROWS_OF_TABLE_3.items():
        columns = {k: column(getattr(run, over), f"{prefix}low_frequency_{k}") for k in CUTOFFS}
        shares = {k: float(np.nanmean(values)) for k, values in columns.items() if values is not None}
        shares_here[name] = shares
        for where, of_row in (("this run", shares), ("GPT-2, Table 3", paper)):
            cells = {f"K = {k}": of_row.get(k, math.nan) for k in CUTOFFS}
            rows.append({"row": name, "where": where} | cells)
        outcome.read(
            f"{name}, K = 1, 3, 5, 10, mean over {over}",
            ", ".join(map(percent, shares.values())) or "missing in this run",
            "GPT-2: " + ", ".join(percent(paper[k]) for k in CUTOFFS),
        )
        if over == "layers":
            continue
        claim = f"{name} inherits the smoothness of the positional basis (section 4.2, Table 3)"
        inherited = _concentrated(study, name, claim)
        if smooth.answer != HOLDS:
            why = f"no smoothness of PPᵀ is known that could be inherited ({inherited.evidence})"
            inherited = untestable(claim, why)
        outcome.verdicts.append(inherited)
    outcome.tables["shares"] = pd.DataFrame(rows)
    drawn = drawing.shares_by_cutoff(
        shares_here, {name: paper for name, (*_, paper) in ROWS_OF_TABLE_3.items()}
    )
    outcome.draw("table3", drawn)
