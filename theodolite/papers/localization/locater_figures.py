"""Figures 6 to 12 of Bao et al. 2024: language models trained with LocAteR, read from the folder of a grid.

No model is opened and nothing is surveyed. The numbers come from `paired_effects`; what is claimed is judged here, by
differences paired by seed with their confidence intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from theodolite.errors import UsageError
from theodolite.judging import Criterion, Estimate, Verdict, judge
from theodolite.papers.experiment import Experiment, Study, experiment, of_trainings
from theodolite.papers.localization.locater_grid import GridRun, read_grid
from theodolite.papers.localization.locater_training import Setting
from theodolite.papers.paired_effects import (
    Comparable,
    by_setting,
    comparable,
    difference,
    label_of,
    profile,
    rank_correlation_by_seed,
    without_seed,
)
from theodolite.report.data import Floats
from theodolite.report.drawing import locater as drawing
from theodolite.report.drawing.locater import Panel
from theodolite.report.exhibit import Exhibit, by_name
from theodolite.report.measures import BAO
from theodolite.report.outcome import Outcome, Reading
from theodolite.system.wording import counted, number

FIGURES = {6: (1, 128), 8: (1, 32), 9: (3, 32), 10: (6, 32), 11: (3, 128), 12: (6, 128)}
"""Number of the published figure → layers and width."""

COMMAND = "theodolite train locater"
"""Writes the grid."""

NEGLIGIBLE = 0.01
"""Relative difference (and difference in ρ) below which there is no effect to speak of: ours; the paper has curves."""
RISES = Criterion("more than", 0.0, "ours", NEGLIGIBLE)
FALLS = Criterion("less than", 0.0, "ours", NEGLIGIBLE)

CLAIMS = (
    ("the eigenspectrum scale shrinks", "frobenius_squared", -1, True),
    ("the attention entropy increases", "entropy", 1, True),
    ("the perplexity improves", "final_loss", -1, False),
    ("the lowest perplexity improves", "lowest_loss", -1, False),
)
"""Of every caption: words, measure, sign of the claimed difference, whether it is taken between logarithms."""


def judge_effect(claim: str, what: str, effect: Estimate, sign: int, more: str = "") -> Verdict:
    """Judge a difference that the claim says is positive (`sign` 1) or negative (−1)."""
    verdict = judge(claim, what, effect, RISES if sign > 0 else FALLS)
    return replace(verdict, evidence=f"{verdict.evidence}{more}")


def captions(data: Comparable, settings: Sequence[Setting], how: str = "") -> list[Verdict]:
    """The claims of every caption: the strongest κ₂ against the weakest, and how all of them rank."""
    if len(settings) < 2:
        return []
    weakest, strongest = settings[0], settings[-1]
    verdicts = []
    for words, name, sign, relative in CLAIMS:
        effect = difference(data.rows, strongest, weakest, name, relative=relative)
        rank = rank_correlation_by_seed(data.rows, settings, name)
        verdicts.append(
            judge_effect(
                f"With stronger κ₂ {words}{how}",
                f"difference of logarithms, {label_of(strongest)} against {label_of(weakest)}, step {data.step}",
                effect,
                sign,
                f", rank correlation with κ₂ {rank}",
            )
        )
    return verdicts


def against_others(data: Comparable) -> list[Verdict]:
    """LocAteR against none, and the best of its settings against the best plain weight decay."""
    verdicts = []
    if data.exact and data.plain is not None:
        for words, name, sign, relative in CLAIMS[1:]:
            effect = difference(data.rows, data.exact[-1], data.plain, name, relative=relative)
            pair = f"{label_of(data.exact[-1])} against {label_of(data.plain)}"
            what = f"difference of logarithms, {pair}, step {data.step}"
            verdicts.append(
                judge_effect(f"With LocAteR {words} (“eventually”, section 7)", what, effect, sign)
            )
    if data.exact and len(data.decays) > 1:
        means = data.rows.groupby("setting", sort=False)["lowest_loss"].mean()
        best, rival = (min(group, key=lambda s: means[s]) for group in (data.exact, data.decays))
        effect = difference(data.rows, best, rival, "lowest_loss", relative=False)
        verdicts.append(
            judge_effect(
                "LocAteR does better than equally tuned weight decay (ours)",
                f"difference of the lowest losses, {label_of(best)} (best of {len(data.exact)}) against "
                f"{label_of(rival)} (best of {len(data.decays)}), both chosen on the same held-out text",
                effect,
                -1,
            )
        )
    return verdicts


def linked(data: Comparable) -> list[Verdict]:
    """Section 7's explanation: smaller scale, higher entropy, lower perplexity, over LocAteR settings and none."""
    settings = [*data.exact, *([data.plain] if data.plain else [])]
    if len(settings) < 3:
        return []
    pairs = (
        ("A smaller eigenspectrum scale goes with higher attention entropy", "entropy", "frobenius_squared"),
        ("Higher attention entropy goes with lower perplexity", "final_loss", "entropy"),
    )
    return [
        judge_effect(
            f"{claim} (section 7)",
            f"rank correlation over {len(settings)} settings, step {data.step}",
            rank_correlation_by_seed(data.rows, settings, name, against),
            -1,
        )
        for claim, name, against in pairs
    ]


def stripes(data: Comparable) -> list[Verdict]:
    """Section 7 on Fig. 7: ρ differs over positions with LocAteR, and hardly without."""
    if not data.exact or data.plain is None:
        return []
    effect = difference(data.rows, data.exact[-1], data.plain, "stripes", relative=False)
    stripes = data.rows.groupby("setting", sort=False)["stripes"]
    levels = ", ".join(
        f"{label_of(setting)} {Estimate.mean(stripes.get_group(setting).to_numpy(), 'seeds')}"
        for setting in (data.exact[-1], data.plain)
    )
    what = f"standard deviation over positions of ρ averaged over steps, difference to step {data.step}"
    claim = "LocAteR entails salient stripes of ρ, and without LocAteR there are none (section 7)"
    return [judge_effect(claim, what, effect, 1, f" ({levels})")]


def _lines(
    data: Comparable, settings: Sequence[Setting], table: str, name: str
) -> tuple[list[Floats], list[Any]]:
    """Steps of each setting, and its mean, lowest and highest value over seeds; perplexities for losses."""
    steps, lines = [], []
    for setting in settings:
        columns = []
        for run in (p for p in data.runs if without_seed(p.setting) == setting):
            frame = run.losses if table == "losses" else run.heads[run.heads["layer"] == 0]
            columns.append(frame.set_index("step")[name])
        values = pd.concat(columns, axis=1, join="inner").to_numpy(dtype=np.float64)
        if table == "losses":
            values = np.exp(values)
        steps.append(columns[0].index.to_numpy(dtype=np.float64)[: len(values)])
        lines.append((values.mean(axis=1), values.min(axis=1), values.max(axis=1)))
    return steps, lines


def _curves(data: Comparable, settings: Sequence[Setting], key: str, title: str) -> Exhibit:
    shown = []
    steps: list[Floats] = []
    for name, table, heading, logarithmic in (
        ("trace", "heads", "tr W_QK", False),
        ("frobenius_squared", "heads", "spectrum scale tr(W_QKᵀW_QK)", True),
        ("entropy", "heads", "attention entropy, nats", False),
        ("held_out_loss", "losses", "held-out perplexity", True),
    ):
        steps, lines = _lines(data, settings, table, name)
        shown.append(Panel(heading, lines, logarithmic))
    lowest = min(float(low.min()) for _, low, _ in shown[-1].lines)
    highest = max(float(high[len(high) // 2 :].max()) for *_, high in shown[-1].lines)
    window = (math.log10(lowest * 0.99), math.log10(highest * 1.01))
    shown.append(Panel("held-out perplexity, magnified", shown[-1].lines, True, window))
    return Exhibit(
        key,
        title,
        drawing.panels([label_of(setting) for setting in settings], steps, shown),
        "Lines are means over seeds, bands reach from the lowest seed to the highest; of the first layer's head.",
        "whether the lines lie in the order of κ₂, and whether they are further apart than their bands.",
        f"{BAO}, Figs. 6 and 8 to 12",
        wide=True,
    )


def _maps(data: Comparable) -> list[Exhibit]:
    settings = [*reversed(data.exact), *data.decays, *reversed(data.printed[1:])]
    first_seeds = [next(p for p in data.runs if without_seed(p.setting) == setting) for setting in settings]
    arrays = [
        (np.array(p.propagation_steps, dtype=np.float64), p.propagation[:, 0].numpy().astype(np.float64))
        for p in first_seeds
    ]
    names = [label_of(setting) for setting in settings]
    # In the order of the curves, so that a setting has one colour on the page.
    chosen = [setting for setting in (*data.exact, data.plain) if setting][: len(drawing.style.CATEGORIES)]
    curves = [
        np.mean([profile(p, data.step) for p in data.runs if without_seed(p.setting) == setting], axis=0)
        for setting in chosen
    ]
    return [
        Exhibit(
            "maps",
            "ρ over training",
            drawing.propagation_map(*arrays[0]),
            "The signal propagation probability of every key position for the last query of the first layer, measured "
            "on the same held-out windows; of the first seed.",
            "horizontal stripes: positions that stay high or low.",
            f"{BAO}, Fig. 7",
            choice=by_name("setting", names, lambda place: drawing.propagation_map(*arrays[place])),
            wide=True,
        ),
        Exhibit(
            "profiles",
            "ρ by position, averaged over training",
            drawing.profiles([label_of(setting) for setting in chosen], curves),
            f"Mean over time to step {data.step} and over seeds.",
            "whether a line is flat.",
            f"{BAO}, Fig. 7",
        ),
    ]


def _compared_at(data: Comparable) -> str:
    trained = min(int(p.summary["step"]) if p.summary else data.step for p in data.runs)
    further = (
        f" (the last that was measured of all; trained to {number(trained)})" if trained > data.step else ""
    )
    return number(data.step) + further


def _readings(data: Comparable, recipe: dict[str, Any]) -> list[Reading]:
    table = by_setting(data.rows)
    readings = [
        Reading("step at which all are compared", _compared_at(data), "50 000"),
        Reading(
            "tokens",
            "words" if recipe["vocabulary"] is None else f"{recipe['vocabulary']} BPE",
            "words of WikiText-2",
        ),
    ]
    for row in table.to_dict(orient="records"):
        values = (
            f"perplexity {number(row['final_perplexity'], 4)}, lowest {number(row['lowest_perplexity'], 4)} at step "
            f"{row['lowest_step']}; scale {number(row['frobenius_squared'])}, trace {number(row['trace'])}, entropy "
            f"{number(row['entropy'], 4)}"
        )
        readings.append(Reading(f"{row['setting']}, {counted(row['seeds'], 'seed')}", values))
    return readings


def outcome_of(runs: Sequence[GridRun], recipe: dict[str, Any]) -> Outcome:
    """The outcome of the training runs of one depth and width: verdicts, curves, maps and tables.

    Args:
        runs: training runs of one depth and width. recipe: of their grid, as `read_grid` gives it.
    """
    data = comparable(runs)
    printed = captions(data, data.printed, " with the printed gradient")
    verdicts = [*captions(data, data.exact), *printed, *against_others(data), *linked(data), *stripes(data)]
    curves = [
        _curves(data, [*data.exact, *([data.plain] if data.plain else [])], "curves", "Training with LocAteR")
    ]
    if len(data.decays) > 1:
        curves.append(_curves(data, data.decays, "decays", "Training with plain weight decay"))
    if len(data.printed) > 1:
        curves.append(_curves(data, data.printed, "printed", "Training with the printed gradient of LocAteR"))
    trainings = data.rows.drop(columns="setting").rename(columns={"label": "setting"})
    tables = {"settings": by_setting(data.rows), "trainings": trainings}
    other_runs: dict[str, dict[str, object]] = {"grid": dict(recipe)}
    return Outcome(_readings(data, recipe), verdicts, tables, [*curves, *_maps(data)], other_runs)


def _of_shape(study: Study, layers: int, width: int) -> Outcome:
    recipe, runs = read_grid(_grid_of(study))
    chosen = [p for p in runs if (p.setting.layers, p.setting.width) == (layers, width)]
    if not chosen:
        shapes = sorted({(p.setting.layers, p.setting.width) for p in runs})
        has = ", ".join(f"{depth} layers at d = {size}" for depth, size in shapes)
        raise UsageError(
            f"the grid has no training run of {layers} layers at d = {width} (it has {has}): train them with "
            f"`theodolite train locater --layers {layers} --widths {width}`"
        )
    return outcome_of(chosen, recipe)


def _of_published_shape(place: int, layers: int, width: int) -> Experiment:
    @experiment(
        f"localization/figure{place}",
        f"Training with LocAteR: {layers} {'layer' if layers == 1 else 'layers'}, d = {width}",
        "With stronger κ₂ the eigenspectrum scale shrinks, the attention entropy increases, and the perplexity "
        f"improves (Fig. {place})",
        needs=(COMMAND,),
    )
    def figure(study: Study, outcome: Outcome) -> None:
        outcome.take(_of_shape(study, layers, width))

    return figure


OF_SHAPES = [_of_published_shape(place, *shape) for place, shape in FIGURES.items()]


@experiment(
    "localization/figure7",
    "Signal propagation over training, with LocAteR and without",
    "LocAteR entails salient horizontal stripes; without it ρ is uniform (Fig. 7)",
    needs=(COMMAND,),
)
def figure_7(study: Study, outcome: Outcome) -> None:
    """Of d = 128 with one layer where it was trained, as published; else of the grid's first depth and width."""
    _, runs = read_grid(_grid_of(study))
    shapes = sorted({(p.setting.layers, p.setting.width) for p in runs})
    found = _of_shape(study, *(FIGURES[6] if FIGURES[6] in shapes else shapes[0]))
    found.exhibits = [figure for figure in found.exhibits if figure.key in ("maps", "profiles")]
    found.verdicts = [verdict for verdict in found.verdicts if "stripes" in verdict.claim]
    outcome.take(found)


def _grid_of(study: Study) -> Path:
    purpose = "figures 6 to 12 of localization are read from a grid of training runs"
    return Path(study.require_training("grid", purpose, COMMAND)["folder"])


def grid_provenance(folder: str | Path) -> dict[str, Any]:
    """The provenance of these figures.

    Raises:
        UsageError: the folder holds no grid.
    """
    recipe, runs = read_grid(folder)
    return of_trainings(
        f"{len(runs)} training runs in {Path(folder).name}",
        "Post-LN decoder",
        layers=max(run.setting.layers for run in runs),
        heads=1,
        grid={"folder": str(folder), **recipe},
    )
