"""Measure texts while sinks, tags or massive activations are ablated.

What is ablated in a text is what the unablated model has in that text alone, without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from theodolite import OpenModel
from theodolite.attention.catches import attend_and_catch
from theodolite.attention.inputs import AttentionInputs
from theodolite.attention.summary import summarise
from theodolite.models.hooks import Hooks, hooked
from theodolite.sinks.interventions import attention_knockout
from theodolite.system.progress import shown
from theodolite_papers.catch_tag_release.massive_activations import Spikes, SpikingTokens

BATCH = 8
"""Texts that are read at once."""


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
    """A batch of texts, and what the unablated model does with each; shorter texts are padded.

    Attributes:
        part: which of all texts they are.
        ids: their tokens, 0 behind the shorter ones.
        lengths: tokens of each.
        layers: the attention of every layer that attends.
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
    shares = [
        (of.mass.where(keys[layer], 0.0).sum(dim=-1) / of.mass.sum(dim=-1)).where(
            of.sinks.any(dim=-1), torch.nan
        )
        for layer, of in reading.layers.items()
    ]
    return torch.cat(shares, dim=1).nanmean(dim=1)
