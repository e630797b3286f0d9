"""Judge what Bao et al. 2024 show of training with LocAteR (Figs. 6 to 12), from a grid of runs paired by seed.

The paper does not say whether its penalty was added to the mean loss of a batch's tokens or to their sum, as fairseq's:
claims are decided where both readings answer alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.errors import UsageError
from theodolite.estimates import Estimate, Floats
from theodolite.judging import FAILS, HOLDS, IN_PART, Criterion, mix_of, unless_explained
from theodolite.passes.corpus_pass import perplexity_of
from theodolite.report import style
from theodolite.report.drawing.grammar import Panel, band, heat, line, panels
from theodolite.system.wording import counted, for_plotly, number
from theodolite_papers.drawing import TWOS, by_category, curves
from theodolite_papers.experiment import Experiment, Outcome, Study, by_name, criterion, declared, of_nothing
from theodolite_papers.localization.locater_training import (
    PUBLISHED_STEPS,
    GridRun,
    Reduction,
    Setting,
    read_grid,
)
from theodolite_papers.rank_correlation import error_under_independence, rank_correlation

MEASURES = {
    "final_loss": "held-out loss, nats per token",
    "lowest_loss": "lowest held-out loss, nats per token",
    "frobenius_squared": "spectrum scale tr(W_QKᵀW_QK)",
    "trace_of_square": "tr(W_QK²)",
    "trace": "tr W_QK",
    "entropy": "attention entropy, nats",
    "stripes": "standard deviation of ρ over positions",
}
"""Columns of `at_step`. Of attention those of the first layer, as in appendix D."""

BY_LOGARITHM = ("frobenius_squared", "entropy")  # measures of which settings differ by a factor

READINGS: dict[Reduction, str] = {
    "mean": "κ against the mean loss of a token",
    "sum": "κ against the loss summed over a batch",
}
SILENT = "the paper does not say which of the two its penalty was added to"


def label_of(setting: Setting) -> str:
    """Label a setting: `κ₂ = 0.01`, `no LocAteR`, `weight decay 0.1`."""
    if setting.scale == setting.mean == 0:
        return "no LocAteR" if setting.weight_decay == 0.01 else f"weight decay {setting.weight_decay:g}"
    decay = "" if setting.weight_decay == 0.01 else f", weight decay {setting.weight_decay:g}"
    return f"κ₂ = {setting.mean:g}{decay}{manner(setting)}"


def manner(setting: Setting) -> str:
    """Name what differs from κ₁ = 100 against the mean loss with the exact gradient, as words after a comma."""
    words = "" if setting.scale == 100 else f", κ₁ = {setting.scale:g}"
    words += "" if setting.reduction == "mean" else ", against the summed loss"
    return words + ("" if setting.gradient == "exact" else ", printed gradient")


def without_seed(setting: Setting) -> Setting:
    """Set the seed to 0: the setting that the training runs of all seeds have in common."""
    return replace(setting, seed=0)


def common_step(runs: Sequence[GridRun]) -> int:
    """Return the last step at which every one of the training runs was measured."""
    return int(max(set.intersection(*(set(run.losses["step"]) for run in runs))))


def at_step(runs: Sequence[GridRun], step: int) -> pd.DataFrame:
    """Tabulate training runs: `setting` (without seed), `label`, `seed`, `lowest_step` and `MEASURES`, to `step`."""
    rows = []
    for run in runs:
        losses = run.losses[run.losses["step"] <= step]
        lowest = losses.loc[losses["held_out_loss"].idxmin()]
        first = run.heads[(run.heads["layer"] == 0) & (run.heads["step"] == step)].iloc[0]
        rows.append(
            {
                "setting": without_seed(run.setting),
                "label": label_of(run.setting),
                "seed": run.setting.seed,
                "final_loss": float(losses["held_out_loss"].iloc[-1]),
                "lowest_loss": float(lowest["held_out_loss"]),
                "lowest_step": int(lowest["step"]),
                **{name: float(first[name]) for name in MEASURES if name in first},
                "stripes": float(profile(run, step).std()),
            }
        )
    return pd.DataFrame(rows)


def profile(run: GridRun, step: int) -> Floats:
    """Average ρ_i of the first layer's last query over steps 1 to `step` by the trapezoidal rule: (T,)."""
    at = np.array(run.propagation_steps, dtype=np.float64)
    chosen = (at > 0) & (at <= step)
    values: Floats = run.propagation[:, 0].numpy()[chosen].astype(np.float64)
    if len(values) < 2:
        return values[0] if len(values) else np.full(run.propagation.shape[-1], np.nan)
    between = np.diff(at[chosen])  # early steps are measured more often, and count by their time all the same
    middle = (values[1:] + values[:-1]) / 2
    return (between[:, None] * middle).sum(axis=0) / between.sum()


def by_setting(rows: pd.DataFrame) -> pd.DataFrame:
    """Tabulate settings: means over seeds and half-widths of their intervals (`…_half`), and perplexities."""
    settings = []
    for setting, group in rows.groupby("setting", sort=False):
        row: dict[str, object] = {"setting": label_of(setting), "seeds": len(group)}
        for name in MEASURES:
            effect = Estimate.mean(group[name].to_numpy(dtype=np.float64), "seeds")
            row |= {name: effect.value, f"{name}_half": effect.margin}
        row["final_perplexity"] = perplexity_of(group["final_loss"].mean())
        row["lowest_perplexity"] = perplexity_of(group["lowest_loss"].mean())
        row["lowest_step"] = int(group["lowest_step"].median())
        settings.append(row)
    return pd.DataFrame(settings)


def difference(rows: pd.DataFrame, of: Setting, against: Setting, name: str) -> Estimate:
    """Compute `of` − `against` in a measure, or in its logarithm, paired by seed."""
    values = []
    for setting in (of, against):
        by_seed = rows[rows["setting"] == setting].set_index("seed")[name]
        values.append(by_seed.map(math.log) if name in BY_LOGARITHM else by_seed)
    paired = (values[0] - values[1]).dropna()
    return Estimate.mean(paired.sort_index().to_numpy(dtype=np.float64), "seeds")


def left_out(rows: pd.DataFrame, groups: Sequence[Sequence[Setting]], name: str) -> Estimate:
    """Compute the first group's best setting minus the second's, each chosen by the means of the other seeds."""
    table = rows.pivot(index="seed", columns="label", values=name)
    table = table[[label_of(setting) for group in groups for setting in group]].dropna()
    values = []
    for seed in table.index if len(table) > 1 else []:
        others, of_seed = table.drop(index=seed).mean(), table.loc[seed]
        best = [others[[label_of(setting) for setting in group]].idxmin() for group in groups]
        values.append(of_seed[best[0]] - of_seed[best[1]])
    return Estimate.mean(values, "seeds") if values else Estimate(math.nan)


def distinct(
    rows: pd.DataFrame, settings: Sequence[Setting], name: str, apart: Criterion
) -> list[list[Setting]]:
    """Group settings by rising `name`; within one, no setting is decided to differ from the group's first."""
    means = rows.groupby("setting", sort=False)[name].mean()
    groups: list[list[Setting]] = []
    for setting in sorted(settings, key=lambda each: means[each]):
        if groups:
            gap = difference(rows, setting, groups[-1][0], name)
            if not (gap.n > 1 and apart.decided(gap.value, gap.margin)[0]):
                groups[-1].append(setting)
                continue
        groups.append([setting])
    return groups


def association(rows: pd.DataFrame, groups: Sequence[Sequence[Setting]], name: str, against: str) -> Estimate:
    """Measure how `name` goes with `against` over groups of settings, each the mean of its members; one value per seed.

    Of three groups or more the rank correlation, of two the difference. Where its interval is narrower than that of
    correlations of unrelated things, it is taken for theirs: a few are often alike by chance, without any spread.
    """
    values = []
    for _, of_seed in rows.groupby("seed"):
        table = of_seed.set_index("setting")
        if not all(setting in table.index for group in groups for setting in group):
            continue
        x, y = ([table.loc[list(group), one].mean() for group in groups] for one in (against, name))
        order = np.nan_to_num(rank_correlation(np.array(x), np.array(y)))
        values.append(y[1] - y[0] if len(groups) == 2 else float(order))
    if not values:
        return Estimate(math.nan)
    known = Estimate.mean(values, "seeds")
    if len(groups) == 2:
        return known
    error = error_under_independence(len(groups)) / math.sqrt(known.n)
    by_chance = replace(known, error=error, by_chance=True)
    return by_chance if known.margin < by_chance.margin else known


@dataclass(frozen=True)
class Comparable:
    """The training runs of one depth and width, all at one step; settings of LocAteR by rising κ₂."""

    runs: list[GridRun]
    step: int
    rows: pd.DataFrame
    published: dict[Reduction, list[Setting]]  # at κ₁ = 100 with the exact gradient
    others: dict[str, list[Setting]]  # other ways of LocAteR, in words
    decays: list[Setting]  # without LocAteR
    plain: Setting | None  # the published one of these

    def of(self, setting: Setting) -> list[GridRun]:
        """List the training runs of a setting, one per seed."""
        return [run for run in self.runs if without_seed(run.setting) == setting]

    @property
    def with_locater(self) -> dict[str, list[Setting]]:
        """All ways of LocAteR, in words → settings by rising κ₂."""
        return {manner(settings[0]): settings for settings in self.published.values()} | self.others


def comparable(runs: Sequence[GridRun]) -> Comparable:
    """Sort the training runs of one depth and width by what they are for."""
    step = common_step(runs)
    kinds = sorted({without_seed(run.setting) for run in runs}, key=lambda s: (s.mean, s.weight_decay))
    none = [setting for setting in kinds if not (setting.scale or setting.mean)]
    by_manner: dict[str, list[Setting]] = {}
    for setting in kinds:
        if setting not in none:
            by_manner.setdefault(manner(setting), []).append(setting)
    for settings in by_manner.values():  # at κ₂ = 0 there is no second term, hence one gradient
        exact = replace(settings[0], gradient="exact", mean=0.0)
        if settings[0].gradient != "exact" and exact in kinds:
            settings.insert(0, exact)
    published: dict[Reduction, list[Setting]] = {}
    for reduction in get_args(Reduction):
        settings = by_manner.pop(manner(Setting(scale=100.0, reduction=reduction)), [])
        if settings:
            published[reduction] = settings
    plain = next((setting for setting in none if label_of(setting) == "no LocAteR"), None)
    return Comparable(list(runs), step, at_step(runs, step), published, by_manner, none, plain)


def in_both_readings(
    outcome: Outcome, data: Comparable, key: str, estimates: dict[Reduction, Estimate], **values: object
) -> None:
    """Judge a claim under either reading of κ: decided where both answer alike, and fails at published steps only."""
    parts = [
        outcome.verdict(key, estimate, reading=READINGS[reduction], step=data.step, **values)
        for reduction, estimate in estimates.items()
    ]
    verdict = mix_of(outcome.sentence(key), parts)
    if len(parts) == 1:
        for answer in (HOLDS, FAILS):
            verdict = unless_explained(verdict, answer, f"{SILENT}, and the other was not trained")
    if data.step < PUBLISHED_STEPS:
        verdict = unless_explained(verdict, FAILS, f"of {number(PUBLISHED_STEPS)} steps: it may come later")
    outcome.verdicts.append(unless_explained(verdict, IN_PART, f"{SILENT}, and they answer differently"))


def _final(outcome: Outcome, data: Comparable, key: str) -> bool:
    """Return whether the training runs are as long as the published ones, of whose end the claim is; if not, say so."""
    if data.step >= PUBLISHED_STEPS:
        return True
    outcome.cannot_judge(
        key, f"compared at step {number(data.step)} of the published {number(PUBLISHED_STEPS)}"
    )
    return False


def strongest(
    outcome: Outcome, data: Comparable, key: str, name: str, against: Setting | None = None, /, **values: Any
) -> None:
    """Judge the strongest κ₂ against a setting (None: the weakest) in either reading; by its loss at the end alone."""
    if name != "final_loss" or _final(outcome, data, key):
        estimates = {
            reduction: difference(data.rows, settings[-1], against or settings[0], name)
            for reduction, settings in data.published.items()
        }
        in_both_readings(outcome, data, key, estimates, **values)


def captions(outcome: Outcome, data: Comparable) -> None:
    """Judge the claims of every caption: the strongest κ₂ against the weakest."""
    if any(len(settings) < 2 for settings in data.published.values()) or not data.published:
        return
    settings = next(iter(data.published.values()))
    ends = {"strongest": settings[-1].mean, "weakest": settings[0].mean}
    for key, name in (("scale", "frobenius_squared"), ("entropy", "entropy"), ("perplexity", "final_loss")):
        strongest(outcome, data, key, name, **ends)


def against_none(outcome: Outcome, data: Comparable) -> None:
    """Judge LocAteR against none: what section 7 says of it, and what it is worth so far."""
    plain = data.plain
    if plain is None:
        return
    none = label_of(plain)
    for key, name in (("entropy-against-none", "entropy"), ("perplexity-against-none", "final_loss")):
        if data.published:
            strongest(outcome, data, key, name, plain, none=none)
    for how, settings in data.with_locater.items():
        if data.step < PUBLISHED_STEPS:
            less = difference(data.rows, settings[-1], plain, "final_loss")
            values = {"how": how, "strongest": label_of(settings[-1]), "none": none, "step": data.step}
            outcome.judge("perplexity-so-far", less, **values)


def against_decay(outcome: Outcome, data: Comparable) -> None:
    """Judge the best of LocAteR against the best plain weight decay; each seed's chosen by the others."""
    if len(data.decays) < 2 or not data.published:
        return
    best = {
        reduction: left_out(data.rows, (settings, data.decays), "final_loss")
        for reduction, settings in data.published.items()
    }
    in_both_readings(outcome, data, "weight-decay", best, decays=len(data.decays))


def linked(outcome: Outcome, data: Comparable) -> None:
    """Judge section 7's explanation: smaller scale, higher entropy, lower perplexity, over settings that differ."""
    settings = [s for group in data.with_locater.values() for s in group if s.gradient == "exact"]
    settings += [data.plain] if data.plain else []
    for key, name, against in (
        ("scale-and-entropy", "entropy", "frobenius_squared"),
        ("entropy-and-perplexity", "final_loss", "entropy"),
    ):
        if name == "final_loss" and not _final(outcome, data, key):
            continue
        groups, measure = (
            distinct(data.rows, settings, against, criterion("localization/rises")),
            MEASURES[against],
        )
        if len(groups) < 2:
            outcome.cannot_judge(key, f"{measure}: no two of {len(settings)} settings differ in it")
            continue
        order = "difference between the two" if len(groups) == 2 else f"rank correlation over {len(groups)}"
        values = {"order": order, "measure": measure, "settings": len(settings), "step": data.step}
        outcome.judge(key, association(data.rows, groups, name, against), **values)


def stripes(outcome: Outcome, data: Comparable) -> None:
    """Judge section 7 on Fig. 7: ρ differs over positions with LocAteR, and hardly without."""
    if not data.published or data.plain is None:
        return
    values = data.rows.groupby("setting", sort=False)["stripes"]
    shown = [*(settings[-1] for settings in data.published.values()), data.plain]
    means = {setting: Estimate.mean(values.get_group(setting).to_numpy(), "seeds") for setting in shown}
    levels = ", ".join(f"{label_of(setting)} {mean}" for setting, mean in means.items())
    strongest(outcome, data, "stripes", "stripes", data.plain, levels=levels)


ACROSS = 2
MAP_HEIGHT = 380
MOST_COLUMNS = 400  # steps that a map shows at most: more are not to be seen

CURVES: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("trace", "heads", "tr W_QK", {"type": "linear"}),
    ("frobenius_squared", "heads", "spectrum scale tr(W_QKᵀW_QK)", {"type": "log"}),
    ("entropy", "heads", "attention entropy, nats", {"type": "linear"}),
    ("held_out_loss", "losses", "held-out perplexity", {"type": "log"}),
    ("held_out_loss", "losses", "held-out perplexity, magnified", {}),
)
"""Column, table, title and axis of what is drawn against the training step."""

FIGURES = {6: (1, 128), 8: (1, 32), 9: (3, 32), 10: (6, 32), 11: (3, 128), 12: (6, 128)}
"""Number of the published figure → layers and width."""


def _draw_curves(outcome: Outcome, data: Comparable, settings: list[Setting], key: str, title: str) -> None:
    """Draw measures against training step: means over seeds, the range over seeds as a band."""
    shown = []
    for index, (name, table, heading, axis) in enumerate(CURVES):
        traces: list[Any] = []
        lows, highs = [], []
        for setting, colour in zip(settings, style.CATEGORIES, strict=False):
            frames = [
                r.losses if table == "losses" else r.heads[r.heads["layer"] == 0] for r in data.of(setting)
            ]
            columns = [frame.set_index("step")[name] for frame in frames]
            values = pd.concat(columns, axis=1, join="inner").to_numpy(dtype=np.float64)
            values = np.exp(values) if table == "losses" else values
            at = columns[0].index.to_numpy(dtype=np.float64)[: len(values)]
            lows.append(values.min(axis=1))
            highs.append(values.max(axis=1))
            label = label_of(setting)
            hover = f"{for_plotly(label)}<br>step %{{x:.0f}}: %{{y:.5g}}<extra></extra>"
            traces += band(at, lows[-1], highs[-1], colour, legendgroup=label)
            traces += line(at, values.mean(axis=1), label, colour, hover=hover, showlegend=index == 0)
        lowest, highest = min(float(low.min()) for low in lows), max(float(high.max()) for high in highs)
        if axis.get("type") == "log" and 5 * lowest < highest < 100 * lowest:
            axis = TWOS  # plotly's own labels, 2 to 9, would lie on one another
        elif not axis:
            late = max(float(high[len(high) // 2 :].max()) for high in highs)
            axis = {"type": "log", "range": [math.log10(lowest * 0.99), math.log10(late * 1.01)]}
        x = "step" if index // ACROSS == (len(CURVES) - 1) // ACROSS else ""
        shown.append(Panel(heading, traces, x, yaxis={"exponentformat": "power"} | axis))
    outcome.draw(key, panels(shown, ACROSS, layout={"legend": {"y": 1.06}}), "curves", title=title)


def _draw_maps(outcome: Outcome, data: Comparable) -> None:
    """Draw ρ of the last query's key positions over training, as in Fig. 7: steps to the right, positions down."""
    settings = [*(s for group in data.with_locater.values() for s in reversed(group)), *data.decays]
    settings = list(dict.fromkeys(settings))  # κ₂ = 0 begins the printed gradient's, too
    length = data.runs[0].propagation.shape[-1]

    def draw(place: int) -> go.Figure:
        first = data.of(settings[place])[0]
        steps, propagation = np.array(first.propagation_steps, dtype=np.float64), first.propagation[:, 0]
        columns = np.unique(np.linspace(0, len(steps) - 1, MOST_COLUMNS).astype(int))
        values = propagation.numpy().astype(np.float64)[columns].T
        hover = "step %{x:.0f}, position %{y}: %{z:.3f}<extra></extra>"
        trace = heat(values, 0, 1, hover, bar="ρ", x=steps[columns], y=np.arange(1, length + 1))
        layout = {"yaxis": {"range": [length + 0.5, 0.5]}}
        return style.figure([trace], "step", "position i of the key", height=MAP_HEIGHT, layout=layout)

    outcome.draw("maps", by_name("setting", [label_of(setting) for setting in settings], draw))
    # In the order of the curves, so that a setting has one colour on the page.
    exact = [setting for settings in data.published.values() for setting in (settings[0], settings[-1])]
    chosen = list(dict.fromkeys([*exact, *([data.plain] if data.plain else [])]))[: len(style.CATEGORIES)]
    profiles = [np.mean([profile(run, data.step) for run in data.of(one)], axis=0) for one in chosen]
    lines = by_category(map(label_of, chosen))
    titles = "position i of the key", "ρ, mean over steps"
    outcome.draw("profiles", curves(np.arange(1.0, length + 1), lines, profiles, titles), step=data.step)


def _read(outcome: Outcome, data: Comparable, recipe: dict[str, Any]) -> None:
    """Report the headline numbers, the tables, and where the training runs come from."""
    trained = min(int(p.summary["step"]) if p.summary else data.step for p in data.runs)
    more = f" (the last that was measured of all; trained to {number(trained)})"
    further = more if trained > data.step else ""
    outcome.read("step at which all are compared", number(data.step) + further, number(PUBLISHED_STEPS))
    words = "words" if recipe["vocabulary"] is None else f"{recipe['vocabulary']} BPE"
    outcome.read("tokens", words, "words of WikiText-2")
    table = by_setting(data.rows)
    for row in table.to_dict(orient="records"):
        final, lowest, entropy = (
            number(row[name], 4) for name in ("final_perplexity", "lowest_perplexity", "entropy")
        )
        losses = f"perplexity {final}, lowest {lowest} at step {row['lowest_step']}"
        spectrum = (
            f"scale {number(row['frobenius_squared'])}, trace {number(row['trace'])}, entropy {entropy}"
        )
        outcome.read(f"{row['setting']}, {counted(row['seeds'], 'seed')}", f"{losses}; {spectrum}")
    outcome.tables["settings"] = table
    outcome.tables["trainings"] = data.rows.drop(columns="setting").rename(columns={"label": "setting"})
    outcome.runs["grid"] = dict(recipe)


def fill(outcome: Outcome, runs: Sequence[GridRun], recipe: dict[str, Any]) -> None:
    """Fill the outcome: verdicts, curves, maps and tables of the training runs of one depth and width."""
    data = comparable(runs)
    _read(outcome, data, recipe)
    for judge in (captions, against_none, against_decay, linked, stripes):
        judge(outcome, data)
    plain = [data.plain] if data.plain else []
    for reduction, settings in data.published.items():
        key = "curves" if reduction == "mean" else f"curves-{reduction}"
        title = f"Training with LocAteR, {READINGS[reduction]}"
        _draw_curves(outcome, data, settings + plain, key, title)
    if len(data.decays) > 1:
        _draw_curves(outcome, data, data.decays, "decays", "Training with plain weight decay")
    for place, (how, settings) in enumerate(data.others.items()):
        _draw_curves(outcome, data, settings + plain, f"others-{place}", f"Training with LocAteR{how}")
    _draw_maps(outcome, data)


def _of_shape(study: Study, shape: tuple[int, int] | None) -> tuple[list[GridRun], dict[str, Any]]:
    """Read the grid's training runs of some layers and width, and its recipe."""
    if "grid" not in study.provenance:
        raise UsageError(
            "figures 6 to 12 of localization are read from a grid of training runs: pass the folder that "
            "`theodolite train locater` wrote"
        )
    recipe, runs = read_grid(study.provenance["grid"]["folder"])
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
    @declared(f"localization/figure{place}")
    def figure(study: Study, outcome: Outcome) -> None:
        fill(outcome, *_of_shape(study, (layers, width)))

    return figure


OF_SHAPES = [_of_published_shape(place, *shape) for place, shape in FIGURES.items()]


@declared("localization/figure7")
def figure_7(study: Study, outcome: Outcome) -> None:
    runs, recipe = _of_shape(study, None)
    data = comparable(runs)
    _read(outcome, data, recipe)
    stripes(outcome, data)
    _draw_maps(outcome, data)


def grid_provenance(folder: str | Path) -> dict[str, Any]:
    """Return the provenance of these figures."""
    recipe, runs = read_grid(folder)
    model = of_nothing(
        id=f"{len(runs)} training runs in {Path(folder).name}",
        architecture="Post-LN decoder",
        layers=max(run.setting.layers for run in runs),
        heads=1,
    )
    return model | {"grid": {"folder": str(folder), **recipe}}
