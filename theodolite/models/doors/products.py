"""Logits on their way through products, and the letters of these products' dimensions: what `by_hand.py` follows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from theodolite.attention.inputs import AttentionInputs, hidden_in

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Logits:
    """`cap(scaling · query keyᵀ) + bias` where `mask` lets a query see a key; what broadcasts does so over `lead`.

    `products` are those of queries and keys that it is made of.
    """

    lead: Shape
    query: Tensor
    key: Tensor
    scaling: float = 1.0
    bias: Tensor | None = None
    mask: Tensor | None = None
    softcap: float | None = None
    products: frozenset[object] = field(default_factory=lambda: frozenset({object()}))

    def times(self, factor: float) -> Logits:
        """All of it multiplied by a number."""
        return replace(
            self,
            scaling=self.scaling * factor,
            softcap=None if self.softcap is None else self.softcap * factor,
            bias=None if self.bias is None else self.bias * factor,
        )

    def plus(self, bias: Tensor) -> Logits:
        """With one more bias, which may be a mask: what it hides is no bias."""
        hidden = hidden_in(bias)
        if hidden is not None:
            return self.hiding(hidden).plus(bias.masked_fill(hidden, 0))
        if not bias.any():
            return self
        return replace(self, bias=bias if self.bias is None else self.bias + bias)

    def beside(self, other: Logits) -> Logits | None:
        """The sum of two products of queries and keys is one of both side by side; None where more was done to one."""
        done = [(of.softcap, of.mask) for of in (self, other)]
        if done != [(None, None)] * 2 or self.lead != other.lead or not self.scaling:
            return None
        scaled = other.query * (other.scaling / self.scaling)
        joined = replace(
            self,
            query=_side_by_side(self.query, scaled),
            key=_side_by_side(self.key, other.key),
            products=self.products | other.products,
        )
        return joined if other.bias is None else joined.plus(other.bias)

    def hiding(self, hidden: Tensor) -> Logits:
        """Without the keys that are hidden."""
        return replace(self, mask=~hidden if self.mask is None else self.mask & ~hidden)

    def with_lead(self, lead: Shape) -> Logits:
        """The same with other dimensions before the last two: contexts and heads apart, where they were folded."""
        query, key = (
            t.expand(*self.lead, *t.shape[-2:]).reshape(*lead, *t.shape[-2:]) for t in (self.query, self.key)
        )
        bias, mask = (_with_lead(t, self.lead, lead) for t in (self.bias, self.mask))
        return replace(self, lead=lead, query=query, key=key, bias=bias, mask=mask)

    def inputs(self, value: Tensor) -> AttentionInputs:
        """With the values (…, keys, width) as the inputs of an attention, which has contexts and heads."""
        batch, heads = self.lead[0], math.prod(self.lead[1:])
        query = self.query.expand(*self.lead, *self.query.shape[-2:]).flatten(1, -3)
        key, value = (_grouped(t, self.lead) for t in (self.key, value))
        bias, mask = (_with_lead(t, self.lead, (batch, heads)) for t in (self.bias, self.mask))
        if mask is not None:
            mask = mask.expand(*mask.shape[:-2], query.shape[-2], key.shape[-2])
        return AttentionInputs(
            query=query,
            key=key,
            value=value,
            scaling=self.scaling,
            causal=False,
            mask=mask,
            softcap=self.softcap,
            bias=bias,
        )


def _side_by_side(first: Tensor, second: Tensor) -> Tensor:
    lead = torch.broadcast_shapes(first.shape[:-1], second.shape[:-1])
    return torch.cat([t.expand(*lead, t.shape[-1]) for t in (first, second)], dim=-1)


@dataclass(frozen=True)
class Weights:
    """The softmax of logits."""

    logits: Logits


@dataclass(frozen=True)
class Lost:
    """What was made of logits or weights by an operation that is not followed, and whether a softmax was on the way."""

    operation: str
    products: frozenset[object]
    weights: bool

    @classmethod
    def of(cls, known: Logits | Weights | Lost, operation: str) -> Lost:
        """What is left of something known behind an operation."""
        if isinstance(known, Lost):
            return known
        logits = known.logits if isinstance(known, Weights) else known
        return cls(operation, logits.products, isinstance(known, Weights))


@dataclass(frozen=True)
class Prepared:
    """A tensor that was multiplied by a number, or whose first dimension is contexts × heads (`lead`)."""

    factor: float = 1.0
    lead: Shape | None = None


def operands_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str | None, list[Tensor]]:
    """The equation of a product, if it has one, and what it multiplies."""
    given = [*args, *kwargs.values()]
    if name != "einsum":
        return None, [t for t in given if isinstance(t, Tensor)]
    listed = given[1] if len(given) == 2 and isinstance(given[1], (list, tuple)) else given[1:]
    return given[0], [t for t in listed if isinstance(t, Tensor)]


Letters = tuple[list[str], list[str], list[str]]


def letters_of(first: int, second: int) -> Letters:
    """A product of matrices as an equation: of so many dimensions each."""
    lead = [chr(ord("A") + place) for place in range(max(first, second) - 2)]
    return (
        [*lead[len(lead) - first + 2 :], "i", "j"],
        [*lead[len(lead) - second + 2 :], "j", "k"],
        [*lead, "i", "k"],
    )


def parsed(equation: str, first: int, second: int) -> Letters | None:
    """The letters of both factors, of so many dimensions each, and of the product; None of what is no such equation."""
    factors, arrow, out = equation.replace(" ", "").partition("->")
    pair = factors.split(",")
    if not arrow or len(pair) != 2:
        return None
    rest = [
        max(0, ndim - len(own.replace("...", ""))) for own, ndim in zip(pair, (first, second), strict=True)
    ]
    dots = "".join(chr(ord("\ue000") + place) for place in range(max(rest)))  # letters that nobody writes
    spelled = [
        own.replace("...", dots[len(dots) - own_rest :])
        for own, own_rest in zip((*pair, out), (*rest, len(dots)), strict=True)
    ]
    return list(spelled[0]), list(spelled[1]), list(spelled[2])


def laid_out(tensor: Tensor, letters: list[str], order: list[str]) -> Tensor:
    """A tensor with its dimensions in another order; 1 where it lacks one."""
    present = [letter for letter in order if letter in letters]
    tensor = tensor.permute([letters.index(letter) for letter in present])
    for place, letter in enumerate(order):
        if letter not in letters:
            tensor = tensor.unsqueeze(place)
    return tensor


def unfolded(first: int, contexts: int | None) -> tuple[int, int]:
    """Contexts and heads of a first dimension that is both; contexts alone, where how many there are is not known."""
    whole = bool(contexts) and not first % (contexts or 1)
    return (contexts, first // contexts) if whole and contexts else (first, 1)


def _with_lead(tensor: Tensor | None, lead: Shape, new: Shape) -> Tensor | None:
    """What broadcasts over `lead` as what broadcasts over `new`, dimensions that hold the same in another shape."""
    if tensor is None or (lead == new and tensor.ndim == len(new) + 2):
        return tensor
    tensor = tensor[(None,) * (len(lead) + 2 - tensor.ndim)]
    own = tensor.shape[:-2]
    if all(size == 1 for size in own):
        return tensor.reshape(*(1 for _ in new), *tensor.shape[-2:])
    if len(lead) > len(new) == 2 and all(size == 1 for size in own[1:]):
        return tensor.reshape(own[0], 1, *tensor.shape[-2:])
    return tensor.expand(*lead, *tensor.shape[-2:]).reshape(*new, *tensor.shape[-2:])


def _grouped(tensor: Tensor, lead: Shape) -> Tensor:
    """Keys or values (…, keys, width) with one dimension of heads: as few as query heads share them in order."""
    tensor = tensor[(None,) * (len(lead) + 2 - tensor.ndim)]
    heads = tensor.shape[1:-2]
    shared = next((place for place, size in enumerate(heads) if size == 1), len(heads))
    if heads[:shared] != lead[1 : 1 + shared] or any(size != 1 for size in heads[shared:]):
        tensor = tensor.expand(*lead, *tensor.shape[-2:])
    return tensor.expand(lead[0], *tensor.shape[1:]).flatten(1, -3)
