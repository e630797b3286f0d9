"""Every head's W_q, W_k, W_v with their biases, and W_O, read without knowing parameter names.

Where the layer's weight map (`weight_map.py`) says which parameters hold W_q, W_k and W_v, they are read there. Else
they follow from what arrives at the tap for the input rows 0 and e_1 … e_d: the row 0 gives the bias, e_i the bias plus
row i of the weights. Each row is a sequence of its own at position 0, where RoPE is the identity (times its attention
scaling), and goes through a float64 copy of the module, so that subtracting the bias costs nothing.

For W_O the rows are what the tap returns in place of the heads' outputs: each comes out of the module times W_O, plus
what it adds whatever it gets. Where it returns its heads' outputs as they are (BERT), the module that takes them on and
holds a matrix is asked. What comes after W_O in the block (a norm in Gemma 2) is no part of it.
"""

from __future__ import annotations

from collections.abc import Callable
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
    hooked_by_accelerate,
    run_until_tap,
    stop_at_tap,
)
from theodolite.models.doors.answers import without_interventions
from theodolite.models.doors.taps import tapped
from theodolite.models.source import dtype_of
from theodolite.models.structure import Run, Structure, first_output, removed_on_leaving
from theodolite.models.weights.norms import Norms
from theodolite.models.weights.weight_map import WeightMap, WeightMaps, read_mapped

ROWS = 1024
"""Rows of the identity sent at once: bounds memory to ROWS × 3 widths."""

EXACT, BEFORE_NORM = "projection", "projection before norm"
"""What the weights of a layer's queries and keys are: factors of a matrix that gives its logits, or of one before a
norm, which does not."""

NO_MATRIX = "none"
"""The same of a layer whose queries and keys are no affine function of its input."""


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
    """Read the weights from the parameters that hold them, if these can be copied and a map says which they are."""

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

    if any(p.is_meta for p in attention.parameters()) and not hooked_by_accelerate(attention):
        return None
    try:
        return maps.first(attention, call, use)
    except NotAffine:
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
    weights = _affine_weights(module, call, call.width, EXACT)
    if weights is None and module is not attention:  # where there is no copy, its norms must stay
        norms = Norms(module)
        norms.leave_out(norms.at_tap(call))
        weights = _affine_weights(module, call, call.width, BEFORE_NORM)
    return weights


def _affine_weights(module: nn.Module, call: Call, width: int, projection: str) -> HeadWeights | None:
    dtype, positions = dtype_of(module), 1

    def send(rows: Tensor) -> AttentionInputs:
        return run_until_tap(module, call, as_sequences(rows, module).expand(-1, positions, -1))

    nothing = torch.zeros(1, width, dtype=torch.float64)
    try:
        at_zero = send(nothing)
    except NotAffine:
        positions = call.hidden.shape[1]
        if positions == 1:
            raise
        at_zero = send(nothing)  # rotations or a bias of all patches of an image: rows are repeated over them
    chunk = max(1, ROWS // positions)
    bias = _rows(at_zero)
    weights = [b.new_empty(b.shape[1], width, b.shape[2]) for b in bias]
    for start in range(0, width, chunk):
        rows = torch.eye(min(chunk, width - start), width, dtype=torch.float64).roll(start, 1)
        for w, answer, b in zip(weights, _rows(send(rows)), bias, strict=True):
            if len(answer) != len(rows):
                return None  # made of something else: the keys of an earlier layer (Gemma 3n)
            w[:, start : start + chunk] = (answer - b).transpose(0, 1)
    mixture = torch.randn(2, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tolerance = max(AFFINE_TOLERANCE, 32 * torch.finfo(dtype).eps)  # offloaded weights keep their dtype
    for answer, w, b in zip(_rows(send(mixture)), weights, bias, strict=True):
        expected = torch.einsum("rd,hdw->rhw", mixture, w) + b
        scale = expected.abs().max() + torch.linalg.vector_norm(w, float("inf")) * width**0.5
        if not torch.isfinite(answer).all() or (answer - expected).abs().max() > tolerance * scale:
            return None
    if any(w.abs().max() <= tolerance * b.abs().max() for w, b in zip(weights, bias, strict=True) if b.any()):
        # Weights that are zero, or what is made of another tensor: of a memory, say.
        others = _rows(run_until_tap(module, call.with_others_changed(), as_sequences(nothing, module)))
        if not all(torch.equal(now, before) for now, before in zip(others, bias, strict=True)):
            return None
    (w_q, w_k, w_v), (b_q, b_k, b_v) = weights, (b[0] for b in bias)
    return HeadWeights(w_q, w_k, w_v, b_q, b_k, b_v, at_zero.scaling, projection)


def _rows(inputs: AttentionInputs) -> tuple[Tensor, ...]:
    """Compute queries, keys and values of one-token sequences, each (rows, heads, width), grouped ones repeated."""
    heads = inputs.query.shape[1]
    repeated = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (inputs.key, inputs.value))
    return tuple(t[:, :, 0].double().cpu() for t in (inputs.query, *repeated))


Sender = Callable[[Tensor, Tensor], Tensor]
"""Sends heads' outputs (rows, features) with hidden states (rows, d); returns what comes out, (rows, d)."""


def read_output_weights(
    model: nn.Module, structure: Structure, layer: int, call: Call, run: Run
) -> Float64[Tensor, "heads value_width width"]:
    """Read W_O of one layer: what leaves its attention is Σ_h o_h W_O[h] + a constant, or raise `WorkError`."""
    heads, width, positions = structure.heads_of[layer], call.width, 1
    features = heads * structure.value_widths[layer]
    given = torch.zeros(1, features)

    def give(_: nn.Module, inputs: AttentionInputs) -> Tensor:
        """Replace the heads' outputs by given ones, the same at all positions."""
        by_head = given.to(inputs.value).unflatten(1, (heads, -1)).unsqueeze(1)
        return by_head.expand(-1, inputs.query.shape[2], -1, -1)

    with without_interventions(), torch.inference_mode():
        with tapped(model, give):
            module = copy_in_dtype(structure.attention_at(layer), torch.float64)
            if module is not structure.attention_at(layer):
                module.eval()

            def send(outputs: Tensor, hidden: Tensor) -> Tensor:
                """Compute what leaves the module for these heads' outputs and `hidden`; a row is a sequence."""
                nonlocal given
                given = outputs
                sequences = as_sequences(hidden, module).expand(-1, positions, -1)
                return call.output(module, sequences)[:, 0].double().cpu()

            try:
                send(given, torch.zeros(1, width))
            except (RuntimeError, ValueError, TypeError):
                positions = call.hidden.shape[1]  # it takes as many as the call has: patches of an image
                if positions == 1:
                    raise
            outputs = _random(2, features).to(dtype_of(module)).double()
            result = send(outputs, torch.zeros(2, width))
            passes_on = result.shape == outputs.shape and torch.equal(result, outputs)
            weights = None if passes_on else _linear_part(send, features, width, max(1, ROWS // positions))
        if passes_on:
            output_module = _output_module(model, structure, layer, run)
            if output_module is None:
                weights = torch.eye(features, dtype=torch.float64)
            else:
                taken_on = copy_in_dtype(output_module, torch.float64)

                def send_on(outputs: Tensor, _hidden: Tensor) -> Tensor:
                    return taken_on(as_sequences(outputs, taken_on))[:, 0].double().cpu()

                weights = _linear_part(send_on, features, width)
    if weights is None:
        raise WorkError(
            f"layer {layer}: what leaves {structure.names[layer]} is no fixed affine function of its heads' "
            "outputs (a gate or a norm comes between), so it has no W_O"
        )
    return weights.unflatten(0, (heads, -1))


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


def _linear_part(
    send: Sender, features: int, width: int, at_once: int = ROWS
) -> Float64[Tensor, "features out"] | None:
    """Find W where `send(o, x)` is o W + c(x) for all x; None where it is not."""
    constant = send(torch.zeros(1, features), torch.zeros(1, width))
    identity = torch.eye(features, dtype=torch.float64)
    weights = torch.cat(
        [send(rows, torch.zeros(len(rows), width)) - constant for rows in identity.split(at_once)]
    )
    outputs, hidden = _random(2, features), _random(2, width)
    # The same outputs over other hidden states: a gate that reads them would show.
    base = send(torch.zeros(2, features), hidden)
    change, expected = send(outputs, hidden) - base, outputs @ weights
    scale = expected.abs().max() + base.abs().max() + weights.abs().max() * features**0.5
    affine = torch.isfinite(change).all() and (change - expected).abs().max() <= AFFINE_TOLERANCE * scale
    return weights if affine else None


def _random(rows: int, columns: int) -> Float64[Tensor, "rows columns"]:
    generator = torch.Generator().manual_seed(rows + columns)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def state_of(module: nn.Module) -> tuple[tuple[int, int], ...]:
    """Return a value that changes when a parameter is replaced or written to (but not through `.data`)."""
    return tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in module.parameters())
