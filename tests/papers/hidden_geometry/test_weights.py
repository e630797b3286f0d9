"""Oracles: weights in which a part is planted, numpy with the matrices written out, and layouts by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.papers.hidden_geometry.planted import drawn, grouped
from tests.papers.shared import answers
from tests.report.synthetic import make_run
from theodolite.errors import UsageError, WorkError
from theodolite.judging import FAILS, HOLDS, UNDECIDED
from theodolite.models.weights.head_weights import HeadWeights
from theodolite_papers import Study
from theodolite_papers.experiment import haar_rotation
from theodolite_papers.hidden_geometry import weights
from theodolite_papers.hidden_geometry.weights import decouple, figure_4

WIDTH, RANK, HEADS = 80, 5, 8


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
    monkeypatch.setattr(weights, "bases_by_group", lambda study: grouped(basis, noise))


def test_planted_parts_are_found_where_they_are(run, monkeypatch):
    """Oracle: seven heads of eight hold V L Vᵀ, L of 5 × 5 signs, plus 2 % of noise, the last a diagonal of signs."""
    _text(monkeypatch, run, 1e-3 * drawn(1, 3, 8, 47, WIDTH))
    outcome = Study(run, _model(run, positional=7, diagonal=1)).outcome(figure_4)
    assert answers(outcome) == [HOLDS, FAILS, HOLDS]
    table = outcome.tables["heads"]
    assert len(table) == 2 * HEADS
    positional, diagonal = table[table["head"] < 7], table[table["head"] == 7]
    assert (positional["corner_energy_20"] > 0.5).all()
    assert (positional["corner_ratio"] > 10).all()
    assert (diagonal["diagonal"] > 0.9).all()
    assert (diagonal["diagonal_ratio"] > 10).all()
    assert diagonal["corner_ratio"].between(0.5, 2).all()
    swapped = Study(run, _model(run, positional=1, diagonal=7)).outcome(figure_4)
    assert answers(swapped) == [FAILS, HOLDS, FAILS]


def test_directions_in_which_contexts_vary_are_not_those_of_positions(run, monkeypatch):
    """Oracle: weights of the very directions in which the text is noisy, which the basis then leans to by chance.

    Without the text nothing is decided either: nobody knows the noise.
    """
    model = _model(run, positional=7, diagonal=1)
    read = torch.linalg.svd(run.arrays["positional_basis"][:, 1:].double()).Vh[:, None, :RANK]
    _text(monkeypatch, run, drawn(1, 3, 8, 47, RANK) @ read)
    verdict = Study(run, model).outcome(figure_4).verdicts[0]
    assert verdict.answer == UNDECIDED
    assert "of them more than in bases of the text's sampling noise alone" in verdict.evidence
    monkeypatch.undo()
    verdict = Study(run, model).outcome(figure_4).verdicts[0]
    assert verdict.answer == UNDECIDED
    assert verdict.evidence.endswith("the text, which is not at hand")


def test_noise_alone_has_neither_part(run):
    outcome = Study(run, _model(run, positional=0, diagonal=0)).outcome(figure_4)
    assert answers(outcome) == [FAILS, FAILS, FAILS]


def test_blocks_without_weights_are_left_out_and_named(run):
    outcome = Study(run, _model(run, 2, 1, refused=(1,))).outcome(figure_4)
    assert set(outcome.tables["heads"]["layer"]) == {0}
    assert "blocks 1 have no query-key matrix" in outcome.verdicts[0].evidence
    with pytest.raises(UsageError, match="in any layer"):
        Study(run, _model(run, 2, 1, refused=(0, 1))).outcome(figure_4)
    with pytest.raises(UsageError, match="needs the model"):
        Study(run).outcome(figure_4)


def basis_of(p: Tensor) -> Tensor:
    return torch.tensor(np.linalg.svd(p.numpy(), full_matrices=True)[2].T.copy())


def dense(w: np.ndarray, v: np.ndarray, corners: tuple[int, ...]) -> dict[str, np.ndarray]:
    """As the published notebook does it, with the d×d matrix."""
    diagonal = np.diag(np.diag(w))
    rotated = v.T @ (w - diagonal) @ v
    threshold = np.sqrt(2 * np.log(w.size)) * np.std(rotated)
    survivors = np.where(np.abs(rotated) > threshold, rotated, 0)
    energy = (rotated**2).sum()
    return {
        "threshold": threshold,
        "surviving": np.count_nonzero(survivors),
        "surviving_energy": (survivors**2).sum() / energy,
        "corner_surviving": np.array([(survivors[:k, :k] ** 2).sum() for k in corners])
        / max((survivors**2).sum(), 1e-300),
        "corner_energy": np.array([(rotated[:k, :k] ** 2).sum() for k in corners]) / energy,
    }


def test_every_number_is_that_of_the_dense_matrix() -> None:
    """Oracle: `dense` for the given basis, d = 70 so that the maps are cut at 60."""
    corners = (1, 5, 20, 90)
    p = drawn(0, 9, 70)
    v = basis_of(p)
    w_q, w_k = drawn(1, 2, 70, 6), drawn(2, 2, 70, 6)
    w_q = w_q + 3 * v[:, :1] * torch.ones(6)
    w_k = w_k + 3 * v[:, 1:2] * torch.ones(6)
    got = decouple(w_q.float(), w_k.float(), v, 0.5, corners)
    w = 0.5 * (w_q @ w_k.mT).numpy()
    for head in range(2):
        expected = dense(w[head], v.numpy(), corners)
        assert expected["surviving"] > 0
        for name, value in expected.items():
            np.testing.assert_allclose(getattr(got.aligned, name)[head], value, rtol=1e-5, err_msg=name)
        diagonal = np.diag(w[head])
        assert got.diagonal[head].item() == pytest.approx(
            (diagonal**2).sum() / (w[head] ** 2).sum(), rel=1e-5
        )
        np.testing.assert_allclose(got.diagonal_map[head], np.abs(diagonal[:60]), rtol=1e-4, atol=1e-5)
        rotated = np.abs(v.numpy().T @ (w[head] - np.diag(diagonal)) @ v.numpy())
        survivors = np.where(rotated > expected["threshold"], rotated, 0)[:60, :60]
        np.testing.assert_allclose(got.rotated_map[head], survivors, rtol=1e-4)


def test_random_baseline_is_the_haar_average() -> None:
    """Closed form for A = W − D: (K e + K(K−1) f)/‖A‖², e = (‖A‖² + tr A²)/(d(d+2)), f from the whole."""
    width, corner, count = 16, 4, 200
    w_q, w_k = drawn(7, 1, width, 5), drawn(8, 1, width, 5)
    w = (w_q @ w_k.mT)[0].numpy()
    off = w - np.diag(np.diag(w))
    whole = (off**2).sum()
    on_diagonal = (whole + np.trace(off @ off)) / (width * (width + 2))
    elsewhere = (whole - width * on_diagonal) / (width * (width - 1))
    expected = (corner * on_diagonal + corner * (corner - 1) * elsewhere) / whole
    got = decouple(w_q, w_k, torch.eye(width), 1.0, (corner,), rotations=count)
    error = got.random.corner_energy.std().item() / math.sqrt(count)
    assert abs(got.random.corner_energy.mean().item() - expected) < 4 * error
    assert expected == pytest.approx((corner / width) ** 2, rel=0.25)


def test_rotations_are_haar() -> None:
    """Moments of the trace of a Haar orthogonal matrix: E tr = 0, E tr² = 1, E tr⁴ = 3 (Diaconis & Shahshahani)."""
    generator = torch.Generator().manual_seed(0)
    rotations = torch.stack([haar_rotation(6, generator) for _ in range(1000)])
    torch.testing.assert_close(rotations.mT @ rotations, torch.eye(6, dtype=torch.float64).expand(1000, 6, 6))
    trace = rotations.diagonal(dim1=-2, dim2=-1).sum(-1)
    for power, expected in ((1, 0.0), (2, 1.0), (4, 3.0)):
        moment = trace**power
        assert abs(moment.mean() - expected) < 4 * moment.std() / math.sqrt(1000)
