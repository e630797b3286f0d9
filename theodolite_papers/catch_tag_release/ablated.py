"""Measure texts while sinks, tags or massive activations are ablated.

What is ablated in a text is what the unablated model has in that text alone, without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from theodolite import Corpus, OpenModel
from theodolite.attention.catches import attend_and_catch
from theodolite.attention.inputs import AttentionInputs
from theodolite.attention.summary import summarise
from theodolite.errors import UsageError
from theodolite.models.guard import measures
from theodolite.models.hooks import Hooks, hooked
from theodolite.passes.corpus_pass import batch_of
from theodolite.sinks.interventions import attention_knockout
from theodolite.theory.outliers import Thresholds
from theodolite_papers.experiment import shown

PUBLISHED = Thresholds()

HALF = 0.5
"""Of the largest |x| of a dimension: what is smaller is no spike of a few tokens (in Gemma 3 a dimension may be massive
in most tokens, by the published rule, and six times as large in the first)."""


@dataclass(frozen=True)
class Spikes:
    """The massive activations behind every block of a model, L of each.

    least: |x| from which on a value is one; infinite in dimensions that have none. spiking, size: the mean vector, and
    the mean |x|, of the tokens that carry one; NaN where none does. others: the mean vector of the other tokens.
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
        rank = others.argsort(dim=1, descending=True).argsort(dim=1)
        return rank < self.dimensions.sum(dim=1, keepdim=True)


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

    The text is read twice. `UsageError` where it has contexts of several lengths, or is not alone.
    """
    if corpus.lengths is not None or not corpus.text_alone:
        raise UsageError("finding massive activations needs a text in contexts of one length")

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
        tokens: which ones, of whole contexts as they will be passed; `SpikingTokens` has those with massive ones.
        dimensions: such as `Spikes.dimensions`, `next_largest()` as a control, or all.
        values: such as `Spikes.others`, which takes the activations out, or `Spikes.spiking`, which holds them at their
            mean.

    Raises:
        UsageError: the blocks are not in memory, or shared; on calling the model: tokens of another shape.
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


BATCH = 8  # texts that are read at once


@dataclass(frozen=True)
class LayerAttention:
    """A layer's sinks, the attention that each key receives, and the queries that a later token's sink catches.

    `caught` is not looked for where massive activations are.
    """

    sinks: Bool[Tensor, "texts heads positions"]
    mass: Float[Tensor, "texts heads positions"]
    caught: Bool[Tensor, "texts heads positions"]


@dataclass(frozen=True)
class Reading:
    """A batch of texts, and what the unablated model does with each; shorter texts are padded with 0.

    part: which of all texts they are. lengths: tokens of each. layers: the attention of every layer that attends.
    spiking: the tokens that carry a massive activation, behind every block; none where these are not looked for.
    """

    part: slice
    ids: Int[Tensor, "texts positions"]
    lengths: Sequence[int]
    layers: Mapping[int, LayerAttention]
    spiking: Bool[Tensor, "blocks texts positions"]


Ablation = Callable[[Reading], Iterable[AbstractContextManager[object]]]
"""The changes to a model while it reads some texts; none for the model as it is."""


class _Tap(Hooks):
    """Sinks, attention and catches of a text, by layer, and tokens with massive activations."""

    def __init__(self, spikes: Spikes | None) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self.marks = None if spikes is None else SpikingTokens(spikes)

    def stream(self, layer: int, hidden: Tensor) -> None:
        if self.marks is not None:
            self.marks.stream(layer, hidden)

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        summary = summarise(inputs)
        caught = torch.zeros(summary.sinks[0].shape, device=summary.sinks.device)
        if self.marks is None:
            _, (catches,) = attend_and_catch(inputs)
            later = catches.position > 0
            caught.index_add_(0, catches.head[later], catches.caught[later].to(caught))
        self.layers[layer] = summary.sinks[0].cpu(), summary.mass[0].cpu(), caught.cpu() > 0
        return summary.output


def read_alone(
    model: OpenModel, texts: Sequence[Tensor], part: slice, spikes: Spikes | None = None
) -> Reading:
    """Run the model on each of some texts alone; `spikes`: mark the tokens that carry massive activations."""
    chosen, alone = texts[part], []
    for ids in chosen:
        tap = _Tap(spikes)
        with hooked(model, tap):
            model.forward(ids[None])
        alone.append(tap)

    def joined(rows: Iterable[Tensor]) -> Tensor:
        rows = list(rows)
        longest = max(row.shape[-1] for row in rows)
        return torch.stack([functional.pad(row, (0, longest - row.shape[-1])) for row in rows])

    layers = {
        layer: LayerAttention(*(joined(tap.layers[layer][place] for tap in alone) for place in range(3)))
        for layer in model.attending
    }
    blocks = range(0 if spikes is None else model.layers)
    carry = [joined(tap.marks.carry[block][0] for tap in alone if tap.marks) for block in blocks]
    ids = joined(chosen)
    spiking = torch.stack(carry) if carry else ids.new_zeros(0, *ids.shape, dtype=torch.bool)
    return Reading(part, ids, [len(row) for row in chosen], layers, spiking)


def under_ablations(
    model: OpenModel,
    texts: Sequence[Tensor],
    ablations: Mapping[str, Ablation],
    measure: Callable[[Reading], Mapping[str, Tensor]],
    show: Callable[[str, int, int], None],
    title: str,
    spikes: Spikes | None = None,
) -> dict[str, dict[str, np.ndarray]]:
    """Measure all texts under every ablation: name → measure → a row for each text."""
    rows: dict[str, dict[str, list[Tensor]]] = {name: {} for name in ablations}
    parts = [slice(first, first + BATCH) for first in range(0, len(texts), BATCH)]
    for part in shown(parts, title, show):
        reading = read_alone(model, texts, part, spikes)
        for name, ablation in ablations.items():
            with all_open(ablation(reading)):
                for of, values in measure(reading).items():
                    rows[name].setdefault(of, []).append(values)
    return {
        name: {of: torch.cat(values).numpy() for of, values in measures.items()}
        for name, measures in rows.items()
    }


@contextmanager
def all_open(interventions: Iterable[AbstractContextManager[object]]) -> Iterator[None]:
    """Open all interventions, and close them together."""
    with ExitStack() as stack:
        for intervention in interventions:
            stack.enter_context(intervention)
        yield


def hidden(
    model: OpenModel, keys: Mapping[int, Bool[Tensor, "texts heads positions"]]
) -> Iterator[AbstractContextManager[object]]:
    """Knock out keys, given by layer, in the heads that have any."""
    for layer, of_layer in keys.items():
        for head in of_layer.any(dim=-1).any(dim=0).nonzero().flatten().tolist():
            yield attention_knockout(model, layer, head, of_layer[:, head])


def other_keys(
    sinks: Bool[Tensor, "texts heads positions"], order: Float[Tensor, "texts heads positions"]
) -> Bool[Tensor, "texts heads positions"]:
    """Choose as many other keys as sinks in each head, those that are lowest in `order`."""
    order = order.double().masked_fill(sinks, torch.inf)
    rank = order.argsort(dim=-1, stable=True).argsort(dim=-1)
    return (rank < sinks.sum(dim=-1, keepdim=True)) & ~sinks


def share_hidden(
    reading: Reading, keys: Mapping[int, Bool[Tensor, "texts heads positions"]]
) -> Float[Tensor, " texts"]:
    """Average the share of attention that goes to some keys, given by layer, over each text's heads with a sink."""
    shares = []
    for layer, of in reading.layers.items():
        share = of.mass.where(keys[layer], 0.0).sum(dim=-1) / of.mass.sum(dim=-1)
        shares.append(share.where(of.sinks.any(dim=-1), torch.nan))
    return torch.cat(shares, dim=1).nanmean(dim=1)
