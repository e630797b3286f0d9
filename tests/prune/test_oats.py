"""OATS against its formulas in numpy, with a full SVD each iteration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from theodolite.errors import UsageError
from theodolite.prune import oats
from theodolite.prune import sparse_low_rank as module


def weights(outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    """Noise around a matrix of low rank, with a few large entries."""
    generator = np.random.default_rng(seed)
    low = generator.normal(size=(outputs, 3)) @ generator.normal(size=(3, inputs))
    return low + generator.normal(size=(outputs, inputs)) ** 3


def moments(inputs: int, seed: int = 0) -> np.ndarray:
    return np.exp(np.random.default_rng(seed + 100).normal(size=inputs))


def slow_oats(weight, second_moment, rank, entries, iterations, pattern=None):
    """Ŵ, the scaled sparse part, and ‖(W − Ŵ) D‖ / ‖W D‖; `entries` of each row, or N of every M of a pattern."""
    scale = np.sqrt(second_moment)
    scaled = weight * scale
    sparse = np.zeros_like(scaled)
    for _ in range(iterations):
        left, values, right = np.linalg.svd(scaled - sparse, full_matrices=False)
        low = (left[:, :rank] * values[:rank]) @ right[:rank]
        groups = (scaled - low).reshape(-1, pattern[1] if pattern else scaled.shape[1])
        order = np.argsort(np.abs(groups), axis=1, kind="stable")
        removed, chosen = groups.shape[1] - (pattern[0] if pattern else entries), groups.copy()
        np.put_along_axis(chosen, order[:, :removed], 0, axis=1)
        sparse = chosen.reshape(scaled.shape)
    error = np.linalg.norm(scaled - low - sparse) / np.linalg.norm(scaled)
    return (low + sparse) / scale, sparse, float(error)


def budget(outputs: int, inputs: int, sparsity: float, ratio: float) -> tuple[int, int]:
    """Rank and entries a row."""
    rank = int(ratio * (1 - sparsity) * outputs * inputs / (outputs + inputs))
    return rank, inputs - int(inputs * (1 - (1 - ratio) * (1 - sparsity)))


def tensors(weight, second_moment, dtype=torch.float64):
    return torch.from_numpy(weight).to(dtype), torch.from_numpy(second_moment)


@pytest.mark.parametrize(
    ("shape", "sparsity", "ratio", "iterations"),
    [
        ((24, 24), 0.5, 0.25, 12),
        ((40, 16), 0.3, 0.5, 12),
        ((16, 40), 0.6, 0.3, 12),
        ((16, 40), 0.5, 0.25, 2),
        ((20, 30), 0.5, 0.0, 1),  # without low rank it is Wanda, in one iteration
        ((30, 20), 0.6, 1.0, 1),  # and without a sparse part a truncated SVD
    ],
)
def test_small_matrices_get_the_published_iteration(shape, sparsity, ratio, iterations):
    weight, second_moment = weights(*shape), moments(shape[1])
    rank, entries = budget(*shape, sparsity, ratio)
    dense, sparse, error = slow_oats(weight, second_moment, rank, entries, iterations)
    got = oats(*tensors(weight, second_moment), sparsity, ratio, iterations)
    np.testing.assert_allclose(got.dense().numpy(), dense, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(got.sparse.numpy() * np.sqrt(second_moment), sparse, rtol=1e-7, atol=1e-9)
    assert got.left.shape == (shape[0], rank)
    assert got.right.shape == (rank, shape[1])
    torch.testing.assert_close(got.left.mT @ got.left, torch.eye(rank, dtype=torch.float64))
    assert got.error == pytest.approx(error, rel=1e-9)
    assert (got.iterations, got.stalls) == (iterations, 0)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", [(48, 48), (90, 40), (40, 90)])
def test_the_subspace_goes_where_the_svd_goes(shape, exact, monkeypatch):
    """Followed until it rests to rounding, it gives each iteration what a full SVD gives; by `exact`, too."""
    monkeypatch.setattr(module, "SMALL", 0)
    monkeypatch.setattr(module, "_TOLERANCE", 1e-7)
    monkeypatch.setattr(module, "_MOST_STEPS", 60)
    monkeypatch.setattr(module, "_START_STEPS", 200)
    weight, second_moment = weights(*shape), moments(shape[1])
    dense, _, error = slow_oats(weight, second_moment, *budget(*shape, 0.5, 0.25), 20)
    got = oats(*tensors(weight, second_moment), 0.5, iterations=20, exact=exact, seed=1)
    assert (got.error, got.stalls) == (pytest.approx(error, rel=1e-7), 0)
    np.testing.assert_allclose(got.dense().numpy(), dense, rtol=1e-5, atol=1e-7)
    if exact:
        again = oats(*tensors(weight, second_moment), 0.5, iterations=20, exact=True, seed=2)
        assert torch.equal(again.dense(), got.dense())


@pytest.mark.parametrize("shape", [(300, 260), (260, 300)])
def test_the_random_start_leaves_hardly_more_than_a_truncated_svd(shape):
    """Of noise alone, whose singular values no gap parts: the hardest case."""
    target, rank = torch.from_numpy(np.random.default_rng(4).normal(size=shape)), 16
    values = np.linalg.svd(target.numpy(), compute_uv=False)
    found = module.randomised_svd(target, rank, torch.Generator().manual_seed(0))
    left = torch.linalg.vector_norm(target - found.left @ found.right)
    assert found.left.shape == (shape[0], rank)
    assert 1 <= float(left) / np.sqrt((values[rank:] ** 2).sum()) < 1.01


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shape"), [("gaussian", (128, 144)), ("low rank and sparse", (320, 256))])
def test_the_error_is_that_of_full_svds_within_a_hundredth(kind, shape):
    """As it is used, in float32; the oracle in float64."""
    generator = np.random.default_rng(3)
    weight = generator.normal(size=shape) if kind == "gaussian" else weights(*shape, seed=3)
    second_moment = moments(shape[1])
    second_moment[7] = 1e4  # a massive activation
    _, _, error = slow_oats(weight, second_moment, *budget(*shape, 0.5, 0.25), 25)
    got = oats(*tensors(weight, second_moment, torch.float32), 0.5, iterations=25)
    assert got.error == pytest.approx(error, rel=0.01)
    lost = (got.dense().double().numpy() - weight) * np.sqrt(second_moment)
    assert np.linalg.norm(lost) / np.linalg.norm(weight * np.sqrt(second_moment)) == pytest.approx(
        got.error, rel=1e-4
    )
    assert (got.iterations, got.stalls) == (25, 0)


def test_a_subspace_that_does_not_rest_is_replaced_by_a_full_svd(monkeypatch):
    """No step is enough: every iteration but the first, which starts at random, stalls, and is exact."""
    monkeypatch.setattr(module, "SMALL", 0)
    monkeypatch.setattr(module, "_MOST_STEPS", 0)
    monkeypatch.setattr(module, "_START_STEPS", 200)
    weight, second_moment = weights(30, 40), moments(40)
    dense, _, error = slow_oats(weight, second_moment, *budget(30, 40, 0.5, 0.25), 9)
    got = oats(*tensors(weight, second_moment), 0.5, iterations=9)
    assert got.stalls == 8
    assert got.error == pytest.approx(error, rel=1e-9)
    np.testing.assert_allclose(got.dense().numpy(), dense, rtol=1e-7, atol=1e-9)


def test_a_direction_that_subspace_iteration_cannot_see_is_found(monkeypatch):
    """Of two blocks that share no row and no column, the first start is misled to the weaker one."""
    generator = np.random.default_rng(1)
    weight = np.zeros((80, 80))
    weight[:40, :40] = generator.normal(size=(40, 40))
    weight[40:, 40:] = 10 * generator.normal(size=(40, 40))
    monkeypatch.setattr(module, "SMALL", 0)

    def misled(target, rank, generator):
        return module.truncated_svd(torch.nn.functional.pad(target[:40, :40], (0, 40, 0, 40)), rank)

    monkeypatch.setattr(module, "randomised_svd", misled)
    _, _, error = slow_oats(weight, np.ones(80), *budget(80, 80, 0.75, 0.25), 60)
    got = oats(*tensors(weight, np.ones(80)), 0.75, iterations=60)
    assert got.stalls >= 1
    assert got.error < 1.02 * error
    monkeypatch.setattr(module, "misses", lambda *_: False)
    blind = oats(*tensors(weight, np.ones(80)), 0.75, iterations=60)
    assert blind.stalls == 0
    assert blind.error > 1.1 * error


def test_a_matrix_of_low_rank_is_no_stall(monkeypatch):
    """All but one of its directions are rounding, and turn at every step."""
    monkeypatch.setattr(module, "SMALL", 0)
    weight = np.outer(np.arange(1.0, 61), np.cos(np.arange(50)))
    for dtype in (torch.float32, torch.float64):
        got = oats(*tensors(weight, moments(50), dtype), 0.5, iterations=20)
        assert got.stalls == 0
        assert got.error < 32 * torch.finfo(dtype).eps
    zero = oats(torch.zeros(60, 50), torch.ones(50), 0.5, iterations=3)
    assert (zero.error, zero.stalls) == (0, 0)
    assert not zero.dense().any()


@settings(max_examples=40, deadline=None)
@given(
    outputs=st.integers(2, 40),
    inputs=st.integers(2, 40),
    sparsity=st.floats(0.05, 0.95),
    ratio=st.floats(0, 1),
    small=st.booleans(),
)
def test_counts(outputs, inputs, sparsity, ratio, small):
    """Exact zeros in each row, the rank of the formula, and a total within one entry a row of the budget."""
    rank, entries = budget(outputs, inputs, sparsity, ratio)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SMALL", 256 if small else 0)
        got = oats(*tensors(weights(outputs, inputs), moments(inputs)), sparsity, ratio, 4)
    # Where the low-rank part takes all, what is left is rounding, which may be 0.
    filled = (got.sparse != 0).sum(1)
    assert (filled <= entries).all()
    assert got.error < 1e-12 or (filled == entries).all()
    assert got.left.shape[1] == got.right.shape[0] == rank
    total = int(filled.sum()) + got.left.numel() + got.right.numel()
    assert total < (1 - sparsity) * outputs * inputs + outputs + 1e-9


@pytest.mark.parametrize(("pattern", "ratio"), [("2:4", 0.25), ("2:8", 0.5), ("4:8", 0.1)])
def test_a_pattern_as_published(pattern, ratio):
    """Of no sparsity: exactly N of M, and a rank with (1 − κ) of what is kept in them: dense = (N/M)/(1 − κ)."""
    kept, of = (int(number) for number in pattern.split(":"))
    weight, second_moment = weights(40, 48), moments(48)
    dense = kept / of / (1 - ratio)
    rank = int(ratio * dense * 40 * 48 / 88)
    expected, _, error = slow_oats(weight, second_moment, rank, 0, 10, (kept, of))
    for sparsity in (None, 1 - dense, round(1 - dense, 3)):
        got = oats(*tensors(weight, second_moment), sparsity, ratio, 10, pattern)
        assert ((got.sparse.view(-1, of) != 0).sum(1) == kept).all()
        assert got.error == pytest.approx(error, rel=1e-9)
        np.testing.assert_allclose(got.dense().numpy(), expected, rtol=1e-7, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(entries=st.integers(1, 4), seed=st.integers(0, 999))
def test_the_best_entries_under_both_are_found(entries, seed):
    """All choices of so many of eight entries, at most two in each four, tried."""
    row = torch.from_numpy(np.random.default_rng(seed).normal(size=(1, 8)))
    scores, kept = torch.empty_like(row), torch.empty_like(row)
    budget = module.Budget(1, entries, module.methods.Pattern(2, 4))
    module._mark_kept(row, budget, module.methods.ThresholdTracker(entries), scores, kept)
    best = max(
        sum(float(row[0, i]) ** 2 for i in chosen)
        for chosen in itertools.combinations(range(8), entries)
        if sum(i < 4 for i in chosen) <= 2 and sum(i >= 4 for i in chosen) <= 2
    )
    assert float((row * kept).square().sum()) == pytest.approx(best, rel=1e-12)
    assert kept.sum() == entries


@pytest.mark.parametrize("small", [0, 256])
def test_a_dead_input_is_the_limit_of_a_small_one(small, monkeypatch):
    monkeypatch.setattr(module, "SMALL", small)
    weight, second_moment = weights(30, 40), moments(40)
    second_moment[[3, 17]] = 1e-18
    almost = oats(*tensors(weight, second_moment), 0.5, iterations=8)
    second_moment[[3, 17]] = 0
    dead = oats(*tensors(weight, second_moment), 0.5, iterations=8)
    assert torch.isfinite(dead.dense()).all()
    assert not dead.sparse[:, [3, 17]].any()
    torch.testing.assert_close(dead.dense(), almost.dense(), rtol=1e-6, atol=1e-7)
    projected = dead.left @ (dead.left.mT @ torch.from_numpy(weight)[:, [3, 17]])
    torch.testing.assert_close(dead.dense()[:, [3, 17]], projected, rtol=1e-9, atol=1e-11)


def test_dead_inputs_alone_count_alike_and_may_be_more_than_zeros():
    weight, second_moment = torch.from_numpy(weights(30, 40)), torch.zeros(40)
    expected = oats(weight, torch.ones(40), 0.5, iterations=5)
    assert torch.equal(oats(weight, second_moment, 0.5, iterations=5).dense(), expected.dense())
    second_moment[:5] = 1
    got = oats(weight, second_moment, 0.5, iterations=5)
    assert torch.isfinite(got.dense()).all()
    assert got.error < 1e-12


def test_half_precisions_are_computed_in_float32_and_rounded_once():
    dtype = torch.bfloat16
    weight, second_moment = torch.from_numpy(weights(64, 48)).to(dtype), torch.from_numpy(moments(48))
    got, wide = (oats(w, second_moment, 0.5, iterations=6) for w in (weight, weight.float()))
    for part in ("sparse", "left", "right"):
        assert getattr(got, part).dtype == dtype
        assert torch.equal(getattr(got, part), getattr(wide, part).to(dtype))
    assert got.error == wide.error
    expected = got.sparse.double() + got.left.double() @ got.right.double()
    assert got.dense().dtype == dtype
    torch.testing.assert_close(got.dense().double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_the_same_bytes_and_no_traces():
    weight, second_moment = tensors(weights(300, 260), moments(260), torch.float32)
    strided, before = weight.T.contiguous().T, torch.get_rng_state()
    first, second = (oats(w, second_moment, 0.5, iterations=20) for w in (weight, strided))
    for part in ("sparse", "left", "right"):
        assert torch.equal(getattr(first, part), getattr(second, part))
        assert getattr(first, part).is_contiguous()
    assert first.error == second.error
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(weight, tensors(weights(300, 260), moments(260), torch.float32)[0])
    scaled = oats(weight, 64 * second_moment, 0.5, iterations=20)
    assert torch.equal(scaled.dense(), first.dense())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sparsity": 1.0}, "sparsity is 1.0"),
        ({}, "no sparsity is given"),
        ({"sparsity": 0.5, "rank_ratio": -0.1}, "rank_ratio is -0.1"),
        ({"sparsity": 0.5, "iterations": 0}, "iterations is 0"),
        ({"sparsity": 0.5, "pattern": "2:5"}, "needs a multiple of 5 inputs"),
        (
            {"sparsity": 0.5, "pattern": "2:8"},
            r"0\.6667, not 0\.5: pass sparsity 0\.6667 or None, or a larger",
        ),
        ({"pattern": "2:4", "rank_ratio": 0.5}, "fixes no sparsity: pass one"),
        ({"pattern": "2:4", "rank_ratio": 1}, "fixes no sparsity: pass one"),
        ({"sparsity": 0.5, "second_moment": torch.ones(7)}, "must be one number for each of 8 inputs"),
    ],
)
def test_bad_calls(arguments, message):
    with pytest.raises(UsageError, match=message):
        oats(**{"weight": torch.ones(4, 8), "second_moment": torch.ones(8), **arguments})
