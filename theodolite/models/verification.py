"""Verify that attention recomputed from the tap's queries, keys and values is the model's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from theodolite.attention.inputs import AttentionInputs, attend
from theodolite.errors import UsageError, WorkError
from theodolite.models.calls import Call
from theodolite.models.doors.taps import tapped
from theodolite.models.source import Source
from theodolite.models.stored.dequantised import holds_quantised_layers
from theodolite.models.structure import Run, Structure, first_output, removed_on_leaving
from theodolite.system.choices import wider_than

VERIFIED_LENGTH = 16
"""Tokens of the sequence on which an opened model is verified."""

ROUNDINGS = 10
"""Of a logit on its way, one after another: what random models of every family stay below by a factor of five."""

MOST_BY_LOGITS = 1e-3
"""By how much the attention output may differ because logits are large: what is wrong is off by more."""

NEVER_ROUNDING = 0.5
"""No rounding, in any dtype and at any depth, is so large a share of the largest output: zeros are off by 1."""

OF_QUANTISERS = 2**-4
"""By how much it may differ in a quantised model of any dtype: where activations are rounded to eight bits, what is off
by a last bit may be rounded the other way, by 1 % of the largest, and large logits make more of it."""


@contextmanager
def recorded_inputs(model: nn.Module, structure: Structure) -> Iterator[list[AttentionInputs]]:
    """Yield a list to which the inputs of every layer's attention that runs are added while open."""
    recorded: list[AttentionInputs] = []

    def record(module: nn.Module, inputs: AttentionInputs) -> Tensor:
        again = recorded and recorded[-1].query is inputs.query  # the same, to other values (DiffLlama)
        if module in structure.attention and not again:
            recorded.append(inputs)
        return attend(inputs)

    with tapped(model, record):
        yield recorded


def verify_attention(
    model: nn.Module, structure: Structure, run: Run, *, skip_overflow: bool = False
) -> list[AttentionInputs]:
    """Compare every attention module's output with the recomputed one; return the attention inputs of each layer.

    `WorkError` where they differ by more than rounding. With `skip_overflow` nothing is compared where the model's own
    outputs are NaN or infinite, as of a training run that diverged: who measures it names the layer.
    """
    outputs = _attention_outputs(structure, run)
    with recorded_inputs(model, structure) as inputs:
        recomputed = _attention_outputs(structure, run)
    if skip_overflow and not all(torch.isfinite(output).all() for output in outputs):
        return inputs
    largest = [largest_logit(of_layer) for of_layer in inputs]
    of_quantisers = OF_QUANTISERS if holds_quantised_layers(model) else 0.0
    for number, layer in enumerate(structure.attending):
        batch, _, positions, _ = inputs[number].query.shape
        # Under autocast an attention in bfloat16 may be followed by what is in float32 again.
        least = max(of_quantisers, 100 * torch.finfo(inputs[number].value.dtype).eps)
        if outputs[number].shape[:2] != (batch, positions):
            raise UsageError(
                f"{structure.names[layer]} gives {tuple(outputs[number].shape)} for {batch} context of {positions} "
                "positions: theodolite reads hidden states (contexts, positions, width)"
            )
        where = f"layer {layer} ({structure.names[layer]})"
        check_recomputed(where, outputs[number], recomputed[number], largest[: number + 1], least)
    return inputs


def check_recomputed(
    where: str,
    output: Float[Tensor, "*batch width"],
    recomputed: Float[Tensor, "*batch width"],
    largest: Sequence[float],
    least: float = 0.0,
) -> None:
    """Raise `WorkError` where a recomputed output is not an attention module's own, or holds no numbers.

    Args:
        largest: bounds of the logits of this layer and of those before it, whose errors travel on.
        least: error that is rounding in any case.
    """
    if not (torch.isfinite(output).all() and torch.isfinite(recomputed).all()):
        raise WorkError(
            f"{where}: its attention outputs hold NaN or infinite values: {wider_than(output.dtype)}"
        )
    scale = output.abs().max().clamp_min(1e-30)
    error = float((recomputed - output).abs().max() / scale)
    # Some families (BLOOM, Gemma 2) take their softmax in float32 whatever their dtype. A weight is off by the rounding
    # of its logit, which is as large as the logit is.
    eps = max(torch.finfo(output.dtype).eps, torch.finfo(torch.float32).eps)
    rounding = max(least, 100 * eps, min(ROUNDINGS * max(largest) * eps, MOST_BY_LOGITS))
    if not error <= min(rounding * (1 + (len(largest) - 1) / 4), NEVER_ROUNDING):
        raise WorkError(
            f"{where}: the attention output recomputed from its queries, keys and values differs from the model's "
            f"own by {error:.1e}; this family is not supported"
        )


def largest_logit(inputs: AttentionInputs) -> float:
    """Bound every logit by scaling ‖q‖ ‖k‖ of the longest query and key, which bounds its rounding, too."""
    query, key = (
        float(torch.linalg.vector_norm(t, dim=-1, dtype=torch.float64).max())
        for t in (inputs.query, inputs.key)
    )
    return abs(inputs.scaling) * query * key


def attention_kind(inputs: Sequence[AttentionInputs]) -> tuple[bool, str]:
    """Tell whether a query is kept from later keys in every layer, and what is added to the logits."""
    causal = all(
        of_layer.causal if of_layer.mask is None else not bool(of_layer.mask.triu(1).any())
        for of_layer in inputs
    )
    # ALiBi is one number a key (its differences are the slopes); other biases differ from query to query.
    bias = inputs[0].bias
    return causal, "none" if bias is None else "alibi" if bias.shape[2] == 1 else "relative bias"


def positions_of(source: Source, call: Call, bias: str) -> str:
    """Tell how a model of `transformers` encodes positions, by a call of its attention and what is added to its logits.

    Returns:
        "rotary", "alibi", "relative bias", "learned", or "other" where its names say nothing; of a module of one's own
        "unknown".
    """
    if not isinstance(source.root, PreTrainedModel):
        return "unknown"
    if call.kwargs.get("position_embeddings") is not None:
        return "rotary"
    if bias != "none":
        return bias
    modules = [name.rpartition(".")[2] for name, _ in source.root.named_modules()]
    learned = any("pos" in name or name.endswith("wpe") for name in modules)
    learned = learned or any("position_embed" in name for name, _ in source.root.named_parameters())
    return "learned" if learned else "other"


def _attention_outputs(structure: Structure, run: Run) -> list[Tensor]:
    outputs: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(structure.attention_layout.ordered(first_output(output)).detach().clone())

    modules = {structure.attention_at(layer) for layer in structure.attending}
    hooks = [module.register_forward_hook(keep) for module in modules]
    with removed_on_leaving(hooks), torch.no_grad():
        run()
    return outputs
