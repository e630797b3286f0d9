"""LocAteR on a model, for a loop of one's own; `callbacks.py` puts it into the Trainer.

The penalty itself is in `penalty.py`, and where a model keeps its factors is found by `models/weights/weight_map.py`.
Nothing here computes either. No weight is changed: the optimizer does that.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from theodolite.errors import UsageError
from theodolite.models.calls import capture_calls
from theodolite.models.open import on_a_few_tokens
from theodolite.models.opened import OpenModel
from theodolite.models.structure import Structure
from theodolite.models.structure_search import find_structure
from theodolite.models.training.shards import (
    GatheredParameters,
    GradientShard,
    check_deepspeed_has_gradients,
    head_group,
    is_of_deepspeed,
    is_part,
    is_spread,
    joined_heads,
)
from theodolite.models.training.training_model import evaluation_mode, training_source
from theodolite.models.weights.weight_map import LogitRows, Projection, Projections, find_projections
from theodolite.train.penalty import (
    Gradient,
    add_penalty_gradient,
    check_gradient,
    check_strength,
    head_moments,
    locater_penalty,
    whole_step,
)

Strength = float | Callable[[int], float]
"""κ: a number, or a function of how many optimizer steps are done."""


class Locater:
    """The LocAteR penalty of a model, as a differentiable function of its own parameters.

        locater = Locater(model, scale=1e-3, mean=1e-2)
        loss = model(**batch).loss + locater()

    Args:
        model: a `transformers` model of any family that a survey reads, as it is or inside DDP, DataParallel or
            `torch.compile`; any other module as `open_module` gives it. Its weights may be trained, loaded and moved to
            another device afterwards; where modules are replaced (by adapters or quantised ones), a call says so.
        scale: κ₁, on ‖W_QK‖_F². The paper's 100 is the strength for one head of a width of 128.
        mean: κ₂, on (tr W_QK − 1)².
        layers: which attention layers, counted from 0; None: all.
        gradient: "exact" or "published", as in `locater_penalty`.

    W_QK is that of relative distance 0 in families with rotary positions, of the weights without biases.

    Raises:
        UsageError: no model of `transformers`, or sharded over ranks; no such layer; a layer whose logits are not
            a form W_q W_kᵀ of its weights (normalised queries and keys, adapters, quantised weights); all of
            these weights are frozen; κ is negative or no number; `layers` are no whole numbers.
    """

    def __init__(
        self,
        model: nn.Module | OpenModel,
        scale: Strength,
        mean: Strength,
        *,
        layers: Iterable[int] | None = None,
        gradient: Gradient = "exact",
    ) -> None:
        options = checked_options(scale, mean, layers, gradient)
        self._strengths = {"scale": scale, "mean": mean}
        self._gradient: Gradient = gradient
        source = training_source(model)
        self._model = inner = source.root
        with evaluation_mode(inner), on_a_few_tokens(source):
            structure = find_structure(source)
            calls = capture_calls(inner, structure, source.small_pass(1))
            self.layers = _selected(options["layers"], structure)
            self._projections = find_projections(inner, structure, calls, self.layers)
        self._together = is_spread(inner)
        self._weights = [GatheredParameters(layer.places) for layer in self._projections]
        self._held = named(inner, [p for layer in self._projections for p in (layer.query, layer.key)])
        self._check_trained()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The matrices that the penalty depends on and that are trained, each once."""
        held: Any = (module._parameters[name] for layer in self._projections for module, name in layer.places)
        return [p for p in {id(p): p for p in held}.values() if p.requires_grad]

    def __call__(self, step: int | None = None) -> Float[Tensor, ""]:
        """Compute the penalty now, in float32 or better, summed over heads and layers; differentiable.

        Args:
            step: how many optimizer steps are done; needed where a strength is a function of it.

        Raises:
            UsageError: a strength is a function and no step was given, or it gives a negative or no number; a module
                that holds the weights was replaced after this was made, or all the weights have been frozen; the
                gradients are DeepSpeed's to make, which leaves `add_gradient`.
        """
        strengths = self._strengths_at(step)
        if not self._together and all(p.dtype in (torch.float32, torch.float64) for p in self.parameters):
            return _sum([self._penalty(layer, strengths) for layer in self._projections])
        # A layer at a time: a graph would hold every layer in float32.
        if self._together and not all(weights.are_dtensors for weights in self._weights):
            raise UsageError(
                "DeepSpeed makes the gradients of its weights itself: call add_gradient() between "
                "backward and the optimizer's step"
            )
        value, gradients = self._gathered(strengths)
        return _Attached.apply(value, gradients, *(shard.parameter for shard in gradients))

    def add_gradient(self, step: int | None = None, factor: float = 1.0) -> Float[Tensor, ""]:
        """Add the penalty's gradient to that of the loss, between `loss.backward()` and the optimizer's step.

        The same as `(loss + locater()).backward()`, whatever shards the model: each rank adds its own part, and weights
        are gathered a layer at a time.

        Args:
            step: as in a call.
            factor: on the gradient: the scale of a loss that is scaled for float16, unless it has been taken off again.

        Returns: the penalty.

        Raises:
            UsageError: as a call does, or the factor is negative or no number, or DeepSpeed has no gradients now.
        """
        strengths = self._strengths_at(step)
        check_strength("factor", factor)
        with torch.no_grad():
            if not self._together and all(map(_is_direct, self._projections)):
                return _sum([self._added(layer, strengths, factor) for layer in self._projections])
            check_deepspeed_has_gradients(self._model)
            value, gradients = self._gathered(strengths)
            for shard in gradients:
                shard.add(factor)
        return value

    def _added(self, layer: Projections, strengths: tuple[float, float], factor: float) -> Tensor:
        """Add the gradient of one layer's penalty; returns the penalty."""
        into: list[Tensor | None] = [None, None]
        for place, projection in enumerate((layer.query, layer.key)):
            weight = projection.weight
            if weight.requires_grad:
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                into[place] = projection.view_of(weight.grad)
        w_q, w_k = (p.view_of(p.weight) for p in (layer.query, layer.key))
        return add_penalty_gradient(w_q, w_k, into[0], into[1], *strengths, self._gradient, factor)

    def _gathered(self, strengths: tuple[float, float]) -> tuple[Tensor, list[GradientShard]]:
        """Compute the penalty and this rank's shards of its gradients, gathering the weights of one layer at a time."""
        values, gradients = [], []
        for layer, weights in zip(self._projections, self._weights, strict=True):
            with weights.gathering(), torch.enable_grad():
                value = self._penalty(layer, strengths)
                gradients += weights.gradients(value)
            values.append(joined_heads(value.detach().reshape(1), head_group(layer.query.module)).sum())
        return _sum(values), gradients

    def _penalty(self, layer: Projections, strengths: tuple[float, float]) -> Tensor:
        return locater_penalty(*layer.factors(), *strengths, gradient=self._gradient)

    def table(self) -> pd.DataFrame:
        """Return the table of every penalised head now: layer, head, trace (of W_QK), frobenius_squared."""
        self._check_held()
        rows: list[dict[str, float]] = []
        for layer, weights in zip(self._projections, self._weights, strict=True):
            with weights.gathering(), torch.no_grad():
                moments = torch.stack(head_moments(*layer.factors()))
            traces, squares = joined_heads(moments, head_group(layer.query.module)).tolist()
            rows += [
                {"layer": layer.layer, "head": head, "trace": trace, "frobenius_squared": square}
                for head, (trace, square) in enumerate(zip(traces, squares, strict=True))
            ]
        return pd.DataFrame(rows)

    def _check_held(self) -> None:
        check_held(self._model, self._held, "weight", "Locater")
        if not self._together and any(map(is_part, self.parameters)):
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
        now: dict[str, float] = {}
        for name, strength in self._strengths.items():
            if callable(strength):
                if step is None:
                    raise UsageError(
                        f"{name} is a function of the step: call the penalty with the steps done so far"
                    )
                strength = strength(whole_step(step))
                check_strength(name, strength)
            now[name] = strength
        return now["scale"], now["mean"]


def _sum(penalties: list[Tensor]) -> Tensor:
    """Sum the penalties of layers, which may be on several devices."""
    return torch.stack([penalty.to(penalties[0].device) for penalty in penalties]).sum()


class _Attached(torch.autograd.Function):
    """Attaches gradients that are already known to a value, so that backward hands them to the parameters."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[GradientShard], *_: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Any, ...]:
        return None, None, *(shard.gradient * slope for shard in ctx.gradients)


def warm_up(strength: float, steps: int) -> Callable[[int], float]:
    """Return κ as a function of the step: from 0 linearly to `strength` at step `steps`, and constant from there.

    Raises:
        UsageError: the strength is negative or no number, or there are no steps.
    """
    check_strength("strength", strength)
    if isinstance(steps, bool) or not isinstance(steps, numbers.Real) or not steps >= 1:
        raise UsageError(f"steps is {steps!r}: a warm-up needs a number of steps, one or more")
    return lambda step: strength * min(step / steps, 1.0)


def named(model: nn.Module, places: Iterable[Projection | LogitRows]) -> dict[str, Any]:
    """Return where weights were found, by their names in the model."""
    name_of = {id(module): name for name, module in model.named_modules()}
    return {f"{name_of[id(place.module)]}.{place.name}": place for place in places}


def check_held(model: nn.Module, held: dict[str, Any], what: str, kind: str) -> None:
    """Raise `UsageError` unless a model still has the weights of these names at the places where they were found.

    By name, since a replacement may keep the old module inside, as an adapter does.
    """
    for name, place in held.items():
        try:
            there = model.get_submodule(name.rpartition(".")[0]) is place.module and place.is_there
        except AttributeError:  # there is nothing of that name any more
            there = False
        if not there:
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
        and not is_of_deepspeed(projection.weight)
        for projection in (layer.query, layer.key)
    )


def checked_options(
    scale: Strength, mean: Strength, layers: Iterable[int] | None, gradient: Gradient
) -> dict[str, Any]:
    """Check the options of a `Locater`, whatever the model; returns them, the layers as a list."""
    check_gradient(gradient)
    for name, strength in (("scale", scale), ("mean", mean)):
        if not callable(strength):
            check_strength(name, strength)
    try:
        listed = None if layers is None else list(layers)
        listed = listed and [operator.index(layer) for layer in listed]
    except TypeError as error:
        raise UsageError(f"layers is {layers!r}: give a list of whole numbers, as [0, 1]") from error
    return {"scale": scale, "mean": mean, "layers": listed, "gradient": gradient}


def _selected(layers: list[int] | None, structure: Structure) -> list[int]:
    """Return the layers asked for, or all that attend; of those that share their matrices (ALBERT), the first."""
    count = len(structure.attention)
    first = {structure.attention_at(layer): layer for layer in reversed(structure.attending)}
    selected = sorted(first.values()) if layers is None else layers
    wrong = [layer for layer in selected if not 0 <= layer < count]
    if wrong:
        raise UsageError(f"layer {wrong[0]} does not exist: this model has layers 0 to {count - 1}")
    if not selected or len(set(selected)) < len(selected):
        raise UsageError(f"layers is {selected}: name one layer or more, each once")
    without = [layer for layer in selected if structure.attention[layer] is None]
    if without:
        raise UsageError(f"layer {without[0]} does not attend: leave it out of layers")
    return selected
