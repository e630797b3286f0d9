"""The report of images: it names patches where that of a text has positions. Oracle: the run's own numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.report.synthetic import make_run
from theodolite.passes.run import Run
from theodolite.report import figures
from theodolite.report.content import sink_texts, text_line
from theodolite.report.page import render

BEFORE = ["[CLS]", "register 1", "register 2", "register 3"]
ROWS, COLUMNS = 4, 5


@pytest.fixture(scope="module")
def images() -> Run:
    """A made-up run of 3 blocks over 4 × 5 patches behind named tokens."""
    run = make_run(length=len(BEFORE) + ROWS * COLUMNS)
    grid = {"rows": ROWS, "columns": COLUMNS, "before": BEFORE}
    corpus = run.provenance["corpus"] | {"grid": grid, "pixels": [16, 20]}
    return replace(run, provenance=run.provenance | {"corpus": corpus})


def test_positions_are_named_by_their_patch(images):
    drawn = figures.spiral(images, 2).data[1]
    np.testing.assert_allclose(drawn.x, images.arrays["positional_pca"][2, len(BEFORE) :, 0])
    patches = [f"patch 0,{column}" for column in range(COLUMNS)] + ["patch 1,0"]
    assert list(drawn.customdata)[:6] == patches
    assert list(figures.sinks_by_position(images).data[0].customdata[0])[:10] == [*BEFORE, *patches]


def test_the_page_names_the_patches_and_has_no_text_of_sinks(images):
    assert figures.available(images) == figures.available(make_run())
    assert sink_texts(images) == []
    assert sink_texts(make_run())
    line = "images of 4 × 5 patches and [CLS], register 1, register 2 and register 3 before"
    assert line in text_line(images.provenance)
    assert "ten lowest frequencies" not in render(images)  # of ten rows or columns at most, they are all
    assert "ten lowest frequencies of rows" not in render(make_run())
