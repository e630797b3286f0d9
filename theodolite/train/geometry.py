"""One look at a model in training: what its heads and its residual stream do on a fixed batch of tokens.

The batch (the monitor batch) goes once through the backbone, in evaluation mode, under the accumulators of a survey.
The model is left as it was: modes, weights, gradients, hooks, random numbers. What is alarming is not decided here.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from theodolite.accumulate.attention import AttentionStatistics, Tokens
from theodolite.accumulate.means import Means, Sample
from theodolite.accumulate.outliers import OutlierCounts
from theodolite.accumulate.sums import State, part_of
from theodolite.attention.inputs import MASKED, AttentionInputs, softmax
from theodolite.attention.piecewise import empirical_propagation
from theodolite.corpus.groups import GROUPS
from theodolite.errors import UsageError, WorkError
from theodolite.measure.geometry import stream as residual_columns
from theodolite.measure.heads import head_columns, heads_that_are
from theodolite.measure.localization import MOMENTS, entropy_bound, layer_moments, logit_norm
from theodolite.models import OpenModel
from theodolite.models.hooks import Hooks, hooked
from theodolite.models.open import verified_parts
from theodolite.models.source import Source
from theodolite.models.training.shards import is_spread, parallel_group
from theodolite.models.training.training_model import autocast_dtype, evaluation_mode, training_source
from theodolite.theory.regimes import UNDEFINED, regime
from theodolite.train.ranks import Ranks

QUERIES = 8
"""Queries of a context, evenly spaced, whose own propagation is measured; the last query is one of them."""

LEAST_LENGTH = QUERIES
"""Tokens that a context of the monitor batch must have at least, for its queries to be distinct."""

SPECTRA = (
    *(name for name in MOMENTS if name not in ("mean", "variance")),
    "spectral_norm",
    "regime",
    "entropy_bound",
)
"""Columns of the heads table that only a look with `spectra` has."""


RESIDUAL = (
    *("contexts", "readers", "norm_sum", "norm_first_sum", "cosine_sum", "collapse_sum"),
    *("outlier", "massive", "massive_first"),
)
"""Sums over the contexts of one layer of the residual stream; those by position are as large as a batch of its own."""


@dataclass(frozen=True)
class Geometry:
    """The tables of one look.

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
    """Measures a model in training on a fixed batch of tokens, as often as it is asked.

    Args:
        model: of any family that a survey reads; may be wrapped by DDP, DataParallel, `torch.compile` or PEFT. Any
            other module as `open_module` gives it.
        ids: token ids (contexts, positions), without padding.
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
    ) -> None:
        if look_dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise UsageError(f"look_dtype is {look_dtype}: give torch.bfloat16, float16 or float32")
        self._look_dtype = look_dtype
        source = monitored_source(model)
        self.ranks = looking_ranks(source, over_ranks)
        self.ids = checked_ids(source, self.ranks.from_first(lambda: ids))
        contexts = self.ranks.share(self.ids)
        self._counts = len(contexts) > 0 and self.ranks.leads
        with evaluation_mode(source.root):
            self.model = opened_for_looks(source)
            if not self.model.has_positions(self.ids.shape[1]):
                raise UsageError(
                    f"the monitor batch's contexts have {self.ids.shape[1]} tokens, the model has positions for "
                    f"{self.model.longest}: give shorter ones"
                )
            # Those without a context of their own read another's, for the shapes.
            self._tokens = Tokens.of(contexts if len(contexts) else self.ids[:1], self.model.device)

    def look(self, step: int = 0, spectra: bool = True) -> Geometry:
        """Measure now; with `spectra` also every head's weights, for as much time again. `WorkError` names a layer."""
        started = time.perf_counter()
        error = None
        device = self.model.device.type
        dtype = self._look_dtype or autocast_dtype(self.model.root)  # outside of what switches autocast off
        rounded = dtype in (torch.bfloat16, torch.float16)
        with evaluation_mode(self.model.root):
            accumulators = LookSums(self.model, self._tokens, spectra)
            try:
                # Without a cache, which would hold all weights rounded at once.
                cast = torch.autocast(device, dtype, cache_enabled=False) if rounded else nullcontext()
                with hooked(self.model, accumulators), cast:
                    self.model.source.run(self._tokens.ids)
            except WorkError as failure:
                error = failure
            self.ranks.raise_any(error)
            sums = accumulators.totals(self.ranks, counts=self._counts)
            of_weights = spectra_of(self.model, self.ranks) if spectra else None
            return self.ranks.from_first(
                lambda: geometry_of(self.model, step, sums, of_weights, time.perf_counter() - started)
            )


def geometry_of(
    model: OpenModel, step: int, sums: State, spectra: dict[str, list[Any]] | None, seconds: float
) -> Geometry:
    """Make a look's tables from the `LookSums` of all processes, and from `spectra_of` if these were read."""
    attention = part_of(sums, "attention")
    heads = heads_that_are(_head_columns(attention, part_of(sums, "queries")), model.heads_of)
    if spectra is not None:
        bounds = _entropy_bounds(model, spectra["spectral_norm"], attention)
        heads = heads.assign(**spectra, entropy_bound=bounds)
    return Geometry(step, heads, pd.DataFrame(_residual_rows(part_of(sums, "residual"))), seconds)


def monitored_source(model: nn.Module | OpenModel) -> Source:
    """Return the `Source` of a model in training; `UsageError` where it reads other things than tokens."""
    source = training_source(model)
    if source.reads != "input_ids":
        raise UsageError(f"{source.name} reads {source.reads}: only models of tokens can be monitored")
    return source


def looking_ranks(source: Source, over_ranks: bool) -> Ranks:
    """Return the processes that look together: all, where weights are spread over them or it is asked for."""
    together = over_ranks or is_spread(source.root)
    return Ranks.current(parallel_group(source.root)) if together else Ranks()


def checked_ids(source: Source, ids: Tensor) -> Int[Tensor, "contexts positions"]:
    """Return the ids on the CPU; `UsageError` where they do not fit the model."""
    check_shape(ids)
    ids = ids.detach().cpu().long()
    if int(ids.min()) < 0 or int(ids.max()) >= (source.vocabulary or 0):
        raise UsageError(
            f"the monitor batch holds ids from {int(ids.min())} to {int(ids.max())}, the model has {source.vocabulary} "
            "tokens: use the model's own tokenizer, and no padding"
        )
    return ids


def check_shape(ids: Any) -> None:
    """Raise `UsageError` where it is no batch of token ids, or its contexts are too short."""
    if not isinstance(ids, Tensor):
        raise UsageError(
            f"the monitor batch is a {type(ids).__name__}: give a tensor of token ids (contexts, positions)"
        )
    no_integers = ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool
    if ids.ndim != 2 or no_integers or not len(ids) or ids.shape[1] < LEAST_LENGTH:
        raise UsageError(
            f"the monitor batch has shape {tuple(ids.shape)} and dtype {ids.dtype}: give token ids "
            f"(contexts, positions), {LEAST_LENGTH} positions or more"
        )


def opened_for_looks(source: Source) -> OpenModel:
    """Open and verify a model in training, as for a survey."""
    opened = OpenModel.of(source, *verified_parts(source, LEAST_LENGTH, skip_overflow=True), id=source.name)
    opened.check_weights()
    return opened


def _residual_rows(residual: State) -> list[dict[str, float]]:
    """Make the rows of the layers table."""
    everything = torch.ones(GROUPS, dtype=torch.float64)
    rows: list[dict[str, float]] = []
    for layer in range(len(residual["contexts"])):
        row = residual_columns(residual, residual, layer, everything)
        del row["cosine_previous"]
        before = rows[-1]["norm"] if rows else math.nan
        rows.append({"layer": layer, **row, "norm_growth": row["norm"] / before})
    return rows


def _head_columns(attention: State, queries: State) -> dict[str, list[float]]:
    columns = head_columns(attention)
    # A learned sink column is one more outcome beside the keys.
    outcomes = attention["visible_keys"] + (attention["learned"].sum(dim=1) > 0)[:, None]
    most = outcomes.log().mean(dim=1).repeat_interleave(attention["entropy"].shape[1])
    share = torch.tensor(columns["entropy"], dtype=torch.float64) / most
    contexts = attention["contexts"][:, None]
    log_sum_exp = attention["log_sum_exp"] / attention["readers"].sum(dim=1, keepdim=True)
    return columns | {
        "largest_logit": attention["largest_logit"].flatten().tolist(),
        "log_sum_exp": log_sum_exp.flatten().tolist(),
        "entropy_share": share.tolist(),
        "propagation_queries": (queries["propagation_queries"] / contexts).flatten().tolist(),
        "at_distance": (queries["by_distance"].amax(dim=-1) / contexts).flatten().tolist(),
    }


def spectra_of(model: OpenModel, ranks: Ranks) -> dict[str, list[Any]]:
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


def _entropy_bounds(model: OpenModel, norms: list[float], attention: State) -> list[float]:
    """Compute each head's entropy bound from its logit norm and what attention reads and sees in its layer."""
    bounds: list[float] = []
    for layer in model.attending:
        norm = torch.tensor(norms[len(bounds) : len(bounds) + model.heads_of[layer]], dtype=torch.float64)
        gram_norm, visible_keys = float(attention["gram_norm"][layer]), attention["visible_keys"][layer]
        bounds += entropy_bound(gram_norm, norm, visible_keys, attention["readers"][layer]).tolist()
    return bounds


class LookSums(Hooks):
    """Feeds one forward pass to the accumulators of a survey, a layer of the residual stream at a time."""

    def __init__(self, model: OpenModel, tokens: Tokens, spectra: bool) -> None:
        contexts, length = tokens.ids.shape
        self.attention_statistics = AttentionStatistics(model.layers, model.heads, length, examples=0)
        self.queries: list[State] = [{} for _ in range(model.layers)]
        self._heads = model.heads
        self.residual: list[State] = []
        self._tokens = tokens
        self._spectra = spectra
        none = torch.empty(0, dtype=torch.int64)
        self._sample = Sample(torch.full((contexts,), -1), none, none)

    def stream(self, layer: int, hidden: Tensor) -> None:
        """Measure one layer, and keep what the layers table is made of."""
        if not torch.isfinite(hidden.sum(dtype=torch.float32)):
            raise WorkError(f"hidden states {residual_place(layer)} hold NaN or infinite values")
        contexts, length, width = hidden.shape
        means = Means(1, length, width, self._sample)
        outliers = OutlierCounts(1, width, contexts)
        means.update(0, hidden, 0)
        outliers.update(0, hidden, 0)
        sums = {name: tensor[0] for name, tensor in (means.state() | outliers.state()).items()}
        self.residual.append({name: sums[name] for name in RESIDUAL})

    def attention_input(self, layer: int, hidden: Tensor) -> None:
        """Measure what attention reads: only the entropy bound needs its norm."""
        if self._spectra:
            self.attention_statistics.update_input(layer, hidden)

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """Measure one layer's attention, and compute its output."""
        sums = query_sums(inputs)
        missing = self._heads - inputs.query.shape[1]  # heads that another layer has
        self.queries[layer] = {
            name: functional.pad(tensor, (*(0, 0) * (tensor.ndim - 1), 0, missing))
            for name, tensor in sums.items()
        }
        return self.attention_statistics.update(layer, inputs, self._tokens, 0)

    def merge(self, other: LookSums, *, largest_only: bool = False) -> None:
        """Add the sums of another pass; of contexts of another length, only the largest logits."""
        if largest_only:
            for layer, largest in enumerate(other.attention_statistics.state()["largest_logit"]):
                self.attention_statistics.add("largest_logit", layer, largest)
            return
        self.attention_statistics.merge(other.attention_statistics)
        for own, more in zip(self.queries + self.residual, other.queries + other.residual, strict=True):
            for name, tensor in more.items():
                own[name] = own[name] + tensor

    def totals(self, ranks: Ranks, *, counts: bool) -> State:
        """Add up the sums of all processes, leading with layers; this one's only if it `counts`.

        The spread of entropies is one about a mean. So that of all processes is known first.
        """
        attention = self.attention_statistics.state()
        del attention["sink_tokens"]  # rows that differ from process to process; no column is made of them
        names = ("entropy_spread", "squared_lengths", "squared_entropy")
        spread, weight, weighted = (attention[name] for name in names)
        parts = {"attention.": attention}
        for prefix, layers in (("queries.", self.queries), ("residual.", self.residual)):
            some = next(layer for layer in layers if layer)
            # A layer that does not attend adds nothing, to no context.
            parts[prefix] = {
                name: torch.stack([layer.get(name, torch.zeros_like(tensor)) for layer in layers])
                for name, tensor in some.items()
            }
        maxima = frozenset("attention." + name for name in self.attention_statistics.maxima)
        local_sums = {
            prefix + name: tensor for prefix, state in parts.items() for name, tensor in state.items()
        }
        local_sums = {
            name: tensor if counts or name in maxima else 0 * tensor for name, tensor in local_sums.items()
        }
        sums = ranks.totals(local_sums, maxima)
        whole = sums["attention.squared_entropy"] / sums["attention.squared_lengths"][:, None]
        between = weight[:, None] * (weighted / weight[:, None] - whole).square()
        return sums | ranks.totals({"attention.entropy_spread": (spread + between) * counts})


def query_sums(inputs: AttentionInputs) -> State:
    """Measure `QUERIES` evenly spaced queries of each context, for every head, summed over contexts.

    propagation_queries (H): mean empirical ρ of each query over the keys that it sees (Bao et al. 2024, definition 1,
    with T := t for query t); over keys first, then over queries. by_distance (H, D): mean attention over queries to
    the key at one distance, of the distances that half of the queries have.
    """
    batch, heads, length, _ = inputs.query.shape
    keys, device = inputs.key.shape[2], inputs.query.device
    rows = torch.arange(1, QUERIES + 1, device=device) * length // QUERIES - 1
    mask, bias = inputs.mask, inputs.bias
    if mask is not None:
        mask = mask[:, :, rows].expand(batch, heads, -1, -1)
    elif inputs.causal:
        mask = (torch.arange(keys, device=device) <= rows[:, None]).expand(batch, heads, -1, -1)
    if bias is not None:
        bias = (bias[:, :, rows] if bias.shape[2] > 1 else bias).expand(batch, heads, -1, -1)
    few = replace(inputs, query=inputs.query[:, :, rows], mask=mask, bias=bias, causal=False)
    # The rows are a block of their own, so that key j stands in column j but for the keys that none of them sees.
    (block,) = few.blocks(QUERIES)
    shares = []
    for row in block.logits.unbind(dim=2):
        visible = row[0, 0] > MASKED / 2
        shares.append(empirical_propagation(row[..., visible]).double().mean(dim=2).sum(dim=0))
    weights = softmax(block.logits.double(), inputs.sink)
    distances = rows[:, None] - torch.arange(block.first, block.last, device=device)
    return {
        "propagation_queries": torch.stack(shares).mean(dim=0).cpu(),
        "by_distance": _by_distance(weights.sum(dim=0), distances).cpu(),
    }


def _by_distance(
    weights: Float[Tensor, "heads queries keys"], distances: Int[Tensor, "queries keys"]
) -> Float[Tensor, "heads distances"]:
    """The mean weight at each distance that half of the queries have."""
    index = (distances - distances.min()).flatten()
    counts = torch.bincount(index)
    sums = weights.new_zeros(weights.shape[0], len(counts)).index_add_(1, index, weights.flatten(1))
    return (sums / counts)[:, counts >= QUERIES // 2]


def residual_place(layer: int) -> str:
    """Say where residual layer ℓ is: it leaves block ℓ − 1, and layer 0 enters block 0."""
    return f"after block {layer - 1}" if layer else "before block 0"
