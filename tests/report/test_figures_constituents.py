"""Oracle: the run's own tables, read back from the bars and cells; sums of shares, which are 1 by definition."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.measure.test_head_matrices import by_name, random_split
from tests.report.synthetic import HOSTILE, PARTS, make_run
from theodolite.errors import UsageError
from theodolite.measure.constituents import head_matrices
from theodolite.passes.run import Run
from theodolite.report import figures, style
from theodolite.report.drawing import constituents as drawing
from theodolite.report.page import figure_json


def with_bias(run: Run) -> Run:
    """The run of a model with a bias on its logits, which takes a tenth of head L1H2's variance."""
    heads, parts = run.heads.copy(), run.constituents.copy()
    heads.loc[(heads["layer"] == 1) & (heads["head"] == 2), "share_additive"] = 0.1
    of_head = (parts["layer"] == 1) & (parts["head"] == 2) & (parts["query"] == "additive")
    parts.loc[of_head, ["share", "standard_error"]] = 0.1, 0.02
    return replace(run, heads=heads, constituents=parts)


def test_bars_of_a_layer_are_its_rows_of_the_head_table_and_sum_to_one(run: Run) -> None:
    rows = run.heads[run.heads["layer"] == 2]
    bars = figures.head_shares(run, 2).data
    assert [trace.name for trace in bars] == ["position", "context", "position with context", "constant"]
    np.testing.assert_allclose(bars[0].y, rows["share_position"], rtol=1e-6)
    np.testing.assert_allclose(bars[3].y, rows["share_constant"], rtol=1e-6)
    np.testing.assert_allclose(sum(trace.y for trace in bars), 1, rtol=1e-6)
    negative = run.heads.assign(share_position=-0.25, share_context=0.0, share_cross=0.0, share_constant=1.25)
    layout = figures.head_shares(replace(run, heads=negative)).layout
    low, high = layout.yaxis.range
    assert layout.barmode == "relative"
    assert (low < -0.25, high > 1.25) == (True, True)


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
    (cells,) = figures.constituents(biased, 1, 2).data
    assert cells.y[5] == cells.hovertext[5][0] == "additive"
    assert (float(cells.z[5][0]), cells.text[5][0]) == (pytest.approx(0.1), "10")
    assert np.isnan(cells.z[5][1:]).all()
    assert len(figures.constituents(biased, 0, 0).data[0].z) == 6
    assert figures.head_shares(biased, 1).data[-1].name == "additive bias"


def test_what_a_run_lacks_is_empty_left_out_or_refused_in_words(run: Run) -> None:
    heads = run.heads.copy()
    heads.loc[heads["layer"] == 0, [name for name in heads if name.startswith("share_")]] = math.nan
    bars = figures.head_shares(replace(run, heads=heads), 0).data
    assert len(bars) == 4
    assert all(np.isnan(bar.y).all() for bar in bars)
    rest = run.constituents[run.constituents["layer"] != 1]
    (cells,) = figures.constituents(replace(run, constituents=rest), 1, 0).data
    assert np.isnan(cells.z).all()
    with pytest.raises(UsageError, match="no 'share_position'"):
        figures.head_shares(make_run())


def test_at_most_128_positions_are_drawn_and_the_page_stays_small():
    """Oracle: two floats in three bytes each (base64) as the bound of the page."""
    split = random_split(512, bias=True)
    figure = drawing.qk_panels(split, 0, [f"token {i}" for i in range(512)], first=380)
    assert len(figure.data) == 8
    assert figure.data[0].x[0] == "380 token 380"
    assert len(figure.layout.xaxis.ticktext) <= drawing.LABELS["labels"]
    assert len(figure_json(figure, {})) < 8 * 128**2 * 4 * 4 / 3 + 60_000


def test_centred_panels_share_one_scale_and_raw_ones_have_their_own():
    """Oracle: numpy percentiles and extremes of the panels."""
    split = random_split(16)
    panels = [panel.values for panel in head_matrices(split, 0) if panel.name != "attention"]
    every = np.concatenate([values[np.isfinite(values)] for values in panels])
    figure = drawing.qk_panels(split, 0, ["a"] * 16)
    limit = np.percentile(np.abs(every), 99.5)
    assert figure.layout.coloraxis.cmax == pytest.approx(limit)
    assert figure.layout.coloraxis.cmin == pytest.approx(-limit)
    assert {trace.coloraxis for trace in figure.data} == {"coloraxis", "coloraxis2"}
    raw = drawing.qk_panels(split, 0, ["a"] * 16, raw=True)
    first = by_name(head_matrices(split, 0, raw=True))["pos-pos"].values
    assert raw.data[0].zmin == pytest.approx(np.nanmin(first))
    assert raw.data[0].zmax == pytest.approx(np.nanmax(first))


def test_tokens_of_any_text_are_shown_and_do_nothing():
    """Oracle: no tag and no control character is left in what Plotly is given."""
    tokens = [*HOSTILE, "an ordinary token of many letters"]
    figure = drawing.qk_panels(random_split(len(tokens)), 0, tokens, first=0)
    labels = [*figure.data[0].x, *figure.layout.xaxis.ticktext]
    assert "&lt;script&gt;" in labels[0]
    for label in labels:
        assert "<" not in label
        assert all(ord(character) >= 32 for character in label)
        assert "\u202e" not in label
    assert figure.layout.xaxis.ticktext[-1] == "an ordin…"
    assert len(set(figure.data[0].x)) == len(tokens)


def test_what_a_split_does_not_have_is_said():
    split = random_split(9)
    for changed, words in (
        ({"head": 1}, "head 1 does not exist"),
        ({"first": 9}, "position 9 does not exist"),
        ({"tokens": ["a"]}, "1 tokens for a context of 9"),
    ):
        with pytest.raises(UsageError, match=words):
            drawing.qk_panels(**{"split": split, "head": 0, "tokens": ["a"] * 9} | changed)
    with pytest.raises(UsageError, match="pos, cvec and constant"):
        head_matrices(split.coarse({"all": split.names}), 0)
