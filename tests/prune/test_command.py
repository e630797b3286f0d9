"""`theodolite prune` as its users meet it."""

from __future__ import annotations

import json
import shutil
import signal
from inspect import signature
from pathlib import Path

import numpy as np
import pandas as pd

from tests.calls import call, error_of
from theodolite.prune import prune_model
from theodolite.prune.checkpoint import UnfinishedPruning
from theodolite.prune.options import PruningOptions
from theodolite.report.pruned_model import error_map, page_at

RESULT = Path("report") / "sinks-prune" / "result.json"


def test_the_options_are_those_of_prune_model():
    """Names, defaults and types."""
    asked = {
        name: (each.default, each.annotation) for name, each in signature(PruningOptions).parameters.items()
    }
    takes = {
        name: (each.default, each.annotation) for name, each in signature(prune_model).parameters.items()
    }
    assert takes.items() >= asked.items()
    assert takes.keys() - asked.keys() == {"model", "corpus", "show_progress"}


def _arguments(model: Path, text: Path, out: Path, *more: object) -> list[object]:
    return ["prune", model, "--corpus", text, "--length", 32, "--contexts", 12, "--out", out, *more]


def test_experts_that_few_tokens_reach_are_named_where_full_moments_are_read(tmp_path, text, checkpoint):
    """Oracle: tokens and inputs of each row of the table."""
    model, out = checkpoint("mixtral"), tmp_path / "out"
    status, stdout, stderr = call(*_arguments(model, text, out, "--method", "sparsegpt", "--contexts", 2))
    assert status == 0, stderr
    table = pd.read_parquet(out / "pruning.parquet")
    short = table[table["tokens"] < table["inputs"]]
    first = short.iloc[0]
    named = f"{first.layer}.{first.matrix}.{first.expert} ({first.tokens} token"
    assert f"matrices with fewer tokens than inputs {len(short)}: {named}" in " ".join(stdout.split())


def test_it_writes_a_checkpoint_and_a_page(tmp_path, text, checkpoint):
    model, out = checkpoint("gpt_oss"), tmp_path / "out"
    status, stdout, stderr = call(*_arguments(model, text, out, "--sparsity", "0.4,0.5,0.6"))
    assert status == 0, stderr
    said = " ".join(stdout.split())
    assert "method oats" in said
    assert "weights that are loaded" in said
    assert f"Checkpoint: {out}" in said
    assert said.endswith(f"Report: {out}/report/sinks-prune/index.html")
    assert "left dense 0.5 % of the blocks' weights: model.layers.0.mlp.router.weight" in said
    table = pd.read_parquet(out / "pruning.parquet")
    assert table.groupby("layer")["asked"].first().tolist() == [0.4, 0.5, 0.6]
    told = json.loads((out / "pruning.json").read_text())
    assert told["pruning"]["method"] == "oats"
    assert told["corpus"]["contexts"] == 12
    assert told["model"]["id"] == str(model)
    shown = json.loads((out / RESULT).read_text())["tables"]["matrices"]
    assert len(shown) == len(table) == 3 * 8
    page = (out / RESULT).with_name("index.html").read_text()
    assert 'data-figure="error-scaled"' in page
    assert (out / "report" / "index.html").is_file()


def test_the_map_of_errors_shows_each_matrix_and_the_mean_of_experts():
    """By hand."""
    rows = [(0, "q", -1, 0.1), (0, "mlp.up", 0, 0.2), (0, "mlp.up", 1, 0.4), (1, "q", -1, 0.5)]
    rows += [(1, "mlp.up", 0, 0.6)]
    table = pd.DataFrame(rows, columns=["layer", "matrix", "expert", "error_scaled"])
    (heat,) = error_map(table).data
    assert list(heat.x) == ["q", "mlp.up"]
    assert list(heat.y) == ["0", "1"]
    np.testing.assert_allclose(heat.z, [[0.1, 0.3], [0.5, 0.6]], rtol=1e-6)


def _bad_calls(tmp_path: Path, model: Path, text: Path) -> list[tuple[list[object], str]]:
    short, there = tmp_path / "short.txt", tmp_path / "there"
    short.write_text("A few words.")
    there.mkdir()
    (there / "mine.txt").write_text("mine")
    inside = shutil.copytree(model, tmp_path / "pruned")
    (inside / "pruning.json").write_text("{}")
    out = tmp_path / "out"
    test_part = ["prune", model, "--corpus", "wikitext-2", "--out", out]
    options = {
        ("--sparsity", "half"): "'half' is no number",
        ("--sparsity", ""): "'' is no number",
        ("--damping", "0.2"): "oats has no such option: leave out --damping",
        ("--method", "wanda", "--rank-ratio", "0.5"): "wanda has no such option: leave out --rank-ratio",
        ("--method", "magnitude", "--exact"): "magnitude has no such option: leave out --exact",
        ("--method", "sparsegpt", "--contexts", "2"): "64 tokens do not calibrate SparseGPT",
    }
    return [
        *((_arguments(model, text, out, *more), words) for more, words in options.items()),
        (test_part, "calibrates nothing: use --corpus hf:Salesforce/wikitext:wikitext-2-raw-v1:train"),
        (
            _arguments(model, text, inside / "deep" / "out"),
            f"lies inside the pruned checkpoint {inside}: choose another --out",
        ),
        (_arguments(model, short, out), "short.txt"),
        (_arguments(model, text, there), "exists already"),
        (_arguments(model, text, short), "exists already"),
        (_arguments(tmp_path / "nowhere", text, out), "nowhere"),
        (_arguments(model, text, Path("/proc/out")), "cannot write"),
    ]


def test_bad_calls_get_one_line_and_leave_nothing(tmp_path, text, checkpoint):
    for arguments, words in _bad_calls(tmp_path, checkpoint("gpt2"), text):
        before = sorted(tmp_path.rglob("*"))
        status, stdout, stderr = call(*arguments)
        assert status in (1, 2), words
        assert words in error_of(stderr)
        assert not stdout, words
        assert sorted(tmp_path.rglob("*")) == before, words


def test_a_stopped_pruning_goes_on_to_the_same_bytes(tmp_path, text, checkpoint, monkeypatch):
    """Oracle: the weights and the table of a pruning that was not stopped."""
    model, whole, parts = checkpoint("llama3"), tmp_path / "whole", tmp_path / "parts"
    assert call(*_arguments(model, text, whole))[0] == 0
    own = UnfinishedPruning.save_block
    with monkeypatch.context() as patched:
        patched.setattr(
            UnfinishedPruning, "save_block", lambda *of: (own(*of), signal.raise_signal(signal.SIGINT))
        )
        status, _, stderr = call(*_arguments(model, text, parts))
    assert status == 130, stderr
    assert (tmp_path / "parts.partial" / "block-000.safetensors").is_file()
    assert not parts.exists()
    assert "error: interrupted; rerun the command to resume" in stderr
    assert call(*_arguments(model, text, parts))[0] == 0
    for name in ("model.safetensors", "low_rank/block-000.safetensors", "pruning.parquet", "config.json"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes(), name
    assert not (tmp_path / "parts.partial").exists()
    status, stdout, stderr = call(*_arguments(model, text, parts))
    assert status == 0, stderr
    assert "parts holds this pruning already: nothing is pruned again" in " ".join(stderr.split())
    assert "Checkpoint: " in stdout


def test_json_is_json_and_nothing_else_and_a_page_that_is_gone_is_written_again(tmp_path, text, checkpoint):
    """As where Python pruned, which writes none. Oracle: the page that the command wrote itself."""
    model, out = checkpoint("gpt2"), tmp_path / "out"
    more = ("--method", "sparsegpt", "--pattern", "2:4", "--format", "factored", "--json")
    arguments = _arguments(model, text, out, *more)
    status, stdout, stderr = call(*arguments)
    assert status == 0, stderr
    result, told = json.loads(stdout), json.loads((out / RESULT).read_text())
    assert result | {"sha256": told["sha256"]} == told
    rows = result["tables"]["matrices"]
    assert {row["method"] for row in rows} == {"sparsegpt"}
    assert all(abs(row["sparsity"] - 0.5) < 1e-9 and row["error_scaled"] > 0 for row in rows)
    assert [row["asked"] for row in rows] == [None] * len(rows)
    page = page_at(out / "report")
    written = page.read_bytes()
    assert b'data-figure="error-scaled"' in written
    shutil.rmtree(out / "report")
    assert call(*arguments)[:2] == (0, stdout)
    assert page.read_bytes() == written
