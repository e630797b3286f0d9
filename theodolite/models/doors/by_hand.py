"""Attention that a module computes by hand, read from its products: queries with keys, a softmax, weights with values.

What happens to the logits in between is followed from tensor to tensor: numbers that multiply them, biases that are
added, masks, a cap by tanh, another shape or dtype. The second product then says all that decided it. What is not
known here is not followed, and a module that does it is not heard; whether all was read right is asked when the model
is opened, whose output the recomputed one must be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from theodolite.attention.inputs import AttentionInputs, hidden_below

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Logits:
    """`cap(scaling · query keyᵀ) + bias` where `mask` lets a query see a key; what broadcasts does so over `lead`."""

    lead: Shape
    query: Tensor
    key: Tensor
    scaling: float = 1.0
    bias: Tensor | None = None
    mask: Tensor | None = None
    softcap: float | None = None

    def times(self, factor: float) -> _Logits:
        """All of it multiplied by a number."""
        return replace(
            self,
            scaling=self.scaling * factor,
            softcap=None if self.softcap is None else self.softcap * factor,
            bias=None if self.bias is None else self.bias * factor,
        )

    def plus(self, bias: Tensor) -> _Logits:
        """With one more bias, which may be a mask: what it hides is no bias."""
        hidden = bias <= hidden_below(bias.dtype)
        if hidden.any():
            return self.hiding(hidden).plus(bias.masked_fill(hidden, 0))
        if not bias.any():
            return self
        return replace(self, bias=bias if self.bias is None else self.bias + bias)

    def hiding(self, hidden: Tensor) -> _Logits:
        """Without the keys that are hidden."""
        return replace(self, mask=~hidden if self.mask is None else self.mask & ~hidden)

    def with_lead(self, lead: Shape) -> _Logits:
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


@dataclass(frozen=True)
class _Weights:
    """The softmax of logits."""

    logits: _Logits


@dataclass(frozen=True)
class _Folded:
    """A tensor whose first dimension is contexts × heads."""

    lead: Shape


Follow = Callable[..., _Logits | _Weights | _Folded | None]


class ByHand:
    """What is known of the tensors of a module that runs."""

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()

    def attention(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[AttentionInputs, Callable[[Tensor], Tensor]] | None:
        """Where a call is the product of weights with values: the attention's inputs, and its output as the product.

        Args:
            name: of the function. args, kwargs: its arguments.
        """
        if name not in PRODUCTS or not self._known:
            return None
        equation, operands = _operands(name, args, kwargs)
        if len(operands) != 2 or not isinstance(known := self._of(operands[0]), _Weights):
            return None
        weights, value = operands
        logits = known.logits
        letters = _letters(weights.ndim, value.ndim) if equation is None else _parsed(equation)
        if letters is None or value.ndim < 3:
            return None
        first, second, out = letters
        if len(first) != len(logits.lead) + 2:
            if len(logits.lead) != 2 or len(first) != 3 or equation is not None:
                return None
            # Folded again for a product of batches.
            folded = value.expand(math.prod(logits.lead), *value.shape[-2:])
            inputs = logits.inputs(folded.reshape(*logits.lead, *value.shape[-2:]))
            return inputs, lambda output: output.transpose(1, 2).flatten(0, 1)
        row, column = first[-2:]
        own = [letter for letter in second if letter not in first]
        if len(own) != 1 or column not in second or row in second or set(out) != set(first[:-1]) | set(own):
            return None
        laid = _laid_out(value, second, [*first[:-2], column, own[0]])
        order = [[*first[:-2], row, own[0]].index(letter) for letter in out]

        def as_product(output: Tensor) -> Tensor:
            return output.transpose(1, 2).reshape(*logits.lead, *output.shape[1:2], -1).permute(order)

        return logits.inputs(laid), as_product

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Remember what a function's result is, where it is known."""
        if not isinstance(result, Tensor):
            if name == "__setitem__" and args[0] in self._known:
                del self._known[args[0]]
            return
        known = None
        if (rule := RULES.get(name)) is not None:
            if "input" in kwargs:
                kwargs = dict(kwargs)
                args = (kwargs.pop("input"), *args)
            with suppress(
                TypeError, RuntimeError
            ):  # called in a way, or of shapes, that the rule does not know
                known = rule(self._of, result, *args, **kwargs)
        if known is not None:
            self._known[result] = known
        elif self._known and result in self._known:
            del self._known[result]  # changed in place

    def _of(self, tensor: Any) -> Any:
        return self._known.get(tensor) if isinstance(tensor, Tensor) else None


def _operands(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str | None, list[Tensor]]:
    """The equation of a product, if it has one, and what it multiplies."""
    given = [*args, *kwargs.values()]
    if name != "einsum":
        return None, [t for t in given if isinstance(t, Tensor)]
    listed = given[1] if len(given) == 2 and isinstance(given[1], (list, tuple)) else given[1:]
    return given[0], [t for t in listed if isinstance(t, Tensor)]


Letters = tuple[list[str], list[str], list[str]]


def _letters(first: int, second: int) -> Letters:
    """A product of matrices as an equation: of so many dimensions each."""
    lead = [chr(ord("A") + place) for place in range(max(first, second) - 2)]
    return (
        [*lead[len(lead) - first + 2 :], "i", "j"],
        [*lead[len(lead) - second + 2 :], "j", "k"],
        [*lead, "i", "k"],
    )


def _parsed(equation: str) -> Letters | None:
    """The letters of both factors and of the product; None of what is no such equation."""
    factors, arrow, out = equation.replace(" ", "").partition("->")
    pair = factors.split(",")
    if not arrow or len(pair) != 2 or "." in equation:
        return None
    return list(pair[0]), list(pair[1]), list(out)


def _laid_out(tensor: Tensor, letters: list[str], order: list[str]) -> Tensor:
    """A tensor with its dimensions in another order; 1 where it lacks one."""
    present = [letter for letter in order if letter in letters]
    tensor = tensor.permute([letters.index(letter) for letter in present])
    for place, letter in enumerate(order):
        if letter not in letters:
            tensor = tensor.unsqueeze(place)
    return tensor


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


# One rule a function, by its name: from what is known of its arguments, what its result is. `of` looks a tensor up.


def _product(of: Any, result: Tensor, *args: Any, **kwargs: Any) -> _Logits | None:
    equation, operands = _operands("einsum" if args and isinstance(args[0], str) else "", args, kwargs)
    if len(operands) != 2 or result.ndim < 3 or not result.is_floating_point():
        return None
    first, second = operands
    if first.ndim < 3 or second.ndim < 3:
        return None
    letters = _letters(first.ndim, second.ndim) if equation is None else _parsed(equation)
    if letters is None or len(letters[2]) < 3:
        return None
    row, column = letters[2][-2:]
    lead = letters[2][:-2]
    if row in letters[1]:
        first, second, letters = second, first, (letters[1], letters[0], letters[2])
    contracted = [letter for letter in letters[0] if letter in letters[1] and letter not in letters[2]]
    whole = (set(letters[0]) | set(letters[1])) == set(letters[2]) | set(contracted)
    if len(contracted) != 1 or not whole or row in letters[1] or column in letters[0]:
        return None
    query = _laid_out(first, letters[0], [*lead, row, contracted[0]])
    key = _laid_out(second, letters[1], [*lead, column, contracted[0]])
    return _unfolded(of, operands, _Logits(tuple(result.shape[:-2]), query, key))


def _unfolded(of: Any, operands: list[Tensor], logits: _Logits) -> _Logits:
    """Contexts and heads apart, where it is known how they were folded."""
    for operand in operands:
        if isinstance(known := of(operand), _Folded) and len(logits.lead) == 1:
            return logits.with_lead(known.lead)
    return logits


def _product_plus(
    of: Any,
    result: Tensor,
    bias: Tensor,
    batch1: Tensor,
    batch2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> _Logits | None:
    logits = _product(of, result, batch1, batch2)
    if logits is None:
        return None
    logits = logits.times(float(alpha))
    if not beta or not bias.any():
        return logits
    bias = beta * bias.expand(len(result), *bias.shape[-2:])
    return logits.plus(bias.reshape(*logits.lead, *bias.shape[-2:]))


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.is_meta else None
    return float(value) if isinstance(value, int | float) else None


def _sum(of: Any, result: Tensor, first: Any, other: Any, *, alpha: float = 1) -> _Logits | None:
    logits = of(first)
    if not isinstance(logits, _Logits):
        logits, other, alpha = of(other), first, 1
    if not isinstance(logits, _Logits):
        return None
    if not isinstance(other, Tensor):
        return logits  # one number more for all keys is none
    return _plus(logits, other * alpha, result)


def _difference(of: Any, result: Tensor, first: Any, other: Any, *, alpha: float = 1) -> _Logits | None:
    logits = of(first)
    if not isinstance(logits, _Logits):
        return None
    return logits if not isinstance(other, Tensor) else _plus(logits, -alpha * other, result)


def _plus(logits: _Logits, bias: Tensor, result: Tensor) -> _Logits | None:
    lead = tuple(result.shape[:-2])
    if len(lead) == len(logits.lead) and lead != logits.lead:
        return None  # it broadcasts the logits
    if lead != logits.lead:  # the model has contexts and heads folded
        bias = bias.expand(*lead, *bias.shape[-2:]).reshape(*logits.lead, *bias.shape[-2:])
    return logits.plus(bias)


def _multiple(of: Any, result: Tensor, first: Any, other: Any) -> Any:
    if of(first) is None:
        first, other = other, first
    logits, number = of(first), _number(other)
    if not isinstance(logits, _Logits):
        return logits if isinstance(logits, _Weights) and number == 1 else None
    if number is not None:
        return logits.times(number)
    if not isinstance(other, Tensor) or result.shape != first.shape:
        return None
    if other.shape[-1] == 1:  # a number a head or a query
        return replace(logits.times(1.0), query=logits.query * other, bias=_times(logits.bias, other))
    if bool(((other == 0) | (other == 1)).all()):  # a mask, whose zeros a later bias hides
        return logits.hiding(other == 0)
    return None


def _times(tensor: Tensor | None, other: Tensor) -> Tensor | None:
    return None if tensor is None else tensor * other


def _quotient(of: Any, result: Tensor, first: Any, other: Any, **_: Any) -> Any:
    number = _number(other)
    if number is None:
        return None if not isinstance(other, Tensor) else _multiple(of, result, first, 1 / other)
    return _multiple(of, result, first, 1 / number) if of(first) is not None and number else None


def _capped(of: Any, _result: Tensor, tensor: Any) -> _Logits | None:
    logits = of(tensor)
    if not isinstance(logits, _Logits) or logits.softcap is not None or logits.bias is not None:
        return None
    return replace(logits, softcap=1.0)


def _hides(value: Any, tensor: Tensor) -> bool:
    number = _number(value)
    return number is not None and number <= max(hidden_below(tensor.dtype), -1e4)


def _filled(of: Any, result: Tensor, tensor: Tensor, mask: Tensor, value: Any) -> Any:
    known = of(tensor)
    if isinstance(known, _Weights):
        return known if _number(value) == 0 else None  # what is hidden anyway
    if not isinstance(known, _Logits) or not _hides(value, result) or result.shape != tensor.shape:
        return None
    return known.hiding(_of_lead(mask, result, known))


def _chosen(of: Any, result: Tensor, condition: Tensor, first: Any, other: Any) -> _Logits | None:
    seen = True
    if of(first) is None:
        first, other, seen = other, first, False
    logits = of(first)
    if not isinstance(logits, _Logits) or not _hides(other, result) or result.shape != first.shape:
        return None
    return logits.hiding(_of_lead(~condition if seen else condition, result, logits))


def _of_lead(mask: Tensor, result: Tensor, logits: _Logits) -> Tensor:
    """A mask of the model's shape as one of the logits', whose contexts and heads may be apart."""
    mask = mask.bool()
    if result.ndim == len(logits.lead) + 2 or mask.ndim < 3:
        return mask
    return mask.expand(result.shape).reshape(*logits.lead, *result.shape[-2:])


def _at_least(of: Any, _result: Tensor, first: Any, other: Any = None, **kwargs: Any) -> Any:
    """No logit is below a number that hides."""
    logits = of(first)
    least = kwargs.get("min", other)
    return logits if isinstance(logits, _Logits) and _hides(least, first) and "max" not in kwargs else None


def _normalised(of: Any, result: Tensor, tensor: Tensor, dim: int | None = None, *_: Any, **__: Any) -> Any:
    logits = of(tensor)
    if not isinstance(logits, _Logits) or dim is None or dim % result.ndim != result.ndim - 1:
        return None
    return _Weights(logits)


def _same(of: Any, result: Tensor, tensor: Tensor, *_: Any, **__: Any) -> Any:
    """The same numbers, perhaps in another dtype, or with contexts and heads folded or apart."""
    known = of(tensor)
    if known is None or isinstance(known, _Folded):
        if isinstance(known, _Folded) and result.shape[:1] == tensor.shape[:1] and result.ndim == 3:
            return known
        folds = isinstance(tensor, Tensor) and tensor.ndim == 4 and result.ndim == 3
        if (
            folds
            and result.shape[0] == tensor.shape[0] * tensor.shape[1]
            and result.numel() == tensor.numel()
        ):
            return _Folded(tuple(tensor.shape[:2]))
        return None
    if result.shape == tensor.shape:
        return known
    logits = known.logits if isinstance(known, _Weights) else known
    lead = tuple(result.shape[:-2])
    if result.shape[-2:] != tensor.shape[-2:] or math.prod(lead) != math.prod(logits.lead):
        return None
    if len(lead) > len(logits.lead):
        logits = logits.with_lead(lead)
    return _Weights(logits) if isinstance(known, _Weights) else logits


PRODUCTS = ("matmul", "__matmul__", "bmm", "einsum")

RULES: dict[str, Follow] = {
    **dict.fromkeys(PRODUCTS, _product),
    "baddbmm": _product_plus,
    **dict.fromkeys(("add", "add_", "__add__", "__radd__", "__iadd__"), _sum),
    **dict.fromkeys(("sub", "sub_", "__sub__", "__isub__"), _difference),
    **dict.fromkeys(("mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"), _multiple),
    **dict.fromkeys(("div", "div_", "true_divide", "divide", "__truediv__", "__itruediv__"), _quotient),
    **dict.fromkeys(("tanh", "tanh_"), _capped),
    **dict.fromkeys(("masked_fill", "masked_fill_"), _filled),
    "where": _chosen,
    **dict.fromkeys(("max", "maximum", "clamp", "clamp_", "clamp_min"), _at_least),
    **dict.fromkeys(("softmax",), _normalised),
    **dict.fromkeys(
        (
            *("to", "float", "half", "bfloat16", "double", "type", "type_as"),
            *("contiguous", "clone", "detach", "dropout", "dropout_", "nan_to_num", "identity"),
            *("view", "reshape", "unflatten", "flatten", "unsqueeze", "squeeze", "transpose", "__getitem__"),
        ),
        _same,
    ),
}
"""By the function's name: PyTorch has several functions of most."""
