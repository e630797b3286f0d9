"""Numbers by layer that several tables and figures share, the positional basis by groups of contexts, a second text.

Columns of the layers table hold no sampling noise on average. What no column has is estimated here from bases of groups
of contexts: a run keeps that of all contexts only, so that the text is read once more, hidden states alone. So is a
second text, of which nothing but positions is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from theodolite import Corpus, Run
from theodolite.accumulate.sums import State
from theodolite.corpus.groups import GROUPS
from theodolite.corpus.spec import RANDOM
from theodolite.estimates import Estimate, Estimates, Floats
from theodolite.judging import NO_NUMBER, UNDECIDED, UNTESTABLE, Verdict, all_of, untestable
from theodolite.measure.column import WITHOUT
from theodolite.measure.position import SCREENOT_RANK, grouped_basis, screenot_bound
from theodolite.passes.positions import survey_positions
from theodolite.report import data
from theodolite.report.data import AT_FLOOR, need, value_of
from theodolite.system.wording import counted, with_error
from theodolite.theory.unbiased import Jackknifed, combined, leaving_out, product, stacked
from theodolite_papers.experiment import Outcome, Study, random_tokens_like

Basis = Float64[Tensor, "groups positions width"]
"""The positional basis of a layer, of each group of contexts."""


def bases_of(means: State) -> list[Basis] | None:
    """Return the basis of each layer by groups; None below 8 contexts, of which some groups are empty."""
    if (means["contexts"] == 0).any():
        return None
    return [grouped_basis(means, layer, 1).p for layer in range(len(means["contexts"]))]


def other_run(study: Study) -> Run:
    """Read the second text; without one, random tokens."""
    return random_run(study) if study.other is None else _positions(study, study.other)


def random_run(study: Study) -> Run:
    """Read as many contexts of random tokens, as long as those of the run; the run, if it is one."""
    if study.run.provenance["corpus"]["name"] == RANDOM:
        return study.run
    return _positions(study, random_tokens_like(study.require_model(), study.run))


def _positions(study: Study, corpus: Corpus) -> Run:
    """Read a text, once, for a run whose only table has the ranks and the smoothness of every layer."""

    def read() -> Run:
        model, seed = study.require_model(), study.provenance["seed"]
        run, means = survey_positions(model, corpus, seed=seed, show_progress=study.show)
        study.cached(_by_group(corpus.sha256), lambda: bases_of(means))
        return run

    return study.cached(f"positions of {corpus.sha256}", read)


def _by_group(sha256: str) -> str:
    return f"basis by group of {sha256}"


def bases_by_group(study: Study, run: Run | None = None) -> list[Basis] | None:
    """Read the basis by group of the text of a run, once: the study's, or that on random tokens."""
    run = run or study.run
    model, corpus = study.model, study.corpus
    sha256 = run.provenance["corpus"].get("sha256")

    def read() -> list[Basis] | None:
        text = corpus if corpus is not None and corpus.sha256 == sha256 else None
        # Random tokens follow from their description.
        if text is None and run.provenance["corpus"]["name"] == RANDOM and model and model.vocabulary:
            text = random_tokens_like(model, run)
        if model is None or text is None or text.sha256 != sha256:
            return None
        return bases_of(survey_positions(model, text, show_progress=study.show)[1])

    return study.cached(_by_group(sha256), read)


WITHOUT_TEXT = (
    f"estimated between groups of contexts: pass the model and the text, of {GROUPS} contexts or more"
)


def grams_between(p: Basis) -> Callable[[Tensor | None], Float64[Tensor, "positions positions"]]:
    """Average P_g P_hᵀ over pairs of different groups, in which no error meets itself: a function of the groups used.

    Those of weight 1 are used; None: all.
    """
    own = p @ p.mT

    def between(used: Tensor | None) -> Tensor:
        chosen = torch.ones(len(p), dtype=torch.bool) if used is None else used > 0
        whole, count = p[chosen].sum(dim=0), int(chosen.sum())
        return (whole @ whole.T - own[chosen].sum(dim=0)) / (count * (count - 1))

    return between


def is_seen(p: Basis) -> bool:
    """Return whether the energy of the positional basis is above its noise."""
    return bool(product(p.flatten(1)).above_noise())


def energy_within(p: Basis) -> Jackknifed:
    """Estimate the share of ‖P‖_F² in 1, 2, … leading directions, (directions,); NaN at the noise floor."""
    p = p if p.shape[1] <= p.shape[2] else p.mT
    between = grams_between(p)

    def shares(used: Float64[Tensor, " groups"]) -> Tensor:
        squares = torch.linalg.eigvalsh(between(used)).flip(0)
        return squares.cumsum(0) / squares.sum()

    # The largest eigenvalues take the noise along.
    return leaving_out(shares, len(p)).corrected().where(is_seen(p))


def leading_of_others(p: Basis, count: int) -> tuple[Basis, Basis]:
    """Return each group's P, and that of the others, in the leading directions of the others."""
    others = (p.sum(dim=0) - p) / (len(p) - 1)
    directions = torch.linalg.svd(others, full_matrices=False).Vh[:, :count].mT
    return p @ directions, others @ directions


def estimates_of(numbers: Jackknifed) -> Estimates:
    """Return the numbers of layers with their standard errors."""
    return Estimates(numbers.value.double().numpy(), numbers.error.double().numpy(), *data.OF_GROUPS)


def shown(number: Estimate) -> str:
    """Write a number with its standard error, or that it is at the noise floor."""
    return with_error(number.value, number.error) if math.isfinite(number.value) else AT_FLOOR


def mean_of(layers: Estimates) -> Estimate:
    """Average over the layers that are known, as `layer_average` does."""
    mean, _, error = data.mean_over_layers(layers.values, layers.errors)
    return Estimate(mean, error, *data.OF_GROUPS)


def jackknifed(run: Run, name: str) -> Jackknifed:
    """Return a layer column, and what it is without each group of contexts; NaN what the run lacks."""
    values = torch.tensor(value_of(run, name))
    without = run.arrays.get(f"layers.{name}{WITHOUT}", torch.full((GROUPS, len(values)), torch.nan))
    return Jackknifed(values, without.double())


def columns_with_errors(run: Run, names: Iterable[str]) -> pd.DataFrame:
    """Tabulate columns of the layers table, each with its standard errors, by layer; NaN what the run lacks."""
    return pd.DataFrame(
        {"layer": range(len(run.layers))}
        | {f"{name}{end}": value_of(run, f"{name}{end}") for name in names for end in ("", "_se")}
    )


def hidden_in(hidden: Bool[np.ndarray, " parts"], each: str = "layer") -> str:
    """Report in how many layers a number is at the noise floor."""
    return AT_FLOOR if len(hidden) == 1 else f"{AT_FLOOR} in {hidden.sum()} of {counted(len(hidden), each)}"


def unless_hidden(verdict: Verdict, hidden: Bool[np.ndarray, " parts"], each: str = "layer") -> Verdict:
    """Say in how many layers a number is at the noise floor; where that is half of them, leave the verdict undecided.

    verdict: of the other layers.
    """
    if not hidden.any():
        return verdict
    floor = hidden_in(hidden, each)
    if hidden.all():
        evidence = verdict.evidence.replace(NO_NUMBER, floor) or floor
        return Verdict(verdict.claim, UNDECIDED, evidence, withheld=floor)
    evidence = f"{verdict.evidence}; {floor}"
    if 2 * hidden.sum() < len(hidden) or verdict.answer == UNTESTABLE:
        return replace(verdict, evidence=evidence)
    return replace(verdict, answer=UNDECIDED, evidence=evidence, withheld=floor)


def judge_seen(
    outcome: Outcome, key: str, number: Estimate | Estimates, of_layers: Floats, /, **words: Any
) -> None:
    """Judge a claim on the layers that have a number, with their count for its words; the others by `unless_hidden`."""
    hidden = np.isnan(of_layers)
    verdict = outcome.verdict(key, number, layers=int((~hidden).sum()), **words)
    outcome.verdicts.append(unless_hidden(verdict, hidden))


LEAST_RANKED = 42  # rows and columns: ScreeNOT's upper bound of 20 needs 2·20 + 1 values below it
LEAST_POSITIONS = 32  # below, the 10 × 10 lowest frequencies are over a tenth of all
LEAST_UNSMOOTH_POSITIONS = 20  # the same for a low share: random order reaches a quarter above it


def no_room(run: Run) -> str | None:
    """Explain why no rank can be judged in contexts this short; None: it can."""
    positions, width = need(run, "positional_basis").shape[1:]
    why = (
        f"{positions - 1} positions of width {width} leave ScreeNOT's upper bound of {SCREENOT_RANK} no room"
    )
    short = min(positions - 1, width) < LEAST_RANKED
    return f"{why}: use contexts of {LEAST_RANKED + 1} or more" if short else None


def found_ranks(run: Run) -> Estimates:
    """Return the rank of each layer; NaN where it is 0, which is the noise floor and no low rank."""
    ranks = data.layer_estimates(run, "rank")
    return replace(ranks, values=np.where(ranks.values > 0, ranks.values, np.nan))


def energy_within_rank(study: Study) -> Estimates | None:
    """Estimate the share of ‖P‖_F² in as many leading directions as the rank, by layer; None without the text."""
    bases = bases_by_group(study)
    if bases is None:
        return None

    def of_layers() -> Estimates:
        ranks = np.nan_to_num(value_of(study.run, "rank")).astype(int)
        curves = zip(map(energy_within, bases), ranks, strict=True)
        return estimates_of(
            stacked([curve[max(rank, 1) - 1].where(torch.tensor(rank > 0)) for curve, rank in curves])
        )

    return study.cached("energy within the rank", of_layers)


def judge_low_rank(outcome: Outcome, study: Study, *, every: bool) -> None:
    """Judge the rank and the energy within it: of `every` layer, or their means over layers."""
    run = study.run
    if why := no_room(run):
        outcome.cannot_judge("low-rank", why)
        return
    ranks, energy, basis = found_ranks(run), energy_within_rank(study), need(run, "positional_basis")[0, 1:]
    hidden = np.isnan(ranks.values) if energy is None else np.isnan(ranks.values + energy.values)
    claim, layers, parts = outcome.sentence("low-rank"), int((~hidden).sum()), []
    if layers:
        ranks = replace(ranks, values=np.where(hidden, np.nan, ranks.values))
        worst, most = int(np.nanargmax(ranks.values)), screenot_bound(torch.from_numpy(basis))
        words = {"worst": worst, "possible": min(basis.shape), "most": most, "layers": layers}
        highest = ranks.at(worst) if every else mean_of(ranks)
        parts.append(outcome.verdict("low-rank.rank", highest, **words))
        if energy is None:
            what = outcome.sentence("low-rank.energy", "what", layers=layers)
            parts.append(untestable(claim, f"{what}: {WITHOUT_TEXT}"))
        else:
            least = energy.at(int(np.nanargmin(energy.values))) if every else mean_of(energy)
            parts.append(outcome.verdict("low-rank.energy", least, layers=layers))
    outcome.verdicts.append(unless_hidden(all_of(claim, parts), hidden))


def over_random(run: Run) -> Jackknifed:
    """Divide the root mean square cosine of position and context by that of random directions, by layer."""
    random = Jackknifed.constant(torch.tensor(value_of(run, "incoherence_random")), GROUPS)
    return combined(torch.div, jackknifed(run, "incoherence_mean"), random)


def between_over_within(run: Run) -> Jackknifed:
    """Divide the similarity between labels by that within, by layer; NaN where the latter is at its noise."""
    within = jackknifed(run, "similarity_within")
    return combined(torch.div, jackknifed(run, "similarity_between"), within).where(within.above_noise())


def beyond_random_order(lowest: Tensor, constant: Tensor, positions: int) -> Tensor:
    """Rescale a share of low frequencies from the most that random order has on average (0) to all energy (1).

    1 − (1 − r_10)/((1 − r_1)(1 − 9/(n − 1))): in random order the constant keeps its energy r_1, and of the rest at
    most 9 of n − 1 parts are expected within the ten lowest frequencies.
    """
    rest = torch.where(constant < 1, 1 - constant, torch.nan)
    return 1 - (1 - lowest) / rest / (1 - min(1.0, 9 / (positions - 1)))


def few_positions(run: Run, least: int = LEAST_POSITIONS) -> str | None:
    """Explain why low frequencies of so few positions mean nothing; None: there are enough."""
    positions = need(run, "positional_basis").shape[1] - 1
    why = (
        f"{positions} positions have only {positions} frequencies: use contexts of {least + 1} tokens or more"
    )
    return why if positions < least else None


def smooth_verdict(outcome: Outcome, run: Run, key: str = "smooth", least: int = LEAST_POSITIONS) -> Verdict:
    """Judge the normalised Gram matrix by its mean share of energy in the 10 × 10 lowest frequencies."""
    positions = need(run, "positional_basis").shape[1] - 1
    mean, _ = data.layer_average(run, "low_frequency_10")
    if why := few_positions(run, least):
        return untestable(outcome.sentence(key), f"share of energy at K = 10: {mean.value:.3f}, but {why}")
    hidden = np.isnan(value_of(run, "low_frequency_10"))
    layers = int((~hidden).sum()) or len(hidden)
    verdict = outcome.verdict(key, mean, layers=layers, chance=(10 / positions) ** 2)
    return unless_hidden(verdict, hidden)


def judge_significant(outcome: Outcome, run: Run) -> None:
    """Judge the relative norms of all layers; one that noise alone reaches is uncertain by half of that at least."""
    norms, errors = data.layer_estimates(run, "relative_norm"), data.error_of(run, "relative_norm")
    hidden = data.at_floor(run, "relative_norm")
    errors = np.where(hidden, np.fmax(errors, value_of(run, "relative_norm_floor") / 2), errors)
    verdict = outcome.verdict("significant", replace(norms, errors=errors))
    evidence = verdict.evidence + (f"; {hidden_in(hidden)}" if hidden.any() else "")
    outcome.verdicts.append(replace(verdict, evidence=evidence))
