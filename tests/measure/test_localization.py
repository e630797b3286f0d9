"""From a layer's weights to its columns."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from theodolite.measure.localization import MOMENTS, entropy_bound, layer_spectra, localization_tables
from theodolite.models.head_weights import BEFORE_NORM, EXACT, HeadWeights
from theodolite.theory import qk_eigenvalues, qk_moments, qk_spectral_norm

HEADS, WIDTH, HEAD_WIDTH, SCALING = 3, 12, 4, 0.4


def weights_of(projection: str = EXACT) -> HeadWeights:
    generator = torch.Generator().manual_seed(0)
    w_q, w_k, w_v = torch.randn(3, HEADS, WIDTH, HEAD_WIDTH, generator=generator, dtype=torch.float64)
    bias = torch.zeros(HEADS, HEAD_WIDTH, dtype=torch.float64)
    # Nearly equal on both sides, so that tr W² is positive and ξ is a number.
    return HeadWeights(w_q, w_q + 0.3 * w_k, w_v, bias, bias, bias, SCALING, projection)


@pytest.fixture(scope="module")
def covariance() -> torch.Tensor:
    root = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return root @ root.mT / WIDTH


def test_spectra_are_those_of_the_whole_matrix(covariance):
    """Oracle: `qk_moments` and its like, which have tests of their own against whole matrices."""
    weights = weights_of()
    spectra = layer_spectra(weights, covariance, HEADS, HEAD_WIDTH)
    torch.testing.assert_close(
        spectra["spectral_norm"], qk_spectral_norm(weights.w_q, weights.w_k) * SCALING, rtol=1e-8, atol=0
    )
    for suffix, sigma in (("", None), ("_data", covariance)):
        moments = qk_moments(weights.w_q, weights.w_k, sigma, temperature=1 / SCALING)
        for name in MOMENTS:
            torch.testing.assert_close(spectra[name + suffix], getattr(moments, name), rtol=1e-8, atol=0)
        ours = torch.view_as_complex(spectra["spectrum" + suffix]).numpy()
        expected = qk_eigenvalues(weights.w_q, weights.w_k, sigma).numpy()
        np.testing.assert_allclose(np.sort_complex(ours), np.sort_complex(expected), atol=1e-8)


def test_without_weights_all_is_nan_and_of_the_same_shape(covariance):
    known = layer_spectra(weights_of(), covariance, HEADS, HEAD_WIDTH)
    unknown = layer_spectra(None, covariance, HEADS, HEAD_WIDTH)
    assert {name: tensor.shape for name, tensor in unknown.items()} == {
        name: tensor.shape for name, tensor in known.items()
    }
    assert all(tensor.isnan().all() for tensor in unknown.values())
    assert not any(name.endswith("_data") for name in layer_spectra(None, None, HEADS, HEAD_WIDTH))


def test_what_follows_for_the_logits_is_left_open_where_no_matrix_gives_them():
    layers = [layer_spectra(weights_of(kind), None, HEADS, HEAD_WIDTH) for kind in (EXACT, BEFORE_NORM)]
    assert not layers[0]["spectral_norm"].isnan().any()
    assert layers[1]["spectral_norm"].isnan().all()
    state = {name: torch.stack([layer[name] for layer in layers]) for name in layers[0]}
    columns, arrays = localization_tables(state, [True, False], [SCALING] * 2, 16)
    assert columns["trace"][:HEADS] == columns["trace"][HEADS:]
    assert columns["regime"][HEADS:] == ["undefined"] * HEADS
    assert "undefined" not in columns["regime"][:HEADS]
    assert np.isnan(columns["regime_margin"]).tolist() == [False] * HEADS + [True] * HEADS
    predicted = arrays["propagation_predicted"]
    assert predicted.shape == (2, HEADS, 16)
    assert predicted[1].isnan().all()
    assert ((predicted[0] >= 0) & (predicted[0] <= 1)).all()
    assert set(localization_tables(state, [True, False], [SCALING] * 2, None)[1]) == {"spectrum"}


def test_the_entropy_bound_is_the_mean_of_those_of_its_queries():
    """Zhai et al. 2023, theorem 3.1, written out; attained by one logit against all others."""
    norm, keys = torch.tensor([0.0, 0.5, math.nan], dtype=torch.float64), torch.arange(1.0, 9.0)
    bound = entropy_bound(2.0, norm, keys, torch.full((8,), 3.0, dtype=torch.float64))
    assert float(bound[0]) == pytest.approx(float(keys.log().mean()))
    nu, expected = 1.0, [0.0]
    for t in range(2, 9):
        beta = math.exp(-nu * math.sqrt(t / (t - 1)))
        spread = nu * math.sqrt(t * (t - 1)) * beta
        expected.append(math.log(1 + (t - 1) * beta) + spread / (1 + (t - 1) * beta))
    assert float(bound[1]) == pytest.approx(np.mean(expected))
    assert bound[2].isnan()
