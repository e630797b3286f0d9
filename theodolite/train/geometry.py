"""One measurement (a look) of a model in training: its heads and residual stream, by the accumulators of a survey.

`GeometryReader` reads a fixed batch (the monitor batch) in evaluation mode, and leaves the model as it was: modes,
weights, gradients, hooks, random numbers. What is due or alarming is not decided here.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
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
from theodolite.corpus.cutting import contexts_in_rows, whole_ids
from theodolite.errors import UsageError, WorkError
from theodolite.measure.geometry import stream_columns
from theodolite.measure.heads import head_columns, heads_that_are, with_errors
from theodolite.measure.localization import MOMENTS, entropy_bound, layer_moments, logit_norm
from theodolite.models import OpenModel
from theodolite.models.hooks import Hooks, hooked
from theodolite.models.open import verified_parts
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

    A look rounds products as training does: by autocast where it is called, or by accelerate's mixed precision (the
    Trainer's, too).

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
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> None:
        source = training_source(model)
        if source.reads != "input_ids":
            raise UsageError(f"{source.name} reads {source.reads}: only models of tokens can be monitored")
        together = over_ranks or is_spread(source.root)
        self.ranks = Ranks.current(parallel_group(source.root)) if together else Ranks()
        batches = self.ranks.from_first(lambda: _by_length(ids, attention_mask, position_ids))
        smallest, largest = min(int(batch.min()) for batch in batches), max(int(b.max()) for b in batches)
        if smallest < 0 or largest >= (source.vocabulary or 0):
            raise UsageError(
                f"the monitor batch holds ids from {smallest} to {largest}, the model has {source.vocabulary} tokens: "
                "use the model's own tokenizer, and an attention_mask for padding"
            )
        self._longest = batches[0].shape[1]
        with evaluation_mode(source.root):
            parts = verified_parts(source, LEAST_LENGTH, skip_overflow=True)
            self.model = OpenModel.of(source, *parts, id=source.name)
            self.model.check_weights()
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
        dtype = autocast_dtype(self.model.root)  # outside of what switches autocast off
        with evaluation_mode(self.model.root):
            for tokens, counts in self._batches:
                own, error = LookSums(self.model, tokens, spectra, self._longest), None
                try:
                    # Without a cache, which would hold all weights rounded at once.
                    device = self.model.device.type
                    cast = torch.autocast(device, dtype, cache_enabled=False) if dtype else nullcontext()
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


def _by_length(
    ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
) -> list[Int[Tensor, "contexts positions"]]:
    """Return the contexts of a monitor batch, those of one length together, the longest first."""
    ids = monitor_ids(ids).detach().cpu().long()
    if attention_mask is None and position_ids is None:
        return [ids]
    found = contexts_in_rows(ids, attention_mask, position_ids)
    contexts = [ids[row, places] for row, places in found if len(places) >= LEAST_LENGTH]
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

    def __init__(self, model: OpenModel, tokens: Tokens, spectra: bool, longest: int) -> None:
        heads, contexts, distances = model.heads, len(tokens.ids), 2 * longest - 1
        self.length = longest
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
