"""LocAteR, the penalty of Bao et al. 2024 (section 6) that narrows the spectrum of every head's query-key matrix.

It works on the factors W_q and W_k of shape (d, d_h), and forms no d×d matrix. W_QK = W_q W_kᵀ is the transpose of what
Bao et al. write, of which both terms are the same.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from theodolite.errors import UsageError
from theodolite.models.calls import capture_calls
from theodolite.models.open import evaluation_mode, on_a_few_tokens, training_source
from theodolite.models.opened import OpenModel
from theodolite.models.structure import Structure
from theodolite.models.structure_search import find_structure
from theodolite.models.training import shards
from theodolite.models.weights.weight_map import LogitRows, Projection, Projections, find_projections
from theodolite.theory.checks import check_real

Gradient = Literal["exact", "published"]
Strength = float | Callable[[int], float]  # κ: a number, or a function of how many optimizer steps are done


def locater_penalty(
    w_q: Float[Tensor, "*layers heads width head_width"],
    w_k: Float[Tensor, "*layers key_heads width head_width"],
    scale: float,
    mean: float,
    *,
    gradient: Gradient = "exact",
) -> Float[Tensor, ""]:
    """Compute κ₁ tr(W_QKᵀ W_QK) + κ₂ (tr W_QK − 1)², W_QK = W_q W_kᵀ, over all heads: a differentiable scalar.

    Args:
        w_q: query factors (..., H, d, d_h), logit = x W_q W_kᵀ yᵀ/λ. Biases and the temperature λ have no part.
        w_k: key factors (..., H, d, d_h), or (..., G, d, d_h) where each of G key heads serves H/G query heads
            that follow one another; the pair of every query head counts.
        scale: κ₁, the strength on the scale of the spectrum, in units of the loss.
        mean: κ₂, the strength on its mean.
        gradient: "exact", or "published" for the second term's gradient as printed in section 6,
            κ₂ (tr W_QK − 1) tr(W_QK) W_k in place of 2 κ₂ (tr W_QK − 1) W_k: for comparison with the paper only.

    Computed with autocast off, in float32, or in float64 where the factors are; the result has that dtype.

    Raises:
        UsageError: the shapes do not fit, the factors are no real tensors, a strength is negative or no number, or
            `gradient` is neither of the two.
    """
    if gradient not in ("exact", "published"):
        raise UsageError(f"gradient is '{gradient}'; choose exact or published.")
    check_strength("scale", scale)
    check_strength("mean", mean)
    traces, squares = head_moments(w_q, w_k)
    away = (traces - 1).square()
    if gradient == "published":
        # The derivative of t³/3 − t²/2 is the printed (t − 1) t; the difference is exactly zero in value.
        printed = traces.pow(3) / 3 - traces.square() / 2
        away = away.detach() + (printed - printed.detach())
    return scale * squares.sum() + mean * away.sum()


def check_strength(name: str, strength: Strength) -> None:
    """Raise `UsageError` unless it is one finite number of 0 or more, or a function."""
    is_number = isinstance(strength, numbers.Real) and math.isfinite(strength) and strength >= 0
    if not is_number and not callable(strength):
        raise UsageError(f"{name} is {strength!r}: give a number of 0 or more")


def head_moments(
    w_q: Float[Tensor, "*layers heads width head_width"],
    w_k: Float[Tensor, "*layers key_heads width head_width"],
) -> tuple[Float[Tensor, "*layers heads"], Float[Tensor, "*layers heads"]]:
    """Compute tr W_QK and ‖W_QK‖_F² = ⟨W_qᵀ W_q, W_kᵀ W_k⟩ of every query head, as in `locater_penalty`."""
    check_real("w_q", w_q)
    check_real("w_k", w_k)
    fits = w_q.ndim == w_k.ndim >= 3 and w_q.shape[:-3] == w_k.shape[:-3] and w_q.shape[-2:] == w_k.shape[-2:]
    if not fits or w_k.shape[-3] == 0 or w_q.shape[-3] % w_k.shape[-3]:
        raise UsageError(
            f"w_q has shape {tuple(w_q.shape)} and w_k {tuple(w_k.shape)}: give (heads, d, d_h) for both, with the "
            "same leading layers if any, and as many query heads as key heads or a multiple"
        )
    heads, key_heads = w_q.shape[-3], w_k.shape[-3]
    with torch.autocast(w_q.device.type, enabled=False):
        dtype = torch.promote_types(torch.promote_types(w_q.dtype, w_k.dtype), torch.float32)
        # A key head is multiplied out once, and meets its query heads by broadcasting.
        w_q = w_q.to(dtype).unflatten(-3, (key_heads, heads // key_heads))
        w_k = w_k.to(dtype).unsqueeze(-3)
        traces = (w_q * w_k).sum((-2, -1))
        squares, _, _ = _FrobeniusSquared.apply(w_q, w_k)
    return traces.flatten(-2), squares.flatten(-2)


def _add_product(into: Tensor, w: Tensor, gram: Tensor) -> None:
    """Add w @ gram in the layout of the matrix that `into` is a view of; a Gram matrix is its own transpose."""
    if into.stride(-2) == 1:
        into.mT.baddbmm_(gram, w.mT)
    else:
        into.baddbmm_(w, gram)


class _FrobeniusSquared(torch.autograd.Function):
    """‖W_q W_kᵀ‖_F² of w_q (..., G, n, d, d_h) and w_k (..., G, 1, d, d_h), and the two Gram matrices."""

    @staticmethod
    def forward(w_q: Tensor, w_k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gram_q, gram_k = w_q.mT @ w_q, w_k.mT @ w_k
        return (gram_q * gram_k).sum((-2, -1)), gram_q, gram_k

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, gram_q, gram_k = output
        ctx.mark_non_differentiable(gram_q, gram_k)
        ctx.save_for_backward(*inputs, gram_q, gram_k)

    @staticmethod
    def backward(ctx: Any, slope: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        # 2 W_q (W_kᵀ W_k) and 2 W_k (W_qᵀ W_q) take one product each, gradients of the Gram matrices two.
        w_q, w_k, gram_q, gram_k = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted: the Gram matrices depend on the weights
            gram_q, gram_k = w_q.mT @ w_q, w_k.mT @ w_k
        slope = 2 * slope[..., None, None]
        return w_q @ (slope * gram_k), w_k @ (slope * gram_q).sum(dim=-3, keepdim=True)


class Locater:
    """The LocAteR penalty of a model, as a differentiable function of its own parameters.

        locater = Locater(model, scale=1e-3, mean=1e-2)
        loss = model(**batch).loss + locater()

    Args:
        model: a `transformers` model of any family that a survey reads, as it is or inside DDP, DataParallel or
            `torch.compile`; any other module as `open_module` gives it.
        scale: κ₁, on ‖W_QK‖_F². The paper's 100 is the strength for one head of a width of 128.
        mean: κ₂, on (tr W_QK − 1)².
        layers: which attention layers, counted from 0; None: all.

    W_QK is that of relative distance 0 in families with rotary positions, of the weights without biases.

    Raises:
        UsageError: no model of `transformers`; no such layer; a layer whose logits are not a form W_q W_kᵀ of its
            weights (normalised queries and keys, adapters, quantised weights); all of these weights are frozen; κ is
            negative or no number.
    """

    def __init__(
        self,
        model: nn.Module | OpenModel,
        scale: Strength,
        mean: Strength,
        *,
        layers: Iterable[int] | None = None,
    ) -> None:
        check_strength("scale", scale)
        check_strength("mean", mean)
        self._scale, self._mean = scale, mean
        source = training_source(model)
        self._model = inner = source.root
        with evaluation_mode(inner), on_a_few_tokens(source):
            structure = find_structure(source)
            calls = capture_calls(inner, structure, source.small_pass(1))
            self.layers = _selected(layers, structure)
            self._projections = find_projections(inner, structure, calls, self.layers)
        self._together = shards.is_spread(inner)
        self._weights = [shards.GatheredParameters(layer.places) for layer in self._projections]
        self._held = named(inner, [p for layer in self._projections for p in (layer.query, layer.key)])
        self._check_trained()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The matrices that the penalty depends on and that are trained, each once."""
        held: Any = (module._parameters[name] for layer in self._projections for module, name in layer.places)
        return [p for p in {id(p): p for p in held}.values() if p.requires_grad]

    def __call__(self, step: int | None = None) -> Float[Tensor, ""]:
        """Compute the penalty now, in float32 or better, summed over heads and layers; differentiable.

        `step`: how many optimizer steps are done; needed where a strength is a function of it.

        Raises:
            UsageError: a strength is a function and no step was given, or it gives a negative or no number; a module
                that holds the weights was replaced, or all are frozen; DeepSpeed allows only `add_gradient`.
        """
        strengths = self._strengths_at(step)
        if not self._together and all(p.dtype in (torch.float32, torch.float64) for p in self.parameters):
            return _sum([locater_penalty(*layer.factors(), *strengths) for layer in self._projections])
        # A layer at a time: a graph would hold every layer in float32.
        if self._together and not all(weights.are_dtensors for weights in self._weights):
            raise UsageError(
                "DeepSpeed makes the gradients of its weights itself: call add_gradient() between "
                "backward and the optimizer's step"
            )
        value, gradients = self._gathered(strengths)
        return _Attached.apply(value, gradients, *(parameter for parameter, _ in gradients))

    def add_gradient(self, step: int | None = None, factor: float = 1.0) -> Float[Tensor, ""]:
        """Add the penalty's gradient to that of the loss, between `loss.backward()` and the optimizer's step.

        The same as `(loss + locater()).backward()`, whatever shards the model. `factor` is on the gradient: the scale
        of a loss that is scaled for float16, unless it has been taken off again. Returns the penalty; `UsageError` as a
        call, or where DeepSpeed has no gradients now.
        """
        strengths = self._strengths_at(step)
        with torch.no_grad():
            if not self._together and all(map(_is_direct, self._projections)):
                return _sum([self._added(layer, strengths, factor) for layer in self._projections])
            shards.check_deepspeed_has_gradients(self._model)
            value, gradients = self._gathered(strengths)
            for parameter, gradient in gradients:
                shards.add_to_gradient(parameter, gradient * factor)
        return value

    def _added(self, layer: Projections, strengths: tuple[float, float], factor: float) -> Tensor:
        """Add the gradient of one layer's penalty, in half of the time of a graph; returns the penalty."""
        # For W_q it is 2κ₁ W_q (W_kᵀ W_k) + 2κ₂ (tr W_QK − 1) W_k, and the same for W_k with W_q.
        (scale, mean), pair = strengths, (layer.query, layer.key)
        into: list[Tensor | None] = []
        for projection in pair:
            weight = projection.weight
            if weight.requires_grad and weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            gradient = weight.grad if weight.requires_grad else None
            into.append(None if gradient is None else projection.view_of(gradient))
        into_q, into_k = into
        w_q, w_k = (p.view_of(p.weight) for p in pair)
        with torch.autocast(w_q.device.type, enabled=False):
            groups = w_k.shape[0]
            grouped_q, shared_k = w_q.unflatten(0, (groups, -1)), w_k.unsqueeze(1)
            gram_q, gram_k = grouped_q.mT @ grouped_q, w_k.mT @ w_k
            away = (grouped_q * shared_k).sum((-2, -1)) - 1
            value = scale * (gram_q * gram_k.unsqueeze(1)).sum() + mean * away.square().sum()
            slope, strength = (2 * factor * mean * away)[..., None, None], 2 * factor * scale
            if into_q is not None:
                _add_product(into_q, w_q, (strength * gram_k).repeat_interleave(len(w_q) // groups, dim=0))
                into_q.unflatten(0, (groups, -1)).addcmul_(shared_k, slope)
            if into_k is not None:
                _add_product(into_k, w_k, strength * gram_q.sum(dim=1))
                for query, by_head in zip(grouped_q.unbind(1), slope.unbind(1), strict=True):
                    into_k.addcmul_(query, by_head)
            return value

    def _gathered(self, strengths: tuple[float, float]) -> tuple[Tensor, list[shards.GradientShard]]:
        """Compute the penalty and this rank's shards of its gradients, gathering the weights of one layer at a time."""
        values, gradients = [], []
        for layer, weights in zip(self._projections, self._weights, strict=True):
            with weights.gathering(), torch.enable_grad():
                value = locater_penalty(*layer.factors(), *strengths)
                gradients += weights.gradients(value)
            group = shards.head_group(layer.query.module)
            values.append(shards.joined_heads(value.detach().reshape(1), group).sum())
        return _sum(values), gradients

    def table(self) -> pd.DataFrame:
        """Return the table of every penalised head now: layer, head, trace (of W_QK), frobenius_squared."""
        self._check_held()
        tables = []
        for layer, weights in zip(self._projections, self._weights, strict=True):
            with weights.gathering(), torch.no_grad():
                moments = torch.stack(head_moments(*layer.factors()))
            traces, squares = shards.joined_heads(moments, shards.head_group(layer.query.module)).tolist()
            heads = {"layer": layer.layer, "head": range(len(traces))}
            tables.append(pd.DataFrame({**heads, "trace": traces, "frobenius_squared": squares}))
        return pd.concat(tables, ignore_index=True)

    def _check_held(self) -> None:
        check_held(self._model, self._held, "weight", "Locater")
        if not self._together and any(map(shards.is_part, self.parameters)):
            raise UsageError(
                "weights have been spread over ranks since this Locater was made: make it of the model that is sharded"
            )

    def _check_trained(self) -> None:
        if not self.parameters:
            raise UsageError(
                "all query and key weights of these layers are frozen (requires_grad=False): unfreeze those that "
                "LocAteR is to change, or make a new Locater of other layers"
            )

    def _strengths_at(self, step: int | None) -> tuple[float, float]:
        """Check that the penalty can be computed now; returns κ₁ and κ₂ at this step."""
        self._check_held()
        self._check_trained()

        def now(name: str, strength: Strength) -> float:
            if not callable(strength):
                return strength
            if step is None:
                raise UsageError(f"{name} is a function of the step: call the penalty with the steps done")
            check_strength(name, value := strength(step))
            return value

        return now("scale", self._scale), now("mean", self._mean)


def _sum(penalties: list[Tensor]) -> Tensor:
    """Sum the penalties of layers, which may be on several devices."""
    return torch.stack([penalty.to(penalties[0].device) for penalty in penalties]).sum()


class _Attached(torch.autograd.Function):
    """Attaches gradients that are already known to a value, so that backward hands them to the parameters."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[shards.GradientShard], *_: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Any, ...]:
        return None, None, *(gradient * slope for _, gradient in ctx.gradients)


def warm_up(strength: float, steps: int) -> Callable[[int], float]:
    """Return κ as a function of the step: from 0 linearly to `strength` at step `steps`, and constant from there."""
    check_strength("strength", strength)
    if not steps >= 1:
        raise UsageError(f"steps is {steps!r}: a warm-up needs a number of steps, one or more")
    return lambda step: strength * min(step / steps, 1.0)


def named(model: nn.Module, places: Iterable[Projection | LogitRows]) -> dict[str, Any]:
    """Return where weights were found, by their names in the model."""
    name_of = {id(module): name for name, module in model.named_modules()}
    return {f"{name_of[id(place.module)]}.{place.name}": place for place in places}


def check_held(model: nn.Module, held: dict[str, Any], what: str, kind: str) -> None:
    """Raise `UsageError` unless a model still has the weights of these names at the places where they were found."""
    # By name, since a replacement may keep the old module inside, as an adapter does.
    for name, place in held.items():
        module = model.get_submodule(name.rpartition(".")[0])
        if module is not place.module or place.name not in module._parameters:
            raise UsageError(
                f"{name} is no longer the {what} that this {kind} was made for (an adapter, or quantised?): make "
                f"a new {kind} after the model is changed"
            )


def _is_direct(layer: Projections) -> bool:
    """Tell whether W_q and W_k are views of matrices in float32 or float64, each with a gradient of its own."""
    return all(
        projection.is_view
        and projection.weight.dtype in (torch.float32, torch.float64)
        and projection.weight.dtype == layer.query.weight.dtype
        and not shards.is_of_deepspeed(projection.weight)
        for projection in (layer.query, layer.key)
    )


def _selected(layers: Iterable[int] | None, structure: Structure) -> list[int]:
    """Return the layers asked for, or all that attend; of those that share their matrices (ALBERT), the first."""
    first = {structure.attention_at(layer): layer for layer in reversed(structure.attending)}
    selected = sorted(first.values()) if layers is None else list(layers)
    if not selected or len(set(selected)) < len(selected):
        raise UsageError(f"layers is {selected}: name one layer or more, each once")
    for layer in selected:
        if layer not in structure.attending:
            raise UsageError(
                f"layer {layer} does not exist or does not attend: choose of {structure.attending}"
            )
    return selected
