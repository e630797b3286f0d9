"""Oracle: the run's own numbers, read back from the figures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import plotly.graph_objects as go
import pytest
import torch

from tests.report.synthetic import make_run, make_survey, weights_only
from tests.report.test_patches import OF_IMAGES
from theodolite.errors import UsageError
from theodolite.passes.run import Run
from theodolite.report import figures, style
from theodolite.report.data import entropy_limits, opening_head
from theodolite.report.drawing.heads import head_measures
from theodolite.report.figures import EXHIBITS
from theodolite.report.page import figure_json

OF_TEXT = [name for name in figures.FIGURES if name not in OF_IMAGES]
SIMPLE = sorted(set(OF_TEXT) - {"head_map"})


def drawn_values(figure: go.Figure) -> int:
    return sum(
        len(trace[axis])
        for trace in figure.data
        for axis in ("y", "z")
        if axis in trace and trace[axis] is not None
    )


@pytest.mark.parametrize("name", SIMPLE)
def test_every_figure_is_drawn_with_data_or_refused_in_words_without_a_text(run: Run, name: str) -> None:
    draw, bare = getattr(figures, name), weights_only(run)
    assert drawn_values(draw(run)) > 0
    if name == "spectrum":
        assert drawn_values(draw(bare)) > 0
    else:
        with pytest.raises(UsageError, match="this run has no"):
            draw(bare)


def test_the_map_of_every_measure_shows_the_column(run: Run) -> None:
    for measure in head_measures(run):
        heat = figures.head_map(run, measure.name).data[0]
        assert heat.z.shape == (3, 4)
        assert measure.title in heat.hovertemplate
        column = run.heads[measure.name].to_numpy().reshape(3, 4)
        np.testing.assert_allclose(heat.z, np.log10(column) if measure.decades else column, rtol=1e-6)
        if measure.name.startswith("share_"):  # around zero on one scale
            assert (heat.zmin, heat.zmax) == (-1, 1)
            assert heat.colorscale[len(heat.colorscale) // 2][1] == style.NEUTRAL


def test_curves_are_the_layer_table(run: Run) -> None:
    curve = next(trace for trace in figures.rank(run).data if trace.name == "replicated")
    assert list(curve.y) == run.layers["rank"].tolist()
    assert list(curve.x) == run.layers["layer"].tolist()
    assert list(curve.error_y.array) == run.layers["rank_se"].tolist()
    assert curve.customdata[0] == "14 ± 0.5"
    keys = run.arrays["visible_keys"]
    other = replace(run, arrays={**run.arrays, "visible_keys": keys * 0 + keys.shape[1]})
    np.testing.assert_allclose(entropy_limits(other), math.log(24), rtol=1e-6)  # every query sees every key
    sinks = run.heads.assign(sink_learned=np.where(run.heads["layer"] == 1, 0.2, 0.0))
    limits = entropy_limits(replace(other, heads=sinks))
    np.testing.assert_allclose(limits[1], math.log(25), rtol=1e-6)  # and a learned sink, which is no key
    np.testing.assert_allclose(limits[0], math.log(24), rtol=1e-6)


@pytest.mark.parametrize(
    ("figure", "floor", "name"),
    [
        ("relative_norm", "relative_norm_floor", "noise floor"),
        ("incoherence", "incoherence_random", "incoherence, random"),
        ("similarity", "similarity_random", "similarity, random labels"),
    ],
)
def test_declared_noise_floors_are_drawn_and_what_is_at_one_says_so(
    run: Run, figure: str, floor: str, name: str
) -> None:
    (drawn,) = (trace for trace in getattr(figures, figure)(run).data if trace.name == name)
    np.testing.assert_allclose(drawn.y, run.layers[floor], rtol=1e-6)
    assert drawn.line.dash == "dash"
    low = replace(run, layers=run.layers.assign(relative_norm=[0.9, 0.04, -0.1, 0.2]))
    (curve,) = (trace for trace in figures.relative_norm(low).data if trace.name == "this model")
    assert [text == "at the noise floor" for text in curve.customdata] == [False, True, True, False]


def keys_of(run: Run) -> set[str]:
    return {exhibit.key for exhibit in EXHIBITS if exhibit.of(run)}


def test_what_a_run_lacks_is_left_out(run: Run) -> None:
    few = make_run()
    assert keys_of(run) - keys_of(few) == {"head-shares", "constituents"}
    for name in ("rank", "incoherence", "massive_activations"):  # no standard errors, no whiskers
        traces = [trace for trace in getattr(figures, name)(few).data if "error_y" in trace]
        assert all(trace.error_y.array is None for trace in traces)
    none = dict.fromkeys(("massive_activations", "massive_activations_first"), 0)
    without = keys_of(replace(run, layers=run.layers.assign(**none)))
    assert keys_of(run) - without == {"massive-activations"}
    broken = replace(
        run,
        heads=run.heads.assign(trace=math.nan, sink_learned=0.0, share_additive=0.0),
        layers=run.layers.assign(rank=math.nan),
    )
    offered = {measure.name for measure in head_measures(broken)}
    assert not {"trace", "sink_learned", "share_additive"} & offered
    assert "rank" not in keys_of(broken)
    biased = replace(run, heads=run.heads.assign(share_additive=[-0.1] + [0.0] * 11))
    assert "share_additive" in {measure.name for measure in head_measures(biased)}


def test_propagation_and_spectrum_are_the_chosen_head_s(run: Run) -> None:
    points = figures.spectrum(run, 2, 1).data[0]
    np.testing.assert_allclose(np.stack([points.x, points.y], 1), run.arrays["spectrum"][2, 1], rtol=1e-6)
    measured, *predicted = figures.propagation(run, 1, 2).data
    assert [trace.name for trace in predicted] == ["predicted from W_QK Σ̂", "predicted from W_QK"]
    np.testing.assert_allclose(measured.x, np.arange(1, 25) / 24, rtol=1e-6)
    np.testing.assert_allclose(measured.y, run.arrays["propagation_by_position"][1, 2], rtol=1e-6)


def test_the_spiral_leaves_the_first_position_out(run: Run) -> None:
    cvecs, positions = figures.spiral(run, 1).data
    np.testing.assert_allclose(positions.x, run.arrays["positional_pca"][1, 1:, 0])
    assert list(positions.customdata) == [f"position {place}" for place in range(1, 24)]
    assert len(cvecs.x) == run.arrays["cvec_pca"].shape[1]


def test_sinks_keep_the_first_position_and_the_largest_of_each_bin() -> None:
    run = make_survey(length=300)
    shares = run.arrays["sink_by_position"].zero_()
    shares[1, 2, 0], shares[2, 3, 207] = 0.5, 0.75
    heat = figures.sinks_by_position(run).data[0]
    assert heat.z.shape[1] <= 128
    assert heat.z[1, 0] == 0.5
    assert heat.z[2].max() == 0.75
    assert heat.z.sum() == 1.25


def drawn_data(figure: go.Figure) -> str:
    return figure_json(figure, {}).partition('"layout"')[0]


def every_figure(run: Run) -> dict[str, go.Figure]:
    """Every figure that a user can ask for, in the arguments that the page shows."""
    arguments = {"head_map": {"measure": head_measures(run)[0].name}}
    return {name: figures.FIGURES[name](run, **arguments.get(name, {})) for name in OF_TEXT}


def test_the_figures_are_named_once_and_found(run: Run) -> None:
    assert set(figures.__all__) == {"FIGURES", "available", *figures.FIGURES}
    assert all(getattr(figures, name) is draw for name, draw in figures.FIGURES.items())
    assert figures.available(run) == OF_TEXT
    assert figures.available(weights_only(run)) == ["head_map", "spectrum"]
    for draw in figures.FIGURES.values():
        assert draw.__doc__


def test_a_figure_alone_has_its_title_what_to_look_for_and_paper(run: Run) -> None:
    """The page draws them without, whose captions say it."""
    for figure in every_figure(run).values():
        layout = figure.layout
        assert layout.title.text
        assert layout.title.subtitle.text.startswith("Look for ")
        assert layout.paper_bgcolor == style.NEUTRAL
        assert layout.height > layout.margin.t + 100 > 160
    assert figures.spectrum(run, 2, 1).layout.title.text == "Eigenvalues of its query-key matrix · L2H1"
    assert figures.head_map(run, "induction").layout.title.text.endswith("induction")
    assert not any(shown.figure.layout.title.text for one in EXHIBITS if (shown := one.of(run)))


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda run: figures.spiral(run, layer=9), "layer 9 does not exist: this figure has layers 0 to 3"),
        (lambda run: figures.spiral(run, layer="2"), "layer '2' does not exist"),
        (lambda run: figures.spiral(run, -1), "layer -1 does not exist"),
        (lambda run: figures.head_shares(run, 3), "layer 3 does not exist: this figure has layers 0 to 2"),
        (lambda run: figures.constituents(run, 0, 7), "head 7 does not exist: this figure has heads 0 to 3"),
        (lambda run: figures.head_map(run, "spectrum_of"), "no measure 'spectrum_of': there are 'entropy'"),
        (lambda run: figures.spectrum(run, name="data"), "no name 'data': there are 'spectrum' and"),
        (
            lambda run: figures.spiral("runs/first"),
            r"drawn of a Run, such as Run.load\(FOLDER\); this is str",
        ),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(draw, said: str, run: Run) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        draw(run)
    assert "\n" not in str(refused.value)


PICKED: dict[str, Callable[[Run, str], go.Figure]] = {
    "spiral": lambda run, key: figures.spiral(run, int(key)),
    "head-map": figures.head_map,
    "head-shares": lambda run, key: figures.head_shares(run, int(key)),
    "propagation": lambda run, key: figures.propagation(run, *map(int, key.split(","))),
}


@pytest.mark.parametrize("key", PICKED)
def test_what_a_picker_puts_in_place_makes_the_figure_of_its_option(run: Run, key: str) -> None:
    """The page's overlay, against the figure that a notebook draws of the same layer, head or measure."""
    shown = next(exhibit for exhibit in EXHIBITS if exhibit.key == key).of(run)
    assert shown.choice is not None
    variants = shown.choice.variants()
    assert len(variants) == len(shown.choice.options) > 1
    for option, patches in variants.items():
        overlaid = [
            trace.to_plotly_json() | patch for trace, patch in zip(shown.figure.data, patches, strict=True)
        ]
        assert drawn_data(go.Figure(overlaid)) == drawn_data(PICKED[key](run, option))


def test_outlier_shares_run_to_the_highest(run: Run) -> None:
    """Oracle: shares written here. Colours to 1 would leave a share of a hundredth as blank as none."""
    shares = torch.zeros(4, 8)
    shares[2, 5], shares[3, 5], shares[3, 6] = 0.004, 0.01, 0.002
    figure = figures.outlier_shares(replace(run, arrays={**run.arrays, "outlier_share": shares}))
    (cells,) = figure.data
    assert list(cells.x) == ["5", "6"]
    assert (cells.zmin, cells.zmax) == (0, pytest.approx(0.01))
    with pytest.raises(UsageError, match="no dimension with"):
        figures.outlier_shares(replace(run, arrays={**run.arrays, "outlier_share": torch.zeros(4, 8)}))


def test_the_page_opens_with_the_head_whose_role_is_clearest(run: Run) -> None:
    """Oracle: scores over the published thresholds, by hand: 0.44 / 0.4 is more than 0.2 / 0.3."""
    scores = run.heads.assign(
        sink_first=0.0, sink_later=0.0, same_token=0.0, previous_token=0.0, induction=0.0
    )
    place = scores[(scores["layer"] == 1) & (scores["head"] == 2)].index[0]
    scores.loc[place, "previous_token"] = 0.44
    scores.loc[scores.index[0], "induction"] = 0.2
    assert opening_head(replace(run, heads=scores)) == (1, 2)


def test_a_role_has_one_colour_whichever_roles_a_model_has(run: Run) -> None:
    """Oracle: the bars of a run with all of its roles, against those without previous-token heads."""

    def colours(shown: Run) -> dict[str, str]:
        return {bar.name: bar.marker.color for bar in figures.at_stake(shown).data}

    fewer = replace(run, heads=run.heads.assign(previous_token=0.0))
    assert (
        colours(fewer)
        == {name: colour for name, colour in colours(run).items() if name != "previous token"}
        != colours(run)
    )
