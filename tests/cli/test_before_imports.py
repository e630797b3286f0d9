"""Errors that need no model are found before torch is imported. Oracle: the modules of a fresh interpreter."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CALLS = """
import json, sys
from typer.testing import CliRunner
from theodolite.cli.app import app
said = []
for words in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, words)
    heavy = [name for name in ("torch", "transformers", "pandas") if name in sys.modules]
    said.append([result.exit_code, result.stderr, heavy])
print(json.dumps(said))
"""

COMPARE, SERIES = ["compare", "embedded", "embedded"], ["survey", "embedded", "embedded"]
REPRODUCE = ["reproduce", "localization/figure1"]


def test_wrong_paths_and_options_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "taken").write_text("")
    (tmp_path / "binary.txt").write_bytes(b"so\0")
    (tmp_path / "rows.jsonl").write_text('{"body": "some text"}')
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.jsonl").write_text('{"text": "some text"}')
    (tmp_path / "folder" / "b.txt").write_bytes(b"so\0")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    none, text, taken = (str(tmp_path / name) for name in ("none", "text.txt", "taken"))
    calls = [
        (["survey", none], "no checkpoint at"),
        (["survey", str(tmp_path)], "is no checkpoint"),
        (["survey", str(tmp_path / "run")], "is a run folder, so give the model"),
        (["survey", "--corpus", none], "no file or folder"),
        (["survey", "--corpus", "random", "--per-label", "3"], "has no labels"),
        (["survey", "--corpus", text, "--label-by", "row"], "holds no table"),
        (
            ["survey", "--corpus", text, "--label-by", "kind"],
            "give --label-by file, folder, row, column:NAME",
        ),
        (["survey", "--corpus", text, "--encoding", "kind"], "no encoding 'kind'"),
        (["survey", "--corpus", "docs", "--encoding", "utf-8"], "docs is no file: leave out --encoding"),
        (
            ["survey", "--corpus", "hf:a/b", "--label-by", "file"],
            "has rows and no files: leave out --label-by",
        ),
        (["survey", "--corpus", str(tmp_path / "binary.txt")], "is binary"),
        (["evaluate", "--corpus", str(tmp_path / "rows.jsonl")], "has no column 'text' (it has: body)"),
        (["evaluate", "--stride", "4", "--corpus", str(tmp_path / "empty.txt")], "is empty"),
        (["trace", "--corpus", str(tmp_path / "folder")], "is binary"),
        (["survey", "--length", "3"], "contexts of 3 tokens are too short: use --length 4 or more"),
        (["survey", "--contexts", "0"], "above 0"),
        (["survey", "--out", taken], "exists and is no run"),
        (["survey", "--shard", "3"], "--shard 3: give K/N"),
        (["survey", "--layers", "3-1"], "--layers 3-1: give numbers and spans, such as 0,5,10-12"),
        (["trace", "--layers", "0,x"], "--layers 0,x: give numbers and spans"),
        (["survey", "--layers", "0", "--shard", "1/2"], "of all layers: leave out --layers"),
        (["survey", "--shard", "3/2"], "--shard 3/2: give K/N"),
        ([*SERIES, "--shard", "1/2"], "leave out --shard"),
        *(
            (["survey", "--out", out], "is no name of its own")
            for out in ("/", ".", "", str(tmp_path / ".."))
        ),
        *(
            ([*command, "--out", ".."], "is no name of its own")
            for command in (["trace"], ["spectra"], ["prune"], COMPARE, SERIES, REPRODUCE)
        ),
        (["evaluate", "--out", "/"], "is no name of its own"),
        *(
            ([*command, "--seed", str(seed)], says)
            for command in (["survey"], ["trace"], ["evaluate"], ["prune", "--out", str(tmp_path / "p")])
            for seed, says in ((-1, "no seed -1"), (1 << 63, "use --seed 0 to"), (1 << 70, "use --seed 0 to"))
        ),
        (["trace", "gpt2", "--dtype", "float7"], "unknown dtype float7"),
        (["trace", "--corpus", none], "no file or folder"),
        (["spectra", none], "no checkpoint at"),
        (["report", none], "no run at"),
        (["exclude", none], "no run at"),
        (["prune", "--out", str(tmp_path / "p"), "--method", "nope"], "unknown method nope"),
        (["prune", "--out", str(tmp_path / "p"), "--format", "nope"], "unknown format nope"),
        (["prune", "--out", taken], "exists already"),
        (["prune", "--out", str(tmp_path / "p"), "--corpus", none], "no file or folder"),
        (["compare", none, "embedded"], "no checkpoint at"),
        (["compare", "embedded", "embedded", "--corpus", none], "no file or folder"),
        (["evaluate", none], "no checkpoint at"),
        (["evaluate", "--corpus", none], "no file or folder"),
        (["explore", none], "no checkpoint at"),
        (["explore", "--run", none], "no run at"),
        (["explore", "--run", none, "--contexts", "4"], "--run brings its own text: leave out --contexts"),
        (["reproduce", "geometry/tabel1"], "did you mean geometry/table1"),
        (["reproduce", "geometry/table1", none], "no checkpoint at"),
        (["reproduce", "geometry/table2", "--other", none], "no file or folder"),
        (["runs", none], "no folder"),
        (["runs", __file__], "no folder"),
    ]
    words = json.dumps([call for call, _ in calls])
    process = subprocess.run([sys.executable, "-c", CALLS, words], capture_output=True, text=True, check=True)
    for (call, says), (status, stderr, heavy) in zip(calls, json.loads(process.stdout), strict=True):
        assert status == 2, (call, stderr)
        assert says in " ".join(stderr.split()), (call, stderr)
        assert not heavy, call


@pytest.mark.skipif(sys.platform != "linux", reason="where PyTorch has GCC's OpenMP")
@pytest.mark.parametrize(
    ("settings", "turns"),
    [({}, 1000), ({"GOMP_SPINCOUNT": "7"}, 7), ({"OMP_WAIT_POLICY": "passive"}, 0)],
)
def test_waiting_threads_spin_briefly_unless_the_user_says_otherwise(tmp_path, settings, turns):
    """Oracle: what OpenMP itself says that it has read, as torch is imported after the command has begun."""
    code = (
        "from theodolite.cli.app import app; import sys\n"
        f"app(['runs', {str(tmp_path)!r}], standalone_mode=False); assert 'torch' not in sys.modules; import torch"
    )
    free = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    said = subprocess.run(
        [sys.executable, "-c", code],
        env=free | {"OMP_DISPLAY_ENV": "verbose"} | settings,
        capture_output=True,
        text=True,
    ).stderr
    assert re.search(rf"GOMP_SPINCOUNT = '{turns}'", said), said
