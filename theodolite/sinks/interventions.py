"""Causal interventions on a live model: ablate a tag, knock out a sink, drop the low-rank part of W_Q, W_K, W_V.

Each is a context manager. While it is open the model is changed, whoever calls it: the model itself, `generate`, a
survey. On leaving, also by an exception, every bit of it is as before. They nest, with each other and with anything
that reads the model, and may be left in any order. The changes themselves are in `models.doors` and
`models.weights`; what they do to the model is for the caller to measure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from theodolite.attention.inputs import AttentionInputs, mask_keys, restore_blind_queries
from theodolite.errors import UsageError
from theodolite.models import OpenModel
from theodolite.models.calls import capture_calls
from theodolite.models.doors.answers import Answer
from theodolite.models.doors.taps import intervened
from theodolite.models.guard import guarded
from theodolite.models.weights.weight_map import Projection, find_projections, replaced

Positions = int | Sequence[int] | Tensor
"""Positions from 0 on, the same in all contexts; or a bool tensor (contexts, positions), one context for all."""

Factors = Mapping[str, tuple[Float[Tensor, "features rank"], Float[Tensor, "rank width"]]]
"""For "q", "k", "v": left @ right is taken from the matrix as `nn.Linear` holds it, features head by head."""

LEAST_SHARE = 1e-6
"""A head that writes less than this of a direction writes none of it: what float32 weights are exact to."""


@dataclass(frozen=True)
class AblatedDirection:
    """The direction that a head no longer writes, as unit vectors of the residual stream in its row space of W_O.

    Attributes:
        direction: u / ‖u‖, u the part of the given direction in the row space: what each token has of it is taken.
        along: where it is taken along: `direction` itself, or that of the control.
        share: ‖u‖ / ‖direction given‖: how much of what was asked for the head can write at all.
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
    space of W_O, t W_O = û: o ← o − ((o W_O)·û) t, exact up to the rounding of the model's dtype. The control
    (`control`) takes as much from each token, (o W_O)·û, along another direction of the row space: v with
    t' W_O = v, ‖v‖ = 1, o ← o − ((o W_O)·û) t'. All this is before a norm of the attention's sum (Gemma 2).

    A tap opened inside gets what the head itself computes, all that comes after it the changed output.

    Args:
        model: an opened model.
        layer: layer of the head.
        head: query head.
        direction: a vector of the residual stream, of any norm but 0.
        queries: at these positions only; then whole contexts must be passed (`generate` with use_cache=False).
        control: take as much along a random direction instead, uniform in the row space, of this seed.

    Raises:
        UsageError: no such layer or head; a direction that is not finite, zero, not of the width of the stream, or
            outside of what the head writes; on calling the model: positions that the contexts do not have.
    """
    model.check_place(layer, head)
    with guarded(model.root):
        weights = model.output_weights(layer)[head]
        backwards = torch.linalg.pinv(weights)
        unit, share = _writable_part(direction, weights, backwards, f"head {head} of layer {layer}")
        if control is None:
            along = unit
        else:
            rank = int(torch.linalg.matrix_rank(weights))
            normal = torch.randn(rank, generator=torch.Generator().manual_seed(control), dtype=torch.float64)
            rows = torch.linalg.svd(weights, full_matrices=False).Vh[:rank]
            along = normal / torch.linalg.vector_norm(normal) @ rows
        component, step = weights @ unit, along @ backwards
        chosen = None if queries is None else _PositionFlags(queries, "query")

    def intervene(inputs: AttentionInputs, answer: Answer) -> Tensor:
        output = answer(inputs)
        head_output = output[:, :, head].to(torch.promote_types(output.dtype, torch.float32))
        taken = head_output @ component.to(head_output)
        if chosen is not None:
            if inputs.query.shape[2] != inputs.key.shape[2]:
                raise UsageError(
                    "queries at given positions need whole contexts; call generate with use_cache=False"
                )
            taken = taken * chosen.of(inputs.query.shape[0], inputs.query.shape[2]).to(taken)
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
    model: OpenModel,
    layer: int,
    head: int | None,
    positions: Positions,
    *,
    sink_column: bool = False,
) -> Iterator[None]:
    """Keep the queries of a head from attending to some keys, while open. Memory grows linearly with the keys.

    The keys' weights are exactly 0, the others' add up to 1. A query that sees no other key (position 0 sees itself
    only) keeps the output that it had. A tap opened inside gets the changed inputs, where the masked keys'
    logits are finite, but so low that `exp` gives 0.

    Positions count from the first token of a padded row. Keys to mask are given at once: of two of these nested in one
    head, a query that both together leave no key looks at those of the outer one.

    Args:
        model: an opened model.
        layer: layer of the head.
        head: query head, or None for all heads of the layer.
        positions: keys to mask; keys after the last one of a bool tensor are not masked.
        sink_column: mask the head's learned sink column (gpt-oss) as well; `positions` may then be empty.

    Raises:
        UsageError: no such layer or head, no positions; on calling the model: positions or contexts that it does not
            have, no sink column, or a sliding window's cache, which drops keys (`generate` with use_cache=False).
    """
    model.check_place(layer, 0 if head is None else head)
    heads = list(range(model.heads_of[layer])) if head is None else [head]
    with guarded(model.root):
        chosen = _PositionFlags(positions, "key", may_be_none=sink_column)

    def intervene(inputs: AttentionInputs, answer: Answer) -> Tensor:
        if sink_column and inputs.sink is None:
            raise UsageError(f"layer {layer} has no learned sink column to mask")
        masked = chosen.of(inputs.query.shape[0], inputs.key.shape[2]).to(inputs.key.device)
        output = answer(mask_keys(inputs, masked, heads, sink_column))
        return restore_blind_queries(inputs, masked, heads, output)

    attention = model.attention_alone(layer)
    name = described(
        "attention_knockout", layer=layer, head=head, positions=positions, sink_column=sink_column
    )
    masking = intervened(model.root, attention, intervene, of_inputs=True)
    with model.intervention(name, masking):
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
    product of given factors (of a model pruned to sparse + low-rank). Biases stay. The modules hold new parameters
    meanwhile: what is written to them is lost.

    Args:
        model: an opened model.
        layer: which layer.
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
        shares, replacements = {}, []
        for number, (name, projection) in enumerate(projections.items()):
            matrix = projection.matrix().double()
            if factors is None:
                assert rank is not None
                left, right = _leading_factors(matrix, rank, name)
            else:
                left, right = _checked_factors(factors[name], matrix, name)
            if control is not None:
                left, right = _random_like(left, right, len("qkv") * control + number)
            low_rank = left @ right
            shares[name] = float(low_rank.square().sum() / matrix.square().sum().clamp_min(1e-300))
            replacements.append((projection, None, matrix - low_rank))
        remaining = {name: matrix for name, (_, _, matrix) in zip(projections, replacements, strict=True)}
        name = described("without_low_rank", layer=layer, **remaining)
    with model.intervention(name, replaced(replacements)):
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
    if direction.shape != (width,):
        raise UsageError(
            f"the direction has the shape {tuple(direction.shape)}; this model's width is {width}"
        )
    if not torch.isfinite(direction).all() or not direction.any():
        raise UsageError("the direction must be finite and not zero")
    part = direction @ backwards @ weights
    norm = torch.linalg.vector_norm(part)
    share = float(norm / torch.linalg.vector_norm(direction))
    if not share >= LEAST_SHARE:
        raise UsageError(f"{name} writes nothing along the direction: there is nothing to take out")
    return part / norm, share


class _PositionFlags:
    """Positions as a bool tensor, checked against the contexts of each pass."""

    def __init__(self, positions: Positions, name: str, may_be_none: bool = False) -> None:
        self._name = name
        given = torch.as_tensor(positions).cpu()
        if given.dtype == torch.bool and given.ndim in (1, 2):
            self._flags = given if given.ndim == 2 else given.unsqueeze(0)
        elif given.numel() == 0 or (given.ndim <= 1 and not given.is_floating_point()):
            numbers = given.flatten().long()
            if (numbers < 0).any():
                raise UsageError(f"{name} position {int(numbers.min())} does not exist: they count from 0")
            self._flags = torch.zeros(1, int(numbers.max()) + 1 if len(numbers) else 1, dtype=torch.bool)
            self._flags[0, numbers] = True
        else:
            raise UsageError(
                f"{name} positions must be whole numbers or a bool tensor (contexts, positions), not "
                f"{given.dtype} of shape {tuple(given.shape)}"
            )
        if not may_be_none and not self._flags.any():
            raise UsageError(f"no {name} positions were given")

    def of(self, contexts: int, length: int) -> Bool[Tensor, "contexts_or_1 length"]:
        """Mark the chosen ones of the first `length` positions."""
        flags = self._flags
        if len(flags) not in (1, contexts):
            raise UsageError(
                f"{self._name} positions are given for {len(flags)} contexts, the pass has {contexts}"
            )
        if flags[:, length:].any():
            last = int(flags.any(dim=0).nonzero().max())
            raise UsageError(f"{self._name} position {last} does not exist: the pass has {length} tokens")
        return torch.nn.functional.pad(flags[:, :length], (0, max(0, length - flags.shape[1])))


def _projections(model: OpenModel, layer: int, names: tuple[str, ...]) -> dict[str, Projection]:
    if not names or len(set(names)) < len(names) or not set(names) <= set("qkv"):
        raise UsageError(f"{''.join(names)!r} is not of W_Q, W_K and W_V: use letters of 'qkv'")
    model.attention_alone(layer)
    with torch.no_grad():
        calls = capture_calls(model.root, model.structure, model.source.small_pass(1))
        (of_layer,) = find_projections(
            model.root, model.structure, calls, [layer], replacing=True, maps=model.weight_maps
        )
    projections = {"q": of_layer.query, "k": of_layer.key, "v": of_layer.value}
    wanted = {name: projection for name, projection in projections.items() if name in names and projection}
    if len(wanted) < len(names):
        raise UsageError(
            f"layer {layer}: the values of {model.structure.names[layer]} are not its input times one weight matrix"
        )
    return wanted


def _leading_factors(
    matrix: Float64[Tensor, "features width"], rank: int, name: str
) -> tuple[Tensor, Tensor]:
    """Factor the leading part of an SVD: the projection on its leading singular vectors on the shorter side."""
    if not 1 <= rank <= min(matrix.shape):
        raise UsageError(
            f"rank {rank} is not between 1 and {min(matrix.shape)}, the rank of W_{name.upper()}"
        )
    if matrix.shape[0] < matrix.shape[1]:
        vectors = torch.linalg.eigh(matrix @ matrix.T).eigenvectors[:, -rank:]
        return vectors, vectors.T @ matrix
    vectors = torch.linalg.eigh(matrix.T @ matrix).eigenvectors[:, -rank:]
    return matrix @ vectors, vectors.T


def _checked_factors(factors: tuple[Tensor, Tensor], matrix: Tensor, name: str) -> tuple[Tensor, Tensor]:
    left, right = (factor.detach().double().to(matrix.device) for factor in factors)
    if left.ndim != 2 or right.ndim != 2 or (left.shape[0], right.shape[1]) != matrix.shape:
        raise UsageError(
            f"factors of W_{name.upper()} have the shapes {tuple(left.shape)} and {tuple(right.shape)}; they must "
            f"multiply to {tuple(matrix.shape)}"
        )
    if left.shape[1] != right.shape[0] or not (torch.isfinite(left).all() and torch.isfinite(right).all()):
        raise UsageError(f"factors of W_{name.upper()} must share their rank and be finite")
    return left, right


def _random_like(left: Tensor, right: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Draw factors of a random matrix with the singular values of left @ right."""
    generator = torch.Generator().manual_seed(seed)

    def orthonormal(rows: int, columns: int) -> Tensor:
        normal = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(normal).Q.to(left.device)

    core = torch.linalg.qr(left).R @ torch.linalg.qr(right.T).R.T
    values = torch.linalg.svdvals(core)
    return orthonormal(len(left), len(values)) * values, orthonormal(right.shape[1], len(values)).T
