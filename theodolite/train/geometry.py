"""One measurement (a look) of a model in training: its heads and residual stream, by the accumulators of a survey.

`GeometryReader` reads a fixed batch (the monitor batch) in evaluation mode, and leaves the model as it was: modes,
weights, gradients, hooks, random numbers. `InlineReader` measures the passes of a training step as they run, which
compute the very numbers that they compute without. What is due or alarming is not decided here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor, nn

from theodolite.accumulate.attention import AttentionStatistics, Tokens
from theodolite.accumulate.means import Means, Sample
from theodolite.accumulate.outliers import OutlierCounts
from theodolite.accumulate.sums import LayerSums, State, include, joined, part_of
from theodolite.attention.inputs import MASKED, AttentionInputs, softmax
from theodolite.attention.piecewise import empirical_propagation
from theodolite.corpus.cutting import contexts_of_rows, whole_ids
from theodolite.errors import TheodoliteError, UsageError, WorkError, first_line
from theodolite.measure.geometry import stream_columns
from theodolite.measure.heads import head_columns, heads_that_are, with_errors
from theodolite.measure.localization import MOMENTS, entropy_bound, layer_moments, logit_norm
from theodolite.models import OpenModel
from theodolite.models.guard import known_state
from theodolite.models.hooks import Hooks, hooked, observing
from theodolite.models.open import verified_parts
from theodolite.models.source import Source
from theodolite.models.training.shards import is_spread, parallel_group
from theodolite.models.training.training_model import autocast_dtype, evaluation_mode, training_source
from theodolite.theory.regimes import UNDEFINED, regime
from theodolite.train.ranks import Ranks

QUERIES = 8
"""Queries of a context, evenly spaced, whose own propagation is measured; the last query is one of them."""

LEAST_LENGTH = QUERIES
"""Tokens that a context must have at least, for its queries to be distinct."""

SPECTRA = (
    *(name for name in MOMENTS if name not in ("mean", "variance")),
    *("spectral_norm", "regime", "entropy_bound"),
)
"""Columns of the heads table that only a look with `spectra` has."""

RESIDUAL = (
    *("contexts", "readers", "norm_sum", "norm_first_sum", "cosine_sum", "collapse_sum"),
    *("outlier", "massive", "massive_first"),
)
"""Sums over the contexts of one layer of the residual stream; those by position are as large as a batch of its own."""

INSTEAD = "give the monitor token ids in place of inline=True"

TOLERANCE = 1e-2
"""How far entropies (nats) and logits of an inline look may be from those of one of its own, in bfloat16 too."""


@dataclass(frozen=True)
class Geometry:
    """The tables of one look: a row per head, a row per residual layer.

    Attributes:
        step: optimizer steps done.
        heads: one row a head: layer, head; entropy (nats, mean over queries and contexts) and entropy_share (over
            its maximum, that of a uniform row); propagation (mean ρ of the last query) and propagation_queries
            (of `QUERIES` queries t with T := t); at_distance (the most mean attention that any one distance gets);
            sink_first, sink_later, sink_learned, previous_token, same_token as in a survey; largest_logit, the maximum
            over contexts, queries and the keys that they see of the logit whose softmax is taken: after scaling,
            soft-capping and biases on it, without a learned sink's (QK-Clip's S, Kimi K2); log_sum_exp, the mean over
            contexts and queries of ln Σ exp of these logits, a learned sink's with them (z-loss is its square's mean).
            With spectra, of W_QK at relative distance 0: `SPECTRA`.
        layers: one row a residual layer, 0 being the input of the first block: norm, norm_first, rank_collapse,
            massive_activations, massive_activations_first, outlier_dimensions, as in a survey; norm_growth, the norm
            over that of the layer before (NaN at layer 0).
        seconds: wall time that the look took.
    """

    step: int
    heads: pd.DataFrame
    layers: pd.DataFrame
    seconds: float


class GeometryReader:
    """Measures a model in training on a fixed batch of tokens.

    Args:
        model: of any family that a survey reads; may be wrapped by DDP, DataParallel, `torch.compile` or PEFT. Any
            other module as `open_module` gives it.
        ids: token ids (contexts, positions).
        attention_mask, position_ids: of padded or packed ids, as `Corpus.from_ids` takes them: each context is read by
            itself, those of fewer than `LEAST_LENGTH` tokens are left out.
        over_ranks: all processes of `torch.distributed` share the contexts, look together, and see the same. A
            model whose weights are spread over them cannot be looked at otherwise.
        look_dtype: what autocast rounds products to in a look, so that it sees what training sees; None: as training
            does (autocast where the look is called, or accelerate's mixed precision, the Trainer's too); torch.float32:
            nothing is rounded beyond the weights' own dtype.

    Raises:
        UsageError: the model is of no supported family, or the ids do not fit it.
        WorkError: its attention, computed from its queries, keys and values, is not its own, or is quantised in a way
            that cannot be read.
    """

    def __init__(
        self,
        model: nn.Module | OpenModel,
        ids: Int[Tensor, "contexts positions"],
        over_ranks: bool = False,
        look_dtype: torch.dtype | None = None,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> None:
        if look_dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise UsageError(f"look_dtype is {look_dtype}: give torch.bfloat16, float16 or float32")
        self._look_dtype = look_dtype
        source, self.ranks = _looked_at(model, over_ranks)
        batches = self.ranks.from_first(lambda: _by_length(ids, attention_mask, position_ids))
        smallest, largest = min(int(batch.min()) for batch in batches), max(int(b.max()) for b in batches)
        if smallest < 0 or largest >= (source.vocabulary or 0):
            raise UsageError(
                f"the monitor batch holds ids from {smallest} to {largest}, the model has {source.vocabulary} tokens: "
                "use the model's own tokenizer, and an attention_mask for padding"
            )
        self._longest = batches[0].shape[1]
        with evaluation_mode(source.root):
            self.model = _opened(source)
            if not self.model.has_positions(self._longest):
                raise UsageError(
                    f"the monitor batch's contexts have {self._longest} tokens, the model has positions for "
                    f"{self.model.longest}: give shorter ones"
                )
            self._batches: list[tuple[Tokens, bool]] = []  # and whether it counts here
            for batch in batches:
                own = self.ranks.share(batch)
                # Those without a context of their own read another's, for the shapes.
                tokens = Tokens.of(own if len(own) else batch[:1], self.model.device)
                self._batches.append((tokens, len(own) > 0 and self.ranks.leads))

    def look(self, step: int = 0, spectra: bool = True) -> Geometry:
        """Measure now; with `spectra` also every head's weights, for as much time again. `WorkError` names a layer."""
        started = time.perf_counter()
        sums: State = {}
        dtype = self._look_dtype or autocast_dtype(self.model.root)  # outside of what switches autocast off
        rounded = dtype in (torch.bfloat16, torch.float16)
        with evaluation_mode(self.model.root):
            for tokens, counts in self._batches:
                own, error = LookSums(self.model, tokens, spectra, self._longest), None
                try:
                    # Without a cache, which would hold all weights rounded at once.
                    device = self.model.device.type
                    cast = torch.autocast(device, dtype, cache_enabled=False) if rounded else nullcontext()
                    with hooked(self.model, own), cast:
                        self.model.source.run(tokens.ids)
                except WorkError as failure:
                    error = failure
                self.ranks.raise_any(error)
                for name, value in own.state(counts).items():
                    if name in sums:
                        include(sums[name], value, maximum=name in own.maxima)
                    else:
                        sums[name] = value
            totals = self.ranks.totals(sums, own.maxima)
            of_weights = _spectra(self.model, self.ranks) if spectra else None
            return self.ranks.from_first(lambda: _geometry(self.model, step, totals, of_weights, started))


class InlineReader:
    """Measures the forward passes of a training step, without running the model itself.

    Args:
        model: as `GeometryReader` takes it; not compiled.
        over_ranks: the micro-batches of all processes of `torch.distributed` are one look.

    Attributes:
        given_up: steps that were to be a look, and of which some process saw only padded contexts.

    Raises:
        UsageError: the model is of no supported family, an encoder-decoder, compiled, attends in a way that cannot be
            observed, or has no backward pass where it is.
        WorkError: as `GeometryReader`.
    """

    def __init__(self, model: nn.Module | OpenModel, over_ranks: bool = False) -> None:
        source, self.ranks = _looked_at(model, over_ranks)
        if getattr(getattr(source.root, "config", None), "is_encoder_decoder", False):
            raise UsageError(
                f"{source.name} is an encoder-decoder, which reads two texts, and the monitor reads one: {INSTEAD}"
            )
        outermost = model if isinstance(model, nn.Module) else source.root
        if any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in outermost.modules()):
            raise UsageError(f"{source.name} is compiled, and its attention cannot be observed: {INSTEAD}")
        with evaluation_mode(source.root):
            self.model = _opened(source)
            if self.model.structure.layout.is_row:
                raise UsageError(
                    f"{source.name} reads its contexts in one row, which cannot be split in training: {INSTEAD}"
                )
            if self.model.device.type == "cpu" and not is_spread(source.root):
                try:
                    with torch.enable_grad():
                        source.run(source.sample(LEAST_LENGTH))
                except (NotImplementedError, UsageError) as error:  # flex_attention, before the first step
                    why = first_line(error.__cause__ or error)
                    raise UsageError(f"{source.name} cannot be trained on a CPU: {why}") from error
            if reason := self._unlike_a_look():
                raise UsageError(f"the attention of {source.name} cannot be observed: {reason}; {INSTEAD}")
        self.given_up = 0
        self._armed: tuple[int, _Passes, dict[str, list[Any]] | None] | None = None

    def _unlike_a_look(self) -> object:
        """Compare an inline look at a few tokens with a look of its own; why they differ, or None."""
        source = self.model.source
        ids = source.sample(LEAST_LENGTH)
        expected = LookSums(self.model, Tokens.of(ids, self.model.device), spectra=False)
        with hooked(self.model, expected):
            source.run(ids)
        passes = _Passes(self.model, False, source.first_own, of_training=False)
        try:
            source.run(ids)
        finally:
            passes.close()
        if passes.sums is None:
            return passes.error or "its forward is not what is called"
        ours, theirs = (sums.attention_statistics.state() for sums in (passes.sums, expected))
        for name in ("entropy", "largest_logit"):
            if not torch.allclose(ours[name], theirs[name], rtol=TOLERANCE, atol=TOLERANCE):
                return "what it hands to PyTorch's functions is not what it attends by"
        return None

    @property
    def armed(self) -> bool:
        """True from `arm` until the look is taken."""
        return self._armed is not None

    def arm(self, step: int, spectra: bool) -> None:
        """Measure the passes of `step` from now on; with spectra, read the weights."""
        started = time.perf_counter()
        of_weights = None
        if spectra:
            with evaluation_mode(self.model.root):
                of_weights = _spectra(self.model, self.ranks)
        passes = _Passes(self.model, spectra, self.model.root, of_training=True)
        passes.seconds = time.perf_counter() - started
        self._armed = step, passes, of_weights

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
        since, passes, spectra = self._armed
        self.close()
        sums = passes.sums
        own = {"waiting": sums is None and passes.error is None, "passes": passes.passes}
        own["length"] = sums.length if sums else 0
        totals = self.ranks.totals({name: torch.tensor(value) for name, value in own.items()})
        self.ranks.raise_any(passes.error)
        if totals["waiting"]:
            if not totals["passes"]:
                raise UsageError(
                    f"no forward pass of {self.model.source.name} in training was heard since step {since}: call the "
                    f"monitor before the pass, and train without torch.compile; or {INSTEAD}"
                )
            self.given_up += 1
            return None
        assert sums is not None
        if totals["length"] != self.ranks.world * sums.length:
            raise UsageError(
                f"the micro-batches of {self.ranks.world} processes have contexts of different lengths: pad "
                f"them to one length, or {INSTEAD}"
            )
        started = time.perf_counter() - passes.seconds
        with known_state():
            state = self.ranks.totals(sums.state(counts=self.ranks.leads), sums.maxima)
        return self.ranks.from_first(lambda: _geometry(self.model, since, state, spectra, started))

    def close(self) -> None:
        """Give up the armed look, if there is one, and remove its hooks."""
        if self._armed is not None:
            self._armed[1].close()
            self._armed = None


class _Passes(Hooks):
    """Measures the forward passes of a training step, from the call of `entry` to its end; contexts without padding."""

    def __init__(self, model: OpenModel, spectra: bool, entry: nn.Module, *, of_training: bool) -> None:
        self.sums: LookSums | None = None  # of the passes that have ended
        self.error: TheodoliteError | None = None  # why no further pass is measured
        self.passes = 0  # that have begun
        self.seconds = 0.0  # that measuring took
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
        # All of them as a view: nothing is copied.
        self._rows: Any = slice(None) if bool(whole.all()) else whole
        self._own = LookSums(self._model, Tokens.of(ids[self._rows], self._model.device), self._spectra)
        self._failure: TheodoliteError | None = None
        # The last of the hooks, for those of the pass to have been called.
        self._pass.enter_context(observing(self._model, self, module))
        self._pass.callback(module.register_forward_hook(self._end).remove)

    def _end(self, *_: Any) -> None:
        self._pass.close()
        if self.sums is None:
            self.sums = self._own
        else:
            self._measure(self.sums.merge, self._own)
        if self._failure is not None:
            self.sums, self.error = None, self._failure
            self.close()

    def _measure(self, measure: Callable[..., object], *args: Any) -> None:
        """Measure up to the first error of the pass, which is kept."""
        if self._failure is None:
            started = time.perf_counter()
            try:
                with known_state():
                    measure(*args)
            except TheodoliteError as error:
                self._failure = error
            self.seconds += time.perf_counter() - started

    def stream(self, layer: int, hidden: Tensor) -> None:
        self._measure(self._own.stream, layer, hidden[self._rows])

    def attention_input(self, layer: int, hidden: Tensor) -> None:
        self._measure(self._own.attention_input, layer, hidden[self._rows])

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        self._measure(self._own.attention, layer, inputs.of_contexts(self._rows))
        # Of the right shape: nobody uses it.
        batch, heads, length, _ = inputs.query.shape
        return inputs.value.new_zeros(()).expand(batch, length, heads, inputs.value.shape[-1])

    def fail(self, error: TheodoliteError) -> None:
        self._failure = self._failure or UsageError("not every layer calls PyTorch's functions for it")


def _micro_batch(args: Any, kwargs: Any) -> tuple[Int[Tensor, "contexts positions"], Tensor]:
    """Return the token ids that a model is called with, and which contexts are without padding; or `UsageError`."""
    ids = kwargs.get("input_ids", args[0] if args else next(iter(kwargs.values()), None))
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype.is_floating_point:
        raise UsageError(f"training calls the model without token ids (contexts, positions): {INSTEAD}")
    if ids.shape[1] < LEAST_LENGTH:
        raise UsageError(
            f"training reads contexts of {ids.shape[1]} tokens, and the monitor needs {LEAST_LENGTH}: {INSTEAD}"
        )
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    packed = isinstance(positions, Tensor) and bool((positions.diff(dim=-1) != 1).any())
    if packed or (mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2)):
        raise UsageError(f"training packs several texts into a context, and the monitor reads one: {INSTEAD}")
    whole = ids.new_ones(len(ids), dtype=torch.bool) if mask is None else mask.bool().all(dim=1)
    return ids.detach(), whole


def _looked_at(model: nn.Module | OpenModel, over_ranks: bool) -> tuple[Source, Ranks]:
    """Return the `Source` of a model in training, and the processes that look together.

    These are all, where weights are spread over them or it is asked for. `UsageError` where it reads no tokens.
    """
    source = training_source(model)
    if source.reads != "input_ids":
        raise UsageError(f"{source.name} reads {source.reads}: only models of tokens can be monitored")
    together = over_ranks or is_spread(source.root)
    return source, Ranks.current(parallel_group(source.root)) if together else Ranks()


def _opened(source: Source) -> OpenModel:
    """Open and verify a model in training, as for a survey."""
    opened = OpenModel.of(source, *verified_parts(source, LEAST_LENGTH, skip_overflow=True), id=source.name)
    opened.check_weights()
    return opened


def _by_length(
    ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
) -> list[Int[Tensor, "contexts positions"]]:
    """Return the contexts of a monitor batch, those of one length together, the longest first."""
    ids = monitor_ids(ids).detach().cpu().long()
    if attention_mask is None and position_ids is None:
        return [ids]
    contexts, _, _ = contexts_of_rows(ids, attention_mask, position_ids, LEAST_LENGTH)
    if not contexts:
        raise UsageError(f"no context of the monitor batch has {LEAST_LENGTH} tokens: give longer ones")
    lengths = sorted({len(context) for context in contexts}, reverse=True)
    return [torch.stack([context for context in contexts if len(context) == own]) for own in lengths]


def monitor_ids(ids: Any) -> Int[Tensor, "contexts positions"]:
    """Return the token ids of a monitor batch; `UsageError` where they are none, or the contexts too short."""
    ids = whole_ids(ids)
    if ids.shape[1] < LEAST_LENGTH:
        raise UsageError(
            f"the monitor batch has contexts of {ids.shape[1]} tokens: give {LEAST_LENGTH} or more"
        )
    return ids


def _geometry(
    model: OpenModel, step: int, sums: State, spectra: dict[str, list[Any]] | None, started: float
) -> Geometry:
    """Make a look's tables from the `LookSums` of all processes, and from `_spectra` if these were read."""
    attention, queries, residual = (part_of(sums, name) for name in ("attention", "queries", "residual"))
    columns = with_errors(head_columns(attention))
    read, contexts = (attention[name].sum(dim=1, keepdim=True) for name in ("readers", "contexts"))
    most = (attention["most_entropy"] / read[:, 0]).repeat_interleave(attention["entropy"].shape[1])
    by_distance = queries["by_distance"] / queries["with_distance"].clamp_min(1)
    own = {
        "largest_logit": attention["largest_logit"],
        "log_sum_exp": attention["log_sum_exp"] / read,
        "entropy_share": torch.tensor(columns["entropy"], dtype=torch.float64) / most,
        "propagation_queries": queries["propagation_queries"] / contexts,
        "at_distance": by_distance.amax(dim=-1),
    }
    columns |= {name: values.flatten().tolist() for name, values in own.items()}
    heads = heads_that_are(columns, model.heads_of)
    if spectra is not None:
        heads, bounds = heads.assign(**spectra), []
        for layer, norms in heads.groupby("layer")["spectral_norm"]:
            norm = torch.tensor(norms.to_numpy(), dtype=torch.float64)
            seen = attention["visible_keys"][layer], attention["readers"][layer]
            bounds += entropy_bound(float(attention["gram_norm"][layer]), norm, *seen).tolist()
        heads["entropy_bound"] = bounds
    of_layers = stream_columns(residual, residual)
    columns = {"layer": of_layers.pop("layer")} | {name: of.value.numpy() for name, of in of_layers.items()}
    layers = pd.DataFrame(columns).drop(columns="cosine_previous")
    layers["norm_growth"] = layers["norm"] / layers["norm"].shift()
    return Geometry(step, heads, layers, time.perf_counter() - started)


def _spectra(model: OpenModel, ranks: Ranks) -> dict[str, list[Any]]:
    """Read `SPECTRA` of every head, but for the bound; NaN where queries and keys are no affine function of the input.

    To be called by all processes: weights that are spread are read by all, others by the first one alone.
    """
    columns: dict[str, list[Any]] = {name: [] for name in SPECTRA[:-1]}
    for layer in model.attending if ranks.first or is_spread(model.root) else ():
        try:
            weights = model.head_weights(layer)
        except WorkError:
            weights = None
        heads = model.heads_of[layer]
        values: dict[str, Any] = dict(layer_moments(weights, heads))
        values["regime"] = regime(values["xi_symmetric"], values["eta_symmetric"])
        if weights is not None and not weights.exact:
            # A norm between projection and logit: the spectrum is the projections', and says nothing of the logits.
            values["regime"][:] = UNDEFINED
        values["spectral_norm"] = logit_norm(weights, heads)
        for name in columns:
            columns[name].extend(values[name].tolist())
    return columns


class LookSums(Hooks):
    """Feeds one forward pass to the accumulators of a survey, a layer of the residual stream at a time."""

    def __init__(self, model: OpenModel, tokens: Tokens, spectra: bool, longest: int | None = None) -> None:
        contexts, length = tokens.ids.shape
        self.length = longest or length
        heads, distances = model.heads, 2 * self.length - 1
        self.attention_statistics = AttentionStatistics(
            model.layers, heads, self.length, contexts, examples=0
        )
        of_queries: dict[str, tuple[int, ...]] = {"propagation_queries": (heads,)}
        of_queries |= dict.fromkeys(("by_distance", "with_distance"), (heads, distances))
        self._parts: dict[str, LayerSums] = {
            "attention": self.attention_statistics,
            "queries": LayerSums(model.layers, of_queries),
        }
        self._layers = model.layers
        self._tokens = tokens
        self._spectra = spectra
        none = torch.empty(0, dtype=torch.int64)
        self._sample = Sample(torch.full((contexts,), -1), none, none)

    def stream(self, layer: int, hidden: Tensor) -> None:
        """Measure one layer, and keep what the layers table is made of."""
        if not torch.isfinite(hidden.sum(dtype=torch.float32)):
            raise WorkError(f"hidden states {residual_place(layer)} hold NaN or infinite values")
        contexts, _, width = hidden.shape
        means = Means(1, self.length, width, self._sample)
        outliers = OutlierCounts(1, width, contexts)
        means.update(0, hidden, 0)
        outliers.update(0, hidden, 0)
        sums = {name: tensor[0] for name, tensor in (means.state() | outliers.state()).items()}
        if "residual" not in self._parts:
            self._parts["residual"] = LayerSums(
                self._layers + 1, {name: tuple(sums[name].shape) for name in RESIDUAL}
            )
        for name in RESIDUAL:
            self._parts["residual"].add(name, layer, sums[name])

    def attention_input(self, layer: int, hidden: Tensor) -> None:
        """Measure what attention reads: only the entropy bound needs its norm."""
        if self._spectra:
            self.attention_statistics.update_input(layer, hidden)

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """Measure one layer's attention, and compute its output."""
        for name, sums in query_sums(inputs, self.length).items():
            # Another layer may have more heads.
            self._parts["queries"].at(name, layer, sums.device)[: len(sums)] += sums
        return self.attention_statistics.update(layer, inputs, self._tokens, 0)

    def merge(self, other: LookSums) -> None:
        """Add the sums of another pass; of contexts of another length, only the largest logits."""
        if other.length != self.length:
            for layer, largest in enumerate(other.attention_statistics.state()["largest_logit"]):
                self.attention_statistics.add("largest_logit", layer, largest)
            return
        for name, part in self._parts.items():
            part.merge(other._parts[name].state())

    @property
    def maxima(self) -> frozenset[str]:
        """Names in `state` of what is no sum, but a maximum."""
        return frozenset("attention." + name for name in self.attention_statistics.maxima)

    def state(self, counts: bool) -> State:
        """Return the sums, leading with layers; zeros unless it `counts`, but for maxima."""
        parts = {name: part.state() for name, part in self._parts.items()}
        # Rows of tokens differ from process to process, and no column is made of them.
        attention = {name: t for name, t in parts["attention"].items() if not name.startswith("sink_tokens.")}
        # A learned sink column is one more outcome beside the keys.
        outcomes = attention["visible_keys"] + (attention["learned"].sum(dim=(1, 2)) > 0)[:, None]
        attention["most_entropy"] = torch.xlogy(attention["readers"], outcomes).sum(dim=1)
        state = joined(parts | {"attention": attention})
        return {name: t if counts or name in self.maxima else 0 * t for name, t in state.items()}


def query_sums(inputs: AttentionInputs, longest: int) -> State:
    """Measure `QUERIES` evenly spaced queries of each context, for every head, summed over contexts.

    propagation_queries (H): mean empirical ρ of each query over the keys that it sees (Bao et al. 2024, definition 1,
    with T := t for query t); over keys first, then over queries. by_distance (H, D): mean attention over queries to
    the key at one distance, of the distances that half of the queries have, in contexts of `longest` tokens or fewer;
    with_distance (H, D): the contexts that have it.
    """
    batch, heads, length, _ = inputs.query.shape
    device = inputs.query.device
    rows = torch.arange(1, QUERIES + 1, device=device) * length // QUERIES - 1
    # The rows are a block of their own, so that key j stands in column j but for the keys that none of them sees.
    (block,) = inputs.of_queries(rows).blocks(QUERIES)
    shares = []
    for row in block.logits.unbind(dim=2):
        visible = row[0, 0] > MASKED / 2
        shares.append(empirical_propagation(row[..., visible]).double().mean(dim=2).sum(dim=0))
    weights = softmax(block.logits.double(), inputs.sink)
    distances = (rows[:, None] - torch.arange(block.first, block.last, device=device)).flatten()
    index = distances + longest - 1
    counts = torch.bincount(index, minlength=2 * longest - 1)
    by_distance = weights.new_zeros(heads, len(counts)).index_add_(1, index, weights.sum(dim=0).flatten(1))
    common = counts >= QUERIES // 2
    return {
        "propagation_queries": torch.stack(shares).mean(dim=0).cpu(),
        "by_distance": (by_distance / counts.clamp_min(1) * common).cpu(),
        "with_distance": (batch * common).double().expand(heads, -1).cpu(),
    }


def residual_place(layer: int) -> str:
    """Say where residual layer ℓ is: it leaves block ℓ − 1, and layer 0 enters block 0."""
    return f"after block {layer - 1}" if layer else "before block 0"
