"""Oracles: the survey of the same text, permutations, bases that noise was added to, ranks that were put in, numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.papers.hidden_geometry.planted import drawn, grouped, study_of
from tests.papers.shared import answers, changed, outcome_of, verdicts_of
from theodolite.corpus.corpus import Corpus
from theodolite.judging import FAILS, HOLDS, UNDECIDED, UNTESTABLE
from theodolite.passes.survey import survey
from theodolite.theory.smoothness import low_frequency_ratio
from theodolite_papers import EXPERIMENTS, Study
from theodolite_papers.experiment import criterion
from theodolite_papers.hidden_geometry.layer_columns import (
    bases_by_group,
    beyond_random_order,
    energy_within,
    grams_between,
    judge_significant,
    leading_of_others,
    smooth_verdict,
)
from theodolite_papers.hidden_geometry.positional_basis import judge_robustness, scale_growth, shape_of
from theodolite_papers.hidden_geometry.smoothness import learned_measures, measures
from theodolite_papers.hidden_geometry.weights import noise_of


@pytest.mark.parametrize("family", ["gpt2", pytest.param("bert", marks=pytest.mark.slow)])
def test_groups_average_to_the_basis_of_the_run(opened, family):
    """Oracle: the survey of the same text; and of the contexts of one group, of that group."""
    model = opened(family)
    corpus = Corpus.random_tokens(model.tokenizer, 24, 16)
    run = survey(model, corpus)
    study = Study(run, model, corpus)
    bases = bases_by_group(study)
    assert bases is bases_by_group(study)  # read once
    for p, basis in zip(bases, run.arrays["positional_basis"][:, 1:], strict=True):
        np.testing.assert_allclose(p.mean(dim=0), basis, atol=1e-6)
    first = survey(model, Corpus.from_ids(corpus.contexts[:2])).arrays["positional_basis"][:, 1:]
    if family == "gpt2":  # no special tokens behind the text
        np.testing.assert_allclose(torch.stack(bases)[:, 0], first, atol=1e-5)
    other = Corpus.random_tokens(model.tokenizer, 24, 16, seed=1)
    assert bases_by_group(Study(run, model, other)) is not None  # a run on random tokens says which they were
    assert bases_by_group(Study(run)) is None
    renamed = replace(
        run, provenance=run.provenance | {"corpus": run.provenance["corpus"] | {"name": "notes"}}
    )
    assert bases_by_group(Study(renamed, model, other)) is None  # another text than the run's


def test_positions_in_random_order_are_at_zero_or_below():
    """Oracle: 400 permutations of the rows and columns of a matrix that is nothing but row means, where the bound is
    met on average, and of one of full rank, which lies below; and a smooth matrix at 1."""
    generator = np.random.default_rng(0)
    n = 40

    def beyond(matrix):
        shares = low_frequency_ratio(torch.from_numpy(matrix), (1, 10))
        return float(beyond_random_order(shares[1], shares[0], n))

    rows = np.tile(generator.normal(size=(n, 1)), n) + 0.5
    full = generator.normal(size=(n, n)) + 0.5
    for matrix, expected in ((rows, 0.0), (full, None)):
        values = [beyond(matrix[generator.permutation(n)][:, generator.permutation(n)]) for _ in range(400)]
        error = np.std(values) / 20
        assert np.mean(values) < 3 * error
        assert expected is None or np.mean(values) == pytest.approx(0, abs=3 * error)
    wave = np.cos(np.pi * (np.arange(n) + 0.5) / n)
    assert beyond(np.outer(wave, wave) + 3) == pytest.approx(1)


TURN = torch.arange(64, dtype=torch.float64)[:, None] * torch.tensor([1.0, 2.0]) * torch.pi / 64
CURVE = torch.cat([TURN.cos(), TURN.sin()], dim=1)


def curves(layers: int, width: int = 48) -> torch.Tensor:
    """Smooth bases of four directions."""
    bases = torch.stack([CURVE @ drawn(layer, 4, width) for layer in range(layers)])
    return bases - bases.mean(dim=1, keepdim=True)


def test_products_of_different_groups_are_those_of_the_basis():
    """Oracle: P Pᵀ, and its cumulated eigenvalues by numpy, of bases under noise twice as large in each group."""
    exact = curves(12)
    noisy = grouped(exact, 5 * drawn(99, 12, 8, 64, 48))
    for p, basis in zip(grouped(exact), exact, strict=True):
        torch.testing.assert_close(grams_between(p)(None), basis @ basis.T)
    plain = np.array([np.linalg.norm(p.mean(dim=0)) ** 2 for p in noisy])
    between = np.array([float(grams_between(p)(None).trace()) for p in noisy])
    truth = np.square(np.linalg.norm(exact, axis=(1, 2)))
    assert (plain > 1.3 * truth).all()
    assert np.mean(between / truth) == pytest.approx(1, abs=0.05)
    energy = np.linalg.svd(exact, compute_uv=False) ** 2
    shares = energy.cumsum(axis=1) / energy.sum(axis=1, keepdims=True)
    of_noisy = [energy_within(p) for p in noisy]
    for count in (2, 4, 8):
        deviations = [
            (each.value[count - 1] - share[count - 1], each.error[count - 1])
            for each, share in zip(of_noisy, shares, strict=True)
        ]
        assert np.mean([abs(off) <= 2.365 * error for off, error in deviations]) >= 0.8
        off, errors = (np.array(each) for each in zip(*deviations, strict=True))
        assert abs(off.mean()) < 3 * errors.mean() / 12**0.5
    (nothing,) = grouped(torch.zeros(1, 64, 48), drawn(5, 1, 8, 64, 48))
    assert energy_within(nothing).value.isnan().all()


def test_directions_of_others_know_nothing_of_a_groups_noise():
    """Oracle: noise alone, whose products with other groups are 0 on average, by their spread over 100 draws."""
    energies = []
    for p in grouped(torch.zeros(100, 20, 30), drawn(1, 100, 8, 20, 30)):
        one, other = leading_of_others(p, 2)
        energies.append(float((one * other).sum()))
    assert abs(np.mean(energies)) < 3 * np.std(energies) / 10


def test_the_shape_is_that_of_the_curve_without_noise():
    """Oracle: the angle that was put in, numpy's singular values, and von Neumann's ratio, which is 1 in random order.

    And layers of nothing but noise, of which nothing is said.
    """
    angle = 3 * torch.pi * torch.linspace(0, 1, 64, dtype=torch.float64)
    circle = torch.nn.functional.pad(torch.stack([angle.cos(), angle.sin()], dim=1), (0, 30))
    shuffled = circle[torch.randperm(64, generator=torch.Generator().manual_seed(0))]
    bases = torch.stack([circle, shuffled, torch.zeros_like(circle)])
    bases = bases - bases.mean(dim=1, keepdim=True)
    shape = shape_of(grouped(bases, 0.3 * drawn(2, 3, 8, 64, 32)))
    rough, turns = shape["roughness"], shape["turns"]
    assert rough.value[0] < 0.05
    assert rough.value[1] == pytest.approx(1, abs=0.3)
    assert turns.value[0] == pytest.approx(1.5, abs=0.1)
    scales = np.linalg.svd(bases, compute_uv=False)[:, 0] / 8
    np.testing.assert_allclose(shape["scale"].value[:2], scales[:2], atol=0.05)
    np.testing.assert_allclose(shape["share_of_two_directions"].value[:2], 1, atol=0.1)
    for name in ("roughness", "turns", "share_of_two_directions"):
        assert shape[name].value[2].isnan()


def test_growth_is_that_of_the_largest_layer_and_unknown_over_nothing():
    """Oracle: layers of 1, 20 and 5 times one curve; and the same after a layer of noise alone."""
    bases = curves(1)[0] * torch.tensor([1.0, 20.0, 5.0]).double()[:, None, None]
    noise = 0.1 * drawn(3, 3, 8, 64, 48)
    growth = scale_growth(grouped(bases, noise))
    assert abs(growth.value - 20) < growth.margin
    assert np.isnan(scale_growth(grouped(bases * torch.tensor([0, 1, 1])[:, None, None], noise)).value)


def test_claims_on_the_curve_are_of_groups_and_not_testable_without(run):
    """Oracle: the run's curve in every group; and with noise that hides half of the layers."""
    figure = EXPERIMENTS["geometry/figure1"]
    assert answers(Study(run).outcome(figure)) == [UNTESTABLE] * 4
    still = study_of(run).outcome(figure)
    shape = still.tables["shape"]
    assert (shape["share_of_two_directions_se"] < 1e-9).all()
    assert {verdict.answer for verdict in still.verdicts[:2]} <= {HOLDS, FAILS}
    # Turns are judged only where the curve is continuous.
    continuous = shape[shape["roughness"] <= criterion("geometry/continuous").limit]
    assert [row.estimate.value for row in still.verdicts[2].parts] == continuous["turns"].tolist()
    assert len(continuous) > 0
    layers, positions, width = run.arrays["positional_basis"].shape
    noise = drawn(4, layers, 8, positions - 1, width)
    noise[: layers // 2] *= 1e3 * run.arrays["positional_basis"].std()
    hidden = study_of(run, noise).outcome(figure)
    assert answers(hidden)[0] == UNDECIDED
    assert f"at the noise floor in {layers // 2} of {layers} layers" in hidden.verdicts[0].evidence


def test_the_measures_of_figure_7_are_those_without_noise(run):
    """Oracle: those of the bases themselves, for which the noise is large enough to hide the truth."""
    exact = curves(6, 512)
    noise = 2 * drawn(6, 6, 8, 64, 512)
    study = Study(run)
    study.cached(f"basis by group of {run.provenance['corpus'].get('sha256')}", lambda: grouped(exact, noise))
    learned = learned_measures(study)
    truth = np.array([measures(basis) for basis in exact])
    seen = np.array([measures(p.mean(dim=0)) for p in grouped(exact, noise)])
    assert (seen[:, 0] > 10 * truth[:, 0]).all()
    assert np.abs(learned["spike"].values - truth[:, 0]).max() < 0.05 * seen[:, 0].min()
    assert (np.abs(learned["directions"].values - truth[:, 1]) <= 1).all()
    assert (seen[:, 1] > 10).all()


def test_noise_alone_is_as_large_as_in_the_basis_and_has_no_position():
    """Oracle: noise of variance 16 a group, hence 2 in the mean of eight, whatever the position."""
    (noisy,) = grouped(curves(1), 4 * drawn(7, 1, 8, 64, 48))
    assert noise_of(noisy).square().mean() == pytest.approx(2, rel=0.05)
    assert noise_of(grouped(curves(1))[0]).abs().max() < 1e-9


@pytest.mark.parametrize(("hidden", "answer"), [(0, HOLDS), (2, HOLDS), (3, UNDECIDED), (6, UNDECIDED)])
def test_a_claim_is_open_where_half_of_the_layers_are_at_the_noise_floor(run, hidden, answer):
    """Oracle: six layers, all smooth, of which so many have no number."""
    shares = np.where(np.arange(6) < hidden, np.nan, 0.95)
    verdict = smooth_verdict(outcome_of("geometry/table2"), changed(run, low_frequency_10=shares))
    assert verdict.answer == answer
    assert (f"at the noise floor in {hidden} of 6 layers" in verdict.evidence) == (hidden > 0)


@pytest.mark.parametrize(("floor", "answer"), [(0.1, HOLDS), (0.4, UNDECIDED)])
def test_a_norm_that_noise_reaches_is_not_significant(run, floor, answer):
    """Oracle: relative norms of 0.3 with small errors, above and below what noise alone reaches."""
    (verdict,) = verdicts_of(
        judge_significant, changed(run, relative_norm=0.3, relative_norm_floor=floor), of="geometry/table6"
    )
    assert verdict.answer == answer
    assert ("at the noise floor in 6 of 6 layers" in verdict.evidence) == (answer == UNDECIDED)


def _planted(run, rank: int, found):
    """The run with positions of this rank, singular values all 1, at every layer, and the rank that was found there."""
    length, width = run.arrays["positional_basis"].shape[1:]
    left = drawn(rank, length - 1, rank)
    left, right = left - left.mean(dim=0), drawn(rank + 1, width, rank)
    basis = torch.linalg.qr(left).Q @ torch.linalg.qr(right).Q.mT
    rows = torch.cat([torch.zeros(1, width), basis]).expand(len(run.layers), -1, -1).contiguous()
    arrays = run.arrays | {"positional_basis": rows.float()}
    return replace(changed(run, rank=found, rank_se=0.1), arrays=arrays)


def _low_rank(study: Study) -> list[str]:
    return [
        study.outcome(EXPERIMENTS[f"geometry/{name}"]).verdicts[0].answer for name in ("table1", "table4")
    ]


def test_a_low_rank_holds_and_a_high_one_fails_whatever_was_found(run):
    """Oracle: rank 6 of 47; and rank 40, of which any 12 directions hold 12/40 of the energy."""
    assert _low_rank(study_of(_planted(run, 6, 6.0))) == [HOLDS, HOLDS]
    high = study_of(_planted(run, 40, 12.0))
    assert _low_rank(high) == [FAILS, FAILS]
    verdict = high.outcome(EXPERIMENTS["geometry/table1"]).verdicts[0]
    assert "at most 20 are looked for" in verdict.evidence
    assert "in as many directions, mean over 6 layers: 0.300" in verdict.evidence
    assert _low_rank(Study(_planted(run, 6, 6.0))) == [UNTESTABLE, UNTESTABLE]  # the energy needs the text
    assert _low_rank(study_of(_planted(run, 6, 6.0), drawn(8, 6, 8, 47, 64))) == [UNDECIDED, UNDECIDED]


def test_no_rank_is_no_low_rank(run):
    """Oracle: layers of rank 0: all of them, one of them, most of them."""
    assert _low_rank(study_of(_planted(run, 6, 0.0))) == [UNDECIDED, UNDECIDED]
    nothing = study_of(_planted(run, 6, 0.0)).outcome(EXPERIMENTS["geometry/figure3"]).verdicts[0]
    assert nothing.answer == UNDECIDED
    kept, _ = verdicts_of(
        judge_robustness, Study(_planted(run, 6, 6.0)), _planted(run, 6, 0.0), of="geometry/table2"
    )  # a change of the mean rank by 6, of which nothing is known
    assert kept.answer == UNDECIDED
    one = study_of(_planted(run, 6, np.array([0.0] + [6.0] * 5)))
    assert _low_rank(one) == [HOLDS, HOLDS]
    assert (
        "at the noise floor in 1 of 6 layers"
        in one.outcome(EXPERIMENTS["geometry/table4"]).verdicts[0].evidence
    )
    assert _low_rank(study_of(_planted(run, 6, np.array([6.0] + [0.0] * 5)))) == [UNDECIDED, UNDECIDED]
