"""Oracles: the numbers that the figure was given, read back from what Plotly got."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from theodolite.evaluate.scores import over_seeds
from theodolite.report import style
from theodolite.report.payload import figure_json
from theodolite_papers.catch_tag_release.few_shot import accuracy_by_shots

MODELS = ["dense", "oats", "wanda & co"]


@pytest.fixture
def each() -> pd.DataFrame:
    random = np.random.default_rng(0)
    rows = [
        {
            "model": model,
            "seed": seed,
            "shots": shots,
            "accuracy": random.uniform(0.3, 0.9),
            "accuracy_se": 0.01,
        }
        for model in MODELS
        for seed in range(3)
        for shots in range(6)
    ]
    return pd.DataFrame(rows)


def test_lines_intervals_and_marks_carry_the_values(each):
    middle = over_seeds(each)
    figure = accuracy_by_shots(middle, each, chance=1 / 3, best=[0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
    lines = [trace for trace in figure.data if trace.mode == "lines+markers"]
    assert [line.name for line in lines] == ["dense", "oats", "wanda &amp; co"]
    assert [line.line.color for line in lines] == style.CATEGORIES[:3]
    for model, line in zip(MODELS, lines, strict=True):
        own = middle[middle["model"] == model]
        np.testing.assert_allclose(line.y, own["accuracy"], rtol=1e-6)
        np.testing.assert_allclose(line.y + line.error_y.array, own["high"], rtol=1e-5)
        np.testing.assert_allclose(line.y - line.error_y.arrayminus, own["low"], rtol=1e-5)
        assert np.array_equal(np.round(line.x), range(6))
    assert len({float(line.x[0]) for line in lines}) == 3  # beside one another
    marks = [trace for trace in figure.data if trace.mode == "markers"]
    for model, trace in zip(MODELS, marks, strict=True):
        np.testing.assert_allclose(trace.y, each[each["model"] == model]["accuracy"], rtol=1e-6)
        assert not trace.showlegend
    best, chance = figure.data[-2:]
    np.testing.assert_allclose(best.y, [0.4, 0.5, 0.6, 0.7, 0.8, 0.9], rtol=1e-6)
    np.testing.assert_allclose(chance.y, 1 / 3, rtol=1e-6)


def test_models_of_anybody_are_harmless(each):
    """Oracle: the strings that Plotly reads as markup; and the page can write the figure."""
    each["model"] = each["model"].replace("dense", "<img src=x>\u202e")
    figure = accuracy_by_shots(over_seeds(each), each)
    for trace in figure.data[:2]:
        for text in (trace.name or "", trace.legendgroup, trace.hovertemplate):
            assert "<img" not in text
            assert "\u202e" not in text
    assert json.loads(figure_json(figure, {}))["data"][1]["name"] == "&lt;img src=x&gt;⟨U+202E⟩"
