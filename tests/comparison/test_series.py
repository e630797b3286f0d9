"""A series of checkpoints, by the command. Oracle: pandas on each run's own tables."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from safetensors.torch import load_file, save_file

from tests import checkpoints
from tests.calls import call
from theodolite import Run
from theodolite.comparison.page import step_of

SMALL = ["--corpus", "random", "--length", "16", "--contexts", "8"]


def test_steps_in_names():
    for name, step in (
        ("checkpoint-1000", 1000),
        ("ck-10", 10),
        ("step000020", 20),
        ("pythia-70m-step3000", 3000),
        ("step512-seed1", 512),
        ("EleutherAI-70m-143", 143),
        ("final", None),
    ):
        assert step_of(name) == step


@pytest.fixture(scope="module")
def series(tmp_path_factory) -> tuple[Path, dict[str, Path]]:
    """Three checkpoints, named out of order, and the folder of their surveys."""
    root = tmp_path_factory.mktemp("series")
    folders = {}
    for sharpness, name in enumerate(("checkpoint-20", "checkpoint-3", "checkpoint-100")):
        folders[name] = checkpoints.write("gpt2", root / name)
        weights = load_file(folders[name] / "model.safetensors")
        for key in weights:
            if key.endswith("c_attn.weight"):  # so that each attends in its own way
                weights[key] = weights[key] * (1 + 20 * sharpness)
        save_file(weights, folders[name] / "model.safetensors", {"format": "pt"})
    return root / "out", folders


def _survey(*arguments: object) -> str:
    status, stdout, stderr = call("survey", *arguments, *SMALL)
    assert status == 0, stderr
    return stdout


@pytest.mark.slow
def test_a_series_is_a_table_and_curves_in_the_order_of_steps(series):
    out, folders = series
    rows = json.loads(_survey(*folders.values(), "--out", out, "--json"))["models"]
    assert [row["step"] for row in rows] == [3, 20, 100]
    table = pd.read_csv(out / "series.csv")
    assert table["name"].tolist() == ["checkpoint-3", "checkpoint-20", "checkpoint-100"]
    assert len({row["entropy"] for row in rows}) == 3
    for row in rows:
        run = Run.load(out / row["name"])
        expected = {name: run.heads[name].mean() for name in ("entropy", "propagation", "sink_first")}
        expected |= {f"{name}_max": run.heads[name].max() for name in ("induction", "previous_token")}
        for name, value in (expected | {"rank": run.layers["rank"].mean()}).items():
            assert row[name] == pytest.approx(value), name
        assert 0 < row["entropy_share"] <= 1
    page = (out / "report" / "series" / "index.html").read_text()
    assert "Over training" in page
    assert all(name in page for name in folders)
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/run.json")}
    _survey(*folders.values(), "--out", out)  # what is finished is not surveyed again
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/run.json")} == before
