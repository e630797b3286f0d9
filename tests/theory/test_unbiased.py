"""Products of disjoint groups, against sums over all tuples of groups written out, and against known truths."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest
import torch

from theodolite.theory.unbiased import (
    Jackknifed,
    PairProducts,
    combined,
    corner_energies,
    largest_square,
    product,
    product_energy,
)

GROUPS, ROWS, WIDTH = 6, 5, 7


def groups(rows: int = ROWS, width: int = WIDTH) -> np.ndarray:
    return np.random.default_rng(0).normal(1, 1, (GROUPS, rows, width))


def over_tuples(value: Callable[..., float], order: int, without: int | None = None) -> float:
    """Average a value over all ordered tuples of different groups."""
    left = [g for g in range(GROUPS) if g != without]
    return float(np.mean([value(*chosen) for chosen in permutations(left, order)]))


def agrees(found: Jackknifed, value: Callable[..., float], order: int) -> None:
    expected = [over_tuples(value, order, without) for without in (None, *range(GROUPS))]
    assert float(found.value) == pytest.approx(expected[0])
    np.testing.assert_allclose(found.without, expected[1:], rtol=1e-10)


def test_products_are_those_of_different_groups():
    """Oracle: the sum over pairs, written out."""
    p, other = groups(), groups()[::-1].copy()
    found = product(torch.from_numpy(p).flatten(1), torch.from_numpy(other).flatten(1))
    agrees(found, lambda a, b: (p[a] * other[b]).sum(), 2)


@pytest.mark.parametrize(("rows", "width"), [(5, 7), (7, 3)])
def test_energies_of_gram_matrices_are_of_four_different_groups(rows, width):
    """Oracle: tr(P_a P_bᵀ P_c P_dᵀ) over all tuples, written out."""
    p = groups(rows, width)

    def trace(a: int, b: int, c: int, d: int) -> float:
        return np.trace(p[a] @ p[b].T @ p[c] @ p[d].T)

    agrees(PairProducts.of(torch.from_numpy(p)).energy(), trace, 4)
    ones = torch.ones(GROUPS + 1, rows, dtype=torch.float64)
    agrees(PairProducts.of(torch.from_numpy(p)).energy(ones), trace, 4)
    scale = torch.linspace(0.5, 2, rows).double().expand(GROUPS + 1, -1)
    scaled = PairProducts.of(torch.from_numpy(p)).energy(scale)
    same = PairProducts.of(torch.from_numpy(p) * scale[0][:, None]).energy()
    torch.testing.assert_close(scaled.without, same.without)
    low = torch.from_numpy(p)[None]
    corner = corner_energies(low, low, [2, rows])
    each = low.expand(GROUPS + 1, -1, -1, -1)
    torch.testing.assert_close(corner_energies(each, each, [2]).without, corner.without[:, :1])
    torch.testing.assert_close(corner.value[1], PairProducts.of(torch.from_numpy(p)).energy().value)
    top = p[:, :2]
    agrees(
        Jackknifed(corner.value[0], corner.without[:, 0]),
        lambda a, b, c, d: np.trace(top[a] @ top[b].T @ top[c] @ top[d].T),
        4,
    )


def test_energies_of_products_are_of_four_different_groups():
    """Oracle: ⟨A_a B_bᵀ, A_c B_dᵀ⟩ over all tuples, written out; and of their first entries."""
    left, right = groups(5, 3), groups(6, 3)[::-1].copy()

    def inner(a: int, b: int, c: int, d: int, n: int = 6) -> float:
        return float(((left[a] @ right[b].T)[:n, :n] * (left[c] @ right[d].T)[:n, :n]).sum())

    both = torch.from_numpy(left), torch.from_numpy(right)
    agrees(product_energy(*both), inner, 4)
    corners = corner_energies(*(p[None, None, :, :4] for p in both), [2, 4])
    for place, n in enumerate((2, 4)):
        found = Jackknifed(corners.value[0, place], corners.without[:, 0, place])
        agrees(found, functools.partial(inner, n=n), 4)
    few = product_energy(*(p[:3] for p in both))
    assert few.value.isnan()
    assert product_energy(*(p[:1] for p in both)).value.isnan()
    assert PairProducts.of(both[0][:1]).energy().value.isnan()


@pytest.mark.parametrize(("rows", "width"), [(5, 7), (9, 4), (230, 260)])
def test_the_largest_square_is_corrected_by_the_jackknife(rows, width):
    """Oracle: numpy's eigenvalues of the mean product of different groups."""
    p = groups(rows, width)

    def largest(chosen: list[int]) -> float:
        products = [p[a] @ p[b].T if rows <= width else p[a].T @ p[b] for a, b in permutations(chosen, 2)]
        return float(np.linalg.eigvalsh(np.mean(products, axis=0))[-1])

    everyone = list(range(GROUPS))
    without = [largest([g for g in everyone if g != out]) for out in everyone]
    expected = GROUPS * largest(everyone) - (GROUPS - 1) * np.mean(without)
    found = largest_square(torch.from_numpy(p))
    assert float(found.value) == pytest.approx(expected, rel=1e-8)
    assert float(found.error) >= np.std(without) * math.sqrt(GROUPS - 1) * (1 - 1e-8)


def test_roots_keep_the_sign_and_far_from_zero_the_usual_error():
    """Oracle: the derivative of a root; at 0 the interval of two errors, and both signs alike."""
    without = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]).double()
    far = Jackknifed(torch.tensor(1e6).double(), without)
    assert float(far.root().error) == pytest.approx(float(far.error) / 2e3, rel=1e-3)
    none, below = (Jackknifed(torch.tensor(value).double(), without) for value in (0.0, -9.0))
    assert float(none.root().value) == 0
    assert float(none.root().error) == pytest.approx(math.sqrt(2 * float(none.error)) / 2)
    assert float(below.root().value) == -3


def planted(contexts: int, amplitude: float, seed: int) -> torch.Tensor:
    """Means of eight groups of contexts about a smooth basis; what is known of it is in `truth`."""
    generator = torch.Generator().manual_seed(seed)
    noise = 2 * torch.randn(8, 24, 32, generator=generator, dtype=torch.float64) / math.sqrt(contexts / 8)
    p = amplitude * basis() + noise
    return p - p.mean(dim=1, keepdim=True)


def basis() -> torch.Tensor:
    generator = torch.Generator().manual_seed(99)
    time = torch.arange(24, dtype=torch.float64)[:, None] / 24
    waves = torch.cos(torch.pi * time * torch.tensor([1.0, 2.0, 9.0], dtype=torch.float64))
    p = waves @ torch.randn(3, 32, generator=generator, dtype=torch.float64)
    return p - p.mean(dim=0)


def energies(p: torch.Tensor) -> dict[str, Jackknifed]:
    low = torch.cos(torch.pi * torch.arange(5)[:, None] * (torch.arange(24) + 0.5) / 24).double() / 12**0.5
    low[0] /= 2**0.5
    corners = corner_energies((low @ p)[None], (low @ p)[None], [5])
    share = combined(torch.div, corners, PairProducts.of(p).energy()).corrected()
    return {"energy": product(p.flatten(1)), "largest": largest_square(p), "share": share}


def truths(amplitude: float) -> dict[str, float]:
    gram = (amplitude * basis() @ (amplitude * basis()).T).numpy()
    frequencies = np.cos(np.pi * np.arange(5)[:, None] * (np.arange(24) + 0.5) / 24) / 12**0.5
    frequencies[0] /= 2**0.5
    corner = frequencies @ gram @ frequencies.T
    return {
        "energy": float(np.trace(gram)),
        "largest": float(np.linalg.eigvalsh(gram)[-1]),
        "share": float((corner**2).sum() / (gram**2).sum()) if amplitude else math.nan,
    }


@pytest.mark.slow
@pytest.mark.parametrize("contexts", [8, 64, 1024])
@pytest.mark.parametrize("amplitude", [0.0, 1.0])
def test_noise_adds_nothing_and_intervals_cover(contexts, amplitude):
    """Oracle: a planted basis. Bias below a tenth of the error, up to the 400 draws' own; Student's intervals cover."""
    draws = [energies(planted(contexts, amplitude, seed)) for seed in range(400)]
    for name, truth in truths(amplitude).items():
        if math.isnan(truth):
            continue
        values = np.array([float(draw[name].value) for draw in draws])
        errors = np.array([float(draw[name].error) for draw in draws])
        chance = 2.5 * values.std() / math.sqrt(len(values))
        assert abs(values.mean() - truth) < 0.1 * errors.mean() + chance, name
        covered = (abs(values - truth) <= 2.365 * errors).mean()
        # Of noise alone the jackknife's errors are too large by a factor of up to √2.
        assert 0.92 <= covered <= (0.98 if amplitude else 1), (name, covered)
