"""What one head does with one prompt, as plain numbers: attention, sinks, and what it writes.

A prompt is read once, for all heads; a head's attention follows from the stored queries and keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from theodolite.accumulate.attention import AttentionStatistics, Tokens
from theodolite.attention.catches import Catches, attend_and_catch
from theodolite.corpus.special_tokens import trailing_special_tokens
from theodolite.errors import UsageError, WorkError
from theodolite.measure.attribution import chosen_heads
from theodolite.measure.heads import head_columns, heads_that_are
from theodolite.models import OpenModel
from theodolite.models.guard import known_state, measures
from theodolite.models.query_key_parts import LayerPass, visit_layers
from theodolite.models.token_texts import token_texts
from theodolite.passes.run import Run
from theodolite.report.data import Floats
from theodolite.sinks.prompt import LEFT_OUT, attention_paid, groups_of
from theodolite.system.choices import wider_than
from theodolite.theory.colouring import COLOURS, principal_scores, rgb, turned
from theodolite.theory.grouping import chance_explained, variance_explained


@dataclass(frozen=True, eq=False)
class PromptPass:
    """One forward pass of a prompt of T tokens.

    Attributes:
        ids: of the tokens (T).
        tokens: their text.
        trailing: how many of the last ones are special tokens that the tokenizer puts behind a text.
        layers: what entered each layer that attends, and its queries, keys and values.
        measured: a run whose heads table has what can be measured of every head on this prompt alone.
    """

    ids: Int[Tensor, " positions"]
    tokens: tuple[str, ...]
    trailing: int
    layers: dict[int, LayerPass]
    measured: Run


@dataclass(frozen=True, eq=False)
class LayerCatch:
    """What the sinks of a layer catch, and what its heads write, before W_O (T, H, value width)."""

    catches: Catches
    output: Float[Tensor, "positions heads value_width"]


@dataclass(frozen=True)
class Sink:
    """A sink of the head: its position (−1: a learned column), the mean attention to it, how many tokens it catches.

    `stretch`: a local sink, which dominates a contiguous span without enough attention on average.
    """

    position: int
    received: float
    caught: int
    stretch: bool


@dataclass(frozen=True, eq=False)
class HeadView:
    """A head on a prompt of T tokens.

    Attributes:
        layer, head: which.
        tokens: their text.
        attention: (T, T), queries by keys; NaN where the query does not see the key.
        learned: (T) what each query pays to a learned sink column; zeros where the model has none.
        received: (T) mean attention from the queries that see the key; NaN where too few see it for a sink.
        sinks: of the head, by position.
        group: (T) the sink that caught each token, as an index into `sinks`; `UNCAUGHT`, or `LEFT_OUT`.
    """

    layer: int
    head: int
    tokens: tuple[str, ...]
    attention: Floats
    learned: Floats
    received: Floats
    sinks: tuple[Sink, ...]
    group: np.ndarray


@dataclass(frozen=True, eq=False)
class Tags:
    """What the head writes, by token.

    Attributes:
        scores: (T, 3), on three principal components of the output in the residual stream.
        counted: (T) the tokens that count for them: all but the first and the sinks.
        explained: η², the share of the output's variance that the grouping by sink explains; NaN with one group.
        before: η² in the stream that enters the block.
        chance: what a random grouping explains on average.
    """

    scores: Float[Tensor, "positions 3"]
    counted: Bool[Tensor, " positions"]
    explained: float
    before: float
    chance: float


@measures("model")
def read_prompt(model: OpenModel, ids: Int[Tensor, " positions"]) -> PromptPass:
    """Run the model on a prompt and keep every layer's inputs; `WorkError` where they are NaN or infinite."""
    layers: list[LayerPass] = []
    visit_layers(model, ids[None], list(model.attending), layers.append)
    if not all(bool(torch.isfinite(layer_pass.stream).all()) for layer_pass in layers):
        wider = wider_than(layers[0].stream.dtype)
        raise WorkError(f"hidden states hold NaN or infinite values on this prompt: {wider}")
    trailing = trailing_special_tokens(model.tokenizer, ids[None])
    measured = _measured(model, ids, layers, trailing)
    by_layer = {layer_pass.layer: layer_pass for layer_pass in layers}
    return PromptPass(ids, tuple(token_texts(model, ids)), trailing, by_layer, measured)


def _measured(model: OpenModel, ids: Tensor, layers: Sequence[LayerPass], trailing: int) -> Run:
    statistics = AttentionStatistics(model.layers, model.heads, len(ids), 0, trailing)
    tokens = Tokens.of(ids[None], model.device)
    with torch.inference_mode():
        for layer_pass in layers:
            statistics.update(layer_pass.layer, layer_pass.inputs, tokens, first_context=0)
    state = statistics.state()
    # Of one context there are no errors.
    columns = {name: values for name, values in head_columns(state).items() if not name.endswith("_se")}
    heads = heads_that_are(columns, model.heads_of)
    empty = pd.DataFrame()
    arrays = {"visible_keys": state["visible_keys"]}
    return Run(empty, heads, empty, empty, empty, arrays, {})


@known_state()
def catch_layer(read: PromptPass, layer: int) -> LayerCatch:
    """Find which tokens a layer's sinks catch, and what its heads write, by attending once more."""
    with torch.inference_mode():
        inputs, trailing = read.layers[layer].inputs, read.trailing
        output, (catches,) = attend_and_catch(inputs, stretches=True, trailing=trailing)
    return LayerCatch(catches.to(torch.device("cpu")), output[0])


@known_state()
def head_view(read: PromptPass, caught: LayerCatch, layer: int, head: int) -> HeadView:
    """Return one head's attention and sinks, from what its layer read and which tokens the layer's sinks catch."""
    inputs, tokens = chosen_heads(read.layers[layer].inputs, [head]), read.tokens
    with torch.inference_mode():
        weights, visible, received = (of_heads[0] for of_heads in attention_paid(inputs))
    catches = caught.catches
    positions, group = groups_of(catches, head, len(tokens), read.trailing)
    rows = (catches.head == head).nonzero().flatten().tolist()
    sinks = [
        Sink(
            position, float(catches.received[row]), int(catches.caught[row].sum()), bool(catches.stretch[row])
        )
        for position, row in zip(positions.tolist(), rows, strict=True)
    ]
    learned = 1 - weights.sum(dim=-1) if inputs.sink is not None else torch.zeros(len(tokens))
    return HeadView(
        layer=layer,
        head=head,
        tokens=tokens,
        attention=weights.masked_fill(~visible, torch.nan).numpy(),
        learned=learned.double().numpy(),
        received=received.numpy(),
        sinks=tuple(sinks),
        group=group.numpy(),
    )


@measures("model")
def head_tags(model: OpenModel, read: PromptPass, caught: LayerCatch, view: HeadView) -> Tags:
    """Return what the head writes at each token, on three principal components, and how far the sinks explain it.

    Raises:
        UsageError: all tokens but two or fewer are sinks.
        WorkError: what leaves the attention is no fixed affine function of its heads' outputs.
    """
    others = torch.from_numpy(view.group != LEFT_OUT)
    if int(others.sum()) <= 2:
        raise UsageError("too few tokens besides the sinks")
    weights = model.output_weights(view.layer)[view.head].double().cpu()
    output = caught.output[:, view.head].double().cpu() @ weights
    group = torch.from_numpy(view.group)[others]
    stream = read.layers[view.layer].stream[0].double().cpu()
    return Tags(
        scores=principal_scores(output, others),
        counted=others,
        explained=variance_explained(output[others], group),
        before=variance_explained(stream[others], group),
        chance=chance_explained(group),
    )


def tag_colours(tags: Sequence[Tags | None]) -> list[np.ndarray]:
    """Each model's tags as colours (T, 3), 0 to 255, rotated as close as possible to those of the first that has any.

    Empty for None. The rotation is fitted to the tokens that count in both; with too few of them there is none.
    """
    first = next(filter(None, tags), None)

    def colours(of_model: Tags) -> np.ndarray:
        assert first is not None
        in_both = of_model.counted & first.counted
        unrotated = of_model is first or int(in_both.sum()) <= COLOURS
        scores = of_model.scores if unrotated else turned(of_model.scores, first.scores, in_both)
        return rgb(scores, of_model.counted).numpy()

    return [np.zeros((0, 3), np.uint8) if of_model is None else colours(of_model) for of_model in tags]
