"""Sections 3.4 and 3.5 of Zhang et al. 2025 as interventions: are the sinks what examples in a prompt are good for?

In small models of the offline task the sinks of every prompt are hidden from all that attend to them, or the low-rank
terms of OATS in W_Q, W_K, W_V are taken out; then accuracy is measured by the number of examples. Controls hide as many
other keys, and take out random terms of the same singular values. The models come from `theodolite train few-shot`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool
from torch import Tensor

from theodolite.accumulate.catches import attend_and_catch
from theodolite.attention.inputs import AttentionInputs
from theodolite.corpus.few_shot_task import RULES, TEST_STREAM, prompt_ids
from theodolite.evaluate.few_shot import batch_of_prompts, right_answers
from theodolite.evaluate.scores import mean_and_error, over_seeds
from theodolite.judging import Criterion, Estimate
from theodolite.models import OpenModel, open_model
from theodolite.models.hooks import Hooks, hooked
from theodolite.papers.catch_tag_release.few_shot import COMMAND, PROMPT_SEED, calibration_prompts, models_in
from theodolite.papers.catch_tag_release.pruned_models import SPARSITY
from theodolite.papers.experiment import Study, experiment
from theodolite.prune import Pruned, prune_model
from theodolite.report.data import Floats
from theodolite.report.drawing import few_shot as drawing
from theodolite.report.measures import ZHANG
from theodolite.report.outcome import Outcome
from theodolite.sinks.interventions import attention_knockout, without_low_rank
from theodolite.system.progress import ShowStage, shown
from theodolite.system.wording import counted, number, percent

PROMPTS = 1000
"""That every model answers under every intervention, the same for all."""

CONTROLS = 2
"""Seeded controls of each intervention, of which the one that costs most is judged."""

DENSE, HIDDEN, OTHERS = "dense", "sinks hidden", "as many other keys hidden"
OATS, WITHOUT, RANDOM = "OATS", "OATS without its low-rank terms", "OATS without random terms as large"
PAIRS = {HIDDEN: (DENSE, OTHERS), WITHOUT: (OATS, RANDOM)}
"""Intervention → what it is made on, and its control."""

WORDS = {HIDDEN: "Hiding the sinks", WITHOUT: "Taking out the low-rank terms"}

MORE = Criterion("more than", 0.0, "more than under the hardest control (ours)")

Edit = Callable[[slice], AbstractContextManager[object]]
"""(prompts of a batch) → an intervention on the model while it reads them."""


class _SinkTap(Hooks):
    """Which keys of which heads are sinks of each prompt: (prompts, heads, T) by layer."""

    def __init__(self) -> None:
        self.sinks: dict[int, Tensor] = {}

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        prompts, heads, length, _ = inputs.query.shape
        outputs, sinks = [], torch.zeros(prompts, heads, length, dtype=torch.bool)
        for prompt in range(prompts):
            output, catches = attend_and_catch(inputs.of_contexts(slice(prompt, prompt + 1)))
            outputs.append(output)
            tokens = catches.position >= 0
            sinks[prompt, catches.head[tokens].cpu(), catches.position[tokens].cpu()] = True
        self.sinks[layer] = sinks
        return torch.cat(outputs)


def sinks_of_prompts(
    model: OpenModel, ids: Tensor, batch: int
) -> list[Bool[Tensor, "prompts heads positions"]]:
    """By layer."""
    parts = []
    for part in ids.split(batch):
        tap = _SinkTap()
        with hooked(model, tap):
            model.forward(part)
        parts.append(tap.sinks)
    return [torch.cat([part[layer] for part in parts]) for layer in range(model.layers)]


def other_keys(sinks: Bool[Tensor, "prompts heads positions"], seed: int) -> Tensor:
    """As many keys of each prompt and head that are no sinks, at random among those before the last quarter.

    A sink is one of these too: later keys are seen by too few queries.
    """
    noise = torch.rand(sinks.shape, generator=torch.Generator().manual_seed(seed))
    length = sinks.shape[-1]
    noise[..., length - length // 4 :] = 2.0
    noise[sinks] = 3.0
    return noise.argsort(-1).argsort(-1) < sinks.sum(-1, keepdim=True)


def _hiding(model: OpenModel, keys: list[Tensor]) -> Edit:
    """Keys (prompts, heads, positions) by layer, hidden in the heads that have any."""

    @contextmanager
    def hidden(part: slice) -> Iterator[None]:
        with ExitStack() as stack:
            for layer, of_layer in enumerate(keys):
                chosen = of_layer[part]
                for head in chosen.any(-1).any(0).nonzero().flatten().tolist():
                    stack.enter_context(attention_knockout(model, layer, head, chosen[:, head]))
            yield

    return hidden


def _without_terms(model: OpenModel, pruned: Pruned, control: int | None) -> Edit:
    @contextmanager
    def without(part: slice) -> Iterator[None]:
        with ExitStack() as stack:
            for layer in range(model.layers):
                stack.enter_context(
                    without_low_rank(model, layer, factors=pruned.factors(layer), control=control)
                )
            yield

    return without


def _accuracies(model: OpenModel, prompts: tuple[Tensor, Tensor, Tensor, list[int]], edit: Edit) -> Floats:
    """Right answers (prompts, numbers of examples) under an intervention."""
    ids, asked, labels, label_ids = prompts
    batch, right = batch_of_prompts(ids.shape[1], None), []
    for start in range(0, len(ids), batch):
        part = slice(start, min(start + batch, len(ids)))
        with edit(part):
            right.append(right_answers(model.hf, ids[part], asked[part], labels[part], label_ids))
    return torch.cat(right).numpy().astype(np.float64)


def ablation_rows(dense: OpenModel) -> Iterator[tuple[str, int, Floats]]:
    """(what was done, seed of the control, right answers) of one model."""
    drawn = RULES.draw(PROMPTS, np.random.default_rng([PROMPT_SEED, TEST_STREAM]))
    ids, asked, label_ids = prompt_ids(drawn, RULES, dense.required_tokenizer())
    prompts = ids, asked, torch.from_numpy(drawn.labels), label_ids
    sinks = sinks_of_prompts(dense, ids, batch_of_prompts(ids.shape[1], None))

    def nothing(part: slice) -> AbstractContextManager[object]:
        return ExitStack()

    yield DENSE, 0, _accuracies(dense, prompts, nothing)
    yield HIDDEN, 0, _accuracies(dense, prompts, _hiding(dense, sinks))
    for seed in range(CONTROLS):
        others = [other_keys(of_layer, seed * len(sinks) + layer) for layer, of_layer in enumerate(sinks)]
        yield OTHERS, seed, _accuracies(dense, prompts, _hiding(dense, others))
    model = copy.deepcopy(dense)
    report = prune_model(model, calibration_prompts(), "oats", SPARSITY)
    yield OATS, 0, _accuracies(model, prompts, nothing)
    yield WITHOUT, 0, _accuracies(model, prompts, _without_terms(model, report, None))
    for seed in range(CONTROLS):
        yield RANDOM, seed, _accuracies(model, prompts, _without_terms(model, report, seed))


def ablation_table(folder: Path, show: ShowStage = lambda what, done, total: None) -> pd.DataFrame:
    """One row per model, intervention, control's seed and number of examples: accuracy with its binomial error."""
    rows: list[dict[str, Any]] = []
    for place in shown(models_in(folder), "hiding sinks", show):
        seed = json.loads((place / "training.json").read_text(encoding="utf-8"))["seed"]
        for name, control, correct in ablation_rows(open_model(place, device="cpu")):
            for shots, answers in enumerate(correct.T):
                accuracy, error = mean_and_error(answers)
                rows.append(
                    {"model": name, "folder": place.name, "seed": seed, "control": control, "shots": shots}
                    | {"accuracy": accuracy, "accuracy_se": error, "prompts": len(correct)}
                )
    return pd.DataFrame(rows)


@experiment(
    "sinks/examples",
    "Few-shot accuracy with the sinks hidden, and without the low-rank terms",
    "Low-rank terms make sinks, sinks catch, tag and release, and that is what examples in a prompt are told apart by "
    "(sections 3.2 to 3.5)",
    needs=(COMMAND,),
    scaled_down="small models trained here, on the offline task",
)
def examples(study: Study, outcome: Outcome) -> None:
    purpose = "sinks/examples is read from a folder of training runs"
    training = study.require_training("few_shot", purpose, COMMAND)
    show_ablations(outcome, ablation_table(Path(training["folder"]), study.show))
    outcome.runs["trainings"] = training


def show_ablations(outcome: Outcome, table: pd.DataFrame) -> None:
    """Verdicts, levels and a chart of accuracies, as `ablation_table` gives them."""
    outcome.tables["accuracy"] = table
    for name, rows in table.groupby("model", sort=False):
        levels = rows.groupby("shots")["accuracy"].mean()
        outcome.read(str(name), ", ".join(percent(value) for value in levels) + " by k")
    for name, (untouched, control) in PAIRS.items():
        lost, by_control = _lost(table, name, untouched), _lost(table, control, untouched)
        for what, of in {
            f"{WORDS[name]} costs accuracy after examples (section 3.5)": lambda each: each[..., -1],
            f"{WORDS[name]} costs more, the more examples there are (section 3.5)": lambda each: (
                each[..., -1] - each[..., 0]
            ),
        }.items():
            hardest = of(by_control).max(axis=1)
            outcome.claim(
                what,
                f"accuracy lost {'with five examples' if 'after' in what else 'with five examples less with none'} "
                f"({Estimate.mean(of(lost)[:, 0], 'models')}) beyond the control that loses most "
                f"({Estimate.mean(hardest, 'models')}), paired by model",
                Estimate.mean(of(lost)[:, 0] - hardest, "models"),
                MORE,
            )
    means = table.groupby(["model", "folder", "seed", "shots"], as_index=False, sort=False)[
        ["accuracy", "accuracy_se"]
    ].mean()
    outcome.figure(
        "accuracy",
        "Accuracy against the number of examples, with sinks and without",
        drawing.accuracy_by_shots(
            over_seeds(means), means, chance=1 / RULES.values, best=RULES.best_accuracy().tolist()
        ),
        f"Means over {counted(table['folder'].nunique(), 'model')} with 95 % intervals (Student's t); "
        f"{number(PROMPTS)} prompts, the same for all; of controls the mean of {CONTROLS}. Dashed: the best achievable "
        "accuracy, computed exactly.",
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
