"""Every head's W_q, W_k, W_v and biases, read without knowing parameter names.

Where the layer's weight map says which parameters hold them (`weight_map.py`), they are read there. Else they are read
through the tap. An attention module that projects its input affinely is known by what arrives at the tap for the input
rows 0 and e_1 … e_d: the row 0 gives the bias, e_i the bias plus row i of the weights. Each row is a sequence of its
own at position 0, where RoPE is the identity (times its own attention scaling). The rows go through a float64 copy of
the module, so that the subtraction of the bias costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import UsageError
from theodolite.models.calls import Call
from theodolite.models.doors.answers import without_interventions
from theodolite.models.doors.taps import tapped
from theodolite.models.source import dtype_of
from theodolite.models.structure import Structure
from theodolite.models.weights.copies import (
    AFFINE_TOLERANCE,
    NotAffine,
    as_sequences,
    copy_in_dtype,
    hooked_by_accelerate,
    run_until_tap,
    stop_at_tap,
)
from theodolite.models.weights.norms import make_norms_modules, norms_at_tap, norms_inside
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
        """Whether the product of query and key weights gives the logits."""
        return self.projection == EXACT


def no_head_matrix(model_id: str) -> UsageError:
    """What to raise where that is so in every layer, and heads' matrices are all that was asked for."""
    return UsageError(f"{model_id}: queries and keys are no affine function of their input in any layer")


def read_head_weights(
    model: nn.Module, structure: Structure, layer: int, call: Call, maps: WeightMaps | None = None
) -> HeadWeights:
    """Read the weights of one layer's heads.

    Args:
        call: what `capture_calls` gave for this layer.
        maps: those of the model's layers that are known.

    Raises:
        NotAffine: the layer's queries or keys are no affine function of its input, even before their norm.
    """
    attention = structure.attention_at(layer)
    with without_interventions(), tapped(model, stop_at_tap), torch.no_grad():
        weights = _from_map(attention, call, maps or WeightMaps()) or through_tap(attention, call)
    if weights is None:
        raise NotAffine(
            f"layer {layer}: queries and keys are no affine function of {structure.names[layer]}'s input"
        )
    return weights


def _from_map(attention: nn.Module, call: Call, maps: WeightMaps) -> HeadWeights | None:
    """From the parameters that hold them, where these can be copied and a map says which they are."""

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
    """Those of grouped heads once for each query head."""
    times = heads // len(of_heads)
    return (of_heads if times == 1 else of_heads.repeat_interleave(times, dim=0)).cpu()


def through_tap(attention: nn.Module, call: Call) -> HeadWeights | None:
    """By rows sent through the module, under `stop_at_tap`; None where it has no such weights, even before a norm."""
    try:
        return _read_in(torch.float64, attention, call)
    except NotAffine:
        # A mask of the largest number of a dtype is none in a wider one (XGLM).
        return _read_in(torch.float32, attention, call)


def _read_in(dtype: torch.dtype, attention: nn.Module, call: Call) -> HeadWeights | None:
    module = copy_in_dtype(attention, dtype)
    if module is not attention:
        make_norms_modules(module, [norm for _, norm in norms_inside(module)])
    for projection in (EXACT, BEFORE_NORM):
        weights = _affine_weights(module, call, call.width, projection)
        if weights is not None or module is attention:
            return weights  # where there is no copy, its norms must stay
        for name in norms_at_tap(module, call):
            module.set_submodule(name, nn.Identity())
    return None


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
    tolerance = max(
        AFFINE_TOLERANCE, 32 * torch.finfo(dtype).eps
    )  # offloaded weights stay in their own dtype
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
    """Queries, keys and values of sequences of one token, each (rows, heads, width), grouped ones repeated."""
    heads = inputs.query.shape[1]
    repeated = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (inputs.key, inputs.value))
    return tuple(t[:, :, 0].double().cpu() for t in (inputs.query, *repeated))
