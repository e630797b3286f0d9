"""One prompt, read once for all heads: a head's attention, its sinks and the tokens that they catch, what it writes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
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
from theodolite.models.guard import known_state, measures
from theodolite.models.hooks import Hooks, hooked
from theodolite.models.token_texts import token_texts
from theodolite.passes.corpus_pass import check_fit, refuse_nonfinite_stream

UNCAUGHT = -1
LEFT_OUT = -2


class PromptPass(Hooks):
    """One forward pass of a prompt of T tokens, which records it.

    Attributes:
        trailing: how many of the last ones are special tokens that the tokenizer puts behind a text.
        streams: the residual stream by layer, as the model has it.
        layers: of each block that attends its attention inputs, its heads' outputs before W_O (1, T, H, value width),
            and what its sinks catch.
    """

    def __init__(self, model: OpenModel, ids: Int[Tensor, " positions"]) -> None:
        self.ids, self.tokens = ids, tuple(token_texts(model, ids))
        self.trailing = trailing_special_tokens(model.tokenizer, ids[None])
        self.streams: list[Float[Tensor, "positions width"]] = []
        self.layers: dict[int, tuple[AttentionInputs, Tensor, Catches]] = {}

    def stream(self, layer: int, hidden: Tensor) -> None:
        """Record the residual stream."""
        refuse_nonfinite_stream(layer, hidden)
        self.streams.append(hidden[0].to("cpu", copy=True))

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """Record a block's attention, and return its own output."""
        output, (catches,) = attend_and_catch(inputs, local_sinks=True, trailing=self.trailing)
        self.layers[layer] = inputs, output, catches.to(torch.device("cpu"))
        return output

    def written(self, model: OpenModel, layer: int, head: int) -> Float[Tensor, "positions width"]:
        """Compute what a head adds to the residual stream, through W_O, in float64.

        Raises:
            WorkError: what leaves the attention is no fixed affine function of its heads' outputs.
        """
        output = self.layers[layer][1][0, :, head]
        return output.double().cpu() @ model.output_weights(layer)[head].double().cpu()


@dataclass(frozen=True)
class Sink:
    """A sink of a head: its position (−1: a learned column), the mean attention to it, how many tokens it catches.

    `local`: it dominates a contiguous span without enough attention on average.
    """

    position: int
    received: float
    caught: int
    local: bool


@dataclass(frozen=True, eq=False)
class HeadView:
    """A head's attention and sinks on a prompt of T tokens.

    Attributes:
        attention: (T, T), queries by keys; NaN where the query does not see the key.
        learned: (T) what each query pays to a learned sink column; zeros where the model has none.
        received: (T) mean attention from the queries that see the key; NaN where too few see it for a sink.
        sinks: of the head, by position, local ones among them.
        group: (T) the sink that caught each token, as an index into `sinks`; `UNCAUGHT`, or `LEFT_OUT`.
    """

    layer: int
    head: int
    tokens: tuple[str, ...]
    attention: np.ndarray
    learned: np.ndarray
    received: np.ndarray
    sinks: tuple[Sink, ...]
    group: np.ndarray

    @property
    def sink_positions(self) -> list[int]:
        """Positions of the sinks, each once and in order; a learned column has none."""
        return sorted({sink.position for sink in self.sinks if sink.position >= 0})


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
def read_prompt(model: OpenModel, ids: Int[Tensor, " positions"]) -> PromptPass:
    """Run the model on a prompt; `WorkError` where its hidden states are NaN or infinite."""
    read = PromptPass(model, ids)
    with hooked(model, read):
        model.forward(ids[None])
    return read


@known_state()
def head_view(read: PromptPass, layer: int, head: int) -> HeadView:
    """Return one head's attention and sinks."""
    inputs, _, catches = read.layers[layer]
    with torch.inference_mode():
        weights, visible, received = (of[0] for of in attention_paid(inputs.of_heads([head])))
    has_column = inputs.sink is not None
    own = catches.head == head
    of_sinks = (
        catches.position[own],
        catches.received[own],
        catches.caught[own].sum(dim=1),
        catches.local[own],
    )
    return HeadView(
        layer=layer,
        head=head,
        tokens=read.tokens,
        attention=weights.masked_fill(~visible, torch.nan).numpy(),
        learned=(1 - weights.sum(dim=-1)).numpy() if has_column else np.zeros(len(weights)),
        received=received.numpy(),
        sinks=tuple(Sink(*of_sink) for of_sink in zip(*(of.tolist() for of in of_sinks), strict=True)),
        group=_groups(read, catches, head).numpy(),
    )


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
            group = _groups(read, catches, head)
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
    """Compute all attention weights of one context, in float64; tell which keys a query sees, and what each receives.

    That is on average from the queries that see the key; NaN where too few do for a sink. On the CPU.
    """
    exact = replace(inputs, query=inputs.query.double(), key=inputs.key.double())
    logits = exact.logits()
    weights = softmax(logits, exact.sink)
    received = ReceivedAttention.of(exact, weights.sum(dim=2)).of_candidates
    return weights[0].cpu(), (logits[0] > MASKED / 2).cpu(), received[0].cpu()


def _groups(read: PromptPass, catches: Catches, head: int) -> Int[Tensor, " positions"]:
    """Return `HeadView.group`: position 0, sinks and trailing special tokens are left out."""
    length, of_head = len(read.ids), catches.head == head
    group = torch.full((length,), UNCAUGHT)
    group[0] = LEFT_OUT
    group[length - read.trailing :] = LEFT_OUT
    for number, caught in enumerate(catches.caught[of_head]):
        group[caught] = number
    positions = catches.position[of_head]
    group[positions[positions >= 0]] = LEFT_OUT
    return group
