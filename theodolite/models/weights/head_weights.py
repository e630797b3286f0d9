"""Every head's W_q, W_k, W_v and biases, read through the tap and not through parameter names.

An attention module projects its input affinely, whatever the layout of its weights (fused, interleaved,
grouped, transposed). So its input rows 0 and e_1 … e_d suffice: what arrives at the tap for the row 0 is the
bias, and for e_i the bias plus row i of the weights. Each row is a sequence of its own at position 0, where
RoPE is the identity (times its own attention scaling). The rows go through a float64 copy of the module, so
that the subtraction of the bias costs nothing, and the module stops as soon as the tap has them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import UsageError, WorkError
from theodolite.models.calls import Call
from theodolite.models.doors.answers import without_interventions
from theodolite.models.doors.taps import tapped
from theodolite.models.source import device_of, dtype_of
from theodolite.models.stored.dequantised import dequantised, quantised_layers
from theodolite.models.structure import Structure, removed_on_leaving
from theodolite.models.training.shards import gathered, whole_copy
from theodolite.models.weights.function_norms import make_norms_modules

ROWS = 1024
"""Rows of the identity sent at once: bounds memory to ROWS × 3 widths."""

AFFINE_TOLERANCE = 32 * torch.finfo(torch.float32).eps
"""Relative error of an affine map in float64. Some families rotate in float32 whatever their dtype (Cohere, ModernBERT,
DeepSeek 2), so that even a float64 copy is exact to float32 only; what is not affine is off by a share of order one."""


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


class _Stopped(Exception):
    def __init__(self, inputs: AttentionInputs) -> None:
        self.inputs = inputs


class NotAffine(WorkError):
    """A layer's queries or keys are no affine function of its input."""


def no_head_matrix(model_id: str) -> UsageError:
    """What to raise where that is so in every layer, and heads' matrices are all that was asked for."""
    return UsageError(f"{model_id}: queries and keys are no affine function of their input in any layer")


def read_head_weights(model: nn.Module, structure: Structure, layer: int, call: Call) -> HeadWeights:
    """Read the weights of one layer's heads; `call` is what `capture_calls` gave for this layer.

    Raises:
        NotAffine: the layer's queries or keys are no affine function of its input, even before their norm.
    """
    attention = structure.attention_at(layer)
    with without_interventions(), tapped(model, stop_at_tap), torch.no_grad():
        try:
            weights = _read_in(torch.float64, attention, call)
        except NotAffine:
            # A mask of the largest number of a dtype is none in a wider one (XGLM).
            weights = _read_in(torch.float32, attention, call)
    if weights is None:
        raise NotAffine(
            f"layer {layer}: queries and keys are no affine function of {structure.names[layer]}'s input"
        )
    return weights


def _read_in(dtype: torch.dtype, attention: nn.Module, call: Call) -> HeadWeights | None:
    """By a copy in this dtype: the projections, or those before a norm; None where there are neither."""
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


def as_sequences(rows: Float[Tensor, "rows width"], module: nn.Module) -> Float[Tensor, "rows 1 width"]:
    """Each row a sequence of one token, where the module's parameters are and in their dtype."""
    return rows.to(device_of(module), dtype_of(module)).unsqueeze(1)


def _rows(inputs: AttentionInputs) -> tuple[Tensor, ...]:
    """Queries, keys and values of sequences of one token, each (rows, heads, width), grouped ones repeated."""
    heads = inputs.query.shape[1]
    repeated = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (inputs.key, inputs.value))
    return tuple(t[:, :, 0].double().cpu() for t in (inputs.query, *repeated))


def norms_at_tap(module: nn.Module, call: Call) -> list[str]:
    """Names of the norms whose output is what the tap gets as queries, keys or values, up to order and scale.

    Or each of its numbers several times, where a module repeats grouped keys itself.
    A norm between two projections (DeepSeek's) is not among them: without it, other weights would be read. It needs
    `tapped(…, stop_at_tap)` to be open.
    """
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                outputs[name] = output

        return hook

    hooks = [child.register_forward_hook(keep(name)) for name, child in norms_inside(module)]
    width = call.width
    row = torch.randn(1, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with removed_on_leaving(hooks):
        inputs = run_until_tap(module, call, as_sequences(row, module))
    tapped_values = [_sorted_values(tensor) for tensor in (inputs.query, inputs.key, inputs.value)]
    return [
        name
        for name, output in outputs.items()
        if any(_is_repeated(output, values) for values in tapped_values)
    ]


def _is_repeated(output: Tensor, values: Tensor) -> bool:
    times, left = divmod(len(values), output.numel())
    return not left and torch.allclose(
        _sorted_values(output.flatten().repeat(times)), values, rtol=0, atol=1e-4
    )


def _sorted_values(tensor: Tensor) -> Tensor:
    """The sorted values, scaled to norm 1: equal for tensors that differ in order and scale only."""
    values = tensor.double().flatten().sort().values
    return values / torch.linalg.vector_norm(values).clamp_min(1e-300)


def norms_inside(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The norms inside an attention module, by name; those of weights (`spectral_norm`) are none."""
    return [
        (name, child)
        for name, child in module.named_modules()
        if name and "parametrizations" not in name.split(".")
        if "norm" in name.lower().split(".")[-1] or type(child).__name__.endswith("Norm")
    ]


def run_until_tap(module: nn.Module, call: Call, hidden: Tensor) -> AttentionInputs:
    """What arrives at the tap for `hidden` (batch, positions, d) in place of the hidden states of `call`.

    It stops there, while `tapped(…, stop_at_tap)` is open.

    Raises:
        WorkError: the module did not call its attention function.
    """
    return _until_tap(module, lambda: call.output(module, hidden))


def call_until_tap(module: nn.Module, call: Call) -> AttentionInputs:
    """The same for the hidden states of `call`."""
    return _until_tap(module, lambda: call.run(module))


def _until_tap(module: nn.Module, run: Callable[[], Any]) -> AttentionInputs:
    try:
        run()
    except _Stopped as stopped:
        return stopped.inputs
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AssertionError) as error:
        # What else it is called with (embeddings of the tokens, say) fits the model's own hidden states only.
        reason = str(error).partition("\n")[0]
        raise NotAffine(
            f"{type(module).__name__} takes no hidden states but the model's own: {reason}"
        ) from error
    raise WorkError(f"{type(module).__name__} did not reach its attention function")


def stop_at_tap(_: nn.Module, inputs: AttentionInputs) -> Tensor:
    """A tap that stops the attention module there; `call_until_tap` catches it."""
    raise _Stopped(inputs)


def copy_in_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy in `dtype`, or the module itself where its weights are on the meta device.

    Weights that accelerate has offloaded are brought here for the copy, which has none of its hooks; those that are
    spread over ranks are gathered. Quantised layers become plain ones.

    Raises:
        WorkError: a layer is quantised in a way that cannot be read.
    """
    plain = {
        id(layer): dequantised(name, layer) for name, layer in quantised_layers(module, type(module).__name__)
    }
    hooked = [child for child in module.modules() if hasattr(child, "_hf_hook")]
    with ExitStack() as weights_present:
        if hooked:
            from accelerate.utils import align_module_device

            for child in hooked:
                weights_present.enter_context(align_module_device(child))
        if any(p.is_meta for p in module.parameters()):
            return module
        # A hook knows all offloaded weights of the model: it is not copied with the module.
        hooks = {id(child._hf_hook): child._hf_hook for child in hooked}
        weights_present.enter_context(gathered(module.modules()))
        copy_of = whole_copy(module, {**hooks, **plain})
    for child in copy_of.modules():
        if child.__dict__.pop("_hf_hook", None) is not None:
            del child._old_forward
            if isinstance(child.forward, functools.partial):  # else the tap has put its own there
                del child.forward
    # `to` would take the imaginary part of a rotation (torchtitan, Llama's own code).
    return copy_of._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
