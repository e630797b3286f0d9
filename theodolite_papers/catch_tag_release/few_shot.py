"""Learning from examples in a prompt (Zhang et al. 2025, Fig. 3, sections 3.4 and 3.5), in models of the offline task.

Fig. 3: accuracy against the number of examples, dense and pruned. Then sinks are hidden, or the low-rank terms of OATS
taken out; controls hide as many other keys, random or most attended, and take out random terms as large.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import starmap
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
from theodolite.estimates import Estimate, Floats
from theodolite.evaluate.few_shot import PROMPTS, batch_of_prompts, few_shot_answers, right_answers
from theodolite.evaluate.scores import mean_and_error, over_seeds
from theodolite.judging import HOLDS, all_of, unless_explained
from theodolite.models.hooks import Hooks, hooked
from theodolite.prune.checkpoint import Pruned
from theodolite.prune.model import prune_model
from theodolite.report import style
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

COMMAND = "theodolite train few-shot"

SPARSITIES = (0.5, 0.7)
"""The paper's, and one at which small models lose more."""

CALIBRATION = 512
"""Prompts that pruning is calibrated on; no model was trained or is tested on them."""

PROMPT_SEED = 1
"""Seed of the prompts that all models answer."""

ABLATION_PROMPTS = 1000
"""That every model answers under every intervention, the same for all."""

CONTROLS = 2
"""Seeded controls of each intervention. Of all controls the one that costs most is judged, model by model."""

DENSE, HIDDEN = "dense", "sinks hidden"
OTHERS, ATTENDED = "as many other keys hidden", "as many other keys hidden, the most attended"
OATS, WITHOUT, RANDOM = "OATS", "OATS without its low-rank terms", "OATS without random terms as large"
PAIRS = {
    HIDDEN: ("Hiding the sinks", DENSE, (OTHERS, ATTENDED)),
    WITHOUT: ("Taking out the low-rank terms", OATS, (RANDOM,)),
}
"""Intervention → in words, what it is made on, and its controls."""

AT_CHANCE = (
    "at chance without examples already, below which nothing is lost: the loss must grow with the accuracy"
)

Interventions = Callable[[slice], Iterable[AbstractContextManager[object]]]
"""(prompts of a batch) → the interventions on the model while it reads them."""


def accuracy_by_shots(by_seed: pd.DataFrame, chance: float, best: Sequence[float]) -> go.Figure:
    """Draw the accuracy of several models after k examples, means with intervals, an open circle per seed.

    by_seed: `model seed shots accuracy accuracy_se`.
    """
    means, shots = over_seeds(by_seed), sorted(set(by_seed["shots"]))
    models = list(dict.fromkeys(means["model"]))
    traces: list[Any] = []
    for index, (model, colour) in enumerate(zip(models, style.CATEGORIES, strict=False)):
        shift, name = ASIDE * (index - (len(models) - 1) / 2), for_plotly(model)
        own: dict[str, Any] = {"legendgroup": name, "opacity": 0.6, "showlegend": False}
        own["marker"] = {"size": 4, "symbol": "circle-open"}
        rows = by_seed[by_seed["model"] == model]
        errors = zip(rows["accuracy"], rows["accuracy_se"], strict=True)
        own["customdata"] = list(zip(rows["shots"], rows["seed"], starmap(with_error, errors), strict=True))
        hover = (
            f"{name}, seed %{{customdata[1]}}, %{{customdata[0]}} examples: %{{customdata[2]}}<extra></extra>"
        )
        at = rows["shots"].to_numpy(np.float64) + shift
        traces.append(dots(at, rows["accuracy"], None, None, colour, hover, **own))
        rows = means[means["model"] == model]
        values = [rows[of].to_numpy(np.float64) for of in ("accuracy", "low", "high")]
        texts = [[count, *map(percent, each)] for count, *each in zip(rows["shots"], *values, strict=True)]
        hover = f"{name}, %{{customdata[0]}} examples: %{{customdata[1]}} (%{{customdata[2]}} to %{{customdata[3]}})"
        own = {"error_y": whiskers(*values), "marker": 6, "customdata": texts, "legendgroup": name}
        at = rows["shots"].to_numpy(np.float64) + shift
        traces += line(at, values[0], model, colour, hover=f"{hover}<extra></extra>", **own)
    for name, heights, dash in (
        ("best possible", best, "dash"),
        ("chance", [chance] * len(shots), "dot"),
    ):
        hover = f"{name}, %{{x}} examples: %{{y:.1%}}<extra></extra>"
        traces += line(shots, heights, name, style.GREY, dash=dash, width=1.2, hover=hover)
    layout = {
        "xaxis": {"tickmode": "array", "tickvals": shots, "zeroline": False},
        "yaxis": {"tickformat": ".0%", "zeroline": False},
    }
    return style.figure(traces, "examples in the prompt", "accuracy", height=FIGURE_HEIGHT, layout=layout)


def calibration_prompts() -> Corpus:
    """Return the prompts that pruning is calibrated on."""
    prompts = RULES.draw(CALIBRATION, np.random.default_rng([PROMPT_SEED, CORPUS_STREAM]))
    return Corpus.from_ids(torch.from_numpy(prompts.ids))


def shots_table(folder: Path, show: ShowStage = lambda what, done, total: None) -> pd.DataFrame:
    """Tabulate model, sparsity, method and number of examples: accuracy with its binomial standard error."""
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
    """Make a row for every number of examples, of right answers (prompts, numbers of examples) of the model `of`."""
    rows = []
    for shots, answers in enumerate(correct.astype(np.float64).T):
        accuracy, error = mean_and_error(answers)
        row = {"shots": shots, "accuracy": accuracy, "accuracy_se": error, "prompts": len(correct)}
        rows.append(of | row)
    return rows


def _by_shots(table: pd.DataFrame, name: str, sparsity: float) -> Floats:
    """Return accuracy (models, numbers of examples)."""
    rows = table[(table["model"] == name) & (table["sparsity"] == sparsity)]
    return rows.pivot(index="folder", columns="shots", values="accuracy").to_numpy(np.float64)


@declared("sinks/figure3")
def figure_3(study: Study, outcome: Outcome) -> None:
    show_accuracy(outcome, shots_table(_trained(study, outcome, "sinks/figure3"), study.show))


def _trained(study: Study, outcome: Outcome, name: str) -> Path:
    return study.training_folder(
        "few_shot", f"{name} is read from a folder of training runs", COMMAND, outcome
    )


def show_accuracy(outcome: Outcome, table: pd.DataFrame) -> None:
    """Show verdicts, levels and charts of accuracies, as `shots_table` gives them."""
    outcome.tables["accuracy"] = table
    dense = _by_shots(table, DENSE, SPARSITIES[0])
    outcome.judge("examples-help", Estimate.mean(dense[:, -1] - dense[:, 0], "models"))
    outcome.read(DENSE, _by_k(dense.mean(axis=0)))
    order = {name: place for place, name in enumerate((DENSE, *METHODS.values()))}
    for sparsity in SPARSITIES:
        removed = f"{percent(sparsity)} removed"
        by_method = {name: _by_shots(table, name, sparsity) for name in METHODS.values()}
        for name, accuracy in by_method.items():
            outcome.read(f"{name}, {removed}", _by_k(accuracy.mean(axis=0)))
        for name in ("Wanda", "SparseGPT"):
            gap, of = by_method["OATS"] - by_method[name], {"method": name, "removed": removed}
            outcome.judge("similar", Estimate.mean(gap[:, 0], "models"), **of)
            outcome.judge("widens", Estimate.mean(gap[:, -1] - gap[:, 0], "models"), **of)
        rows = table[table["sparsity"] == sparsity]
        rows = rows.sort_values("model", key=lambda names: names.map(order), kind="stable")
        _draw(outcome, f"accuracy-{round(100 * sparsity)}", rows, removed=removed)


def _draw(outcome: Outcome, key: str, rows: pd.DataFrame, **values: str) -> None:
    drawn = accuracy_by_shots(rows, 1 / RULES.values, RULES.best_accuracy().tolist())
    outcome.draw(key, drawn, "accuracy", **values)


def _by_k(accuracy: Iterable[float]) -> str:
    return ", ".join(percent(value) for value in accuracy) + " by k"


def models_in(folder: str | Path) -> list[Path]:
    """List the models of the few-shot task in the folders of a folder, in the order of their names."""
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
    """Return the provenance of `sinks/figure3`."""
    models = [place.name for place in models_in(folder)]
    entry = {"folder": str(folder), "models": models, "prompts": PROMPTS}
    return of_trainings(f"{counted(len(models), 'model')} in {Path(folder).name}", "GPT-NeoX", few_shot=entry)


@dataclass(frozen=True)
class PromptAttention:
    """The sinks of one layer, and the attention that each key receives, summed over the queries."""

    sinks: Bool[Tensor, "prompts heads positions"]
    mass: Float[Tensor, "prompts heads positions"]


class _SinkTap(Hooks):
    """Sinks and attention of every batch, by layer."""

    def __init__(self) -> None:
        self.layers: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        summary = summarise(inputs)
        self.layers.setdefault(layer, []).append((summary.sinks.cpu(), summary.mass.cpu()))
        return summary.output


def attention_of_prompts(model: OpenModel, ids: Tensor, batch: int) -> list[PromptAttention]:
    """Read prompts, and return the sinks and the attention of every layer."""
    tap = _SinkTap()
    with hooked(model, tap):
        for part in ids.split(batch):
            model.forward(part)
    layers = [zip(*tap.layers[layer], strict=True) for layer in range(model.layers)]
    return [PromptAttention(torch.cat(sinks), torch.cat(mass)) for sinks, mass in layers]


def share_of(attention: list[PromptAttention], keys: list[Tensor]) -> float:
    """Average the share of attention that goes to `keys` (of each layer), over the heads and prompts with a sink."""
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
    """Yield (name, seed, keys by layer) that are masked in the place of the sinks."""
    for seed in range(CONTROLS):
        generator = torch.Generator().manual_seed(seed)
        orders = (torch.rand(of.sinks.shape, generator=generator) for of in attention)
        yield OTHERS, seed, [other_keys(of.sinks, order) for of, order in zip(attention, orders, strict=True)]
    yield ATTENDED, 0, [other_keys(of.sinks, -of.mass) for of in attention]


def _hide(model: OpenModel, keys: list[Tensor], part: slice) -> Iterator[AbstractContextManager[object]]:
    """Hide keys (prompts, heads, positions) by layer, in the heads that have any."""
    for layer, of_layer in enumerate(keys):
        chosen = of_layer[part]
        for head in chosen.any(-1).any(0).nonzero().flatten().tolist():
            yield attention_knockout(model, layer, head, chosen[:, head])


def _take_out(
    model: OpenModel, pruned: Pruned, control: int | None, part: slice
) -> Iterator[AbstractContextManager[object]]:
    """Take out every layer's low-rank terms, or random ones as large."""
    for layer in range(model.layers):
        yield without_low_rank(model, layer, factors=pruned.factors(layer), control=control)


def _accuracies(
    model: OpenModel, prompts: tuple[Tensor, Tensor, Tensor, list[int]], interventions: Interventions
) -> Floats:
    """Return right answers (prompts, numbers of examples) under an intervention."""
    ids, asked, labels, label_ids = prompts
    batch, right = batch_of_prompts(ids.shape[1], None), []
    for start in range(0, len(ids), batch):
        part = slice(start, min(start + batch, len(ids)))
        with ExitStack() as stack:
            for intervention in interventions(part):
                stack.enter_context(intervention)
            right.append(right_answers(model.hf, ids[part], asked[part], labels[part], label_ids))
    return torch.cat(right).numpy().astype(np.float64)


def ablation_rows(dense: OpenModel) -> Iterator[tuple[str, int, Floats, float]]:
    """Yield (what was done, seed of the control, right answers, share of attention masked) of one model."""
    drawn = RULES.draw(ABLATION_PROMPTS, np.random.default_rng([PROMPT_SEED, TEST_STREAM]))
    ids, asked, label_ids = prompt_ids(drawn, RULES, dense.required_tokenizer())
    prompts = ids, asked, torch.from_numpy(drawn.labels), label_ids
    attention = attention_of_prompts(dense, ids, batch_of_prompts(ids.shape[1], None))

    yield DENSE, 0, _accuracies(dense, prompts, lambda part: ()), 0.0
    sinks = HIDDEN, 0, [of.sinks for of in attention]
    for name, seed, keys in (sinks, *_controls(attention)):
        yield name, seed, _accuracies(dense, prompts, partial(_hide, dense, keys)), share_of(attention, keys)
    model = copy.deepcopy(dense)
    report = prune_model(model, calibration_prompts(), "oats", SPARSITY)
    yield OATS, 0, _accuracies(model, prompts, lambda part: ()), 0.0
    yield WITHOUT, 0, _accuracies(model, prompts, partial(_take_out, model, report, None)), 0.0
    for seed in range(CONTROLS):
        yield RANDOM, seed, _accuracies(model, prompts, partial(_take_out, model, report, seed)), 0.0


def ablation_table(folder: Path, show: ShowStage = lambda what, done, total: None) -> pd.DataFrame:
    """Tabulate model, intervention, control's seed and number of examples: accuracy with its binomial error."""
    rows: list[dict[str, Any]] = []
    for place in shown(models_in(folder), "hiding sinks", show):
        seed = json.loads((place / "training.json").read_text(encoding="utf-8"))["seed"]
        for name, control, correct, hidden in ablation_rows(open_model(place, device="cpu")):
            of = {"model": name, "folder": place.name, "seed": seed, "control": control}
            rows += [row | {"hidden": hidden} for row in rows_by_shots(correct, **of)]
    return pd.DataFrame(rows)


@declared("sinks/examples")
def examples(study: Study, outcome: Outcome) -> None:
    show_ablations(outcome, ablation_table(_trained(study, outcome, "sinks/examples"), study.show))


def show_ablations(outcome: Outcome, table: pd.DataFrame) -> None:
    """Show verdicts, levels and a chart of accuracies, as `ablation_table` gives them."""
    outcome.tables["accuracy"] = table
    for name, rows in table.groupby("model", sort=False):
        outcome.read(str(name), _by_k(rows.groupby("shots")["accuracy"].mean()))
    hidden = table[table["hidden"] > 0].groupby("model", sort=False)["hidden"].mean()
    if len(hidden):
        shares = "; ".join(f"{name} {percent(share)}" for name, share in hidden.items())
        outcome.read("attention that went there, in heads with sinks", shares)
    for name, (words, untouched, controls) in PAIRS.items():
        lost = _lost(table, name, untouched)[:, 0]
        # The control that loses most, model by model and for each number of examples.
        of_controls = [_lost(table, control, untouched) for control in controls]
        hardest = np.concatenate(of_controls, axis=1).max(axis=1)
        beyond = lost - hardest
        attention = ""
        if name in hidden:
            most, theirs = percent(max(hidden[control] for control in controls)), percent(hidden[name])
            attention = f", which hides {most} of the attention where the sinks hide {theirs}"
        means = {
            "lost": Estimate.mean(lost[:, -1], "models"),
            "hardest": Estimate.mean(hardest[:, -1], "models"),
        }
        estimate = Estimate.mean(beyond[:, -1], "models")
        outcome.judge("costs", estimate, intervention=words, attention=attention, **means)
        examples = np.arange(beyond.shape[1]) - (beyond.shape[1] - 1) / 2
        parts = [
            outcome.verdict(f"grows.{part}", Estimate.mean(values, "models"), intervention=words)
            for part, values in (
                ("trend", beyond @ examples / (examples @ examples)),
                ("last", beyond[:, -1] - beyond[:, -2]),
            )
        ]
        least = table[(table["model"] == name) & (table["shots"] == table["shots"].min())]["accuracy"]
        left = Estimate.mean(least.to_numpy(np.float64) - 1 / RULES.values, "models")
        floor = "" if left.value > left.margin else AT_CHANCE
        verdict = all_of(outcome.sentence("grows", intervention=words), parts)
        outcome.verdicts.append(unless_explained(verdict, HOLDS, floor))
    over_controls = table.groupby(["model", "folder", "seed", "shots"], as_index=False, sort=False)
    _draw(outcome, "accuracy", over_controls[["accuracy", "accuracy_se"]].mean())


def _lost(table: pd.DataFrame, name: str, untouched: str) -> Floats:
    """Compute the accuracy lost against the untouched model: (models, seeds of the control, numbers of examples)."""
    parts = []
    for of in (name, untouched):
        rows = table[table["model"] == of]
        grid = rows.pivot(index=["folder", "control"], columns="shots", values="accuracy")
        parts.append(grid.to_numpy(np.float64).reshape(rows["folder"].nunique(), -1, grid.shape[1]))
    return parts[1] - parts[0]
