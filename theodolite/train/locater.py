"""LocAteR on a model of `transformers`: for a loop of one's own (`Locater`) and for the Trainer (`LocaterCallback`).

The penalty itself is in `penalty.py`, and where a model keeps its factors is found by `models/projections.py`.
Nothing here computes either. No weight is changed: the optimizer does that.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from theodolite.errors import UsageError
from theodolite.models.calls import capture_calls
from theodolite.models.named_weights import NamedWeight, NamedWeights, find_named_weights
from theodolite.models.opened import OpenModel
from theodolite.models.projections import Projection, Projections, find_projections
from theodolite.models.structure import Structure
from theodolite.models.structure_search import find_structure
from theodolite.models.training_model import evaluation_mode, training_source
from theodolite.train.penalty import (
    Gradient,
    check_gradient,
    check_strength,
    head_moments,
    penalty_of_moments,
)
from theodolite.train.trackers import TrackedCallback

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
        qkv: where a module's weights are not found (tensors of three dimensions, weights that are computed from
            others), their names inside each attention module: `["q.weight", "k.weight"]`, or of one that holds both.
            They are verified against the queries and keys that the module attends with.

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
        qkv: str | Sequence[str] | None = None,
    ) -> None:
        check_gradient(gradient)
        self._strengths = {"scale": scale, "mean": mean}
        self._gradient: Gradient = gradient
        for name, strength in self._strengths.items():
            if not callable(strength):
                check_strength(name, strength)
        asked = _listed(layers)
        source = training_source(model)
        inner = source.root
        with evaluation_mode(inner):
            structure = find_structure(source)
            calls = capture_calls(inner, structure, source.small_pass(1))
            self.layers = _selected(asked, structure)
            self._projections: Sequence[Projections | NamedWeights] = (
                find_projections(inner, structure, calls, self.layers)
                if qkv is None
                else find_named_weights(inner, structure, calls, self.layers, qkv)
            )
        name_of = {id(module): name for name, module in inner.named_modules()}
        self._model = inner
        self._held = {
            name_of[id(place.module)] + f".{place.name}": place
            for layer in self._projections
            for place in (layer.query, layer.key)
        }
        self._check_trained()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The matrices that the penalty depends on and that are trained, each once."""
        held = (parameter for layer in self._projections for parameter in layer.parameters)
        return [p for p in {id(p): p for p in held}.values() if p.requires_grad]

    def __call__(self, step: int | None = None) -> Float[Tensor, ""]:
        """The penalty now, in float32 or better, summed over heads and layers; `backward` reaches the parameters.

        Args:
            step: how many optimizer steps are done; needed where a strength is a function of it.

        Raises:
            UsageError: a strength is a function and no step was given, or it gives a negative or no number; a module
                that holds the weights was replaced after this was made, or all the weights have been frozen.
        """
        self._check_held()
        self._check_trained()
        scale, mean = (self._strength(name, step) for name in ("scale", "mean"))
        moments = [head_moments(*layer.factors()) for layer in self._projections]
        device = moments[0][0].device  # layers may be spread over devices
        traces, squares = (torch.stack([m.to(device) for m in part]) for part in zip(*moments, strict=True))
        return penalty_of_moments(traces, squares, scale, mean, self._gradient)

    def table(self) -> pd.DataFrame:
        """tr W_QK and ‖W_QK‖_F² of every penalised head now: layer, head, trace, frobenius_squared."""
        self._check_held()
        rows: list[dict[str, float]] = []
        with torch.no_grad():
            for layer in self._projections:
                pairs = zip(*(moment.tolist() for moment in head_moments(*layer.factors())), strict=True)
                rows += [
                    {"layer": layer.layer, "head": head, "trace": trace, "frobenius_squared": square}
                    for head, (trace, square) in enumerate(pairs)
                ]
        return pd.DataFrame(rows)

    def _check_held(self) -> None:
        """By name, a few look-ups a layer: a replacement may keep the old module inside, as an adapter does."""
        for name, place in self._held.items():
            if not _is_held(self._model, name, place):
                raise UsageError(
                    f"{name} is no longer the weight that this Locater was made for (an adapter, or quantised?): make "
                    "a new Locater after the model is changed"
                )

    def _check_trained(self) -> None:
        if not self.parameters:
            raise UsageError(
                "all query and key weights of these layers are frozen (requires_grad=False): unfreeze those that "
                "LocAteR is to change, or make a new Locater of other layers"
            )

    def _strength(self, name: str, step: int | None) -> float:
        strength = self._strengths[name]
        if not callable(strength):
            return strength
        if step is None:
            raise UsageError(f"{name} is a function of the step: call the penalty with the steps done so far")
        now = strength(step)
        check_strength(name, now)
        return now


class LocaterCallback(TrackedCallback):
    """LocAteR in the Trainer: `LocaterCallback(scale=1e-3, mean=1e-2).attach(trainer)` before `trainer.train()`.

    At the beginning of every optimizer step the gradient of the penalty is put where the micro-batches then add
    theirs. So it counts once a step, whatever the accumulation, the number of processes and how the loss is
    averaged over tokens; it is clipped together with the loss's gradient, as that of a sum would be, and goes
    through the loss scaling of float16. The loss that is logged stays that of the task; the penalty, with its
    strengths, is logged beside it as `locater`: in `state.log_history`, on the terminal and in the trackers (not in
    these if it is given to the Trainer as one of its `callbacks`, not by `attach`).

    Arguments as in `Locater`; a function κ gets `state.global_step`. `locater` holds the penalty from the
    beginning of training on.

    Raises, when training begins:
        UsageError: as `Locater` does, or DeepSpeed or FSDP shard the model.
    """

    def __init__(
        self,
        scale: Strength,
        mean: Strength,
        *,
        layers: Iterable[int] | None = None,
        gradient: Gradient = "exact",
    ) -> None:
        check_gradient(gradient)
        for name, strength in (("scale", scale), ("mean", mean)):
            if not callable(strength):
                check_strength(name, strength)
        self.locater: Locater | None = None
        self._scale, self._mean = scale, mean
        self._layers = _listed(layers)
        self._gradient: Gradient = gradient
        self._penalty: Tensor | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Find the weights.

        Warns:
            TrackerWarning: there are trackers, and the callback was not attached.
        """
        if args.deepspeed or args.fsdp:
            raise UsageError(
                "LocAteR needs whole query and key weights, and gradients that are the parameters' own: train "
                "with DDP, without DeepSpeed and FSDP"
            )
        self._warn_if_unattached(args, state)
        self.locater = Locater(
            kwargs["model"], self._scale, self._mean, layers=self._layers, gradient=self._gradient
        )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Put the penalty's gradient where those of the micro-batches will be added."""
        assert self.locater is not None  # on_train_begin comes first
        penalty = self.locater(state.global_step)
        self._penalty = penalty.detach()
        scaler = getattr(kwargs["optimizer"], "scaler", None)  # of float16; accelerate keeps it there
        parameters = self.locater.parameters
        # Not backward(): DDP's hooks would take it for a part of the first micro-batch.
        gradients = torch.autograd.grad(penalty if scaler is None else scaler.scale(penalty), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add the penalty of the last step to what is logged of the training loss, for the callbacks that follow."""
        logs = kwargs.get("logs") or {}
        if self._penalty is not None and "loss" in logs:
            logs["locater"] = state.log_history[-1]["locater"] = self._penalty.item()


def warm_up(strength: float, steps: int) -> Callable[[int], float]:
    """κ that grows linearly from 0 at step 0 to `strength` at step `steps`, and stays there.

    Raises:
        UsageError: the strength is negative or no number, or there are no steps.
    """
    check_strength("strength", strength)
    if steps < 1:
        raise UsageError(f"steps is {steps}: a warm-up needs one or more")
    return lambda step: strength * min(step / steps, 1.0)


def _is_held(model: nn.Module, name: str, place: Projection | NamedWeight) -> bool:
    try:
        return model.get_submodule(name.rpartition(".")[0]) is place.module and place.is_there
    except AttributeError:  # there is nothing of that name any more
        return False


def _listed(layers: Iterable[int] | None) -> list[int] | None:
    if layers is None:
        return None
    try:
        layers = layers if isinstance(layers, str) else list(layers)
        if any(isinstance(layer, bool) for layer in layers):  # a mask, whose 0 and 1 would pass for layers
            raise TypeError
        return [operator.index(layer) for layer in layers]
    except TypeError as error:
        raise UsageError(f"layers is {layers!r}: give a list of whole numbers, as [0, 1]") from error


def _selected(layers: list[int] | None, structure: Structure) -> list[int]:
    """The layers asked for, or all that attend; of those that share their matrices (ALBERT), the first."""
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
