"""Other matrices in place of a model's, for a while: what an intervention on weights is made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from theodolite.models.training.shards import Place
from theodolite.models.weights.weight_map import Projection

Replacement = tuple[Projection, list[int] | None, Tensor]
"""A matrix, and the heads of a projection whose it is to be."""

# Of the process, as edits of the tap are: what is replaced now, in the order in which it was, and the model's own.
_open_replacements: list[list[Replacement]] = []
_originals: dict[Place, nn.Parameter] = {}


@contextmanager
def replaced(replacements: Iterable[Replacement]) -> Iterator[None]:
    """While open, `Projection.matrix(heads)` is another matrix, for each of the (projection, heads, matrix) given.

    The modules get new parameters; on leaving they get back the very ones that they had. So nothing is rounded twice,
    and a parameter that other modules share changes here alone. Of several for the same entries the one opened last
    holds; they may be left in any order.
    """
    opened = list(replacements)
    names = list(dict.fromkeys((projection.module, projection.name) for projection, _, _ in opened))
    _open_replacements.append(opened)
    try:
        for parameter_name in names:
            _write_replacements(parameter_name)
        yield
    finally:
        # By identity: two equal ones may be open at once.
        del _open_replacements[next(i for i, other in enumerate(_open_replacements) if other is opened)]
        for parameter_name in names:
            _write_replacements(parameter_name)


def _write_replacements(parameter_name: Place) -> None:
    """Give a module its own parameter, with the entries of what is replaced now."""
    module, name = parameter_name
    replacements = [
        (projection, heads, matrix)
        for opened in _open_replacements
        for projection, heads, matrix in opened
        if (projection.module, projection.name) == parameter_name
    ]
    if not replacements:
        if parameter_name in _originals:
            module._parameters[name] = _originals.pop(parameter_name)
        return
    original = _originals.setdefault(parameter_name, getattr(module, name))
    weight = original.detach().clone()
    for projection, heads, matrix in replacements:
        projection.put(heads, matrix, into=weight)
    module._parameters[name] = nn.Parameter(weight, requires_grad=original.requires_grad)


def own_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
    """The parameter that a module has, or the one that it has again when nothing is `replaced` any more."""
    return _originals.get((module, name), parameter)
