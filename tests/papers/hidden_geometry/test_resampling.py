"""Oracles: the run's own basis, s/√8 of groups, permutations, noise and ranks that were put in, numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from tests.papers.hidden_geometry.planted import grouped, study_of
from tests.papers.shared import outcome_of, verdicts_of
from theodolite.corpus.corpus import Corpus
from theodolite.estimates import Estimates
from theodolite.judging import FAILS, HOLDS, UNDECIDED, UNTESTABLE, judge
from theodolite.measure.geometry import random_cosine
from theodolite.passes.survey import survey
from theodolite.theory.smoothness import low_frequency_ratio, normalised_gram
from theodolite_papers import EXPERIMENTS, Study, reproduce
from theodolite_papers.experiment import criterion
from theodolite_papers.hidden_geometry.layer_columns import (
    GroupedBasis,
    beyond_random_order,
    energy_within_rank,
    errors_of,
    gram_shares,
    grouped_basis,
    low_frequency_without_noise,
    noise_bases,
    noise_share,
    norms_beyond_noise,
    product_shares,
    random_cosines,
    smooth_verdict,
)
from theodolite_papers.hidden_geometry.positional_basis import judge_robustness
from theodolite_papers.hidden_geometry.smoothness import (
    directions_without_noise,
    measures,
    share_without_noise,
    spike_without_noise,
)

SIGNIFICANT = criterion("geometry/significant")
ALL = torch.ones(8, dtype=torch.float64)


@pytest.mark.parametrize("family", ["gpt2", pytest.param("bert", marks=pytest.mark.slow)])
def test_all_groups_together_give_the_basis_of_the_run(opened, family):
    """Oracle: the survey of the same text; and of half of the contexts, that of the groups of the half."""
    model = opened(family)
    corpus = Corpus.random_tokens(model.tokenizer, 24, 16)
    run = survey(model, corpus)
    study = Study(run, model, corpus)
    basis = grouped_basis(study)
    assert basis is grouped_basis(study)  # read once
    np.testing.assert_allclose(basis.of(ALL), run.arrays["positional_basis"][:, 1:], atol=1e-6)
    first = survey(model, Corpus.from_ids(corpus.contexts[:8]))
    half = basis.of((torch.arange(8) < 4).double())
    assert half.shape[1] <= first.arrays["positional_basis"].shape[1] - 1
    if family == "gpt2":  # no special tokens behind the text
        np.testing.assert_allclose(half, first.arrays["positional_basis"][:, 1:], atol=1e-5)
    other = Corpus.random_tokens(model.tokenizer, 24, 16, seed=1)
    assert grouped_basis(Study(run, model, other)) is not None  # a run on random tokens says which they were
    assert grouped_basis(Study(run)) is None
    renamed = replace(
        run, provenance=run.provenance | {"corpus": run.provenance["corpus"] | {"name": "notes"}}
    )
    assert grouped_basis(Study(renamed, model, other)) is None  # another text than the run's


def test_the_error_of_a_mean_over_groups_is_that_of_independent_groups():
    """Oracle: s/√8 of a number that is linear in the basis, as of eight draws."""
    noise = torch.randn(3, 8, 5, 4, generator=torch.Generator().manual_seed(0)).double()
    basis = grouped(torch.zeros(3, 5, 4), noise - noise.mean(2, keepdim=True))
    errors = errors_of(basis, lambda p: p[:, 2, 1].numpy(), np.zeros(3))
    drawn = (noise - noise.mean(2, keepdim=True))[:, :, 2, 1]
    np.testing.assert_allclose(errors, drawn.std(1) / 8**0.5)
    assert np.isnan(errors_of(None, lambda p: p[:, 0, 0].numpy(), np.zeros(3))).all()


def test_claims_on_the_curve_have_errors_and_are_open_without(run):
    """Oracle: the run's curve in every group, and the same with a tenth of noise; without groups no error is known."""
    figure = EXPERIMENTS["geometry/figure1"]
    still = study_of(run).outcome(figure)
    assert (still.tables["shape"]["share_of_two_directions_se"] < 1e-12).all()
    layers, positions, width = run.arrays["positional_basis"].shape
    noise = torch.randn(layers, 8, positions - 1, width, generator=torch.Generator().manual_seed(0)).double()
    moved = study_of(run, 0.1 * noise * run.arrays["positional_basis"].std()).outcome(figure)
    assert (moved.tables["shape"]["share_of_two_directions_se"] > 0).all()
    assert "no standard errors" in Study(run).outcome(figure).verdicts[1].evidence
    assert {v.answer for v in still.verdicts[:2]} <= {HOLDS, FAILS}
    # Turns are judged as they were measured, and only where the curve is continuous.
    shape = still.tables["shape"]
    continuous = shape[shape["smooth_roughness"] <= criterion("geometry/continuous").limit]
    assert [row.value for row in still.verdicts[2].parts] == continuous["turns"].tolist()
    assert len(continuous) > 0


def test_positions_in_random_order_are_at_zero_or_below():
    """Oracle: 400 permutations of the rows and columns of a matrix that is nothing but row means, where the bound is
    met on average, and of one of full rank, which lies below; and a smooth matrix at 1."""
    generator = np.random.default_rng(0)
    n = 40

    def beyond(matrix):
        shares = low_frequency_ratio(torch.from_numpy(matrix), (1, 10)).numpy()
        return float(beyond_random_order(shares[1], shares[0], n)[0])

    rows = np.tile(generator.normal(size=(n, 1)), n) + 0.5
    full = generator.normal(size=(n, n)) + 0.5
    for matrix, expected in ((rows, 0.0), (full, None)):
        drawn = [beyond(matrix[generator.permutation(n)][:, generator.permutation(n)]) for _ in range(400)]
        error = np.std(drawn) / 20
        assert np.mean(drawn) < 3 * error
        assert expected is None or np.mean(drawn) == pytest.approx(0, abs=3 * error)
    wave = np.cos(np.pi * (np.arange(n) + 0.5) / n)
    assert beyond(np.outer(wave, wave) + 3) == pytest.approx(1)


def test_random_rotations_give_the_cosines_of_random_directions():
    """Oracle: of one position and one context, cos² is Beta(½, (d − 1)/2); the mean of many has that expectation."""
    width = 24
    one = torch.ones(1, 1, width)
    single = random_cosines(one, one.roll(1), 2000).mean[:, 0]
    assert stats.kstest(single**2, stats.beta(0.5, (width - 1) / 2).cdf).pvalue > 0.01
    generator = torch.Generator().manual_seed(0)
    # Of rank 2.
    basis = torch.randn(2, 30, 2, generator=generator) @ torch.randn(2, 2, width, generator=generator)
    contexts = torch.randn(2, 20, width, generator=generator)
    chance = random_cosines(basis, contexts, 300)
    assert chance.mean.shape == (300, 2)
    error = chance.mean.std(0) / 300**0.5
    assert (np.abs(chance.mean.mean(0) - random_cosine(width)) < 4 * error).all()
    directions = torch.nn.functional.normalize(torch.randn(300, 30 * 20, width, generator=generator), dim=-1)
    independent = directions[..., 0].abs().mean(1).std()
    # Few dimensions: the mean of many pairs varies more.
    assert (chance.mean.std(0) > 2 * float(independent)).all()


def of_noise(
    size: float, width: int = 48, layers: int = 2, shuffled: bool = False
) -> tuple[GroupedBasis, torch.Tensor]:
    """A smooth basis of every layer in eight noisy groups, and as it is without noise.

    Args:
        shuffled: instead of the last layer's, the first one's in random order.
    """
    generator = torch.Generator().manual_seed(0)
    turn = torch.arange(64, dtype=torch.float64)[:, None] * torch.tensor([1.0, 2.0]) * torch.pi / 64
    curve = torch.cat([turn.cos(), turn.sin()], dim=1)
    bases = torch.stack([curve @ torch.randn(4, width, generator=generator).double() for _ in range(layers)])
    if shuffled:
        bases[-1] = bases[0, torch.randperm(64, generator=generator)]
    noise = size * torch.randn(layers, 8, 64, width, generator=generator).double()
    return grouped(bases, noise), grouped(bases).of(ALL)


def shares_of(basis: torch.Tensor) -> np.ndarray:
    return low_frequency_ratio(normalised_gram(basis), (10,))[:, 0].numpy()


@pytest.mark.parametrize(("size", "tolerance"), [(0.0, 1e-9), (5.0, 0.02)])
def test_the_share_of_low_frequencies_without_noise(size, tolerance):
    """Oracle: the share of the bases that the noise was added to."""
    noisy, exact = of_noise(size, shuffled=True)
    truth = shares_of(exact)
    assert (truth[0] - shares_of(noisy.of(ALL))[0] > 0.2) == (size > 0)
    np.testing.assert_allclose(low_frequency_without_noise(noisy), truth, atol=tolerance)


def _of_basis(run, basis: GroupedBasis):
    """The run with one layer, of this basis."""
    layers = run.layers.head(1).assign(low_frequency_10=shares_of(basis.of(ALL)), low_frequency_10_se=0.01)
    arrays = run.arrays | {"positional_basis": torch.zeros(1, 65, 48)}
    return replace(run, layers=layers, arrays=arrays), basis


def _smooth(run, basis: GroupedBasis):
    study = Study(run)
    study.cached(f"basis by group of {run.provenance['corpus'].get('sha256')}", lambda: basis)
    return smooth_verdict(outcome_of("geometry/table2"), study, run)


@pytest.mark.parametrize(("layer", "answer"), [(0, UNDECIDED), (1, FAILS)])
def test_a_basis_that_is_rough_by_noise_alone_is_not_decided(surveyed_gpt2, layer, answer):
    """Oracle: a smooth basis and the same in random order; the noise leaves neither a share above the limit."""
    both, _ = of_noise(7.0, shuffled=True)
    noisy = GroupedBasis(both.sums[layer, None], both.readers[layer, None], both.end)
    verdict = _smooth(*_of_basis(surveyed_gpt2[0], noisy))
    assert verdict.answer == answer
    assert ("without the sampling noise of 16 contexts" in verdict.evidence) == (answer == UNDECIDED)


def test_a_basis_that_is_smooth_by_noise_alone_is_not_decided(surveyed_gpt2):
    """Oracle: a basis in random order, under errors that neighbouring positions share."""
    _, exact = of_noise(0.0, shuffled=True)
    generator = torch.Generator().manual_seed(5)
    waves = torch.cos(torch.pi * torch.outer(torch.arange(64) + 0.5, torch.arange(4)) / 64).double()
    noise = 5.0 * waves @ torch.randn(1, 8, 4, 48, generator=generator).double()
    noisy = grouped(exact[1:], noise)
    run, noisy = _of_basis(surveyed_gpt2[0], noisy)
    assert run.layers["low_frequency_10"][0] > 0.8
    # Without the text nothing is known of its noise.
    assert smooth_verdict(outcome_of("geometry/table2"), Study(run), run).answer == HOLDS
    verdict = _smooth(run, noisy)
    assert verdict.answer == UNDECIDED
    assert "without the sampling noise of 16 contexts" in verdict.evidence


CUTOFFS = (1, 10)


@pytest.mark.parametrize(("size", "tolerance"), [(0.0, 1e-9), (4.0, 0.03)])
def test_shares_are_those_of_the_bases_that_noise_was_added_to(size, tolerance):
    noisy, exact = of_noise(size)
    truth = low_frequency_ratio(exact @ exact.mT, CUTOFFS).numpy()
    seen = noisy.of(ALL)
    assert (truth[:, 1] - low_frequency_ratio(seen @ seen.mT, CUTOFFS).numpy()[:, 1] > 0.1).all() == (
        size > 0
    )
    np.testing.assert_allclose(gram_shares(noisy, CUTOFFS), truth, atol=tolerance)


def test_products_with_the_weights_of_a_model(opened):
    """Oracle: P W_q W_kᵀ Pᵀ of every head, formed as one matrix."""
    model = opened("gpt2")
    noisy, exact = of_noise(0.0, model.width, model.layers + 1)
    truth = []
    for layer in range(model.layers):
        weights = model.head_weights(layer)
        for w_q, w_k in zip(weights.w_q.double(), weights.w_k.double(), strict=True):
            matrix = exact[layer] @ w_q @ w_k.mT @ exact[layer].mT
            truth.append(low_frequency_ratio(matrix, CUTOFFS).tolist())
    np.testing.assert_allclose(product_shares(noisy, model, CUTOFFS), truth, atol=1e-7)


def test_the_measures_of_figure_7_without_noise():
    """Oracle: those of the bases themselves, for which the noise is large enough to hide the truth."""
    noisy, exact = of_noise(2.0, width=512)
    spike, directions, share = measures(exact).mean(axis=1)
    seen = measures(noisy.of(ALL)).mean(axis=1)
    assert seen[0] > 10 * spike
    assert abs(spike_without_noise(noisy) - spike) < 0.05 * (seen[0] - spike)
    assert abs(share_without_noise(noisy) - share) < 0.02
    assert directions <= directions_without_noise(noisy) < seen[1]


def test_noise_alone_is_as_large_as_in_the_basis_and_has_no_position():
    """Oracle: noise of variance 16 a group, hence 2 in the mean of eight, whatever the position."""
    noisy, _ = of_noise(4.0)
    assert torch.allclose(noise_bases(noisy).square().mean(), torch.tensor(2.0).double(), rtol=0.05)
    assert noise_bases(of_noise(0.0)[0]).abs().max() < 1e-9


@pytest.mark.parametrize(("size", "holds"), [(0.0, False), (0.5, True)])
def test_noise_of_few_contexts_is_no_significant_position(size, holds):
    """Oracle: noise has a relative norm of 1/√32 = 0.18 of itself, above the limit, though there is no position."""
    smooth = size * of_noise(0.0)[1]
    noise = 2 * torch.randn(2, 8, 64, 48, generator=torch.Generator().manual_seed(2)).double()
    basis = grouped(smooth, noise)
    seen = torch.linalg.matrix_norm(basis.of(ALL), ord=2).numpy()
    norms = Estimates(0.18 * seen / seen.min(), np.full(2, 0.015), 8, "groups of contexts")
    assert judge("", "", norms, SIGNIFICANT).answer == HOLDS
    left = norms_beyond_noise(norms, basis)
    assert (judge("", "", left, SIGNIFICANT).answer == HOLDS) == holds


def _planted(run, rank: int, screenot_rank):
    """The run with positions of this rank, singular values all 1, at every layer, and what ScreeNOT found there."""
    generator = torch.Generator().manual_seed(rank)
    length, width = run.arrays["positional_basis"].shape[1:]
    left, right = (torch.randn(size, rank, generator=generator) for size in (length - 1, width))
    basis = torch.linalg.qr(left).Q @ torch.linalg.qr(right).Q.mT
    rows = torch.cat([torch.zeros(1, width), basis]).expand(len(run.layers), -1, -1).contiguous()
    return replace(
        run,
        layers=run.layers.assign(rank=screenot_rank, rank_se=0.1, norm=0.0),
        arrays=run.arrays | {"positional_basis": rows},
    )


def _answers(run) -> list[str]:
    study = study_of(run)
    return [
        study.outcome(EXPERIMENTS[f"geometry/{name}"]).verdicts[0].answer for name in ("table1", "table4")
    ]


def test_energy_of_a_run_without_its_text_has_no_error(run):
    """Oracle: rank 6, whole within it, in a run that has lost the text that it is of; and with it."""
    planted = _planted(run, 6, 6.0)
    assert "6 layers: 1.000 (no standard error)" in reproduce("geometry/table1", planted).verdicts[0].evidence
    known = study_of(planted).outcome(EXPERIMENTS["geometry/table1"]).verdicts[0]
    assert "6 layers: 1.000 (8 groups of contexts)" in known.evidence


def test_the_energy_within_a_rank_is_that_of_the_singular_values(run):
    """Oracle: numpy, layer by layer."""
    held = energy_within_rank(run)
    for layer, rank in enumerate(run.layers["rank"].astype(int)):
        squares = np.linalg.svd(run.arrays["positional_basis"][layer, 1:].double(), compute_uv=False) ** 2
        assert held[layer] == pytest.approx(squares[:rank].sum() / squares.sum())


def test_a_low_rank_holds_and_a_high_one_fails_whatever_screenot_says(run):
    """Oracle: rank 6 of 47; and rank 40, of which any 12 directions hold 12/40 of the energy."""
    assert _answers(_planted(run, 6, 6.0)) == [HOLDS, HOLDS]
    high = _planted(run, 40, 12.0)
    assert _answers(high) == [FAILS, FAILS]
    verdict = study_of(high).outcome(EXPERIMENTS["geometry/table1"]).verdicts[0]
    assert "ScreeNOT looks for at most 20 directions" in verdict.evidence
    assert "within its rank, mean over" in verdict.evidence
    assert ": 0.300" in verdict.evidence


@pytest.mark.slow
def test_no_rank_is_no_low_rank(run):
    """Oracle: layers of rank 0: all of them, one of them, most of them."""
    layers = len(run.layers)
    nothing = _planted(run, 40, 0.0)
    assert _answers(nothing) == [UNTESTABLE, UNTESTABLE]
    assert "no rank found" in reproduce("geometry/table4", nothing).verdicts[0].evidence
    assert reproduce("geometry/figure3", nothing).verdicts[0].answer == UNTESTABLE
    kept, _ = verdicts_of(
        judge_robustness, Study(_planted(run, 6, 6.0)), nothing, of="geometry/table2"
    )  # a change of the mean rank by 6, of which nothing is known
    assert kept.answer == UNTESTABLE
    assert "no rank found in 0 layers here" in kept.evidence
    one = _planted(run, 6, np.array([0.0] + [6.0] * (layers - 1)))
    assert _answers(one) == [HOLDS, UNTESTABLE]
    assert "found none at layer 0" in reproduce("geometry/table4", one).verdicts[0].evidence
    assert np.isnan(energy_within_rank(one)[0])
    most = _planted(run, 6, np.array([6.0] + [0.0] * (layers - 1)))
    assert _answers(most) == [UNTESTABLE, UNTESTABLE]


@pytest.mark.slow
def test_the_noise_of_few_contexts_is_not_taken_for_rank(run):
    """Oracle: positions that are nothing but means of 40 normal vectors: their whole energy is noise."""
    contexts, width = run.provenance["corpus"]["contexts"], 64
    drawn = torch.randn(contexts, 47, width, generator=torch.Generator().manual_seed(0)) * 5
    rows = torch.cat([torch.zeros(1, width), drawn.mean(0)]).expand(len(run.layers), -1, -1).contiguous()
    arrays = run.arrays | {"positional_basis": rows, "mean": run.arrays["mean"] * 0}
    norm = float(drawn.norm(dim=-1).mean())
    noisy = replace(run, arrays=arrays, layers=run.layers.assign(norm=norm, rank=6.0))
    np.testing.assert_allclose(noise_share(noisy), 1, atol=0.05)
    assert _answers(noisy) == [UNDECIDED, UNDECIDED]
    verdict = study_of(noisy).outcome(EXPERIMENTS["geometry/table1"]).verdicts[0]
    assert "sampling noise of 40 contexts" in verdict.evidence
    assert _answers(replace(noisy, layers=noisy.layers.assign(norm=0.0))) == [FAILS, FAILS]
