"""Oracles: random walks over layers, which have no trend; and a trend laid down."""

from __future__ import annotations

import numpy as np

from theodolite.judging import HOLDS, UNTESTABLE
from theodolite.report.outcome import Outcome
from theodolite_papers.hidden_geometry.separation import _deepens


def _answer(gap):
    outcome = Outcome()
    _deepens(outcome, np.asarray(gap, dtype=np.float64))
    return outcome.verdicts[0].answer


def test_a_random_walk_over_layers_deepens_by_chance_alone():
    """Oracle: 2000 random walks over 7 layers; at one in twenty by chance, 100 hold, with an sd of 10."""
    walks = np.random.default_rng(0).normal(size=(2000, 7)).cumsum(axis=1)
    assert sum(_answer(walk) == HOLDS for walk in walks) <= 100


def test_a_clear_trend_deepens():
    assert _answer([0.1, 0.19, 0.31, 0.4, 0.52, 0.6, 0.71]) == HOLDS


def test_few_layers_show_no_trend():
    assert _answer([0.1, 0.2, 0.3, 0.4]) == UNTESTABLE
