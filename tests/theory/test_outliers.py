"""Oracles: numpy written out, scipy's laws, Monte Carlo with its standard error, values planted by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from theodolite.theory import outliers
from theodolite.theory.outliers import (
    LayerBaseline,
    Thresholds,
    dimension_limit,
    gaussian_spread,
    log_magnitude,
    outlier_dimensions,
    outlier_features,
    robust_z,
    token_limit,
    typical_magnitude,
)

LEVEL = 0.01


def drawn(law: str, tokens: int, width: int, seed: int) -> Tensor:
    """Independent values of a law, in dimensions whose sizes differ as those of a healthy layer do."""
    generator = np.random.default_rng(seed)
    values = {
        "normal": lambda: generator.normal(size=(tokens, width)),
        "laplace": lambda: generator.laplace(size=(tokens, width)),
        "student 3": lambda: generator.standard_t(3, size=(tokens, width)),
    }[law]()
    return torch.from_numpy(values * np.exp(0.3 * generator.normal(size=width)))


def found(layer: Tensor, learnt_from: int) -> tuple[Tensor, Tensor]:
    """Outlier dimensions, and massive places, of one layer (tokens, width)."""
    _, dimensions = outlier_dimensions(typical_magnitude(log_magnitude(layer).mean(0)), LEVEL)
    bounds = LayerBaseline.of(layer[:learnt_from, None]).bounds(len(layer), LEVEL)
    return dimensions, layer.abs() > bounds[0]


def test_outlier_features_need_enough_tokens_and_enough_layers():
    share = torch.tensor([[0.06, 0.9, 0.0, 0.05]] + [[0.0, 0.0, 0.0, 0.05]] * 4).double()
    share[1, 1] = 0.06
    expected = torch.zeros(5, 4, dtype=torch.bool)
    expected[:2, 1] = True  # dimension 1 in 2 of 5 layers, dimension 0 in 1 of 5
    assert torch.equal(outlier_features(share, Thresholds()), expected)


def test_constants_are_those_of_their_laws():
    """Oracle: scipy's normal and Gumbel laws."""
    gumbel = stats.gumbel_r
    assert pytest.approx(1 / stats.norm.ppf(0.75), rel=1e-4) == outliers.MAD_TO_SD
    assert pytest.approx(2 * stats.norm.ppf(0.75), rel=1e-3) == outliers.IQR_TO_SD
    assert pytest.approx(gumbel.median(), rel=1e-4) == outliers.GUMBEL_MEDIAN
    middle, half = outliers.GUMBEL_MEDIAN, outliers.GUMBEL_MAD
    assert gumbel.cdf(middle + half) - gumbel.cdf(middle - half) == pytest.approx(0.5, abs=1e-5)
    survival = (gumbel.isf(LEVEL / 1e6) - gumbel.median()) / (outliers.MAD_TO_SD * half)
    assert token_limit(10**6, LEVEL) == pytest.approx(survival, rel=1e-4)


@pytest.mark.parametrize("width", [8, 64])
def test_the_spread_of_a_gaussian_layers_largest_values(width):
    """Oracle: quartiles of 4000 simulated maxima, whose own error is about 3 %."""
    largest = np.log(np.abs(np.random.default_rng(1).normal(size=(4000, width))).max(1))
    low, high = np.quantile(largest, [0.25, 0.75])
    assert gaussian_spread(width) == pytest.approx((high - low) / 1.349, rel=0.09)


@pytest.mark.parametrize("width", [12, 128])
def test_the_limit_on_dimensions_is_exceeded_as_often_as_it_says(width):
    """Oracle: Monte Carlo of normal log sizes. The largest robust z is above the limit in 1 % of layers, within three
    standard errors; without the correction for the MAD's noise it would be 19 % at width 12 and 8 % at 32."""
    layers = 8000
    logs = torch.from_numpy(np.random.default_rng(width).normal(size=(layers, width)))
    rate = float((robust_z(logs).amax(-1) > dimension_limit(width, LEVEL)).double().mean())
    assert rate == pytest.approx(LEVEL, abs=3 * math.sqrt(LEVEL * (1 - LEVEL) / layers))
    # Sizes that differ by a factor e at one deviation.
    _, flagged = outlier_dimensions((0.5 * logs).exp(), LEVEL)
    assert float(flagged.any(-1).double().mean()) <= rate


@pytest.mark.parametrize(("law", "width"), [("normal", 96), ("laplace", 16), ("student 3", 32)])
def test_healthy_layers_give_few_false_alarms(law, width):
    """Oracle: Monte Carlo: in 60 layers at most as many alarms of either kind as a rate of 1 % gives with probability
    0.999, heavy tails or not."""
    layers = 60
    alarms = np.zeros(2)
    for seed in range(layers):
        alarms += [bool(kind.any()) for kind in found(drawn(law, 300, width, seed), 200)]
    assert (alarms <= stats.binom.ppf(0.999, layers, LEVEL)).all()


def test_the_typical_magnitude_is_the_geometric_mean():
    """Oracle: scipy's, and the closed form for normal numbers, here with a standard error of 0.2 %."""
    layer = drawn("normal", 300_000, 1, 0)
    assert typical_magnitude(log_magnitude(layer).mean(0)) == pytest.approx(stats.gmean(layer.abs().numpy()))
    consistency = stats.gmean(layer.abs().numpy()) / layer.square().mean(0).sqrt().numpy()
    assert consistency == pytest.approx(outliers.GAUSSIAN_CONSISTENCY, rel=0.008)
    dead = torch.zeros(9, 2, dtype=torch.bfloat16)
    assert typical_magnitude(log_magnitude(dead).double().mean(0)).tolist() == [0, 0]


def test_a_massive_activation_makes_no_outlier_dimension_though_it_makes_the_rms():
    layer = drawn("normal", 1000, 64, 3)
    layer[17, 9] = 2000.0
    _, by_typical = outlier_dimensions(typical_magnitude(log_magnitude(layer).mean(0)), LEVEL)
    _, by_rms = outlier_dimensions(layer.square().mean(0).sqrt(), LEVEL)
    assert not by_typical.any()
    assert by_rms.nonzero().tolist() == [[9]]


def test_an_outlier_dimension_hides_no_massive_activation_elsewhere():
    """300 in an ordinary dimension is massive beside 1, though another dimension has 200 in every token."""
    layer = drawn("normal", 600, 64, 5)
    layer[:, 5] = 200.0
    layer[3, 8] = 300.0
    _, massive = found(layer, 400)
    assert massive.nonzero().tolist() == [[3, 8]]


def test_layers_without_variety_have_no_outliers():
    """All dimensions alike, most of them dead, or all tokens the same: no division by zero, nothing found."""
    tokens = torch.ones(50, 8, dtype=torch.float64)
    dead = torch.zeros(50, 8, dtype=torch.float64)
    dead[:, 0] = 1.0
    for layer in (tokens, dead, torch.zeros_like(dead)):
        dimensions, massive = found(layer, 50)
        assert not dimensions.any()
        assert not massive.any()


@given(seed=st.integers(0, 1000), power=st.integers(-20, 20), heads=st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_the_rules_from_data_know_no_unit(seed, power, heads):
    """Property: a power of two changes no bit of what is found, and moves the bounds by itself."""
    layer = torch.from_numpy(np.random.default_rng(seed).standard_t(2, size=(40, heads, 12)))
    scaled = layer * 2.0**power
    for one, other in zip(*(outlier_dimensions(x.abs().mean(0), 0.2) for x in (layer, scaled)), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-9, atol=1e-9, equal_nan=True)
    own, theirs = (LayerBaseline.of(x).bounds(40, LEVEL) for x in (layer, scaled))
    torch.testing.assert_close(own * 2.0**power, theirs, rtol=1e-9, atol=0)
