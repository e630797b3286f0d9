"""Sections 3.4 and 3.5 of Zhang et al. 2025 as interventions: are the sinks what examples in a prompt are good for?

In the models of `theodolite train few-shot` sinks are hidden, or the low-rank terms of OATS taken out. Controls hide as
many other keys, random or most attended, and take out random terms of the same singular values.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theodolite import OpenModel, open_model
from theodolite.attention.inputs import AttentionInputs
from theodolite.attention.summary import summarise
from theodolite.corpus.few_shot_task import RULES, TEST_STREAM, prompt_ids
from theodolite.estimates import Estimate
from theodolite.evaluate.few_shot import batch_of_prompts, right_answers
from theodolite.evaluate.scores import over_seeds
from theodolite.judging import HOLDS, Criterion, all_of, judge, unless_explained
from theodolite.models.hooks import Hooks, hooked
from theodolite.prune.model import prune_model
from theodolite.prune.pruned import Pruned
from theodolite.report.data import Floats
from theodolite.sinks.interventions import attention_knockout, without_low_rank
from theodolite.system.progress import ShowStage, shown
from theodolite.system.wording import percent
from theodolite_papers.catch_tag_release import few_shot
from theodolite_papers.catch_tag_release.pruned_models import SPARSITY
from theodolite_papers.experiment import ZHANG, Outcome, Study, experiment

PROMPTS = 1000
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
    """Of one layer: which keys are sinks, and the attention that each receives, summed over the queries."""

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
    """By layer."""
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
    """As many keys per prompt and head that are no sinks, lowest in `order`; the last quarter has too few queries."""
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
    drawn = RULES.draw(PROMPTS, np.random.default_rng([few_shot.PROMPT_SEED, TEST_STREAM]))
    ids, asked, label_ids = prompt_ids(drawn, RULES, dense.required_tokenizer())
    prompts = ids, asked, torch.from_numpy(drawn.labels), label_ids
    attention = attention_of_prompts(dense, ids, batch_of_prompts(ids.shape[1], None))

    yield DENSE, 0, _accuracies(dense, prompts, lambda part: ()), 0.0
    sinks = HIDDEN, 0, [of.sinks for of in attention]
    for name, seed, keys in (sinks, *_controls(attention)):
        yield name, seed, _accuracies(dense, prompts, _hiding(dense, keys)), share_of(attention, keys)
    model = copy.deepcopy(dense)
    report = prune_model(model, few_shot.calibration_prompts(), "oats", SPARSITY)
    yield OATS, 0, _accuracies(model, prompts, lambda part: ()), 0.0
    yield WITHOUT, 0, _accuracies(model, prompts, _without_terms(model, report, None)), 0.0
    for seed in range(CONTROLS):
        yield RANDOM, seed, _accuracies(model, prompts, _without_terms(model, report, seed)), 0.0


def ablation_table(folder: Path, show: ShowStage = lambda what, done, total: None) -> pd.DataFrame:
    """One row per model, intervention, control's seed and number of examples: accuracy with its binomial error."""
    rows: list[dict[str, Any]] = []
    for place in shown(few_shot.models_in(folder), "hiding sinks", show):
        seed = json.loads((place / "training.json").read_text(encoding="utf-8"))["seed"]
        for name, control, correct, hidden in ablation_rows(open_model(place, device="cpu")):
            of = {"model": name, "folder": place.name, "seed": seed, "control": control}
            rows += [row | {"hidden": hidden} for row in few_shot.rows_by_shots(correct, **of)]
    return pd.DataFrame(rows)


@experiment(
    "sinks/examples",
    "Few-shot accuracy with the sinks hidden, and without the low-rank terms",
    "Low-rank terms make sinks, sinks catch, tag and release, and that is what examples in a prompt are told apart by "
    "(sections 3.2 to 3.5)",
    needs=(few_shot.COMMAND,),
    scaled_down="small models trained here, on the offline task",
)
def examples(study: Study, outcome: Outcome) -> None:
    purpose = "sinks/examples is read from a folder of training runs"
    folder = study.training_folder("few_shot", purpose, few_shot.COMMAND, outcome)
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
    outcome.figure(
        "accuracy",
        "Accuracy against the number of examples, with sinks and without",
        few_shot.accuracy_by_shots(over_seeds(by_seed), by_seed, chance=1 / RULES.values, best=best),
        f"Means over models with 95 % intervals, controls: mean of {CONTROLS}. Dashed: the best achievable accuracy.",
        "lines that fall behind their controls from left to right.",
        f"{ZHANG}, sections 3.4 and 3.5; the interventions are ours",
        wide=True,
    )


def _lost(table: pd.DataFrame, name: str, untouched: str) -> Floats:
    """Accuracy lost against the untouched model: (models, seeds of the control, numbers of examples)."""
    parts = []
    for of in (name, untouched):
        rows = table[table["model"] == of]
        grid = rows.pivot(index=["folder", "control"], columns="shots", values="accuracy")
        parts.append(grid.to_numpy(np.float64).reshape(rows["folder"].nunique(), -1, grid.shape[1]))
    return parts[1] - parts[0]
