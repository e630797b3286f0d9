"""Figures of images. Oracle: the run's own numbers, read back from the figures, and PNG as PIL reads it."""

from __future__ import annotations

import base64
import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.report.synthetic import make_run
from theodolite.errors import UsageError
from theodolite.passes.run import Run
from theodolite.report import figures
from theodolite.report.content import sink_texts, text_line
from theodolite.report.figures import EXHIBITS
from theodolite.report.page import render

OF_IMAGES = ["received_on_pictures"]
BEFORE = ["[CLS]", "register 1", "register 2", "register 3"]
ROWS, COLUMNS = 4, 5


def run_of_images(before: list[str] = BEFORE) -> Run:
    """A made-up run of 3 blocks over 4 × 5 patches behind named tokens."""
    random = np.random.default_rng(0)
    run, length = make_run(length=len(before) + ROWS * COLUMNS), len(before) + ROWS * COLUMNS
    arrays = run.arrays | {
        "example_picture": torch.from_numpy(random.integers(0, 255, (4, 16, 20, 3), dtype=np.uint8)),
        "example_received": torch.from_numpy(random.uniform(0, 0.5, (3, 4, length))).float(),
    }
    grid = {"rows": ROWS, "columns": COLUMNS, "before": before}
    corpus = run.provenance["corpus"] | {"grid": grid, "pixels": [16, 20]}
    return replace(run, arrays=arrays, provenance=run.provenance | {"corpus": corpus})


@pytest.fixture(scope="module")
def images() -> Run:
    return run_of_images()


def picture_of(image: object) -> np.ndarray:
    kind, _, data = image.source.partition(",")
    assert kind == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def test_which_figures_there_are(images):
    text = make_run()
    assert set(figures.available(images)) == {*figures.available(text), *OF_IMAGES}
    assert not set(figures.available(text)) & set(OF_IMAGES)
    for name in OF_IMAGES:
        with pytest.raises(UsageError, match="this run has no"):
            getattr(figures, name)(text)


def test_the_spiral_is_of_the_patches_by_their_names(images):
    drawn = figures.spiral(images, 2).data[1]
    np.testing.assert_allclose(drawn.x, images.arrays["positional_pca"][2, len(BEFORE) :, 0])
    assert list(drawn.customdata)[:6] == [f"patch 0,{column}" for column in range(COLUMNS)] + ["patch 1,0"]


@pytest.mark.parametrize("before", [BEFORE, []])
def test_attention_lies_on_the_pictures(before):
    run = run_of_images(before)
    drawn = figures.received_on_pictures(run, layer=1)
    values = run.arrays["example_received"][1, :, len(before) :].numpy()
    assert len(drawn.data) == len(drawn.layout.images) == 4
    for number, (patches, image) in enumerate(zip(drawn.data, drawn.layout.images, strict=True)):
        np.testing.assert_allclose(patches.z, values[number].reshape(ROWS, COLUMNS), rtol=1e-5)
        assert patches.zmax >= values.max() - 1e-5
        np.testing.assert_array_equal(picture_of(image), run.arrays["example_picture"][number])
        assert (image.x, image.y, image.sizex, image.sizey) == (-0.5, -0.5, COLUMNS, ROWS)
        assert (image.xref, image.yref) == (patches.xaxis, patches.yaxis)


def test_large_pictures_are_thinned():
    run = run_of_images()
    large = torch.arange(500, dtype=torch.int64).mul(7).remainder(256).to(torch.uint8)
    arrays = run.arrays | {"example_picture": large[None, :, None, None].expand(4, 500, 450, 3)}
    drawn = figures.received_on_pictures(replace(run, arrays=arrays))
    np.testing.assert_array_equal(picture_of(drawn.layout.images[0])[:, 0, 0], large[::3])


def test_the_page_shows_pictures_and_no_text_of_sinks(images):
    page = render(images)
    assert page.count("data:image/png;base64") == 4  # whatever the layer
    assert sink_texts(images) == []
    assert sink_texts(make_run())
    for exhibit in EXHIBITS:
        assert (f'id="data-{exhibit.key}"' in page) == bool(exhibit.of(images))
    line = "images of 4 × 5 patches and [CLS], register 1, register 2 and register 3 before"
    assert line in text_line(images.provenance)
    assert "ten lowest frequencies" not in page  # of ten rows or columns at most, they are all
    assert "ten lowest frequencies of rows" not in render(make_run())
