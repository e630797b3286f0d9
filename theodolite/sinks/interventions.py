"""Causal interventions on a live model: ablate a tag, knock out a sink, drop the low-rank part of W_Q, W_K, W_V.

Each is a context manager. While it is open the model is changed, whoever calls it: the model itself, `generate`, a
survey. On leaving, also by an exception, every bit of it is as before. They nest, with each other and with anything
that reads the model, and may be left in any order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from theodolite.attention.inputs import AttentionInputs, mask_keys
from theodolite.errors import UsageError
from theodolite.models import OpenModel
from theodolite.models.calls import capture_calls
from theodolite.models.doors.answers import Answer
from theodolite.models.doors.taps import intervened
from theodolite.models.guard import guarded
from theodolite.models.weights.weight_map import Projection, find_projections, replaced
from theodolite.system.wording import head_name
from theodolite.theory.singular import by_gram_matrix

Positions = int | Sequence[int] | Tensor
"""Positions from 0 on, the same in all contexts; or a bool tensor (contexts, positions), one context for all."""

Factors = Mapping[str, tuple[Float[Tensor, "features rank"], Float[Tensor, "rank width"]]]
"""For "q", "k", "v": left @ right is taken from the matrix as `nn.Linear` holds it, features head by head."""


@dataclass(frozen=True)
class AblatedDirection:
    """The direction that a head no longer writes, as unit vectors of the residual stream in its row space of W_O.

    Attributes:
        direction: û, along the part of the given direction in the row space: what each token has of it is taken.
        along: where it is taken along: `direction` itself, or that of the control.
        share: of the given direction's length that this part has: how much of it the head can write at all.
    """

    direction: Float64[Tensor, " width"]
    along: Float64[Tensor, " width"]
    share: float


@contextmanager
def ablate_direction(
    model: OpenModel,
    layer: int,
    head: int,
    direction: Float[Tensor, " width"],
    *,
    queries: Positions | None = None,
    control: int | None = None,
) -> Iterator[AblatedDirection]:
    """Remove a direction from what a head writes into the residual stream, while open.

    With o the head's output, W_O its output weights and û the unit vector along the part of `direction` in the row
    space of W_O, t W_O = û: o ← o − ((o W_O)·û) t, exact up to the rounding of the model's dtype, before a norm of the
    attention's sum (Gemma 2). A tap opened inside gets what the head itself computes.

    Args:
        direction: a vector of the residual stream, of any norm but 0.
        queries: at these positions only; then whole contexts must be passed (`generate` with use_cache=False).
        control: take as much from each token along a random direction instead, uniform in the row space, of this seed.

    Raises:
        UsageError: no such layer or head; a direction that is not finite, zero, not of the width of the stream, or
            outside of what the head writes; on calling the model: positions that the contexts do not have.
    """
    model.check_place(layer, head)
    with guarded(model.root):
        weights = model.output_weights(layer)[head]
        backwards = torch.linalg.pinv(weights)
        unit, share = _writable_part(direction, weights, backwards, head_name(layer, head))
        along = unit
        if control is not None:
            rank = int(torch.linalg.matrix_rank(weights))
            normal = torch.randn(rank, generator=torch.Generator().manual_seed(control), dtype=torch.float64)
            rows = torch.linalg.svd(weights, full_matrices=False).Vh[:rank]
            along = normal / torch.linalg.vector_norm(normal) @ rows
        component, step = weights @ unit, along @ backwards
        chosen = None if queries is None else _flags(queries, "query")

    def intervene(inputs: AttentionInputs, answer: Answer) -> Tensor:
        output = answer(inputs)
        head_output = output[:, :, head].to(torch.promote_types(output.dtype, torch.float32))
        taken = head_output @ component.to(head_output)
        if chosen is not None:
            if inputs.query.shape[2] != inputs.key.shape[2]:
                raise UsageError(
                    "queries at given positions need whole contexts; call generate with use_cache=False"
                )
            taken = taken * _fitted(chosen, "query", len(taken), inputs.query.shape[2]).to(taken)
        output = output.clone()
        output[:, :, head] = (head_output - taken.unsqueeze(-1) * step.to(head_output)).to(output.dtype)
        return output

    name = described("ablate_direction", layer=layer, head=head, direction=unit, along=along, queries=queries)
    with model.intervention(name, intervened(model.root, model.attention_alone(layer), intervene)):
        yield AblatedDirection(unit, along, share)


@contextmanager
def head_knockout(model: OpenModel, layer: int, head: int) -> Iterator[None]:
    """Keep a head from writing anything into the residual stream, while open; biases behind it stay.

    Raises:
        UsageError: no such layer or head.
    """
    model.check_place(layer, head)

    def intervene(inputs: AttentionInputs, answer: Answer) -> Tensor:
        output = answer(inputs).clone()
        output[:, :, head] = 0
        return output

    name = described("head_knockout", layer=layer, head=head)
    with model.intervention(name, intervened(model.root, model.attention_alone(layer), intervene)):
        yield


@contextmanager
def attention_knockout(
    model: OpenModel, layer: int, head: int | None, positions: Positions, *, sink_column: bool = False
) -> Iterator[None]:
    """Keep the queries of a head from attending to some keys, while open.

    The keys' weights are exactly 0, the others' add up to 1. A query that sees no other key (position 0 sees itself
    only) keeps its weights, up to the rounding of logits; a learned sink column that is not masked it pays all. A tap
    opened inside gets the changed inputs. Positions count from the first token of a padded row. Give keys to mask at
    once: of two of these nested in one head, a query that both together leave no key looks at those that one masks.

    Args:
        head: query head, or None for all heads of the layer.
        positions: keys to mask; keys after the last one of a bool tensor are not masked.
        sink_column: mask the head's learned sink column (gpt-oss) as well; `positions` may then be empty.

    Raises:
        UsageError: no such layer or head, no positions; on calling the model: positions or contexts that it does not
            have, no sink column, or a sliding window's cache, which drops keys (`generate` with use_cache=False).
    """
    model.check_place(layer, 0 if head is None else head)
    attention = model.attention_alone(layer)
    heads = list(range(model.heads_of[layer])) if head is None else [head]
    config = getattr(attention, "config", None)  # Mistral's layers all have the window that it names
    window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
    with guarded(model.root):
        chosen = _flags(positions, "key", may_be_none=sink_column)

    def intervene(inputs: AttentionInputs, answer: Answer) -> Tensor:
        if sink_column and inputs.sink is None:
            raise UsageError(f"layer {layer} has no learned sink column to mask")
        contexts, queries, keys = inputs.query.shape[0], inputs.query.shape[2], inputs.key.shape[2]
        if window is not None and queries < keys and keys >= window:
            raise UsageError(
                f"the cache of this layer keeps the last {window} keys only, so that positions cannot be told any "
                "more; call generate with use_cache=False"
            )
        masked = _fitted(chosen, "key", contexts, keys).to(inputs.key.device)
        return answer(mask_keys(inputs, masked, heads, sink_column))

    place = {"layer": layer, "head": head, "positions": positions, "sink_column": sink_column}
    name = described("attention_knockout", **place)
    with model.intervention(name, intervened(model.root, attention, intervene)):
        yield


@contextmanager
def without_low_rank(
    model: OpenModel,
    layer: int,
    rank: int | None = None,
    *,
    factors: Factors | None = None,
    of: str = "qkv",
    control: int | None = None,
) -> Iterator[dict[str, float]]:
    """Take the low-rank part out of a layer's W_Q, W_K and W_V while open; yields the part's share of ‖W‖_F².

    The part is the leading one of a truncated SVD of W (all heads side by side, (d, heads · head_width)), or the
    product of given factors (of a model pruned to sparse + low-rank). Biases stay. What is written to the modules'
    parameters meanwhile is lost.

    Args:
        rank: of the part that is taken out; or else
        factors: the part itself, for each of "q", "k", "v" that is to lose it; `of` is not read then.
        of: which of the three.
        control: the seed of a random matrix with the same singular values that is taken out instead.

    Raises:
        UsageError: no such layer or matrix, a rank that the matrices do not have, factors of another shape, or
            a layer whose W_Q, W_K, W_V are not entries of one matrix each.
    """
    model.check_place(layer, 0)
    if (rank is None) == (factors is None):
        raise UsageError("give either a rank or factors")
    with guarded(model.root):
        projections = _projections(model, layer, tuple(of if factors is None else factors))
        shares, remaining = {}, {}
        for number, (name, projection) in enumerate(projections.items()):
            matrix = projection.matrix().double()
            if factors is None:
                assert rank is not None
                if not 1 <= rank <= min(matrix.shape):
                    most = min(matrix.shape)
                    raise UsageError(f"rank {rank} is not between 1 and {most}, the rank of W_{name.upper()}")
                _, directions = by_gram_matrix(matrix, rank)
                left, right = matrix @ directions, directions.T
            else:
                left, right = (factor.detach().to(matrix) for factor in factors[name])
            if control is not None:
                left, right = _random_like(left, right, len("qkv") * control + number)
            if (low_rank := left @ right).shape != matrix.shape:
                of_part, of_whole = tuple(low_rank.shape), tuple(matrix.shape)
                raise UsageError(f"factors of W_{name.upper()} multiply to {of_part}, not to {of_whole}")
            shares[name] = float(low_rank.square().sum() / matrix.square().sum().clamp_min(1e-300))
            remaining[name] = matrix - low_rank
        replacements = [(projection, remaining[name]) for name, projection in projections.items()]
    with model.intervention(described("without_low_rank", layer=layer, **remaining), replaced(replacements)):
        yield shares


def described(name: str, **arguments: object) -> str:
    """Describe an intervention for the provenance of what is measured meanwhile; tensors by their hash."""
    parts = []
    for key, value in arguments.items():
        if isinstance(value, Tensor):
            value = "sha256:" + hashlib.sha256(value.cpu().contiguous().numpy().tobytes()).hexdigest()[:16]
        parts.append(f"{key}={value}")
    return f"{name}({', '.join(parts)})"


def _writable_part(
    direction: Tensor, weights: Float64[Tensor, "value_width width"], backwards: Tensor, name: str
) -> tuple[Float64[Tensor, " width"], float]:
    """Find the unit vector along the part of `direction` that the head can write, and the share of that part."""
    width = weights.shape[1]
    direction = direction.detach().double().cpu()
    if direction.shape != (width,) or not torch.isfinite(direction).all() or not direction.any():
        raise UsageError(
            f"the direction has the shape {tuple(direction.shape)}: it must have the model's width {width}, be finite "
            "and not zero"
        )
    part = direction @ backwards @ weights
    norm = torch.linalg.vector_norm(part)
    share = float(norm / torch.linalg.vector_norm(direction))
    if not share >= 1e-6:  # what float32 weights are exact to
        raise UsageError(f"{name} writes nothing along the direction: there is nothing to take out")
    return part / norm, share


def _flags(positions: Positions, name: str, may_be_none: bool = False) -> Bool[Tensor, "rows length"]:
    """Mark positions as True: in one row for all contexts, or in a row for each."""
    given = torch.as_tensor(positions).cpu()
    if given.dtype != torch.bool and len(given := given.flatten()):
        if given.is_floating_point() or given.min() < 0:
            raise UsageError(
                f"{name} positions are {given.tolist()}: give whole numbers from 0 on, or a bool tensor"
            )
        given = torch.nn.functional.one_hot(given.long()).amax(dim=0).bool()
    if not may_be_none and not given.any():
        raise UsageError(f"no {name} positions were given")
    return torch.atleast_2d(given.bool())


def _fitted(
    flags: Bool[Tensor, "rows given"], name: str, contexts: int, length: int
) -> Bool[Tensor, "rows length"]:
    """Cut or lengthen marks to the positions of a pass."""
    if len(flags) not in (1, contexts):
        raise UsageError(f"{name} positions are given for {len(flags)} contexts, the pass has {contexts}")
    if flags[:, length:].any():
        last = int(flags.any(dim=0).nonzero().max())
        raise UsageError(f"{name} position {last} does not exist: the pass has {length} tokens")
    return torch.nn.functional.pad(flags, (0, length - flags.shape[1]))  # a negative width cuts


def _projections(model: OpenModel, layer: int, names: tuple[str, ...]) -> dict[str, Projection]:
    if not names or len(set(names)) < len(names) or not set(names) <= set("qkv"):
        raise UsageError(f"{''.join(names)!r} is not of W_Q, W_K and W_V: use letters of 'qkv'")
    model.attention_alone(layer)
    with torch.no_grad():
        calls = capture_calls(model.root, model.structure, model.source.small_pass(1))
        (of_layer,) = find_projections(
            model.root, model.structure, calls, [layer], replacing=True, maps=model.weight_maps
        )
    wanted = {name: projection for name, projection in of_layer.by_name.items() if name in names}
    if len(wanted) < len(names):
        module = model.structure.names[layer]
        raise UsageError(f"layer {layer}: the values of {module} are not its input times one weight matrix")
    return wanted


def _random_like(left: Tensor, right: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Draw factors of a random matrix with the singular values of left @ right."""
    generator = torch.Generator().manual_seed(seed)

    def orthonormal(rows: int, columns: int) -> Tensor:
        normal = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(normal).Q.to(left.device)

    core = torch.linalg.qr(left).R @ torch.linalg.qr(right.T).R.T
    values = torch.linalg.svdvals(core)
    return orthonormal(len(left), len(values)) * values, orthonormal(right.shape[1], len(values)).T
