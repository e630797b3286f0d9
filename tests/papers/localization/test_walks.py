"""Oracles: true Gaussian walks (R² 1), independent vectors (autocorrelation −½, no growth), constants, and numpy on
whole hidden states."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from theodolite_papers.localization.walks import (
    LAGS,
    WalkSums,
    autocorrelations,
    mean_gram,
    pair_table,
    second_moment_errors,
    steps_shared,
    walk_table,
)


def summed(hidden: torch.Tensor, batch: int = 5) -> tuple[WalkSums, dict[str, torch.Tensor]]:
    """The sums of (C, T, d) as one layer, read in batches."""
    contexts, length, width = hidden.shape
    sums = WalkSums(1, width, contexts, length)
    for first in range(0, contexts, batch):
        sums.update(0, hidden[first : first + batch], first)
    return sums, sums.state()


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def walk(contexts: int, length: int, width: int) -> torch.Tensor:
    """A walk with an anisotropic Σ; position 0 is left out, so it may be anything."""
    scale = torch.linspace(0.5, 2, width, dtype=torch.float64)
    return torch.cat(
        [normal(contexts, 1, width, seed=1) * 100, (normal(contexts, length - 1, width) * scale).cumsum(1)], 1
    )


def test_a_true_walk_is_found_to_be_one():
    """Oracle: Assumption 1, simulated: R² = τ/E‖ε‖² = growth = cosine = 1, autocorrelation = Frobenius error = 0."""
    row = walk_table(*summed(walk(64, 60, 16))).iloc[0]
    for name, expected, least in (
        ("r_squared", 1.0, 0.02),
        ("r_squared_centred", 1.0, 0.02),
        ("correlation", 1.0, 0.02),
        ("trace_ratio", 1.0, 0.1),
        ("autocorrelation", 0.0, 0.02),
        ("growth", 1.0, 0.1),
        ("cosine", 1.0, 0.1),
        ("frobenius", 0.0, 0.4),
    ):
        assert abs(row[name] - expected) < max(least, 4 * row[f"{name}_se"]), name
    assert row["frobenius"] < 0.4


def test_vectors_that_forget_are_no_walk():
    """Oracle: independent vectors with a common mean: E ε_t·ε_{t+1} = −½E‖ε‖², no growth, E[x_s x_tᵀ] = mean meanᵀ."""
    row = walk_table(*summed(normal(64, 60, 16) + 3)).iloc[0]
    assert row["autocorrelation"] == pytest.approx(-0.5, abs=0.02)
    assert abs(row["growth"]) < 0.05
    assert row["r_squared"] < 0.1
    assert row["frobenius"] > 0.5


def test_sums_are_those_of_numpy_whatever_the_batches():
    """Oracle: numpy on the whole array."""
    hidden = normal(9, 20, 4)
    sums, state = summed(hidden, batch=4)
    x = hidden[:, 1:].numpy()
    steps = np.diff(x, axis=1)
    np.testing.assert_allclose(mean_gram(state, 0), np.einsum("csd,ctd->st", x, x) / 9)
    flat = steps.reshape(-1, 4)
    np.testing.assert_allclose(sums.covariance(state, 0), flat.T @ flat / len(flat))
    expected = [np.mean((steps[:, : 18 - lag] * steps[:, lag:]).sum(-1)) for lag in range(LAGS + 1)]
    np.testing.assert_allclose(autocorrelations(sums, state, 0), np.array(expected) / expected[0])
    shared = steps_shared(sums).numpy()
    assert shared[0, 5] == 1
    assert shared[5, 18] == 6
    singly, _ = summed(hidden, batch=1)
    torch.testing.assert_close(singly.state()["kept"], state["kept"])


def test_the_fit_is_that_of_least_squares():
    """Oracle: numpy.linalg.lstsq and its residuals."""
    sums, state = summed(walk(16, 30, 5) + 1.0)
    row = walk_table(sums, state).iloc[0]
    gram, shared = mean_gram(state, 0).numpy().ravel(), steps_shared(sums).numpy().ravel()
    (trace,), residual, *_ = np.linalg.lstsq(shared[:, None], gram, rcond=None)
    assert row["r_squared"] == pytest.approx(1 - residual[0] / ((gram - gram.mean()) ** 2).sum())
    steps = torch.diff((walk(16, 30, 5) + 1.0)[:, 1:], dim=1)
    assert row["trace_ratio"] == pytest.approx(trace / float(steps.square().sum(-1).mean()))


def test_the_size_of_a_second_moment_is_not_that_of_its_noise():
    """Oracle: E[x_s x_tᵀ] = min(s, t)Σ is known. 24 contexts in 40 dimensions: the plain estimate of ‖M‖_F² would have
    (d² + d)/C = 68 of noise on the diagonal's d = 40."""
    sums, state = summed(torch.cat([normal(24, 1, 40), normal(24, 30, 40, seed=3).cumsum(1)], 1))
    frobenius, cosine = second_moment_errors(sums, state, 0)
    plain = torch.einsum("cd,ce->de", state["kept"][0][:, 0], state["kept"][0][:, 0]) / 24
    assert float(torch.linalg.matrix_norm(plain)) > 1.4 * 40**0.5
    assert float(cosine.median()) > 0.8
    assert float(frobenius.median()) < 0.5
    assert len(pair_table(sums, state)) == len(frobenius)


def test_standard_errors_are_those_of_repeated_corpora():
    """Oracle: Monte Carlo: the spread of the estimate over corpora drawn anew (an error of 7 degrees of freedom is
    itself known to about 27 %; the mean of 12 to 8 %, their spread to 20 %)."""
    tables = [walk_table(*summed(normal(32, 24, 6, seed=seed))) for seed in range(12)]
    values = np.array([table["autocorrelation"][0] for table in tables])
    errors = np.array([table["autocorrelation_se"][0] for table in tables])
    assert np.sqrt((errors**2).mean()) == pytest.approx(values.std(ddof=1), rel=0.6)
    assert walk_table(*summed(normal(5, 24, 6)))["r_squared_se"].isna().all()
