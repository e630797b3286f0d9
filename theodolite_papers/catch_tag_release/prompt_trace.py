"""Trace one head's catch, tag and release on a prompt: its attention and sinks, what it writes, and the streams."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from theodolite import Corpus, OpenModel
from theodolite.errors import UsageError
from theodolite.models.guard import measures
from theodolite.passes.corpus_pass import check_fit
from theodolite.sinks.prompt import LEFT_OUT, PromptPass, attention_paid, groups_of, head_view, read_prompt


@dataclass(frozen=True)
class PromptTrace:
    """One head's attention, output and sinks on a prompt of T tokens, and the residual stream.

    Attributes:
        attention: of the head; a row sums to less than 1 where a learned column takes the rest.
        output, value: of the head, and of every key, in the residual stream, through W_O.
        received: as of `HeadView`, largest over the heads of a layer; 0 where too few queries see the key for a sink.
        sinks: positions of the head's sinks, local ones among them; −1 for a learned column.
        group: as of `HeadView`.
    """

    ids: Int[Tensor, " positions"]
    layer: int
    head: int
    attention: Float[Tensor, "positions positions"]
    output: Float[Tensor, "positions width"]
    value: Float[Tensor, "positions width"]
    streams: Float[Tensor, "layers positions width"]
    received: Float[Tensor, "blocks positions"]
    sinks: Int[Tensor, " sinks"]
    group: Int[Tensor, " positions"]


@measures("model")
def trace_prompt(
    model: OpenModel, ids: Int[Tensor, " positions"], layer: int | None = None, head: int | None = None
) -> PromptTrace:
    """Trace one head's catch, tag and release on a prompt.

    Args:
        layer, head: which; None: the head whose sinks divide the prompt most evenly, by its attention alone.

    Raises:
        UsageError: no such layer or head, a prompt that the model cannot read, or one on which no head has a sink.
        WorkError: hidden states are NaN or infinite, or the layer has no fixed output weights.
    """
    check_fit(model, Corpus.from_ids(ids), least_contexts=1)
    if layer is not None and head is not None:
        model.check_place(layer, head)
    read = read_prompt(model, ids)
    if layer is None or head is None:
        layer, head = _most_dividing(read)
    inputs, view = read.layers[layer][0], head_view(read, layer, head)
    value = inputs.value[0, head // (inputs.query.shape[1] // inputs.value.shape[1])]
    received = [attention_paid(of)[2].nan_to_num(0.0).amax(dim=0) for of, _, _ in read.layers.values()]
    return PromptTrace(
        ids=ids,
        layer=layer,
        head=head,
        attention=torch.from_numpy(view.attention).nan_to_num(0.0),
        output=read.written(model, layer, head),
        value=value.double().cpu() @ model.output_weights(layer)[head].double().cpu(),
        streams=torch.stack(read.streams).double(),
        received=torch.stack(received),
        sinks=torch.tensor([sink.position for sink in view.sinks], dtype=torch.int64),
        group=torch.from_numpy(view.group),
    )


def _most_dividing(read: PromptPass) -> tuple[int, int]:
    """Choose the head for which two tokens are most often caught by different sinks; else most often one by none."""
    heads: dict[tuple[int, int], tuple[float, float]] = {}
    for layer, (_, _, catches) in read.layers.items():
        for head in catches.head.unique().tolist():
            group = groups_of(read, layer, head)
            caught = group[group >= 0].bincount().double() / (group != LEFT_OUT).sum().clamp_min(1)
            between = caught.sum() ** 2 - caught.square().sum()
            heads[layer, head] = float(between), float(caught.sum() * (1 - caught.sum()))
    if not heads:
        raise UsageError(
            "no head has a sink on this prompt: name one with --layer and --head, or give another prompt"
        )
    return max(heads, key=lambda place: heads[place])
