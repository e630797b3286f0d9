"""Where a model keeps W_q, W_k and W_v of every head: which rows of which parameters make which features.

From this one map follow the head matrices (`head_weights.py`), LocAteR's gradient, the rows that QK-Clip scales
(`logit_rows.py`), and what interventions and pruning replace.

No parameter name is known here: the tap tells. In a copy of the attention module with random weights, one parameter
after another is zero, and then has each of its rows multiplied by a number of the row's own. What a feature of queries,
keys or values loses by the zero comes back multiplied by the number of the row that makes it, whatever the layout
(fused, interleaved, grouped, transposed, a tensor for each head). The map is searched for once in a model; in the other
layers of the same kind, what arrives at the tap for two random rows must be what it says.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn
from torch.nn.utils import parametrize

from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import UsageError
from theodolite.models.calls import Call, Calls
from theodolite.models.doors.taps import tapped
from theodolite.models.source import dtype_of
from theodolite.models.structure import Structure
from theodolite.models.training.adapters import (
    adapted_weight,
    adapter_places,
    check_adapter,
    is_adapter,
    refuse_quantised_weights,
    refuse_replaced_weights,
    without_adapters,
)
from theodolite.models.training.shards import Place
from theodolite.models.weights.copies import (
    AFFINE_TOLERANCE,
    NotAffine,
    as_sequences,
    copy_in_dtype,
    norms_at_tap,
    norms_inside,
    run_until_tap,
    stop_at_tap,
)
from theodolite.models.weights.function_norms import make_norms_modules

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
        of_input: whether a feature is the module's input times its row (an entry: plus its entry), times a constant
            factor; else the rows multiply something else, what leaves a norm, say.
        factor: this (YaRN's attention factor, say); None: 1.
    """

    name: str
    input_dim: int | None
    rows: Int64[Tensor, "heads head_width"]
    of_input: bool
    factor: Float64[Tensor, "heads head_width"] | None

    def of(self, tensor: Tensor) -> Tensor:
        """The rows, head by head, of a tensor of the parameter's shape: (features, …), a view where they adjoin."""
        if self.input_dim is None:
            by_row = tensor.flatten()
        else:
            by_row = tensor.movedim(self.input_dim, -1)
            by_row = by_row if by_row.ndim == 2 else by_row.flatten(0, -2)
        return _entries(by_row, self.span)

    @functools.cached_property
    def span(self) -> slice | Tensor:
        """The rows as a slice where they follow one another."""
        return _compact(self.rows.flatten())


@dataclass(frozen=True)
class WeightMap:
    """The rows that make queries, keys and values of one kind of attention module.

    Attributes:
        sides: of queries, keys and values.
        norms: names of the norms between these and the tap, which are left out.
    """

    sides: tuple[tuple[Rows, ...], tuple[Rows, ...], tuple[Rows, ...]]
    norms: tuple[str, ...] = ()

    def matrix(self, side: int) -> Rows | None:
        """The one matrix that the module's input is multiplied by to make a side (with biases), if that is so."""
        if not all(rows.of_input for rows in self.sides[side]):
            return None
        matrices = [rows for rows in self.sides[side] if rows.input_dim is not None]
        return matrices[0] if len(matrices) == 1 and bool((matrices[0].rows >= 0).all()) else None

    @property
    def is_complete(self) -> bool:
        """Whether queries, keys and values are the input times one matrix each."""
        return all(self.matrix(side) is not None for side in range(3))


@dataclass(frozen=True)
class Projection:
    """One of W_q, W_k and W_v of all heads, in its module.

    Attributes:
        module, name: the submodule, and the attribute that holds the matrix. It is looked up at every reading, since a
            model may be given new parameters.
        rows: which of its rows.
        adapter: PEFT's layer around the module, which adds to the matrix (LoRA), or None.
        computed: whether the matrix is no parameter, but computed from others (`torch.nn.utils.parametrizations`).
    """

    module: nn.Module
    name: str
    rows: Rows
    adapter: nn.Module | None
    computed: bool

    @classmethod
    def of(cls, rows: Rows, attention: nn.Module) -> Projection:
        """That of an attention module, or of a copy of it."""
        owner, _, name = rows.name.rpartition(".")
        module: Any = attention.get_submodule(owner)
        adapter = module if is_adapter(module) else None
        module = module if adapter is None else module.base_layer
        return cls(module, name, rows, adapter, name not in module._parameters)

    @property
    def heads(self) -> int:
        """How many heads it makes: fewer than queries have, where keys are grouped."""
        return len(self.rows.rows)

    @property
    def input_dim(self) -> int:
        """The dimension that is summed over."""
        assert self.rows.input_dim is not None
        return self.rows.input_dim

    @property
    def features(self) -> Int64[Tensor, " features"]:
        """The rows, head by head."""
        return self.rows.rows.flatten()

    def rows_of(self, heads: list[int] | None) -> Int64[Tensor, " features"]:
        """The rows of some heads; None: of all."""
        return self.features if heads is None else self.rows.rows[heads].flatten()

    def matrix(self, heads: list[int] | None = None) -> Float[Tensor, "features width"]:
        """A copy of the rows of all heads, or of some, as `nn.Linear` would hold them."""
        by_row = self.weight.detach().movedim(self.input_dim, -1)
        return by_row[torch.unravel_index(self.rows_of(heads).to(by_row.device), by_row.shape[:-1])]

    def put(self, heads: list[int] | None, matrix: Float[Tensor, "features width"], into: Tensor) -> None:
        """Write what `matrix` has into a tensor of the parameter's shape."""
        by_row = into.movedim(self.input_dim, -1)
        rows = torch.unravel_index(self.rows_of(heads).to(into.device), by_row.shape[:-1])
        by_row[rows] = matrix.to(into)

    @property
    def is_there(self) -> bool:
        """Whether the module still has the matrix as it had it."""
        if self.computed:
            return parametrize.is_parametrized(self.module, self.name)
        return self.name in self.module._parameters

    @property
    def weight(self) -> Tensor:
        """The matrix, as it is now."""
        return getattr(self.module, self.name)

    @property
    def is_view(self) -> bool:
        """Whether W is a view of a parameter: its entries as they are, features that follow one another."""
        plain = self.adapter is None and not self.computed and self.weight.ndim == 2
        return plain and self.rows.factor is None and isinstance(self.rows.span, slice)

    @property
    def effective(self) -> Tensor:
        """The matrix with what an adapter adds to it, differentiable."""
        return self.weight if self.adapter is None else adapted_weight(self.adapter, self.weight)

    @property
    def places(self) -> list[Place]:
        """Of the parameters that W is made of."""
        if self.computed:
            parametrizations: Any = self.module.parametrizations
            parts = parametrizations[self.name].modules()
            return [(part, name) for part in parts for name, p in part._parameters.items() if p is not None]
        added = [] if self.adapter is None else adapter_places(self.adapter)
        return [(self.module, self.name), *added]

    def view_of(self, matrix: Tensor) -> Float[Tensor, "heads width head_width"]:
        """What lies in another tensor where W does: in the gradient, say."""
        return self.by_head(self.rows.of(matrix))

    def by_head(self, rows: Float[Tensor, "features width"]) -> Float[Tensor, "heads width head_width"]:
        """W of every head, from its rows."""
        weights = rows.unflatten(0, self.rows.rows.shape).mT
        if self.rows.factor is None:
            return weights
        dtype = torch.promote_types(rows.dtype, torch.float32)
        return weights * self.rows.factor.unsqueeze(1).to(rows.device, dtype)


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
        """W_q and W_k as differentiable views (or copies) of the parameters, in their dtype.

        The same numbers as `HeadWeights.w_q` and `.w_k`, but grouped keys are not repeated.
        """
        query, key = self.query, self.key
        fused = (query.module, query.name) == (key.module, key.name)
        if not fused or query.rows.input_dim != key.rows.input_dim:
            return query.view_of(query.effective), key.view_of(key.effective)
        # One reading, so that the backward pass fills one gradient of the fused matrix and not two.
        both = self._joint_rows.of(query.effective)
        w_q, w_k = both.split([query.features.numel(), key.features.numel()])
        return query.by_head(w_q), key.by_head(w_k)

    @functools.cached_property
    def _joint_rows(self) -> Rows:
        return replace(self.query.rows, rows=torch.cat([self.query.features, self.key.features]))

    @property
    def places(self) -> list[Place]:
        """Of the parameters that W_q and W_k are made of."""
        return list(dict.fromkeys([*self.query.places, *self.key.places]))


Purpose = Literal["penalty", "replacement"]
"""What W_q and W_k are looked for: LocAteR needs them to give the logits, to replace them they need not."""

_PARTICIPLES = {"penalty": "penalised", "replacement": "replaced"}
_THEREFORE = {
    "penalty": "LocAteR is not defined for it; leave it out by layers=[…]",
    "replacement": "no part of them can be taken out",
}


class WeightMaps:
    """The weight maps of a model's layers: layers of one kind share one, which is searched for once.

    Args:
        computed: see through `torch.nn.utils.parametrizations`, to the matrix that they compute; else to what they
            compute it from.
    """

    def __init__(self, computed: bool = True) -> None:
        self._computed = computed
        self._known: dict[Any, list[WeightMap]] = {}
        self._useless: set[Any] = set()

    def first(
        self, attention: nn.Module, call: Call, use: Callable[[WeightMap], Result | None]
    ) -> Result | None:
        """What `use` makes of a map of such modules, or else of one searched for in this one; under `stop_at_tap`.

        `use` returns None for a map that does not serve it, or is not that of the module. Nothing is searched for in
        modules like one whose own map did not serve.

        Raises:
            NotAffine: the module takes no hidden states but the model's own.
        """
        kind = _kind(attention)
        for weight_map in self._known.get(kind, []):
            if (result := use(weight_map)) is not None:
                return result
        if kind in self._useless:
            return None
        self._useless.add(kind)
        self._known[kind] = _search(attention, call, self._computed)
        for weight_map in self._known[kind]:
            if (result := use(weight_map)) is not None:
                self._useless.remove(kind)
                return result
        return None


def find_projections(
    model: nn.Module,
    structure: Structure,
    calls: Calls,
    layers: list[int],
    purpose: Purpose = "penalty",
    maps: WeightMaps | None = None,
) -> list[Projections]:
    """Find W_q, W_k and W_v of some layers; `calls` is what `capture_calls` gave. Call it without gradients.

    For a replacement, they are found as well where queries and keys are normalised after the projection (Qwen 3,
    Gemma 3), where no matrix gives the logits. `maps` are those that are known.

    Raises:
        UsageError: some layer's queries or keys are not its input times entries of one matrix each: they are
            normalised after the projection, carry an adapter, or are quantised.
    """
    if purpose == "replacement":
        refuse_replaced_weights(model, _PARTICIPLES[purpose])
    refuse_quantised_weights(model, _PARTICIPLES[purpose])
    maps = maps or WeightMaps()
    with tapped(model, stop_at_tap, own_heads=True):
        return [_find(maps, structure, layer, calls[layer], purpose) for layer in layers]


def _find(maps: WeightMaps, structure: Structure, layer: int, call: Call, purpose: Purpose) -> Projections:
    attention = structure.attention_at(layer)
    if any(p.is_meta for p in attention.parameters()):
        raise UsageError(
            f"layer {layer}: the weights of {structure.names[layer]} are offloaded; move the model to one device"
        )

    def use(weight_map: WeightMap) -> Projections | None:
        if weight_map.norms and purpose == "penalty":
            return None
        matrices = [weight_map.matrix(side) for side in range(3)]
        query, key, value = (None if rows is None else Projection.of(rows, attention) for rows in matrices)
        if query is None or key is None or (purpose == "replacement" and (query.computed or key.computed)):
            return None
        for projection in (query, key):
            if projection.adapter is not None:
                owner = projection.rows.name.rpartition(".")[0]
                check_adapter(f"{structure.names[layer]}.{owner}", projection.adapter)
        sides, _ = mapped_sides(weight_map, attention, call, weight_map.norms)
        agree = [side is not None and side.agrees for side in sides]
        if not all(agree[:2]):
            return None
        return Projections(layer, query, key, value if agree[2] else None)

    try:
        projections = maps.first(attention, call, use)
    except NotAffine as error:
        raise UsageError(f"layer {layer}: {error}; leave it out by layers=[…]") from error
    if projections is None:
        norms = ", ".join(name for name, _ in norms_inside(attention))
        why = f" (it has norms inside: {norms})" if norms else ""
        raise UsageError(
            f"layer {layer}: the queries and keys of {structure.names[layer]} are not its input times one weight "
            f"matrix each{why}, so {_THEREFORE[purpose]}"
        )
    return projections


@dataclass(frozen=True)
class MappedSide:
    """Queries, keys or values of a module by its map, in float64, beside what arrived at the tap.

    Attributes:
        agrees: whether W is what the module multiplies two random rows by.
        agrees_in_all: and b what it gives for zeros.
    """

    weights: Float64[Tensor, "heads width head_width"]
    bias: Float64[Tensor, "heads head_width"]
    agrees: bool
    agrees_in_all: bool


def mapped_sides(
    weight_map: WeightMap, attention: nn.Module, call: Call, norms: Sequence[str]
) -> tuple[list[MappedSide | None], float]:
    """Queries, keys and values by a map, None where no one matrix makes them; and what scales the logits.

    They are read from a copy of the module in float32 or better, and without some norms, which is asked for three rows.

    Raises:
        NotAffine: the module takes no hidden states but the model's own.
    """
    module = copy_in_dtype(attention, torch.promote_types(dtype_of(attention), torch.float32)).eval()
    if norms:
        make_norms_modules(module, [norm for _, norm in norms_inside(module)])
    for name in norms:
        module.set_submodule(name, nn.Identity())
    rows = torch.randn(3, call.width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows[0] = 0
    inputs = run_until_tap(module, call, as_sequences(rows, module))
    answers = (inputs.query, inputs.key, inputs.value)
    sides = [_mapped(weight_map, side, module, rows, answer) for side, answer in enumerate(answers)]
    return sides, inputs.scaling


def _mapped(
    weight_map: WeightMap, side: int, module: nn.Module, rows: Tensor, answer: Tensor
) -> MappedSide | None:
    matrix = weight_map.matrix(side)
    if matrix is None or answer.shape[:2] != (len(rows), len(matrix.rows)):
        return None
    projection = Projection.of(matrix, module)
    rows_in_float64 = matrix.of(projection.effective.detach()).to(torch.float64, copy=True)
    weights = projection.by_head(rows_in_float64).contiguous()
    bias = weights.new_zeros(matrix.rows.shape)
    for of_bias in weight_map.sides[side]:
        if of_bias.input_dim is None:
            entries = Projection.of(of_bias, module).weight.detach().to(weights)
            made = torch.where(of_bias.rows >= 0, entries[of_bias.rows.clamp_min(0)], 0)
            bias += made if of_bias.factor is None else made * of_bias.factor.to(made)
    at_zero, answer = answer[0, :, 0].double(), answer[1:, :, 0].double()
    agrees = _near(answer - at_zero, torch.einsum("rd,hdw->rhw", rows[1:].to(weights), weights))
    return MappedSide(weights, bias, agrees, agrees and _near(at_zero, bias))


def _near(tensor: Tensor, expected: Tensor) -> bool:
    return bool((tensor - expected).abs().max() <= AFFINE_TOLERANCE * float(expected.abs().max()))


def _kind(attention: nn.Module) -> Any:
    """What layers have in common whose weights most likely lie alike."""
    modules = tuple((name, type(module)) for name, module in attention.named_modules())
    return modules, tuple((name, p.shape, p.dtype) for name, p in attention.named_parameters())


def _search(attention: nn.Module, call: Call, computed: bool) -> list[WeightMap]:
    """The map of a module; and where it is not complete, that without the norms between projections and tap."""
    marked = MarkedCopy(attention, call)
    without_adapters(marked.module)
    if computed:
        _make_computed_parameters(marked.module)
    marked.fill()
    weight_map = marked.weight_map()
    if weight_map.is_complete:
        return [weight_map]
    make_norms_modules(marked.module, [norm for _, norm in norms_inside(marked.module)])
    try:
        marked.send()  # functions of norms are modules from here on
        norms = norms_at_tap(marked.module, call)
        for name in norms:
            marked.module.set_submodule(name, nn.Identity())
        return [weight_map, replace(marked.weight_map(), norms=tuple(norms))] if norms else [weight_map]
    except NotAffine:
        return [weight_map]


def _make_computed_parameters(module: nn.Module) -> None:
    """In a copy, let what parametrisations compute be a parameter."""
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
        """What arrives at the tap."""
        return run_until_tap(self.module, self._call, self._hidden)

    def weight_map(self) -> WeightMap:
        """Which rows make which features."""
        sides: tuple[list[Rows], ...] = ([], [], [])
        answers = self._answers()
        for name, parameter in self.module.named_parameters():
            if parameter.ndim in (1, 2, 3):
                for side, rows in self._rows(name, parameter, answers):
                    sides[side].append(rows)
        queries, keys, values = (tuple(side) for side in sides)
        return WeightMap((queries, keys, values))

    def _answers(self) -> list[Float64[Tensor, "contexts heads head_width"]]:
        """Queries, keys and values at position 0."""
        inputs = self.send()
        return [tensor[:, :, 0].double().cpu() for tensor in (inputs.query, inputs.key, inputs.value)]

    def _rows(self, name: str, parameter: nn.Parameter, answers: list[Tensor]) -> Iterator[tuple[int, Rows]]:
        """Of the sides (queries 0, keys 1, values 2) whose features one parameter's rows make, those rows."""
        zeros = self._times(parameter, torch.zeros(()))
        made = [answer - zero for answer, zero in zip(answers, zeros, strict=True)]
        if not any(part.any() for part in made):
            return
        for input_dim in range(parameter.ndim) if parameter.ndim > 1 else (None,):
            shape = [size if dim != input_dim else 1 for dim, size in enumerate(parameter.shape)]
            numbers = torch.arange(math.prod(shape)).view(shape)
            sides: list[Tensor | None] = [torch.zeros_like(part[0], dtype=torch.int64) for part in made]
            place = 1
            while place <= numbers.max() or place == 1:
                marked = self._times(parameter, FIRST + numbers // place % DIGITS)
                for side, rows in enumerate(sides):
                    digit = _digit(marked[side] - zeros[side], made[side])
                    sides[side] = None if rows is None or digit is None else rows + place * digit
                place *= DIGITS
            for side, rows in enumerate(sides):
                if rows is not None and int(rows.max()) < numbers.numel():
                    rows = torch.where((made[side] != 0)[0], rows, -1)
                    yield (
                        side,
                        self._with_factor(Rows(name, input_dim, rows, True, None), parameter, made[side]),
                    )

    def _times(self, parameter: nn.Parameter, marks: Tensor) -> list[Tensor]:
        """Queries, keys and values while the parameter is multiplied by something."""
        before = parameter.data
        parameter.data = before * marks.to(before)
        try:
            return self._answers()
        finally:
            parameter.data = before

    def _with_factor(self, rows: Rows, parameter: nn.Parameter, made: Tensor) -> Rows:
        """See whether the rows multiply the module's input, and what else multiplies them."""
        weight, hidden = parameter.data.cpu(), self._hidden[:, 0].cpu()
        if rows.input_dim is None:
            products = weight.expand(len(hidden), -1)
        elif weight.shape[rows.input_dim] == hidden.shape[1]:
            products = hidden @ weight.movedim(rows.input_dim, -1).flatten(0, -2).T
        else:
            return replace(rows, of_input=False)
        products = torch.where(rows.rows >= 0, products[:, rows.rows.clamp_min(0)], 1.0)
        made = torch.where(rows.rows >= 0, made, 1.0)
        factor = torch.linalg.vecdot(products, made, dim=0) / products.square().sum(0)
        if not _near(factor * products, made):
            return replace(rows, of_input=False)
        return rows if _near(factor, torch.ones_like(factor)) else replace(rows, factor=factor)


def _digit(
    marked: Float64[Tensor, "contexts heads head_width"], made: Float64[Tensor, "contexts heads head_width"]
) -> Int64[Tensor, "heads head_width"] | None:
    """A digit of the rows' numbers, where all features that the parameter makes come back as one row's; else None."""
    changed = made != 0
    if not changed.any() or not torch.equal(changed.any(dim=0), changed.all(dim=0)):
        return None
    numbers = torch.where(changed, marked / torch.where(changed, made, 1), FIRST)
    digits = numbers.round()
    if not torch.equal(digits[:1].expand_as(digits), digits) or not ((numbers - digits).abs() <= NEAR).all():
        return None
    found = digits[0].long() - FIRST
    return found if bool(((found >= 0) & (found < DIGITS)).all()) else None


def _compact(rows: Int64[Tensor, " features"]) -> slice | Tensor:
    first, count = int(rows[0]), len(rows)
    in_order = torch.equal(rows, torch.arange(first, first + count, device=rows.device))
    return slice(first, first + count) if in_order else rows


def _entries(by_row: Tensor, span: slice | Tensor) -> Tensor:
    """The rows that `span` names."""
    if not isinstance(span, slice):
        return by_row.index_select(0, span.to(by_row.device))
    if span == slice(0, len(by_row)):
        return by_row  # to narrow all of it would cost a copy of the gradient
    return by_row.narrow(0, span.start, span.stop - span.start)
