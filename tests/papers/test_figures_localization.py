"""Oracles: the arrays that the figures were given, read back from what Plotly got."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from theodolite.report.exhibit import by_name
from theodolite.report.payload import figure_json
from theodolite_papers.drawing import localization as drawing
from theodolite_papers.drawing.localization import Line

X = np.linspace(0, 1, 5)
ROWS = np.arange(10, dtype=np.float64).reshape(2, 5) / 10


def test_curves_carry_the_values():
    lines = (Line("a & b", "#0072B2"), Line("second", "#D55E00", "dash"))
    figure = drawing.curves(X, lines, list(ROWS), ("x", "y"))
    np.testing.assert_allclose(figure.data[1].y, ROWS[1], rtol=1e-6)
    assert figure.data[0].name == "a &amp; b"
    assert figure.data[1].line.dash == "dash"
    np.testing.assert_allclose(figure.data[0].y, ROWS[0], rtol=1e-6)


def test_both_formulas_of_every_eta_share_a_colour():
    published, corrected = ROWS, ROWS + 1
    figure = drawing.propagation_curves(X, (0.1, 2.0), published, corrected)
    assert len(figure.data) == 4
    for pair, first, second in zip((0, 2), corrected, published, strict=True):
        np.testing.assert_allclose(figure.data[pair].y, first, rtol=1e-6)
        np.testing.assert_allclose(figure.data[pair + 1].y, second, rtol=1e-6)
        assert figure.data[pair].line.color == figure.data[pair + 1].line.color


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


def test_a_simulation_has_both_of_its_errors_and_four_predictions():
    walks, draws = ROWS[0] / 100, ROWS[1] / 100
    predictions = [ROWS[0] + step for step in range(4)]
    figure = drawing.simulation(X, ROWS[1], (walks, draws), predictions)
    np.testing.assert_allclose(figure.data[0].error_y.array, draws, rtol=1e-6)
    np.testing.assert_allclose(figure.data[1].error_y.array, walks, rtol=1e-6)
    assert [trace.name for trace in figure.data[2:]] == ["published", "corrected", "finite length", "exact"]
    np.testing.assert_allclose(figure.data[5].y, predictions[3], rtol=1e-6)
    choice = by_name(
        "pair", ["a", "b"], lambda place: drawing.simulation(X, ROWS[place], (walks, draws), predictions)
    )
    figure_json(figure, choice.variants())


def test_entropies_and_bars_keep_their_intervals():
    figure = drawing.entropies((0.1, 1.0), (0.0, 0.5), ROWS[:, :2] + 1, ROWS[:, :2] / 10, 0.01)
    np.testing.assert_allclose(figure.data[1].error_y.array, ROWS[1, :2] / 10, rtol=1e-6)
    heights = np.array([0.2, np.nan])
    bars = drawing.bars(
        ("a", "b"), {"source": (heights, np.array([[0.1, np.nan], [0.4, np.nan]]))}, "y", (-1, 1)
    )
    assert bars.data[0].error_y.array[0] == pytest.approx(0.2)
    assert bars.data[0].error_y.arrayminus[0] == pytest.approx(0.1)
    figure_json(bars, {})
