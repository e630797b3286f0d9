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
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from theodolite.attention.inputs import AttentionInputs, hidden_below
from theodolite.models.doors.products import (
    Letters,
    Logits,
    Lost,
    Prepared,
    Weights,
    laid_out,
    letters_of,
    operands_of,
    parsed,
    unfolded,
)

Follow = Callable[..., Logits | Weights | Prepared | None]


class ByHand:
    """What is known of the tensors of a module that runs."""

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()

    def attention(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        contexts: Callable[[int], int | None],
    ) -> tuple[AttentionInputs, Callable[[Tensor], Tensor]] | str | None:
        """Where a call is the product of weights with values: the attention's inputs, and its output as the product.

        Where the weights could not be followed, the name of the operation that was done to them.
        """
        if name not in PRODUCTS or not self._known:
            return None
        equation, operands = operands_of(name, args, kwargs)
        if len(operands) != 2:
            return None
        weights, value = operands
        known = self._of(weights)
        if isinstance(known, Lost) and known.weights and self._of(value) is None:
            return known.operation
        if not isinstance(known, Weights):
            return None
        logits = known.logits
        letters = _letters(equation, weights, value)
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
        laid = laid_out(value, second, [*first[:-2], column, own[0]])
        order = [[*first[:-2], row, own[0]].index(letter) for letter in out]

        lead = logits.lead
        if len(lead) == 1:
            apart = unfolded(lead[0], contexts(weights.shape[-2]))
            laid = laid.expand(*lead, *laid.shape[-2:]).reshape(*apart, *laid.shape[-2:])
            logits = logits.with_lead(apart)

        def as_product(output: Tensor) -> Tensor:
            return output.transpose(1, 2).reshape(*lead, *output.shape[1:2], -1).permute(order)

        return logits.inputs(laid), as_product

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Remember what a function's result is, where it is known."""
        if not isinstance(result, Tensor):
            if name == "__setitem__":
                self._remember(args[0], self._lost(name, args))
            return
        known = None
        if (rule := RULES.get(name)) is not None:
            if "input" in kwargs:
                kwargs = dict(kwargs)
                args = (kwargs.pop("input"), *args)
            # Called in a way, or of shapes, that the rule does not know: then it is not followed.
            with suppress(TypeError, RuntimeError):
                known = rule(self._of, result, *args, **kwargs)
        self._remember(result, known or self._lost(name, args))

    def _remember(self, result: Tensor, known: Any) -> None:
        if known is not None:
            self._known[result] = known
        elif self._known and result in self._known:
            del self._known[result]  # changed in place

    def _lost(self, name: str, args: tuple[Any, ...]) -> Lost | None:
        """What is left of logits or weights in the result of a function that is not followed."""
        if not self._known or name in OF_SHAPE:
            return None
        given = [t for arg in args for t in (arg if isinstance(arg, list | tuple) else [arg])]
        known = [of_one for t in given if isinstance(of_one := self._of(t), Logits | Weights | Lost)]
        if not known:
            return None
        lost = Lost.of(next((of_one for of_one in known if isinstance(of_one, Lost)), known[0]), name)
        return replace(lost, weights=lost.weights or name == "softmax")

    def _of(self, tensor: Any) -> Any:
        return self._known.get(tensor) if isinstance(tensor, Tensor) else None


def _letters(equation: str | None, first: Tensor, second: Tensor) -> Letters | None:
    if equation is None:
        return letters_of(first.ndim, second.ndim)
    return parsed(equation, first.ndim, second.ndim)


# One rule a function, by its name: from what is known of its arguments, what its result is. `of` looks a tensor up.


def _product(of: Any, result: Tensor, *args: Any, **kwargs: Any) -> Logits | None:
    equation, operands = operands_of("einsum" if args and isinstance(args[0], str) else "", args, kwargs)
    if len(operands) != 2 or result.ndim < 3 or not result.is_floating_point():
        return None
    first, second = operands
    if first.ndim < 3 or second.ndim < 3:
        return None
    letters = _letters(equation, first, second)
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
    query = laid_out(first, letters[0], [*lead, row, contracted[0]])
    key = laid_out(second, letters[1], [*lead, column, contracted[0]])
    logits = Logits(tuple(result.shape[:-2]), query, key)
    # What queries or keys were multiplied by is λ, as in families that multiply the logits, and no part of W_q.
    numbers = [known.factor if isinstance(known := of(t), Prepared) else 1.0 for t in (first, second)]
    if numbers != [1.0, 1.0]:
        logits = replace(logits, query=query / numbers[0], key=key / numbers[1], scaling=math.prod(numbers))
    return _unfolded(of, operands, logits)


def _unfolded(of: Any, operands: list[Tensor], logits: Logits) -> Logits:
    """Contexts and heads apart, where it is known how they were folded."""
    for operand in operands:
        known = of(operand)
        if isinstance(known, Prepared) and known.lead is not None and len(logits.lead) == 1:
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
) -> Logits | None:
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


def _sum(of: Any, result: Tensor, first: Any, other: Any, *, alpha: float = 1) -> Logits | None:
    logits = of(first)
    if not isinstance(logits, Logits):
        logits, other, alpha = of(other), first, 1
    if not isinstance(logits, Logits):
        return None
    if not isinstance(other, Tensor):
        return logits  # one number more for all keys is none
    added = of(other)
    if isinstance(added, Logits):
        return logits.beside(added.times(float(alpha))) if result.shape == other.shape else None
    if isinstance(added, Weights) or (isinstance(added, Lost) and added.products & logits.products):
        return None  # what depends on the logits themselves is no bias
    return _plus(logits, other * alpha, result)


def _difference(of: Any, result: Tensor, first: Any, other: Any, *, alpha: float = 1) -> Logits | None:
    logits = of(first)
    if not isinstance(logits, Logits):
        return None
    if not isinstance(other, Tensor):
        return logits
    if other.shape[-1:] == (1,):
        return logits  # one number more for all keys of a query is none: its largest logit, say
    return None if of(other) is not None else _plus(logits, -alpha * other, result)


def _plus(logits: Logits, bias: Tensor, result: Tensor) -> Logits | None:
    lead = tuple(result.shape[:-2])
    if len(lead) == len(logits.lead) and lead != logits.lead:
        return None  # it broadcasts the logits
    if lead != logits.lead:  # the model has contexts and heads folded
        bias = bias.expand(*lead, *bias.shape[-2:]).reshape(*logits.lead, *bias.shape[-2:])
    return logits.plus(bias)


def _multiple(of: Any, result: Tensor, first: Any, other: Any) -> Any:
    if of(first) is None and (of(other) is not None or not isinstance(first, Tensor)):
        first, other = other, first
    logits = of(first)
    if logits is None or isinstance(logits, Prepared):
        return _scaled(logits, other, result)
    number = _number(other)
    if not isinstance(logits, Logits):
        return logits if isinstance(logits, Weights) and number == 1 else None
    if number is not None:
        return logits.times(number)
    if not isinstance(other, Tensor) or result.shape != first.shape:
        return None
    if other.shape[-1] == 1:  # a number a head or a query
        return replace(logits.times(1.0), query=logits.query * other, bias=_times(logits.bias, other))
    if bool(((other == 0) | (other == 1)).all()):  # a mask, whose zeros a later bias hides
        return logits.hiding(other == 0)
    return None


def _scaled(known: Prepared | None, number: Any, result: Tensor) -> Prepared | None:
    if not isinstance(number, int | float) or not number or not math.isfinite(number):
        return None
    if result.ndim < 3 or not result.is_floating_point():
        return None
    known = known or Prepared()
    return replace(known, factor=number * known.factor)


def _times(tensor: Tensor | None, other: Tensor) -> Tensor | None:
    return None if tensor is None else tensor * other


def _quotient(of: Any, result: Tensor, first: Any, other: Any, **_: Any) -> Any:
    if of(first) is None and isinstance(other, Tensor):
        return None
    number = _number(other)
    if number is None:
        return None if not isinstance(other, Tensor) else _multiple(of, result, first, 1 / other)
    return _multiple(of, result, first, 1 / number) if number else None


def _capped(of: Any, _result: Tensor, tensor: Any) -> Logits | None:
    logits = of(tensor)
    if not isinstance(logits, Logits):
        return None
    if any(changed is not None for changed in (logits.softcap, logits.bias, logits.mask)):
        return None
    return replace(logits, softcap=1.0)


def _hides(value: Any, tensor: Tensor) -> bool:
    number = _number(value.amax() if isinstance(value, Tensor) else value)
    return number is not None and number <= max(hidden_below(tensor.dtype), -1e4)


def _filled(of: Any, result: Tensor, tensor: Tensor, mask: Tensor, value: Any) -> Any:
    known = of(tensor)
    if isinstance(known, Weights):
        return known if _number(value) == 0 else None  # what is hidden anyway
    if not isinstance(known, Logits) or not _hides(value, result) or result.shape != tensor.shape:
        return None
    return known.hiding(_of_lead(mask, result, known))


def _chosen(of: Any, result: Tensor, condition: Tensor, first: Any, other: Any) -> Logits | None:
    seen = True
    if of(first) is None:
        first, other, seen = other, first, False
    logits = of(first)
    if not isinstance(logits, Logits) or not _hides(other, result) or result.shape != first.shape:
        return None
    return logits.hiding(_of_lead(~condition if seen else condition, result, logits))


def _of_lead(mask: Tensor, result: Tensor, logits: Logits) -> Tensor:
    """A mask of the model's shape as one of the logits', whose contexts and heads may be apart."""
    mask = mask.bool()
    if result.ndim == len(logits.lead) + 2 or mask.ndim < 3:
        return mask
    return mask.expand(result.shape).reshape(*logits.lead, *result.shape[-2:])


def _at_least(of: Any, _result: Tensor, first: Any, other: Any = None, **kwargs: Any) -> Any:
    """No logit is below a number that hides."""
    logits = of(first)
    least = kwargs.get("min", other)
    return logits if isinstance(logits, Logits) and _hides(least, first) and "max" not in kwargs else None


def _normalised(of: Any, result: Tensor, tensor: Tensor, dim: int | None = None, *_: Any, **__: Any) -> Any:
    logits = of(tensor)
    if not isinstance(logits, Logits) or dim is None or dim % result.ndim != result.ndim - 1:
        return None
    return Weights(logits)


def _same(of: Any, result: Tensor, tensor: Tensor, *_: Any, **__: Any) -> Any:
    """The same numbers, perhaps in another dtype, or with contexts and heads folded or apart."""
    known = of(tensor)
    if known is None or isinstance(known, Prepared):
        return _prepared(known or Prepared(), result, tensor)
    if result.shape == tensor.shape or isinstance(known, Lost):
        return known
    logits = known.logits if isinstance(known, Weights) else known
    lead = tuple(result.shape[:-2])
    if result.shape[-2:] != tensor.shape[-2:] or math.prod(lead) != math.prod(logits.lead):
        return None
    if len(lead) > len(logits.lead):
        logits = logits.with_lead(lead)
    return Weights(logits) if isinstance(known, Weights) else logits


def _prepared(known: Prepared, result: Tensor, tensor: Tensor) -> Prepared | None:
    if known.lead is not None and (result.shape[:1] != tensor.shape[:1] or result.ndim != 3):
        known = replace(known, lead=None)
    folds = isinstance(tensor, Tensor) and tensor.ndim == 4 and result.ndim == 3
    if folds and result.shape[0] == tensor.shape[0] * tensor.shape[1] and result.numel() == tensor.numel():
        known = replace(known, lead=tuple(tensor.shape[:2]))
    return None if known == Prepared() else known


def _moved(of: Any, _result: Tensor, tensor: Tensor, *_: Any, **__: Any) -> Prepared | None:
    """The same numbers in another order."""
    known = of(tensor)
    return replace(known, lead=None) if isinstance(known, Prepared) and known.factor != 1.0 else None


PRODUCTS = ("matmul", "__matmul__", "bmm", "einsum")

OF_SHAPE = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
"""What takes of a tensor its shape and dtype, and none of its numbers."""

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
            *("view", "reshape", "unflatten", "flatten", "unsqueeze", "squeeze", "__getitem__"),
        ),
        _same,
    ),
    **dict.fromkeys(("transpose", "permute", "movedim", "swapaxes", "mT", "repeat_interleave"), _moved),
}
"""By the function's name: PyTorch has several functions of most."""
