"""Massive activations and sinks, one without the other (Sun et al. 2026, “The Spike, the Sparse and the Sink”).

Massive activations are found on half of the contexts. On the others, and on word tasks, they are taken out (set to what
other tokens have), their tokens are held constant, or heads that have a sink there cannot attend to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theodolite import OpenModel
from theodolite.attention.inputs import AttentionInputs
from theodolite.attention.summary import summarise
from theodolite.errors import UsageError
from theodolite.estimates import Estimate
from theodolite.evaluate.few_shot import prompts_for
from theodolite.models.hooks import Hooks, hooked
from theodolite.passes.corpus_pass import next_token_losses
from theodolite.system.wording import listed, number, percent, with_error
from theodolite_papers.catch_tag_release import ablated, few_shot
from theodolite_papers.catch_tag_release.ablated import Ablation, Reading, Spikes, hidden, other_keys
from theodolite_papers.catch_tag_release.pruned_sinks import DENSE, few_of, ratio_over_contexts
from theodolite_papers.drawing import intervals
from theodolite_papers.experiment import Outcome, Study, chosen_and_judged, declared

CONTEXTS = 32  # that are judged at most, and as many on which massive activations are found
PROMPTS, SEED = 8, 1  # of each word task
REMOVED, DIMENSIONS = "massive activations taken out", "as many other dimensions of these tokens taken out"
CONSTANT = "these tokens held constant"
HIDDEN, KEYS = "the sinks' attention hidden", "as many of the most attended other keys hidden"
BOTH = "both taken out"
"""What is done to a model; `DIMENSIONS` and `KEYS` are the controls of `REMOVED` and `HIDDEN`."""


def ablations(model: OpenModel, spikes: Spikes) -> dict[str, Ablation]:
    """Return all ablations by name, the model as it is first."""
    every = torch.ones_like(spikes.dimensions)
    replaced = {
        REMOVED: (spikes.dimensions, spikes.others),
        DIMENSIONS: (spikes.next_largest(), spikes.others),
        CONSTANT: (every, spikes.spiking),
    }

    def of_values(name: str) -> Ablation:
        return lambda reading: [ablated.replace_activations(model, reading.spiking, *replaced[name])]

    def of_keys(name: str) -> Ablation:
        def opened(reading: Reading) -> Iterable[AbstractContextManager[object]]:
            tokens = reading.spiking.any(dim=0)[:, None]
            sinks = {layer: of.sinks & tokens for layer, of in reading.layers.items()}
            if name == HIDDEN:
                return hidden(model, sinks)
            orders = {layer: -of.mass.masked_fill(tokens, -torch.inf) for layer, of in reading.layers.items()}
            return hidden(model, {layer: other_keys(of, orders[layer]) for layer, of in sinks.items()})

        return opened

    by_name = {name: of_values(name) for name in replaced} | {name: of_keys(name) for name in (HIDDEN, KEYS)}
    return {
        DENSE: lambda reading: (),
        **by_name,
        BOTH: lambda reading: [*by_name[HIDDEN](reading), *by_name[REMOVED](reading)],
    }


class _Received(Hooks):
    """The attention that some tokens receive from the queries that see them, and how many heads have a sink there."""

    def __init__(self, tokens: Bool[Tensor, "texts positions"]) -> None:
        self.tokens = tokens[:, None]
        self.shares: list[Float[Tensor, "texts heads"]] = []
        self.sinks = torch.zeros(len(tokens), dtype=torch.float64)

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        summary = summarise(inputs)
        mean = summary.mass.cpu() / inputs.visible_queries().cpu()
        self.shares.append(mean.where(self.tokens, torch.nan).nanmean(dim=-1))
        self.sinks += (summary.sinks.cpu() & self.tokens).sum(dim=(1, 2))
        return summary.output


def loss_and_attention(model: OpenModel, reading: Reading) -> dict[str, Tensor]:
    """Measure the loss of each context, and the attention to and the sinks at its tokens with massive activations.

    What these tokens themselves predict does not count.
    """
    tokens = reading.spiking.any(dim=0)
    received = _Received(tokens)
    with hooked(model, received):
        losses = next_token_losses(model.logits(reading.ids), reading.ids)
    losses = losses.masked_fill(tokens[:, :-1], torch.nan).nanmean(dim=1)
    attention = torch.cat(received.shares, dim=1).nanmean(dim=1)
    return {"loss": losses, "attention": attention, "sinks": received.sinks}


@declared("sinks/spikes")
def spikes(study: Study, outcome: Outcome) -> None:
    model, corpus = study.require_model(), study.require_corpus()
    if not model.causal or model.source.predict is None:
        raise UsageError(f"{model.id} predicts no next tokens, by which it is said what is needed")
    found_on, judged_on = (few_of(part, CONTEXTS) for part in chosen_and_judged(corpus))
    massive = ablated.find_spikes(model, found_on)
    outcome.contexts = 0  # more of them would not be read
    if not massive.dimensions.any():
        for key in outcome.declared.claims:
            outcome.cannot_judge(
                key, "no activation is massive by the published rule", name="massive activations"
            )
        return
    by_name, prompts = ablations(model, massive), prompts_for(model, PROMPTS, SEED)

    def asked(reading: Reading) -> dict[str, Tensor]:
        return {"right": few_shot.answered(model, prompts, reading)}

    rows, answered_by = (
        ablated.under_ablations(
            model, texts, by_name, measure, study.show, f"{doing} with something taken away", massive
        )
        for doing, texts, measure in (
            ("reading", list(judged_on.contexts), partial(loss_and_attention, model)),
            ("asking", few_shot.texts_of(prompts), asked),
        )
    )
    answers = {name: of["right"] for name, of in answered_by.items()}
    outcome.tables["accuracy"] = few_shot.tabulated(answers, prompts)
    _read(outcome, massive, rows, answers)
    judge_text(outcome, rows)
    judge_answers(outcome, answers, prompts.tasks)
    more_by_name = {name: more(rows, name) for name in rows if name != DENSE}
    drawn = intervals(more_by_name, "nats per token more", {"rangemode": "tozero"})
    outcome.draw("loss", drawn)
    right = {name: of.astype(np.float64) for name, of in answers.items()}
    outcome.draw("accuracy", few_shot.accuracy_by_shots(right))


Rows = Mapping[str, Mapping[str, np.ndarray]]  # ablation → `loss`, `attention` and `sinks` of each context


def more(rows: Rows, name: str, than: str = DENSE) -> Estimate:
    """Compute the nats per token that an ablation costs more than another, paired by context."""
    return Estimate.mean(rows[name]["loss"] - rows[than]["loss"], "contexts")


def _read(outcome: Outcome, massive: Spikes, rows: Rows, answers: Mapping[str, few_shot.Answers]) -> None:
    layers, dimensions = massive.dimensions.nonzero(as_tuple=True)
    names = listed([str(one) for one in dimensions.unique().tolist()], 8)
    behind = f"behind blocks {int(layers.min())} to {int(layers.max())}"
    outcome.read("dimensions with massive activations", f"{names}, {behind}")
    table = []
    for name, of in rows.items():
        known = np.isfinite(of["attention"])  # contexts with such a token
        cost, attention = more(rows, name), Estimate.mean(of["attention"][known], "contexts")
        right = few_shot.by_k(answers[name].astype(np.float64))
        words = f"{with_error(cost.value, cost.error)} nats more; attention to these tokens {percent(attention.value)}"
        words += f", {number(of['sinks'].mean())} sinks there"
        outcome.read(name, f"{words}; right: {right}")
        table.append((name, cost.value, cost.error, attention.value, attention.error))
    columns = ["ablation", "loss_more", "loss_more_se", "attention", "attention_se"]
    outcome.tables["ablations"] = pd.DataFrame(table, columns=columns)


def judge_text(outcome: Outcome, rows: Rows) -> None:
    """Judge the claims on the text, by losses and sinks."""
    before, left, control = (
        torch.from_numpy(rows[name]["sinks"]).double() for name in (DENSE, REMOVED, DIMENSIONS)
    )
    outcome.judge("constant", more(rows, CONSTANT))
    if before.any():
        levels = {
            "before": number(float(before.mean())),
            "control": percent(float(control.sum() / before.sum())),
        }
        left_over_before = ratio_over_contexts(left, before).floored(count=int(before.sum()))
        outcome.judge("sinks-follow", left_over_before, **levels)
    else:
        outcome.cannot_judge("sinks-follow", "no head has a sink at these tokens")
    outcome.judge("needed", more(rows, REMOVED, DIMENSIONS))
    outcome.judge("sink-needed", more(rows, HIDDEN, KEYS))
    outcome.judge("beyond-sinks", more(rows, BOTH, HIDDEN))


def judge_answers(outcome: Outcome, answers: Mapping[str, few_shot.Answers], tasks: Sequence[str]) -> None:
    """Judge the claims on few-shot accuracy, after sixteen examples."""
    last = {name: of[:, -1].astype(np.float64) for name, of in answers.items()}
    pairs = (REMOVED, DIMENSIONS, "massive activations"), (HIDDEN, KEYS, "the sinks' attention")
    for name, control, words in pairs:
        lost = few_shot.over_tasks(last[DENSE] - last[name], tasks)
        beyond = few_shot.over_tasks(last[control] - last[name], tasks).floored()
        outcome.judge("examples", beyond, name=words, lost=lost)
