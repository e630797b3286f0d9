"""Figures 6 to 12 of Bao et al. 2024: language models trained with LocAteR, read from the folder of a grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.errors import UsageError
from theodolite.report import style
from theodolite.report.data import Floats
from theodolite.report.drawing import grammar
from theodolite.report.drawing.grammar import heat, line
from theodolite.system.wording import counted, for_plotly, number
from theodolite_papers.drawing.localization import TWOS, Line, curves
from theodolite_papers.experiment import BAO, Experiment, Outcome, Study, by_name, experiment, of_trainings
from theodolite_papers.localization import locater_claims as judged
from theodolite_papers.localization.locater_training import PUBLISHED_STEPS, GridRun, Setting, read_grid

ACROSS = 2
MAP_HEIGHT = 380
MOST_COLUMNS = 400
"""Steps that a map shows at most: more are not to be seen."""


Lines = list[tuple[Floats, Floats, Floats]]
"""Of every setting the mean and the lowest and highest value over seeds, (S,) each."""


def panels(
    names: Sequence[str], steps: Sequence[Floats], shown: Sequence[tuple[str, Lines, dict[str, Any]]]
) -> go.Figure:
    """Measures, each with its title and its axis, against training step, with the range over seeds as a band."""
    down = -(-len(shown) // ACROSS)
    drawn = []
    for index, (title, lines, axis) in enumerate(shown):
        traces: list[Any] = []
        for name, at, (centre, low, high), colour in zip(names, steps, lines, style.CATEGORIES, strict=False):
            hover = f"{for_plotly(name)}<br>step %{{x:.0f}}: %{{y:.5g}}<extra></extra>"
            traces += line(at, centre, name, colour, band=(low, high), hover=hover, showlegend=index == 0)
        x = "step" if index // ACROSS == down - 1 else ""
        drawn.append(grammar.Panel(title, traces, x, yaxis={"exponentformat": "power"} | axis))
    return grammar.panels(drawn, ACROSS, layout={"legend": {"y": 1.06}})


def _logarithmic(lines: Lines) -> dict[str, Any]:
    """The axis of such lines, without plotly's own labels, 2 to 9, where these would lie on one another."""
    lowest = min(float(low.min()) for _, low, _ in lines)
    highest = max(float(high.max()) for *_, high in lines)
    return TWOS if 5 * lowest < highest < 100 * lowest else {"type": "log"}


def propagation_map(steps: Floats, propagation: Floats) -> go.Figure:
    """ρ of every key position of the last query over training, as in Fig. 7: steps to the right, positions down."""
    columns = np.unique(np.linspace(0, len(steps) - 1, MOST_COLUMNS).astype(int))
    length = propagation.shape[1]
    hover = "step %{x:.0f}, position %{y}: %{z:.3f}<extra></extra>"
    positions = np.arange(1, length + 1)
    trace = heat(propagation[columns].T, 0, 1, hover, bar="ρ", x=steps[columns], y=positions)
    layout = {"yaxis": {"range": [length + 0.5, 0.5]}}
    return style.figure([trace], "step", "position i of the key", height=MAP_HEIGHT, layout=layout)


FIGURES = {6: (1, 128), 8: (1, 32), 9: (3, 32), 10: (6, 32), 11: (3, 128), 12: (6, 128)}
"""Number of the published figure → layers and width."""

COMMAND = "theodolite train locater"
"""Writes the grid."""

SMALLER = (
    "2,048 byte-pair tokens, not 33,000 words; WikiText-2's validation part is a tenth of the published text"
)


def _of(data: judged.Comparable, setting: Setting) -> list[GridRun]:
    """Its training runs, one a seed."""
    return [run for run in data.runs if judged.without_seed(run.setting) == setting]


def _lines(
    data: judged.Comparable, settings: Sequence[Setting], table: str, name: str
) -> tuple[list[Floats], Lines]:
    """Steps of each setting, and its mean, lowest and highest value over seeds; perplexities for losses."""
    steps, lines = [], []
    for setting in settings:
        frames = [
            run.losses if table == "losses" else run.heads[run.heads["layer"] == 0]
            for run in _of(data, setting)
        ]
        columns = [frame.set_index("step")[name] for frame in frames]
        values = pd.concat(columns, axis=1, join="inner").to_numpy(dtype=np.float64)
        if table == "losses":
            values = np.exp(values)
        steps.append(columns[0].index.to_numpy(dtype=np.float64)[: len(values)])
        lines.append((values.mean(axis=1), values.min(axis=1), values.max(axis=1)))
    return steps, lines


def _draw_curves(
    outcome: Outcome, data: judged.Comparable, settings: list[Setting], key: str, title: str
) -> None:
    shown: list[tuple[str, Lines, dict[str, Any]]] = []
    for name, table, heading, logarithmic in (
        ("trace", "heads", "tr W_QK", False),
        ("frobenius_squared", "heads", "spectrum scale tr(W_QKᵀW_QK)", True),
        ("entropy", "heads", "attention entropy, nats", False),
        ("held_out_loss", "losses", "held-out perplexity", True),
    ):
        steps, lines = _lines(data, settings, table, name)
        shown.append((heading, lines, _logarithmic(lines) if logarithmic else {"type": "linear"}))
    lowest = min(float(low.min()) for _, low, _ in lines)
    highest = max(float(high[len(high) // 2 :].max()) for *_, high in lines)
    window = [math.log10(lowest * 0.99), math.log10(highest * 1.01)]
    shown.append(("held-out perplexity, magnified", lines, {"type": "log", "range": window}))
    outcome.figure(
        key,
        title,
        panels([judged.label_of(setting) for setting in settings], steps, shown),
        "Lines are means over seeds, bands reach from the lowest seed to the highest; of the first layer's head.",
        "whether the lines lie in the order of κ₂, and whether they are further apart than their bands.",
        f"{BAO}, Figs. 6 and 8 to 12",
        wide=True,
    )


def _draw_maps(outcome: Outcome, data: judged.Comparable) -> None:
    settings = [*(s for group in data.with_locater.values() for s in reversed(group)), *data.decays]
    settings = list(dict.fromkeys(settings))  # κ₂ = 0 begins the printed gradient's, too

    def draw(place: int) -> go.Figure:
        first = _of(data, settings[place])[0]
        steps, propagation = np.array(first.propagation_steps, dtype=np.float64), first.propagation[:, 0]
        return propagation_map(steps, propagation.numpy().astype(np.float64))

    outcome.figure(
        "maps",
        "ρ over training",
        by_name("setting", [judged.label_of(setting) for setting in settings], draw),
        "Signal propagation probability of every key for the last query of the first layer; the first seed.",
        "horizontal stripes: positions that stay high or low.",
        f"{BAO}, Fig. 7",
        wide=True,
    )
    # In the order of the curves, so that a setting has one colour on the page.
    exact = [setting for settings in data.published.values() for setting in (settings[0], settings[-1])]
    chosen = list(dict.fromkeys([*exact, *([data.plain] if data.plain else [])]))[: len(style.CATEGORIES)]
    profiles = [np.mean([judged.profile(run, data.step) for run in _of(data, one)], axis=0) for one in chosen]
    colours = zip(map(judged.label_of, chosen), style.CATEGORIES, strict=False)
    lines = [Line(name, colour) for name, colour in colours]
    positions = np.arange(1.0, data.runs[0].propagation.shape[-1] + 1)
    outcome.figure(
        "profiles",
        "ρ by position, averaged over training",
        curves(positions, lines, profiles, ("position i of the key", "ρ, mean over steps")),
        f"Mean over time to step {data.step} and over seeds.",
        "whether a line is flat.",
        f"{BAO}, Fig. 7",
    )


def _read(outcome: Outcome, data: judged.Comparable, recipe: dict[str, Any]) -> None:
    """The headline numbers, the tables, and where the training runs come from."""
    trained = min(int(p.summary["step"]) if p.summary else data.step for p in data.runs)
    more = f" (the last that was measured of all; trained to {number(trained)})"
    further = more if trained > data.step else ""
    outcome.read("step at which all are compared", number(data.step) + further, number(PUBLISHED_STEPS))
    words = "words" if recipe["vocabulary"] is None else f"{recipe['vocabulary']} BPE"
    outcome.read("tokens", words, "words of WikiText-2")
    table = judged.by_setting(data.rows)
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
    """Verdicts, curves, maps and tables of the training runs of one depth and width."""
    data = judged.comparable(runs)
    _read(outcome, data, recipe)
    judged.judge_grid(outcome, data)
    plain = [data.plain] if data.plain else []
    for reduction, settings in data.published.items():
        key = "curves" if reduction == "mean" else f"curves-{reduction}"
        title = f"Training with LocAteR, {judged.READINGS[reduction]}"
        _draw_curves(outcome, data, settings + plain, key, title)
    if len(data.decays) > 1:
        _draw_curves(outcome, data, data.decays, "decays", "Training with plain weight decay")
    for place, (how, settings) in enumerate(data.others.items()):
        _draw_curves(outcome, data, settings + plain, f"others-{place}", f"Training with LocAteR{how}")
    _draw_maps(outcome, data)


def _of_shape(study: Study, shape: tuple[int, int] | None) -> tuple[list[GridRun], dict[str, Any]]:
    """The grid's training runs of some layers and width, and its recipe."""
    purpose = "figures 6 to 12 of localization are read from a grid of training runs"
    recipe, runs = read_grid(study.training_folder("grid", purpose, COMMAND))
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
    data = judged.comparable(runs)
    _read(outcome, data, recipe)
    judged.stripes(outcome, data)
    judged.phases(outcome, data)
    judged.wider(outcome, read_grid(study.provenance["grid"]["folder"])[1])
    _draw_maps(outcome, data)


def grid_provenance(folder: str | Path) -> dict[str, Any]:
    """The provenance of these figures."""
    recipe, runs = read_grid(folder)
    return of_trainings(
        f"{len(runs)} training runs in {Path(folder).name}",
        "Post-LN decoder",
        layers=max(run.setting.layers for run in runs),
        heads=1,
        grid={"folder": str(folder), **recipe},
    )
