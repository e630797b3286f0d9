"""Every head's W_q, W_k, W_v with their biases, and W_O, read without knowing parameter names.

Where the layer's weight map (`weight_map.py`) says which parameters hold W_q, W_k and W_v, they are read there. Else
they follow from what arrives at the tap of a float64 copy for the input rows 0 and e_1 … e_d, each a sequence at
position 0, where RoPE is the identity: the row 0 gives the bias, e_i the bias plus row i of the weights.

For W_O the rows are what the tap returns in place of the heads' outputs. Where the module returns these as they are
(BERT), the one that takes them on and holds a matrix is asked. What comes after W_O (a norm in Gemma 2) is no part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from theodolite.attention.inputs import AttentionInputs, attend
from theodolite.errors import UsageError, WorkError
from theodolite.models.calls import (
    AFFINE_TOLERANCE,
    Call,
    NotAffine,
    as_sequences,
    copy_in_dtype,
    run_until_tap,
    stop_at_tap,
)
from theodolite.models.doors.answers import without_interventions
from theodolite.models.doors.taps import tapped
from theodolite.models.structure import Run, Structure, first_output, removed_on_leaving
from theodolite.models.weights.norms import Norms
from theodolite.models.weights.weight_map import WeightMap, WeightMaps, read_mapped

EXACT, BEFORE_NORM, NO_MATRIX = "projection", "projection before norm", "none"
"""What the weights of a layer's queries and keys are: factors of a matrix that gives its logits; of one before a norm,
which does not; or nothing, where queries and keys are no affine function of the layer's input."""


@dataclass(frozen=True)
class HeadWeights:
    """Weights of one layer's heads: `query = x W_q + b_q`, logit = `query · key · scaling`, all in float64.

    Grouped keys and values are repeated, so that every array leads with the query heads. `projection` is
    `EXACT`, or `BEFORE_NORM` where the family normalises queries and keys after projecting them (Qwen 3, Gemma 3):
    then no matrix gives the logits, and these are the weights before that norm.
    """

    w_q: Float[Tensor, "heads width head_width"]
    w_k: Float[Tensor, "heads width head_width"]
    w_v: Float[Tensor, "heads width value_width"]
    b_q: Float[Tensor, "heads head_width"]
    b_k: Float[Tensor, "heads head_width"]
    b_v: Float[Tensor, "heads value_width"]
    scaling: float
    projection: str

    @property
    def exact(self) -> bool:
        """True if the product of query and key weights gives the logits."""
        return self.projection == EXACT


def no_head_matrix(model_id: str) -> UsageError:
    """Make the error for models without head matrices in any layer, where these are all that was asked for."""
    return UsageError(f"{model_id}: queries and keys are no affine function of their input in any layer")


def read_head_weights(
    model: nn.Module, structure: Structure, layer: int, call: Call, maps: WeightMaps | None = None
) -> HeadWeights:
    """Read the weights of one layer's heads, by `maps` if these are known; `NotAffine` where there are none."""
    attention = structure.attention_at(layer)
    with without_interventions(), tapped(model, stop_at_tap), torch.no_grad():
        weights = _from_map(attention, call, maps or WeightMaps()) or through_tap(attention, call)
    if weights is None:
        raise NotAffine(
            f"layer {layer}: queries and keys are no affine function of {structure.names[layer]}'s input"
        )
    return weights


def _from_map(attention: nn.Module, call: Call, maps: WeightMaps) -> HeadWeights | None:
    """Read the weights from the parameters that hold them, if a map says which they are."""

    def use(weight_map: WeightMap) -> HeadWeights | None:
        # A layer may leave out norms that others of its kind have.
        for norms in dict.fromkeys([(), weight_map.norms]):
            mapped, scaling = read_mapped(weight_map, attention, call, norms, torch.float64)
            read = [side for side in mapped if side is not None and side[1] is not None]
            if len(read) == len(mapped):
                heads = len(read[0][0])
                (w_q, w_k, w_v), (b_q, b_k, b_v) = (
                    [_repeated(tensor, heads) for tensor in part if tensor is not None]
                    for part in zip(*read, strict=True)
                )
                return HeadWeights(w_q, w_k, w_v, b_q, b_k, b_v, scaling, BEFORE_NORM if norms else EXACT)
        return None

    with suppress(NotAffine):
        return maps.first(attention, call, use)
    return None


def _repeated(of_heads: Tensor, heads: int) -> Tensor:
    """Repeat the weights of a key head for each query head that shares it."""
    times = heads // len(of_heads)
    return (of_heads if times == 1 else of_heads.repeat_interleave(times, dim=0)).cpu()


def through_tap(attention: nn.Module, call: Call) -> HeadWeights | None:
    """Find the weights by sending rows through the module; None where it has none such, even before a norm."""
    try:
        return _read_in(torch.float64, attention, call)
    except NotAffine:
        # A mask of the largest number of a dtype is none in a wider one (XGLM).
        return _read_in(torch.float32, attention, call)


def _read_in(dtype: torch.dtype, attention: nn.Module, call: Call) -> HeadWeights | None:
    module = copy_in_dtype(attention, dtype)
    weights = _affine_weights(module, call, EXACT)
    if weights is None:
        norms = Norms(module)
        norms.leave_out(norms.at_tap(call))
        weights = _affine_weights(module, call, BEFORE_NORM)
    return weights


def _affine_weights(module: nn.Module, call: Call, projection: str) -> HeadWeights | None:
    def sent(rows: Tensor, positions: int, of: Call = call) -> AttentionInputs:
        return run_until_tap(module, of, as_sequences(rows, module).expand(-1, positions, -1))

    def send(rows: Tensor, _: Tensor) -> Tensor:
        sides = _sides(sent(rows, positions))
        if any(len(side) != len(rows) for side in sides):
            raise NotAffine("queries, keys or values are of an earlier layer")  # Gemma 3n
        return torch.cat([side.flatten(1) for side in sides], dim=1)

    nothing = torch.zeros(1, call.width)
    positions = _positions_taken(call, lambda count: sent(nothing, count))
    at_zero = sent(nothing, positions)
    found = _affine_part(send, call.width, call.width, positions)
    if found is None:
        return None
    shapes = [side.shape[1:] for side in _sides(at_zero)]
    weights, biases = (
        [side.unflatten(1, shape) for side, shape in zip(sides, shapes, strict=True)]
        for sides in (part.split([shape.numel() for shape in shapes], dim=1) for part in found)
    )
    both = zip(weights, biases, strict=True)
    if any(w.abs().max() <= AFFINE_TOLERANCE * b.abs().max() for w, b in both if b.any()):
        # Weights that are zero, or what is made of another tensor: of a memory, say.
        others = _sides(sent(nothing, 1, call.with_others_changed()))
        if not all(map(torch.equal, others, biases)):
            return None
    w_q, w_k, w_v = (w.transpose(0, 1).contiguous() for w in weights)
    b_q, b_k, b_v = (b[0] for b in biases)
    return HeadWeights(w_q, w_k, w_v, b_q, b_k, b_v, at_zero.scaling, projection)


def _positions_taken(call: Call, send: Callable[[int], object]) -> int:
    """Return 1, or as many positions as the call has where a module takes no fewer: patches of an image."""
    with suppress(RuntimeError, ValueError, TypeError, NotAffine):
        send(1)
        return 1
    return call.hidden.shape[1]


def _sides(inputs: AttentionInputs) -> list[Float64[Tensor, "rows heads width"]]:
    """List queries, keys and values at the first position, grouped ones repeated."""
    heads = inputs.query.shape[1]
    tensors = (inputs.query, inputs.key, inputs.value)
    return [t[:, :, 0].repeat_interleave(heads // t.shape[1], dim=1).double().cpu() for t in tensors]


def read_output_weights(
    model: nn.Module, structure: Structure, layer: int, call: Call, run: Run
) -> Float64[Tensor, "heads value_width width"]:
    """Read W_O of one layer: what leaves its attention is Σ_h o_h W_O[h] + a constant, or raise `WorkError`."""
    attention, heads, width = structure.attention_at(layer), structure.heads_of[layer], call.width
    features = heads * structure.value_widths[layer]
    given, nothing = torch.zeros(1, features), torch.zeros(1, width)

    def give(_: nn.Module, inputs: AttentionInputs) -> Tensor:
        by_head = given.to(inputs.value).unflatten(1, (heads, -1)).unsqueeze(1)
        return by_head.expand(-1, inputs.query.shape[2], -1, -1)

    def sent(outputs: Tensor, hidden: Tensor, positions: int) -> Tensor:
        nonlocal given
        given = outputs
        sequences = as_sequences(hidden, module).expand(-1, positions, -1)
        return call.output(module, sequences)[:, 0].double().cpu()

    with without_interventions(), torch.inference_mode():
        with tapped(model, give):
            module = copy_in_dtype(attention, torch.float64).eval()
            positions = _positions_taken(call, lambda count: sent(given, nothing, count))
            send = functools.partial(sent, positions=positions)
            outputs = _random(2, features)
            result = send(outputs, nothing.expand(2, -1))
            passes_on = result.shape == outputs.shape and torch.equal(result, outputs)
            found = None if passes_on else _affine_part(send, features, width, positions)
        if passes_on:
            output_module = _output_module(model, structure, layer, run) or nn.Identity()
            taken_on = copy_in_dtype(output_module, torch.float64)

            def send_on(outputs: Tensor, _: Tensor) -> Tensor:
                return taken_on(as_sequences(outputs, taken_on))[:, 0].double().cpu()

            found = _affine_part(send_on, features, width)
    if found is None:
        raise WorkError(
            f"layer {layer}: what leaves {structure.names[layer]} is no fixed affine function of its heads' "
            "outputs (a gate or a norm comes between), so it has no W_O"
        )
    return found[0].unflatten(0, (heads, -1))


def _output_module(model: nn.Module, structure: Structure, layer: int, run: Run) -> nn.Module | None:
    attention, block = structure.attention_at(layer), structure.blocks[layer]
    heads_outputs: list[Tensor] = []
    output_modules: list[nn.Module] = []

    def leave_attention(_module: nn.Module, _args: Any, output: Any) -> None:
        heads_outputs.append(first_output(output))

    def enter_module(module: nn.Module, args: tuple[Any, ...]) -> None:
        if heads_outputs and args and args[0] is heads_outputs[0]:
            output_modules.append(module)

    inside = set(attention.modules())
    hooks = [attention.register_forward_hook(leave_attention)]
    for module in block.modules():
        if module not in inside and any(p.ndim == 2 for p in module.parameters(recurse=False)):
            hooks.append(module.register_forward_pre_hook(enter_module))
    with removed_on_leaving(hooks), tapped(model, lambda _, inputs: attend(inputs)):
        run()
    if len(output_modules) > 1:
        raise WorkError(
            f"layer {layer}: {len(output_modules)} modules read the heads' outputs of {structure.names[layer]}, so "
            "it has no one W_O"
        )
    return output_modules[0] if output_modules else None


def _affine_part(
    send: Callable[[Tensor, Tensor], Tensor], features: int, width: int, positions: int = 1
) -> tuple[Float64[Tensor, "features out"], Float64[Tensor, "1 out"]] | None:
    """Find W and c(0) where `send(o, x)` is o W + c(x) for all o and x; None where it is not."""
    constant = send(torch.zeros(1, features), torch.zeros(1, width))
    # So many rows of the identity at once bound memory to 1024 × 3 widths.
    chunks = torch.eye(features, dtype=torch.float64).split(max(1, 1024 // positions))
    weights = torch.cat([send(rows, torch.zeros(len(rows), width)) - constant for rows in chunks])
    outputs, hidden = _random(2, features), _random(2, width)
    # The same outputs over other hidden states: a gate that reads them would show.
    base = send(torch.zeros(2, features), hidden)
    change, expected = send(outputs, hidden) - base, outputs @ weights
    scale = expected.abs().max() + base.abs().max() + weights.abs().max() * features**0.5
    is_affine = torch.isfinite(change).all() and (change - expected).abs().max() <= AFFINE_TOLERANCE * scale
    return (weights, constant) if is_affine else None


def _random(rows: int, columns: int) -> Float64[Tensor, "rows columns"]:
    generator = torch.Generator().manual_seed(rows + columns)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def state_of(module: nn.Module) -> tuple[tuple[int, int], ...]:
    """Return a value that changes when a parameter is replaced or written to (but not through `.data`)."""
    return tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in module.parameters())
