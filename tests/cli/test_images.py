"""Images on the command line: what is read, what is said, what is refused."""

from __future__ import annotations

import json

import pytest
import torch

from tests import vision
from tests.calls import call, error_of
from theodolite.corpus.corpus import Corpus
from theodolite.models import image_reader, open_model
from theodolite.passes.run import Run
from theodolite.sinks.outliers import find_outliers


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return vision.draw(tmp_path_factory.mktemp("drawn") / "images", ["cat", "dog"], 6)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return vision.write("dinov2_registers", tmp_path_factory.mktemp("model") / "dinov2")


def test_a_survey_of_images(model, images, tmp_path):
    (images / "notes.txt").write_text("no picture")
    out = tmp_path / "run"
    status, stdout, stderr = call(
        "survey", model, "--corpus", images, "--per-label", 5, "--out", out, "--json"
    )
    assert status == 0
    said = " ".join(stderr.split())
    assert "1 file passed over (not named as images are): notes.txt" in said
    assert "2 labels with 5 contexts each" in said
    run = Run.load(out)
    assert run.provenance["corpus"]["contexts"] == 10
    assert run.provenance["corpus"]["grid"] == {
        "rows": 4,
        "columns": 4,
        "before": vision.BEFORE["dinov2_registers"],
    }
    assert len(json.loads(stdout)["layers"]) == 3
    assert "data:image/png;base64" in (out / "report" / "index.html").read_text()


def test_sinks_of_images_are_traced(images, tmp_path):
    """Oracle: attention of the eager model; a trace counts the same sinks as it has."""
    out, model = tmp_path / "trace", vision.write("siglip", tmp_path / "siglip")
    status, _, _ = call("trace", model, "--corpus", images, "--out", out, "--json")
    assert status == 0
    opened = open_model(model)
    corpus = Corpus.from_path(images, image_reader(opened))
    eager = vision.build("siglip")
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = eager(corpus.inputs(slice(0, 12)), output_attentions=True).attentions
    sinks = torch.stack([layer.mean(dim=2) > 0.3 for layer in attentions])  # (L, C, H, T)
    expected = {
        (layer, head, corpus.grid.token_text(position) if position else "")  # a first one's name says nothing
        for layer, _, head, position in sinks.nonzero().tolist()
    }
    traces = Run.load(out).traces
    assert {name for _, _, name in expected} - {""}
    assert set(zip(traces["layer"], traces["head"], traces["token"], strict=True)) == expected


def test_outliers_of_images(model, images):
    corpus = Corpus.from_path(images, image_reader(open_model(model)))
    found = find_outliers(open_model(model), corpus)
    assert len(found.layers) == 3
    assert found.numbers["length"] == 21


@pytest.mark.slow
def test_models_are_compared_on_images(model, images, tmp_path):
    other = vision.write("dinov2_registers", tmp_path / "other", seed=1)
    out = tmp_path / "compared"
    status, stdout, _ = call("compare", model, other, "--corpus", images, "--out", out, "--json")
    assert status == 0
    assert json.loads(stdout)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("survey", "MODEL"), "the model reads images, and docs is text: give a folder of images"),
        (("survey", "MODEL", "--corpus", "hf:a/b"), "the model reads images, and hf:a/b is text"),
        (("survey", "MODEL", "--corpus", "IMAGES", "--length", 8), "leave out --length"),
        (("survey", "MODEL", "--corpus", "IMAGES", "--label-by", "row"), "leave out --label-by row"),
        (("survey", "MODEL", "--corpus", "IMAGES", "--shard", "1/2"), "shards are of text, not of images"),
        (("prune", "MODEL", "--corpus", "IMAGES", "--sparsity", 0.5), "pruning reads a text alone"),
        (
            ("reproduce", "geometry", "MODEL", "--corpus", "IMAGES"),
            "reads no text, which all experiments are on",
        ),
        (("evaluate", "MODEL", "--corpus", "IMAGES"), "predicts no tokens"),
    ],
)
def test_what_images_are_refused_for_is_one_line(model, images, tmp_path, arguments, line):
    places = {"MODEL": model, "IMAGES": images}
    arguments = [places.get(argument, argument) for argument in arguments]
    out = () if arguments[0] == "evaluate" else ("--out", tmp_path / "out")
    status, _, stderr = call(*arguments, *out)
    assert status == 2
    assert line in error_of(stderr)


@pytest.mark.slow
def test_the_tower_of_images_is_opened_for_images(images, tmp_path):
    folder = vision.write_clip(tmp_path / "clip")
    status, _, stderr = call("survey", folder, "--corpus", images, "--out", tmp_path / "run", "--json")
    assert status == 0
    assert "CLIPModel has two towers: this is the one of images (CLIPVisionModel)" in " ".join(stderr.split())
    assert Run.load(tmp_path / "run").provenance["model"]["layers"] == 3
