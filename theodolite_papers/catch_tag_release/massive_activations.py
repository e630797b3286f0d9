"""Take massive activations out of a live model, or hold their tokens constant, at every layer that has them.

A few tokens, the first above all, carry values in a few dimensions that are thousands of times as large as others (Sun
et al. 2024). They come with attention sinks; to see which of both a model needs, one is changed without the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theodolite import Corpus, OpenModel
from theodolite.errors import UsageError
from theodolite.models.guard import measures
from theodolite.models.hooks import Hooks, hooked
from theodolite.passes.corpus_pass import batch_of
from theodolite.theory.outliers import Thresholds

PUBLISHED = Thresholds()

HALF = 0.5
"""Of the largest |x| of a dimension: what is smaller is no spike of a few tokens (in Gemma 3 a dimension may be massive
in most tokens, by the published rule, and six times as large in the first)."""


@dataclass(frozen=True)
class Spikes:
    """The massive activations behind every block of a model, L of each.

    Attributes:
        least: |x| from which on a value is one; infinite in dimensions that have none.
        spiking: the mean vector of the tokens that carry one; NaN where none does.
        others: the mean vector of the other tokens.
        size: the mean |x| of the tokens that carry one; NaN where none does.
    """

    least: Float[Tensor, "layers width"]
    spiking: Float[Tensor, "layers width"]
    others: Float[Tensor, "layers width"]
    size: Float[Tensor, "layers width"]

    @property
    def dimensions(self) -> Bool[Tensor, "layers width"]:
        """The dimensions that have massive activations."""
        return self.least.isfinite()

    def next_largest(self) -> Bool[Tensor, "layers width"]:
        """Choose as many other dimensions of each layer: the largest that the same tokens have, as a control."""
        others = self.size.masked_fill(self.dimensions, -torch.inf)
        return others.argsort(dim=1, descending=True).argsort(dim=1) < self.dimensions.sum(
            dim=1, keepdim=True
        )


def _carried(
    least: Float[Tensor, " width"], hidden: Float[Tensor, "*tokens width"]
) -> Bool[Tensor, "*tokens"]:
    return (hidden.abs() > least.to(hidden.device)).any(dim=-1)


class _Largest(Hooks):
    """The largest massive activation of every dimension, behind every block; 0 where there is none."""

    def __init__(self, layers: int, width: int) -> None:
        self.sizes = torch.zeros(layers, width, dtype=torch.float64)

    def stream(self, layer: int, hidden: Tensor) -> None:
        if layer:
            magnitude = hidden.abs()
            median = magnitude.float().flatten(1).median(dim=1).values[:, None, None]
            massive = (magnitude > PUBLISHED.massive) & (magnitude / PUBLISHED.massive_ratio > median)
            largest = magnitude.where(massive, 0.0).flatten(0, 1).amax(dim=0).double().cpu()
            self.sizes[layer - 1] = torch.maximum(self.sizes[layer - 1], largest)


class _Sums(Hooks):
    """Sums over the tokens with a massive activation, and over the others, behind every block."""

    def __init__(self, least: Float[Tensor, "layers width"]) -> None:
        self.least = least
        self.sums, self.sizes = least.new_zeros(2, *least.shape), torch.zeros_like(least)
        self.counts = least.new_zeros(2, len(least), 1)

    def stream(self, layer: int, hidden: Tensor) -> None:
        if not layer:
            return
        values = hidden.double().cpu()
        carry = _carried(self.least[layer - 1], values)
        for place, tokens in enumerate((carry, ~carry)):
            self.sums[place, layer - 1] += values[tokens].sum(dim=0)
            self.counts[place, layer - 1] += tokens.sum()
        self.sizes[layer - 1] += values[carry].abs().sum(dim=0)


@measures("model")
def find_spikes(model: OpenModel, corpus: Corpus) -> Spikes:
    """Find the massive activations of a text by the published rule (Sun et al. 2024), and what their tokens are like.

    The text is read twice.

    Raises:
        UsageError: the corpus has contexts of several lengths, or not of a text alone.
    """
    if corpus.lengths is not None or not corpus.text_alone:
        raise UsageError(
            "finding massive activations needs a text in contexts of one length: make the corpus with pack=True"
        )

    def read(hooks: Hooks) -> None:
        with hooked(model, hooks):
            for ids in corpus.contexts.split(batch_of(corpus, None)):
                model.forward(ids)

    largest = _Largest(model.layers, model.width)
    read(largest)
    sums = _Sums(torch.where(largest.sizes > 0, HALF * largest.sizes, torch.inf))
    read(sums)
    spiking, others = sums.sums / sums.counts
    return Spikes(sums.least, spiking, others, sums.sizes / sums.counts[0])


class SpikingTokens(Hooks):
    """The tokens of one batch that carry a massive activation, (contexts, positions) of every block."""

    def __init__(self, spikes: Spikes) -> None:
        self.least = spikes.least
        self.carry: list[Bool[Tensor, "contexts positions"]] = []

    def stream(self, layer: int, hidden: Tensor) -> None:
        """Take in the residual stream."""
        if layer:
            self.carry.append(_carried(self.least[layer - 1], hidden).cpu())


@contextmanager
def replace_activations(
    model: OpenModel,
    tokens: Bool[Tensor, "layers contexts positions"],
    dimensions: Bool[Tensor, "layers width"],
    values: Float[Tensor, "layers width"],
) -> Iterator[None]:
    """Give some tokens other values in some dimensions behind every block, while open.

    Args:
        model: an opened model, each of whose blocks runs once in a pass and gives (contexts, positions, width).
        tokens: which ones, of whole contexts as they will be passed; `SpikingTokens` has those with massive ones.
        dimensions: such as `Spikes.dimensions`, `next_largest()` as a control, or all.
        values: such as `Spikes.others`, which takes the activations out, or `Spikes.spiking`, which holds them at their
            mean.

    Raises:
        UsageError: the blocks are not in memory, or shared; on calling the model: a block gives something of another
            shape.
    """
    blocks = model.structure.blocks
    if model.streamed is not None or len(set(blocks)) < len(blocks):
        raise UsageError(f"{model.id}: its blocks are not at hand one by one: activations cannot be replaced")

    def replaced_behind(layer: int) -> Callable[..., Any]:
        def replaced(_block: Any, _args: Any, output: Any) -> Any:
            hidden = output if isinstance(output, Tensor) else output[0]
            if hidden.shape != (*tokens[layer].shape, len(values[layer])):
                raise UsageError(
                    f"tokens are given for {tuple(tokens[layer].shape)} contexts and positions, the pass has "
                    f"{tuple(hidden.shape[:-1])}"
                )
            chosen = tokens[layer].to(hidden.device)[..., None] & dimensions[layer].to(hidden.device)
            hidden = torch.where(chosen, values[layer].to(hidden), hidden)
            return hidden if isinstance(output, Tensor) else type(output)([hidden, *output[1:]])

        return replaced

    with ExitStack() as undo:
        for layer, block in enumerate(blocks):
            undo.callback(block.register_forward_hook(replaced_behind(layer)).remove)
        yield
