"""Trace one head on one prompt: its attention, its output, which tokens its sinks catch, and the residual stream.

The whole attention matrix of the one head is kept here, and the streams of one context: for a prompt, not a corpus.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from theodolite.attention.catches import Catches, attend_and_catch
from theodolite.attention.inputs import MASKED, AttentionInputs, softmax
from theodolite.attention.sinks import ReceivedAttention
from theodolite.corpus.corpus import Corpus
from theodolite.corpus.special_tokens import trailing_special_tokens
from theodolite.errors import UsageError
from theodolite.models import OpenModel
from theodolite.models.guard import measures
from theodolite.models.hooks import Hooks, hooked
from theodolite.passes.corpus_pass import check_fit

UNCAUGHT = -1
LEFT_OUT = -2


@dataclass(frozen=True)
class PromptTrace:
    """One head's attention, output and sinks on a prompt of T tokens, and the residual stream.

    Attributes:
        ids: of the tokens.
        layer, head: which.
        attention: of the head; a row sums to less than 1 where a learned column takes the rest.
        output: of the head in the residual stream, through W_O.
        value: of every key in the residual stream, through W_O.
        streams: the residual stream by layer.
        received: attention that each key gets, mean over the queries that see it, largest over the heads of a layer; 0
            where too few queries see it for a sink.
        sinks: positions of the head's sinks, those of a stretch among them; −1 for a learned column.
        group: of each token the sink that caught it (an index into `sinks`), `UNCAUGHT`, or `LEFT_OUT`.
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


class _PromptTap(Hooks):
    """Record the streams of one forward pass, and each layer's attention inputs, output and catches."""

    def __init__(self, trailing: int) -> None:
        self.trailing = trailing
        self.streams: list[Tensor] = []
        self.layers: dict[int, tuple[AttentionInputs, Tensor, Catches]] = {}

    def stream(self, layer: int, hidden: Tensor) -> None:
        self.streams.append(hidden[0].double().cpu())

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        output, (catches,) = attend_and_catch(inputs, stretches=True, trailing=self.trailing)
        self.layers[layer] = inputs, output, catches.to(torch.device("cpu"))
        return output


@measures("model")
def trace_prompt(
    model: OpenModel, ids: Int[Tensor, " positions"], layer: int | None = None, head: int | None = None
) -> PromptTrace:
    """Trace one head's catch, tag and release on a prompt.

    Args:
        model: from `open_model`.
        ids: the prompt's tokens.
        layer, head: which; None: the head whose sinks divide the prompt most evenly, by its attention alone, so that
            what it writes is not what it was chosen by.

    Raises:
        UsageError: no such layer or head, a prompt that the model cannot read, or one on which no head has a sink.
    """
    check_fit(model, Corpus.from_ids(ids), least_contexts=1)
    if layer is not None and head is not None:
        model.check_place(layer, head)
    tap = _PromptTap(trailing_special_tokens(model.tokenizer, ids[None]))
    with hooked(model, tap):
        model.forward(ids[None])
    if layer is None or head is None:
        layer, head = _most_dividing(tap, len(ids))
    inputs, output, catches = tap.layers[layer]
    weights = model.output_weights(layer)[head].double().cpu()
    value = inputs.value[0, head // (inputs.query.shape[1] // inputs.value.shape[1])]
    sinks, group = groups_of(catches, head, len(ids), tap.trailing)
    received = [
        attention_paid(of_layer)[2].nan_to_num(0.0).amax(dim=0) for of_layer, _, _ in tap.layers.values()
    ]
    return PromptTrace(
        ids=ids,
        layer=layer,
        head=head,
        attention=attention_paid(inputs)[0][head],
        output=output[0, :, head].double().cpu() @ weights,
        value=value.double().cpu() @ weights,
        streams=torch.stack(tap.streams),
        received=torch.stack(received),
        sinks=sinks,
        group=group,
    )


def _most_dividing(tap: _PromptTap, length: int) -> tuple[int, int]:
    """Choose the head for which two tokens are most often caught by different sinks; else most often one by none."""
    heads: dict[tuple[int, int], tuple[float, float]] = {}
    for layer, (_, _, catches) in tap.layers.items():
        for head in catches.head.unique().tolist():
            _, group = groups_of(catches, head, length, tap.trailing)
            caught = group[group >= 0].bincount().double() / (group != LEFT_OUT).sum().clamp_min(1)
            between = caught.sum() ** 2 - caught.square().sum()
            heads[layer, head] = float(between), float(caught.sum() * (1 - caught.sum()))
    if not heads:
        raise UsageError(
            "no head has a sink on this prompt: name one with --layer and --head, or give another prompt"
        )
    return max(heads, key=lambda place: heads[place])


def attention_paid(
    inputs: AttentionInputs,
) -> tuple[
    Float[Tensor, "heads queries keys"],
    Bool[Tensor, "heads_or_1 queries keys"],
    Float[Tensor, "heads keys"],
]:
    """Compute all attention weights of one context, in float64 on the CPU.

    Returns:
        the weights; which keys a query sees; and what each key receives on average from the queries that see it, NaN
        where too few do for a sink.
    """
    exact = replace(inputs, query=inputs.query.double(), key=inputs.key.double())
    logits = exact.logits()
    weights = softmax(logits, exact.sink)
    received = ReceivedAttention.of(exact, weights.sum(dim=2)).of_candidates
    return weights[0].cpu(), (logits[0] > MASKED / 2).cpu(), received[0].cpu()


def groups_of(
    catches: Catches, head: int, length: int, trailing: int = 0
) -> tuple[Int[Tensor, " sinks"], Int[Tensor, " positions"]]:
    """Read `sinks` and `group` of a `PromptTrace` of `length` tokens, `trailing` of them special, off catches."""
    rows = (catches.head == head).nonzero().flatten()
    group = torch.full((length,), UNCAUGHT)
    group[0] = LEFT_OUT
    group[length - trailing :] = LEFT_OUT
    for number, sink in enumerate(rows.tolist()):
        group[catches.caught[sink]] = number
    positions = catches.position[rows]
    group[positions[positions >= 0]] = LEFT_OUT
    return positions, group
