"""Learning from examples in a prompt (Zhang et al. 2025, Fig. 3, sections 3.4 and 3.5), on word tasks.

Fig. 3: accuracy against the number of examples, dense and pruned. Then sinks are hidden, or the low-rank terms of OATS
taken out; controls hide as many other keys, random or most attended, and take out random terms as large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theodolite import OpenModel
from theodolite.attention.inputs import AttentionInputs
from theodolite.attention.summary import summarise
from theodolite.estimates import Estimate, Floats
from theodolite.evaluate.few_shot import FewShotPrompts, prompts_for
from theodolite.evaluate.scores import mean_and_error
from theodolite.judging import HOLDS, all_of, unless_explained
from theodolite.models.hooks import Hooks, hooked
from theodolite.prune.checkpoint import Pruned
from theodolite.report import style
from theodolite.report.drawing.grammar import line
from theodolite.sinks.interventions import attention_knockout, without_low_rank
from theodolite.system.progress import shown
from theodolite.system.wording import for_plotly, percent
from theodolite_papers.catch_tag_release.pruned_sinks import (
    METHODS,
    SPARSITY,
    halves,
    kept_sinks,
    loss_difference,
    measure_sinks,
    pruned_model,
)
from theodolite_papers.experiment import Outcome, Study, declared

FIGURE_HEIGHT = 420
SHOWN = (0, 1, 2, 4, 8, 16)
"""Numbers of examples that are drawn and tabulated."""

PROMPTS, PROMPT_SEED = 100, 1
"""Of each task, that all models answer."""

ABLATION_PROMPTS = 20
"""Of each task, answered under every intervention, one at a time: sinks are of a text without padding."""

CONTROLS = 2
"""Seeded controls of each intervention. The one that costs most after sixteen examples is judged, paired by prompt."""

DENSE, HIDDEN = "dense", "sinks hidden"
OTHERS, ATTENDED = "as many other keys hidden", "as many other keys hidden, the most attended"
OATS, WITHOUT, RANDOM = "OATS", "OATS without its low-rank terms", "OATS without random terms as large"
PAIRS = {
    HIDDEN: ("Hiding the sinks", DENSE, (OTHERS, ATTENDED)),
    WITHOUT: ("Taking out the low-rank terms", OATS, (RANDOM,)),
}
"""Intervention → in words, what it is made on, and its controls."""

NONE_LEFT = (
    "nothing is right without examples, below which nothing is lost: the loss must grow with the accuracy"
)

Answers = Bool[np.ndarray, "prompts shots"]


def accuracy_by_shots(answers: Mapping[str, Floats]) -> go.Figure:
    """Draw the accuracy of several models after k examples, with 95 % intervals over prompts."""
    places = np.arange(len(SHOWN), dtype=np.float64)  # as far apart as each other
    traces: list[Any] = []
    for index, (name, right) in enumerate(answers.items()):
        values, errors = np.array([mean_and_error(right[:, shots]) for shots in SHOWN]).T
        texts = [
            [shots, *map(percent, pair)] for shots, *pair in zip(SHOWN, values, 1.96 * errors, strict=True)
        ]
        hover = f"{for_plotly(name)}, %{{customdata[0]}} examples: %{{customdata[1]}} ± %{{customdata[2]}}"
        own: dict[str, Any] = {"error_y": style.error_bars(1.96 * errors), "marker": 6, "customdata": texts}
        shift = 0.04 * (index - (len(answers) - 1) / 2)
        colour = style.CATEGORIES[index % len(style.CATEGORIES)]
        traces += line(places + shift, values, name, colour, hover=f"{hover}<extra></extra>", **own)
    ticks = {"tickmode": "array", "tickvals": places.tolist(), "ticktext": [str(shots) for shots in SHOWN]}
    layout = {"xaxis": ticks | {"zeroline": False}, "yaxis": {"tickformat": ".0%", "zeroline": False}}
    return style.figure(traces, "examples in the prompt", "accuracy", height=FIGURE_HEIGHT, layout=layout)


def answer(model: OpenModel, prompts: FewShotPrompts, batch: int | None = None) -> Answers:
    """Mark the right answers of a model as it is now."""
    return prompts.asked_of(model, batch).whole()["right"].numpy()


def _asked(model: OpenModel, prompts: int) -> FewShotPrompts:
    return prompts_for(model, prompts, PROMPT_SEED)


def tabulated(answers: Mapping[str, Answers], prompts: FewShotPrompts) -> pd.DataFrame:
    """Tabulate `model task shots accuracy accuracy_se prompts`; the task "" is all of them."""
    tasks = np.array(prompts.tasks)
    rows = []
    for name, right in answers.items():
        for task in ("", *dict.fromkeys(prompts.tasks)):
            of_task = right[tasks == task] if task else right
            for shots in SHOWN:
                accuracy, error = mean_and_error(of_task[:, shots].astype(np.float64))
                rows.append((name, task, shots, accuracy, error, len(of_task)))
    return pd.DataFrame(rows, columns=["model", "task", "shots", "accuracy", "accuracy_se", "prompts"])


@declared("sinks/figure3")
def figure_3(study: Study, outcome: Outcome) -> None:
    dense = study.require_model()
    prompts, (_, measured) = _asked(dense, PROMPTS), halves(study)
    untouched = study.cached("dense sinks alone", lambda: measure_sinks(dense, measured))
    answers = {DENSE: answer(dense, prompts)}
    for method, name in shown([*METHODS.items()], "answering after examples", study.show):
        model, pruned = pruned_model(study, method)
        answers[name] = answer(model, prompts)
        sinks = measure_sinks(model, measured)
        kept, more = kept_sinks(untouched, sinks), loss_difference(untouched, sinks)
        keeps = f"keeps {percent(kept[0])} of the dense model's sinks; {more[0]:.2f} nats more"
        outcome.read(f"{name}, beside examples", keeps)
        if name == OATS:
            with _all(_take_out(model, pruned, None)):
                answers[WITHOUT] = answer(model, prompts)
    outcome.tables["accuracy"] = tabulated(answers, prompts)
    show_accuracy(outcome, answers)


def show_accuracy(outcome: Outcome, answers: Mapping[str, Answers]) -> None:
    """Show verdicts, levels and a chart of the answers of every model."""
    right = {name: of.astype(np.float64) for name, of in answers.items()}
    outcome.judge("examples-help", Estimate.mean(right[DENSE][:, -1] - right[DENSE][:, 0], "prompts"))
    for name, of in right.items():
        outcome.read(name, _by_k(of))
    for name in ("Wanda", "SparseGPT"):
        gap, of_pair = right[OATS] - right[name], {"method": name, "removed": f"{percent(SPARSITY)} removed"}
        outcome.judge("similar", Estimate.mean(gap[:, 0], "prompts").floored(), **of_pair)
        outcome.judge("widens", Estimate.mean(gap[:, -1] - gap[:, 0], "prompts"), **of_pair)
    outcome.draw("accuracy", accuracy_by_shots(right), removed=f"{percent(SPARSITY)} removed")


def _by_k(right: Floats) -> str:
    shares = ", ".join(percent(right[:, shots].mean()) for shots in SHOWN)
    return f"{shares} after {', '.join(map(str, SHOWN))} examples"


@contextmanager
def _all(interventions: Iterable[AbstractContextManager[object]]) -> Iterator[None]:
    with ExitStack() as stack:
        for intervention in interventions:
            stack.enter_context(intervention)
        yield


@dataclass(frozen=True)
class PromptAttention:
    """The sinks of one layer, and the attention that each key receives, summed over the queries."""

    sinks: Bool[Tensor, "heads positions"]
    mass: Float[Tensor, "heads positions"]


class _SinkTap(Hooks):
    """Sinks and attention of a prompt, by layer."""

    def __init__(self) -> None:
        self.layers: dict[int, PromptAttention] = {}

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        summary = summarise(inputs)
        self.layers[layer] = PromptAttention(summary.sinks[0].cpu(), summary.mass[0].cpu())
        return summary.output


def attention_of_prompt(model: OpenModel, ids: Tensor) -> list[PromptAttention]:
    """Read a prompt, and return the sinks and the attention of every layer."""
    tap = _SinkTap()
    with hooked(model, tap):
        model.forward(ids[None])
    return [tap.layers[layer] for layer in range(model.layers)]


def share_of(attention: list[PromptAttention], keys: list[Tensor]) -> float:
    """Average the share of attention that goes to `keys` (of each layer), over the heads with a sink."""
    shares = [
        (of.mass.where(of_layer, 0.0).sum(-1) / of.mass.sum(-1))[of.sinks.any(-1)]
        for of, of_layer in zip(attention, keys, strict=True)
    ]
    return float(torch.cat(shares).mean())


def other_keys(sinks: Bool[Tensor, "heads positions"], order: Float[Tensor, "heads positions"]) -> Tensor:
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


def _hide(model: OpenModel, keys: list[Tensor]) -> Iterator[AbstractContextManager[object]]:
    """Hide keys (heads, positions) by layer, in the heads that have any."""
    for layer, of_layer in enumerate(keys):
        for head in of_layer.any(-1).nonzero().flatten().tolist():
            yield attention_knockout(model, layer, head, of_layer[None, head])


def _take_out(
    model: OpenModel, pruned: Pruned, control: int | None
) -> Iterator[AbstractContextManager[object]]:
    """Take out every layer's low-rank terms, or random ones as large."""
    for layer in range(model.layers):
        yield without_low_rank(model, layer, factors=pruned.factors(layer), control=control)


def without_sinks(
    model: OpenModel, prompts: FewShotPrompts, show: Callable[[str, int, int], None]
) -> tuple[dict[str, list[Answers]], dict[str, float]]:
    """Answer with sinks hidden, and with other keys: answers by name and seed of the control, and attention hidden."""
    answers: dict[str, dict[int, list[Tensor]]] = {}
    shares: dict[str, list[float]] = {}
    for place in shown(range(len(prompts.ids)), "hiding sinks", show):
        part, end = slice(place, place + 1), int(prompts.answers[place, -1, 1])
        ids = prompts.ids[place, :end]
        attention = attention_of_prompt(model, ids)
        sinks = HIDDEN, 0, [of.sinks for of in attention]
        for name, seed, keys in ((DENSE, 0, []), sinks, *_controls(attention)):
            with _all(_hide(model, keys)):
                logits = model.logits(ids[None])
            padding = (0, 0, 0, prompts.ids.shape[1] - end)
            right = prompts.right(part, torch.nn.functional.pad(logits, padding))
            answers.setdefault(name, {}).setdefault(seed, []).append(right)
            if keys:
                shares.setdefault(name, []).append(share_of(attention, keys))
    joined = {
        name: [torch.cat(rows).numpy() for rows in by_seed.values()] for name, by_seed in answers.items()
    }
    return joined, {name: float(np.nanmean(of)) for name, of in shares.items()}


@declared("sinks/examples")
def examples(study: Study, outcome: Outcome) -> None:
    dense = study.require_model()
    prompts = _asked(dense, ABLATION_PROMPTS)
    answers, hidden = without_sinks(dense, prompts, study.show)
    model, pruned = pruned_model(study, "oats")
    answers[OATS] = [answer(model, prompts)]
    for name, controls in ((WITHOUT, [None]), (RANDOM, range(CONTROLS))):
        answers[name] = []
        for control in controls:
            with _all(_take_out(model, pruned, control)):
                answers[name].append(answer(model, prompts))
    outcome.tables["accuracy"] = tabulated(
        {name: np.mean(of, axis=0) for name, of in answers.items()}, prompts
    )
    show_ablations(outcome, answers, hidden)


def show_ablations(
    outcome: Outcome, answers: Mapping[str, list[Answers]], hidden: Mapping[str, float]
) -> None:
    """Show verdicts, levels and a chart of answers by name and control, and of the share of attention hidden."""
    right = {name: np.array(of, dtype=np.float64) for name, of in answers.items()}
    for name, of in right.items():
        outcome.read(name, _by_k(of.mean(axis=0)))
    if hidden:
        shares = "; ".join(f"{name} {percent(share)}" for name, share in hidden.items())
        outcome.read("attention that went there, in heads with sinks", shares)
    for name, (words, untouched, controls) in PAIRS.items():
        lost = right[untouched][0] - right[name][0]
        of_controls = [right[untouched][0] - each for control in controls for each in right[control]]
        costs = [each[:, -1].mean() for each in of_controls]
        hardest = of_controls[int(np.argmax(costs))]
        beyond = lost - hardest
        attention = ""
        if name in hidden:
            most, theirs = percent(max(hidden[control] for control in controls)), percent(hidden[name])
            attention = f", which hides {most} of the attention where the sinks hide {theirs}"
        means = {
            "lost": Estimate.mean(lost[:, -1], "prompts"),
            "hardest": Estimate.mean(hardest[:, -1], "prompts"),
        }
        estimate = Estimate.mean(beyond[:, -1], "prompts")
        outcome.judge("costs", estimate, intervention=words, attention=attention, **means)
        numbers = np.log2(1 + np.arange(beyond.shape[1]))
        numbers = numbers - numbers.mean()
        parts = [
            outcome.verdict(f"grows.{part}", Estimate.mean(values, "prompts"), intervention=words)
            for part, values in (
                ("trend", beyond @ numbers / (numbers @ numbers)),
                ("last", beyond[:, -1] - beyond[:, 0]),
            )
        ]
        verdict = all_of(outcome.sentence("grows", intervention=words), parts)
        floor = NONE_LEFT if not right[name][0][:, 0].any() else ""
        outcome.verdicts.append(unless_explained(verdict, HOLDS, floor))
    outcome.draw("accuracy", accuracy_by_shots({name: of.mean(axis=0) for name, of in right.items()}))
