"""Which rows of which parameters a head's logits are proportional to: to scale those of a head, and of no other.

The layer's weight map says which rows make which features. A copy of the module with its rows scaled verifies it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import UsageError
from theodolite.models.calls import Call, Calls, NotAffine, stop_at_tap
from theodolite.models.doors.taps import tapped
from theodolite.models.structure import Structure
from theodolite.models.training.adapters import refuse_replaced_weights
from theodolite.models.weights.norms import with_norms
from theodolite.models.weights.weight_map import MarkedCopy, Rows, WeightMap, WeightMaps, near

POSITIONS = 8
"""Tokens of the pass whose calls are looked at: rotations beyond that of position 0 are verified, too."""


@dataclass(frozen=True)
class LogitRows:
    """Rows of one parameter, and how each is scaled for a head's logits to become γ times as large.

    Attributes:
        module, name: the submodule, and the attribute that holds the parameter, looked up at every use.
        shape: of the parameter.
        rows: which rows make which features.
        powers: of γ: 1/2 where query and key are scaled both, 1 of a query whose key other heads have as well, 0 of
            a key that stays as it is.
    """

    module: nn.Module
    name: str
    shape: torch.Size
    rows: Rows
    powers: Float64[Tensor, "heads head_width"]

    @property
    def is_there(self) -> bool:
        """True if the module still has a parameter of this shape."""
        parameter = self.module._parameters.get(self.name)
        return parameter is not None and parameter.shape == self.shape

    @torch.no_grad()
    def scale(self, gamma: Float64[Tensor, " heads"]) -> None:
        """Scale the rows in place; a factor of 1 leaves every bit. Of a sharded parameter nothing is gathered."""
        parameter: Tensor = getattr(self.module, self.name)
        shape = [1 if dim == self.rows.input_dim else size for dim, size in enumerate(self.shape)]
        factors = torch.ones(math.prod(shape), dtype=torch.float64)
        made = self.rows.rows >= 0
        factors[self.rows.rows[made]] = (gamma[:, None] ** self.powers)[made]
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        factors = factors.view(shape).to(parameter.device, dtype)
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            factors = DTensor.from_local(factors, mesh, [Replicate()] * mesh.ndim, run_check=False)
        parameter.mul_(factors)


def find_logit_rows(
    model: nn.Module, structure: Structure, calls: Calls, layers: list[int]
) -> dict[int, list[LogitRows]]:
    """Find the rows of some layers, without gradients; `UsageError` where none scales the logits of a head alone."""
    refuse_replaced_weights(model, "clipped")
    maps = WeightMaps(computed=False)
    with tapped(model, stop_at_tap):
        return {layer: _find(maps, structure, layer, calls[layer]) for layer in layers}


def _find(maps: WeightMaps, structure: Structure, layer: int, call: Call) -> list[LogitRows]:
    attention, where = structure.attention_at(layer), f"layer {layer}: {structure.names[layer]}"
    if any(p.is_meta for p in attention.parameters()):
        raise UsageError(f"{where}: its weights are offloaded; move the model to one device")
    # A copy, for the weights of the module itself may be spread over ranks.
    copied = MarkedCopy(attention, call)

    def use(weight_map: WeightMap) -> list[LogitRows] | None:
        copied.fill()
        if weight_map.norms or not _verified(copied, list(_scaled_rows(weight_map, copied.module))):
            return None
        return list(_scaled_rows(weight_map, attention))

    try:
        _refuse_other_logits(where, copied.send())
        rows = maps.first(attention, call, use)
    except NotAffine as error:
        raise UsageError(f"{where}: QK-Clip cannot find its query and key weights: {error}") from error
    if rows is None:
        raise UsageError(
            f"{where}: scaling rows of its weights does not scale the logits of a head alone{with_norms(attention)}: "
            "queries that are normalised or clamped after their projection, or shared among heads, cannot be clipped "
            "by their weights"
        )
    return rows


def _refuse_other_logits(where: str, inputs: AttentionInputs) -> None:
    """Raise `UsageError` where logits are no query times key alone."""
    if inputs.softcap is not None:
        raise UsageError(f"{where} caps its logits at {inputs.softcap:g}, which bounds them without QK-Clip")
    if inputs.bias is not None:
        raise UsageError(
            f"{where} adds a bias (ALiBi, relative positions) to its logits, which scaling queries and keys does not "
            "bound: QK-Clip is not defined for it"
        )


def _scaled_rows(weight_map: WeightMap, module: nn.Module) -> Iterator[LogitRows]:
    """Yield the rows to scale in a module or a copy of it; none where those of a head's queries are not its own."""
    queries, keys, _ = weight_map.sides
    uses = Counter(
        (rows.name, rows.input_dim, row)
        for side in weight_map.sides
        for rows in side
        for row in rows.features.tolist()
    )
    if any(_shared(rows, uses).any() for rows in queries) or not _varying(queries):
        return
    # Of each query head the features that meet a key which is this head's alone, by rows that make nothing else.
    own = torch.zeros(queries[0].rows.shape, dtype=torch.bool)
    if _varying(keys) and keys[0].rows.shape == own.shape:
        own = torch.stack([rows.rows >= 0 for rows in _varying(keys)]).sum(0) == 1
        for rows in keys:
            own = own & ~_shared(rows, uses)
    of_queries, of_keys = (torch.where(own, 0.5, other).double() for other in (1.0, 0.0))
    scaled_keys = [(rows, of_keys) for rows in keys] if own.any() else []
    for rows, powers in [*((rows, of_queries) for rows in queries), *scaled_keys]:
        if powers[rows.rows >= 0].any():
            owner, _, name = rows.name.rpartition(".")
            holder = module.get_submodule(owner)
            yield LogitRows(holder, name, getattr(holder, name).shape, rows, powers)


def _varying(side: Sequence[Rows]) -> list[Rows]:
    """Select the rows that multiply something: no biases."""
    return [rows for rows in side if rows.kind != "constant"]


def _shared(rows: Rows, uses: Counter[tuple[str, int | None, int]]) -> Bool[Tensor, "heads head_width"]:
    """Mark the features whose row makes others, too."""
    shared = [row >= 0 and uses[rows.name, rows.input_dim, row] > 1 for row in rows.features.tolist()]
    return torch.tensor(shared).view_as(rows.rows)


def _verified(copied: MarkedCopy, rows: list[LogitRows]) -> bool:
    """Tell whether scaling the copy's rows makes each head's logits γ times as large, and changes no value."""
    before = copied.send()
    gamma = torch.linspace(0.3, 0.9, before.query.shape[1], dtype=torch.float64)
    for row in rows:
        row.scale(gamma)
    after = copied.send()
    expected = _products(before) * gamma.view(1, -1, 1, 1).to(before.query.device)
    return near(_products(after), expected) and near(after.value, before.value)


def _products(inputs: AttentionInputs) -> Float[Tensor, "contexts heads queries keys"]:
    key = inputs.key.repeat_interleave(inputs.query.shape[1] // inputs.key.shape[1], dim=1)
    return inputs.query.double() @ key.double().transpose(-1, -2)
