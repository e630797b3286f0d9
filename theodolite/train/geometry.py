"""One measurement (a look) of a model in training: its heads and residual stream, by the accumulators of a survey."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor, distributed, nn

from theodolite.accumulate.attention import AttentionStatistics, Tokens
from theodolite.accumulate.means import Means, Sample
from theodolite.accumulate.outliers import OutlierCounts
from theodolite.accumulate.sums import LayerSums, State, include, joined, part_of
from theodolite.attention.inputs import AttentionInputs, softmax
from theodolite.corpus.corpus import Corpus
from theodolite.errors import TheodoliteError, UsageError, WorkError
from theodolite.measure.geometry import stream_columns
from theodolite.measure.heads import head_columns, heads_that_are, with_errors
from theodolite.measure.localization import MOMENTS, layer_moments, logit_norm
from theodolite.models import OpenModel
from theodolite.models.hooks import Hooks, hooked
from theodolite.models.open import autocast_dtype, evaluation_mode, training_source, verified_parts
from theodolite.models.training.shards import is_spread, parallel_group
from theodolite.passes.corpus_pass import check_fit
from theodolite.theory.regimes import UNDEFINED, regime

Answer = TypeVar("Answer")

QUERIES = 8  # of a context, evenly spaced, whose distances to keys are looked at
LEAST_LENGTH = QUERIES  # tokens that a context must have

# Columns of the heads table that only a look with `spectra` has.
SPECTRA = (*(name for name in MOMENTS if name not in ("mean", "variance")), "spectral_norm", "regime")

# Sums over the contexts of one layer of the residual stream; those by position are as large as a batch of its own.
RESIDUAL = (
    *("contexts", "readers", "norm_sum", "norm_first_sum", "cosine_sum", "collapse_sum"),
    *("outlier", "massive", "massive_first"),
)


@dataclass(frozen=True)
class Ranks:
    """The processes of one training run. All of them must call every method."""

    rank: int = 0
    world: int = 1
    team: int = 0  # of processes that each have some of the heads, and read the same contexts
    teams: int = 1
    leads: bool = True  # the first of its team, whose sums are those of all

    @classmethod
    def current(cls, heads: Any = None) -> Ranks:
        """Read the default process group, or be alone without one; `heads`: the group over which heads are spread."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return cls()
        rank, world = distributed.get_rank(), distributed.get_world_size()
        first = rank if heads is None else min(distributed.get_process_group_ranks(heads))
        teams = sorted(set(cls(rank, world)._of_all(first)))
        return cls(rank, world, teams.index(first), len(teams), rank == first)

    @property
    def first(self) -> bool:
        """True for the process that writes and speaks."""
        return self.rank == 0

    def totals(self, values: dict[str, Tensor], maxima: frozenset[str] = frozenset()) -> dict[str, Tensor]:
        """Sum every tensor over the processes, or take its maximum, in float64 on the CPU."""
        everyone = self._of_all({name: value.double().cpu() for name, value in values.items()})
        stacked = {name: torch.stack([each[name] for each in everyone]) for name in values}
        return {name: of.amax(0) if name in maxima else of.sum(0) for name, of in stacked.items()}

    def from_first(self, compute: Callable[[], Answer]) -> Answer:
        """Return on all processes the result of `compute` on the first one, or raise what it raises there."""
        answer: Any = None
        if self.first:
            try:
                answer = compute()
            except TheodoliteError as error:
                answer = error
        answer = self._of_all(answer)[0]
        if isinstance(answer, TheodoliteError):
            raise answer
        return answer

    def raise_any(self, error: TheodoliteError | None) -> None:
        """Raise on all processes what any of them has to raise: else the others would wait for it for ever."""
        for failure in filter(None, self._of_all(error)):
            raise failure

    def _of_all(self, own: Answer) -> list[Answer]:
        """Return what each process has."""
        gathered = [own] * self.world
        if self.world > 1:
            distributed.all_gather_object(gathered, own)
        return gathered


@dataclass(frozen=True)
class Geometry:
    """The tables of one look at a step, and the seconds that it took.

    Attributes:
        heads: one row a head: columns of a survey, with spectra `SPECTRA`; and entropy_share (over the maximum, that of
            a uniform row); at_distance (the most mean attention that any one distance gets); largest_logit (over
            contexts, queries and the keys that they see, of those whose softmax is taken, without a learned sink's);
            log_sum_exp (the mean over contexts and queries of ln Σ exp of them, a learned sink's with them).
        layers: one row a residual layer, 0 being the input of the first block: columns of a survey; and norm_growth,
            the norm over that of the layer before (NaN at layer 0).
    """

    step: int
    heads: pd.DataFrame
    layers: pd.DataFrame
    seconds: float


class GeometryReader:
    """Measures a model in training on a fixed batch of tokens; arguments and errors are those of `GeometryMonitor`."""

    def __init__(
        self,
        model: nn.Module | OpenModel,
        ids: Int[Tensor, "contexts positions"],
        over_ranks: bool = False,
        **rows: Tensor | None,  # attention_mask, position_ids
    ) -> None:
        source = training_source(model)
        if source.reads != "input_ids":
            raise UsageError(f"{source.name} reads {source.reads}: only models of tokens can be monitored")
        together = over_ranks or is_spread(source.root)
        self.ranks = Ranks.current(parallel_group(source.root)) if together else Ranks()
        corpus = self.ranks.from_first(lambda: monitor_corpus(ids, **rows))
        self._longest = corpus.contexts.shape[1]
        with evaluation_mode(source.root):
            parts = verified_parts(source, LEAST_LENGTH, skip_overflow=True)
            self.model = OpenModel.of(source, *parts, id=source.name)
            self.model.check_weights()
            check_fit(self.model, corpus, least_contexts=1)
            self._batches: list[tuple[Tokens, bool]] = []  # and whether it counts here
            for contexts in corpus.batches(len(corpus.contexts)):
                batch = corpus.ids(contexts)
                own = batch[self.ranks.team :: self.ranks.teams]
                # Those without a context of their own read another's, for the shapes.
                tokens = Tokens.of(own if len(own) else batch[:1], self.model.device)
                self._batches.append((tokens, len(own) > 0 and self.ranks.leads))

    def look(self, step: int = 0, spectra: bool = True) -> Geometry:
        """Measure now; with `spectra` also every head's weights, for as much time again. `WorkError` names a layer."""
        started = time.perf_counter()
        sums: State = {}
        dtype = autocast_dtype(self.model.root)  # as training rounds; outside of what switches that off
        with evaluation_mode(self.model.root):
            for tokens, counts in self._batches:
                own, error = LookSums(self.model, tokens, self._longest), None
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


def monitor_corpus(
    ids: Any, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
) -> Corpus:
    """Take the contexts of a monitor batch that are long enough; `UsageError` where there are none, or no token ids."""
    corpus = Corpus.from_ids(ids, attention_mask=attention_mask, position_ids=position_ids)
    if corpus.lengths is not None:
        corpus = corpus.subset((corpus.lengths >= LEAST_LENGTH).nonzero().flatten())
    if (length := corpus.contexts.shape[1]) < LEAST_LENGTH:
        raise UsageError(f"the monitor batch has contexts of {length} tokens: give {LEAST_LENGTH} or more")
    return corpus


def _geometry(
    model: OpenModel, step: int, sums: State, spectra: dict[str, list[Any]] | None, started: float
) -> Geometry:
    """Make a look's tables from the `LookSums` of all processes, and from `_spectra` if these were read."""
    attention, distances, residual = (part_of(sums, name) for name in ("attention", "distances", "residual"))
    columns = with_errors(head_columns(attention))
    read = attention["readers"].sum(dim=1, keepdim=True)
    most = (attention["most_entropy"] / read[:, 0]).repeat_interleave(attention["entropy"].shape[1])
    by_distance = distances["by_distance"] / distances["with_distance"].clamp_min(1)
    own = {
        "largest_logit": attention["largest_logit"],
        "log_sum_exp": attention["log_sum_exp"] / read,
        "entropy_share": torch.tensor(columns["entropy"], dtype=torch.float64) / most,
        "at_distance": by_distance.amax(dim=-1),
    }
    columns |= {name: values.flatten().tolist() for name, values in own.items()}
    heads = heads_that_are(columns, model.heads_of)
    if spectra is not None:
        heads = heads.assign(**spectra)
    of_layers = stream_columns(residual, residual)
    columns = {"layer": of_layers.pop("layer")} | {name: of.value.numpy() for name, of in of_layers.items()}
    layers = pd.DataFrame(columns).drop(columns="cosine_previous")
    layers["norm_growth"] = layers["norm"] / layers["norm"].shift()
    return Geometry(step, heads, layers, time.perf_counter() - started)


def _spectra(model: OpenModel, ranks: Ranks) -> dict[str, list[Any]]:
    """Read `SPECTRA` of every head; NaN where queries and keys are no affine function of the input."""
    columns: dict[str, list[Any]] = {name: [] for name in SPECTRA}
    # Weights that are spread are read by all processes together, others by the first one alone.
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

    def __init__(self, model: OpenModel, tokens: Tokens, longest: int) -> None:
        heads, contexts, distances = model.heads, len(tokens.ids), 2 * longest - 1
        self.length = longest
        self.attention_statistics = AttentionStatistics(model.layers, heads, longest, contexts, examples=0)
        shape = (heads, distances)
        of_distances = LayerSums(model.layers, {"by_distance": shape, "with_distance": shape})
        self._parts = {"attention": self.attention_statistics, "distances": of_distances}
        self._residual: dict[int, State] = {}
        self._tokens = tokens
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
        self._residual[layer] = {name: sums[name] for name in RESIDUAL}

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """Measure one layer's attention, and compute its output."""
        for name, sums in distance_sums(inputs, self.length).items():
            # Another layer may have more heads.
            self._parts["distances"].at(name, layer, sums.device)[: len(sums)] += sums
        return self.attention_statistics.update(layer, inputs, self._tokens, 0)

    @property
    def maxima(self) -> frozenset[str]:
        """Names in `state` of what is no sum, but a maximum."""
        return frozenset("attention." + name for name in self.attention_statistics.maxima)

    def state(self, counts: bool) -> State:
        """Return the sums, leading with layers; zeros unless it `counts`, but for maxima."""
        parts = {name: part.state() for name, part in self._parts.items()}
        residual = [of_layer for _, of_layer in sorted(self._residual.items())]
        parts["residual"] = {name: torch.stack([of[name] for of in residual]) for name in RESIDUAL}
        # Rows of tokens differ from process to process, and no column is made of them.
        attention = {name: t for name, t in parts["attention"].items() if not name.startswith("sink_tokens.")}
        # A learned sink column is one more outcome beside the keys.
        outcomes = attention["visible_keys"] + (attention["learned"].sum(dim=(1, 2)) > 0)[:, None]
        attention["most_entropy"] = torch.xlogy(attention["readers"], outcomes).sum(dim=1)
        state = joined(parts | {"attention": attention})
        return {name: t if counts or name in self.maxima else 0 * t for name, t in state.items()}


def distance_sums(inputs: AttentionInputs, longest: int) -> State:
    """Sum over contexts the mean attention of `QUERIES` queries by distance (H, D), and the contexts that have it."""
    batch, heads, length, _ = inputs.query.shape
    device = inputs.query.device
    rows = torch.arange(1, QUERIES + 1, device=device) * length // QUERIES - 1
    # The rows are a block of their own, so that key j stands in column j but for the keys that none of them sees.
    (block,) = inputs.of_queries(rows).blocks(QUERIES)
    weights = softmax(block.logits.double(), inputs.sink)
    distances = (rows[:, None] - torch.arange(block.first, block.last, device=device)).flatten()
    index = distances + longest - 1
    counts = torch.bincount(index, minlength=2 * longest - 1)
    by_distance = weights.new_zeros(heads, len(counts)).index_add_(1, index, weights.sum(dim=0).flatten(1))
    common = counts >= QUERIES // 2
    return {
        "by_distance": (by_distance / counts.clamp_min(1) * common).cpu(),
        "with_distance": (batch * common).double().expand(heads, -1).cpu(),
    }


def residual_place(layer: int) -> str:
    """Say where residual layer ℓ is: it leaves block ℓ − 1, and layer 0 enters block 0."""
    return f"after block {layer - 1}" if layer else "before block 0"
