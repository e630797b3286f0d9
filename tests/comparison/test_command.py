"""`theodolite compare` as its users meet it: folders and models, files, what is gone on with, one-line errors."""

from __future__ import annotations

import json
import shutil

import pandas as pd
import pytest
import torch
import transformers

from tests import checkpoints
from tests.calls import call, error_of
from tests.comparison.conftest import TEXT
from theodolite.models import open_model
from theodolite.system.wording import names_of


@pytest.fixture(scope="module")
def folders(pair, tmp_path_factory):
    """Run folders by the names that a user would give, traces beside them."""
    root = tmp_path_factory.mktemp("folders")
    for how in ("", "destroyed"):
        for run, ending in zip(pair(how), ("", "-sinks", "-outputs"), strict=True):
            (root / f"{how or 'dense'}{ending}").symlink_to(run.folder)
    shutil.copytree(pair("destroyed").run.folder, root / "alone")
    return root


def test_run_folders(folders, tmp_path, monkeypatch):
    out = tmp_path / "out"
    status, stdout, stderr = call("compare", folders / "dense", folders / "destroyed", "--out", out)
    assert status == 0, stderr
    for said in (
        "Hit hardest: L0H2",
        "◐ dense → destroyed",
        "◐ destroyed, tags: in part",
        "3 of 5 tags survive",
        "in part",
        "Next-token loss: ",
        "destroyed, heads write nearly the same: ",
        "destroyed, the text is predicted as well: ",
    ):
        assert said in " ".join(stdout.split())
    page = out / "sinks-compare"
    assert stdout.rstrip().endswith(f"Report: {page}/index.html")
    told = json.loads((out / "comparison.json").read_text())
    (pair,) = told["comparisons"]
    assert (pair["reference"], pair["other"], pair["answer"]) == ("dense", "destroyed", "in part")
    assert {part["name"]: part["answer"] for part in pair["parts"]}["sinks"] == "in part"
    assert pair["loss"]["difference"] == pytest.approx(pair["loss"]["after"] - pair["loss"]["before"])
    index = (out / "index.html").read_text()
    assert "Comparison with" in index
    assert 'href="sinks-compare/index.html"' in index
    sinks = pd.read_parquet(page / "table-sinks.parquet")
    assert (sinks["status"] == "lost").sum() == 2
    assert [row["status"] for row in told["tables"]["sinks"]] == sinks["status"].tolist()


def test_without_a_trace_beside_each_tags_are_left_out_and_json_is_what_is_written(folders, tmp_path):
    command = ("compare", folders / "dense", folders / "alone", "--out", tmp_path)
    status, stdout, _ = call(*command)
    assert status == 0
    assert "Head outputs were not compared." in stdout
    assert "alone, tags: " not in stdout
    status, stdout, _ = call(*command, "--json")
    assert status == 0
    assert json.loads(stdout) == json.loads((tmp_path / "comparison.json").read_text())


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A tiny model, and a copy whose head (1, 0) is destroyed; neither with sinks by nature."""
    root = tmp_path_factory.mktemp("two")
    first = checkpoints.write("gpt2", root / "first")
    model = open_model(first)
    with torch.no_grad():
        model.hf.transformer.h[1].attn.c_attn.weight[:, :8] = 0
        model.hf.transformer.h[1].attn.c_attn.bias[:8] = 0
    model.hf.save_pretrained(root / "second")
    model.tokenizer.save_pretrained(root / "second")
    return first, root / "second"


def test_models_are_surveyed_and_finished_runs_are_reused(two, text, tmp_path):
    out = tmp_path / "out"
    command = ("compare", *two, "--corpus", text, "--length", 32, "--contexts", 8, "--out", out)
    status, stdout, stderr = call(*command)
    assert status == 0, stderr
    assert "lost: L1H0" in stdout
    made = {
        name: (out / name / "arrays.safetensors").stat().st_mtime_ns for name in ("first", "second-sinks")
    }
    assert call(*command)[0] == 0
    for name, before in made.items():
        assert (out / name / "arrays.safetensors").stat().st_mtime_ns == before


def test_what_cannot_be_compared_is_said_in_one_line_before_anything_is_read(two, folders, text, tmp_path):
    first, _ = two
    shallow = tmp_path / "shallow"
    config = transformers.GPT2Config.from_pretrained(first, n_layer=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(shallow)
    checkpoints.byte_tokenizer().save_pretrained(shallow)
    other_tokens = checkpoints.write("gpt2", tmp_path / "other")
    tokenizer = checkpoints.byte_tokenizer()
    tokenizer.add_tokens(["the"])
    tokenizer.save_pretrained(other_tokens)
    out = ("--out", tmp_path / "out", "--corpus", text, "--length", 32, "--contexts", 4)
    for arguments, words in (
        ((first,), "give two or more"),
        ((first, folders / "dense"), "give either runs or models"),
        ((folders / "dense", folders / "destroyed", "--length", 8), "leave out --length"),
        ((folders / "dense", folders / "dense-sinks"), "this is no survey of a text"),
        ((first, shallow, *out), "shallow has 2 layers, first 3: only models of one shape and one tokenizer"),
        ((first, other_tokens, *out), "other and first did not read the same tokens"),
    ):
        status, _, stderr = call("compare", *arguments)
        assert status == 2, (arguments, stderr)
        assert words in error_of(stderr)
    assert not (tmp_path / "out").exists()


def test_models_called_alike_are_numbered():
    named = names_of(["a/model/", "b/model", "model", "org/model@step1"])
    assert named == ["model", "model-2", "model-3", "model-step1"]
