"""Oracles: the numbers that the figure was given, read back from what Plotly got."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from theodolite.report import style
from theodolite.report.page import figure_json
from theodolite_papers import drawing
from theodolite_papers.catch_tag_release.few_shot import accuracy_by_shots


def test_lines_and_intervals_carry_the_values():
    """Oracle: numpy."""
    random = np.random.default_rng(0)
    right = {name: (random.random((50, 17)) < 0.5).astype(float) for name in ("dense", "oats", "wanda & co")}
    lines = accuracy_by_shots(right).data
    assert [line.name for line in lines] == ["dense", "oats", "wanda &amp; co"]
    assert [line.line.color for line in lines] == style.CATEGORIES[:3]
    for line, of in zip(lines, right.values(), strict=True):
        shown = of[:, [0, 1, 2, 4, 8, 16]]
        np.testing.assert_allclose(line.y, shown.mean(axis=0), rtol=1e-6)
        np.testing.assert_allclose(line.error_y.array, 1.96 * shown.std(axis=0, ddof=1) / 50**0.5, rtol=1e-5)
        assert np.array_equal(np.round(line.x), range(6))
    assert len({float(line.x[0]) for line in lines}) == 3  # beside one another


X = np.linspace(0, 1, 5)
ROWS = np.arange(10, dtype=np.float64).reshape(2, 5) / 10


@pytest.mark.parametrize("square", [False, True])
def test_maps_stand_side_by_side_on_their_own_axes(square):
    pictures = {"first": ROWS, "second": ROWS + 1, "difference": -ROWS}
    figure = drawing.maps(
        pictures, (X, X[:2]), ("x", "y", "z"), (0.0, 2.0), signed=("difference",), square=square
    )
    assert [trace.xaxis for trace in figure.data] == ["x", "x2", "x3"]
    domains = [figure.layout[f"xaxis{own}"].domain for own in ("", "2", "3")]
    assert domains[0][0] == 0
    assert domains[-1][1] == pytest.approx(1)
    assert all(left[1] < right[0] for left, right in pairwise(domains))
    assert (figure.data[0].zmin, figure.data[0].zmax) == (0.0, 2.0)
    assert (figure.data[2].zmin, figure.data[2].zmax) == pytest.approx((-0.9, 0.9))
    amounts, none, signed = (trace.colorbar if trace.showscale else None for trace in figure.data)
    assert none is None
    assert (amounts.title.text, signed.title.text) == ("z", "difference")
    assert signed.y + signed.len < amounts.y - amounts.len  # one below the other
    assert [note.text for note in figure.layout.annotations] == list(pictures)
    np.testing.assert_allclose(figure.data[1].z, ROWS + 1, rtol=1e-6)
    assert (figure.layout.yaxis.autorange == "reversed") == square


def test_bars_keep_their_intervals():
    heights = np.array([0.2, np.nan])
    bars = drawing.grouped_bars(
        ("a", "b"), {"source": (heights, np.array([[0.1, np.nan], [0.4, np.nan]]))}, "y", (-1, 1)
    )
    assert bars.data[0].error_y.array[0] == pytest.approx(0.2)
    assert bars.data[0].error_y.arrayminus[0] == pytest.approx(0.1)
    figure_json(bars, {})


def test_tiles_are_centred_heads_beside_each_other():
    """Oracle: numpy; a row's constant is gone, the largest magnitude of each head is 1, between tiles is nothing."""
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(7, 5, 5)) * np.arange(1, 8)[:, None, None]
    picture = drawing.positional_tiles(logits)
    np.testing.assert_allclose(drawing.positional_tiles(logits + np.arange(5)[:, None]), picture, atol=1e-12)
    assert np.isfinite(picture).sum() == 7 * 25
    top = drawing.TILE_HEADROOM
    tile = picture[top : top + 5, :5]
    centred = logits[0] - logits[0].mean(1, keepdims=True)
    inside = np.abs(tile) < 1
    scale = np.percentile(np.abs(centred), 99.5)
    np.testing.assert_allclose(tile[inside], (centred / scale)[inside])
    assert np.nanmax(np.abs(picture)) == 1
