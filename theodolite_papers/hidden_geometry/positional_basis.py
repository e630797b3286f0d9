"""Tables 1 to 6, and the positional basis by layer: principal components (Figs. 1 and 24), spectrum (Fig. 3)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from theodolite import Run
from theodolite.comparison.parts import chance_overlap, overlap
from theodolite.estimates import Estimate, Estimates, Floats
from theodolite.judging import FAILS, HOLDS, Verdict, untestable
from theodolite.measure.position import CUTOFFS
from theodolite.measure.uncertainty import half_sample_error
from theodolite.report import published
from theodolite.report.data import (
    OF_GROUPS,
    column,
    error_of,
    layer_average,
    layer_estimates,
    layer_numbers,
    mean_over_layers,
    need,
    value_of,
)
from theodolite.report.drawing import geometry
from theodolite.system.wording import MISSING, number, percent, visible, with_error
from theodolite_papers import drawing
from theodolite_papers.experiment import Outcome, Study, by_layer, declared
from theodolite_papers.hidden_geometry import layer_columns
from theodolite_papers.hidden_geometry.layer_columns import GroupedBasis, by_halves, errors_of, grouped_basis

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
    layer_columns.judge_low_rank(outcome, study, every=False)
    layer_columns.judge_significant(outcome, study)
    _separation(outcome, run)
    outcome.judge("incoherent", layer_columns.mean_over_random(study), layers=len(run.layers))
    outcome.draw("table1", drawing.averages(rows, list(QUANTITIES)))


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
    shared, chance = overlap(first, second).value.numpy(), chance_overlap(first)
    outcome.read(
        "overlap of the leading positional directions, as many as the rank",
        f"{percent(float(np.nanmean(shared)))} (random directions: {percent(chance)})",
    )
    judge_robustness(outcome, study, second)
    layers = layer_numbers(first)
    here, other = (layer_columns.columns_with_errors(run, ("rank", "low_frequency_10")) for run in runs)
    other = other.drop(columns="layer").add_prefix("other_").assign(overlap=shared)
    outcome.tables["robustness"] = here.join(other)
    for column_name, y in (("rank", "dimensions"), ("low_frequency_10", "share of energy")):
        of_runs = ((value_of(run, column_name), error_of(run, column_name)) for run in runs)
        curves = dict(zip(names, of_runs, strict=True))
        axis = None if column_name == "rank" else drawing.SHARE
        outcome.draw(column_name.replace("_", "-"), drawing.over_layers(layers, curves, y, axis))
    if second is not first:
        outcome.runs["other"] = second.provenance


def judge_robustness(outcome: Outcome, study: Study, second: Run) -> None:
    """Judge whether rank and smoothness are the same on the second text."""
    first = study.run
    if first is second:
        for claim in ("rank", "smooth"):
            outcome.cannot_judge(claim, "the run itself is on random tokens: pass another text with --other")
        return
    missing = [int(np.isnan(layer_columns.found_ranks(run)).sum()) for run in (first, second)]
    if why := layer_columns.no_room(first):
        outcome.cannot_judge("rank", why)
    elif any(missing):
        why = f"no rank found in {missing[0]} layers here and {missing[1]} on the other text, of {len(first.layers)}"
        outcome.cannot_judge("rank", why)
    else:
        here, other = (layer_average(run, "rank")[0] for run in (first, second))
        change = replace(here, value=other.value - here.value, error=math.hypot(here.error, other.error))
        outcome.judge("rank", change, here=here.value, other=other.value)
    outcome.verdicts.append(layer_columns.smooth_verdict(outcome, study, second))


def _concentrated(outcome: Outcome, study: Study, key: str, name: str) -> Verdict:
    """Judge how far a matrix of Table 3 is from positions in random order: over layers, or over heads as if drawn."""
    run, claim = study.run, outcome.sentence(key, matrix=name)
    prefix, over, _ = ROWS_OF_TABLE_3[name]
    lowest, constant = (column(getattr(run, over), f"{prefix}low_frequency_{k}") for k in (10, 1))
    if lowest is None or constant is None:
        return untestable(claim, f"missing in this run: survey again for the low-frequency shares of {name}")
    share = float(np.nanmean(lowest))
    if why := layer_columns.few_positions(run):
        return untestable(claim, f"share of energy at K = 10: {share:.3f}, but {why}")
    positions = need(run, "positional_basis").shape[1] - 1
    if over == "layers":
        errors = error_of(run, f"{prefix}low_frequency_10"), error_of(run, f"{prefix}low_frequency_1")
        mean, _, error = mean_over_layers(
            *layer_columns.beyond_random_order(lowest, constant, positions, errors)
        )
        estimate = Estimate(mean, error, *OF_GROUPS)
    else:
        of_heads, _ = layer_columns.beyond_random_order(lowest, constant, positions)
        estimate = Estimate.mean(of_heads[np.isfinite(of_heads)], "heads")
    verdict = outcome.verdict(key, estimate, matrix=name, share=share, over=over)
    # The QK matrix is of single contexts: no mean of them has noise.
    if name == "QK matrix" or (over == "heads" and study.model is None):
        return verdict

    def without_noise(basis: layer_columns.GroupedBasis) -> float:
        if over == "layers":
            shares = layer_columns.gram_shares(basis, (1, 10))
        else:
            shares = layer_columns.product_shares(basis, study.require_model(), (1, 10))
        beyond, _ = layer_columns.beyond_random_order(shares[:, 1], shares[:, 0], positions)
        # What noise hides could be the other way.
        return float(np.nan_to_num(beyond, nan=float(verdict.answer == FAILS)).mean())

    return layer_columns.unless_noise(study, run, verdict, outcome.criterion(key), without_noise)


@declared("geometry/table3")
def table_3(study: Study, outcome: Outcome) -> None:
    run = study.run
    smooth = _concentrated(outcome, study, "concentrated", "PPᵀ")
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
        inherited = _concentrated(outcome, study, "inherited", name)
        if smooth.answer != HOLDS:
            why = f"no smoothness of PPᵀ is known that could be inherited ({inherited.evidence})"
            inherited = untestable(inherited.claim, why)
        outcome.verdicts.append(inherited)
    outcome.tables["shares"] = pd.DataFrame(rows)
    drawn = drawing.shares_by_cutoff(
        shares_here, {name: paper for name, (*_, paper) in ROWS_OF_TABLE_3.items()}
    )
    outcome.draw("table3", drawn)


NOISY = 0.5
"""Share of sampling noise in a curve from which on it is not judged."""


def _beside_published(
    outcome: Outcome, run: Run, name: str, title: str, rows: published.Rows, place: str, *, log: bool = False
) -> None:
    """Show a layer column beside a published table: the means, all rows as a table, and the figure."""
    values, errors = value_of(run, name), error_of(run, name)
    model = published.closest(run)
    printed = ", ".join(
        f"{_bracketed(*mean_over_layers(row)[:2])} on {text}"
        for text, row in zip(published.TEXTS, rows[model], strict=True)
    )
    here = _bracketed(*mean_over_layers(values)[:2])
    outcome.read(f"{title}, mean (sd) over layers", here, f"{model}: {printed}")
    outcome.tables["this_run"] = layer_columns.columns_with_errors(run, [name])
    outcome.tables["published"] = pd.DataFrame(
        [
            {"model": model, "text": text} | {f"layer {layer}": value for layer, value in enumerate(row)}
            for model in published.MODELS
            for text, row in zip(published.TEXTS, rows[model], strict=True)
        ]
    )
    drawn = drawing.against_published(run, name, rows, title, errors, log=log)
    title = title[0].upper() + title[1:]
    outcome.draw(name.replace("_", "-"), drawn, "published", title=title, place=place)


@declared("geometry/table4")
def rank(study: Study, outcome: Outcome) -> None:
    _beside_published(outcome, study.run, "rank", "ScreeNOT rank", published.RANK, "Table 4")
    layer_columns.judge_low_rank(outcome, study, every=True)


@declared("geometry/table5")
def stable_rank(study: Study, outcome: Outcome) -> None:
    run, first = study.run, 1
    _beside_published(outcome, run, "stable_rank", "stable rank", published.STABLE_RANK, "Table 5", log=True)
    values = value_of(run, "stable_rank")[first:]
    if not np.isfinite(values).any():
        outcome.cannot_judge("stable-rank", "this run has no stable_rank")
        return
    worst = int(np.nanargmax(values))
    highest = layer_estimates(run, "stable_rank").at(first + worst)
    outcome.judge("stable-rank", highest, layers=len(values), worst=worst + first)


@declared("geometry/table6")
def relative_norm(study: Study, outcome: Outcome) -> None:
    _beside_published(
        outcome, study.run, "relative_norm", "relative norm", published.RELATIVE_NORM, "Table 6"
    )
    layer_columns.judge_significant(outcome, study)


def roughness(basis: Tensor) -> Floats:
    """Compute von Neumann's ratio of (N, n, d): 1 for positions in random order, near 0 on a curve."""
    centred = basis - basis.mean(1, keepdim=True)
    steps = basis.diff(dim=1).square().sum((1, 2)) / (basis.shape[1] - 1)
    spread = centred.square().sum((1, 2)) / basis.shape[1]
    return (steps / (2 * spread) * (basis.shape[1] - 1) / basis.shape[1]).numpy()


def turns(plane: Tensor) -> Floats:
    """Count the turns about its own centre, net, that a curve makes in its plane: (N, n, 2) → (N)."""
    centred = plane - plane.mean(1, keepdim=True)
    angle = torch.atan2(centred[..., 1], centred[..., 0])
    step = torch.remainder(angle.diff(dim=1) + math.pi, 2 * math.pi) - math.pi
    return (step.sum(1).abs() / (2 * math.pi)).numpy()


def shape_of(run: Run) -> pd.DataFrame:
    """Measure the shape of every layer: scale, share of energy in two directions, and the curve on these two.

    `sampling_noise`: share of the curve's variance that C contexts have by chance, at most. `smooth_roughness`: without
    it; NaN where it is half of the variance or more.
    """
    basis = torch.from_numpy(need(run, "positional_basis")[:, 1:]).double()
    plane = torch.from_numpy(need(run, "positional_pca")[:, 1:, :2]).double()
    return _shape(basis, plane, _noise_variance(run), NOISY)


def shape_errors(run: Run, basis: GroupedBasis | None) -> pd.DataFrame:
    """Compute the standard errors of the columns of `shape_of`; NaN without a basis by group."""
    noise = 2 * _noise_variance(run)  # of half of the contexts

    def numbers(half: Tensor) -> Floats:
        squares, directions = torch.linalg.eigh(half @ half.mT)
        plane = directions[..., -2:] * squares[:, None, -2:].clamp_min(0).sqrt()
        return np.asarray(_shape(half, plane, noise, noisy=1.0).to_numpy(dtype=np.float64))

    like = shape_of(run)
    return pd.DataFrame(errors_of(basis, numbers, like), columns=like.columns)


def _noise_variance(run: Run) -> Floats:
    """Compute the variance of the mean over the run's contexts, in the plane of the curve, by layer."""
    cvec = torch.from_numpy(need(run, "cvec_pca")[:, :, :2]).double()
    return (cvec.var(1).sum(-1) / run.provenance["corpus"]["contexts"]).numpy()


def _shape(basis: Tensor, plane: Tensor, noise_variance: Floats, noisy: float) -> pd.DataFrame:
    """Measure the shape from a basis (layers, positions, d) and its curve (layers, positions, 2)."""
    noise = noise_variance / plane.var(1).sum(-1).numpy()
    rough = roughness(plane)
    within = np.where(noise < noisy, noise, np.nan)
    return pd.DataFrame(
        {
            "layer": range(len(basis)),
            "scale": (torch.linalg.matrix_norm(basis, 2) / basis.shape[1] ** 0.5).numpy(),
            "share_of_two_directions": (plane.square().sum((1, 2)) / basis.square().sum((1, 2))).numpy(),
            "roughness": rough,
            "sampling_noise": noise,
            "smooth_roughness": np.clip((rough - within) / (1 - within), 0, None),
            "turns": turns(plane),
        }
    )


def _principal_components(outcome: Outcome, study: Study, run: Run, place: str) -> None:
    shape, errors = shape_of(run), shape_errors(run, grouped_basis(study, run))

    def estimates(name: str, where: Floats | bool = True) -> Estimates:
        return Estimates(np.where(where, shape[name], np.nan), errors[name].to_numpy(), *OF_GROUPS)

    rough = estimates("smooth_roughness")
    outcome.judge("continuous", rough, place=place)
    outcome.judge("low-dimensional", estimates("share_of_two_directions"), place=place)
    continuous, _ = outcome.criterion("continuous").decided(rough.values, rough.shared_margins)
    if continuous.any():
        outcome.judge("spiral", estimates("turns", continuous), place=place)
    else:
        why = f"of {len(shape)} layers none has a curve that is known to be continuous"
        outcome.cannot_judge("spiral", why, place=place)
    means = {name: _bracketed(*mean_over_layers(shape[name].to_numpy())[:2]) for name in shape.columns[2:]}
    outcome.read("share of energy in two directions, mean (sd)", means["share_of_two_directions"])
    roughness_of = "roughness of the curve on these two (random order: 1)"
    outcome.read(roughness_of, means["smooth_roughness"], "“continuous”")
    outcome.read("turns about the centre", means["turns"], "“often spiral”")
    outcome.tables["shape"] = shape.join(errors.drop(columns="layer").add_suffix("_se"))
    drawn = by_layer(len(shape), lambda layer: geometry.spiral(run, layer), grid=True)
    outcome.draw("principal-components", drawn, place=place)
    outcome.draw("waves", by_layer(len(shape), lambda layer: geometry.waves(run, layer)))


@declared("geometry/figure1")
def principal_components(study: Study, outcome: Outcome) -> None:
    _principal_components(outcome, study, study.run, "Fig. 1")
    outcome.judge("growing", scale_growth(grouped_basis(study)))


def scale_growth(basis: GroupedBasis | None) -> Estimate:
    """Compute the largest scale over layer 0's: of each balanced half, at the layer that its complement chooses."""
    if basis is None:
        return Estimate(math.nan)
    scales = by_halves(basis, lambda p: (torch.linalg.matrix_norm(p, 2) / p.shape[1] ** 0.5).numpy())
    # Complements follow the rows of Hadamard's matrix.
    chosen = np.roll(scales, len(scales) // 2, axis=0).argmax(axis=1)
    growth = np.where(scales[:, 0] > 0, scales[np.arange(len(scales)), chosen] / scales[:, 0], np.nan)
    error = half_sample_error(torch.from_numpy(growth))
    return Estimate(float(growth.mean()), float(error), *OF_GROUPS)


@declared("geometry/figure24")
def on_random_tokens(study: Study, outcome: Outcome) -> None:
    run = study.random_run()
    _principal_components(outcome, study, run, "Fig. 24, on random tokens")
    outcome.verdicts.append(layer_columns.smooth_verdict(outcome, study, run))
    if run is not study.run:
        outcome.runs["random"] = run.provenance


@declared("geometry/figure3")
def spectrum(study: Study, outcome: Outcome) -> None:
    run = study.run
    ranks = np.nan_to_num(value_of(run, "rank")).astype(int)
    energy, found = layer_columns.energy_within_rank(run), layer_columns.found_ranks(run)
    errors = errors_of(grouped_basis(study), lambda p: layer_columns.energy_within(p, found), energy)
    table = pd.DataFrame({"layer": range(len(ranks)), "rank": ranks, "energy_within_rank": energy})
    singular_values = need(run, "singular_values")
    for index in range(singular_values.shape[1]):
        table[f"singular_value_{index + 1}"] = singular_values[:, index]
    outcome.tables["spectrum"] = table
    smooth, _ = layer_average(run, "low_frequency_10")
    outcome.read("share of energy within the rank", percent(mean_over_layers(energy)[0]))
    energy_here = with_error(smooth.value, smooth.error)
    outcome.read("energy of the 10 × 10 lowest frequencies", energy_here, "GPT-2: 99.7 %")
    few = Estimates(energy, errors, *OF_GROUPS)
    outcome.judge("few-values", few, lowest=number(ranks.min()), highest=number(ranks.max()))
    outcome.verdicts.append(layer_columns.smooth_verdict(outcome, study, run))
    outcome.draw("singular-values", geometry.singular_values(run))
    outcome.draw("frequencies", by_layer(len(ranks), lambda layer: geometry.dct(run, layer)))


def _bracketed(mean: float, deviation: float) -> str:
    """Write mean and standard deviation over layers as in Table 1: `11.4 (1.86)`."""
    return f"{number(mean)} ({number(deviation)})" if math.isfinite(mean) else number(mean)
