"""Which rows of which parameters a head's logits are proportional to: to scale those of a head, and of no other.

No parameter name is known here. As in `projections.py` the tap tells, but of what is multiplied last before it,
whatever that reads (DeepSeek's queries and keys are behind a norm), and of biases: in a copy of the attention module
with random weights one parameter after the other holds zeros, ones, and each entry's index, and what arrives at the tap
says which row makes which feature. The copy with its rows scaled then verifies the finding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import UsageError
from theodolite.models.calls import Call, Calls
from theodolite.models.doors.taps import tapped
from theodolite.models.structure import Structure
from theodolite.models.training.adapters import refuse_replaced_weights
from theodolite.models.weights.head_weights import (
    AFFINE_TOLERANCE,
    NotAffine,
    copy_in_dtype,
    norms_inside,
    run_until_tap,
    stop_at_tap,
)

POSITIONS = 8
"""Tokens of the pass whose calls are looked at: rotations beyond that of position 0 are verified, too."""

CONTEXTS = 3
"""Random inputs that must agree on a row: what is no row may come back near a whole number for one of them."""

NEAR = 0.1
"""How far from a whole number a row may come back: families that rotate in float32 keep six digits."""


FIRST = 2
"""The number of the first row: behind a norm any marker comes back as what ones came back as, or as its opposite."""


@dataclass(frozen=True)
class LogitRows:
    """Rows of one parameter, and how each is scaled for a head's logits to become γ times as large.

    Attributes:
        module, name: the submodule, and the attribute that holds the parameter, looked up at every use.
        dimension: that of the rows: 1 in GPT-2's `Conv1D`, else 0; of so many dimensions, `ndim`.
        rows, heads: the rows, and the query head that each belongs to.
        powers: of γ: 1/2 where query and key are scaled both, 1 of a query whose key other heads have as well.
    """

    module: nn.Module
    name: str
    dimension: int
    ndim: int
    rows: Int64[Tensor, " rows"]
    heads: Int64[Tensor, " rows"]
    powers: Float64[Tensor, " rows"]

    @property
    def is_there(self) -> bool:
        """Whether the module still has a parameter with these rows."""
        parameter = self.module._parameters.get(self.name)
        if parameter is None or parameter.ndim != self.ndim:
            return False
        return parameter.shape[self.dimension] > int(self.rows.max())

    @torch.no_grad()
    def scale(self, gamma: Float64[Tensor, " heads"]) -> None:
        """Scale the rows in place; a factor of 1 leaves every bit. Of a sharded parameter nothing is gathered."""
        parameter: Tensor = getattr(self.module, self.name)
        factors = torch.ones(parameter.shape[self.dimension], dtype=torch.float64)
        factors[self.rows] = gamma[self.heads] ** self.powers
        shape = [1] * parameter.ndim
        shape[self.dimension] = -1
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        factors = factors.view(shape).to(parameter.device, dtype)
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            factors = DTensor.from_local(factors, mesh, [Replicate()] * mesh.ndim, run_check=False)
        parameter.mul_(factors)


def find_logit_rows(
    model: nn.Module, structure: Structure, calls: Calls, layers: list[int]
) -> dict[int, list[LogitRows]]:
    """Find them for some layers; `calls` is what `capture_calls` gave for `POSITIONS` tokens. Without gradients.

    Raises:
        UsageError: some layer's logits are no query times key, or scaling no rows scales those of one head alone.
    """
    refuse_replaced_weights(model, "clipped")
    with tapped(model, stop_at_tap):
        return {layer: _find(structure, layer, calls[layer]) for layer in layers}


def _find(structure: Structure, layer: int, call: Call) -> list[LogitRows]:
    attention, where = structure.attention_at(layer), f"layer {layer}: {structure.names[layer]}"
    if any(p.is_meta for p in attention.parameters()):
        raise UsageError(f"{where}: its weights are offloaded; move the model to one device")
    # A copy, for the weights of the module itself may be spread over ranks.
    marked = _MarkedCopy(copy_in_dtype(attention, torch.float64).eval(), call)
    try:
        _refuse_other_logits(where, marked.send())
        rows = _scaled_rows(marked)
        found = rows is not None and _verified(marked, rows)
    except NotAffine as error:
        raise UsageError(f"{where}: QK-Clip cannot find its query and key weights: {error}") from error
    if rows is None or not found:
        norms = ", ".join(name for name, _ in norms_inside(attention))
        why = f" (it has norms inside: {norms})" if norms else ""
        raise UsageError(
            f"{where}: scaling rows of its weights does not scale the logits of a head alone{why}: queries that are "
            "normalised or clamped after their projection, or shared among heads, cannot be clipped by their weights"
        )
    name_of = {id(submodule): name for name, submodule in marked.module.named_modules()}
    return [replace(row, module=attention.get_submodule(name_of[id(row.module)])) for row in rows]


def _refuse_other_logits(where: str, inputs: AttentionInputs) -> None:
    """Raise `UsageError` where logits are no query times key alone."""
    if inputs.softcap is not None:
        raise UsageError(f"{where} caps its logits at {inputs.softcap:g}, which bounds them without QK-Clip")
    if inputs.bias is not None:
        raise UsageError(
            f"{where} adds a bias (ALiBi, relative positions) to its logits, which scaling queries and keys does not "
            "bound: QK-Clip is not defined for it"
        )


@dataclass(frozen=True)
class _Place:
    """The row of one parameter that makes each feature of queries, keys or values; −1 where none of its rows does."""

    name: str
    dimension: int
    is_matrix: bool
    rows: Int64[Tensor, "heads width"]

    @property
    def entries(self) -> list[tuple[str, int]]:
        """What tells rows apart, of the features that have one."""
        return [(self.name, row) for row in self.rows.flatten().tolist() if row >= 0]


class _MarkedCopy:
    """A copy of an attention module with random weights, and what arrives at its tap for random inputs."""

    def __init__(self, module: nn.Module, call: Call) -> None:
        self.module = module
        self._call = call
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        for parameter in module.parameters():
            parameter.data.copy_(random(*parameter.shape))
        self._hidden = random(CONTEXTS, *call.hidden.shape[1:]).to(next(module.parameters()).device)

    def send(self) -> AttentionInputs:
        """What arrives at the tap."""
        return run_until_tap(self.module, self._call, self._hidden)

    def places(self, name: str) -> Iterator[tuple[int, _Place]]:
        """Of the sides (queries 0, keys 1, values 2) whose features one parameter's rows make, those rows."""
        parameter = self.module.get_parameter(name)
        before = parameter.data.clone()
        try:
            nothing = self._holding(parameter, torch.zeros(()))
            ones = [
                now - zero
                for now, zero in zip(self._holding(parameter, torch.ones(())), nothing, strict=True)
            ]
            for dimension in range(parameter.ndim if any(one.any() for one in ones) else 0):
                shape = [1] * parameter.ndim
                shape[dimension] = -1
                marker = FIRST + torch.arange(parameter.shape[dimension]).view(shape)
                counted = self._holding(parameter, marker)
                for side, (now, zero, one) in enumerate(zip(counted, nothing, ones, strict=True)):
                    rows = _picked(now - zero, one, parameter.shape[dimension])
                    if rows is not None:
                        yield side, _Place(name, dimension, parameter.ndim == 2, rows)
        finally:
            parameter.data.copy_(before)

    def _holding(self, parameter: nn.Parameter, marker: Tensor) -> list[Tensor]:
        """Queries, keys and values at position 0, each (contexts, heads, width), while the parameter is a marker."""
        parameter.data.copy_(marker.to(parameter).expand_as(parameter))
        inputs = self.send()
        return [tensor[:, :, 0].double().cpu() for tensor in (inputs.query, inputs.key, inputs.value)]


def _picked(
    counted: Float64[Tensor, "contexts heads width"], ones: Float64[Tensor, "contexts heads width"], size: int
) -> Int64[Tensor, "heads width"] | None:
    """The rows, counted from 0, where all features that the parameter changes are one row's each; else None."""
    changed = ones != 0
    if not changed.any() or not torch.equal(changed.any(dim=0), changed.all(dim=0)):
        return None
    numbers = torch.where(changed, counted / torch.where(changed, ones, 1), 0)
    rows = numbers.round()
    if not torch.equal(rows[:1].expand_as(rows), rows) or not bool(((numbers - rows).abs() <= NEAR).all()):
        return None
    rows = rows[0].long() - FIRST
    within = (rows >= 0) & (rows < size)
    return rows if torch.equal(within, changed[0]) else None


def _scaled_rows(marked: _MarkedCopy) -> list[LogitRows] | None:
    """The rows to be scaled, or None where those of a head's queries are not its own."""
    sides: list[list[_Place]] = [[], [], []]
    for name, parameter in marked.module.named_parameters():
        if parameter.ndim in (1, 2):
            for side, place in marked.places(name):
                sides[side].append(place)
    uses = Counter(entry for places in sides for place in places for entry in place.entries)
    queries, keys, _ = sides
    if not any(place.is_matrix for place in queries):
        return None
    if any(uses[entry] > 1 for place in queries for entry in place.entries):
        return None
    own = _own(keys, uses, queries[0].rows.shape)
    powers = torch.where(own, 0.5, 1.0).double()
    found = [_rows_of(marked.module, place, place.rows >= 0, powers) for place in queries]
    if own.any():
        found += [_rows_of(marked.module, place, (place.rows >= 0) & own, powers) for place in keys]
    return [rows for rows in found if len(rows.rows)]


def _own(keys: list[_Place], uses: Counter[tuple[str, int]], shape: torch.Size) -> Tensor:
    """Which features of each query head meet a key that is this head's alone, by rows that make nothing else."""
    own = torch.zeros(shape, dtype=torch.bool)
    if not keys or keys[0].rows.shape != shape:
        return own
    matrices = sum((place.rows >= 0).long() for place in keys if place.is_matrix)
    own = torch.as_tensor(matrices == 1)
    for place in keys:
        shared = [row >= 0 and uses[place.name, row] > 1 for row in place.rows.flatten().tolist()]
        own = own & ~torch.tensor(shared).view(shape)
    return own


def _rows_of(module: nn.Module, place: _Place, chosen: Tensor, powers: Tensor) -> LogitRows:
    owner, _, name = place.name.rpartition(".")
    heads = torch.arange(len(chosen))[:, None].expand_as(chosen)
    submodule = module.get_submodule(owner)
    ndim = getattr(submodule, name).ndim
    return LogitRows(
        submodule, name, place.dimension, ndim, place.rows[chosen], heads[chosen], powers[chosen]
    )


def _verified(marked: _MarkedCopy, rows: list[LogitRows]) -> bool:
    """Whether scaling the copy's rows makes each head's logits γ times as large, and changes no value."""
    before = marked.send()
    gamma = torch.linspace(0.3, 0.9, before.query.shape[1], dtype=torch.float64)
    for row in rows:
        row.scale(gamma)
    after = marked.send()
    expected = _products(before) * gamma.view(1, -1, 1, 1).to(before.query.device)
    return _near(_products(after), expected) and _near(after.value, before.value)


def _products(inputs: AttentionInputs) -> Float[Tensor, "contexts heads queries keys"]:
    key = inputs.key.repeat_interleave(inputs.query.shape[1] // inputs.key.shape[1], dim=1)
    return inputs.query.double() @ key.double().transpose(-1, -2)


def _near(tensor: Tensor, expected: Tensor) -> bool:
    tolerance = AFFINE_TOLERANCE * float(expected.abs().max())
    return bool((tensor - expected).abs().max() <= tolerance)
