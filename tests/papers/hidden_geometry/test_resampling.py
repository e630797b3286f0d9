"""Oracles: the run's own basis, s/√8 of independent groups, permutations, and the distribution of a single cosine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from tests.papers.hidden_geometry.planted import grouped, study_of
from theodolite.corpus.corpus import Corpus
from theodolite.judging import FAILS, HOLDS, UNDECIDED
from theodolite.measure.geometry import random_cosine
from theodolite.passes.survey import survey
from theodolite.theory.smoothness import low_frequency_ratio, normalised_gram
from theodolite_papers import EXPERIMENTS, Study
from theodolite_papers.hidden_geometry import criteria
from theodolite_papers.hidden_geometry.layer_columns import (
    beyond_random_order,
    random_cosines,
    smooth_verdict,
)
from theodolite_papers.hidden_geometry.resampling import (
    GroupedBasis,
    errors_of,
    grouped_basis,
    low_frequency_without_noise,
)

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
    continuous = shape[shape["smooth_roughness"] <= criteria.CONTINUOUS.limit]
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


def of_noise(size: float) -> tuple[GroupedBasis, torch.Tensor]:
    """Of two layers, a smooth basis and the same in random order, in eight noisy groups; the bases themselves."""
    generator = torch.Generator().manual_seed(0)
    turn = torch.arange(64, dtype=torch.float64)[:, None] * torch.tensor([1.0, 2.0]) * torch.pi / 64
    smooth = torch.cat([turn.cos(), turn.sin()], dim=1) @ torch.randn(4, 48, generator=generator).double()
    bases = torch.stack([smooth, smooth[torch.randperm(64, generator=generator)]])
    noise = size * torch.randn(2, 8, 64, 48, generator=generator).double()
    return grouped(bases, noise), grouped(bases).of(ALL)


def shares_of(basis: torch.Tensor) -> np.ndarray:
    return low_frequency_ratio(normalised_gram(basis), (10,))[:, 0].numpy()


@pytest.mark.parametrize(("size", "tolerance"), [(0.0, 1e-9), (5.0, 0.02)])
def test_the_share_of_low_frequencies_without_noise(size, tolerance):
    """Oracle: the share of the bases that the noise was added to."""
    noisy, exact = of_noise(size)
    truth = shares_of(exact)
    assert (truth[0] - shares_of(noisy.of(ALL))[0] > 0.2) == (size > 0)
    np.testing.assert_allclose(low_frequency_without_noise(noisy), truth, atol=tolerance)


@pytest.mark.parametrize(("layer", "answer"), [(0, UNDECIDED), (1, FAILS)])
def test_a_basis_that_is_rough_by_noise_alone_is_not_decided(surveyed_gpt2, layer, answer):
    """Oracle: a smooth basis and the same in random order; the noise leaves neither a share above the limit."""
    both, _ = of_noise(7.0)
    noisy = GroupedBasis(both.sums[layer, None], both.readers[layer, None], both.end)
    run, _, _ = surveyed_gpt2
    layers = run.layers.head(1).assign(low_frequency_10=shares_of(noisy.of(ALL)), low_frequency_10_se=0.01)
    run = replace(run, layers=layers, arrays=run.arrays | {"positional_basis": torch.zeros(1, 65, 48)})
    study = Study(run)
    study.cached(f"basis by group of {run.provenance['corpus'].get('sha256')}", lambda: noisy)
    verdict = smooth_verdict(study, run, "smooth")
    assert verdict.answer == answer
    assert ("without the sampling noise of 16 contexts" in verdict.evidence) == (answer == UNDECIDED)


def test_a_basis_that_is_smooth_by_noise_alone_is_not_decided(surveyed_gpt2):
    """Oracle: a basis in random order, under errors that neighbouring positions share."""
    _, exact = of_noise(0.0)
    generator = torch.Generator().manual_seed(5)
    waves = torch.cos(torch.pi * torch.outer(torch.arange(64) + 0.5, torch.arange(4)) / 64).double()
    noise = 5.0 * waves @ torch.randn(1, 8, 4, 48, generator=generator).double()
    noisy = grouped(exact[1:], noise)
    run, _, _ = surveyed_gpt2
    layers = run.layers.head(1).assign(low_frequency_10=shares_of(noisy.of(ALL)), low_frequency_10_se=0.01)
    assert layers["low_frequency_10"][0] > 0.8
    run = replace(run, layers=layers, arrays=run.arrays | {"positional_basis": torch.zeros(1, 65, 48)})
    # Without the text nothing is known of its noise.
    assert smooth_verdict(Study(run), run, "smooth").answer == HOLDS
    study = Study(run)
    study.cached(f"basis by group of {run.provenance['corpus'].get('sha256')}", lambda: noisy)
    verdict = smooth_verdict(study, run, "smooth")
    assert verdict.answer == UNDECIDED
    assert "without the sampling noise of 16 contexts" in verdict.evidence
