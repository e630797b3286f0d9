"""A model pruned in memory, and what is measured of it on a text: losses, every sink of every context, one prompt.

Even contexts calibrate the pruning, odd ones are measured.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from theodolite import Corpus, OpenModel
from theodolite.attention.catches import attend_and_catch
from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import UsageError
from theodolite.evaluate.scores import mean_and_error
from theodolite.measure.ratios import ratio_by_context
from theodolite.models.hooks import Hooks, hooked
from theodolite.passes.corpus_pass import batch_of
from theodolite.prune.model import prune_model
from theodolite.report.data import evenly
from theodolite.sinks.interventions import without_low_rank
from theodolite.sinks.prompt import PromptTrace, trace_prompt
from theodolite_papers.experiment import corpus_subset

if TYPE_CHECKING:
    from theodolite_papers.experiment import Study

METHODS = {"oats": "OATS", "wanda": "Wanda", "sparsegpt": "SparseGPT", "magnitude": "magnitude"}

SPARSITY = 0.5
"""As in the paper's figures."""

ITERATIONS, RANK_RATIO = 80, 0.25
"""Of OATS, as published."""

MOST_CONTEXTS = 128
"""That are measured, evenly chosen, and as many that calibrate."""


@dataclass(frozen=True)
class ModelSinks:
    """A model's next-token losses in nats per token, the sinks of each context, and one head on one prompt."""

    loss: Float[Tensor, " contexts"]
    sinks: Bool[Tensor, "contexts layers heads positions"]
    prompt: PromptTrace | None = None


@dataclass(frozen=True)
class Prompt:
    """The head that is shown, and on which prompt."""

    ids: Tensor
    layer: int
    head: int


class _SinkHooks(Hooks):
    """The sinks of one batch."""

    def __init__(self, contexts: int, layers: int, heads: int, length: int) -> None:
        self.sinks = torch.zeros(contexts, layers, heads, length, dtype=torch.bool)

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        output, contexts = attend_and_catch(inputs)
        for context, catches in enumerate(contexts):
            tokens = catches.position >= 0
            head, position = catches.head[tokens].cpu(), catches.position[tokens].cpu()
            self.sinks[context, layer, head, position] = True
        return output


def measure_sinks(model: OpenModel, corpus: Corpus, prompt: Prompt | None = None) -> ModelSinks:
    """Measure a model as it is now."""
    losses, sinks = [], []
    for ids in corpus.contexts.split(batch_of(corpus, None)):
        batch_sinks = _SinkHooks(len(ids), model.layers, model.heads, ids.shape[1])
        ids = ids.to(model.device)
        with hooked(model, batch_sinks):
            logits = model.logits(ids)
        pairs = zip(logits, ids, strict=True)
        by_context = [cross_entropy(row[:-1].double(), tokens[1:]) for row, tokens in pairs]
        losses.append(torch.stack(by_context).cpu())
        sinks.append(batch_sinks.sinks)
    traced = None if prompt is None else trace_prompt(model, prompt.ids, prompt.layer, prompt.head)
    return ModelSinks(torch.cat(losses), torch.cat(sinks), traced)


def kept_sinks(dense: ModelSinks, other: ModelSinks, layer: int | None = None) -> tuple[float, float]:
    """Share of a model's sinks, by context and key, that another has; its standard error over contexts."""
    return _ratio(dense.sinks & other.sinks, dense.sinks, layer)


def new_sinks(dense: ModelSinks, other: ModelSinks) -> tuple[float, float]:
    """Sinks of another model that the first lacks, over the first one's; its standard error over contexts."""
    return _ratio(other.sinks & ~dense.sinks, dense.sinks, None)


def _ratio(part: Tensor, reference: Tensor, layer: int | None) -> tuple[float, float]:
    b, t = ((s if layer is None else s[:, layer]).flatten(1).sum(1).double() for s in (part, reference))
    value, error = ratio_by_context(b, t)
    return float(value), float(error)


def loss_difference(dense: ModelSinks, other: ModelSinks) -> tuple[float, float]:
    """Mean loss of another model less that of the first, and its standard error: paired by context."""
    return mean_and_error((other.loss - dense.loss).numpy())


def halves(study: Study) -> tuple[Corpus, Corpus]:
    """Split the text in two: contexts that calibrate the pruning, and contexts on which it is measured."""
    model = study.require_model()
    corpus = study.require_corpus("pruned models are calibrated and measured on a text: pass it with the run")
    if len(corpus.contexts) < 4:
        raise UsageError(
            f"{len(corpus.contexts)} contexts are too few to calibrate and to measure: give 4 or more"
        )
    if not model.causal or model.source.predict is None:
        raise UsageError(f"{model.id} does not predict next tokens: pruned models are judged by that loss")
    return part_of(corpus, slice(0, None, 2)), part_of(corpus, slice(1, None, 2))


def part_of(corpus: Corpus, contexts: slice) -> Corpus:
    """Some contexts of a corpus, `MOST_CONTEXTS` at most, evenly chosen."""
    part = corpus_subset(corpus, contexts)
    return corpus_subset(part, evenly(len(part.contexts), MOST_CONTEXTS))


def dense_measures(study: Study, prompt: Prompt) -> ModelSinks:
    """The model itself; measured once, since a study has one prompt."""
    _, measured = halves(study)
    return study.cached("dense sinks", lambda: measure_sinks(study.require_model(), measured, prompt))


def pruned_measures(
    study: Study, method: str, prompt: Prompt, ablations: Mapping[str, int | None] | None = None
) -> dict[str, ModelSinks]:
    """A copy of the model, pruned by `SPARSITY`: as it is, by the method's name, and without low-rank terms.

    ablations: name → control of `without_low_rank` in the prompt's layer.
    """
    calibration, measured = halves(study)
    model = copy.deepcopy(study.require_model())
    pruned = prune_model(
        model,
        calibration,
        method,
        SPARSITY,
        rank_ratio=RANK_RATIO,
        iterations=ITERATIONS,
        show_progress=partial(study.show, f"pruning by {METHODS[method]}, {SPARSITY:.0%}"),
    )
    measures, layer = {METHODS[method]: measure_sinks(model, measured, prompt)}, prompt.layer
    for name, control in (ablations or {}).items():
        with without_low_rank(model, layer, factors=pruned.factors(layer), control=control):
            measures[name] = measure_sinks(model, measured, prompt)
    return measures
