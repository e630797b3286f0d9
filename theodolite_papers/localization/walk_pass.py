"""Text read as a walk from token to token: one pass over some contexts, of what attention reads and of the residual.

The survey's own pass is not touched.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite import OpenModel
from theodolite.accumulate.sums import State
from theodolite.corpus.corpus import Corpus
from theodolite.corpus.special_tokens import trailing_special_tokens
from theodolite.errors import UsageError
from theodolite.models.guard import measures
from theodolite.models.hooks import Hooks, hooked
from theodolite.passes.corpus_pass import TOKENS_A_BATCH
from theodolite_papers.localization.walks import LAGS, WalkSums

CONTEXTS = 64
"""Read at most, whatever the corpus: a fixed cost. Eight in each group."""

LEAST_LENGTH = LAGS + 4
"""Tokens per context: every lag has at least two pairs of increments."""


@dataclass(frozen=True)
class TextWalk:
    """Sums over a text read as a walk.

    Attributes:
        inputs, residual: what the attention modules read (L layers), and the residual stream (L + 1 layers).
        input_state, residual_state: their sums.
        corpus: the contexts that were read.
    """

    inputs: WalkSums
    residual: WalkSums
    input_state: State
    residual_state: State
    corpus: Corpus


class _WalkHooks(Hooks):
    """Hooks that feed both accumulators."""

    def __init__(self, inputs: WalkSums, residual: WalkSums, length: int) -> None:
        self.inputs, self.residual, self.length = inputs, residual, length
        self.first = 0

    def stream(self, layer: int, hidden: Tensor) -> None:
        """Take in the residual stream."""
        self.residual.update(layer, hidden[:, : self.length], self.first)

    def attention_input(self, layer: int, hidden: Tensor) -> None:
        """Take in what an attention module reads."""
        self.inputs.update(layer, hidden[:, : self.length], self.first)


@measures("model")
def read_walk(model: OpenModel, corpus: Corpus, seed: int) -> TextWalk:
    """Read a seeded sample of at most `CONTEXTS` contexts.

    Raises:
        UsageError: the contexts are too short.
    """
    count, length = corpus.contexts.shape
    check_length(length)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(count, generator=generator)[:CONTEXTS].sort().values
    sample = corpus.subset(chosen)
    # No walk goes on into the special tokens that a tokenizer puts at the end.
    text_length = length - trailing_special_tokens(model.tokenizer, corpus.contexts)
    check_length(text_length)
    sizes = (model.width, len(chosen), text_length)
    hooks = _WalkHooks(WalkSums(model.layers, *sizes), WalkSums(model.layers + 1, *sizes), text_length)
    batch = max(1, TOKENS_A_BATCH // length)
    with hooked(model, hooks):
        for first in range(0, len(chosen), batch):
            hooks.first = first
            model.forward(sample.contexts[first : first + batch])
    inputs, residual = hooks.inputs, hooks.residual
    return TextWalk(inputs, residual, inputs.state(), residual.state(), sample)


def check_length(length: int) -> None:
    """Raise `UsageError` where contexts have fewer than `LEAST_LENGTH` tokens, too few for `LAGS` lags."""
    if length < LEAST_LENGTH:
        raise UsageError(
            f"contexts of {length} tokens are too short to be seen as walks: use --length {LEAST_LENGTH} or more"
        )
