"""One prompt, read once for all heads: a head's attention, its sinks and the tokens that they catch, what it writes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from theodolite.attention.catches import Catches, attend_and_catch
from theodolite.attention.inputs import MASKED, AttentionInputs, softmax
from theodolite.attention.summary import ReceivedAttention
from theodolite.corpus.special_tokens import special_ends
from theodolite.models import OpenModel
from theodolite.models.guard import known_state, measures
from theodolite.models.hooks import Hooks, hooked
from theodolite.models.texts import token_texts
from theodolite.passes.corpus_pass import refuse_nonfinite_stream

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
        self.trailing = special_ends(model.tokenizer, ids[None])[1]
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
        """Compute what a head adds to the residual stream, through W_O, in float64."""
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
    own = catches.head == head
    columns = (catches.position, catches.received, catches.caught.sum(dim=1), catches.local)
    return HeadView(
        layer=layer,
        head=head,
        tokens=read.tokens,
        attention=weights.masked_fill(~visible, torch.nan).numpy(),
        learned=np.zeros(len(weights)) if inputs.sink is None else (1 - weights.sum(dim=-1)).numpy(),
        received=received.numpy(),
        sinks=tuple(map(Sink, *(column[own].tolist() for column in columns))),
        group=groups_of(read, layer, head).numpy(),
    )


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


def groups_of(read: PromptPass, layer: int, head: int) -> Int[Tensor, " positions"]:
    """Return `HeadView.group`: position 0, sinks and trailing special tokens are left out."""
    catches = read.layers[layer][2]
    length, of_head = len(read.ids), catches.head == head
    group = torch.full((length,), UNCAUGHT)
    group[0] = LEFT_OUT
    group[length - read.trailing :] = LEFT_OUT
    for number, caught in enumerate(catches.caught[of_head]):
        group[caught] = number
    positions = catches.position[of_head]
    group[positions[positions >= 0]] = LEFT_OUT
    return group
