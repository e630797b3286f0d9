"""Queries and keys of a layer, split into what each part of the hidden states contributes.

What the model does between the residual stream and its queries and keys (norms, a projection, rotation) is affine once
the norms' scales are held. So each part of the stream is sent the same way by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import WorkError
from theodolite.models.calls import Call, copy_in_dtype, run_until_tap, stop_at_tap
from theodolite.models.doors.taps import tapped
from theodolite.models.guard import measures, without_autocast
from theodolite.models.opened import OpenModel
from theodolite.models.source import Inputs
from theodolite.models.structure import Turns, first_tensor, removed_on_leaving
from theodolite.models.weights import norms
from theodolite.models.weights.norms import FunctionNorm
from theodolite.theory.decomposition import PARTS, Decomposition, DecompositionByGroups


@dataclass(frozen=True)
class LayerPass:
    """One layer in a forward pass: the stream that enters its block, and how that becomes queries and keys.

    `norm` is the module that turns `stream` into `entered`, which the attention module reads; None where they
    are the same (BERT, OLMo 2) or none was found. `inputs` is what arrived at the tap; `cross` says that its keys are
    of an encoder's stream.
    """

    layer: int
    name: str
    stream: Float[Tensor, "contexts positions width"]
    entered: Float[Tensor, "contexts positions width"]
    norm: nn.Module | None
    attention: nn.Module
    call: Call
    inputs: AttentionInputs
    cross: bool


@dataclass(frozen=True)
class SplitQueriesAndKeys:
    """Parts of one layer's queries and keys in the order of `PARTS`; they sum to what the model itself had.

    `rounding` is the relative difference of the parts, each computed by itself, from the model's queries or
    keys, the larger of the two; it is in the part `resid`.
    """

    query: Float[Tensor, "parts contexts heads positions head_width"]
    key: Float[Tensor, "parts contexts key_heads positions head_width"]
    inputs: AttentionInputs
    rounding: float


class _LastLayerDone(Exception):
    pass


@measures("model")
def visit_layers(
    model: OpenModel, inputs: Inputs, layers: range | list[int], visit: Callable[[LayerPass], None]
) -> None:
    """Run the model on token ids or pixels and visit each of `layers` as it comes; the pass ends with the last of them.

    The model computes with its own attention; while `visit` runs, the tap calls `stop_at_tap`.
    """
    structure = model.structure
    turns = Turns(structure.attention)
    left = set(layers)
    # Hooks travel with copies of a module, which are in none of these.
    blocks = {structure.blocks[layer] for layer in layers}
    attention = {structure.attention_at(layer) for layer in layers}
    around = {module for block in blocks for module in block.modules()} - blocks
    around = around.difference(*(module.modules() for module in attention))
    entering: Tensor | None = None  # the stream as the model has it
    made_of_it: list[tuple[nn.Module, Tensor]] = []
    visiting = False

    def enter_block(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal entering
        if module in blocks:
            entering = first_tensor(args, kwargs)
            made_of_it.clear()

    def leave_module(module: nn.Module, args: Any, output: Any) -> None:
        if module in around and args and args[0] is entering and isinstance(output, Tensor):
            made_of_it.append((module, output))

    def leave_function(norm: FunctionNorm, x: Tensor, output: Tensor) -> Tensor:
        if x is entering and not visiting:
            made_of_it.append((norm, output))
        return output

    def enter_attention(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal visiting
        if module not in attention or visiting:
            return
        layer = turns.take(module)
        if layer not in left:
            return
        assert entering is not None
        call = Call(args, kwargs, structure.attention_layout).without_cache()
        stream = structure.layout.ordered(entering)
        # The very tensor first: another norm of the block may give equal numbers. A function may be a module's own.
        made_of_it.sort(key=lambda pair: (pair[1] is not call.entered, isinstance(pair[0], FunctionNorm)))
        found = (norm for norm, output in made_of_it if _equal(output, call.entered))
        norm = None if _equal(call.hidden, stream) else next(found, None)
        visiting = True
        try:
            with tapped(model.root, stop_at_tap):
                arrived = run_until_tap(module, call)
                name, cross = structure.names[layer], structure.cross
                layer_pass = LayerPass(layer, name, stream, call.hidden, norm, module, call, arrived, cross)
                with without_autocast():
                    visit(layer_pass)
        finally:
            visiting = False
        left.remove(layer)
        if not left:
            raise _LastLayerDone

    hooks = [block.register_forward_pre_hook(enter_block, with_kwargs=True) for block in blocks]
    hooks += [module.register_forward_hook(leave_module) for module in around]
    hooks += [module.register_forward_pre_hook(enter_attention, with_kwargs=True) for module in attention]
    with suppress(_LastLayerDone), removed_on_leaving(hooks), norms.NormCalls(leave_function):
        model.forward(inputs)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and torch.equal(a, b))


def of_streams(
    layer_pass: LayerPass, streams: Float[Tensor, "contexts positions width"], *, first: bool
) -> LayerPass:
    """Return the same layer's pass for other contexts of that length, given the stream that enters its block.

    With `first`, the first of them is that of the pass, and is compared with it. `WorkError` where these streams alone
    do not say what attention reads: it has something else of the context, or the block does not get what was left.
    """
    _check_reads_stream(layer_pass)
    stream = streams.to(layer_pass.stream)
    entered = stream if layer_pass.norm is None else layer_pass.norm(stream)
    inputs = run_until_tap(layer_pass.attention, layer_pass.call, entered)
    of_pass = layer_pass.inputs
    pairs = ((entered, layer_pass.entered), (inputs.query, of_pass.query), (inputs.key, of_pass.key))
    for computed, expected in pairs if first else ():
        if norms.relative_error(computed[:1], expected) > _tolerance(expected):
            raise WorkError("attention reads something else of a context than its stream")
    return replace(layer_pass, stream=stream, entered=entered, inputs=inputs)


def _check_reads_stream(layer_pass: LayerPass) -> None:
    """Raise `WorkError` unless attention reads the residual stream, as it is or behind a norm."""
    if layer_pass.cross:
        raise WorkError("its keys are made of the encoder's states, and these are the decoder's parts")
    if layer_pass.entered.shape != layer_pass.stream.shape:
        raise WorkError(
            "attention does not read the residual stream as it is, but something else of another width"
        )
    if layer_pass.norm is None and not _equal(layer_pass.entered, layer_pass.stream):
        raise WorkError("no module of the block turns the residual stream into what enters attention")


def split_queries_and_keys(
    layer_pass: LayerPass, parts: Decomposition | DecompositionByGroups, dtype: torch.dtype
) -> SplitQueriesAndKeys:
    """Split one layer's queries and keys; `parts` are those of `layer_pass.stream` and sum to it.

    The query of a hidden state h is affine in h once the scale s of each norm is held at its value for h: `mean`, `pos`
    and `ctx` are the linear images of these parts, `bias` is the image of zero (biases of the norm and of the
    projection). `resid` of the first context is computed by itself too, and the sum compared with the model's own
    queries and keys; then it takes up the rounding that is left, so that the parts always sum to the model's own.

    Args:
        layer_pass: a pass that `visit_layers` is visiting.
        parts: of its contexts (contexts, positions, d).
        dtype: of the computation; float64 for what is exact.

    Raises:
        WorkError: queries and keys of this layer are no affine function of the stream even with frozen norms.
    """
    try:
        by_groups = parts.by_groups() if isinstance(parts, Decomposition) else parts
        return _split(layer_pass, by_groups, dtype)
    except WorkError as error:
        raise WorkError(
            f"layer {layer_pass.layer} ({layer_pass.name}): its logits cannot be split: {error}"
        ) from error


def _split(layer_pass: LayerPass, parts: DecompositionByGroups, dtype: torch.dtype) -> SplitQueriesAndKeys:
    _check_reads_stream(layer_pass)
    norm, entered = _frozen_norm(layer_pass, dtype), layer_pass.entered.to(dtype)
    attention, per_context = norms.frozen_attention(layer_pass.attention, layer_pass.call, entered)
    batch = entered if per_context else entered[:1]

    def send(entering: Tensor) -> tuple[Tensor, Tensor]:
        inputs = attention(entering)
        return inputs.query.to(dtype), inputs.key.to(dtype)

    at_zero = send(torch.zeros_like(batch))

    def linear(entering: Tensor) -> tuple[Tensor, Tensor]:
        query, key = send(entering.expand(entered.shape) if per_context else entering)
        return query - at_zero[0], key - at_zero[1]

    def image(part: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Compute what parts of the stream add to the queries and keys of the contexts that have them."""
        part = part.to(layer_pass.stream.device, dtype)
        part = part if norm is None else norm.direction(part)
        scale = part.new_ones(1, 1, 1) if norm is None else norm.scale[: len(query)]
        if per_context:
            own = linear(part[query] * scale)
            return own if query is key else (own[0], linear(part[key] * scale)[1])
        # Projected once, scaled after: a group's means are those of many contexts.
        of_query, of_key = linear(part)
        return of_query[query] * scale.unsqueeze(1), of_key[key] * scale.unsqueeze(1)

    contexts, length, _ = layer_pass.stream.shape
    groups = parts.query_group, parts.key_group
    each = torch.arange(contexts, device=layer_pass.stream.device)
    mean = image(parts.mean.unsqueeze(1).expand(-1, length, -1), *groups)
    level = image(parts.level.unsqueeze(1).expand(-1, length, -1), each, each)
    named = {
        "mean": mean,
        "pos": image(parts.pos, *groups),
        "ctx": (level[0] - mean[0], level[1] - mean[1]),
        "bias": at_zero if norm is None or not norm.bias.any() else send(norm.bias.expand_as(batch)),
    }
    checked = contexts if per_context else 1
    first = each[:checked]
    resid = image(parts.resid(groups[0], checked), first, first)
    if groups[1] is not groups[0]:
        resid = resid[0], image(parts.resid(groups[1], checked), first, first)[1]
    rounding, both = 0.0, []
    for side, own in enumerate((layer_pass.inputs.query, layer_pass.inputs.key)):
        total = own.to(dtype)
        exact = {name: part[side].expand_as(total) for name, part in named.items()}
        remainder = total - sum(exact.values())
        off = resid[side] - remainder[:checked]
        rounding = max(rounding, norms.relative_error(total[:checked] + off, total[:checked]))
        both.append(torch.stack([{**exact, "resid": remainder}[name] for name in PARTS]))
    if not rounding <= _tolerance(layer_pass.stream, layer_pass.inputs.query):
        raise WorkError(
            "queries and keys of this family are no affine function of its residual stream "
            f"(relative error {rounding:.1e})"
        )
    return SplitQueriesAndKeys(both[0], both[1], layer_pass.inputs, rounding)


def _frozen_norm(layer_pass: LayerPass, dtype: torch.dtype) -> norms.FrozenNorm | None:
    """Freeze the norm before the heads at the stream of a pass; None where there is none."""
    if layer_pass.norm is None:
        return None
    copy, name = copy_in_dtype(layer_pass.norm, dtype), type(layer_pass.norm).__name__
    stream, tolerance = layer_pass.stream.to(dtype), _tolerance(layer_pass.stream, layer_pass.entered)
    return norms.FrozenNorm(lambda x: copy(x).to(x.dtype), stream, layer_pass.entered, name, tolerance)


def _tolerance(*computed: Tensor) -> float:
    """Return the relative error allowed of what the model computed in its own dtypes, or in autocast's."""
    return max(norms.EXACT, min(256 * max(torch.finfo(tensor.dtype).eps for tensor in computed), 0.1))
