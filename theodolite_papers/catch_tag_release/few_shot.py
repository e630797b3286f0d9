"""Learning from examples in a prompt (Zhang et al. 2025, Fig. 3, sections 3.4 and 3.5), in models of the offline task.

Fig. 3: accuracy against the number of examples, dense and pruned. Then sinks are hidden, or the low-rank terms of OATS
taken out; controls hide as many other keys, random or most attended, and take out random terms as large.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theodolite import Corpus, OpenModel, open_model
from theodolite.attention.inputs import AttentionInputs
from theodolite.attention.summary import summarise
from theodolite.corpus.few_shot_task import CORPUS_STREAM, NAME, RULES, TEST_STREAM, prompt_ids
from theodolite.estimates import Estimate
from theodolite.evaluate.few_shot import PROMPTS, batch_of_prompts, few_shot_answers, right_answers
from theodolite.evaluate.scores import mean_and_error, over_seeds
from theodolite.judging import HOLDS, Criterion, all_of, judge, unless_explained
from theodolite.models.hooks import Hooks, hooked
from theodolite.prune.checkpoint import Pruned
from theodolite.prune.model import prune_model
from theodolite.report import style
from theodolite.report.data import Floats
from theodolite.report.drawing.grammar import dots, line
from theodolite.sinks.interventions import attention_knockout, without_low_rank
from theodolite.system.progress import ShowStage, shown
from theodolite.system.wording import counted, for_plotly, percent, with_error
from theodolite_papers.catch_tag_release.pruned_sinks import METHODS, SPARSITY
from theodolite_papers.drawing import whiskers
from theodolite_papers.experiment import Outcome, Study, declared, of_trainings

FIGURE_HEIGHT = 380
ASIDE = 0.05
"""Of an example, between the markers of neighbouring models: their intervals must not hide each other."""


def accuracy_by_shots(
    means: pd.DataFrame,
    by_seed: pd.DataFrame | None = None,
    *,
    chance: float = math.nan,
    best: Sequence[float] = (),
) -> go.Figure:
    """Accuracy of several models after k examples, with intervals.

    means: `model shots accuracy low high`. by_seed: `model seed shots accuracy accuracy_se`; None: no markers.
    """
    models = list(dict.fromkeys(means["model"]))
    lines: list[Any] = []
    for index, (model, colour) in enumerate(zip(models, style.CATEGORIES, strict=False)):
        shift = ASIDE * (index - (len(models) - 1) / 2)
        if by_seed is not None:
            lines.append(_marks(by_seed[by_seed["model"] == model], colour, shift))
        lines += _line(model, means[means["model"] == model], colour, shift)
    shots = sorted(set(means["shots"]))
    if len(best):
        lines += _bound("best possible", list(range(len(best))), best, "dash")
    if math.isfinite(chance):
        lines += _bound("chance", shots, [chance] * len(shots), "dot")
    layout = {
        "xaxis": {"tickmode": "array", "tickvals": shots, "zeroline": False},
        "yaxis": {"tickformat": ".0%", "zeroline": False},
    }
    return style.figure(lines, "examples in the prompt", "accuracy", height=FIGURE_HEIGHT, layout=layout)


def _line(model: str, rows: pd.DataFrame, colour: str, shift: float) -> list[Any]:
    accuracy, low, high = (rows[name].to_numpy(np.float64) for name in ("accuracy", "low", "high"))
    name = for_plotly(model)
    shares = zip(rows["shots"], accuracy, low, high, strict=True)
    own: dict[str, Any] = {"error_y": whiskers(accuracy, low, high), "legendgroup": name, "marker": 6}
    own["customdata"] = [[shots, *map(percent, values)] for shots, *values in shares]
    hover = (
        f"{name}, %{{customdata[0]}} examples: %{{customdata[1]}} (%{{customdata[2]}} to %{{customdata[3]}})"
    )
    at = rows["shots"].to_numpy(np.float64) + shift
    return line(at, accuracy, model, colour, hover=f"{hover}<extra></extra>", **own)


def _marks(rows: pd.DataFrame, colour: str, shift: float) -> dict[str, Any]:
    """Draw one open circle per seed."""
    name = for_plotly(rows["model"].iloc[0]) if len(rows) else ""
    notes = [[row.shots, row.seed, with_error(row.accuracy, row.accuracy_se)] for row in rows.itertuples()]
    hover = f"{name}, seed %{{customdata[1]}}, %{{customdata[0]}} examples: %{{customdata[2]}}<extra></extra>"
    own = {"opacity": 0.6, "legendgroup": name, "showlegend": False, "customdata": notes}
    marker, at = {"size": 4, "symbol": "circle-open"}, rows["shots"].to_numpy(np.float64) + shift
    return dots(at, rows["accuracy"], None, None, colour, hover, marker=marker, **own)


def _bound(name: str, shots: Sequence[int], values: Sequence[float], dash: str) -> list[Any]:
    hover = f"{name}, %{{x}} examples: %{{y:.1%}}<extra></extra>"
    return line(shots, values, name, style.GREY, dash=dash, width=1.2, hover=hover)


COMMAND = "theodolite train few-shot"

DENSE = "dense"
SPARSITIES = (0.5, 0.7)
"""The paper's, and one at which small models lose more."""

CALIBRATION = 512
"""Prompts that pruning is calibrated on; no model was trained or is tested on them."""

PROMPT_SEED = 1
"""Seed of the prompts that all models answer."""

EXAMPLES_HELP = Criterion("more than", 0.0, "higher accuracy with five examples than with none")
WIDENS = Criterion("more than", 0.0, "a larger gap with five examples than with none")
SIMILAR = Criterion("within", 0.02, "“similarly” read as: two points of accuracy (ours)")


def calibration_prompts() -> Corpus:
    """The prompts that pruning is calibrated on."""
    prompts = RULES.draw(CALIBRATION, np.random.default_rng([PROMPT_SEED, CORPUS_STREAM]))
    return Corpus.from_ids(torch.from_numpy(prompts.ids))


def shots_table(folder: Path, show: ShowStage = lambda what, done, total: None) -> pd.DataFrame:
    """One row per model, sparsity, method and number of examples: accuracy with its binomial standard error."""
    calibration = calibration_prompts()
    rows: list[dict[str, Any]] = []
    for model_folder in models_in(folder):
        dense = open_model(model_folder, device="cpu")
        seed = json.loads((model_folder / "training.json").read_text(encoding="utf-8"))["seed"]
        answers = few_shot_answers(dense, prompts=PROMPTS, seed=PROMPT_SEED)
        for sparsity in SPARSITIES:
            of = {"folder": model_folder.name, "seed": seed, "sparsity": sparsity}
            rows += rows_by_shots(answers, model=DENSE, **of)
            what = f"{model_folder.name}: pruning {percent(sparsity)}"
            for method, name in shown([*METHODS.items()], what, show):
                model = copy.deepcopy(dense)
                prune_model(model, calibration, method, sparsity)
                pruned_answers = few_shot_answers(model, prompts=PROMPTS, seed=PROMPT_SEED)
                rows += rows_by_shots(pruned_answers, model=name, **of)
    return pd.DataFrame(rows)


def rows_by_shots(correct: np.ndarray, **of: Any) -> list[dict[str, Any]]:
    """A row for every number of examples, of right answers (prompts, numbers of examples); `of`: what they are of."""
    rows = []
    for shots, answers in enumerate(correct.astype(np.float64).T):
        accuracy, error = mean_and_error(answers)
        row = {"shots": shots, "accuracy": accuracy, "accuracy_se": error, "prompts": len(correct)}
        rows.append(of | row)
    return rows


def _by_shots(table: pd.DataFrame, name: str, sparsity: float) -> Floats:
    """Accuracy (models, numbers of examples)."""
    rows = table[(table["model"] == name) & (table["sparsity"] == sparsity)]
    return rows.pivot(index="folder", columns="shots", values="accuracy").to_numpy(np.float64)


@declared("sinks/figure3")
def figure_3(study: Study, outcome: Outcome) -> None:
    purpose = "sinks/figure3 is read from a folder of training runs"
    folder = study.training_folder("few_shot", purpose, COMMAND, outcome)
    show_accuracy(outcome, shots_table(folder, study.show))


def show_accuracy(outcome: Outcome, table: pd.DataFrame) -> None:
    """Verdicts, levels and charts of accuracies, as `shots_table` gives them."""
    outcome.tables["accuracy"] = table
    dense = _by_shots(table, DENSE, SPARSITIES[0])
    outcome.claim(
        "More examples help the dense model (section 3.5)",
        "accuracy with five examples less that with none",
        Estimate.mean(dense[:, -1] - dense[:, 0], "models"),
        EXAMPLES_HELP,
    )
    _read(outcome, DENSE, dense)
    for sparsity in SPARSITIES:
        removed = f"{percent(sparsity)} removed"
        by_method = {name: _by_shots(table, name, sparsity) for name in METHODS.values()}
        for name, accuracy in by_method.items():
            _read(outcome, f"{name}, {removed}", accuracy)
        for name in ("Wanda", "SparseGPT"):
            gap = by_method["OATS"] - by_method[name]
            claim = f"OATS and {name} perform similarly without examples, {removed} (section 3.5, Fig. 3)"
            what = f"accuracy with OATS less that with {name}, paired by model"
            outcome.claim(claim, what, Estimate.mean(gap[:, 0], "models"), SIMILAR)
            claim = f"OATS's lead over {name} widens with examples, {removed} (section 3.5, Fig. 3)"
            what = "lead with five examples less that with none"
            outcome.claim(claim, what, Estimate.mean(gap[:, -1] - gap[:, 0], "models"), WIDENS)
        rows = table[table["sparsity"] == sparsity].sort_values("model", key=_order, kind="stable")
        best = RULES.best_accuracy().tolist()
        drawn = accuracy_by_shots(over_seeds(rows), rows, chance=1 / RULES.values, best=best)
        outcome.draw(f"accuracy-{round(100 * sparsity)}", drawn, "accuracy", removed=removed)


def _read(outcome: Outcome, what: str, accuracy: Floats) -> None:
    outcome.read(what, ", ".join(percent(value) for value in accuracy.mean(axis=0)) + " by k")


def _order(names: pd.Series) -> pd.Series:
    return names.map({name: place for place, name in enumerate((DENSE, *METHODS.values()))})


def models_in(folder: str | Path) -> list[Path]:
    """The models of the few-shot task in the folders of a folder, in the order of their names."""
    found = []
    for path in sorted(Path(folder).glob("*/training.json")):
        with suppress(OSError, ValueError, AttributeError):  # of another program's file
            if json.loads(path.read_text(encoding="utf-8")).get("task") == NAME:
                found.append(path.parent)
    return found


def is_few_shot(folder: str | Path) -> bool:
    """Return whether a folder has folders of models of the few-shot task."""
    return Path(folder).is_dir() and bool(models_in(folder))


def few_shot_provenance(folder: str | Path) -> dict[str, Any]:
    """The provenance of `sinks/figure3`."""
    models = [place.name for place in models_in(folder)]
    entry = {"folder": str(folder), "models": models, "prompts": PROMPTS}
    return of_trainings(f"{counted(len(models), 'model')} in {Path(folder).name}", "GPT-NeoX", few_shot=entry)


ABLATION_PROMPTS = 1000
"""That every model answers under every intervention, the same for all."""

CONTROLS = 2
"""Seeded controls of each intervention. Of all controls the one that costs most is judged, model by model."""

DENSE, HIDDEN = "dense", "sinks hidden"
OTHERS, ATTENDED = "as many other keys hidden", "as many other keys hidden, the most attended"
OATS, WITHOUT, RANDOM = "OATS", "OATS without its low-rank terms", "OATS without random terms as large"
PAIRS = {HIDDEN: (DENSE, (OTHERS, ATTENDED)), WITHOUT: (OATS, (RANDOM,))}
"""Intervention → what it is made on, and its controls."""

WORDS = {HIDDEN: "Hiding the sinks", WITHOUT: "Taking out the low-rank terms"}

MORE = Criterion("more than", 0.0, "more than under the hardest control (ours)")
AT_CHANCE = (
    "at chance without examples already, below which nothing is lost: the loss must grow with the accuracy"
)

Edit = Callable[[slice], Iterable[AbstractContextManager[object]]]
"""(prompts of a batch) → the interventions on the model while it reads them."""


@dataclass(frozen=True)
class PromptAttention:
    """The sinks of one layer, and the attention that each key receives, summed over the queries."""

    sinks: Bool[Tensor, "prompts heads positions"]
    mass: Float[Tensor, "prompts heads positions"]


class _SinkTap(Hooks):
    """`PromptAttention` of every batch, by layer."""

    def __init__(self, layers: int) -> None:
        self.of_layers: list[list[PromptAttention]] = [[] for _ in range(layers)]

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        summary = summarise(inputs)
        self.of_layers[layer].append(PromptAttention(summary.sinks.cpu(), summary.mass.cpu()))
        return summary.output


def attention_of_prompts(model: OpenModel, ids: Tensor, batch: int) -> list[PromptAttention]:
    """Read prompts, and return the sinks and the attention of every layer."""
    tap = _SinkTap(model.layers)
    with hooked(model, tap):
        for part in ids.split(batch):
            model.forward(part)
    return [
        PromptAttention(torch.cat([part.sinks for part in of]), torch.cat([part.mass for part in of]))
        for of in tap.of_layers
    ]


def share_of(attention: list[PromptAttention], keys: list[Tensor]) -> float:
    """Mean share of attention that goes to `keys` (of each layer), over the heads and prompts with a sink."""
    shares = [
        (of.mass.where(of_layer, 0.0).sum(-1) / of.mass.sum(-1))[of.sinks.any(-1)]
        for of, of_layer in zip(attention, keys, strict=True)
    ]
    return float(torch.cat(shares).mean())


def other_keys(
    sinks: Bool[Tensor, "prompts heads positions"], order: Float[Tensor, "prompts heads positions"]
) -> Tensor:
    """Choose as many other keys as sinks, lowest in `order`; none of the last quarter, which has too few queries."""
    length = sinks.shape[-1]
    order = order.double().clone()
    order[..., length - length // 4 :] = torch.inf
    order[sinks] = torch.inf
    return order.argsort(dim=-1, stable=True).argsort(-1) < sinks.sum(-1, keepdim=True)


def _controls(attention: list[PromptAttention]) -> Iterator[tuple[str, int, list[Tensor]]]:
    """(name, seed, keys by layer) that are hidden in the place of the sinks."""
    for seed in range(CONTROLS):
        generator = torch.Generator().manual_seed(seed)
        orders = (torch.rand(of.sinks.shape, generator=generator) for of in attention)
        yield OTHERS, seed, [other_keys(of.sinks, order) for of, order in zip(attention, orders, strict=True)]
    yield ATTENDED, 0, [other_keys(of.sinks, -of.mass) for of in attention]


def _hiding(model: OpenModel, keys: list[Tensor]) -> Edit:
    """Keys (prompts, heads, positions) by layer, hidden in the heads that have any."""

    def hidden(part: slice) -> Iterator[AbstractContextManager[object]]:
        for layer, of_layer in enumerate(keys):
            chosen = of_layer[part]
            for head in chosen.any(-1).any(0).nonzero().flatten().tolist():
                yield attention_knockout(model, layer, head, chosen[:, head])

    return hidden


def _without_terms(model: OpenModel, pruned: Pruned, control: int | None) -> Edit:
    def without(part: slice) -> Iterator[AbstractContextManager[object]]:
        for layer in range(model.layers):
            yield without_low_rank(model, layer, factors=pruned.factors(layer), control=control)

    return without


def _accuracies(model: OpenModel, prompts: tuple[Tensor, Tensor, Tensor, list[int]], edit: Edit) -> Floats:
    """Right answers (prompts, numbers of examples) under an intervention."""
    ids, asked, labels, label_ids = prompts
    batch, right = batch_of_prompts(ids.shape[1], None), []
    for start in range(0, len(ids), batch):
        part = slice(start, min(start + batch, len(ids)))
        with ExitStack() as stack:
            for intervention in edit(part):
                stack.enter_context(intervention)
            right.append(right_answers(model.hf, ids[part], asked[part], labels[part], label_ids))
    return torch.cat(right).numpy().astype(np.float64)


def ablation_rows(dense: OpenModel) -> Iterator[tuple[str, int, Floats, float]]:
    """(what was done, seed of the control, right answers, share of attention hidden) of one model."""
    drawn = RULES.draw(ABLATION_PROMPTS, np.random.default_rng([PROMPT_SEED, TEST_STREAM]))
    ids, asked, label_ids = prompt_ids(drawn, RULES, dense.required_tokenizer())
    prompts = ids, asked, torch.from_numpy(drawn.labels), label_ids
    attention = attention_of_prompts(dense, ids, batch_of_prompts(ids.shape[1], None))

    yield DENSE, 0, _accuracies(dense, prompts, lambda part: ()), 0.0
    sinks = HIDDEN, 0, [of.sinks for of in attention]
    for name, seed, keys in (sinks, *_controls(attention)):
        yield name, seed, _accuracies(dense, prompts, _hiding(dense, keys)), share_of(attention, keys)
    model = copy.deepcopy(dense)
    report = prune_model(model, calibration_prompts(), "oats", SPARSITY)
    yield OATS, 0, _accuracies(model, prompts, lambda part: ()), 0.0
    yield WITHOUT, 0, _accuracies(model, prompts, _without_terms(model, report, None)), 0.0
    for seed in range(CONTROLS):
        yield RANDOM, seed, _accuracies(model, prompts, _without_terms(model, report, seed)), 0.0


def ablation_table(folder: Path, show: ShowStage = lambda what, done, total: None) -> pd.DataFrame:
    """One row per model, intervention, control's seed and number of examples: accuracy with its binomial error."""
    rows: list[dict[str, Any]] = []
    for place in shown(models_in(folder), "hiding sinks", show):
        seed = json.loads((place / "training.json").read_text(encoding="utf-8"))["seed"]
        for name, control, correct, hidden in ablation_rows(open_model(place, device="cpu")):
            of = {"model": name, "folder": place.name, "seed": seed, "control": control}
            rows += [row | {"hidden": hidden} for row in rows_by_shots(correct, **of)]
    return pd.DataFrame(rows)


@declared("sinks/examples")
def examples(study: Study, outcome: Outcome) -> None:
    purpose = "sinks/examples is read from a folder of training runs"
    folder = study.training_folder("few_shot", purpose, COMMAND, outcome)
    show_ablations(outcome, ablation_table(folder, study.show))


def show_ablations(outcome: Outcome, table: pd.DataFrame) -> None:
    """Verdicts, levels and a chart of accuracies, as `ablation_table` gives them."""
    outcome.tables["accuracy"] = table
    for name, rows in table.groupby("model", sort=False):
        levels = rows.groupby("shots")["accuracy"].mean()
        outcome.read(str(name), ", ".join(percent(value) for value in levels) + " by k")
    hidden = table[table["hidden"] > 0].groupby("model", sort=False)["hidden"].mean()
    if len(hidden):
        shares = "; ".join(f"{name} {percent(share)}" for name, share in hidden.items())
        outcome.read("attention that went there, in heads with sinks", shares)
    for name, (untouched, controls) in PAIRS.items():
        lost = _lost(table, name, untouched)[:, 0]
        # The control that loses most, model by model and for each number of examples.
        of_controls = [_lost(table, control, untouched) for control in controls]
        hardest = np.concatenate(of_controls, axis=1).max(axis=1)
        after = f"{WORDS[name]} costs accuracy after examples (section 3.5)"
        means = f"({Estimate.mean(lost[:, -1], 'models')}) beyond the control that loses most"
        what = f"accuracy lost with five examples {means} ({Estimate.mean(hardest[:, -1], 'models')})"
        if name in hidden:
            most = max(hidden[control] for control in controls)
            theirs = percent(hidden[name])
            what += f", which hides {percent(most)} of the attention where the sinks hide {theirs}"
        beyond = lost - hardest
        outcome.claim(after, f"{what}, paired by model", Estimate.mean(beyond[:, -1], "models"), MORE)
        growing = f"{WORDS[name]} costs more, the more examples there are (section 3.5)"
        examples = np.arange(beyond.shape[1]) - (beyond.shape[1] - 1) / 2
        trend = {
            "rise an example, least squares over all numbers": beyond @ examples / (examples @ examples),
            "with five examples less with four": beyond[:, -1] - beyond[:, -2],
        }
        by_model = [
            judge(
                growing,
                f"accuracy lost beyond that control, {of}, by model",
                Estimate.mean(values, "models"),
                MORE,
            )
            for of, values in trend.items()
        ]
        least = table[(table["model"] == name) & (table["shots"] == table["shots"].min())]["accuracy"]
        left = Estimate.mean(least.to_numpy(np.float64) - 1 / RULES.values, "models")
        floor = "" if left.value > left.margin else AT_CHANCE
        outcome.verdicts.append(unless_explained(all_of(growing, by_model), HOLDS, floor))
    over_controls = table.groupby(["model", "folder", "seed", "shots"], as_index=False, sort=False)
    by_seed = over_controls[["accuracy", "accuracy_se"]].mean()
    best = RULES.best_accuracy().tolist()
    outcome.draw(
        "accuracy", accuracy_by_shots(over_seeds(by_seed), by_seed, chance=1 / RULES.values, best=best)
    )


def _lost(table: pd.DataFrame, name: str, untouched: str) -> Floats:
    """Accuracy lost against the untouched model: (models, seeds of the control, numbers of examples)."""
    parts = []
    for of in (name, untouched):
        rows = table[table["model"] == of]
        grid = rows.pivot(index=["folder", "control"], columns="shots", values="accuracy")
        parts.append(grid.to_numpy(np.float64).reshape(rows["folder"].nunique(), -1, grid.shape[1]))
    return parts[1] - parts[0]
