"""Oracles: bases of a rank that was put in, numpy's singular values, and noise of a known variance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.papers.hidden_geometry.planted import study_of
from tests.papers.shared import verdicts_of
from theodolite.judging import FAILS, HOLDS, UNDECIDED, UNTESTABLE
from theodolite_papers import EXPERIMENTS, reproduce
from theodolite_papers.experiment import Study
from theodolite_papers.hidden_geometry.layer_columns import energy_within_rank, noise_share
from theodolite_papers.hidden_geometry.tables import judge_robustness


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
