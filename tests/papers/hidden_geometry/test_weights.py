"""Oracles: weights in which a part is planted, numpy with the matrices written out, and layouts by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.papers.hidden_geometry.planted import grouped
from tests.papers.shared import answers
from tests.report.synthetic import make_run
from theodolite.errors import UsageError, WorkError
from theodolite.judging import FAILS, HOLDS, UNDECIDED
from theodolite.models.head_weights import HeadWeights
from theodolite_papers import Study
from theodolite_papers.hidden_geometry import weights
from theodolite_papers.hidden_geometry.weights import figure_4

WIDTH, RANK, HEADS = 80, 5, 8
FIGURE_4 = figure_4


@pytest.fixture(scope="module")
def run():
    return make_run(blocks=2, heads=HEADS, length=48, width=WIDTH)


def _model(run, positional: int, diagonal: int, refused: tuple[int, ...] = ()):
    """Heads of a block: so many with a positional part, so many that are diagonal, the rest noise."""
    generator = torch.Generator().manual_seed(0)
    basis = run.arrays["positional_basis"][:, 1:].double()

    def head_weights(layer: int) -> HeadWeights:
        if layer in refused:
            raise WorkError("not affine")
        directions = torch.linalg.svd(basis[layer]).Vh[:RANK].mT
        w_q = torch.randn(HEADS, WIDTH, WIDTH, generator=generator, dtype=torch.float64) / WIDTH**0.5
        w_k = torch.eye(WIDTH, dtype=torch.float64).repeat(HEADS, 1, 1)
        for head in range(positional):
            signs = torch.randint(2, (RANK, RANK), generator=generator) * 2.0 - 1
            w_q[head] = 0.02 * w_q[head] + directions @ signs.double() @ directions.mT
        for head in range(positional, positional + diagonal):
            signs = torch.randint(2, (WIDTH,), generator=generator) * 2.0 - 1
            w_q[head] = 0.02 * w_q[head] + torch.diag(signs.double())
        empty = torch.zeros(HEADS, WIDTH)
        return HeadWeights(w_q, w_k, w_k, empty, empty, empty, 0.25, "projection")

    return SimpleNamespace(
        weights=lambda: SimpleNamespace(sha256=run.provenance["model"]["sha256"]),
        id="planted",
        layers=2,
        heads=HEADS,
        width=WIDTH,
        device=torch.device("cpu"),
        head_weights=head_weights,
    )


def _text(monkeypatch, run, noise: torch.Tensor) -> None:
    """Let the run's text be eight groups of contexts whose bases are the run's plus noise (layers, 8, T − 1, d)."""
    basis = run.arrays["positional_basis"][:, 1:].double()
    monkeypatch.setattr(weights, "grouped_basis", lambda study: grouped(basis, noise))


def _noise(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1)).double()


def test_planted_parts_are_found_where_they_are(run, monkeypatch):
    """Oracle: seven heads of eight hold V L Vᵀ, L of 5 × 5 signs, plus 2 % of noise, the last a diagonal of signs."""
    _text(monkeypatch, run, 1e-3 * _noise(3, 8, 47, WIDTH))
    outcome = Study(run, _model(run, positional=7, diagonal=1)).outcome(FIGURE_4)
    assert answers(outcome) == [HOLDS, FAILS, HOLDS]
    table = outcome.tables["heads"]
    assert len(table) == 2 * HEADS
    positional, diagonal = table[table["head"] < 7], table[table["head"] == 7]
    assert (positional["corner_energy_20"] > 0.5).all()
    assert (positional["corner_ratio"] > 10).all()
    assert (diagonal["diagonal"] > 0.9).all()
    assert (diagonal["diagonal_ratio"] > 10).all()
    assert diagonal["corner_ratio"].between(0.5, 2).all()
    swapped = Study(run, _model(run, positional=1, diagonal=7)).outcome(FIGURE_4)
    assert answers(swapped) == [FAILS, HOLDS, FAILS]


def test_directions_in_which_contexts_vary_are_not_those_of_positions(run, monkeypatch):
    """Oracle: weights of the very directions in which the text is noisy, which the basis then leans to by chance.

    Without the text nothing is decided either: nobody knows the noise.
    """
    model = _model(run, positional=7, diagonal=1)
    read = torch.linalg.svd(run.arrays["positional_basis"][:, 1:].double()).Vh[:, None, :RANK]
    _text(monkeypatch, run, _noise(3, 8, 47, RANK) @ read)
    verdict = Study(run, model).outcome(FIGURE_4).verdicts[0]
    assert verdict.answer == UNDECIDED
    assert "of them more than in bases of the text's sampling noise alone" in verdict.evidence
    monkeypatch.undo()
    verdict = Study(run, model).outcome(FIGURE_4).verdicts[0]
    assert verdict.answer == UNDECIDED
    assert verdict.evidence.endswith("the text, which is not at hand")


def test_noise_alone_has_neither_part(run):
    outcome = Study(run, _model(run, positional=0, diagonal=0)).outcome(FIGURE_4)
    assert answers(outcome) == [FAILS, FAILS, FAILS]


def test_the_corner_is_that_of_the_matrices_written_out(run):
    """Oracle: numpy on W, D and V as d × d matrices."""
    table = Study(run, _model(run, positional=1, diagonal=1)).outcome(FIGURE_4).tables["heads"]
    weights = _model(run, positional=1, diagonal=1).head_weights(0)
    basis = run.arrays["positional_basis"][0, 1:].double().numpy()
    v = np.linalg.svd(basis, full_matrices=True)[2].T
    for head in range(HEADS):
        w = weights.w_q[head].numpy() @ weights.w_k[head].numpy().T
        energy = (v.T @ (w - np.diag(np.diag(w))) @ v) ** 2
        assert table.loc[head, "corner_energy_20"] == pytest.approx(energy[:20, :20].sum() / energy.sum())
        assert table.loc[head, "diagonal"] == pytest.approx((np.diag(w) ** 2).sum() / (w**2).sum())


def test_blocks_without_weights_are_left_out_and_named(run):
    outcome = Study(run, _model(run, 2, 1, refused=(1,))).outcome(FIGURE_4)
    assert set(outcome.tables["heads"]["layer"]) == {0}
    assert "blocks 1 have no query-key matrix" in outcome.verdicts[0].evidence
    with pytest.raises(UsageError, match="in any layer"):
        Study(run, _model(run, 2, 1, refused=(0, 1))).outcome(FIGURE_4)
    with pytest.raises(UsageError, match="needs the model"):
        Study(run).outcome(FIGURE_4)
