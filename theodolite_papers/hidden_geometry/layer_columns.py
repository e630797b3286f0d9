"""What several tables and figures share: quotients of columns, shares of heads, smoothness."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional

from theodolite import Run
from theodolite.estimates import Estimate, Estimates
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
from theodolite.measure.geometry import SCREENOT_RANK, screenot_bound
from theodolite.report.data import (
    OF_GROUPS,
    Floats,
    error_of,
    layer_average,
    layer_estimates,
    mean_over_layers,
    need,
    value_of,
)
from theodolite.system.wording import listed, number
from theodolite.theory.haar import haar_rotation
from theodolite_papers.experiment import Study
from theodolite_papers.hidden_geometry import criteria, resampling
from theodolite_papers.hidden_geometry.resampling import GroupedBasis


def found_ranks(run: Run) -> Floats:
    """ScreeNOT's rank of each layer, NaN where it is 0: no direction found is no low rank."""
    ranks = value_of(run, "rank")
    return np.where(ranks > 0, ranks, np.nan)


def energy_within_rank(run: Run) -> Floats:
    """Share of ‖P‖_F² in as many leading singular directions as the rank, by layer; NaN where no rank was found."""
    return energy_within(torch.from_numpy(need(run, "positional_basis")[:, 1:]).double(), found_ranks(run))


def energy_within(basis: Tensor, ranks: Floats) -> Floats:
    """Share of the energy of a basis (layers, positions, d) in as many leading directions as given, by layer."""
    squared = torch.linalg.svdvals(basis).square()
    shares = (squared.cumsum(-1) / squared.sum(-1, keepdim=True)).numpy()
    places = np.nan_to_num(ranks, nan=1).astype(int) - 1
    return np.where(np.isnan(ranks), np.nan, shares[np.arange(len(shares)), places])


def noise_share(run: Run) -> Floats:
    """Share of ‖P‖_F² that means over C contexts have by chance, (E‖h‖² − ‖μ‖² − E‖pos‖²)/C a position, by layer."""
    energy = np.square(need(run, "positional_basis")[:, 1:].astype(np.float64)).sum(2).mean(1)
    constant = np.square(need(run, "mean").astype(np.float64)).sum(1)
    residual_energy = np.clip(np.square(value_of(run, "norm")) - constant - energy, 0, None)
    return np.nan_to_num(residual_energy / (run.provenance["corpus"]["contexts"] * energy))


def no_room(run: Run) -> str | None:
    """Why no rank can be judged in contexts this short; None: it can."""
    positions, width = need(run, "positional_basis").shape[1:]
    if min(positions - 1, width) >= criteria.LEAST_RANKED:
        return None
    return (
        f"{positions - 1} positions of width {width} leave ScreeNOT's upper bound of {SCREENOT_RANK} no room: use "
        f"contexts of {criteria.LEAST_RANKED + 1} or more"
    )


def low_rank_verdict(study: Study, claim: str, *, every: bool) -> Verdict:
    """Judge the rank and the energy within it: of `every` layer, or their means over layers."""
    run = study.run
    if why := no_room(run):
        return untestable(claim, why)
    ranks, layers = found_ranks(run), len(run.layers)
    missing = np.flatnonzero(np.isnan(ranks)).tolist()
    basis = torch.from_numpy(need(run, "positional_basis")[0, 1:])
    cap = f"ScreeNOT looks for at most {screenot_bound(basis)} directions"
    if len(missing) == layers:
        return untestable(claim, f"{cap} and found none in any of {layers} layers: no rank found")
    if missing:
        cap += f" and found none at layer {listed([str(layer) for layer in missing])}"
    parts = [_of_rank(run, claim, ranks, every, cap), _of_energy(study, claim, every)]
    if missing and (every or 2 * len(missing) >= layers):
        parts.append(untestable(claim, "no rank found: not testable there"))
    return all_of(claim, parts)


def _of_rank(run: Run, claim: str, ranks: Floats, every: bool, cap: str) -> Verdict:
    count, possible = int(np.isfinite(ranks).sum()), min(need(run, "positional_basis")[0, 1:].shape)
    errors = np.where(np.isnan(ranks), np.nan, error_of(run, "rank"))
    if every:
        worst = int(np.nanargmax(ranks))
        what = f"highest rank of {count} layers, at layer {worst}"
        rank, error = float(ranks[worst]), float(errors[worst])
    else:
        what = f"mean rank over {count} layers"
        rank, _, error = mean_over_layers(ranks, errors)
    what += f", of {possible} possible ({cap})"
    return judge(claim, what, Estimate(rank, error, *OF_GROUPS), criteria.RANK)


def _of_energy(study: Study, claim: str, every: bool) -> Verdict:
    """More contexts would raise the energy within the rank by no more than the noise: within that, undecided."""
    run, ranks = study.run, found_ranks(study.run)
    shares, noise = energy_within_rank(run), noise_share(run)
    summary_name, summary = ("lowest of", np.nanmin) if every else ("mean over", np.nanmean)
    value, without_noise = float(summary(shares)), min(float(summary(shares + noise)), 1.0)
    count = int(np.isfinite(shares).sum())
    what = f"share of the energy of P within its rank, {summary_name} {count} layers"
    contexts = run.provenance["corpus"]["contexts"]
    noisy = f"up to {number(without_noise)} without the sampling noise of {contexts} contexts"
    explanation = noisy if criteria.WITHIN_RANK.met(without_noise) else ""
    basis = resampling.grouped_basis(study)
    error = resampling.errors_of(basis, lambda p: np.asarray(summary(energy_within(p, ranks))), value)
    estimate = Estimate(value, float(error), *OF_GROUPS)
    return unless_explained(judge(claim, what, estimate, criteria.WITHIN_RANK), FAILS, explanation)


ROTATIONS = 100
QUANTILE = 0.975
"""Of the rotations: the upper end of their 95 % interval."""

_SEED = 0

AS_RANDOM = Criterion(
    "at most",
    1.0,
    f"the {QUANTILE:.1%} quantile over {ROTATIONS} random rotations of the positional basis: “random baseline” "
    "(section 5)".replace("%", "\u00a0%"),
)


@dataclass(frozen=True)
class RandomCosines:
    """|Cosines| of positions and contexts after random rotations, (rotations, layers): their mean and their maximum."""

    mean: Floats
    largest: Floats

    def limits(self, name: str) -> Floats:
        """The quantile by layer: of `mean` or `largest`."""
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
    """The `mean` or `largest` |cosine| of every layer, over the quantile of random rotations."""
    limits = chance_cosines(study).limits(name)
    measured = layer_estimates(study.run, {"mean": "incoherence_mean", "largest": "incoherence_max"}[name])
    assert measured.errors is not None
    return replace(measured, values=measured.values / limits, errors=measured.errors / limits)


def mean_over_random(study: Study) -> Estimate:
    """The mean |cosine| over all layers, over the quantile of the same mean of random rotations."""
    limit = float(np.quantile(chance_cosines(study).mean.mean(axis=1), QUANTILE))
    mean, _ = layer_average(study.run, "incoherence_mean")
    return replace(mean, value=mean.value / limit, error=mean.error / limit)


def quotient(over: Floats, errors: Floats, under: Floats, under_errors: Floats) -> tuple[Floats, Floats]:
    """over/under with its standard error, as if both were independent."""
    ratio = over / under
    error: Floats = ratio * np.hypot(errors / over, under_errors / under)
    return ratio, error


def columns_with_errors(run: Run, names: Iterable[str]) -> pd.DataFrame:
    """Columns of the layers table, each with its standard errors, by layer; NaN what the run lacks."""
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
    """How far a share of low frequencies lies from the most that random order has on average (0) to all energy (1).

    1 − (1 − r_10)/((1 − r_1)(1 − 9/(n − 1))), and its standard errors, of `errors` of both shares: in random order the
    constant keeps its energy r_1, and of the rest at most 9 of n − 1 parts are expected within the ten lowest
    frequencies.
    """
    rest = np.where(constant < 1, 1 - constant, np.nan)
    factor = 1 / (1 - min(1.0, 9 / (positions - 1)))
    beyond: Floats = 1 - (1 - lowest) / rest * factor
    error: Floats = factor * (errors[0] / rest + (1 - lowest) / rest**2 * errors[1])
    return beyond, error


def few_positions(run: Run, least: int = criteria.LEAST_POSITIONS) -> str | None:
    """Why low frequencies of so few positions say nothing; None: they do."""
    positions = need(run, "positional_basis").shape[1] - 1
    why = (
        f"{positions} positions have only {positions} frequencies: use contexts of {least + 1} tokens or more"
    )
    return why if positions < least else None


def smooth_verdict(
    study: Study,
    run: Run,
    claim: str,
    criterion: Criterion = criteria.SMOOTH,
    least: int = criteria.LEAST_POSITIONS,
) -> Verdict:
    """Judge the normalised Gram matrix by its mean share of energy in the 10 × 10 lowest frequencies.

    Not decided where the answer would be another one `unless_noise`.
    """
    positions = need(run, "positional_basis").shape[1] - 1
    mean, _ = layer_average(run, "low_frequency_10")
    chance = (10 / positions) ** 2
    if why := few_positions(run, least):
        return untestable(claim, f"share of energy at K = 10: {mean.value:.3f}, but {why}")
    what = f"share of energy at K = 10, mean over {len(run.layers)} layers (positions in random order: {chance:.2g})"
    unknown = float(bool(criterion.met(mean.value)) != bool(criterion.met(1.0)))

    def without_noise(basis: GroupedBasis) -> float:
        return float(np.nan_to_num(resampling.low_frequency_without_noise(basis), nan=unknown).mean())

    return unless_noise(study, run, judge(claim, what, mean, criterion), criterion, without_noise)


def significant_verdict(study: Study, claim: str) -> Verdict:
    """Judge the relative norms of all layers."""
    norms = layer_estimates(study.run, "relative_norm")
    verdict = judge(claim, "relative norm", norms, criteria.SIGNIFICANT)
    if verdict.answer != HOLDS or (basis := resampling.grouped_basis(study)) is None:
        return verdict
    left = judge(claim, "", resampling.norms_beyond_noise(norms, basis), criteria.SIGNIFICANT)
    contexts = study.run.provenance["corpus"]["contexts"]
    holding = sum(row.answer == HOLDS for row in left.parts)
    noisy = f"in {holding} of them without the sampling noise of {contexts} contexts"
    return unless_explained(verdict, HOLDS, "" if left.answer == HOLDS else noisy)


def unless_noise(
    study: Study, run: Run, verdict: Verdict, criterion: Criterion, number: Callable[[GroupedBasis], float]
) -> Verdict:
    """The verdict, but undecided where its `number` free of the text's sampling noise does not give the same answer.

    The text is read again for that.
    """
    if verdict.answer in OPEN or (basis := resampling.grouped_basis(study, run)) is None:
        return verdict
    without_noise = resampling.estimated(basis, number)
    noisy = f"{without_noise} without the sampling noise of {run.provenance['corpus']['contexts']} contexts"
    same = judge(verdict.claim, noisy, without_noise, criterion).answer == verdict.answer
    return unless_explained(verdict, verdict.answer, "" if same else noisy)
