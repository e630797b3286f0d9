"""Baselines of the geometry columns, against random directions."""

from __future__ import annotations

import numpy as np
import pytest

from theodolite.measure.geometry import random_cosine, random_maximum


@pytest.mark.parametrize(("width", "positions", "contexts"), [(2, 1, 5), (16, 30, 20), (64, 60, 40)])
def test_random_baselines_are_those_of_random_directions(width, positions, contexts):
    """Oracle: Monte Carlo over two sets of directions, which share vectors, as the measured ones do."""
    random = np.random.default_rng(0)
    maxima, means = [], []
    for _ in range(300):
        a, b = random.normal(size=(positions, width)), random.normal(size=(contexts, width))
        cosine = np.abs(
            (a / np.linalg.norm(a, axis=1, keepdims=True)) @ (b / np.linalg.norm(b, axis=1)[:, None]).T
        )
        maxima.append(cosine.max())
        means.append(cosine.mean())
    assert abs(np.mean(means) - random_cosine(width)) < 4 * np.std(means) / np.sqrt(300)
    error = 4 * np.std(maxima) / np.sqrt(300)
    assert abs(np.mean(maxima) - random_maximum(width, positions * contexts)) < error + 0.01 * np.mean(maxima)


def test_random_maximum_in_closed_form():
    """Oracle: one pair is the mean |cos|; in three dimensions |cos| is uniform, so n pairs give n/(n + 1)."""
    assert random_maximum(50, 1) == pytest.approx(random_cosine(50), rel=1e-6)
    assert random_maximum(3, 9) == pytest.approx(0.9, rel=1e-6)
    assert random_maximum(1, 4) == 1
    assert np.isnan(random_maximum(8, 0))
