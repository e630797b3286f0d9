"""Oracle: the run's own tables, read back from the bars and cells; sums of shares, which are 1 by definition."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from tests.report.synthetic import PARTS, make_run
from theodolite.errors import UsageError
from theodolite.passes.run import Run
from theodolite.report import figures, style
from theodolite.report.drawing.constituents import PANELS, attributed
from theodolite.report.exhibits import EXHIBITS
from theodolite.report.published import LOW_FREQUENCY_QK


def with_bias(run: Run) -> Run:
    """The run of a model with a bias on its logits, which takes a tenth of head L1H2's variance."""
    heads, parts = run.heads.copy(), run.constituents.copy()
    heads.loc[(heads["layer"] == 1) & (heads["head"] == 2), "share_additive"] = 0.1
    of_head = (parts["layer"] == 1) & (parts["head"] == 2) & (parts["query"] == "additive")
    parts.loc[of_head, ["share", "standard_error"]] = 0.1, 0.02
    return replace(run, heads=heads, constituents=parts)


def test_bars_of_a_layer_are_its_rows_of_the_head_table_and_sum_to_one(run: Run) -> None:
    rows = run.heads[run.heads["layer"] == 2]
    figure = figures.head_shares(run, 2)
    assert [trace.name for trace in figure.data] == [
        "position",
        "context",
        "position and context",
        "constant",
    ]
    np.testing.assert_allclose(figure.data[0].y, rows["share_position"], rtol=1e-6)
    np.testing.assert_allclose(figure.data[3].y, rows["share_constant"], rtol=1e-6)
    np.testing.assert_allclose(sum(trace.y for trace in figure.data), 1, rtol=1e-6)


def test_negative_shares_hang_below_zero_within_the_axis(run: Run) -> None:
    heads = run.heads.assign(share_position=-0.25, share_context=0.0, share_cross=0.0, share_constant=1.25)
    figure = figures.head_shares(replace(run, heads=heads))
    assert figure.layout.barmode == "relative"
    low, high = figure.layout.yaxis.range
    assert low < -0.25
    assert high > 1.25


def test_a_head_without_shares_has_no_bar(run: Run) -> None:
    heads = run.heads.copy()
    heads.loc[heads["layer"] == 0, [name for name in heads if name.startswith("share_")]] = math.nan
    bars = figures.head_shares(replace(run, heads=heads), 0).data
    assert all(np.isnan(bar.y).all() for bar in bars)
    assert len(bars) == 4


def test_cells_of_a_head_are_its_constituents_by_query_and_key(run: Run) -> None:
    cells = figures.constituents(run, 1, 2).data
    assert len(cells) == 1
    rows = run.constituents[(run.constituents["layer"] == 1) & (run.constituents["head"] == 2)]
    for query, key, share in zip(rows["query"], rows["key"], rows["share"], strict=True):
        if query != "additive":
            place = PARTS.index(query), PARTS.index(key)
            assert math.isclose(cells[0].z[place], share, rel_tol=1e-6)
            assert cells[0].hovertext[place[0]][place[1]] == f"{query} · {key}"
            shown = f"{100 * share:.0f}".replace("-", "−")
            assert cells[0].text[place[0]][place[1]] == (shown if abs(share) >= 0.005 else "")
    np.testing.assert_allclose(cells[0].customdata, 0.01, rtol=1e-6)
    assert cells[0].zmin == -cells[0].zmax
    assert cells[0].colorscale[2][1] == style.NEUTRAL


def test_a_bias_on_logits_has_its_own_cell(run: Run) -> None:
    biased = with_bias(run)
    cell = figures.constituents(biased, 1, 2).data[1]
    assert (float(cell.z[0][0]), cell.text[0][0]) == (pytest.approx(0.1), "10")
    assert len(figures.constituents(biased, 0, 0).data) == 2
    assert figures.head_shares(biased, 1).data[-1].name == "additive"


def test_a_layer_that_could_not_be_split_has_empty_cells(run: Run) -> None:
    rest = run.constituents[run.constituents["layer"] != 1]
    (cells,) = figures.constituents(replace(run, constituents=rest), 1, 0).data
    assert np.isnan(cells.z).all()


def test_panels_stand_in_the_order_of_their_scores_with_the_table_s_numbers(run: Run) -> None:
    table = run.attribution.sample(frac=1, random_state=0)
    figure = figures.attribution(replace(run, attribution=table), "previous")
    titles = [annotation.text for annotation in figure.layout.annotations]
    assert [title.split("</b>")[0] for title in titles] == ["<b>L2H0", "<b>L2H1", "<b>L2H2"]
    assert titles[0].endswith("as measured 0.62, uniform attention 0.020")
    alone, without = figure.data[:2]
    groups = dict(zip(alone.y, zip(alone.x, without.x, strict=True), strict=True))
    assert groups["position"] == pytest.approx((0.60, 0.05))
    assert groups["constant"] == pytest.approx((0.03, 0.62))
    assert "additive" not in groups
    lines = [shape.x0 for shape in figure.layout.shapes[:2]]
    assert lines == pytest.approx([0.62, 0.02])


def test_more_heads_than_panels_leave_the_strongest(run: Run) -> None:
    table = run.attribution[run.attribution["pattern"] == "same"]
    first = table[table["head"] == 0]
    many = pd.concat([first.assign(layer=layer, score=0.3 + 0.01 * layer) for layer in range(PANELS + 3)])
    other = replace(run, attribution=many)
    assert len(attributed(other, "same")) == PANELS + 3
    titles = [annotation.text for annotation in figures.attribution(other, "same").layout.annotations]
    assert len(titles) == PANELS
    assert titles[0].startswith(f"<b>L{PANELS + 2}H0")


def test_what_a_run_lacks_is_refused_in_words(run: Run) -> None:
    old = make_run()
    with pytest.raises(UsageError, match="no attribution of 'induction'"):
        figures.attribution(old, "induction")
    with pytest.raises(UsageError, match="no 'share_position'"):
        figures.head_shares(old)
    with pytest.raises(UsageError, match="no 'silhouette'"):
        figures.clusters(old)


def test_a_pattern_without_heads_has_no_exhibit(run: Run) -> None:
    rest = replace(run, attribution=run.attribution[run.attribution["pattern"] != "same"])
    assert not any(exhibit.key == "attribution-same" and exhibit.available(rest) for exhibit in EXHIBITS)


def test_smoothness_is_the_median_over_a_layer_s_heads(run: Run) -> None:
    for cutoff in (10, 1):
        figure = figures.inherited_smoothness(run, cutoff)
        curves = {trace.name: trace for trace in figure.data if trace.name != "GPT-2"}
        assert list(curves) == ["PPᵀ", "PWPᵀ", "QK matrix"]
        np.testing.assert_allclose(curves["PPᵀ"].y, run.layers[f"pp_low_frequency_{cutoff}"], rtol=1e-6)
        column = f"qk_low_frequency_{cutoff}"
        expected = [float(np.median(rows[column])) for _, rows in run.heads.groupby("layer")]
        np.testing.assert_allclose(curves["QK matrix"].y, expected, rtol=1e-6)
        np.testing.assert_allclose(figure.data[-1].y, LOW_FREQUENCY_QK[cutoff], rtol=1e-6)


def test_rows_of_smoothness_that_a_run_lacks_are_left_out(run: Run) -> None:
    names = [name for name in run.heads if name.startswith("qk_")]
    other = replace(run, heads=run.heads.drop(columns=names))
    traces = figures.inherited_smoothness(other, 10).data
    assert len(traces) == 4
    assert {trace.name for trace in traces} == {"PPᵀ", "PWPᵀ", "GPT-2"}


def test_captions_say_that_attribution_has_a_sample_of_its_own() -> None:
    """A head's score there is not the one of the head map: the sequences are others."""
    captions = [exhibit.shows for exhibit in EXHIBITS if exhibit.key.startswith("attribution-")]
    assert len(captions) == 3
    assert all("not those of the scores under Heads" in caption for caption in captions)


def test_the_legend_stands_above_the_titles_of_the_panels(run: Run) -> None:
    """Of the first panel too, whose title begins `yshift` pixels above the plot."""
    layout = figures.attribution(run, "previous").layout
    plot = layout.height - layout.margin.t - layout.margin.b
    for title in layout.annotations:
        assert title.y * plot + title.yshift + title.font.size < layout.legend.y * plot
