"""Find W_q, W_k and W_v of every head in a model: which rows of which parameters make which features.

From this one map follow the head matrices (`head_weights.py`), LocAteR's gradient, the rows that QK-Clip scales
(`logit_rows.py`), and what interventions and pruning replace. No parameter name is known here: in a copy of the
attention module with random weights, one parameter after another is zero, and then has each of its rows multiplied by a
number of the row's own. What a feature at the tap loses by the zero comes back multiplied by the number of the row that
makes it, whatever the layout. The map is searched for once in a model; in the other layers of the same kind, what
arrives at the tap for two random rows must be what it says.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn
from torch.nn.utils import parametrize

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
from theodolite.models.training.shards import ParameterPlace
from theodolite.models.weights.norms import Norms, with_norms

Result = TypeVar("Result")

CONTEXTS = 3
"""Random inputs that must agree on a row: what is no row may come back near a whole number for one of them."""

NEAR = 0.1
"""How far from a whole number a row may come back: families that rotate in float32 keep six digits."""

DIGITS = 1000
"""Rows are numbered in this base, a digit at a time: so that six digits suffice."""

FIRST = 2
"""The number of the first row: behind a norm any number comes back as 1, or as −1."""


@dataclass(frozen=True)
class Rows:
    """Rows of one parameter, and the features of queries, keys or values that each makes.

    Attributes:
        name: of the parameter in the attention module.
        input_dim: the parameter's dimension that is summed over, others make the rows; None: each entry is a row.
        rows: of each feature the row that makes it, −1 where none does.
        kind: what the rows multiply: the module's input; nothing, as a bias; or else something computed on the way,
            what leaves a norm, say.
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
    """The rows that make queries, keys and values of one kind of attention module.

    Attributes:
        sides: of queries, keys and values.
        norms: numbers of the norms between these and the tap, which are left out.
    """

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
    """One of W_q, W_k and W_v of all heads, in its module.

    Attributes:
        rows: which rows it is of a matrix.
        module, name: the submodule, and the attribute that holds the matrix, looked up at every reading.
        adapter: PEFT's layer around the module, which adds to the matrix (LoRA), or None.
        computed: whether the matrix is no parameter, but computed from others (`torch.nn.utils.parametrizations`).
    """

    rows: Rows
    module: nn.Module
    name: str
    adapter: nn.Module | None
    computed: bool

    @classmethod
    def of(cls, rows: Rows, attention: nn.Module) -> Projection:
        """Return the projection in an attention module, or in a copy of it."""
        owner, _, name = rows.name.rpartition(".")
        module: Any = attention.get_submodule(owner)
        adapter = module if adapters.is_adapter(module) else None
        module = module if adapter is None else module.base_layer
        return cls(rows, module, name, adapter, name not in module._parameters)

    @property
    def heads(self) -> int:
        """The number of heads that it makes: fewer than queries have, where keys are grouped."""
        return len(self.rows.rows)

    @property
    def is_there(self) -> bool:
        """True if the module still has the matrix as it had it."""
        if self.computed:
            return parametrize.is_parametrized(self.module, self.name)
        return self.name in self.module._parameters

    @property
    def weight(self) -> Tensor:
        """The matrix, as it is now."""
        return getattr(self.module, self.name)

    @property
    def effective(self) -> Tensor:
        """The matrix with what an adapter adds to it, differentiable."""
        return self.weight if self.adapter is None else adapters.adapted_weight(self.adapter, self.weight)

    @property
    def is_view(self) -> bool:
        """True if W is a view of a parameter: its entries as they are, features that follow one another."""
        plain = self.adapter is None and not self.computed and self.weight.ndim == 2
        return plain and self.rows.factor is None and isinstance(self.rows.span, slice)

    @property
    def places(self) -> list[ParameterPlace]:
        """The places of the parameters that W is made of."""
        if self.computed:
            parametrizations: Any = self.module.parametrizations
            parts = parametrizations[self.name].modules()
            return [(part, name) for part in parts for name, p in part._parameters.items() if p is not None]
        added = [] if self.adapter is None else adapters.adapter_places(self.adapter)
        return [(self.module, self.name), *added]

    def view_of(self, tensor: Tensor) -> Float[Tensor, "heads width head_width"]:
        """View the part of a tensor that is where W is in the matrix: in the gradient, say."""
        return self.rows.by_head(self.rows.of(tensor))

    def matrix(self, heads: list[int] | None = None) -> Float[Tensor, "features width"]:
        """Copy the rows of all heads, or of some, as `nn.Linear` would hold them."""
        by_row, rows = self._by_row(self.weight.detach(), heads)
        return by_row[rows]

    def put(self, heads: list[int] | None, matrix: Float[Tensor, "features width"], into: Tensor) -> None:
        """Write other rows of some heads into a tensor of the matrix's shape."""
        by_row, rows = self._by_row(into, heads)
        by_row[rows] = matrix.to(into)

    def _by_row(self, tensor: Tensor, heads: list[int] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        assert self.rows.input_dim is not None
        by_row = tensor.movedim(self.rows.input_dim, -1)
        rows = self.rows.features if heads is None else self.rows.rows[heads].flatten()
        return by_row, torch.unravel_index(rows.to(tensor.device), by_row.shape[:-1])


@dataclass(frozen=True)
class Projections:
    """The projections of one layer; biases are left aside. `value` is None where W_v was not found."""

    layer: int
    query: Projection
    key: Projection
    value: Projection | None = None

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


Replacement = tuple[Projection, list[int] | None, Tensor]
"""A matrix, and the heads of a projection whose it is to be."""

# Of the process, as interventions at the tap are: what is replaced now, in order, and the model's own.
_open_replacements: dict[object, list[Replacement]] = {}
_originals: dict[ParameterPlace, nn.Parameter] = {}


@contextmanager
def replaced(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Replace `Projection.matrix(heads)` while open, for each of the (projection, heads, matrix) given.

    The modules get new parameters, and on leaving the very ones that they had. Of several for the same entries the one
    opened last holds; they may be left in any order.
    """
    key = object()
    _open_replacements[key] = opened = list(replacements)
    places = {(projection.module, projection.name) for projection, _, _ in opened}
    try:
        for place in places:
            _write_replacements(place)
        yield
    finally:
        del _open_replacements[key]
        for place in places:
            _write_replacements(place)


def _write_replacements(place: ParameterPlace) -> None:
    module, name = place
    replacements = [
        replacement
        for opened in _open_replacements.values()
        for replacement in opened
        if (replacement[0].module, replacement[0].name) == place
    ]
    if not replacements:
        if place in _originals:
            module._parameters[name] = _originals.pop(place)
        return
    original = _originals.setdefault(place, getattr(module, name))
    weight = original.detach().clone()
    for projection, heads, matrix in replacements:
        projection.put(heads, matrix, into=weight)
    module._parameters[name] = nn.Parameter(weight, requires_grad=original.requires_grad)


def own_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter that a module has, or the one that it has again when nothing is `replaced` any more."""
    return _originals.get((module, name), parameter)


class WeightMaps:
    """The weight maps of a model's layers, seen through parametrisations if `computed`: those of one kind share one."""

    def __init__(self, computed: bool = True) -> None:
        self._computed = computed
        self._known: dict[Any, list[WeightMap]] = {}
        self._useless: set[Any] = set()

    def first(
        self, attention: nn.Module, call: Call, use: Callable[[WeightMap], Result | None]
    ) -> Result | None:
        """Return what `use` makes of a map of such modules, or else of one searched in this one; under `stop_at_tap`.

        `use` returns None for a map that does not serve it. Nothing is searched for in modules like one whose own map
        did not.
        """
        kind = _kind(attention)
        result = _first(use, self._known.get(kind, []))
        if result is None and kind not in self._useless:
            self._useless.add(kind)
            self._known[kind] = _search(attention, call, self._computed)
            result = _first(use, self._known[kind])
        if result is not None:
            self._useless.discard(kind)
        return result


def _first(use: Callable[[WeightMap], Result | None], maps: list[WeightMap]) -> Result | None:
    return next((result for weight_map in maps if (result := use(weight_map)) is not None), None)


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

    Args:
        replacing: look for matrices to be replaced: also before a norm of queries and keys (Qwen 3, Gemma 3), where no
            matrix gives the logits, but not for any that is computed from others.

    Raises:
        UsageError: some layer's queries or keys are not its input times entries of one matrix each.
    """
    if replacing:
        adapters.refuse_replaced_weights(model, "replaced")
    adapters.refuse_quantised_weights(model, "penalised")
    maps = maps or WeightMaps()
    with tapped(model, stop_at_tap, own_heads=True):
        return [_find(maps, structure, layer, calls[layer], replacing) for layer in layers]


def _find(maps: WeightMaps, structure: Structure, layer: int, call: Call, replacing: bool) -> Projections:
    attention = structure.attention_at(layer)
    if any(p.is_meta for p in attention.parameters()):
        raise UsageError(
            f"layer {layer}: the weights of {structure.names[layer]} are offloaded; move the model to one device"
        )

    def use(weight_map: WeightMap) -> Projections | None:
        matrices = weight_map.matrices
        query, key, value = (None if rows is None else Projection.of(rows, attention) for rows in matrices)
        if query is None or key is None or (weight_map.norms and not replacing):
            return None
        if replacing and (query.computed or key.computed):
            return None
        for projection in (query, key):
            if projection.adapter is not None:
                owner = projection.rows.name.rpartition(".")[0]
                adapters.check_adapter(f"{structure.names[layer]}.{owner}", projection.adapter)
        dtype = torch.promote_types(dtype_of(attention), torch.float32)
        mapped, _ = read_mapped(weight_map, attention, call, weight_map.norms, dtype)
        if mapped[0] is None or mapped[1] is None:
            return None
        return Projections(layer, query, key, None if mapped[2] is None else value)

    try:
        projections = maps.first(attention, call, use)
    except NotAffine as error:
        raise UsageError(f"layer {layer}: {error}; leave it out by layers=[…]") from error
    if projections is None:
        penalised = "LocAteR is not defined for it; leave it out by layers=[…]"
        raise UsageError(
            f"layer {layer}: the queries and keys of {structure.names[layer]} are not its input times one weight "
            f"matrix each{with_norms(attention)}, so {'no part of them can be taken out' if replacing else penalised}"
        )
    return projections


WeightAndBias = tuple[Float64[Tensor, "heads width head_width"], Float64[Tensor, "heads head_width"] | None]
"""W and b of queries, keys or values. There is no b where what is added to x W depends on more than the module."""


def read_mapped(
    weight_map: WeightMap, attention: nn.Module, call: Call, norms: Sequence[int], dtype: torch.dtype
) -> tuple[list[WeightAndBias | None], float]:
    """Read queries, keys and values by a map, from a copy in a dtype without some norms; and what scales the logits.

    Each is verified: what arrives at the copy's tap for two random rows must be these times W, plus what arrives for
    zeros, which is b. It is None where it is not so, or no one matrix makes them.
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


def _kind(attention: nn.Module) -> Any:
    """Return a key of the module's structure: layers of one key most likely store their weights alike."""
    modules = tuple((name, type(module)) for name, module in attention.named_modules())
    return modules, tuple((name, p.shape, p.dtype) for name, p in attention.named_parameters())


def _search(attention: nn.Module, call: Call, computed: bool) -> list[WeightMap]:
    """Search the map of a module; and where it is not complete, that without the norms between projections and tap."""
    marked = MarkedCopy(attention, call)
    adapters.without_adapters(marked.module)
    if computed:
        _make_computed_parameters(marked.module)
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


def _make_computed_parameters(module: nn.Module) -> None:
    """Make what parametrisations compute a parameter, in a copy."""
    for child in [child for child in module.modules() if parametrize.is_parametrized(child)]:
        computed = {name: getattr(child, name).detach() for name in child.parametrizations}  # type: ignore[union-attr]
        # `remove_parametrizations` would take the property from the class, which the original has as well.
        del child._modules["parametrizations"]
        child.__class__ = type(child).__mro__[1]
        for name, value in computed.items():
            child.register_parameter(name, nn.Parameter(value))


class MarkedCopy:
    """A float64 copy of an attention module with random weights, and what arrives at its tap for random inputs."""

    def __init__(self, attention: nn.Module, call: Call) -> None:
        self.module = copy_in_dtype(attention, torch.float64).eval()
        self._call = call
        self._generator = torch.Generator().manual_seed(0)
        hidden = self._random(CONTEXTS, *call.hidden.shape[1:])
        self._hidden = hidden.to(next(self.module.parameters()).device)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def fill(self) -> None:
        """Give the copy random weights."""
        for parameter in filter(torch.is_floating_point, self.module.parameters()):
            parameter.data = self._random(*parameter.shape).to(parameter.device)

    def send(self) -> AttentionInputs:
        """Return what arrives at the tap."""
        return run_until_tap(self.module, self._call, self._hidden)

    def weight_map(self) -> WeightMap:
        """Find the rows that make each feature."""
        sides: tuple[list[Rows], ...] = ([], [], [])
        answers = self._answers()
        for name, parameter in self.module.named_parameters():
            if parameter.ndim in (1, 2, 3):
                for side, rows in self._rows(name, parameter, answers):
                    sides[side].append(rows)
        return WeightMap(tuple(map(tuple, sides)))

    def _answers(self) -> list[Float64[Tensor, "contexts heads head_width"]]:
        inputs = self.send()
        return [tensor[:, :, 0].double().cpu() for tensor in (inputs.query, inputs.key, inputs.value)]

    def _times(self, parameter: nn.Parameter, marks: Tensor) -> list[Tensor]:
        """Compute queries, keys and values while a parameter is multiplied by `marks`."""
        before = parameter.data
        parameter.data = before * marks.to(before)
        try:
            return self._answers()
        finally:
            parameter.data = before

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
                terms = [
                    power * digit for power, digit in zip(powers, digits, strict=True) if digit is not None
                ]
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
    if not torch.equal(digits[:1].expand_as(digits), digits) or not ((numbers - digits).abs() <= NEAR).all():
        return None
    digit = digits[0].long() - FIRST
    return digit if bool(((digit >= 0) & (digit < DIGITS)).all()) else None
