"""Oracle: the run's own tables, read back from the bars and curves."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from tests.report.synthetic import make_survey
from theodolite.passes.run import Run
from theodolite.report.data import attributed
from theodolite_papers.hidden_geometry import attribution, positional_basis, published, smoothness


@pytest.fixture(scope="module")
def run() -> Run:
    return make_survey()


def test_curves_and_frequencies_are_the_run_s(run: Run) -> None:
    for component, wave in enumerate(positional_basis.waves(run, 1).data):
        np.testing.assert_allclose(wave.y, run.arrays["positional_pca"][1, 1:, component], rtol=1e-6)
    magnitudes = np.random.default_rng(0).random((10, 10))
    (cells,) = smoothness.dct(magnitudes).data
    np.testing.assert_allclose(cells.customdata, magnitudes, rtol=1e-6)
    assert cells.z.max() == 0
    cosines = np.random.default_rng(0).random((9, 9))
    heat = smoothness.gram(cosines, 3).data[0]
    assert list(heat.y) == ["position 1", "position 5", "position 9"]
    np.testing.assert_allclose(heat.z, cosines[::4, ::4], rtol=1e-6)
    curves = smoothness.low_frequency(run).data
    np.testing.assert_allclose(curves[3].y, run.layers["low_frequency_10"], rtol=1e-6)
    np.testing.assert_allclose(curves[3].error_y.array, run.layers["low_frequency_10_se"], rtol=1e-6)
    assert curves[7].y[0] == pytest.approx(published.LOW_FREQUENCY[10])


def test_panels_stand_in_the_order_of_their_scores_with_the_table_s_numbers(run: Run) -> None:
    table = run.attribution.sample(frac=1, random_state=0)
    figure = attribution.pattern_panels(replace(run, attribution=table), "previous")
    titles = [annotation.text for annotation in figure.layout.annotations]
    assert [title.split("</b>")[0] for title in titles] == ["<b>L2H0", "<b>L2H1", "<b>L2H2"]
    assert titles[0].endswith("0.62, uniform 0.020")
    alone, without = figure.data[:2]
    groups = dict(zip(alone.y, zip(alone.x, without.x, strict=True), strict=True))
    assert groups["position"] == pytest.approx((0.60, 0.05))
    assert groups["constant"] == pytest.approx((0.03, 0.62))
    assert "additive" not in groups
    lines = [shape.x0 for shape in figure.layout.shapes[:2]]
    assert lines == pytest.approx([0.62, 0.02])


@pytest.mark.parametrize("score", [0.0078, 7.8e-9])
def test_a_panel_s_title_fits_a_phone(run: Run, score: float) -> None:
    """Oracle: letters of 12 pixels are at most 8 wide on average; a phone leaves 390 − 84 − 12 for the panel."""
    table = run.attribution.assign(score=score, uniform=score / 10, layer=31, head=15)
    (title,) = (
        note.text
        for note in attribution.pattern_panels(replace(run, attribution=table), "same").layout.annotations
    )
    assert 8 * len(re.sub("<.*?>", "", title)) < 390 - 84 - 12


def test_heads_that_pay_a_pattern_what_uniform_attention_does_are_noise(run: Run) -> None:
    """Uniform attention pays 0.020."""
    score = run.attribution["score"].where(run.attribution["head"] == 1, 0.021)
    one = run.attribution.assign(score=score.where(run.attribution["head"] != 1, 0.0401))
    shown = attribution.pattern_panels(replace(run, attribution=one), "previous").layout.annotations
    assert [note.text.split("</b>")[0] for note in shown] == ["<b>L2H1"]


def test_more_heads_than_panels_leave_the_strongest(run: Run) -> None:
    table = run.attribution[run.attribution["pattern"] == "same"]
    first = table[table["head"] == 0]
    many = pd.concat(
        [first.assign(layer=layer, score=0.3 + 0.01 * layer) for layer in range(attribution.PANELS + 3)]
    )
    other = replace(run, attribution=many)
    assert len(attributed(other, "same")) == attribution.PANELS + 3
    titles = [annotation.text for annotation in attribution.pattern_panels(other, "same").layout.annotations]
    assert len(titles) == attribution.PANELS
    assert titles[0].startswith(f"<b>L{attribution.PANELS + 2}H0")


def test_the_legend_stands_above_the_titles_of_the_panels(run: Run) -> None:
    """Of the first panel too, whose title begins `yshift` pixels above the plot."""
    layout = attribution.pattern_panels(run, "previous").layout
    plot = layout.height - layout.margin.t - layout.margin.b
    for title in layout.annotations:
        assert title.y * plot + title.yshift + title.font.size < layout.legend.y * plot


def test_published_averages_agree_with_the_layer_tables() -> None:
    """Table 1's averages over layers against the rows of Tables 4 and 6 (OpenWebText is the second)."""
    for model, average in published.AVERAGES.items():
        ranks, norms = published.RANK[model][1], published.RELATIVE_NORM[model][1]
        assert math.isclose(np.mean(ranks[:-1]), average.rank[0], abs_tol=0.35)
        assert math.isclose(np.mean(norms[:-1]), average.relative_norm[0], abs_tol=0.11)
