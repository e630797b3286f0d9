"""The numbers of docs/errata.md that decide between a printed formula and the one used here.

Each test evaluates both forms and an oracle that belongs to neither side: simulated walks, autograd, moments
from scipy, or an inequality that must hold.
"""

from __future__ import annotations

import cmath
import math

import pytest
import scipy.fft
import scipy.stats
import torch
from torch import Tensor

from theodolite.theory import (
    entropy_lower_bound,
    low_frequency_ratio,
    piecewise_softmax,
    propagation,
    propagation_finite,
    qk_moments,
    sinusoidal,
)
from theodolite.theory.propagation import walk_moments
from theodolite_papers.hidden_geometry.theorems import smoothness_bound

DOUBLE = torch.float64


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=DOUBLE)


def walk_value(matrix: Tensor, position: int, length: int, draws: int) -> Tensor:
    """s_i at one position (from 1) over walks with Σ = I and λ = 1, (draws,)."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(draws, length, len(matrix), generator=generator, dtype=DOUBLE).cumsum(1)
    key = (tokens[:, position - 1] - tokens.mean(1)) / length
    return (key @ matrix.mT * tokens[:, -1]).sum(-1) + 1 / length


def variance_and_error(values: Tensor) -> tuple[float, float]:
    variance = values.var()
    fourth = (values - values.mean()).pow(4).mean()
    return variance.item(), ((fourth - variance**2) / len(values)).sqrt().item()


def test_lemma_1_variance_at_the_middle() -> None:
    """T = 200, d = 64, θ = ½, in units of tr(W²)/λ²: 1/12 and not 13/12; ours at finite T. Oracle: simulated walks."""
    root = torch.randn(64, 64, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    matrix = root + root.mT
    matrix = matrix / matrix.norm()
    measured, error = variance_and_error(walk_value(matrix, 100, 200, draws=1500))
    cross, variance_product = walk_moments(torch.tensor([100.0], dtype=DOUBLE), 200)
    assert abs(measured - float(variance_product + cross**2)) < 4 * error
    assert abs(measured - 1 / 12) < 4 * error
    assert abs(measured - 13 / 12) > 100 * error


def test_lemma_4_moments_of_a_token() -> None:
    """Oracle: the covariance L Lᵀ of partial sums from x_1 ~ N(0, 1) on, and from the prints' x_1 = 0."""
    length = 8
    partial_sums = torch.ones(length, length, dtype=DOUBLE).tril()
    token_weights = torch.eye(length, dtype=DOUBLE) / length - 1 / length**2  # row i: γ_i = e_i/T − 1/T²
    cross, variance_product = walk_moments(torch.arange(1, length + 1, dtype=DOUBLE), length)
    for start, ours in ((1.0, True), (0.0, False)):
        steps = partial_sums.clone()
        steps[:, 0] *= start
        covariance = steps @ steps.mT
        with_tokens = token_weights @ covariance
        # The weights sum to 0: where the walk starts is lost.
        torch.testing.assert_close(with_tokens[:, -1], cross)
        variances = (with_tokens * token_weights).sum(-1) * covariance[-1, -1]
        assert torch.allclose(variances, variance_product) is ours


def test_lemma_2_uniformity_needs_small_eta_too() -> None:
    """ξ = 0, η = 2: ρ(½) = 0.458 and ρ(1) = 0.244, in walks 0.46 and 0.25: not flat; η = 0.1 is flat at ½."""
    curve = propagation(torch.tensor([0.5, 1.0]), number(0.0), number(2.0))
    assert curve.tolist() == pytest.approx([0.4584, 0.2437], abs=1e-4)
    values = torch.diag(torch.tensor([1.0, -1.0], dtype=DOUBLE).repeat(32)) / 8 * 2
    for position, expected in ((100, curve[0]), (200, curve[1])):
        s = walk_value(values, position, 200, draws=1500)
        assert ((s >= 0) & (s <= 1)).double().mean().item() == pytest.approx(expected.item(), abs=0.05)
    printed = propagation(torch.tensor([0.0, 1.0]), number(0.0), number(2.0), variant="published")
    assert printed.tolist() == pytest.approx([0.2437, 0.1221], abs=1e-4)
    flat = propagation(torch.linspace(0, 1, 11), number(0.0), number(0.1))
    torch.testing.assert_close(flat, torch.full((11,), 0.5, dtype=DOUBLE))


def test_lemma_2_derivative_has_another_numerator() -> None:
    """d/dθ of (θ−½)/√(2v) with the printed v at θ = 0, by autograd: 7/6 over (7/6)^1.5, not 5/3."""
    theta = number(0.0).requires_grad_()
    (slope,) = torch.autograd.grad((theta - 0.5) / (2 * (2 * theta**2 + 7 / 12)).sqrt(), theta)
    assert slope.item() == pytest.approx((7 / 6) ** -0.5)
    assert slope.item() != pytest.approx(5 / 3 / (7 / 6) ** 1.5, rel=0.1)


def test_lemma_2_limits_are_one_half_at_the_ends() -> None:
    """Both forms of v at ξ = 10⁶, where an indicator would be 1."""
    for variant in ("corrected", "published"):
        for eta in (1e-9, 2e-6, 4e-6):
            assert propagation(number(0.5)[None], number(1e6), number(eta), variant).item() == pytest.approx(
                0.5
            )
        assert propagation(number(1.0)[None], number(1e6), number(2e-6), variant).item() == pytest.approx(0.5)
        assert propagation(number(0.75)[None], number(1e6), number(4e-6), variant).item() == pytest.approx(
            0.5
        )


def test_small_trace_over_temperature_is_not_uniform() -> None:
    """ξη = 0.1 with ξ = 20, by both forms of v; walks with these moments agree at both ends."""
    for variant in ("corrected", "published"):
        early, late = propagation(torch.tensor([0.1, 0.9]), number(20.0), number(0.005), variant).tolist()
        assert early < 1e-20
        assert late > 0.999
    values = torch.full((400,), 0.005 / 20, dtype=DOUBLE)  # tr W = 0.1, tr W² = 0.005²
    for position, expected in ((10, 0.0), (90, 1.0)):
        # 1/T, which the limit drops, would outweigh so small an s.
        s = walk_value(torch.diag(values), position, 100, draws=200) - 1 / 100
        assert ((s >= 0) & (s <= 1)).double().mean().item() == expected


def test_section_2_the_clamped_line_is_neither_the_closest_nor_close_for_many_inputs() -> None:
    """T = 2: error 1/(1 + e²) = 0.119 at δ = 2, and 0.056 for the closest line; T = 40: 0.77."""
    difference = torch.linspace(-40, 40, 80_001, dtype=DOUBLE)
    pair = torch.stack([difference, torch.zeros_like(difference)], -1)
    softmax = pair.softmax(-1)
    assert (softmax - piecewise_softmax(pair)).abs().max().item() == pytest.approx(0.1192, abs=1e-4)
    errors = [
        (softmax[:, 0] - (0.5 + slope * difference).clamp(0, 1)).abs().max().item()
        for slope in torch.linspace(0.1, 0.25, 151).tolist()
    ]
    assert min(errors) == pytest.approx(0.056, abs=1e-3)
    raised = torch.zeros(1801, 40, dtype=DOUBLE)
    raised[:, 0] = torch.linspace(-10, 80, 1801)
    gap = (raised.softmax(-1) - piecewise_softmax(raised)).abs().max().item()
    assert gap == pytest.approx(0.77, abs=0.005)


def test_below_fig_2_the_middle_site_is_not_at_one_half() -> None:
    """|ξ| = 5, η = ½: the centre is 0.70 or 0.30, as ½ + 1/(2ξη); ξ = 10: 0.60."""
    theta = torch.linspace(0, 1, 401, dtype=DOUBLE)
    for xi in (5.0, -5.0, 10.0):
        curve = propagation(theta, number(xi), number(0.5))
        centre = ((curve * theta).mean() / curve.mean()).item()
        assert centre == pytest.approx(0.5 + 1 / xi, abs=0.005)


def test_remark_2_drops_a_mean_of_the_same_order() -> None:
    """T = 200, i = 100, tr W = 1: E ω_i/T = ½ and E⟨γ^i, ω⟩ = −1/400, in simulated walks."""
    width, length, position, draws = 64, 200, 100, 1500
    matrix = torch.eye(width, dtype=DOUBLE) / width
    full = walk_value(matrix, position, length, draws) - 1 / length
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(draws, length, width, generator=generator, dtype=DOUBLE).cumsum(1)
    selected = (tokens[:, position - 1] @ matrix.mT * tokens[:, -1]).sum(-1) / length
    for values, expected in ((full, -1 / 400), (selected, 0.5)):
        assert abs(values.mean().item() - expected) < 4 * values.std().item() / math.sqrt(draws)


def test_eq_3_needs_the_middle_factor() -> None:
    """Oracle: autograd through the model of section 3 with S̃, columns as tokens, one draw."""
    generator = torch.Generator().manual_seed(3)
    tokens, w_v, w_f = (torch.randn(3, n, generator=generator, dtype=DOUBLE) for n in (4, 3, 3))
    w_qk = (4.0 * torch.randn(3, 3, generator=generator, dtype=DOUBLE)).requires_grad_()
    target, temperature, last = torch.randn(3, generator=generator, dtype=DOUBLE), 1.7, tokens[:, -1]
    logits = tokens.mT @ w_qk @ last / temperature
    s = (logits - logits.mean() + 1) / 4
    out = w_f @ (w_v @ tokens @ s.clamp(0, 1) + last)
    (gradient,) = torch.autograd.grad(0.5 * (target - out).square().sum(), w_qk)

    inside = ((s >= 0) & (s <= 1)).double().detach()
    assert 0 < inside.sum() < 4  # both cases of the clamp occur
    gamma = (torch.eye(4, dtype=DOUBLE) / 4 - 1 / 16) * inside  # column i is γ̃^i
    offset = inside / 4 + (s > 1).double()
    middle = tokens.mT @ w_v.mT @ w_f.mT @ w_f @ w_v @ tokens
    q = tokens.mT @ w_v.mT @ w_f.mT @ (w_f @ last - target)

    def formula(factor: Tensor) -> Tensor:
        slope = factor @ (gamma.mT @ tokens.mT @ w_qk.detach() @ last / temperature + offset)
        return torch.outer(tokens @ gamma @ (slope + q), last) / temperature

    torch.testing.assert_close(formula(middle), gradient)
    assert (formula(torch.eye(4, dtype=DOUBLE)) - gradient).norm() > 0.2 * gradient.norm()


def test_appendix_b_orders() -> None:
    """Four factors under one expectation (scipy's moments), and the growth of the sums by Isserlis, d = 1."""
    normal = scipy.stats.norm()
    assert normal.moment(4) ** 2 == pytest.approx(9 * normal.moment(2) ** 4)

    def total(length: int) -> float:
        index = torch.arange(1, length + 1, dtype=DOUBLE)
        earlier = torch.minimum(index[:, None], index)
        return (2 * earlier**2 + index[:, None] * index).sum().item()

    assert math.log2(total(800) / total(400)) == pytest.approx(4, abs=0.01)
    selectors = torch.eye(50, dtype=DOUBLE) / 50 - 1 / 2500
    assert selectors.square().sum().item() == pytest.approx(1 / 50, rel=0.05)


def test_fig_2_eta_has_the_first_power_of_the_temperature() -> None:
    """λ = 8, tr W = 12, tr W² = 16: at finite T, ρ_T agrees with η = √tr W²/λ and not with √tr W²/λ²."""
    finite = propagation_finite(number(12.0), number(16.0), number(16.0), 4096, 8.0)[-1]
    end = torch.ones(1)
    assert propagation(end, number(3.0), number(4 / 8)).item() == pytest.approx(finite.item(), abs=1e-3)
    assert propagation(end, number(3.0), number(4 / 64)).item() - finite.item() > 0.2


def test_eq_9_as_printed_exceeds_the_logarithm_of_the_length() -> None:
    """T = 64, ν = 4: 16.7 > ln 64 = 4.16; with exp(−ν) it is below, next to the exact bound."""
    printed = entropy_lower_bound(4.0, 64, variant="published").item()
    assert printed == pytest.approx(16.73, abs=0.01)
    assert math.log(64) == pytest.approx(4.16, abs=0.01)
    right = math.log(1 + 64 * math.exp(-4)) + 4 * math.exp(-4) / (1 / 64 + math.exp(-4))
    exact = entropy_lower_bound(4.0, 64).item()
    assert right == pytest.approx(2.93, abs=0.01)
    assert exact == pytest.approx(2.88, abs=0.01)
    assert max(right, exact) < math.log(64)


@pytest.mark.parametrize(
    ("query", "key", "right", "printed"), [(2.0, 3.0, 30.0, 90.0), (-1.0, 1.0, -4.0, 2.0)]
)
def test_locater_gradient(query: float, key: float, right: float, printed: float) -> None:
    """One query and one key weight: ∂(qk − 1)²/∂q by autograd, against both formulas."""
    q, k = torch.tensor(query, dtype=DOUBLE, requires_grad=True), number(key)
    ((q * k - 1) ** 2).backward()
    trace = query * key
    assert q.grad is not None
    assert q.grad.item() == pytest.approx(2 * (trace - 1) * key) == pytest.approx(right)
    assert (trace - 1) * trace * key == pytest.approx(printed)


def test_symmetrising_an_asymmetric_head_changes_what_is_measured() -> None:
    """A 90° rotation has no symmetric part, so the symmetrised s_i is constant; the walks' variance is not 0.

    T = 200, θ = ½: exact 1/6 (form_squared 2 times 1/12), symmetrised 0.
    """
    rotation = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=DOUBLE)
    moments = qk_moments(rotation, torch.eye(2), temperature=1.0)
    assert (moments.form_squared, moments.trace_of_square, moments.eta_symmetric) == (2, -2, 0)
    measured, error = variance_and_error(walk_value(rotation, 100, 200, draws=4000))
    assert abs(measured - 1 / 6) < 4 * error
    assert measured > 20 * error


def test_theorem_1_basis_of_low_frequencies() -> None:
    """T = 64, k = 1, G = 11ᵀ: the bound is 0. No B brings the printed basis closer than 0.18."""
    t = torch.arange(64, dtype=DOUBLE)
    ones = torch.ones(64, dtype=DOUBLE)

    def missed(basis: Tensor) -> float:
        """‖(I − Π) 11ᵀ (I − Π)‖/T, which bounds ‖11ᵀ − fB(fB)ᵀ‖/T from below for every B."""
        rest = ones - basis * (basis @ ones) / (basis @ basis)
        return (rest @ rest).item() / 64

    assert missed(torch.cos((1 - 0.5) * t * math.pi / 64)) == pytest.approx(0.18, abs=0.01)
    assert missed(torch.cos((1 - 1) * (t + 0.5) * math.pi / 64)) == pytest.approx(0, abs=1e-12)


def test_theorem_1_lemma_2_constant() -> None:
    """N = 64: |γ_2| = 0.159 from its definition (17), above the printed 1/8 and below 1/4."""
    gamma = 1 / abs(64 * (1 - cmath.exp(-2j * math.pi / 64)))
    assert gamma == pytest.approx(0.159, abs=5e-4)
    assert 1 / 8 < gamma < 1 / 4


def test_theorem_1_needs_the_mean_removed() -> None:
    """T = 64, k = 5, m = 1, p = 1000 + f_6: error 1000/√2 (two waves, closed form), bound 37."""
    wave = torch.cos(5 * math.pi * (torch.arange(64, dtype=DOUBLE) + 0.5) / 64)
    p = 1000 + wave
    got = smoothness_bound(p[:, None] * p, [5], 1)
    # In the orthonormal basis of 1 and f_6 the error is ((0, x), (x, y)), x = 1000/√2, y = ½.
    expected = torch.linalg.eigvalsh(torch.tensor([[0, 1000 / 2**0.5], [1000 / 2**0.5, 0.5]], dtype=DOUBLE))
    assert got.attained.item() == pytest.approx(expected.abs().max().item()) == pytest.approx(707, abs=1)
    assert got.bound.item() == pytest.approx(37, abs=0.5)


def test_theorem_1_fails_at_high_order() -> None:
    """T = 200, k = 199, m = 20. A difference multiplies the amplitude of wave j by d_j (checked on the
    reflected waves), so ‖H‖_max ≤ (1 + 1)² for p = d_1^−m f_2 + d_k^−m f_{k+1}; the error is a 2×2 matrix's.
    """
    size, k, m = 200, 199, 20
    t = torch.arange(2 * size, dtype=DOUBLE)
    slope = {}
    for j in (1, k):
        wave = torch.cos(math.pi * j * (t + 0.5) / size)
        step = size * (wave - wave.roll(1))
        slope[j] = 2 * size * math.sin(math.pi * j / 2 / size)
        torch.testing.assert_close(step, -slope[j] * torch.sin(math.pi * j * t / size), atol=1e-9, rtol=0)
    bound = 6 / (8 * k) ** m * 4
    # Rows and columns f_2 and f_{k+1} of norm √(T/2), in units of d_1^−m d_k^−m.
    error = torch.tensor([[0.0, 1.0], [1.0, (slope[1] / slope[k]) ** m]], dtype=DOUBLE) / 2
    attained = torch.linalg.eigvalsh(error).abs().max().item() / (slope[1] * slope[k]) ** m
    assert attained / bound == pytest.approx(2.4, abs=0.05)


def test_table_3_a_centred_basis_has_no_share_at_the_constant() -> None:
    """T = 64: r_1 = 0 for PPᵀ and PWPᵀ of centred P, from scipy's transform; 4/9 of 1 + cos, by hand."""

    def shares(matrix: Tensor) -> tuple[float, float]:
        energy = scipy.fft.dctn(matrix.numpy(), norm="ortho") ** 2
        return energy[0, 0] / energy.sum(), energy[:2, :2].sum() / energy.sum()

    wave = torch.cos(math.pi * (torch.arange(64, dtype=DOUBLE) + 0.5) / 64)[:, None]
    assert shares(wave @ wave.mT) == pytest.approx((0, 1), abs=1e-12)
    assert shares((1 + wave) @ (1 + wave).mT)[0] == pytest.approx(4 / 9)
    generator = torch.Generator().manual_seed(0)
    drawn, w = (torch.randn(*size, generator=generator, dtype=DOUBLE) for size in ((64, 8), (8, 8)))
    centred = drawn - drawn.mean(0)
    for matrix in (centred @ centred.mT, centred @ w @ centred.mT):
        assert shares(matrix)[0] == pytest.approx(0, abs=1e-12)
        assert low_frequency_ratio(matrix, [1]).item() == pytest.approx(0, abs=1e-12)
    assert low_frequency_ratio((1 + wave) @ (1 + wave).mT, [1]).item() == pytest.approx(4 / 9)


def test_eq_11_has_query_and_key_exchanged() -> None:
    """Eq. (1) as a softmax over the row of XWXᵀ: ½ and ½; with K_W(x_k, x_t) 0.73 and 0.27."""
    w, x = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.eye(2)
    assert (x @ w @ x.mT)[1].softmax(-1).tolist() == [0.5, 0.5]
    assert (x @ w @ x.mT)[:, 1].softmax(-1).tolist() == pytest.approx([0.73, 0.27], abs=0.005)


def test_appendix_b_1_exponent() -> None:
    """d = 4, t = 1: the printed entries have squared norm 2.71, Vaswani's d/2 at every position."""
    printed = [(math.sin, math.cos)[i % 2](1 / 10000 ** (2 * i / 4)) for i in range(4)]
    assert sum(x * x for x in printed) == pytest.approx(2.71, abs=0.005)
    torch.testing.assert_close(sinusoidal(9, 4).square().sum(-1), torch.full((9,), 2.0, dtype=DOUBLE))
