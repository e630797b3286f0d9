"""Find the attention modules and the blocks of a model in one forward pass; verify that what was tapped is its own.

No family is named here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from theodolite.attention.inputs import AttentionInputs, attend
from theodolite.errors import UsageError, WorkError
from theodolite.models.calls import Call
from theodolite.models.doors.pytorch import attention_not_followed
from theodolite.models.doors.taps import tap_functions_of, tapped
from theodolite.models.one_row import IN_ONE_ROW, Batch, batch_read
from theodolite.models.source import Source
from theodolite.models.stored.dequantised import holds_quantised_layers
from theodolite.models.structure import Layout, Run, Structure, first_output, first_tensor, removed_on_leaving
from theodolite.system.choices import wider_than

Event = tuple[str, nn.Module, Any]
"""What happens in a pass: a module is entered (with its arguments), attends (with its inputs), or is left (output)."""

ENTERED, ATTENDS, LEFT = "entered", "attends", "left"


@dataclass
class _BlockRun:
    """One run of a block: shapes of hidden states, and its attention module with its inputs."""

    block: nn.Module
    shape: tuple[int, ...]
    left: tuple[int, ...] = ()
    entered: tuple[int, ...] = ()
    attention: nn.Module | None = None
    inputs: AttentionInputs | None = None


OR_A_DOOR = "or give it a door: docs/modules.md#a-family"


def _events_of_a_pass(source: Source) -> tuple[list[Event], set[Batch | None]]:
    """Run the model once on a small input; return what happens, in order, and the batches that are read in one row."""
    events: list[Event] = []
    batches: set[Batch | None] = set()

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        events.append((ENTERED, module, (args, kwargs)))

    def record(module: nn.Module, inputs: AttentionInputs) -> Tensor:
        batches.add(batch_read())
        events.append((ATTENDS, module, inputs))
        return attend(inputs)

    def leave(module: nn.Module, _args: Any, output: Any) -> None:
        events.append((LEFT, module, output))

    hooks = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in source.root.modules()]
    hooks += [module.register_forward_hook(leave) for module in source.root.modules()]
    with removed_on_leaving(hooks), tapped(source.root, record), torch.no_grad():
        source.probe(source.sample(3))  # several tokens: their dimension is told from that of one context
    return events, batches


def find_structure(source: Source) -> Structure:
    """Find the modules that call the tap, and their blocks, in a small forward pass; `UsageError` if unsupported."""
    model, blocks, family = source.root, source.blocks, source.name
    before = set(model.modules())
    attention_not_followed()
    events, batches = _events_of_a_pass(source)
    if not before.issuperset(model.modules()):  # BigBird turns to full attention on the first short text
        events, batches = _events_of_a_pass(source)
    where, missed = attention_not_followed() or (None, None)
    calls = [(module, inputs) for what, module, inputs in events if what == ATTENDS]
    callers = {module for module, _ in calls}
    attention = {module for module, inputs in calls if source.attends(module, inputs)}
    if not callers and tap_functions_of(model):
        return find_structure(source)
    if callers and not attention:
        raise _no_such_attention(source, callers)
    if not attention and missed is not None and missed.weights:
        raise _not_followed(family, missed.operation)
    if not attention:
        between = f": {missed.operation} between its products is not followed" if missed is not None else ""
        raise UsageError(
            f"{family} computes no attention that could be read{between}; it goes neither through the attention "
            "interface of transformers nor through PyTorch's functions, and is no softmax between two products: write "
            f"it with softmax, {OR_A_DOOR}"
        )
    name_of = {module: name for name, module in model.named_modules()}
    members = _named_blocks(model, blocks) if blocks else _blocks_around(model, attention, name_of)
    of_blocks = {module for block in members for module in block.modules()}
    if missed is not None and missed.weights and where in of_blocks:
        raise _not_followed(family, missed.operation)
    layers = _layers_in_order(source, members, attention, events)
    inputs = [layer.inputs for layer in layers if layer.inputs is not None]
    contexts, _, positions, _ = inputs[0].query.shape
    streams = {shape for layer in layers for shape in (layer.shape, layer.left or layer.shape)}
    entered = {layer.entered for layer in layers if layer.inputs is not None}
    layouts = {Layout.of(shape, contexts, positions) for shape in streams}
    attention_layouts = {Layout.of(shape, contexts, positions) for shape in entered}
    layout, attention_layout = next(iter(layouts)), next(iter(attention_layouts))
    if any(batch is not None and batch[0] != contexts for batch in batches):
        raise UsageError(
            f"{family} attends to {contexts} of the contexts that it is given at once, its blocks read hidden states "
            f"of shapes {sorted(streams)}: {IN_ONE_ROW}"
        )
    one = len(streams) == len(attention_layouts) == 1 and all(len(shape) <= 3 for shape in entered)
    if not one or layout is None or attention_layout is None:
        raise UsageError(
            f"{family} has no one residual stream: its blocks read hidden states of shapes {sorted(streams)}, its "
            f"attention of {sorted(entered)}"
        )
    return Structure(
        attention=tuple(layer.attention for layer in layers),
        names=tuple(name_of[layer.attention or layer.block] for layer in layers),
        blocks=tuple(layer.block for layer in layers),
        heads_of=tuple(0 if layer.inputs is None else layer.inputs.query.shape[1] for layer in layers),
        head_width=max(of_layer.query.shape[-1] for of_layer in inputs),
        value_widths=tuple(0 if layer.inputs is None else layer.inputs.value.shape[-1] for layer in layers),
        width=math.prod(layers[0].shape) // (contexts * positions),
        attention_width=math.prod(next(iter(entered))) // (contexts * positions),
        layout=layout,
        attention_layout=attention_layout,
        cross=any(of_layer.key.shape[2] != of_layer.query.shape[2] for of_layer in inputs),
    )


def _no_such_attention(source: Source, callers: set[nn.Module]) -> UsageError:
    if isinstance(source.root, PreTrainedModel):
        return UsageError(
            f"{source.name} has no such attention (the default of an encoder-decoder is its decoder's self-attention): "
            "choose another with attention="
        )
    names = sorted({name.rpartition(".")[2] for name, of in source.root.named_modules() if of in callers})
    return UsageError(
        f"{source.name}: nothing that attends is called attention={source.attention!r}; its attention modules are "
        f"called {', '.join(names)}"
    )


def _not_followed(family: str, operation: str) -> UsageError:
    return UsageError(
        f"{family} does to the logits or weights of an attention what cannot be followed: {operation}; followed are "
        "numbers that multiply them, biases, masks, a cap by tanh and a softmax over keys: write it with these, "
        f"{OR_A_DOOR}"
    )


def _layers_in_order(
    source: Source, blocks: set[nn.Module], attention: set[nn.Module], events: list[Event]
) -> list[_BlockRun]:
    """List the blocks that run, in order, each time that they do; what attends outside of named ones is left out."""
    named = bool(source.blocks)
    layers: list[_BlockRun] = []
    running: list[nn.Module] = []
    output: Tensor | None = None  # of the block that ran last
    no_blocks = UsageError(
        f"{source.name} attends outside of blocks that are modules and run one after the other, so it has no residual "
        "stream that can be read"
    )
    for what, module, value in events:
        if what == ENTERED and module in blocks | attention:
            hidden = first_tensor(*value)
            if module in blocks:
                # A block may itself be what attends; but a list of attention modules (XLM's) is none of blocks.
                if module in attention and output is not None and output is not hidden:
                    raise no_blocks
                running.append(module)
                layers.append(_BlockRun(module, tuple(hidden.shape)))
            if module in attention and layers and (running or not named):
                layers[-1].entered = tuple(hidden.shape)
        elif what == ATTENDS and module in attention and (running or not named):
            if not layers:
                raise no_blocks
            last = layers[-1]
            if last.inputs is not None and last.attention is module and last.inputs.query is value.query:
                continue  # the same attention to other values (DiffLlama)
            if last.attention is not None:
                raise _attends_twice(source, last, module)
            last.attention, last.inputs = module, value
        elif what == LEFT and module in blocks:
            if module in running:
                running.remove(module)
            if layers and layers[-1].block is module:
                output = first_output(value)
                layers[-1].left = tuple(output.shape)
    if named and not layers:
        raise no_blocks
    if all(layer.attention is None for layer in layers):
        raise UsageError(
            f"{source.name}: nothing attends in blocks={list(source.blocks or ())}: name those that hold the attention"
        )
    return layers


def _attends_twice(source: Source, layer: _BlockRun, module: nn.Module) -> UsageError:
    name_of = {of_model: name for name, of_model in source.root.named_modules()}
    first, second = name_of[layer.attention or module], name_of[module]
    line = (
        f"{source.name} has a block that attends twice ({first}, then {second}); theodolite needs one attention a "
        "block, with all of its heads"
    )
    if isinstance(source.root, PreTrainedModel) or first == second:
        return UsageError(line)
    place = first.rpartition(".")[2]
    return UsageError(f'{line}: say which, attention="{place}", or in which blocks, blocks=…')


def _named_blocks(model: nn.Module, names: Sequence[str]) -> set[nn.Module]:
    """Find the blocks by name, or those of the one list that is named."""
    try:
        named = [model.get_submodule(name) for name in names]
    except AttributeError as error:
        raise UsageError(f"{type(model).__name__} has no module for blocks={list(names)}: {error}") from error
    if len(named) == 1 and isinstance(named[0], LISTS):
        return set(named[0].children())
    return set(named)


def _blocks_around(
    model: nn.Module, attention: set[nn.Module], name_of: dict[nn.Module, str]
) -> set[nn.Module]:
    """Find the members of the lists that hold the attention modules; of no `ModuleList`, those like one that does."""
    around = {module: _list_around(model, name_of[module]) for module in attention}
    lists = sorted({name_of[pair[0]] for pair in around.values() if pair is not None})
    blocks: set[nn.Module] = set()
    for module, pair in around.items():
        if pair is None:
            say = f': say where they are, blocks="{lists[0] if lists else "transformer.h"}"'
            raise UsageError(
                f"{type(model).__name__}: attention module {name_of[module]} is not inside a list of blocks"
                + ("" if isinstance(model, PreTrainedModel) else say)
            )
        holding, block = pair
        alike = isinstance(holding, nn.ModuleList)
        blocks |= {member for member in holding.children() if alike or type(member) is type(block)}
    return blocks


LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def _list_around(model: nn.Module, name: str) -> tuple[nn.Module, nn.Module] | None:
    """Find the outermost `ModuleList` that holds the module of that name, and the member in which it is.

    The innermost one may be a block's list of sub-layers (T5). Without any, the innermost list of another kind.
    """
    parts = name.split(".")
    inside = [model.get_submodule(".".join(parts[:end])) for end in range(len(parts) + 1)]
    pairs = list(itertools.pairwise(inside))
    lists = [pair for pair in pairs if isinstance(pair[0], nn.ModuleList)]
    others = [pair for pair in pairs if isinstance(pair[0], LISTS)]
    return lists[0] if lists else others[-1] if others else None


VERIFIED_LENGTH = 16
"""Tokens of the sequence on which an opened model is verified."""


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

    With `skip_overflow` nothing is compared where the model's own outputs are NaN or infinite (a diverged training
    run): who measures it names the layer.
    """
    outputs = _attention_outputs(structure, run)
    with recorded_inputs(model, structure) as inputs:
        recomputed = _attention_outputs(structure, run)
    if skip_overflow and not all(torch.isfinite(output).all() for output in outputs):
        return inputs
    largest = [largest_logit(of_layer) for of_layer in inputs]
    # Where activations are rounded to eight bits, a last bit may round them the other way, by 1 % of the largest, and
    # large logits make more of it.
    of_quantisers = 2**-4 if holds_quantised_layers(model) else 0.0
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

    `largest` bounds the logits of this layer and of those before it, whose errors travel on; `least` is allowed anyway.
    """
    if not (torch.isfinite(output).all() and torch.isfinite(recomputed).all()):
        raise WorkError(
            f"{where}: its attention outputs hold NaN or infinite values: {wider_than(output.dtype)}"
        )
    scale = output.abs().max().clamp_min(1e-30)
    error = float((recomputed - output).abs().max() / scale)
    # Some families (BLOOM, Gemma 2) take their softmax in float32 whatever their dtype. A weight is off by the rounding
    # of its logit, which is as large as the logit is. Ten, one after another, are what random models of every family
    # stay below by a factor of five. Large logits excuse 1e-3 at most: what is wrong is off by more.
    eps = max(torch.finfo(output.dtype).eps, torch.finfo(torch.float32).eps)
    rounding = max(least, 100 * eps, min(10 * max(largest) * eps, 1e-3))
    # No rounding, in any dtype and at any depth, is half of the largest output: zeros are off by 1.
    if not error <= min(rounding * (1 + (len(largest) - 1) / 4), 0.5):
        raise WorkError(
            f"{where}: the attention output recomputed from its queries, keys and values differs from the model's "
            f"own by {error:.1e}; this family is not supported"
        )


def largest_logit(inputs: AttentionInputs) -> float:
    """Bound every logit by scaling ‖q‖ ‖k‖ of the longest query and key, which bounds its rounding, too."""
    norms = [torch.linalg.vector_norm(t, dim=-1, dtype=torch.float64) for t in (inputs.query, inputs.key)]
    return abs(inputs.scaling) * float(norms[0].max()) * float(norms[1].max())


def positions_of(source: Source, call: Call, bias: Tensor | None) -> str:
    """Tell how a model of `transformers` encodes positions: "rotary", "alibi", "relative bias", "learned" or "other".

    By a call of its attention, what is added to its logits and its names; of a module of one's own "unknown".
    """
    if not isinstance(source.root, PreTrainedModel):
        return "unknown"
    if call.kwargs.get("position_embeddings") is not None:
        return "rotary"
    if bias is not None:
        # ALiBi is one number a key (its differences are the slopes); other biases differ from query to query.
        return "alibi" if bias.shape[2] == 1 else "relative bias"
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
