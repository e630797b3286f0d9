"""Numbers by layer that several tables and figures share: their errors and noise, from contexts drawn anew.

A run keeps the basis of all contexts only, so that errors need the text once more, hidden states alone, in the survey's
eight groups; without the model or the text no error is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.nn import functional

from theodolite import Corpus, OpenModel, Run
from theodolite.accumulate.means import Means, Sample, decomposed
from theodolite.corpus.groups import GROUPS
from theodolite.corpus.spec import RANDOM
from theodolite.corpus.special_tokens import trailing_special_tokens
from theodolite.estimates import Estimate, Estimates, Floats, jackknife_error
from theodolite.jobs.job import Stage, run_stages
from theodolite.judging import (
    FAILS,
    HOLDS,
    OPEN,
    Criterion,
    Verdict,
    all_of,
    judge,
    unless_explained,
    untestable,
)
from theodolite.measure.position import SCREENOT_RANK, screenot_bound
from theodolite.measure.uncertainty import balanced_halves, half_sample_error
from theodolite.models.structure import NoAttention
from theodolite.models.weights.copies import NotAffine
from theodolite.passes.corpus_pass import CorpusPass, batch_of
from theodolite.report.data import (
    OF_GROUPS,
    error_of,
    layer_average,
    layer_estimates,
    mean_over_layers,
    need,
    value_of,
)
from theodolite.system.progress import ShowStage
from theodolite.system.wording import listed, number
from theodolite.theory import dct2
from theodolite.theory.haar import haar_rotation
from theodolite_papers.experiment import Outcome, Study, random_tokens_like

READING = "reading contexts by group"


@dataclass(frozen=True)
class GroupedBasis:
    """Sums of hidden states by layer and group of contexts, over those of its contexts that have a position."""

    sums: Float64[Tensor, "layers groups positions width"]
    readers: Float64[Tensor, "layers groups positions"]
    end: int

    def of(self, groups: Float[Tensor, " groups"]) -> Float64[Tensor, "layers positions_1_on width"]:
        """Compute the positional basis of the groups of weight 1."""
        groups = groups.double()
        text, width = slice(1, self.sums.shape[2]), self.sums.shape[3]
        nothing = torch.empty(0, width, dtype=torch.float64), torch.empty(0, dtype=torch.float64)
        bases = [
            decomposed(torch.tensordot(groups, sums, 1), groups @ readers, *nothing, text)[1][1 : self.end]
            for sums, readers in zip(self.sums, self.readers, strict=True)
        ]
        return torch.stack(bases)


class _SumsPass(CorpusPass):
    """`Means` of the residual stream, and nothing else."""

    def __init__(self, model: OpenModel, corpus: Corpus) -> None:
        super().__init__(model, corpus, 0, batch_of(corpus, None))
        self.trailing = trailing_special_tokens(model.tokenizer, corpus.contexts, corpus.lengths)
        nothing = torch.empty(0, dtype=torch.int64)
        sample = Sample(torch.full((self.total,), -1), nothing, nothing)
        length = corpus.contexts.shape[1]
        self.means = Means(model.layers + 1, length, model.width, sample, self.trailing)
        self._first = 0

    @property
    def accumulators(self) -> dict[str, Means]:
        """The means."""
        return {"means": self.means}

    def begin(self, first: int, ids: Tensor) -> None:
        """Announce the next contexts, `first …`."""
        self._first = first

    def stream(self, layer: int, hidden: Tensor) -> None:
        """Take in the residual stream of one layer."""
        self.means.update(layer, hidden, self._first)


def read_by_group(model: OpenModel, corpus: Corpus, run: Run, show: ShowStage) -> GroupedBasis | None:
    """Read the text of a run for the basis of its groups; None below 8 contexts, of which some groups are empty."""
    if len(corpus.contexts) < GROUPS or corpus.leading != 1:
        return None
    reading = _SumsPass(model, corpus)
    state = run_stages([Stage("text", READING, lambda _: reading)], show).of("text.means")
    text = slice(corpus.contexts.shape[1] - reading.trailing)
    end = run.arrays["positional_basis"].shape[1]
    return GroupedBasis(state["position_sum"][:, :, text], state["readers"][:, :, text], end)


def grouped_basis(study: Study, run: Run | None = None) -> GroupedBasis | None:
    """Read the basis by group of the text of a run, once: the study's, or that on random tokens."""
    run = run or study.run
    model, corpus = study.model, study.corpus
    sha256 = run.provenance["corpus"].get("sha256")

    def read() -> GroupedBasis | None:
        text = corpus if corpus is not None and corpus.sha256 == sha256 else None
        # Random tokens (`Study.random_run`) follow from their description.
        if text is None and run.provenance["corpus"]["name"] == RANDOM and model and model.vocabulary:
            text = random_tokens_like(model, run)
        if model is None or text is None or text.sha256 != sha256:
            return None
        return read_by_group(model, text, run, study.show)

    return study.cached(f"basis by group of {sha256}", read)


def by_halves(basis: GroupedBasis, numbers: Callable[[Tensor], Floats]) -> Floats:
    """Compute numbers of a positional basis, such as one a layer, from each of the balanced halves: (halves, …)."""
    return np.stack([np.asarray(numbers(basis.of(half)), dtype=np.float64) for half in balanced_halves()])


def errors_of(
    basis: GroupedBasis | None, numbers: Callable[[Tensor], Floats], like: Floats | float
) -> Floats:
    """Compute standard errors of numbers of a positional basis; NaN, in the shape of `like`, where none are known."""
    if basis is None:
        return np.full(np.shape(like), np.nan)
    return half_sample_error(torch.from_numpy(by_halves(basis, numbers))).numpy()


QUARTERS = 4

Quarters = Sequence[Float64[Tensor, "*batch positions width"]]


def estimated(basis: GroupedBasis, number: Callable[[GroupedBasis], float]) -> Estimate:
    """Estimate a number without noise and its error, by leaving out one group of contexts at a time (jackknife)."""
    values = []
    for left_out in range(GROUPS):
        kept = (torch.arange(GROUPS) != left_out).double()
        sums, readers = basis.sums * kept[:, None, None], basis.readers * kept[:, None]
        values.append(number(replace(basis, sums=sums, readers=readers)))
    return Estimate(number(basis), float(jackknife_error(values)), *OF_GROUPS)


def quarters_of(basis: GroupedBasis) -> list[Float64[Tensor, "layers positions width"]]:
    """Return the positional basis of each quarter of the contexts."""
    return [basis.of((torch.arange(GROUPS) % QUARTERS == quarter).double()) for quarter in range(QUARTERS)]


def shares(rows: Quarters, columns: Quarters, cutoffs: Sequence[int]) -> Float64[Tensor, "*batch cutoffs"]:
    """Compute the share of the energy of the DCT of rows · columnsᵀ in its lowest frequencies, free of noise."""
    whole = rows[0].new_zeros(rows[0].shape[:-2])
    lowest = whole[..., None].repeat_interleave(len(cutoffs), -1)
    largest = max(cutoffs)
    for one, two, three, four in permutations(range(QUARTERS)):
        if one > three:  # the same product, with its factors in the other order
            continue
        first, second = rows[one] @ columns[two].mT, rows[three] @ columns[four].mT
        whole = whole + (first * second).sum((-2, -1))
        low = dct2(first, largest) * dct2(second, largest)
        lowest = lowest + torch.stack([low[..., :k, :k].sum((-2, -1)) for k in cutoffs], -1)
    share = (lowest / whole[..., None]).clamp(0, 1)
    return torch.where(whole[..., None] > 0, share, torch.nan)


def low_frequency_without_noise(basis: GroupedBasis, cutoff: int = 10) -> Floats:
    """Compute the share of the normalised Gram matrix, by layer; rows over the lengths that all contexts give."""
    lengths = torch.linalg.vector_norm(basis.of(torch.ones(GROUPS)), dim=-1, keepdim=True)
    quarters = [quarter / lengths for quarter in quarters_of(basis)]
    return shares(quarters, quarters, (cutoff,))[..., 0].numpy()


def gram_shares(basis: GroupedBasis, cutoffs: Sequence[int]) -> Floats:
    """Return the shares of PPᵀ, (layers, cutoffs)."""
    quarters = quarters_of(basis)
    return np.asarray(shares(quarters, quarters, cutoffs))


def product_shares(basis: GroupedBasis, model: OpenModel, cutoffs: Sequence[int]) -> Floats:
    """Return the shares of PWPᵀ, W = W_q W_kᵀ of every head that has one, (heads of all layers, cutoffs)."""
    quarters = quarters_of(basis)
    parts = []
    for layer in range(model.layers):
        try:
            weights = model.head_weights(layer)
        except (NotAffine, NoAttention):
            continue
        if weights.w_q.shape[1] == quarters[0].shape[-1]:
            w_q, w_k = (w.double().cpu() for w in (weights.w_q, weights.w_k))
            queries, keys = ([quarter[layer] @ w for quarter in quarters] for w in (w_q, w_k))
            parts.append(shares(queries, keys, cutoffs))
    return np.concatenate(parts) if parts else np.empty((0, len(cutoffs)))


def gram_without_noise(basis: GroupedBasis) -> Float64[Tensor, "layers positions positions"]:
    """Average PPᵀ over pairs of quarters, in which no error meets itself."""
    quarters = quarters_of(basis)
    total = sum(quarters)
    assert isinstance(total, Tensor)
    own = sum(quarter @ quarter.mT for quarter in quarters)
    return (total @ total.mT - own) / (QUARTERS * (QUARTERS - 1))


def noise_bases(basis: GroupedBasis) -> Float64[Tensor, "pairs layers positions width"]:
    """Estimate what sampling alone puts into a positional basis: half the difference of two halves of the contexts.

    One for each balanced half and its complement; of equal groups the noise is as large as in the whole basis.
    """
    halves = balanced_halves()
    pairs = zip(*halves.chunk(2), strict=True)
    return torch.stack([(basis.of(half) - basis.of(complement)) / 2 for half, complement in pairs])


def norms_beyond_noise(norms: Estimates, basis: GroupedBasis) -> Estimates:
    """Return the basis' relative norms less what sampling noise alone has, squares subtracted: lower bounds."""
    noise = torch.linalg.matrix_norm(noise_bases(basis), ord=2).square().mean(0)
    share = noise / torch.linalg.matrix_norm(basis.of(torch.ones(GROUPS)), ord=2).square()
    left = norms.values * np.sqrt(np.clip(1 - share.numpy(), 0, None))
    errors = np.full(left.shape, np.nan) if norms.errors is None else norms.errors
    # d√(r² − s²) = r dr/√(r² − s²); where nothing is left, as large as all that was there.
    grown = errors * norms.values / np.maximum(left, np.maximum(errors, 1e-300))
    return replace(norms, values=left, errors=grown)


def found_ranks(run: Run) -> Floats:
    """Return ScreeNOT's rank of each layer, NaN where it is 0: no direction found is no low rank."""
    ranks = value_of(run, "rank")
    return np.where(ranks > 0, ranks, np.nan)


def energy_within_rank(run: Run) -> Floats:
    """Compute the share of ‖P‖_F² in as many leading directions as the rank, by layer; NaN where no rank was found."""
    return energy_within(torch.from_numpy(need(run, "positional_basis")[:, 1:]).double(), found_ranks(run))


def energy_within(basis: Tensor, ranks: Floats) -> Floats:
    """Compute a basis' (layers, positions, d) share of energy in as many leading directions as given, by layer."""
    squared = torch.linalg.svdvals(basis).square()
    shares = (squared.cumsum(-1) / squared.sum(-1, keepdim=True)).numpy()
    places = np.nan_to_num(ranks, nan=1).astype(int) - 1
    return np.where(np.isnan(ranks), np.nan, shares[np.arange(len(shares)), places])


def noise_share(run: Run) -> Floats:
    """Compute the share of ‖P‖_F² that means over C contexts have by chance, (E‖h‖² − ‖μ‖² − E‖pos‖²)/C a position."""
    energy = np.square(need(run, "positional_basis")[:, 1:].astype(np.float64)).sum(2).mean(1)
    constant = np.square(need(run, "mean").astype(np.float64)).sum(1)
    residual_energy = np.clip(np.square(value_of(run, "norm")) - constant - energy, 0, None)
    return np.nan_to_num(residual_energy / (run.provenance["corpus"]["contexts"] * energy))


LEAST_RANKED = 42
"""Rows and columns below which ScreeNOT's upper bound of 20 has no room (it needs 2·20 + 1 values below it)."""

LEAST_POSITIONS = 32
"""Positions below which the 10 × 10 lowest frequencies are more than a tenth of all, and smoothness says little."""

LEAST_UNSMOOTH_POSITIONS = 20
"""The same where a low share is claimed: above it, positions in random order reach a quarter."""


def no_room(run: Run) -> str | None:
    """Say why no rank can be judged in contexts this short; None: it can."""
    positions, width = need(run, "positional_basis").shape[1:]
    if min(positions - 1, width) >= LEAST_RANKED:
        return None
    return (
        f"{positions - 1} positions of width {width} leave ScreeNOT's upper bound of {SCREENOT_RANK} no room: use "
        f"contexts of {LEAST_RANKED + 1} or more"
    )


def judge_low_rank(outcome: Outcome, study: Study, *, every: bool) -> None:
    """Judge the rank and the energy within it: of `every` layer, or their means over layers."""
    run = study.run
    if why := no_room(run):
        outcome.cannot_judge("low-rank", why)
        return
    ranks, layers = found_ranks(run), len(run.layers)
    missing = np.flatnonzero(np.isnan(ranks)).tolist()
    basis = torch.from_numpy(need(run, "positional_basis")[0, 1:])
    cap = f"ScreeNOT looks for at most {screenot_bound(basis)} directions"
    if len(missing) == layers:
        outcome.cannot_judge("low-rank", f"{cap} and found none in any of {layers} layers: no rank found")
        return
    if missing:
        cap += f" and found none at layer {listed([str(layer) for layer in missing])}"
    errors = np.where(np.isnan(ranks), np.nan, error_of(run, "rank"))
    worst = int(np.nanargmax(ranks))
    mean, _, mean_error = mean_over_layers(ranks, errors)
    rank = (float(ranks[worst]), float(errors[worst])) if every else (mean, mean_error)
    words = {"layers": layers - len(missing), "worst": worst, "possible": min(basis.shape), "cap": cap}
    parts = [
        outcome.verdict("low-rank.rank", Estimate(*rank, *OF_GROUPS), **words),
        _energy_within_rank(outcome, study, np.nanmin if every else np.nanmean),
    ]
    if missing and (every or 2 * len(missing) >= layers):
        parts.append(untestable(parts[0].claim, "no rank found: not testable there"))
    outcome.verdicts.append(all_of(parts[0].claim, parts))


def _energy_within_rank(outcome: Outcome, study: Study, over_layers: Callable[[Floats], float]) -> Verdict:
    """Judge the energy within the rank: more contexts raise it by the noise at most; within that, undecided."""
    run, ranks, key = study.run, found_ranks(study.run), "low-rank.energy"
    shares, noise = energy_within_rank(run), noise_share(run)
    value, without_noise = float(over_layers(shares)), min(float(over_layers(shares + noise)), 1.0)
    error = errors_of(grouped_basis(study), lambda p: np.asarray(over_layers(energy_within(p, ranks))), value)
    layers = int(np.isfinite(shares).sum())
    verdict = outcome.verdict(key, Estimate(value, float(error), *OF_GROUPS), layers=layers)
    contexts = run.provenance["corpus"]["contexts"]
    noisy = f"up to {number(without_noise)} without the sampling noise of {contexts} contexts"
    met = outcome.criterion(key).met(without_noise)
    return unless_explained(verdict, FAILS, noisy if met else "")


ROTATIONS = 100
QUANTILE = 0.975
"""Of the rotations: the upper end of their 95 % interval."""

_SEED = 0


@dataclass(frozen=True)
class RandomCosines:
    """|Cosines| of positions and contexts after random rotations, (rotations, layers): their mean and their maximum."""

    mean: Floats
    largest: Floats

    def limits(self, name: str) -> Floats:
        """Return the quantile of `mean` or `largest` by layer."""
        return np.asarray(np.quantile(getattr(self, name), QUANTILE, axis=0))


def random_cosines(basis: Tensor, contexts: Tensor, rotations: int = ROTATIONS) -> RandomCosines:
    """Rotate a basis (layers, positions, d) at random against contexts (layers, contexts, d), all layers alike."""
    unit, directions = (functional.normalize(rows.float(), dim=-1) for rows in (basis, contexts))
    generator = torch.Generator().manual_seed(_SEED)
    means, maxima = [], []
    for _ in range(rotations):
        rotation = haar_rotation(basis.shape[-1], generator, unit.device).to(unit)
        cosines = [(p @ rotation @ c.mT).abs() for p, c in zip(unit, directions, strict=True)]
        means.append([float(each.mean()) for each in cosines])
        maxima.append([float(each.max()) for each in cosines])
    return RandomCosines(np.array(means), np.array(maxima))


def chance_cosines(study: Study) -> RandomCosines:
    """Rotate the positional basis of the study's run at random; made once."""

    def draw() -> RandomCosines:
        basis, contexts = need(study.run, "positional_basis")[:, 1:], need(study.run, "context_basis")
        return random_cosines(torch.from_numpy(basis), torch.from_numpy(contexts))

    return study.cached("cosines of random rotations", draw)


def over_random(study: Study, name: str) -> Estimates:
    """Divide the `mean` or `largest` |cosine| of every layer by the quantile of random rotations."""
    limits = chance_cosines(study).limits(name)
    measured = layer_estimates(study.run, {"mean": "incoherence_mean", "largest": "incoherence_max"}[name])
    assert measured.errors is not None
    return replace(measured, values=measured.values / limits, errors=measured.errors / limits)


def mean_over_random(study: Study) -> Estimate:
    """Divide the mean |cosine| over all layers by the quantile of the same mean of random rotations."""
    limit = float(np.quantile(chance_cosines(study).mean.mean(axis=1), QUANTILE))
    mean, _ = layer_average(study.run, "incoherence_mean")
    return replace(mean, value=mean.value / limit, error=mean.error / limit)


def quotient(over: Floats, errors: Floats, under: Floats, under_errors: Floats) -> tuple[Floats, Floats]:
    """Compute over/under with its standard error, as if both were independent."""
    ratio = over / under
    error: Floats = ratio * np.hypot(errors / over, under_errors / under)
    return ratio, error


def columns_with_errors(run: Run, names: Iterable[str]) -> pd.DataFrame:
    """Tabulate columns of the layers table, each with its standard errors, by layer; NaN what the run lacks."""
    return pd.DataFrame(
        {"layer": range(len(run.layers))}
        | {f"{name}{end}": value_of(run, f"{name}{end}") for name in names for end in ("", "_se")}
    )


def beyond_random_order(
    lowest: Floats,
    constant: Floats,
    positions: int,
    errors: tuple[Floats | float, Floats | float] = (math.nan, math.nan),
) -> tuple[Floats, Floats]:
    """Rescale a share of low frequencies from the most that random order has on average (0) to all energy (1).

    1 − (1 − r_10)/((1 − r_1)(1 − 9/(n − 1))), and its standard errors, of `errors` of both shares: in random order the
    constant keeps its energy r_1, and of the rest at most 9 of n − 1 parts are expected within the ten lowest
    frequencies.
    """
    rest = np.where(constant < 1, 1 - constant, np.nan)
    factor = 1 / (1 - min(1.0, 9 / (positions - 1)))
    beyond: Floats = 1 - (1 - lowest) / rest * factor
    error: Floats = factor * (errors[0] / rest + (1 - lowest) / rest**2 * errors[1])
    return beyond, error


def few_positions(run: Run, least: int = LEAST_POSITIONS) -> str | None:
    """Say why low frequencies of so few positions say nothing; None: they do."""
    positions = need(run, "positional_basis").shape[1] - 1
    why = (
        f"{positions} positions have only {positions} frequencies: use contexts of {least + 1} tokens or more"
    )
    return why if positions < least else None


def smooth_verdict(
    outcome: Outcome, study: Study, run: Run, key: str = "smooth", least: int = LEAST_POSITIONS
) -> Verdict:
    """Judge the normalised Gram matrix by its mean share of energy in the 10 × 10 lowest frequencies.

    Not decided where the answer would be another one `unless_noise`.
    """
    positions = need(run, "positional_basis").shape[1] - 1
    mean, _ = layer_average(run, "low_frequency_10")
    if why := few_positions(run, least):
        return untestable(outcome.sentence(key), f"share of energy at K = 10: {mean.value:.3f}, but {why}")
    verdict = outcome.verdict(key, mean, layers=len(run.layers), chance=(10 / positions) ** 2)
    criterion = outcome.criterion(key)
    unknown = float(bool(criterion.met(mean.value)) != bool(criterion.met(1.0)))

    def without_noise(basis: GroupedBasis) -> float:
        return float(np.nan_to_num(low_frequency_without_noise(basis), nan=unknown).mean())

    return unless_noise(study, run, verdict, criterion, without_noise)


def judge_significant(outcome: Outcome, study: Study) -> None:
    """Judge the relative norms of all layers."""
    norms = layer_estimates(study.run, "relative_norm")
    verdict = outcome.verdict("significant", norms)
    if verdict.answer == HOLDS and (basis := grouped_basis(study)) is not None:
        left = outcome.verdict("significant", norms_beyond_noise(norms, basis))
        holding = sum(row.answer == HOLDS for row in left.parts)
        contexts = study.run.provenance["corpus"]["contexts"]
        noisy = f"in {holding} of them without the sampling noise of {contexts} contexts"
        verdict = unless_explained(verdict, HOLDS, "" if left.answer == HOLDS else noisy)
    outcome.verdicts.append(verdict)


def unless_noise(
    study: Study, run: Run, verdict: Verdict, criterion: Criterion, number: Callable[[GroupedBasis], float]
) -> Verdict:
    """Keep the verdict, but undecided where its `number` free of sampling noise does not give the same answer.

    The text is read again for that.
    """
    if verdict.answer in OPEN or (basis := grouped_basis(study, run)) is None:
        return verdict
    without_noise = estimated(basis, number)
    noisy = f"{without_noise} without the sampling noise of {run.provenance['corpus']['contexts']} contexts"
    same = judge(verdict.claim, noisy, without_noise, criterion).answer == verdict.answer
    return unless_explained(verdict, verdict.answer, "" if same else noisy)
