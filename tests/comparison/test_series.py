"""A series of checkpoints and an untrained baseline, by the command.

Oracles: pandas on each run's own tables, and transformers' own initialisation.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5ForConditionalGeneration

from tests import checkpoints
from tests.calls import call
from theodolite import Run, open_model
from theodolite.comparison.series import step_of
from theodolite.models.open import untrained

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


def test_an_untrained_baseline_stands_beside(series, tmp_path):
    _, folders = series
    model = folders["checkpoint-3"]
    out = tmp_path / "run"
    _survey(model, "--out", out, "--baseline", "untrained")
    trained, random = Run.load(out), Run.load(out / "untrained")
    assert random.provenance["corpus"]["sha256"] == trained.provenance["corpus"]["sha256"]
    assert random.provenance["model"]["sha256"] != trained.provenance["model"]["sha256"]
    page = (out / "report" / "index.html").read_text()
    assert "Beside an untrained model" in page
    for run in (trained, random):
        assert f'data-v="{run.heads["entropy"].mean()}"' in page
    status, _, stderr = call("survey", model, "--baseline", "other", *SMALL)
    assert (status, "there is no baseline other" in stderr) == (2, True)


@pytest.mark.parametrize("family", ["gpt2", "llama3", "bert"])
def test_the_untrained_weights_are_those_of_the_configs_own_initialisation(family, checkpoint):
    model = open_model(checkpoint(family))
    state = torch.random.get_rng_state()
    baseline = untrained(model, seed=5)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(5)
    expected = type(model.hf)(transformers.AutoConfig.from_pretrained(checkpoint(family))).state_dict()
    for name, weight in baseline.hf.state_dict().items():
        np.testing.assert_array_equal(weight, expected[name])
    deviation = float(baseline.head_weights(0).w_q.double().std())
    assert deviation == pytest.approx(model.hf.config.initializer_range, rel=0.15)
    assert baseline.tokenizer is model.tokenizer


def test_of_an_encoder_decoder_the_same_attention_is_looked_at(tmp_path):
    """Oracle: the encoder has two layers, the decoder three."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 2}
    config = T5Config(vocab_size=300, decoder_start_token_id=0, **sizes)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    baseline = untrained(open_model(tmp_path, attention="encoder"))
    assert (baseline.source.attention, baseline.layers) == ("encoder", 2)
