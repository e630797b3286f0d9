"""Every head's W_O: what the model makes of a head's output, read through the tap and not through parameter names.

As in `head_weights.py`, the rows 0 and e_1 … e_n suffice, only that here they are what the tap returns: handed back to
the attention module in place of its heads' outputs, each comes out of it times W_O, plus what the module adds whatever
it gets (a bias; in BLOOM the residual stream). Where the module returns its heads' outputs as they are (BERT), the
module that takes them on and holds a matrix is asked in its stead. What comes after W_O in the block (a norm in
Gemma 2, a scale a dimension) is no part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from theodolite.attention.inputs import AttentionInputs, attend
from theodolite.errors import WorkError
from theodolite.models.calls import Call
from theodolite.models.doors.answers import without_interventions
from theodolite.models.doors.taps import tapped
from theodolite.models.source import dtype_of
from theodolite.models.structure import Run, Structure, first_output, removed_on_leaving
from theodolite.models.weights.copies import AFFINE_TOLERANCE, as_sequences, copy_in_dtype
from theodolite.models.weights.head_weights import ROWS

Sender = Callable[[Tensor, Tensor], Tensor]
"""Sends heads' outputs (rows, features) with hidden states (rows, d); returns what comes out, (rows, d)."""


def read_output_weights(
    model: nn.Module, structure: Structure, layer: int, call: Call, run: Run
) -> Float64[Tensor, "heads value_width width"]:
    """Read W_O of one layer: what leaves its attention is Σ_h o_h W_O[h] + a constant, o_h the heads' outputs.

    Raises:
        WorkError: what leaves the layer's attention is no fixed affine function of its heads' outputs.
    """
    width, heads, features, positions = call.width, 0, 0, 1
    given = torch.zeros(1, 0)

    def give(_: nn.Module, inputs: AttentionInputs) -> Tensor:
        """What is given in place of the heads' outputs, the same at all positions; zeros where nothing is."""
        nonlocal heads, features
        batch, heads, queries, _width = inputs.query.shape
        shape = (batch, queries, heads, inputs.value.shape[-1])
        features = shape[2] * shape[3]
        if not given.numel():
            return inputs.value.new_zeros(shape)
        return given.to(inputs.value).unsqueeze(1).expand(-1, queries, -1).reshape(shape)

    with without_interventions(), torch.inference_mode():
        with tapped(model, give):
            module = copy_in_dtype(structure.attention_at(layer), torch.float64)
            if module is not structure.attention_at(layer):
                module.eval()

            def send(outputs: Tensor, hidden: Tensor) -> Tensor:
                """What leaves the module, which reads `hidden`, with these heads' outputs; each row is a sequence."""
                nonlocal given
                given = outputs
                sequences = as_sequences(hidden, module).expand(-1, positions, -1)
                return call.output(module, sequences)[:, 0].double().cpu()

            nothing = torch.zeros(1, 0), torch.zeros(1, width)
            try:
                send(*nothing)  # tells as well how many heads there are, and how wide
            except (RuntimeError, ValueError, TypeError):
                positions = call.hidden.shape[1]  # it takes as many as the call has: patches of an image
                if positions == 1:
                    raise
                send(*nothing)
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
                weights = _linear_part(
                    lambda rows, _: taken_on(as_sequences(rows, taken_on))[:, 0].double().cpu(),
                    features,
                    width,
                )
    if weights is None:
        raise WorkError(
            f"layer {layer}: what leaves {structure.names[layer]} is no fixed affine function of its heads' "
            "outputs (a gate or a norm comes between), so it has no W_O"
        )
    return weights.unflatten(0, (heads, -1))


def _output_module(model: nn.Module, structure: Structure, layer: int, run: Run) -> nn.Module | None:
    """The module of the block, outside its attention module, that holds a matrix and gets the heads' outputs."""
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
    """W where `send(o, x)` is o W + c(x) for all x; None where it is not."""
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
    return torch.randn(
        rows, columns, generator=torch.Generator().manual_seed(rows + columns), dtype=torch.float64
    )


def state_of(module: nn.Module) -> tuple[tuple[int, int], ...]:
    """Changes when a parameter of the module is replaced or written to (but not through `.data`)."""
    return tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in module.parameters())
