"""Hidden states seen as a walk from token to token: one pass over some contexts, in sums by group of contexts.

Position 0 is left out, whose vector is an outlier in most models: the walk is x_1 … x_n, n = T − 1, and has n − 1
increments. Nothing is judged or drawn here, and the survey's own pass is not touched.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from theodolite.accumulate.sums import GROUPS, Groups, LayerSums, State
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.models import OpenModel
from theodolite.models.hooks import Hooks, hooked
from theodolite.papers.experiment import corpus_subset
from theodolite.passes.corpus_pass import TOKENS_A_BATCH
from theodolite.report.data import evenly

CONTEXTS = 64
"""Read at most, whatever the corpus: a fixed cost. Eight in each group."""

SHOWN_POSITIONS = 64
"""Of the second moments x_s·x_t, evenly chosen."""

MARKS = 6
"""Positions of which whole vectors are kept, at about equal ratios; their pairs have full second moments."""

LAGS = 8
"""Of the autocorrelation of increments."""

LEAST_LENGTH = LAGS + 4
"""Tokens per context: every lag has at least two pairs of increments."""


class WalkSums(LayerSums):
    """Sums over contexts of what tells a walk, of N layers of width d.

    State: contexts (N, G) by group; gram (N, G, S, S) of x_s·x_t at the positions `shown`; position_sum (N, G, S, d)
    of x_s there; lagged (N, G, LAGS + 1) sums over steps of ε_t·ε_{t+lag}; increments (N, d, d) of εεᵀ over all
    steps, about zero; kept (N, C, M, d), x at the positions `marks` of every context.

    Args:
        layers, width: N and d. contexts, length: C and T.
    """

    def __init__(self, layers: int, width: int, contexts: int, length: int) -> None:
        self.positions = length - 1
        self.shown = evenly(self.positions, SHOWN_POSITIONS)
        last = self.positions - 1
        self.marks = sorted({round(step) - 1 for step in np.geomspace(1, last + 1, MARKS)})
        self.groups = Groups(contexts)
        shown = len(self.shown)
        super().__init__(
            layers,
            {
                "contexts": (GROUPS,),
                "gram": (GROUPS, shown, shown),
                "position_sum": (GROUPS, shown, width),
                "lagged": (GROUPS, LAGS + 1),
                "increments": (width, width),
                "kept": (contexts, len(self.marks), width),
            },
        )

    def update(self, layer: int, hidden: Tensor, first_context: int) -> None:
        """Take in one layer's vectors, (batch, T, d), of the contexts `first_context …`."""
        walk = hidden[:, 1:].double()
        steps = walk.diff(dim=1)
        for group, part in self.groups.parts(first_context, len(walk)):
            chosen = walk[part][:, self.shown]
            self.add("contexts", layer, torch.tensor(float(len(chosen)), device=walk.device), group)
            self.add("gram", layer, (chosen @ chosen.mT).sum(0), group)
            self.add("position_sum", layer, chosen.sum(0), group)
            steps_of_group = steps[part]
            count = steps_of_group.shape[1]
            lagged = [
                (steps_of_group[:, : count - lag] * steps_of_group[:, lag:]).sum() for lag in range(LAGS + 1)
            ]
            self.add("lagged", layer, torch.stack(lagged), group)
        flat = steps.flatten(0, 1)
        self.add("increments", layer, flat.T @ flat)
        # Every context is seen once, so that adding is putting in place.
        self.at("kept", layer, walk.device)[first_context : first_context + len(walk)] += walk[:, self.marks]

    def covariance(self, state: State, layer: int) -> Tensor:
        """Σ̂ of the increments, their second moment about zero, (d, d)."""
        return state["increments"][layer] / (state["contexts"][layer].sum() * (self.positions - 1))


@dataclass(frozen=True)
class TextWalk:
    """What one pass has seen.

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
    """Feeds both accumulators."""

    def __init__(self, inputs: WalkSums, residual: WalkSums) -> None:
        self.inputs, self.residual = inputs, residual
        self.first = 0

    def stream(self, layer: int, hidden: Tensor) -> None:
        """Take in the residual stream."""
        self.residual.update(layer, hidden, self.first)

    def attention_input(self, layer: int, hidden: Tensor) -> None:
        """Take in what an attention module reads."""
        self.inputs.update(layer, hidden, self.first)


def read_walk(model: OpenModel, corpus: Corpus, seed: int) -> TextWalk:
    """Read a seeded sample of at most `CONTEXTS` contexts.

    Raises:
        UsageError: the contexts are too short.
    """
    count, length = corpus.contexts.shape
    check_length(length)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(count, generator=generator)[:CONTEXTS].sort().values
    sample = corpus_subset(corpus, chosen)
    sizes = (model.width, len(chosen), length)
    hooks = _WalkHooks(WalkSums(model.layers, *sizes), WalkSums(model.layers + 1, *sizes))
    batch = max(1, TOKENS_A_BATCH // length)
    with hooked(model, hooks):
        for first in range(0, len(chosen), batch):
            hooks.first = first
            model.forward(sample.contexts[first : first + batch])
    inputs, residual = hooks.inputs, hooks.residual
    return TextWalk(inputs, residual, inputs.state(), residual.state(), sample)


def check_length(length: int) -> None:
    """Refuse contexts that are too short for `LAGS` lags.

    Raises:
        UsageError: fewer than `LEAST_LENGTH` tokens.
    """
    if length < LEAST_LENGTH:
        raise UsageError(
            f"contexts of {length} tokens are too short to be seen as walks: use --length {LEAST_LENGTH} or more"
        )


def simulated_walk(text: WalkSums, state: State, seed: int) -> tuple[WalkSums, State]:
    """The same sums of true Gaussian random walks with the increments' covariance Σ̂ of every layer of a text.

    The walks are in the eigenbasis of Σ̂: every number that is read off the sums is the same in any rotated basis.
    """
    layers, contexts, _, width = state["kept"].shape
    sums = WalkSums(layers, width, contexts, text.positions + 1)
    generator = torch.Generator().manual_seed(seed)
    for layer in range(layers):
        scale = torch.linalg.eigvalsh(text.covariance(state, layer)).clamp_min(0).sqrt()
        for context in range(contexts):
            steps = torch.randn(text.positions, width, generator=generator, dtype=torch.float64)
            # x_1 is the first step from zero; in front of it stands the position that is left out.
            walk = torch.cat([torch.zeros(1, width, dtype=torch.float64), (steps * scale).cumsum(0)])
            sums.update(layer, walk[None], context)
    return sums, sums.state()
