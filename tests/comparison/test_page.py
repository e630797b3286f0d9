"""The page of a comparison and its figures; oracle: the tables that they are drawn from."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from tests.report.synthetic import make_survey
from theodolite import compare
from theodolite.comparison.page import experiment_of, outcome
from theodolite.report.drawing import compare as drawing
from theodolite.report.outcome import render


@pytest.fixture(scope="module")
def audits(pair):
    names = ("planted", "destroyed"), ("planted", "noisy")
    return [
        compare(
            *(pair().run, pair(how).run, pair().trace, pair(how).trace),
            outputs_of=(pair().outputs, pair(how).outputs),
            names=(name, how),
        )
        for name, how in names
    ]


def test_dots_are_the_rows_and_a_share_of_none_has_a_place_on_a_logarithmic_axis(audits):
    table = audits[0].part("tags").table
    dotted = {trace.name: trace for trace in drawing.scatter(table, drawing.TAG_DOTS).data}
    for status in ("survived", "lost"):
        rows = table[table["status"] == status].sort_values(["before", "after"])
        shown = sorted(zip(dotted[status].x, dotted[status].y, strict=True))
        np.testing.assert_allclose(shown, rows[["before", "after"]], rtol=1e-5)
        assert len(rows)
    assert "L0H2" in "".join(dotted["lost"].text)
    figure = drawing.scatter(audits[0].part("sinks").table, drawing.SINK_DOTS)
    lost = next(trace for trace in figure.data if trace.name == "lost")
    assert list(lost.y) == [np.float32(drawing.FEWEST)] * 2
    assert list(lost.x) == [1, 1]
    assert figure.layout.yaxis.ticktext[0] == "none"
    assert 10 ** figure.layout.yaxis.range[0] < drawing.FEWEST


def test_outliers_stand_at_their_sizes_on_logarithmic_axes():
    table = pd.DataFrame(
        {
            "layer": [1, 2],
            "dimension": [7, 3],
            "before": [50.0, 2.0],
            "after": [1.0, 40.0],
            "status": ["lost", "new"],
        }
    )
    figure = drawing.scatter(table, drawing.OUTLIER_DOTS)
    line, _, lost, new, _ = figure.data
    assert (line.x[0], line.x[1]) == (1, 50)
    assert (lost.x[0], lost.y[0], new.x[0], new.y[0]) == (50, 1, 2, 40)
    assert lost.text[0].startswith("layer 1, dimension 7")
    assert figure.layout.xaxis.type == figure.layout.yaxis.type == "log"


def test_the_page_tells_every_part_and_every_model(audits):
    made = outcome(audits)
    claims = {verdict.claim: verdict.answer for verdict in made.verdicts}
    # 3 of 5 sinks, 15 of 16 heads.
    assert claims["The mechanism of planted survives in destroyed"] == "in part"
    assert claims["destroyed, spectra"] == "in part"
    assert claims["destroyed, positional basis"] == "not decided"  # no error is known
    for audit in audits:  # the verdicts say what the sentences say
        for part in audit.parts:
            if len(part.table):
                assert claims[f"{audit.other}, {part.name}"] == part.answer
                assert part.answer != "holds" or (part.count("survived") > 0 and part.count("lost") == 0)
                groups = audit.summary.split(".")[0].lower().split("; ")
                (group,) = (group for group in groups if f" {part.name} (" in group)
                assert group.startswith(part.answer)
    page = render(experiment_of(audits), made, make_survey().provenance)
    assert "<h1>What survives of planted in destroyed and noisy</h1>" in page
    assert '<th scope="col" class="words">measure</th>' in page  # words on the left, numbers on the right
    assert '<th scope="col">after in destroyed</th>' in page
    assert page.index('id="lead"') < page.index('id="verdicts"')
    of_each = ["change", "verdict", "survived", "left"]
    after = ["after in destroyed", *of_each, "after in noisy", *of_each]
    assert [name.strip() for name in made.lead] == ["part", "measure", "before", *after]
    assert list(outcome(audits[:1]).lead) == list(audits[0].overview)
    assert made.lead["part"].tolist() == audits[0].overview["part"].tolist()
    for word in (
        "lost: L0H2",
        "Criterion: a sink of a head in at least 1",
        "noisy, tags",
        "Sinks before and after",
    ):
        assert word in page
    assert set(made.tables["sinks"]["after_in"]) == {"destroyed", "noisy"}
    assert len(made.tables["sinks"]) == sum(len(audit.part("sinks").table) for audit in audits)
    assert list(made.runs) == ["destroyed", "noisy"]


def test_a_page_of_nothing_and_of_hostile_names(pair):
    """Two random models: no sink, tag, outlier or massive activation in either."""
    run, trace, _ = pair("random")
    audits = [compare(run, run, trace, trace, names=("a", "<script>alert(1)</script>\u202e"))]
    made = outcome(audits)
    page = render(experiment_of(audits), made, run.provenance)
    assert "Sinks before and after" not in page
    assert "Entropy of attention" in page
    assert "<script>alert(1)" not in page
    assert "\u202e" not in page
