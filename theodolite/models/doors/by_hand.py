"""Attention that a module computes by hand, read from its products: queries with keys, a softmax, weights with values.

What happens to the logits in between is followed from tensor to tensor by one table of rules (`RULES`, at the end). The
second product then says all that decided it. A module that uses a function without a rule is refused by its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from theodolite.attention.inputs import AttentionInputs, hidden_below, hidden_in

Shape = tuple[int, ...]

PRODUCTS = ("matmul", "__matmul__", "bmm", "einsum")

OF_SHAPE = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
"""What takes of a tensor its shape and dtype, and none of its numbers."""


@dataclass(frozen=True)
class Logits:
    """`cap(scaling · query keyᵀ) + bias` where `mask` lets a query see a key, or with `weights` their softmax.

    What broadcasts does so over `lead`. `product` is that of queries and keys that it is made of.
    """

    lead: Shape
    query: Tensor
    key: Tensor
    scaling: float = 1.0
    bias: Tensor | None = None
    mask: Tensor | None = None
    softcap: float | None = None
    weights: bool = False
    product: object = field(default_factory=object)

    def times(self, factor: float) -> Logits:
        """Multiply all of it by a number."""
        softcap = None if self.softcap is None else self.softcap * factor
        bias = None if self.bias is None else self.bias * factor
        return replace(self, scaling=self.scaling * factor, softcap=softcap, bias=bias)

    def plus(self, bias: Tensor) -> Logits:
        """Add a bias; the keys that it hides become a mask."""
        hidden = hidden_in(bias)
        if hidden is not None:
            return self.hiding(hidden).plus(bias.masked_fill(hidden, 0))
        if not bias.any():
            return self
        return replace(self, bias=bias if self.bias is None else self.bias + bias)

    def hiding(self, hidden: Tensor) -> Logits:
        """Hide keys."""
        return replace(self, mask=~hidden if self.mask is None else self.mask & ~hidden)

    def with_lead(self, lead: Shape) -> Logits:
        """Reshape the dimensions before the last two: contexts and heads, folded or apart."""
        if lead == self.lead:
            return self
        names = ("query", "key", "bias", "mask")
        changed: dict[str, Any] = {name: _with_lead(getattr(self, name), self.lead, lead) for name in names}
        return replace(self, lead=lead, **changed)

    def inputs(self, value: Tensor) -> AttentionInputs:
        """Make `AttentionInputs` with the values (…, keys, width)."""
        batch, heads = self.lead[0], math.prod(self.lead[1:])
        query = self.query.expand(*self.lead, *self.query.shape[-2:]).flatten(1, -3)
        key, value = (_grouped(t, self.lead) for t in (self.key, value))
        bias, mask = (_with_lead(t, self.lead, (batch, heads)) for t in (self.bias, self.mask))
        if mask is not None:
            mask = mask.expand(*mask.shape[:-2], query.shape[-2], key.shape[-2])
        return AttentionInputs(query, key, value, self.scaling, False, mask, self.softcap, bias)


@dataclass(frozen=True)
class NotFollowed:
    """What an operation without a rule makes of logits or weights, and whether a softmax came before."""

    operation: str
    product: object
    weights: bool


@dataclass(frozen=True)
class Multiplied:
    """A tensor that was multiplied by a number: queries or keys, perhaps."""

    factor: float


Known = Logits | NotFollowed | Multiplied
Lookup = Callable[[Any], Any]
"""What is known of a tensor, or None."""


class ByHand:
    """Follows the tensors of one pass from products of queries with keys to products of weights with values."""

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()

    def attention(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], contexts: Callable[[int], int | None]
    ) -> tuple[AttentionInputs, Callable[[Tensor], Tensor]] | NotFollowed | None:
        """Return the attention inputs of a product with values, and what shapes its output; or `NotFollowed`."""
        if name not in PRODUCTS or not self._known:
            return None
        equation, operands = _operands(args, kwargs)
        if len(operands) != 2:
            return None
        weights, value = operands
        known = self._of(weights)
        if isinstance(known, NotFollowed) and self._of(value) is None:
            return known
        letters = _letters(equation, weights.ndim, value.ndim)
        if not isinstance(known, Logits) or not known.weights or letters is None or value.ndim < 3:
            return None
        first, second, out = letters
        row, column = first[-2:]
        own = [letter for letter in second if letter not in first]
        if len(own) != 1 or column not in second or row in second or set(out) != set(first[:-1]) | set(own):
            return None
        laid = _laid_out(value, second, [*first[:-2], column, own[0]])
        order = [[*first[:-2], row, own[0]].index(letter) for letter in out]

        # The model may have contexts and heads in one dimension: never apart, or folded for a product of batches.
        folded, lead = weights.shape[:-2], known.lead
        if len(lead) == 1:
            lead = unfolded(lead[0], contexts(weights.shape[-2]))
        if len(folded) != len(lead):
            laid = laid.expand(*folded, *laid.shape[-2:]).reshape(*lead, *laid.shape[-2:])

        def as_product(output: Tensor) -> Tensor:
            return output.transpose(1, 2).reshape(*folded, output.shape[1], -1).permute(order)

        return known.with_lead(lead).inputs(laid), as_product

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Apply a function's rule, and remember what its result is."""
        known = None
        if not isinstance(result, Tensor):
            if name != "__setitem__":
                return
            result = args[0]
        elif (rule := RULES.get(name)) is not None:
            if "input" in kwargs:
                kwargs = dict(kwargs)
                args = (kwargs.pop("input"), *args)
            # Called in a way, or of shapes, that the rule does not know: then it is not followed.
            with suppress(TypeError, RuntimeError):
                known = rule(self._of, result, *args, **kwargs)
        known = known or self._not_followed(name, args)
        if known is not None:
            self._known[result] = known
        elif self._known and result in self._known:
            del self._known[result]  # changed in place

    def _not_followed(self, name: str, args: tuple[Any, ...]) -> NotFollowed | None:
        """Note that a result depends on logits or weights in a way that is not followed."""
        if not self._known or name in OF_SHAPE:
            return None
        tensors = [t for arg in args for t in (arg if isinstance(arg, list | tuple) else [arg])]
        known = [of for t in tensors if (of := self._of(t)) is not None and not isinstance(of, Multiplied)]
        if not known:
            return None
        source = next((of for of in known if isinstance(of, NotFollowed)), known[0])
        operation = source.operation if isinstance(source, NotFollowed) else name
        return NotFollowed(operation, source.product, source.weights or name == "softmax")

    def _of(self, tensor: Any) -> Known | None:
        return self._known.get(tensor) if isinstance(tensor, Tensor) else None


def unfolded(first: int, contexts: int | None) -> tuple[int, int]:
    """Split a first dimension that is contexts × heads into both; (all, 1) where the number of contexts is unknown."""
    return (contexts, first // contexts) if contexts and not first % contexts else (first, 1)


# Equations of products: a letter for each dimension of both factors, and of the product.


def _operands(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str | None, list[Tensor]]:
    """Return a product's einsum equation, if it has one, and its factors."""
    given = [*args, *kwargs.values()]
    equation = given.pop(0) if isinstance(given[0], str) else None
    if len(given) == 1 and isinstance(given[0], list | tuple):
        given = list(given[0])
    return equation, [t for t in given if isinstance(t, Tensor)]


def _letters(equation: str | None, first: int, second: int) -> list[list[str]] | None:
    """Return the letters of both factors and of the product; without an equation, those of a matrix product."""
    factors, arrow, out = (equation or "...ij,...jk->...ik").replace(" ", "").partition("->")
    pair = factors.split(",")
    if not arrow or len(pair) != 2:
        return None
    sizes = zip(pair, (first, second), strict=True)
    rest = [max(0, ndim - len(own.replace("...", ""))) for own, ndim in sizes]
    dots = "".join(chr(ord("\ue000") + place) for place in range(max(rest)))  # letters that nobody writes
    return [
        list(own.replace("...", dots[len(dots) - number :]))
        for own, number in zip((*pair, out), (*rest, len(dots)), strict=True)
    ]


def _laid_out(tensor: Tensor, letters: list[str], order: list[str]) -> Tensor:
    """Permute a tensor's dimensions into an order; those that it lacks have size 1."""
    present = [letter for letter in order if letter in letters]
    tensor = tensor.permute([letters.index(letter) for letter in present])
    for place, letter in enumerate(order):
        if letter not in letters:
            tensor = tensor.unsqueeze(place)
    return tensor


def _with_lead(tensor: Tensor | None, lead: Shape, new: Shape) -> Tensor | None:
    """Reshape what broadcasts over `lead` to broadcast over `new`, the same dimensions folded or split."""
    if tensor is None or (lead == new and tensor.ndim == len(new) + 2):
        return tensor
    tensor = tensor[(None,) * (len(lead) + 2 - tensor.ndim)]
    contexts, *others = tensor.shape[:-2]
    if all(size == 1 for size in others) and (contexts == 1 or len(lead) > len(new) == 2):
        return tensor.reshape(contexts, *(1 for _ in new[1:]), *tensor.shape[-2:])
    return tensor.expand(*lead, *tensor.shape[-2:]).reshape(*new, *tensor.shape[-2:])


def _grouped(tensor: Tensor, lead: Shape) -> Tensor:
    """Fold keys or values (…, keys, width) to one dimension of heads, one head for the query heads that share it."""
    tensor = tensor[(None,) * (len(lead) + 2 - tensor.ndim)]
    heads = tensor.shape[1:-2]
    shared = next((place for place, size in enumerate(heads) if size == 1), len(heads))
    if heads[:shared] != lead[1 : 1 + shared] or any(size != 1 for size in heads[shared:]):
        tensor = tensor.expand(*lead, *tensor.shape[-2:])
    return tensor.expand(lead[0], *tensor.shape[1:]).flatten(1, -3)


# The rules: from what is known of a function's arguments (`of` looks it up), what its result is; None: not known.


def _product(of: Lookup, result: Tensor, *args: Any, **kwargs: Any) -> Logits | None:
    equation, operands = _operands(args, kwargs)
    if len(operands) != 2 or min(t.ndim for t in (result, *operands)) < 3 or not result.is_floating_point():
        return None
    letters = _letters(equation, *(t.ndim for t in operands))
    if letters is None or len(letters[2]) < 3:
        return None
    *lead, row, column = letters[2]
    (first, of_first), (second, of_second) = zip(operands, letters[:2], strict=True)
    if row in of_second:
        first, of_first, second, of_second = second, of_second, first, of_first
    contracted = [letter for letter in of_first if letter in of_second and letter not in letters[2]]
    whole = set(of_first) | set(of_second) == set(letters[2]) | set(contracted)
    if len(contracted) != 1 or not whole or row in of_second or column in of_first:
        return None
    logits = Logits(
        tuple(result.shape[:-2]),
        _laid_out(first, of_first, [*lead, row, contracted[0]]),
        _laid_out(second, of_second, [*lead, column, contracted[0]]),
    )
    # What queries or keys were multiplied by is λ, as in families that multiply the logits, and no part of W_q.
    numbers = [known.factor if isinstance(known := of(t), Multiplied) else 1.0 for t in (first, second)]
    if numbers == [1.0, 1.0]:
        return logits
    query, key = logits.query / numbers[0], logits.key / numbers[1]
    return replace(logits, query=query, key=key, scaling=math.prod(numbers))


def _product_plus(
    of: Lookup, result: Tensor, bias: Tensor, *args: Any, beta: float = 1, alpha: float = 1, **kwargs: Any
) -> Logits | None:
    logits = _product(of, result, *args, **kwargs)
    if logits is None:
        return None
    logits = logits.times(float(alpha))
    return logits.plus(beta * bias) if beta else logits


def _logits(known: Known | None) -> Logits | None:
    """Return what is known if it is logits before the softmax, else None."""
    return known if isinstance(known, Logits) and not known.weights else None


def _sum(of: Lookup, result: Tensor, first: Any, other: Any, *, alpha: float = 1) -> Logits | None:
    if _logits(of(first)) is None:
        first, other, alpha = other, first, 1
    logits = _logits(of(first))
    if logits is None or not isinstance(other, Tensor):
        return logits  # one number more for all keys is none
    added = of(other)
    if isinstance(added, Logits) or (isinstance(added, NotFollowed) and added.product is logits.product):
        return None  # what depends on the logits themselves is no bias
    return logits.plus(float(alpha) * other) if result.shape[:-2] == logits.lead else None


def _difference(of: Lookup, result: Tensor, first: Any, other: Any, *, alpha: float = 1) -> Logits | None:
    logits = _logits(of(first))
    if logits is None or (isinstance(other, Tensor) and other.shape[-1:] == (1,)):
        return logits  # one number more for all keys of a query is none: its largest logit, say
    return _sum(of, result, first, other, alpha=-alpha)


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.is_meta else None
    return float(value) if isinstance(value, int | float) else None


def _multiple(of: Lookup, result: Tensor, first: Any, other: Any) -> Known | None:
    if of(first) is None and (of(other) is not None or not isinstance(first, Tensor)):
        first, other = other, first
    known = of(first)
    if known is None or isinstance(known, Multiplied):
        if not isinstance(other, int | float) or not other or not math.isfinite(other):
            return None
        prepared = result.ndim > 2 and result.is_floating_point()
        return Multiplied(other * (1.0 if known is None else known.factor)) if prepared else None
    number = _number(other)
    if not isinstance(known, Logits) or known.weights:
        return known if isinstance(known, Logits) and number == 1 else None
    if number is not None:
        return known.times(number)
    if not isinstance(other, Tensor) or result.shape != first.shape:
        return None
    if other.shape[-1] == 1:  # a number a head or a query
        bias = None if known.bias is None else known.bias * other
        return replace(known, query=known.query * other, bias=bias)
    # A mask, whose zeros a later bias hides.
    return known.hiding(other == 0) if bool(((other == 0) | (other == 1)).all()) else None


def _quotient(of: Lookup, result: Tensor, first: Any, other: Any, **_: Any) -> Known | None:
    if not isinstance(other, Tensor | int | float) or (of(first) is None and isinstance(other, Tensor)):
        return None
    number = _number(other)
    return None if number == 0 else _multiple(of, result, first, 1 / (other if number is None else number))


def _capped(of: Lookup, _result: Tensor, tensor: Any) -> Logits | None:
    logits = _logits(of(tensor))
    if logits is None or (logits.softcap, logits.bias, logits.mask) != (None, None, None):
        return None
    return replace(logits, softcap=1.0)


def _hides(value: Any, tensor: Tensor) -> bool:
    number = _number(value.amax() if isinstance(value, Tensor) else value)
    return number is not None and number <= hidden_below(tensor.dtype, -1e4)


def _filled(of: Lookup, result: Tensor, tensor: Tensor, mask: Tensor, value: Any) -> Known | None:
    known = of(tensor)
    if not isinstance(known, Logits) or result.shape != tensor.shape:
        return None
    if known.weights:
        return known if _number(value) == 0 else None  # what is hidden anyway
    if not _hides(value, result):
        return None
    return known.hiding(mask.bool()) if result.shape[:-2] == known.lead else None


def _chosen(of: Lookup, result: Tensor, condition: Tensor, first: Any, other: Any) -> Known | None:
    if of(first) is None:
        return _filled(of, result, other, condition, first) if isinstance(other, Tensor) else None
    return _filled(of, result, first, ~condition, other)


def _clamped(of: Lookup, _result: Tensor, first: Any, other: Any = None, **kwargs: Any) -> Logits | None:
    """Keep the logits under a lower bound that hides keys: it changes no other logit."""
    logits = _logits(of(first))
    least = kwargs.get("min", other)
    return logits if logits is not None and _hides(least, first) and "max" not in kwargs else None


def _normalised(
    of: Lookup, result: Tensor, tensor: Tensor, dim: int | None = None, *_: Any, **__: Any
) -> Logits | None:
    logits = _logits(of(tensor))
    over_keys = dim is not None and dim % result.ndim == result.ndim - 1
    return replace(logits, weights=True) if logits is not None and over_keys else None


def _same(of: Lookup, result: Tensor, tensor: Tensor, *_: Any, **__: Any) -> Known | None:
    """Follow the same numbers, perhaps in another dtype, or with contexts and heads folded or apart."""
    known: Known | None = of(tensor)
    if result.shape == tensor.shape or not isinstance(known, Logits):
        return known
    lead = tuple(result.shape[:-2])
    if result.shape[-2:] != tensor.shape[-2:] or math.prod(lead) != math.prod(known.lead):
        return None
    return known.with_lead(lead) if len(lead) > len(known.lead) else known


def _reordered(of: Lookup, _result: Tensor, tensor: Tensor, *_: Any, **__: Any) -> Multiplied | None:
    """Follow the same numbers in another order."""
    known = of(tensor)
    return known if isinstance(known, Multiplied) else None


RULES: dict[str, Callable[..., Known | None]] = {
    name: rule
    for rule, names in (
        (_product, " ".join(PRODUCTS)),
        (_product_plus, "baddbmm"),
        (_sum, "add add_ __add__ __radd__ __iadd__"),
        (_difference, "sub sub_ __sub__ __isub__"),
        (_multiple, "mul mul_ multiply __mul__ __rmul__ __imul__"),
        (_quotient, "div div_ true_divide divide __truediv__ __itruediv__"),
        (_capped, "tanh tanh_"),
        (_filled, "masked_fill masked_fill_"),
        (_chosen, "where"),
        (_clamped, "max maximum clamp clamp_ clamp_min"),
        (_normalised, "softmax"),
        (
            _same,
            "to float half bfloat16 double type type_as contiguous clone detach dropout dropout_ identity",
        ),
        (_same, "nan_to_num view reshape unflatten flatten unsqueeze squeeze __getitem__"),
        (_reordered, "transpose permute movedim swapaxes mT repeat_interleave"),
    )
    for name in names.split()
}
"""By the function's name: PyTorch has several functions of most."""
