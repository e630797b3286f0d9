"""The increments of what attention reads of a text, whose covariance a random walk would have (Bao et al. 2024).

Position 0 is left out, whose vector is an outlier in most models: the walk is x_1 … x_n, n = T − 1, and has n − 1
increments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from theodolite import Corpus, OpenModel
from theodolite.errors import UsageError
from theodolite.models.guard import measures
from theodolite.models.hooks import Hooks, hooked
from theodolite.passes.corpus_pass import TOKENS_A_BATCH
from theodolite_papers.experiment import Study

CONTEXTS = 64
"""Read at most, whatever the corpus: a fixed cost."""

LEAST_LENGTH = 3
"""Tokens per context: there is an increment."""


@dataclass(frozen=True)
class TextWalk:
    """Σ̂ of the increments of what each attention module reads, their second moment about zero; and the contexts."""

    covariance: dict[int, Float[Tensor, "width width"]]
    corpus: Corpus


class _Increments(Hooks):
    def __init__(self, text_length: int) -> None:
        self.text_length = text_length
        self.sums: dict[int, Tensor] = {}
        self.count: dict[int, int] = {}

    def attention_input(self, layer: int, hidden: Tensor) -> None:
        steps = hidden[:, 1 : self.text_length].double().diff(dim=1).flatten(0, 1)
        self.sums[layer] = self.sums.get(layer, 0) + (steps.T @ steps).cpu()
        self.count[layer] = self.count.get(layer, 0) + len(steps)


@measures("model")
def read_walk(model: OpenModel, corpus: Corpus, seed: int) -> TextWalk:
    """Read a seeded sample of at most `CONTEXTS` contexts.

    Raises:
        UsageError: the contexts are too short.
    """
    count, length = corpus.contexts.shape
    # No walk goes on into the special tokens that a tokenizer puts at the end.
    text_length = length - corpus.trailing(model.tokenizer)
    if text_length < LEAST_LENGTH:
        raise UsageError(
            f"contexts of {text_length} tokens are too short to be seen as walks: use --length {LEAST_LENGTH} or more"
        )
    chosen = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:CONTEXTS].sort().values
    sample, hooks = corpus.subset(chosen), _Increments(text_length)
    with hooked(model, hooks):
        for ids in sample.contexts.split(max(1, TOKENS_A_BATCH // length)):
            model.forward(ids)
    return TextWalk({layer: total / hooks.count[layer] for layer, total in hooks.sums.items()}, sample)


def text_walk(study: Study) -> TextWalk:
    """Read the text of the run once for all experiments."""
    corpus = study.require_corpus()
    seed = int(study.provenance["seed"])
    return study.cached("text as a walk", lambda: read_walk(study.require_model(), corpus, seed))
