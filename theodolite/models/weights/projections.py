"""Where a model keeps W_q, W_k and W_v of every head: to read them as views of its parameters, or to replace them.

No parameter name is known here. As in `head_weights.py`, the tap tells: with a copy of the attention module whose
matrices hold markers (ones, their own number, each entry's row, each entry's column) in place of weights, what
arrives at the tap for the input e_1 says which entries of which matrix were picked, whatever the layout (fused,
interleaved, grouped, transposed). A copy with random weights then verifies the finding. No weight is ever written
to: what is replaced is the parameter, and the old one is put back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from theodolite.errors import UsageError
from theodolite.models.calls import Call, Calls
from theodolite.models.doors.taps import tapped
from theodolite.models.source import dtype_of
from theodolite.models.structure import Structure
from theodolite.models.training.adapters import (
    adapted_weight,
    adapter_places,
    check_adapter,
    refuse_quantised_weights,
    refuse_replaced_weights,
    without_adapters,
)
from theodolite.models.training.shards import Place
from theodolite.models.weights.head_weights import (
    AFFINE_TOLERANCE,
    NotAffine,
    copy_in_dtype,
    norms_at_tap,
    norms_inside,
    run_until_tap,
    stop_at_tap,
)

Purpose = Literal["penalty", "replacement"]
"""What W_q and W_k are looked for: LocAteR needs them to give the logits, to replace them they need not."""

_PARTICIPLES = {"penalty": "penalised", "replacement": "replaced"}
_THEREFORE = {
    "penalty": "LocAteR is not defined for it; leave it out by layers=[…]",
    "replacement": "no part of them can be taken out",
}


@dataclass(frozen=True)
class Projection:
    """One projection, `W[h, i, j] = factor · weight[rows[h·d_h + j], i]`, or with the two indices swapped.

    Attributes:
        module: the submodule that holds the matrix under the attribute `name`. It is looked up at every reading,
            since a model may be given new parameters.
        dimension: that of the output features: 0 as in `nn.Linear`, 1 as in GPT-2's `Conv1D`.
        rows: which output features, head by head.
        heads: how many heads they make.
        factor: what else multiplies them before the logit (YaRN's attention factor), or None for 1.
        adapter: PEFT's layer around the module, which adds to the matrix (LoRA), or None.
    """

    module: nn.Module
    name: str
    dimension: int
    rows: Int64[Tensor, " features"]
    heads: int
    factor: Float[Tensor, " features"] | None
    adapter: nn.Module | None = None

    def matrix(self, heads: list[int] | None = None) -> Float[Tensor, "features width"]:
        """A copy of W of all heads, or of some, as `nn.Linear` would hold it: features head by head."""
        weight, rows = self.weight.detach(), self.rows_of(heads)
        if self.dimension == 0:
            return weight.index_select(0, rows.to(weight.device))
        return weight.index_select(1, rows.to(weight.device)).T

    def rows_of(self, heads: list[int] | None) -> Int64[Tensor, " features"]:
        """Output features of some heads."""
        return self.rows if heads is None else self.rows.view(self.heads, -1)[heads].flatten()

    @property
    def is_there(self) -> bool:
        """Whether the module still has the parameter: a parametrisation moves it away and leaves a property."""
        return self.name in self.module._parameters

    @property
    def weight(self) -> nn.Parameter:
        """The matrix, as it is now."""
        return getattr(self.module, self.name)

    @functools.cached_property
    def span(self) -> slice | Tensor:
        """The rows as a slice where they follow one another."""
        return _compact(self.rows)

    @property
    def is_view(self) -> bool:
        """Whether W is a view of the matrix: its entries as they are, features that follow one another."""
        return self.factor is None and self.adapter is None and isinstance(self.span, slice)

    @property
    def effective(self) -> Tensor:
        """The matrix with what an adapter adds to it, differentiable."""
        return self.weight if self.adapter is None else adapted_weight(self.adapter, self.weight)

    @property
    def places(self) -> list[Place]:
        """Of the parameters that W is made of."""
        added = [] if self.adapter is None else adapter_places(self.adapter)
        return [(self.module, self.name), *added]

    def view_of(self, matrix: Tensor) -> Float[Tensor, "heads width head_width"]:
        """What lies in another matrix where W does: in the gradient, say."""
        return self.split_heads(_entries(matrix, self.dimension, self.span))

    def split_heads(self, entries: Tensor) -> Float[Tensor, "heads width head_width"]:
        """W of every head, from its entries of the matrix."""
        if self.dimension == 0:
            by_head = entries.unflatten(0, (self.heads, -1)).mT
        else:
            by_head = entries.unflatten(1, (self.heads, -1)).transpose(0, 1)
        if self.factor is None:
            return by_head
        dtype = torch.promote_types(entries.dtype, torch.float32)
        return by_head * self.factor.view(self.heads, 1, -1).to(entries.device, dtype)


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
        if query.weight is not key.weight:
            return query.view_of(query.effective), key.view_of(key.effective)
        # One reading, so that the backward pass fills one gradient of the fused matrix and not two.
        both = _entries(query.effective, query.dimension, self._joint_span)
        w_q, w_k = both.split([len(query.rows), len(key.rows)], dim=query.dimension)
        return query.split_heads(w_q), key.split_heads(w_k)

    @functools.cached_property
    def _joint_span(self) -> slice | Tensor:
        return _compact(torch.cat([self.query.rows, self.key.rows]))

    @property
    def places(self) -> list[Place]:
        """Of the parameters that W_q and W_k are made of."""
        return list(dict.fromkeys([*self.query.places, *self.key.places]))


def find_projections(
    model: nn.Module,
    structure: Structure,
    calls: Calls,
    layers: list[int],
    purpose: Purpose = "penalty",
) -> list[Projections]:
    """Find W_q, W_k and W_v of some layers; `calls` is what `capture_calls` gave. Call it without gradients.

    For a replacement, they are found as well where queries and keys are normalised after the projection (Qwen 3,
    Gemma 3), where no matrix gives the logits.

    Raises:
        UsageError: some layer's queries or keys are not its input times entries of one matrix each: they are
            normalised after the projection, carry an adapter, or are quantised.
    """
    if purpose == "replacement":
        refuse_replaced_weights(model, _PARTICIPLES[purpose])
    refuse_quantised_weights(model, _PARTICIPLES[purpose])
    known: dict[Any, Projections] = {}
    found = []
    with tapped(model, stop_at_tap, own_heads=True):
        for layer in layers:
            attention = structure.attention_at(layer)
            alike = known.get(_kind(attention))
            projections = None if alike is None else _as_in(alike, structure, layer, calls[layer])
            if projections is None:
                projections = known[_kind(attention)] = _find(structure, layer, calls[layer], purpose)
            found.append(projections)
    return found


def _find(structure: Structure, layer: int, call: Call, purpose: Purpose) -> Projections:
    attention = structure.attention_at(layer)
    if any(p.is_meta for p in attention.parameters()):
        raise UsageError(
            f"layer {layer}: the weights of {structure.names[layer]} are offloaded; move the model to one device"
        )
    module = copy_in_dtype(attention, torch.float64).eval()
    adapters = {name: attention.get_submodule(name) for name in without_adapters(module)}
    if purpose == "replacement":
        for name in norms_at_tap(module, call):
            module.set_submodule(name, nn.Identity())
    try:
        projections = _locate_all(_MarkedCopy(module, call))
        agree = [] if projections is None else _verify(module, call, projections)
    except NotAffine as error:
        raise UsageError(f"layer {layer}: {error}; leave it out by layers=[…]") from error
    if projections is None or not all(agree[:2]):
        norms = ", ".join(name for name, _ in norms_inside(attention))
        why = f" (it has norms inside: {norms})" if norms else ""
        named = "" if norms or purpose != "penalty" else ", or name what holds them, qkv=[…]"
        raise UsageError(
            f"layer {layer}: the queries and keys of {structure.names[layer]} are not its input times one weight "
            f"matrix each{why}, so {_THEREFORE[purpose]}{named}"
        )
    name_of = {id(submodule): name for name, submodule in module.named_modules()}

    def in_model(projection: Projection) -> Projection:
        name = name_of[id(projection.module)]
        adapter = adapters.get(name)
        if adapter is not None:
            check_adapter(f"{structure.names[layer]}.{name}", adapter)
        inner: Any = attention.get_submodule(name)
        return replace(projection, module=inner if adapter is None else inner.base_layer, adapter=adapter)

    query, key, value = projections
    return Projections(layer, in_model(query), in_model(key), in_model(value) if value and agree[2] else None)


def _kind(attention: nn.Module) -> Any:
    """What layers have in common whose projections most likely lie alike."""
    modules = tuple((name, type(module)) for name, module in attention.named_modules())
    return modules, tuple((name, p.shape, p.dtype) for name, p in attention.named_parameters())


def _as_in(known: Projections, structure: Structure, layer: int, call: Call) -> Projections | None:
    """Projections where another layer has them, if they answer a few rows in the layer's own dtype as it does.

    Nothing goes through float64, which would take a second for a layer of a large model.
    """
    before, attention = structure.attention_at(known.layer), structure.attention_at(layer)
    name_of = {module: name for name, module in before.named_modules()}

    def moved(projection: Projection | None, into: nn.Module) -> Any:
        if projection is None:
            return None
        adapter = projection.adapter and into.get_submodule(name_of[projection.adapter])
        module = into.get_submodule(name_of[projection.module])
        return replace(projection, module=module, adapter=adapter)

    of_layer = (known.query, known.key, known.value)
    alone = copy_in_dtype(attention, dtype_of(attention)).eval()
    try:
        agree = [] if alone is attention else _answers(alone, call, [moved(p, alone) for p in of_layer])
    except NotAffine:
        agree = []
    if not all(agree[:2]) or not agree:
        return None
    for projection in of_layer:
        if projection is not None and projection.adapter is not None:
            name = name_of[projection.adapter]
            check_adapter(f"{structure.names[layer]}.{name}", attention.get_submodule(name))
    query, key, value = (moved(p, attention) for p in of_layer)
    return Projections(layer, query, key, value if agree[2] else None)


class _MarkedCopy:
    """A copy of an attention module, asked what its tap gets for e_1 and e_2 while its matrices hold markers."""

    def __init__(self, module: nn.Module, call: Call) -> None:
        self.module = module
        self.matrices = [name for name, parameter in module.named_parameters() if parameter.ndim == 2]
        self._call = call
        width = call.width
        device = next(module.parameters()).device
        self._inputs = torch.eye(2, width, dtype=torch.float64, device=device).unsqueeze(1)

    def responses_to(self, marker: Callable[[int, Tensor], Tensor | float]) -> list[Tensor]:
        """Queries, keys and values, each (2, heads, width of one), where matrix number n holds `marker(n, matrix)`."""
        for parameter in self.module.parameters():
            parameter.data.zero_()
        for number, name in enumerate(self.matrices):
            parameter = self.module.get_parameter(name)
            parameter.data.add_(marker(number, parameter.data))
        inputs = run_until_tap(self.module, self._call, self._inputs)
        return [tensor[:, :, 0].double().cpu() for tensor in (inputs.query, inputs.key, inputs.value)]


QueryKeyValue = tuple[Projection, Projection, Projection | None]
"""Of queries, keys and, where they were found, values."""


def _locate_all(marked: _MarkedCopy) -> QueryKeyValue | None:
    """The projections, or None where the answers for queries or keys are not those of picked entries."""

    def counted(parameter: Tensor, dimension: int) -> Tensor:
        shape = [1, 1]
        shape[dimension] = -1
        return torch.arange(1, parameter.shape[dimension] + 1).to(parameter).view(shape)

    answers = zip(
        marked.responses_to(lambda number, parameter: 1.0),
        marked.responses_to(lambda number, parameter: number + 1.0),
        marked.responses_to(lambda number, parameter: counted(parameter, 0)),
        marked.responses_to(lambda number, parameter: counted(parameter, 1)),
        strict=True,
    )
    query, key, value = (_locate(marked, *answer) for answer in answers)
    return None if query is None or key is None else (query, key, value)


def _locate(
    marked: _MarkedCopy, factor: Tensor, number: Tensor, first: Tensor, second: Tensor
) -> Projection | None:
    if not torch.isfinite(factor).all() or (factor == 0).any() or not torch.equal(factor[0], factor[1]):
        return None
    number, first, second = ((answer / factor).round().long() - 1 for answer in (number, first, second))
    matrices = number.unique().tolist()
    if len(matrices) != 1 or not 0 <= matrices[0] < len(marked.matrices):
        return None
    # The inputs are e_1 and e_2, so one of the two indices is that of the input, and the other one the feature's.
    inputs = torch.tensor([0, 1])[:, None, None].expand_as(number)
    for dimension, (rows, columns) in enumerate(((first, second), (second, first))):
        if torch.equal(rows[0], rows[1]) and torch.equal(columns, inputs):
            owner, _, name = marked.matrices[matrices[0]].rpartition(".")
            features = marked.module.get_parameter(marked.matrices[matrices[0]]).shape[dimension]
            if not 0 <= int(rows.min()) <= int(rows.max()) < features:
                return None
            return Projection(
                module=marked.module.get_submodule(owner),
                name=name,
                dimension=dimension,
                rows=rows[0].flatten(),
                heads=rows.shape[1],
                factor=None if bool((factor == 1).all()) else factor[0].flatten(),
            )
    return None


def _verify(module: nn.Module, call: Call, projections: QueryKeyValue) -> list[bool]:
    """Whether random weights of the copy, read by `projections`, give the queries, keys and values of random inputs."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    for parameter in module.parameters():
        parameter.data.copy_(random(*parameter.shape))
    return _answers(module, call, projections)


def _answers(module: nn.Module, call: Call, projections: Sequence[Projection | None]) -> list[bool]:
    """Whether the queries, keys and values of random inputs are what the projections say; False of one that is None."""
    parameter = next(module.parameters())
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(3, call.width, generator=generator, dtype=torch.float64).to(parameter)
    rows[0] = 0
    inputs = run_until_tap(module, call, rows.unsqueeze(1))
    tolerance = max(AFFINE_TOLERANCE, 8 * torch.finfo(parameter.dtype).eps)
    agree = []
    for projection, arrived in zip(projections, (inputs.query, inputs.key, inputs.value), strict=True):
        if projection is None:
            agree.append(False)
            continue
        weights, answer = projection.view_of(projection.effective).double(), arrived[:, :, 0].double()
        expected = torch.einsum("rd,hdw->rhw", rows[1:].double(), weights)
        difference = answer[1:] - answer[0] - expected
        agree.append(bool(difference.abs().max() <= tolerance * float(expected.abs().max())))
    return agree


def _compact(rows: Int64[Tensor, " features"]) -> slice | Tensor:
    first, count = int(rows[0]), len(rows)
    in_order = torch.equal(rows, torch.arange(first, first + count, device=rows.device))
    return slice(first, first + count) if in_order else rows


def _entries(weight: Tensor, dimension: int, span: slice | Tensor) -> Tensor:
    """The entries of a matrix whose output features `span` names."""
    if not isinstance(span, slice):
        return weight.index_select(dimension, span.to(weight.device))
    if span == slice(0, weight.shape[dimension]):
        return weight  # to narrow all of it would cost a copy of the gradient
    return weight.narrow(dimension, span.start, span.stop - span.start)
