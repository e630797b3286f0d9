"""Rounding, GPTQ and quantised OATS against loops in numpy that are written from the papers' formulas."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tests.prune.test_methods import KINDS, hessian_of, weights
from theodolite.errors import UsageError
from theodolite.prune import quantised as module
from theodolite.prune.methods import factor_hessian
from theodolite.prune.quantised import (
    gptq,
    gptq_factored,
    quantised_bits,
    quantised_oats,
    rank_at,
    round_to_nearest,
)


def bfloat16(numbers: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.asarray(numbers)).bfloat16().double().numpy()


def on_grid(weight: np.ndarray, scale: float, bits: int) -> np.ndarray:
    half = 2 ** (bits - 1)
    return np.clip(np.round(weight / scale), -half, half - 1) * scale


def slow_scale(group: np.ndarray, costs: np.ndarray, bits: int) -> float:
    """Of the scales that put the largest weight 7, or 8, 8.5, … 18 steps from 0 (at 4 bits): the one of least cost."""
    half = 2 ** (bits - 1)
    tried = bfloat16(np.abs(group).max() / np.array([half - 1, *(half + half * k / 16 for k in range(21))]))
    return min(tried, key=lambda scale: float((costs * (group - on_grid(group, scale, bits)) ** 2).sum()))


def slow_gptq(weight: np.ndarray, hessian: np.ndarray, bits: int, group: int, damping: float) -> np.ndarray:
    """Eqs. 2 and 3 of Frantar et al. 2023, row by row; the Hessian of the inputs left is inverted anew each time."""
    left, hessian = weight.copy(), hessian.copy()
    inputs = weight.shape[1]
    dead = np.diag(hessian) == 0
    hessian[dead, dead] = 1
    left[:, dead] = 0
    hessian += damping * np.diag(hessian).mean() * np.eye(inputs)
    inverses = [np.linalg.inv(hessian[j:, j:]) for j in range(inputs)]
    costs = np.array([1 / inverse[0, 0] for inverse in inverses])
    for row in left:
        for j in range(inputs):
            if j % group == 0:
                now = slice(j, j + group)
                scale = slow_scale(row[now], costs[now], bits)
            rounded = on_grid(row[j], scale, bits)
            row[j + 1 :] -= (row[j] - rounded) / inverses[j][0, 0] * inverses[j][0, 1:]
            row[j] = rounded
    return left


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("group", [4, 0])
def test_rounding_takes_the_best_scale_of_each_group(bits, group):
    weight = weights(5, 12)
    quantised = round_to_nearest(torch.from_numpy(weight), bits, group)
    assert quantised.codes.dtype == torch.int8
    assert quantised.scale.shape == (5, 3 if group else 1)
    for row, scales in zip(weight, quantised.scale.double().numpy(), strict=True):
        for part, scale in zip(np.split(row, len(scales)), scales, strict=True):
            assert scale == slow_scale(part, np.ones(len(part)), bits)
    rounded = np.vectorize(lambda w, s: on_grid(w, s, bits))(
        weight, np.repeat(quantised.scale.double().numpy(), group or 12, axis=1)
    )
    np.testing.assert_array_equal(quantised.dense().numpy(), rounded)


def test_no_other_codes_lose_less():
    """Brute force over all codes of three bits, for each of a few rows."""
    weight = weights(4, 4, seed=1)
    quantised = round_to_nearest(torch.from_numpy(weight), 3, 0)
    every = np.array(list(itertools.product(range(-4, 4), repeat=4)))
    for row, scale, codes in zip(weight, quantised.scale.double(), quantised.codes, strict=True):
        lost = ((row - every * float(scale)) ** 2).sum(axis=1)
        np.testing.assert_array_equal(every[lost.argmin()], codes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [4, 8, 16, 0])
def test_gptq_is_the_formula_input_by_input(kind, group):
    weight, hessian = weights(6, 16), hessian_of(16, kind)
    result = gptq(torch.from_numpy(weight), torch.from_numpy(hessian), 4, group, damping=0.01)
    if group:
        expected = slow_gptq(weight, hessian, 4, group, 0.01)
        np.testing.assert_allclose(result.dense().numpy(), expected, rtol=0, atol=1e-12)
    else:  # the scale is of the weight as it was, also where more than one block follows
        whole = slow_gptq(weight, hessian, 4, 16, 0.01)
        np.testing.assert_allclose(result.dense().numpy(), whole, rtol=0, atol=1e-12)


def test_scales_of_whole_rows_span_blocks():
    """With 0 the scale is that of the weight before anything moved; oracle: the loop with one group of all inputs."""
    weight, hessian = weights(3, 300), hessian_of(300, "correlated")
    result = gptq(torch.from_numpy(weight), torch.from_numpy(hessian), 4, 0, damping=0.01)
    expected = slow_gptq(weight, hessian, 4, 300, 0.01)
    np.testing.assert_allclose(result.dense().numpy(), expected, rtol=0, atol=1e-10)


def test_without_correlations_gptq_rounds():
    weight = torch.from_numpy(weights(6, 32))
    rounded = round_to_nearest(weight, 4, 8)
    apart = gptq(weight, torch.eye(32, dtype=torch.float64), 4, 8)
    torch.testing.assert_close(apart.codes, rounded.codes)
    torch.testing.assert_close(apart.scale, rounded.scale)


@pytest.mark.parametrize("kind", ["correlated", "outliers"])
def test_gptq_loses_less_than_rounding(kind):
    """In the norm of the inputs; no theorem, but so at each of ten seeds."""
    for seed in range(10):
        weight, hessian = weights(16, 32, seed), hessian_of(32, kind, seed)
        lost = [
            np.trace((delta := weight - quantised.dense().numpy()) @ hessian @ delta.T)
            for quantised in (
                gptq(torch.from_numpy(weight), torch.from_numpy(hessian), 4, 8, damping=0.01),
                round_to_nearest(torch.from_numpy(weight), 4, 8),
            )
        ]
        assert lost[0] < lost[1], seed


def test_what_is_on_a_grid_stays():
    codes = torch.randint(-8, 8, (6, 32), generator=torch.Generator().manual_seed(0))
    codes[:, ::8] = torch.tensor([7, -8]).repeat(12).view(6, 4)
    weight = codes * 0.03125
    again = round_to_nearest(weight, 4, 8)
    assert torch.equal(again.codes, codes.to(torch.int8))
    assert torch.equal(again.dense(), weight)
    assert not round_to_nearest(torch.zeros(2, 8), 4, 8).dense().any()


def scaled_error(weight: torch.Tensor, approximation: torch.Tensor, moments: torch.Tensor) -> float:
    return float(((weight - approximation).double().square() * moments).sum().sqrt())


def planted(outputs: int = 48, inputs: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix with a strong part of rank two, and second moments with a few outliers."""
    generator = torch.Generator().manual_seed(0)
    normal = [
        torch.randn(*shape, generator=generator) for shape in ((outputs, inputs), (outputs, 2), (2, inputs))
    ]
    moments = torch.exp(2 * torch.randn(inputs, generator=generator)).double()
    return normal[0] + 4 * normal[1] @ normal[2], moments


def test_no_alternation_adds_to_the_error():
    weight, moments = planted()
    errors = [
        scaled_error(weight, quantised_oats(weight, moments, 3, 16, 0.6, n).dense(), moments)
        for n in range(1, 9)
    ]
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in itertools.pairwise(errors)), errors
    assert errors[-1] < 0.95 * errors[0]


def test_it_alternates_rounding_and_a_truncated_svd():
    """Oracle: the same alternation with a full SVD and a full search for scales each time, in numpy."""
    weight, moments = planted()
    rank = rank_at((48, 64), 3, 16, 0.6, torch.float32)
    assert rank == 6
    w, scale = weight.double().numpy(), moments.sqrt().numpy()
    rounded = np.zeros_like(w)
    for _ in range(12):
        u, s, v = np.linalg.svd((w - rounded) * scale, full_matrices=False)
        low = (u[:, :rank] * s[:rank]) @ v[:rank] / scale
        rest = (w - low).reshape(48, 4, 16)
        costs = (scale**2).reshape(4, 16)
        for row, group in itertools.product(range(48), range(4)):
            part = rest[row, group]
            part[:] = on_grid(part, slow_scale(part, costs[group], 3), 3)
        rounded = rest.reshape(w.shape)
    slow = scaled_error(weight, torch.from_numpy(rounded + low), moments)
    ours = quantised_oats(weight, moments, 3, 16, 0.6, 12)
    assert ours.left is not None
    assert ours.left.shape == (48, 6)
    assert scaled_error(weight, ours.dense(), moments) < 1.02 * slow


def test_a_large_matrix_starts_at_random_and_loses_hardly_more(monkeypatch):
    """Oracle: a start from a full SVD."""
    weight, moments = planted(280, 256)
    with monkeypatch.context() as exact:
        exact.setattr(module, "SMALL", 1000)
        started = quantised_oats(weight, moments, 4, 32, 0.25, 5)
    monkeypatch.setattr(module, "truncated_svd", None)
    ours, again = (quantised_oats(weight, moments, 4, 32, 0.25, 5, seed=1) for _ in range(2))
    assert torch.equal(ours.dense(), again.dense())
    assert not torch.equal(ours.dense(), quantised_oats(weight, moments, 4, 32, 0.25, 5, seed=2).dense())
    ratio = scaled_error(weight, ours.dense(), moments) / scaled_error(weight, started.dense(), moments)
    assert 0.99 < ratio < 1.005


def test_a_strong_low_rank_part_is_kept_from_the_grid():
    weight, moments = planted()
    alone = round_to_nearest(weight, 3, 16)
    both = quantised_oats(weight, moments, 3, 16, 0.6, 10)
    assert scaled_error(weight, both.dense(), moments) < 0.5 * scaled_error(weight, alone.dense(), moments)


def test_with_all_second_moments_the_rest_is_rounded_by_gptq():
    """Oracle: the loop, of the weight without the low-rank part."""
    hessian = hessian_of(32, "correlated")
    weight, moments = torch.from_numpy(weights(24, 32)), torch.from_numpy(np.diag(hessian).copy())
    factor = factor_hessian(torch.from_numpy(hessian), 0.01)
    result = quantised_oats(weight, moments, 4, 8, 0.7, 5, factor=factor)
    assert result.left is not None
    assert result.right is not None
    rest = (weight - result.left @ result.right).numpy()
    expected = slow_gptq(rest, hessian, 4, 8, 0.01)
    np.testing.assert_allclose(result.rounded().numpy(), expected, rtol=0, atol=1e-12)


def test_without_a_rank_it_is_rounding_by_second_moments():
    weight, moments = planted()
    result = quantised_oats(weight, moments, 4, 16, 0.0)
    assert result.left is None
    costs = (moments / moments.max()).numpy().reshape(4, 16)
    for row, scales in zip(weight.double().numpy(), result.scale.double().numpy(), strict=True):
        for part, cost, scale in zip(row.reshape(4, 16), costs, scales, strict=True):
            lost, best = (
                (cost * (part - on_grid(part, s, 4)) ** 2).sum() for s in (scale, slow_scale(part, cost, 4))
            )
            assert lost <= best * (1 + 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype):
    """Scales are in the half precision of the weight, and products are rounded once. Dead inputs do not matter."""
    weight, moments = planted()
    moments[::7] = 0
    tiny = (1e-3 * weight).to(dtype)
    hessian = torch.diag(moments)
    for quantised in (
        round_to_nearest(tiny, 8, 16),
        gptq(tiny, hessian, 8, 16),
        quantised_oats(tiny, moments, 8, 16, 0.3, 3, factor=factor_hessian(hessian)),
    ):
        assert quantised.scale.dtype == (torch.bfloat16 if dtype == torch.float32 else dtype)
        exact = quantised.codes.double() * quantised.scale.double().repeat_interleave(16, dim=1)
        assert torch.equal(quantised.rounded(), exact.to(dtype))
        assert scaled_error(tiny, quantised.dense(), moments) < 0.02 * scaled_error(tiny, 0 * tiny, moments)


def test_bits_are_counted_by_hand():
    assert quantised_bits((128, 256), 4, 128, torch.float16) == 128 * 256 * 4 + 128 * 2 * 16
    assert quantised_bits((128, 256), 3, 0, torch.float32) == 128 * 256 * 3 + 128 * 32
    # Rank 2 in bfloat16 and in float32, of the bits with it.
    for dtype, size in ((torch.bfloat16, 16), (torch.float32, 32)):
        low = 2 * size * (128 + 256)
        assert rank_at((128, 256), 3, 0, low / (low + 128 * 256 * 3 + 128 * size), dtype) == 2


def test_bad_input_is_refused():
    weight, hessian = torch.ones(4, 8), torch.eye(8)
    with pytest.raises(UsageError, match="bits is 5: use one of 3, 4, 8"):
        round_to_nearest(weight, 5, 4)
    with pytest.raises(UsageError, match="groups of 3 need a multiple of 3 inputs; a matrix has 8"):
        gptq(weight, hessian, 4, 3)
    with pytest.raises(UsageError, match="group is -1"):
        round_to_nearest(weight, 4, -1)
    with pytest.raises(UsageError, match="the Hessian is of 8 inputs, the weight of 6"):
        gptq_factored(torch.ones(4, 6), factor_hessian(hessian), 4, 3)
    with pytest.raises(UsageError, match="rank_ratio is 1"):
        quantised_oats(weight, torch.ones(8), 4, 4, 1.0)
    with pytest.raises(UsageError, match="iterations is 0"):
        quantised_oats(weight, torch.ones(8), 4, 4, 0.25, 0)
    with pytest.raises(UsageError, match="NaN"):
        round_to_nearest(weight * torch.nan, 4, 4)
