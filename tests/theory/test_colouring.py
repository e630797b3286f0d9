"""Colours by principal components; oracles: numpy's eigenvectors of the covariance, scipy's Procrustes rotation."""

from __future__ import annotations

import numpy as np
import torch
from scipy.linalg import orthogonal_procrustes

from theodolite.theory.grouping import principal_scores, rgb, turned

KEPT = torch.tensor([False] + [True] * 39)


def vectors(seed: int, width: int = 6) -> torch.Tensor:
    scale = torch.tensor([9.0, 5.0, 3.0, 1.0, 0.5, 0.1])[:width]
    return torch.randn(40, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def test_scores_are_principal_components():
    x = vectors(0)
    scores = principal_scores(x, KEPT).numpy()
    inside = x[KEPT].numpy()
    values, directions = np.linalg.eigh(np.cov(inside.T, bias=True))
    expected = (x.numpy() - inside.mean(axis=0)) @ directions[:, ::-1][:, :3] / np.sqrt(values[::-1][:3])
    np.testing.assert_allclose(np.abs(scores), np.abs(expected), atol=1e-10)
    assert (scores[KEPT][np.abs(scores[KEPT]).argmax(axis=0), range(3)] > 0).all()


def test_fewer_components_than_colours():
    scores = principal_scores(vectors(0)[:, :2], KEPT)
    assert (scores[:, 2] == 0).all()
    assert (principal_scores(torch.ones(40, 5), KEPT) == 0).all()


def test_turned_is_the_procrustes_rotation():
    reference, scores = principal_scores(vectors(0), KEPT), principal_scores(vectors(1), KEPT)
    rotation, _ = orthogonal_procrustes(scores[KEPT].numpy(), reference[KEPT].numpy())
    np.testing.assert_allclose(turned(scores, reference, KEPT).numpy(), scores.numpy() @ rotation, atol=1e-12)


def test_colours_span_the_kept_ones_and_cut_the_rest_off():
    scores = torch.zeros(40, 3, dtype=torch.float64)
    scores[:, 0] = torch.linspace(-5, 1, 40)
    scores[0] = 1e6
    colours = rgb(scores, KEPT)
    assert colours[1, 0] == 0
    assert colours[-1, 0] == 255
    assert colours[0].tolist() == [255, 128, 128]  # without spread: the middle
