"""Tables 1 to 6, and the positional basis by layer: principal components (Figs. 1 and 24), spectrum (Fig. 3)."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float64
from torch import Tensor

from theodolite import Run
from theodolite.comparison.parts import chance_overlap, overlap
from theodolite.estimates import Estimate, Floats
from theodolite.judging import HOLDS, Verdict, untestable
from theodolite.measure.position import CUTOFFS
from theodolite.report import data, style
from theodolite.report.data import error_of, layer_average, layer_estimates, need, value_of
from theodolite.report.drawing.grammar import HEADROOM, Panel, dots, line, panels
from theodolite.report.drawing.layers import spiral
from theodolite.system.wording import MISSING, for_plotly, number, percent, visible, with_error
from theodolite.theory.unbiased import Jackknifed, combined, largest_square, leaving_out, stacked, together
from theodolite_papers import drawing
from theodolite_papers.drawing import Line
from theodolite_papers.experiment import Outcome, Study, by_layer, declared
from theodolite_papers.hidden_geometry import layer_columns, published
from theodolite_papers.hidden_geometry.layer_columns import Basis, estimates_of, judge_seen, mean_of, shown
from theodolite_papers.hidden_geometry.smoothness import pictures, singular_values

# Quantity of Table 1 → (column of the layers table, field of a published row).
QUANTITIES = {
    "rank estimate": ("rank_screenot", "rank"),
    "relative norm": ("relative_norm", "relative_norm"),
    "inter-cluster similarity": ("similarity_between", "between"),
    "intra-cluster similarity": ("similarity_within", "within"),
    "incoherence": ("incoherence_mean", "incoherence"),
}
PAPER = dict(zip(published.MODELS, (style.BLUE, style.ORANGE, style.GREEN, style.PURPLE), strict=True))
DASHES = dict(zip(published.TEXTS, ("dot", "solid", "dash"), strict=True))
WAVE_POSITIONS = 160
CURVES = 13
PANEL_ROW = 26  # pixels a row
NARROW = 16  # characters in a line of an axis title
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
    rows = published.TABLE_1
    table = pd.DataFrame({"row": ["this run", *(f"{row.model} · {row.text}" for row in rows)]})
    for quantity, (_, field) in QUANTITIES.items():
        pairs = [this_run.get(quantity, (math.nan, math.nan)), *(getattr(row, field) for row in rows)]
        table[quantity], table[f"{quantity} sd"] = np.array(pairs).T
    outcome.tables["averages"] = table.join(pd.DataFrame([errors]))
    layer_columns.judge_low_rank(outcome, study, every=False)
    layer_columns.judge_significant(outcome, run)
    labels = need(run, "context_label")
    labels = labels[labels >= 0]
    if len(labels) > len(np.unique(labels)) > 1:
        separated = estimates_of(layer_columns.between_over_within(run))
        levels = {name: layer_average(run, f"similarity_{name}")[0].value for name in ("within", "between")}
        judge_seen(outcome, "separated", mean_of(separated), separated.values, **levels)
    else:
        outcome.cannot_judge("separated", "the text has no labels, or no two contexts with the same one")
    ratio = estimates_of(layer_columns.over_random(run))
    judge_seen(outcome, "incoherent", mean_of(ratio), ratio.values)
    outcome.draw("table1", _averages(table))


def _averages(table: pd.DataFrame) -> go.Figure:
    """Draw Table 1 as dots: a panel per quantity, a line per row, a bar of one standard deviation over layers."""
    names = [for_plotly(name) for name in table["row"]]
    shown: list[Panel] = []
    colours = [style.MEASURED] + [style.REFERENCE] * (len(names) - 1)
    for quantity in QUANTITIES:
        hover = f"%{{y}}<br>{quantity}: %{{x:.4g}}<extra></extra>"
        bar = dict(style.error_bars(table[f"{quantity} sd"].to_numpy()) or {}, color=style.GREY)
        own = {"error_x": bar, "marker": {"size": 9}}
        points = dots(table[quantity], names, None, "", colours, hover, **own)
        title = "<br>".join(textwrap.wrap(quantity, NARROW))  # beside others
        axis: dict[str, Any] = {"autorange": "reversed", "type": "category"}
        axis |= {"matches": "y", "showticklabels": False, "ticks": ""} if shown else {}
        shown.append(Panel("", [points], title, "", {"rangemode": "tozero", "nticks": 4}, axis))
    height, gaps = 110 + PANEL_ROW * len(names) - HEADROOM, (0.035, 0)
    return panels(shown, len(shown), height=height, gaps=gaps, layout={"showlegend": False})


@declared("geometry/table2")
def table_2(study: Study, outcome: Outcome) -> None:
    first, second = runs = study.run, layer_columns.other_run(study)
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
        rank, share = (layer_average(run, each)[0] for each in ("rank_screenot", "low_frequency_10"))
        outcome.read(f"mean ScreeNOT rank on {name}", shown(rank), rank_printed)
        outcome.read(f"share of energy at K = 10 on {name}", shown(share), share_printed)
    shared, chance = overlap(first, second).value.numpy(), chance_overlap(first)
    overlapping = f"{percent(float(np.nanmean(shared)))} (random directions: {percent(chance)})"
    outcome.read("overlap of the leading positional directions, as many as the rank", overlapping)
    judge_robustness(outcome, study, second)
    layers = data.layer_numbers(first)
    compared = ("rank", "rank_screenot", "low_frequency_10")
    here, other = (layer_columns.columns_with_errors(run, compared) for run in runs)
    other = other.drop(columns="layer").add_prefix("other_").assign(overlap=shared)
    outcome.tables["robustness"] = here.join(other)
    for of, y, axis in (("rank", "dimensions", None), ("low_frequency_10", "share of energy", drawing.SHARE)):
        curves = {name: (value_of(run, of), error_of(run, of)) for name, run in zip(names, runs, strict=True)}
        outcome.draw(of.replace("_", "-"), drawing.over_layers(layers, curves, y, axis))
    if second is not first:
        outcome.runs["other"] = second.provenance


def judge_robustness(outcome: Outcome, study: Study, second: Run) -> None:
    """Judge whether rank and smoothness are the same on the second text."""
    first = study.run
    if first is second:
        for claim in ("rank", "smooth"):
            outcome.cannot_judge(claim, "the run itself is on random tokens: pass another text with --other")
        return
    if why := layer_columns.no_room(first):
        outcome.cannot_judge("rank", why)
    else:
        here, other = (layer_columns.found_ranks(run) for run in (first, second))
        changes = other.values - here.values
        errors, hidden = np.hypot(error_of(first, "rank"), error_of(second, "rank")), np.isnan(changes)
        means = (data.mean_over_layers(np.where(hidden, np.nan, ranks.values))[0] for ranks in (here, other))
        change = mean_of(replace(here, values=changes, errors=errors))
        judge_seen(outcome, "rank", change, changes, **dict(zip(("here", "other"), means, strict=True)))
    outcome.verdicts.append(layer_columns.smooth_verdict(outcome, second))


def _concentrated(outcome: Outcome, run: Run, key: str, name: str) -> Verdict:
    """Judge how far a matrix of Table 3 is from positions in random order: over layers, or over heads as if drawn."""
    claim, (prefix, over, _) = outcome.sentence(key, matrix=name), ROWS_OF_TABLE_3[name]
    lowest, constant = (f"{prefix}low_frequency_{k}" for k in (10, 1))
    table = getattr(run, over)
    if lowest not in table or constant not in table:
        return untestable(claim, f"missing in this run: survey again for the low-frequency shares of {name}")
    share, _, _ = data.mean_over_layers(table[lowest])
    if why := layer_columns.few_positions(run):
        return untestable(claim, f"share of energy at K = 10: {share:.3f}, but {why}")
    beyond = partial(layer_columns.beyond_random_order, positions=need(run, "positional_basis").shape[1] - 1)
    if over == "layers":
        shares = (layer_columns.jackknifed(run, each) for each in (lowest, constant))
        of_layers = estimates_of(combined(beyond, *shares))
        hidden, estimate = np.isnan(of_layers.values), mean_of(of_layers)
    else:
        of_heads = beyond(*(torch.tensor(table[each], dtype=torch.float64) for each in (lowest, constant)))
        # A head without weights to multiply has no norm of them either.
        there = table["frobenius_squared"].notna() if name == "PWPᵀ" else of_heads.isfinite()
        hidden = ~of_heads.isfinite().numpy()[there]
        known = of_heads[of_heads.isfinite()]
        estimate = Estimate.mean(known, "heads") if len(known) else Estimate(math.nan)
    verdict = outcome.verdict(key, estimate, matrix=name, share=share, over=over)
    return layer_columns.unless_hidden(verdict, hidden, over.removesuffix("s"))


@declared("geometry/table3")
def table_3(study: Study, outcome: Outcome) -> None:
    run = study.run
    smooth = _concentrated(outcome, run, "concentrated", "PPᵀ")
    outcome.verdicts.append(smooth)
    rows: list[dict[str, Any]] = []
    shown: dict[Line, Mapping[int, float]] = {}
    for (name, (prefix, over, paper)), colour in zip(ROWS_OF_TABLE_3.items(), drawing.ORDERS, strict=True):
        columns = {k: data.column(getattr(run, over), f"{prefix}low_frequency_{k}") for k in CUTOFFS}
        shares = {k: float(np.nanmean(values)) for k, values in columns.items() if values is not None}
        shown[Line(name, colour, width=2.2, marker=6)] = shares
        shown[Line(f"{name}, GPT-2 in Table 3", colour, "dot", drawing.LINE, 4)] = paper
        for where, of_row in (("this run", shares), ("GPT-2, Table 3", paper)):
            cells = {f"K = {k}": of_row.get(k, math.nan) for k in CUTOFFS}
            rows.append({"row": name, "where": where} | cells)
        here = ", ".join(map(percent, shares.values())) or "missing in this run"
        printed = "GPT-2: " + ", ".join(percent(paper[k]) for k in CUTOFFS)
        outcome.read(f"{name}, K = 1, 3, 5, 10, mean over {over}", here, printed)
        if over == "layers":
            continue
        inherited = _concentrated(outcome, run, "inherited", name)
        if smooth.answer != HOLDS:
            why = f"no smoothness of PPᵀ is known that could be inherited ({inherited.evidence})"
            inherited = untestable(inherited.claim, why)
        outcome.verdicts.append(inherited)
    outcome.tables["shares"] = pd.DataFrame(rows)
    shown = {curve: of_curve for curve, of_curve in shown.items() if of_curve}
    values = [np.array([*of_curve.values()]) for of_curve in shown.values()]
    cutoffs = [np.array([*map(str, of_curve)]) for of_curve in shown.values()]
    axes: dict[str, Any] = {"yaxis": {"range": [0, 1.05]}, "xaxis": {"type": "category"}}
    titles = "K", "share of energy"
    outcome.draw("table3", drawing.curves(cutoffs, [*shown], values, titles, height=360, **axes))


def _beside_published(
    outcome: Outcome, run: Run, name: str, title: str, rows: published.Rows, place: str, *, log: bool = False
) -> None:
    """Show a layer column beside a published table: the means, all rows as a table, and the figure."""
    values, errors, model = value_of(run, name), error_of(run, name), published.closest(run)
    every = [
        (of, text, row)
        for of in published.MODELS
        for text, row in zip(published.TEXTS, rows[of], strict=True)
    ]
    means = [f"{_mean_and_deviation(row)} on {text}" for of, text, row in every if of == model]
    printed = f"{model}: {', '.join(means)}"
    outcome.read(f"{title}, mean (sd) over layers", _mean_and_deviation(values), printed)
    outcome.tables["this_run"] = layer_columns.columns_with_errors(run, [name])
    outcome.tables["published"] = pd.DataFrame(
        {"model": of, "text": text} | {f"layer {layer}": value for layer, value in enumerate(row)}
        for of, text, row in every
    )
    layers = data.layer_numbers(run)
    drawn = drawing.over_layers(
        layers, {"this model": (values, errors)}, title, drawing.TWOS if log else None
    )
    depth = np.linspace(0, float(layers.max()), 13).round(4)  # the paper's layers, rescaled to this depth
    for of, text, row in every:
        hover = f"{of} on {text}, layer %{{customdata}}: %{{y:g}}<extra></extra>"
        own: dict[str, Any] = {"width": drawing.LINE, "dash": DASHES[text], "opacity": 0.75, "hover": hover}
        own |= {"customdata": list(range(13)), "showlegend": text == "OpenWebText"}
        drawn.add_traces(line(depth, row, of, PAPER[of], **own))
    drawn.data = (*drawn.data[1:], drawn.data[0])  # this model in front
    key, title = name.replace("_", "-"), title[0].upper() + title[1:]
    outcome.draw(key, drawn, "published", title=title, place=place)


@declared("geometry/table4")
def rank(study: Study, outcome: Outcome) -> None:
    _beside_published(outcome, study.run, "rank_screenot", "ScreeNOT rank", published.RANK, "Table 4")
    ranks = _mean_and_deviation(value_of(study.run, "rank"))
    outcome.read("directions that contexts which did not choose them show, too", ranks)
    layer_columns.judge_low_rank(outcome, study, every=True)


@declared("geometry/table5")
def stable_rank(study: Study, outcome: Outcome) -> None:
    run, first = study.run, 1
    _beside_published(outcome, run, "stable_rank", "stable rank", published.STABLE_RANK, "Table 5", log=True)
    values = value_of(run, "stable_rank")[first:]
    worst = first + int(np.where(np.isnan(values), -np.inf, values).argmax())
    judge_seen(outcome, "stable-rank", layer_estimates(run, "stable_rank").at(worst), values, worst=worst)


@declared("geometry/table6")
def relative_norm(study: Study, outcome: Outcome) -> None:
    _beside_published(
        outcome, study.run, "relative_norm", "relative norm", published.RELATIVE_NORM, "Table 6"
    )
    layer_columns.judge_significant(outcome, study.run)


def turns(plane: Float64[Tensor, "positions 2"]) -> Tensor:
    """Count the turns about its own centre, net, that a curve makes in its plane."""
    x, y = (plane - plane.mean(dim=0)).T
    step = torch.remainder(torch.atan2(y, x).diff() + math.pi, 2 * math.pi) - math.pi
    return step.sum().abs() / (2 * math.pi)


def roughness(p: Basis) -> Jackknifed:
    """Estimate von Neumann's ratio on two directions: 1 for positions in random order, near 0 on a curve.

    Mean squared step over twice the variance, n − 1 of n positions. NaN where the curve is at the noise floor.
    """
    one, other = layer_columns.leading_of_others(p, 2)
    steps, spread = ((a * b).sum(dim=(1, 2)) for a, b in ((one.diff(dim=1), other.diff(dim=1)), (one, other)))
    seen = leaving_out(lambda used: used @ spread / used.sum(), len(p)).above_noise()
    return leaving_out(lambda used: (used @ steps) / (used @ spread) / 2, len(p)).where(seen)


def shape_of(bases: list[Basis]) -> dict[str, Jackknifed]:
    """Measure the shape of every layer: scale, share of energy in two directions, and the curve on these two."""

    def of_layer(p: Basis) -> dict[str, Jackknifed]:
        rough = roughness(p)
        curves = p @ torch.linalg.svd(p.mean(dim=0), full_matrices=False).Vh[:2].T
        energy = layer_columns.energy_within(p)
        return {
            "scale": combined(lambda largest: largest / p.shape[1] ** 0.5, largest_square(p).root()),
            "share_of_two_directions": energy[1],
            "roughness": rough,
            "turns": leaving_out(
                lambda used: turns(torch.tensordot(used, curves, dims=1) / used.sum()), len(p)
            ).where(rough.value.isfinite()),
        }

    return together([of_layer(p) for p in bases])


def _principal_components(outcome: Outcome, study: Study, run: Run, place: str) -> None:
    if bases := layer_columns.bases_by_group(study, run):
        _judge_shape(outcome, shape_of(bases), place)
    else:
        for claim in ("continuous", "low-dimensional", "spiral"):
            outcome.cannot_judge(claim, layer_columns.WITHOUT_TEXT, place=place)
    drawn = by_layer(len(run.layers), lambda layer: spiral(run, layer), grid=True)
    outcome.draw("principal-components", drawn, place=place)
    outcome.draw("waves", by_layer(len(run.layers), lambda layer: waves(run, layer)))


def waves(run: Run, layer: int) -> go.Figure:
    """Draw the positional basis' first three principal components against position: waves of rising frequency."""
    basis = need(run, "positional_pca")[layer, 1:]
    rows = data.evenly(len(basis), WAVE_POSITIONS)
    lines, titles = (
        drawing.in_order([f"component {place}" for place in (1, 2, 3)]),
        ("position", "projection"),
    )
    return drawing.curves(np.array(rows) + 1, lines, list(basis[rows, :3].T), titles, height=340)


def _judge_shape(outcome: Outcome, shape: dict[str, Jackknifed], place: str) -> None:
    estimates = {name: estimates_of(numbers) for name, numbers in shape.items()}
    rough, turned = estimates["roughness"], estimates["turns"]
    for claim, name in (("continuous", "roughness"), ("low-dimensional", "share_of_two_directions")):
        judge_seen(outcome, claim, estimates[name], estimates[name].values, place=place)
    continuous, _ = outcome.criterion("continuous").decided(rough.values, rough.shared_margins)
    if continuous.any():
        of_continuous = replace(turned, values=np.where(continuous, turned.values, np.nan))
        outcome.judge("spiral", of_continuous, place=place)
    else:
        why = f"of {len(rough.values)} layers none has a curve that is known to be continuous"
        outcome.cannot_judge("spiral", why, place=place)
    means = {name: _mean_and_deviation(each.values) for name, each in estimates.items()}
    outcome.read("share of energy in two directions, mean (sd)", means["share_of_two_directions"])
    outcome.read("roughness of the curve on these two (random order: 1)", means["roughness"], "“continuous”")
    outcome.read("turns about the centre", means["turns"], "“often spiral”")
    columns = {name: each.values for name, each in estimates.items()}
    columns |= {f"{name}_se": numbers.error.numpy() for name, numbers in shape.items()}
    outcome.tables["shape"] = pd.DataFrame({"layer": range(len(rough.values))} | columns)


@declared("geometry/figure1")
def principal_components(study: Study, outcome: Outcome) -> None:
    _principal_components(outcome, study, study.run, "Fig. 1")
    if bases := layer_columns.bases_by_group(study):
        growth = scale_growth(bases)
        judge_seen(outcome, "growing", growth, np.array([growth.value]))
    else:
        outcome.cannot_judge("growing", layer_columns.WITHOUT_TEXT)


def scale_growth(bases: list[Basis]) -> Estimate:
    """Estimate the largest scale over that of layer 0; NaN where the latter is at the noise floor."""
    squares = stacked([largest_square(p) for p in bases])
    growth = combined(lambda scales: scales.max() / scales[0], squares.root()).corrected()
    seen = growth.where(squares.above_noise()[0])
    return Estimate(float(seen.value), float(seen.error), *data.OF_GROUPS)


@declared("geometry/figure24")
def on_random_tokens(study: Study, outcome: Outcome) -> None:
    run = layer_columns.random_run(study)
    _principal_components(outcome, study, run, "Fig. 24, on random tokens")
    outcome.verdicts.append(layer_columns.smooth_verdict(outcome, run))
    if run is not study.run:
        outcome.runs["random"] = run.provenance


@declared("geometry/figure3")
def spectrum(study: Study, outcome: Outcome) -> None:
    run = study.run
    ranks, energy = value_of(run, "rank"), layer_columns.energy_within_rank(study)
    table = pd.DataFrame({"layer": range(len(ranks)), "rank": ranks})
    if energy is None:
        outcome.cannot_judge("few-values", layer_columns.WITHOUT_TEXT)
    else:
        table = table.assign(energy_within_rank=energy.values, energy_within_rank_se=energy.errors)
        outcome.read("share of energy within the rank", percent(mean_of(energy).value))
        lowest, highest = (number(of(ranks[ranks > 0], default=0)) for of in (min, max))
        judge_seen(outcome, "few-values", energy, energy.values, lowest=lowest, highest=highest)
    singular = need(run, "singular_values")
    for index in range(singular.shape[1]):
        table[f"singular_value_{index + 1}"] = singular[:, index]
    outcome.tables["spectrum"] = table
    smooth, _ = layer_average(run, "low_frequency_10")
    outcome.read("energy of the 10 × 10 lowest frequencies", shown(smooth), "GPT-2: 99.7 %")
    outcome.verdicts.append(layer_columns.smooth_verdict(outcome, run))
    screenot = data.column(run.layers, "rank_screenot")
    outcome.draw("singular-values", singular_values(singular, ranks=screenot, most=CURVES))
    _, frequencies = pictures(torch.from_numpy(need(run, "positional_basis")[:, 1:]).double())
    outcome.draw("frequencies", by_layer(len(ranks), frequencies))


def _mean_and_deviation(values: Sequence[float] | Floats) -> str:
    """Write mean and standard deviation over layers as in Table 1: `11.4 (1.86)`."""
    mean, deviation, _ = data.mean_over_layers(values)
    return f"{number(mean)} ({number(deviation)})" if math.isfinite(mean) else number(mean)
