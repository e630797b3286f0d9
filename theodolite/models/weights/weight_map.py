"""Find W_q, W_k and W_v of every head in a model: which rows of which parameters make which features.

No parameter name is known here: in a copy of the attention module with random weights, one parameter after another is
zero, and then has each of its rows multiplied by a number of the row's own. What a feature at the tap loses by the zero
comes back multiplied by the number of the row that makes it, whatever the layout. In the other layers of the same kind,
what arrives at the tap for two random rows must be what the map says.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor, nn

from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import UsageError
from theodolite.models.calls import (
    AFFINE_TOLERANCE,
    Call,
    Calls,
    NotAffine,
    as_sequences,
    copy_in_dtype,
    run_until_tap,
    stop_at_tap,
)
from theodolite.models.doors.taps import tapped
from theodolite.models.source import dtype_of
from theodolite.models.structure import Structure
from theodolite.models.training import adapters
from theodolite.models.training.shards import ParameterPlace, is_dtensor
from theodolite.models.weights.norms import Norms, with_norms

Result = TypeVar("Result")

DIGITS = 1000
"""Rows are numbered in this base, a digit at a time: so that six digits suffice."""

FIRST = 2
"""The number of the first row: behind a norm any number comes back as 1, or as −1."""


@dataclass(frozen=True)
class Rows:
    """Rows of one parameter of an attention module, and the features of queries, keys or values that each makes.

    Attributes:
        input_dim: the parameter's dimension that is summed over, others make the rows; None: each entry is a row.
        rows: of each feature the row that makes it, −1 where none does.
        kind: what the rows multiply: the module's input; nothing, as a bias; or something computed on the way.
        factor: of features of the input, what else multiplies them (YaRN's attention factor, say); None: 1.
    """

    name: str
    input_dim: int | None
    rows: Int64[Tensor, "heads head_width"]
    kind: Literal["of input", "constant", "other"]
    factor: Float64[Tensor, "heads head_width"] | None = None

    @property
    def features(self) -> Int64[Tensor, " features"]:
        """The rows, head by head."""
        return self.rows.flatten()

    @functools.cached_property
    def span(self) -> slice | Tensor:
        """The same as a slice where they follow one another."""
        first, count = int(self.features[0]), len(self.features)
        in_order = bool((self.features.diff() == 1).all())
        return slice(first, first + count) if in_order else self.features

    def of(self, tensor: Tensor) -> Float[Tensor, "features width"]:
        """Take the rows, head by head, of a tensor of the parameter's shape; a view where that is possible."""
        assert self.input_dim is not None
        by_row = tensor.movedim(self.input_dim, -1).flatten(0, -2)
        if not isinstance(self.span, slice):
            return by_row.index_select(0, self.span.to(by_row.device))
        if self.span == slice(0, len(by_row)):
            return by_row  # to narrow all of it would cost a copy of the gradient
        return by_row[self.span]

    def by_head(self, rows: Float[Tensor, "features width"]) -> Float[Tensor, "heads width head_width"]:
        """Return W of every head, from its rows."""
        weights = rows.unflatten(0, self.rows.shape).mT
        if self.factor is None:
            return weights
        dtype = torch.promote_types(rows.dtype, torch.float32)
        return weights * self.factor.unsqueeze(1).to(rows.device, dtype)


@dataclass(frozen=True)
class WeightMap:
    """The rows that make queries, keys and values (`sides`) where norms of these numbers before the tap are out."""

    sides: tuple[tuple[Rows, ...], ...]
    norms: tuple[int, ...] = ()

    @property
    def matrices(self) -> list[Rows | None]:
        """For queries, keys and values: the one matrix that makes them of the input, up to biases, or None."""
        matrices: list[Rows | None] = []
        for side in self.sides:
            varying = [rows for rows in side if rows.kind != "constant"]
            alone = len(varying) == 1 and varying[0].kind == "of input" and bool((varying[0].rows >= 0).all())
            matrices.append(varying[0] if alone else None)
        return matrices


@dataclass(frozen=True)
class Projection:
    """One of W_q, W_k and W_v of all heads: the attribute `name` of `module`, looked up at every reading.

    `adapter` is PEFT's layer around the module, which adds to the matrix (LoRA), or None.
    """

    rows: Rows
    module: nn.Module
    name: str
    adapter: nn.Module | None

    @classmethod
    def of(cls, rows: Rows, attention: nn.Module) -> Projection:
        """Return the projection in an attention module, or in a copy of it."""
        owner, _, name = rows.name.rpartition(".")
        module: Any = attention.get_submodule(owner)
        adapter = module if adapters.is_adapter(module) else None
        module = module if adapter is None else module.base_layer
        return cls(rows, module, name, adapter)

    @property
    def weight(self) -> Tensor:
        """The matrix, as it is now."""
        return getattr(self.module, self.name)

    @property
    def effective(self) -> Tensor:
        """The matrix with what an adapter adds to it, differentiable."""
        return adapters.adapted_weight(self.adapter, self.weight)

    @property
    def is_view(self) -> bool:
        """True if W is a view of a parameter: its entries as they are, features that follow one another."""
        plain = self.adapter is None and self.rows.factor is None and self.weight.ndim == 2
        return plain and isinstance(self.rows.span, slice)

    @property
    def places(self) -> list[ParameterPlace]:
        """The places of the parameters that W is made of."""
        return [(self.module, self.name), *adapters.adapter_places(self.adapter)]

    def view_of(self, tensor: Tensor) -> Float[Tensor, "heads width head_width"]:
        """View the part of a tensor that is where W is in the matrix: in the gradient, say."""
        return self.rows.by_head(self.rows.of(tensor))

    def matrix(self) -> Float[Tensor, "features width"]:
        """Return the rows of all heads, as `nn.Linear` would hold them."""
        return self.rows.of(self.weight.detach())

    def put(self, matrix: Float[Tensor, "features width"], into: Tensor) -> None:
        """Write other rows into a tensor of the matrix's shape."""
        assert self.rows.input_dim is not None
        by_row = into.movedim(self.rows.input_dim, -1)
        by_row[torch.unravel_index(self.rows.features.to(into.device), by_row.shape[:-1])] = matrix.to(into)


@dataclass(frozen=True)
class Projections:
    """The projections of one layer; biases are left aside. `value` is None where W_v was not found."""

    layer: int
    query: Projection
    key: Projection
    value: Projection | None

    @property
    def by_name(self) -> dict[str, Projection]:
        """Those that there are, as "q", "k" and "v"."""
        named = {"q": self.query, "k": self.key, "v": self.value}
        return {name: projection for name, projection in named.items() if projection is not None}

    def factors(
        self,
    ) -> tuple[Float[Tensor, "heads width head_width"], Float[Tensor, "key_heads width head_width"]]:
        """Return W_q and W_k as differentiable views (or copies) of the parameters; grouped keys are not repeated."""
        query, key = self.query, self.key
        fused = (query.module, query.name) == (key.module, key.name)
        if not fused or query.rows.input_dim != key.rows.input_dim:
            return query.view_of(query.effective), key.view_of(key.effective)
        # One reading, so that the backward pass fills one gradient of the fused matrix and not two.
        both = self._joint_rows.of(query.effective)
        w_q, w_k = both.split([len(query.rows.features), len(key.rows.features)])
        return query.rows.by_head(w_q), key.rows.by_head(w_k)

    @functools.cached_property
    def _joint_rows(self) -> Rows:
        return replace(self.query.rows, rows=torch.cat([self.query.rows.features, self.key.rows.features]))

    @property
    def places(self) -> list[ParameterPlace]:
        """The places of the parameters that W_q and W_k are made of."""
        return list(dict.fromkeys([*self.query.places, *self.key.places]))


Replacement = tuple[Projection, Float[Tensor, "features width"]]
"""A projection, and the matrix that it is to be."""

# Of the process, as interventions at the tap are: what is replaced now, in order, and the model's own.
_replacements: list[Replacement] = []
_originals: dict[ParameterPlace, nn.Parameter] = {}


@contextmanager
def replaced(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Replace `Projection.matrix()` while open.

    The modules get new parameters, and on leaving the very ones that they had. Of several for the same entries the one
    opened last holds; they may be left in any order.
    """
    opened = list(replacements)
    places = {(projection.module, projection.name) for projection, _ in opened}
    _replacements.extend(opened)
    try:
        _write_replacements(places)
        yield
    finally:
        _replacements[:] = [each for each in _replacements if not any(each is own for own in opened)]
        _write_replacements(places)


def _write_replacements(places: set[ParameterPlace]) -> None:
    for module, name in places:
        original = _originals.pop((module, name), module._parameters[name])
        module._parameters[name] = original
        here = [(p, matrix) for p, matrix in _replacements if (p.module, p.name) == (module, name)]
        if here:
            assert original is not None
            weight = original.detach().clone()
            for projection, matrix in here:
                projection.put(matrix, into=weight)
            _originals[module, name] = original
            module._parameters[name] = nn.Parameter(weight, requires_grad=original.requires_grad)


def own_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """Return the parameter that a module has, or the one that it has again when nothing is `replaced` any more."""
    return _originals.get((module, name), parameter)


class WeightMaps:
    """The weight maps of a model's layers: those of one kind share one."""

    def __init__(self) -> None:
        self._known: dict[Any, list[WeightMap]] = {}
        self._useless: set[Any] = set()

    def first(
        self, attention: nn.Module, call: Call, use: Callable[[WeightMap], Result | None]
    ) -> Result | None:
        """Return what `use` makes of a map of such modules, or else of one searched in this one; under `stop_at_tap`.

        `use` returns None for a map that does not serve it. Nothing is searched for in modules like one whose own map
        did not.
        """
        modules = tuple((name, type(module)) for name, module in attention.named_modules())
        kind = modules, tuple((name, p.shape, p.dtype) for name, p in attention.named_parameters())
        for search in (False, True):
            if search and kind in self._useless:
                return None
            maps = self._known[kind] = _search(attention, call) if search else self._known.get(kind, [])
            for result in map(use, maps):
                if result is not None:
                    return result
        self._useless.add(kind)
        return None


def find_projections(
    model: nn.Module,
    structure: Structure,
    calls: Calls,
    layers: list[int],
    *,
    replacing: bool = False,
    maps: WeightMaps | None = None,
) -> list[Projections]:
    """Find W_q, W_k and W_v of some layers, without gradients; `calls` is what `capture_calls` gave.

    With `replacing`, also before a norm of queries and keys (Qwen 3, Gemma 3), where no matrix gives the logits.
    `UsageError` where some layer's queries or keys are not its input times entries of one matrix each.
    """
    if replacing:
        adapters.refuse_replaced_weights(model, "replaced")
    adapters.refuse_quantised_weights(model, "penalised")
    maps = maps or WeightMaps()
    with tapped(model, stop_at_tap, own_heads=True):
        return [_projections(maps, structure, layer, calls[layer], replacing) for layer in layers]


def _projections(
    maps: WeightMaps, structure: Structure, layer: int, call: Call, replacing: bool
) -> Projections:
    attention = structure.attention_at(layer)

    def use(weight_map: WeightMap) -> Projections | None:
        matrices = weight_map.matrices
        query, key, value = (None if rows is None else Projection.of(rows, attention) for rows in matrices)
        if query is None or key is None or (weight_map.norms and not replacing):
            return None
        for projection in (query, key):
            owner = projection.rows.name.rpartition(".")[0]
            adapters.check_adapter(f"{structure.names[layer]}.{owner}", projection.adapter)
        dtype = torch.promote_types(dtype_of(attention), torch.float32)
        mapped, _ = read_mapped(weight_map, attention, call, weight_map.norms, dtype)
        if mapped[0] is None or mapped[1] is None:
            return None
        return Projections(layer, query, key, None if mapped[2] is None else value)

    instead = "LocAteR is not defined for it; leave it out by layers=[…]"
    refusal = (
        f"its queries and keys are not its input times one weight matrix each{with_norms(attention)}, so "
        f"{'no part of them can be taken out' if replacing else instead}"
    )
    return _used(maps, structure, layer, call, use, refusal)


def _used(
    maps: WeightMaps,
    structure: Structure,
    layer: int,
    call: Call,
    use: Callable[[WeightMap], Result | None],
    refusal: str,
) -> Result:
    """Return what `use` makes of a layer's map; `UsageError` where there is none that serves it."""
    attention, where = structure.attention_at(layer), f"layer {layer}: {structure.names[layer]}"
    if any(p.is_meta for p in attention.parameters()):
        raise UsageError(f"{where}: its weights are offloaded; move the model to one device")
    try:
        result = maps.first(attention, call, use)
    except NotAffine as error:
        raise UsageError(f"{where}: {error}") from error
    if result is None:
        raise UsageError(f"{where}: {refusal}")
    return result


POSITIONS = 8
"""Tokens of the pass for `find_logit_rows`, so that rotations are verified, too."""


@dataclass(frozen=True)
class LogitRows:
    """Rows of one parameter, and how each is scaled for a head's logits to become γ times as large.

    `powers` are of γ: 1/2 where query and key are scaled both, 1 of a query whose key other heads have as well, 0 of a
    key that stays as it is.
    """

    module: nn.Module
    name: str
    rows: Rows
    powers: Float64[Tensor, "heads head_width"]

    @torch.no_grad()
    def scale(self, gamma: Float64[Tensor, " heads"]) -> None:
        """Scale the rows in place, those of a sharded parameter where they are; a factor of 1 leaves every bit."""
        parameter: Tensor = getattr(self.module, self.name)
        shape = [1 if dim == self.rows.input_dim else size for dim, size in enumerate(parameter.shape)]
        factors = torch.ones(math.prod(shape), dtype=torch.float64)
        made = self.rows.rows >= 0
        factors[self.rows.rows[made]] = (gamma[:, None] ** self.powers)[made]
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        factors = factors.view(shape).to(parameter.device, dtype)
        if is_dtensor(parameter):
            from torch.distributed.tensor import DTensor, Replicate

            mesh = parameter.device_mesh
            factors = DTensor.from_local(factors, mesh, [Replicate()] * mesh.ndim, run_check=False)
        parameter.mul_(factors)


def find_logit_rows(
    model: nn.Module, structure: Structure, calls: Calls, layers: list[int]
) -> dict[int, list[LogitRows]]:
    """Find the rows of some layers, without gradients; `UsageError` where none scales the logits of a head alone."""
    adapters.refuse_replaced_weights(model, "clipped")
    maps = WeightMaps()
    with tapped(model, stop_at_tap):
        return {layer: _logit_rows(maps, structure, layer, calls[layer]) for layer in layers}


def _logit_rows(maps: WeightMaps, structure: Structure, layer: int, call: Call) -> list[LogitRows]:
    attention = structure.attention_at(layer)

    def use(weight_map: WeightMap) -> list[LogitRows] | None:
        # In a copy, for the weights of the module itself may be spread over ranks.
        copied = MarkedCopy(attention, call)
        copied.fill()
        inputs = copied.send()
        capped = inputs.softcap is not None
        if capped or inputs.bias is not None:
            changes = "caps its logits" if capped else "adds a bias (ALiBi, say) to its logits"
            raise UsageError(
                f"layer {layer}: {structure.names[layer]} {changes}: QK-Clip is not defined for it"
            )
        if weight_map.norms or not _verified(copied, list(_scaled_rows(weight_map, copied.module))):
            return None
        return list(_scaled_rows(weight_map, attention))

    refusal = (
        f"scaling rows of its weights does not scale the logits of a head alone{with_norms(attention)}: queries that "
        "are normalised or clamped after their projection, or shared among heads, cannot be clipped by their weights"
    )
    return _used(maps, structure, layer, call, use, refusal)


def _scaled_rows(weight_map: WeightMap, module: nn.Module) -> Iterator[LogitRows]:
    """Yield the rows to scale in a module or a copy of it; none where those of a head's queries are not its own."""
    queries, keys, _ = weight_map.sides
    each = [rows for side in weight_map.sides for rows in side]
    uses = Counter((rows.name, rows.input_dim, row) for rows in each for row in rows.features.tolist())

    def shared(rows: Rows) -> Bool[Tensor, "heads head_width"]:
        """Mark the features whose row makes others, too."""
        several = [row >= 0 and uses[rows.name, rows.input_dim, row] > 1 for row in rows.features.tolist()]
        return torch.tensor(several).view_as(rows.rows)

    if any(shared(rows).any() for rows in queries) or all(rows.kind == "constant" for rows in queries):
        return
    # Of each query head the features that meet a key which is this head's alone, by rows that make nothing else.
    own = torch.zeros(queries[0].rows.shape, dtype=torch.bool)
    makers = [rows.rows >= 0 for rows in keys if rows.kind != "constant"]
    if makers and makers[0].shape == own.shape:
        own = torch.stack(makers).sum(0) == 1
        for rows in keys:
            own = own & ~shared(rows)
    of_queries, of_keys = (torch.where(own, 0.5, other).double() for other in (1.0, 0.0))
    scaled_keys = [(rows, of_keys) for rows in keys] if own.any() else []
    for rows, powers in [*((rows, of_queries) for rows in queries), *scaled_keys]:
        if powers[rows.rows >= 0].any():
            owner, _, name = rows.name.rpartition(".")
            yield LogitRows(module.get_submodule(owner), name, rows, powers)


def _verified(copied: MarkedCopy, rows: list[LogitRows]) -> bool:
    """Tell whether scaling the copy's rows makes each head's logits γ times as large, and changes no value."""

    def sent() -> AttentionInputs:
        return replace(copied.send(), mask=None, causal=False)

    before = sent()
    gamma = torch.linspace(0.3, 0.9, before.query.shape[1], dtype=torch.float64)
    for row in rows:
        row.scale(gamma)
    after = sent()
    expected = before.logits() * gamma.view(1, -1, 1, 1).to(before.query.device)
    return near(after.logits(), expected) and near(after.value, before.value)


WeightAndBias = tuple[Float64[Tensor, "heads width head_width"], Float64[Tensor, "heads head_width"] | None]
"""There is no bias where what is added to x W depends on more than the module."""


def read_mapped(
    weight_map: WeightMap, attention: nn.Module, call: Call, norms: Sequence[int], dtype: torch.dtype
) -> tuple[list[WeightAndBias | None], float]:
    """Read W and b of queries, keys and values by a map, from a copy without some norms; and what scales the logits.

    Each is verified: what arrives at the copy's tap for two random rows is these times W, plus what arrives for zeros,
    which is b. None where it is not so, or no one matrix makes them.
    """
    module = copy_in_dtype(attention, dtype).eval()
    if norms:
        Norms(module).leave_out(norms)
    rows = torch.randn(3, call.width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows[0] = 0
    inputs = run_until_tap(module, call, as_sequences(rows, module))
    others = run_until_tap(module, call.with_others_changed(), as_sequences(rows[:1], module))
    read: list[WeightAndBias | None] = []
    for matrix, side in zip(weight_map.matrices, ("query", "key", "value"), strict=True):
        answer = getattr(inputs, side)
        if matrix is None or answer.shape[:2] != (len(rows), len(matrix.rows)):
            read.append(None)
            continue
        of_rows = matrix.of(Projection.of(matrix, module).effective.detach()).double()
        weights = matrix.by_head(of_rows).clone(memory_format=torch.contiguous_format)
        bias, *products = answer[:, :, 0].double()
        expected = torch.einsum("rd,hdw->rhw", rows[1:].to(weights), weights)
        is_right = near(torch.stack(products) - bias, expected)
        is_own = torch.equal(getattr(others, side)[0, :, 0].double(), bias)
        read.append((weights, bias if is_own else None) if is_right else None)
    return read, inputs.scaling


def near(tensor: Tensor, expected: Tensor) -> bool:
    """Tell whether a tensor is another but for rounding."""
    return bool((tensor - expected).abs().max() <= AFFINE_TOLERANCE * float(expected.abs().max()))


def _search(attention: nn.Module, call: Call) -> list[WeightMap]:
    """Search the map of a module; and where it is not complete, that without the norms between projections and tap."""
    marked = MarkedCopy(attention, call)
    adapters.without_adapters(marked.module)
    marked.fill()
    weight_map = marked.weight_map()
    if None not in weight_map.matrices:
        return [weight_map]
    norms = Norms(marked.module)
    try:
        at_tap = norms.at_tap(call)
        norms.leave_out(at_tap)
        return [weight_map, replace(marked.weight_map(), norms=tuple(at_tap))] if at_tap else [weight_map]
    except NotAffine:
        return [weight_map]


class MarkedCopy:
    """A float64 copy of an attention module with random weights, and what arrives at its tap for random inputs."""

    def __init__(self, attention: nn.Module, call: Call) -> None:
        self.module = copy_in_dtype(attention, torch.float64).eval()
        self._call = call
        self._generator = torch.Generator().manual_seed(0)
        shape = torch.Size((3, *call.hidden.shape[1:]))  # three contexts, which must agree on a row
        self._hidden = self._random(shape, next(self.module.parameters()).device)

    def _random(self, shape: torch.Size, device: torch.device) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64).to(device)

    def fill(self) -> None:
        """Give the copy random weights."""
        for parameter in filter(torch.is_floating_point, self.module.parameters()):
            parameter.data = self._random(parameter.shape, parameter.device)

    def send(self) -> AttentionInputs:
        """Return what arrives at the tap."""
        return run_until_tap(self.module, self._call, self._hidden)

    def weight_map(self) -> WeightMap:
        """Find the rows that make each feature."""
        sides: tuple[list[Rows], ...] = ([], [], [])
        answers = self._times(next(self.module.parameters()), torch.ones(()))
        for name, parameter in self.module.named_parameters():
            if parameter.ndim in (1, 2, 3):
                for side, rows in self._rows(name, parameter, answers):
                    sides[side].append(rows)
        return WeightMap(tuple(map(tuple, sides)))

    def _times(self, parameter: nn.Parameter, marks: Tensor) -> list[Tensor]:
        """Compute queries, keys and values (contexts, heads, width) while a parameter is multiplied by `marks`."""
        before = parameter.data
        parameter.data = before * marks.to(before)
        inputs = self.send()
        parameter.data = before
        return [tensor[:, :, 0].double().cpu() for tensor in (inputs.query, inputs.key, inputs.value)]

    def _rows(self, name: str, parameter: nn.Parameter, answers: list[Tensor]) -> Iterator[tuple[int, Rows]]:
        """Yield the sides (queries 0, keys 1, values 2) whose features one parameter's rows make, with those rows."""
        zeros = self._times(parameter, torch.zeros(()))
        made = [answer - zero for answer, zero in zip(answers, zeros, strict=True)]
        if not any(part.any() for part in made):
            return
        for input_dim in range(parameter.ndim) if parameter.ndim > 1 else (None,):
            shape = [size if dim != input_dim else 1 for dim, size in enumerate(parameter.shape)]
            numbers = torch.arange(math.prod(shape)).view(shape)
            powers = [power for power in (1, DIGITS, DIGITS**2) if power < max(2, numbers.numel())]
            marked = [self._times(parameter, FIRST + numbers // power % DIGITS) for power in powers]
            for side in range(3):
                digits = [_digit(answer[side] - zeros[side], made[side]) for answer in marked]
                by_power = zip(powers, digits, strict=True)
                terms = [power * digit for power, digit in by_power if digit is not None]
                rows = torch.where((made[side] != 0)[0], sum(terms), -1)
                if len(terms) == len(powers) and int(rows.max()) < numbers.numel():
                    yield side, self._of_kind(name, input_dim, rows, parameter.data.cpu(), made[side])

    def _of_kind(self, name: str, input_dim: int | None, rows: Tensor, weight: Tensor, made: Tensor) -> Rows:
        """Select rows that make a part of the features, with what they multiply."""
        hidden = self._hidden[:, 0].cpu()
        if near(made, made[:1].expand_as(made)):
            return Rows(name, input_dim, rows, "constant")
        if input_dim is None or weight.shape[input_dim] != hidden.shape[1]:
            return Rows(name, input_dim, rows, "other")
        products = (hidden @ weight.movedim(input_dim, -1).flatten(0, -2).T)[:, rows.clamp_min(0)]
        factor = torch.linalg.vecdot(products, made, dim=0) / products.square().sum(0)
        if not near(factor * products, made):
            return Rows(name, input_dim, rows, "other")
        is_one = near(factor, torch.ones_like(factor))
        return Rows(name, input_dim, rows, "of input", None if is_one else factor)


def _digit(
    marked: Float64[Tensor, "contexts heads head_width"], made: Float64[Tensor, "contexts heads head_width"]
) -> Int64[Tensor, "heads head_width"] | None:
    """Return a digit of the rows' numbers, if all features that the parameter makes come back as one row's."""
    changed = made != 0
    if not changed.any() or not torch.equal(changed.any(dim=0), changed.all(dim=0)):
        return None
    numbers = torch.where(changed, marked / torch.where(changed, made, 1), FIRST)
    digits = numbers.round()
    # Nearly whole: families that rotate in float32 keep six digits.
    if not torch.equal(digits[:1].expand_as(digits), digits) or not ((numbers - digits).abs() <= 0.1).all():
        return None
    digit = digits[0].long() - FIRST
    return digit if bool(((digit >= 0) & (digit < DIGITS)).all()) else None
