"""Figures 6 to 12 of Bao et al. 2024: language models trained with LocAteR, read from the folder of a grid.

No model is opened and nothing is surveyed. The numbers come from `paired_effects`; what is claimed is judged here, by
differences paired by seed with their confidence intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.errors import UsageError
from theodolite.judging import Criterion, Estimate
from theodolite.papers.experiment import Experiment, Study, experiment, of_trainings
from theodolite.papers.localization.locater_grid import GridRun, read_grid
from theodolite.papers.localization.locater_training import Setting
from theodolite.papers.localization.paired_effects import (
    Comparable,
    by_setting,
    comparable,
    difference,
    label_of,
    profile,
    rank_correlation_by_seed,
    without_seed,
)
from theodolite.report import style
from theodolite.report.data import Floats
from theodolite.report.drawing import locater as drawing
from theodolite.report.drawing.locater import Panel
from theodolite.report.exhibit import by_name
from theodolite.report.measures import BAO
from theodolite.report.outcome import Outcome
from theodolite.system.wording import counted, number

FIGURES = {6: (1, 128), 8: (1, 32), 9: (3, 32), 10: (6, 32), 11: (3, 128), 12: (6, 128)}
"""Number of the published figure → layers and width."""

COMMAND = "theodolite train locater"
"""Writes the grid."""

SMALLER = (
    "2,048 byte-pair tokens, not 33,000 words; WikiText-2's validation part is a tenth of the published text"
)

NEGLIGIBLE = 0.01
"""Relative difference (and difference in ρ) below which there is no effect to speak of: ours; the paper has curves."""
RISES = Criterion("more than", 0.0, "ours", NEGLIGIBLE)
FALLS = Criterion("less than", 0.0, "ours", NEGLIGIBLE)

CLAIMS = (
    ("the eigenspectrum scale shrinks", "frobenius_squared", FALLS, True),
    ("the attention entropy increases", "entropy", RISES, True),
    ("the perplexity improves", "final_loss", FALLS, False),
    ("the lowest perplexity improves", "lowest_loss", FALLS, False),
)
"""Of every caption: words, measure, criterion of the difference, whether it is taken between logarithms."""


def captions(outcome: Outcome, data: Comparable, settings: Sequence[Setting], how: str = "") -> None:
    """The claims of every caption: the strongest κ₂ against the weakest, and how all of them rank."""
    if len(settings) < 2:
        return
    weakest, strongest = settings[0], settings[-1]
    for words, name, criterion, relative in CLAIMS:
        outcome.claim(
            f"With stronger κ₂ {words}{how}",
            f"difference of logarithms, {label_of(strongest)} against {label_of(weakest)}, step {data.step}",
            difference(data.rows, strongest, weakest, name, relative=relative),
            criterion,
            f", rank correlation with κ₂ {rank_correlation_by_seed(data.rows, settings, name)}",
        )


def against_others(outcome: Outcome, data: Comparable) -> None:
    """LocAteR against none, and the best of its settings against the best plain weight decay."""
    if data.exact and data.plain is not None:
        pair = f"{label_of(data.exact[-1])} against {label_of(data.plain)}"
        for words, name, criterion, relative in CLAIMS[1:]:
            outcome.claim(
                f"With LocAteR {words} (“eventually”, section 7)",
                f"difference of logarithms, {pair}, step {data.step}",
                difference(data.rows, data.exact[-1], data.plain, name, relative=relative),
                criterion,
            )
    if data.exact and len(data.decays) > 1:
        means = data.rows.groupby("setting", sort=False)["lowest_loss"].mean()
        best, rival = (min(group, key=lambda s: means[s]) for group in (data.exact, data.decays))
        outcome.claim(
            "LocAteR does better than equally tuned weight decay (ours)",
            f"difference of the lowest losses, {label_of(best)} (best of {len(data.exact)}) against "
            f"{label_of(rival)} (best of {len(data.decays)}), both chosen on the same held-out text",
            difference(data.rows, best, rival, "lowest_loss", relative=False),
            FALLS,
        )


def linked(outcome: Outcome, data: Comparable) -> None:
    """Section 7's explanation: smaller scale, higher entropy, lower perplexity, over LocAteR settings and none."""
    settings = [*data.exact, *([data.plain] if data.plain else [])]
    if len(settings) < 3:
        return
    for claim, name, against in (
        ("A smaller eigenspectrum scale goes with higher attention entropy", "entropy", "frobenius_squared"),
        ("Higher attention entropy goes with lower perplexity", "final_loss", "entropy"),
    ):
        outcome.claim(
            f"{claim} (section 7)",
            f"rank correlation over {len(settings)} settings, step {data.step}",
            rank_correlation_by_seed(data.rows, settings, name, against),
            FALLS,
        )


def stripes(outcome: Outcome, data: Comparable) -> None:
    """Section 7 on Fig. 7: ρ differs over positions with LocAteR, and hardly without."""
    if not data.exact or data.plain is None:
        return
    values = data.rows.groupby("setting", sort=False)["stripes"]
    levels = ", ".join(
        f"{label_of(setting)} {Estimate.mean(values.get_group(setting).to_numpy(), 'seeds')}"
        for setting in (data.exact[-1], data.plain)
    )
    outcome.claim(
        "LocAteR entails salient stripes of ρ, and without LocAteR there are none (section 7)",
        f"standard deviation over positions of ρ averaged over steps, difference to step {data.step}",
        difference(data.rows, data.exact[-1], data.plain, "stripes", relative=False),
        RISES,
        f" ({levels})",
    )


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


def _draw_curves(
    outcome: Outcome, data: Comparable, settings: Sequence[Setting], key: str, title: str
) -> None:
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
    outcome.figure(
        key,
        title,
        drawing.panels([label_of(setting) for setting in settings], steps, shown),
        "Lines are means over seeds, bands reach from the lowest seed to the highest; of the first layer's head.",
        "whether the lines lie in the order of κ₂, and whether they are further apart than their bands.",
        f"{BAO}, Figs. 6 and 8 to 12",
        wide=True,
    )


def _draw_maps(outcome: Outcome, data: Comparable) -> None:
    settings = [*reversed(data.exact), *data.decays, *reversed(data.printed[1:])]

    def draw(place: int) -> go.Figure:
        first = next(p for p in data.runs if without_seed(p.setting) == settings[place])
        steps, propagation = np.array(first.propagation_steps, dtype=np.float64), first.propagation[:, 0]
        return drawing.propagation_map(steps, propagation.numpy().astype(np.float64))

    outcome.figure(
        "maps",
        "ρ over training",
        draw(0),
        "The signal propagation probability of every key position for the last query of the first layer, measured "
        "on the same held-out windows; of the first seed.",
        "horizontal stripes: positions that stay high or low.",
        f"{BAO}, Fig. 7",
        choice=by_name("setting", [label_of(setting) for setting in settings], draw),
        wide=True,
    )
    # In the order of the curves, so that a setting has one colour on the page.
    chosen = [setting for setting in (*data.exact, data.plain) if setting][: len(style.CATEGORIES)]
    curves = [
        np.mean([profile(p, data.step) for p in data.runs if without_seed(p.setting) == setting], axis=0)
        for setting in chosen
    ]
    outcome.figure(
        "profiles",
        "ρ by position, averaged over training",
        drawing.profiles([label_of(setting) for setting in chosen], curves),
        f"Mean over time to step {data.step} and over seeds.",
        "whether a line is flat.",
        f"{BAO}, Fig. 7",
    )


def _read(outcome: Outcome, data: Comparable, recipe: dict[str, Any]) -> None:
    """The headline numbers, the tables, and where the training runs come from."""
    trained = min(int(p.summary["step"]) if p.summary else data.step for p in data.runs)
    further = (
        f" (the last that was measured of all; trained to {number(trained)})" if trained > data.step else ""
    )
    outcome.read("step at which all are compared", number(data.step) + further, "50 000")
    words = "words" if recipe["vocabulary"] is None else f"{recipe['vocabulary']} BPE"
    outcome.read("tokens", words, "words of WikiText-2")
    table = by_setting(data.rows)
    for row in table.to_dict(orient="records"):
        outcome.read(
            f"{row['setting']}, {counted(row['seeds'], 'seed')}",
            f"perplexity {number(row['final_perplexity'], 4)}, lowest {number(row['lowest_perplexity'], 4)} at step "
            f"{row['lowest_step']}; scale {number(row['frobenius_squared'])}, trace {number(row['trace'])}, entropy "
            f"{number(row['entropy'], 4)}",
        )
    outcome.tables["settings"] = table
    outcome.tables["trainings"] = data.rows.drop(columns="setting").rename(columns={"label": "setting"})
    outcome.runs["grid"] = dict(recipe)


def fill(outcome: Outcome, runs: Sequence[GridRun], recipe: dict[str, Any]) -> None:
    """Verdicts, curves, maps and tables of the training runs of one depth and width.

    Args:
        recipe: of their grid, as `read_grid` gives it.
    """
    data = comparable(runs)
    _read(outcome, data, recipe)
    captions(outcome, data, data.exact)
    captions(outcome, data, data.printed, " with the printed gradient")
    against_others(outcome, data)
    linked(outcome, data)
    stripes(outcome, data)
    with_locater = [*data.exact, *([data.plain] if data.plain else [])]
    _draw_curves(outcome, data, with_locater, "curves", "Training with LocAteR")
    if len(data.decays) > 1:
        _draw_curves(outcome, data, data.decays, "decays", "Training with plain weight decay")
    if len(data.printed) > 1:
        title = "Training with the printed gradient of LocAteR"
        _draw_curves(outcome, data, data.printed, "printed", title)
    _draw_maps(outcome, data)


def _of_shape(study: Study, shape: tuple[int, int] | None) -> tuple[list[GridRun], dict[str, Any]]:
    """The grid's training runs of some layers and width, and its recipe.

    `shape` None: those of Fig. 6, as Fig. 7 is published, where they were trained, else the first.
    """
    purpose = "figures 6 to 12 of localization are read from a grid of training runs"
    recipe, runs = read_grid(Path(study.require_training("grid", purpose, COMMAND)["folder"]))
    shapes = sorted({(p.setting.layers, p.setting.width) for p in runs})
    layers, width = shape or (FIGURES[6] if FIGURES[6] in shapes else shapes[0])
    if (layers, width) not in shapes:
        has = ", ".join(f"{depth} layers at d = {size}" for depth, size in shapes)
        raise UsageError(
            f"the grid has no training run of {layers} layers at d = {width} (it has {has}): train them with "
            f"`theodolite train locater --layers {layers} --widths {width}`"
        )
    return [p for p in runs if (p.setting.layers, p.setting.width) == (layers, width)], recipe


def _of_published_shape(place: int, layers: int, width: int) -> Experiment:
    @experiment(
        f"localization/figure{place}",
        f"Training with LocAteR: {layers} {'layer' if layers == 1 else 'layers'}, d = {width}",
        "With stronger κ₂ the eigenspectrum scale shrinks, the attention entropy increases, and the perplexity "
        f"improves (Fig. {place})",
        needs=(COMMAND,),
        scaled_down=SMALLER,
    )
    def figure(study: Study, outcome: Outcome) -> None:
        fill(outcome, *_of_shape(study, (layers, width)))

    return figure


OF_SHAPES = [_of_published_shape(place, *shape) for place, shape in FIGURES.items()]


@experiment(
    "localization/figure7",
    "Signal propagation over training, with LocAteR and without",
    "LocAteR entails salient horizontal stripes; without it ρ is uniform (Fig. 7)",
    needs=(COMMAND,),
    scaled_down=SMALLER,
)
def figure_7(study: Study, outcome: Outcome) -> None:
    runs, recipe = _of_shape(study, None)
    data = comparable(runs)
    _read(outcome, data, recipe)
    stripes(outcome, data)
    _draw_maps(outcome, data)


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
