"""Inline looks: measure the attention of the micro-batches that a model is trained on, as they run.

Armed before a step, it measures the forward passes of that step, which compute the very numbers that they compute
without. When looks are due, and what is done with them, is not known here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from theodolite.accumulate.attention import Tokens
from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import TheodoliteError, UsageError
from theodolite.models import OpenModel
from theodolite.models.guard import known_state
from theodolite.models.hooks import Hooks, hooked, observing
from theodolite.models.training.training_model import evaluation_mode
from theodolite.train.geometry import (
    LEAST_LENGTH,
    Geometry,
    LookSums,
    geometry_of,
    looking_ranks,
    monitored_source,
    opened_for_looks,
    spectra_of,
)

INSTEAD = "give the monitor token ids in place of inline=True"

TOLERANCE = 1e-2
"""How far entropies (nats) and logits of a few tokens may be from those of a look of its own, in bfloat16 too."""


class InlineReader:
    """Measures the forward passes of a training step, without running the model itself.

    Args:
        model: as `GeometryReader` takes it; not compiled.
        over_ranks: the micro-batches of all processes of `torch.distributed` are one look.

    Attributes:
        given_up: steps that were to be a look, and of which some process saw only padded contexts.

    Raises:
        UsageError: the model is of no supported family, an encoder-decoder, compiled, or attends in a way that cannot
            be overheard.
        WorkError: as `GeometryReader`.
    """

    def __init__(self, model: nn.Module | OpenModel, over_ranks: bool = False) -> None:
        source = monitored_source(model)
        if getattr(getattr(source.root, "config", None), "is_encoder_decoder", False):
            raise UsageError(
                f"{source.name} is an encoder-decoder, which reads two texts, and a look is of one: {INSTEAD}"
            )
        if runs_compiled(model if isinstance(model, nn.Module) else source.root):
            raise UsageError(
                f"{source.name} is compiled, and what runs compiled cannot be overheard: {INSTEAD}"
            )
        self.ranks = looking_ranks(source, over_ranks)
        with evaluation_mode(source.root):
            self.model = opened_for_looks(source)
            if self.model.structure.layout.is_row:
                raise UsageError(
                    f"{source.name} reads its contexts in one row, which is not known of training: {INSTEAD}"
                )
            _verify(self.model)
        self.given_up = 0
        self._armed: tuple[int, _InlinePasses, dict[str, list[Any]] | None, float] | None = None

    @property
    def armed(self) -> bool:
        """Whether a look is waited for."""
        return self._armed is not None

    def arm(self, step: int, spectra: bool) -> None:
        """Measure the passes of `step` from now on; with spectra, read the weights."""
        started = time.perf_counter()
        of_weights = None
        if spectra:
            with evaluation_mode(self.model.root):
                of_weights = spectra_of(self.model, self.ranks)
        passes = _InlinePasses(self.model, spectra, self.model.root, of_training=True)
        self._armed = step, passes, of_weights, time.perf_counter() - started

    def take(self, step: int) -> Geometry | None:
        """Return the look at the armed step once it is done, after `step` optimizer steps; else None.

        Its contexts are those of all its micro-batches that are as long as the first; largest logits, of those of
        other lengths too. Where all contexts were padded it is given up.

        Raises:
            UsageError: training passes cannot be looked at, or those of two processes not together, or there were none.
            WorkError: hidden states are NaN or infinite; the layer is named.
        """
        if self._armed is None or step <= self._armed[0]:
            return None
        since, passes, spectra, seconds = self._armed
        passes.close()
        self._armed = None
        measured = passes.measured
        own = {
            "waiting": torch.tensor(measured is None and passes.error is None),
            "passes": torch.tensor(passes.passes),
            "length": torch.tensor(measured.length if measured else 0),
        }
        totals = self.ranks.totals(own)  # over all processes
        self.ranks.raise_any(passes.error)
        if totals["waiting"]:
            if not totals["passes"]:
                raise UsageError(
                    f"no forward pass of {self.model.source.name} in training was heard since step {since}: call the "
                    f"monitor before the pass, and train without torch.compile; or {INSTEAD}"
                )
            self.given_up += 1
            return None
        assert measured is not None
        if totals["length"] != self.ranks.world * measured.length:
            raise UsageError(
                f"the micro-batches of {self.ranks.world} processes have contexts of different lengths, and are no one "
                f"look: pad them to one length, or {INSTEAD}"
            )
        started = time.perf_counter()
        with known_state():
            sums = measured.sums.totals(self.ranks, counts=self.ranks.leads)
        seconds += measured.seconds
        return self.ranks.from_first(
            lambda: geometry_of(self.model, since, sums, spectra, seconds + time.perf_counter() - started)
        )

    def close(self) -> None:
        """Give up the armed look, if there is one, and remove its hooks."""
        if self._armed is not None:
            self._armed[1].close()
            self._armed = None


def runs_compiled(model: nn.Module) -> bool:
    """Whether a part of a model was given to `torch.compile`."""
    return any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in model.modules()
    )


def _verify(model: OpenModel) -> None:
    """Raise `UsageError` unless an inline look at a few tokens measures what a look of its own does."""
    source = model.source
    ids = source.sample(LEAST_LENGTH)
    expected = LookSums(model, Tokens.of(ids, model.device), spectra=False)
    with hooked(model, expected):
        source.run(ids)
    passes = _InlinePasses(model, False, source.first_own, of_training=False)
    try:
        source.run(ids)
    finally:
        passes.close()
    measured, error = passes.measured, passes.error
    if measured is None:
        error = error or UsageError("its forward is not what is called")
    else:
        ours, theirs = (sums.attention_statistics.state() for sums in (measured.sums, expected))
        for name in ("entropy", "largest_logit"):
            if not torch.allclose(ours[name], theirs[name], rtol=TOLERANCE, atol=TOLERANCE):
                error = UsageError("what it hands to PyTorch's functions is not what it attends by")
    if error is not None:
        raise UsageError(f"the attention of {source.name} cannot be overheard: {error}; {INSTEAD}")


class _InlinePass(Hooks):
    """Measures one pass, its contexts without padding, up to the first error, which is kept."""

    def __init__(self, model: OpenModel, ids: Tensor, whole: Tensor, spectra: bool) -> None:
        # All of them as a view: nothing is copied.
        self._rows: Any = slice(None) if bool(whole.all()) else whole
        self.length = ids.shape[1]
        self.sums = LookSums(model, Tokens.of(ids[self._rows], model.device), spectra)
        self.error: TheodoliteError | None = None
        self.seconds = 0.0

    def stream(self, layer: int, hidden: Tensor) -> None:
        self._measure(lambda: self.sums.stream(layer, hidden[self._rows]))

    def attention_input(self, layer: int, hidden: Tensor) -> None:
        self._measure(lambda: self.sums.attention_input(layer, hidden[self._rows]))

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        self._measure(lambda: self.sums.attention(layer, inputs.of_contexts(self._rows)))
        # Of the right shape: nobody uses it.
        return inputs.value.new_zeros(()).expand(
            inputs.query.shape[0], inputs.query.shape[2], inputs.query.shape[1], inputs.value.shape[-1]
        )

    def fail(self, error: TheodoliteError) -> None:
        self.error = self.error or UsageError("not every layer calls PyTorch's functions for it")

    def _measure(self, measure: Callable[[], object]) -> None:
        if self.error is None:
            started = time.perf_counter()
            try:
                with known_state():
                    measure()
            except TheodoliteError as error:
                self.error = error
            self.seconds += time.perf_counter() - started


class _InlinePasses:
    """Measures every pass that can be looked at, each from the call of `entry` to its end.

    Attributes:
        measured: the first pass that has ended, with the sums of those since.
        error: why what was read cannot be looked at; no further pass is measured.
        passes: how many have begun.
    """

    def __init__(self, model: OpenModel, spectra: bool, entry: nn.Module, *, of_training: bool) -> None:
        self.measured: _InlinePass | None = None
        self.error: TheodoliteError | None = None
        self.passes = 0
        self._model, self._spectra, self._of_training = model, spectra, of_training
        self._pass = ExitStack()
        self._handle = entry.register_forward_pre_hook(self._begin, with_kwargs=True)

    def close(self) -> None:
        """Remove the hooks."""
        self._handle.remove()
        self._pass.close()

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._of_training and not (module.training and torch.is_grad_enabled()):
            return  # an evaluation between two steps
        self._pass.close()  # one before it was broken off
        self.passes += 1
        try:
            ids, whole = _micro_batch(args, kwargs)
        except UsageError as error:
            self.error = error
            self.close()
            return
        if not whole.any():
            return
        measured = _InlinePass(self._model, ids, whole, self._spectra)

        def end(*_: Any) -> None:
            self._pass.close()
            self._add(measured)

        # The last of the hooks, for those of the pass to have been called.
        self._pass.enter_context(observing(self._model, measured, module))
        self._pass.callback(module.register_forward_hook(end).remove)

    def _add(self, measured: _InlinePass) -> None:
        if measured.error is not None:
            self.error = measured.error
            self.close()
        elif self.measured is None:
            self.measured = measured
        else:
            started = time.perf_counter()
            self.measured.sums.merge(measured.sums, largest_only=measured.length != self.measured.length)
            self.measured.seconds += measured.seconds + time.perf_counter() - started


def _micro_batch(args: Any, kwargs: Any) -> tuple[Int[Tensor, "contexts positions"], Tensor]:
    """Return the token ids that a model is called with, and which contexts are without padding.

    Raises:
        UsageError: there are none, or they are packed, or too short.
    """
    ids = kwargs.get("input_ids", args[0] if args else next(iter(kwargs.values()), None))
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype.is_floating_point:
        raise UsageError(f"training calls the model without token ids (contexts, positions): {INSTEAD}")
    if ids.shape[1] < LEAST_LENGTH:
        raise UsageError(
            f"training reads contexts of {ids.shape[1]} tokens, and a look needs {LEAST_LENGTH}: {INSTEAD}"
        )
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    packed = isinstance(positions, Tensor) and bool((positions.diff(dim=-1) != 1).any())
    if packed or (mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2)):
        raise UsageError(f"training packs several texts into a context, which is no look: {INSTEAD}")
    whole = ids.new_ones(len(ids), dtype=torch.bool) if mask is None else mask.bool().all(dim=1)
    return ids.detach(), whole
