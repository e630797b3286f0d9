"""Is the positional basis low-rank? ScreeNOT's rank, and the energy that as many directions hold (Tables 1 and 4).

ScreeNOT looks for at most 20 directions, so a low number alone cannot tell a low rank from a high one.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from theodolite import Run
from theodolite.estimates import Estimate
from theodolite.judging import FAILS, Verdict, all_of, judge, unless_explained, untestable
from theodolite.measure.geometry import SCREENOT_RANK, screenot_bound
from theodolite.report.data import OF_GROUPS, Floats, error_of, mean_over_layers, need, value_of
from theodolite.system.wording import listed, number
from theodolite_papers.experiment import Study
from theodolite_papers.hidden_geometry import criteria
from theodolite_papers.hidden_geometry.resampling import errors_of, grouped_basis


def found_ranks(run: Run) -> Floats:
    """ScreeNOT's rank of each layer, NaN where it is 0: no direction found is no low rank."""
    ranks = value_of(run, "rank")
    return np.where(ranks > 0, ranks, np.nan)


def energy_within_rank(run: Run) -> Floats:
    """Share of ‖P‖_F² in as many leading singular directions as the rank, by layer; NaN where no rank was found."""
    return energy_within(torch.from_numpy(need(run, "positional_basis")[:, 1:]).double(), found_ranks(run))


def energy_within(basis: Tensor, ranks: Floats) -> Floats:
    """The same of a basis (layers, positions, d) and given ranks."""
    squared = torch.linalg.svdvals(basis).square()
    shares = (squared.cumsum(-1) / squared.sum(-1, keepdim=True)).numpy()
    places = np.nan_to_num(ranks, nan=1).astype(int) - 1
    energy: Floats = np.where(np.isnan(ranks), np.nan, shares[np.arange(len(shares)), places])
    return energy


def noise_share(run: Run) -> Floats:
    """Share of ‖P‖_F² that means over C contexts have by chance, by layer; 0 where the run has no norms.

    Of independent contexts: (E‖h‖² − ‖μ‖² − E‖pos‖²)/C a position, E‖h‖² taken as the square of the mean norm.
    """
    energy = np.square(need(run, "positional_basis")[:, 1:].astype(np.float64)).sum(2).mean(1)
    constant = np.square(need(run, "mean").astype(np.float64)).sum(1)
    residual_energy = np.clip(np.square(value_of(run, "norm")) - constant - energy, 0, None)
    share: Floats = np.nan_to_num(residual_energy / (run.provenance["corpus"]["contexts"] * energy))
    return share


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
    """Judge the rank and the energy within it: of `every` layer, or their means over layers.

    Layers without a rank are not judged: one leaves "every layer" undecided, half of them the mean.
    """
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
        what = f"highest rank of {count} layers, at layer {worst}, of {possible} possible ({cap})"
        return judge(
            claim, what, Estimate(float(ranks[worst]), float(errors[worst]), *OF_GROUPS), criteria.RANK
        )
    mean, _, error = mean_over_layers(ranks, errors)
    what = f"mean rank over {count} layers, of {possible} possible ({cap})"
    return judge(claim, what, Estimate(mean, error, *OF_GROUPS), criteria.RANK)


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
    error = errors_of(grouped_basis(study), lambda p: np.asarray(summary(energy_within(p, ranks))), value)
    estimate = Estimate(value, float(error), *OF_GROUPS)
    return unless_explained(judge(claim, what, estimate, criteria.WITHIN_RANK), FAILS, explanation)
