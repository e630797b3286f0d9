"""`theodolite runs`, and folders of another run. Oracle: what the runs were made with."""

from __future__ import annotations

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.calls import call
from theodolite.system.run_folders import differences


@pytest.fixture(scope="module")
def made(checkpoint, surveyed: Path, traced: Path, rows: Path, tmp_path_factory) -> Path:
    """Two surveys of different length and seed, and a trace."""
    folder = tmp_path_factory.mktemp("made") / "runs"
    shutil.copytree(surveyed, folder / "one")
    shutil.copytree(traced, folder / "three <b>")
    of = ("--corpus", rows, "--label-by", "column:kind", "--per-label", 2, "--length", 24, "--seed", 3)
    status, _, stderr = call("survey", checkpoint("gpt2"), *of, "--out", folder / "two")
    assert status == 0, stderr
    assert "3 labels with 2 contexts each" in " ".join(stderr.split())
    return folder


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "runs")


class Links(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.targets += [value for name, value in attributes if tag == "a" and name == "href" and value]


def test_runs_are_listed_with_what_differs(runs: Path, tmp_path: Path) -> None:
    status, stdout, stderr = call("runs", runs, "--json")
    assert status == 0, stderr
    listed = {row["folder"]: row for row in json.loads(stdout)}
    assert {name: row["kind"] for name, row in listed.items()} == {
        "one": "survey",
        "three <b>": "trace",
        "two": "survey",
    }
    assert [listed[name]["length"] for name in ("one", "two")] == [32, 24]
    assert listed["one"]["per_label"] == 2
    assert listed["three <b>"]["per_label"] is None
    assert not {"label_by", "dtype", "torch", "revision"} & set(listed["one"])  # the same in all
    (runs / "one" / "run.json").write_text("{")
    status, stdout, stderr = call("runs", runs)
    assert status == 0
    assert "two" in stdout
    assert "is damaged" in " ".join(stderr.split())
    assert call("runs", tmp_path / "runs" / "two")[0] == 2

    # A trace's page links what is there.
    page_of_trace = runs / "three <b>" / "report" / "sinks-trace" / "index.html"
    for target in Links(page_of_trace.read_text()).targets:
        if not target.startswith(("#", "http")):
            assert (page_of_trace.parent / target).is_file(), target
    index = (runs / "three <b>" / "report" / "index.html").read_text()
    assert call("report", runs / "three <b>")[0] == 0
    assert (runs / "three <b>" / "report" / "index.html").read_text() == index  # no link to itself

    table = runs / "two" / "heads.parquet"
    table.write_bytes(table.read_bytes()[:-9])
    (runs / "three <b>" / "sinks.parquet").unlink()
    status, _, stderr = call("runs", runs)
    said = "".join(stderr.split())  # lines are broken within paths, too
    assert status == 2
    assert "twoisdamaged(heads.parquet:itsbytesarenotthosethatwerewritten):remove" in said
    assert "three<b>lackssinks.parquet:remove" in said


def test_a_folder_of_another_run_says_which_option_differs(surveyed: Path, checkpoint, rows: Path) -> None:
    of = ("--corpus", rows, "--label-by", "column:kind", "--per-label", 2)
    again = (*of, "--out", surveyed)
    status, _, stderr = call("survey", checkpoint("gpt2"), *again, "--length", 32, "--shard", "1/1")
    assert (status, "is finished: nothing is left to read or to merge" in " ".join(stderr.split())) == (
        0,
        True,
    )
    status, _, stderr = call("survey", checkpoint("gpt2"), *again, "--length", 24, "--seed", 3)
    assert status == 2
    assert "(--length 32 there, 24 now; --seed 0 there, 3 now)" in " ".join(stderr.split())
    _, _, stderr = call("survey", checkpoint("gpt2"), *again, "--length", 32, "--batch", 3)
    assert "(--batch 128 there, 3 now)" in " ".join(stderr.split())
    _, _, stderr = call("survey", checkpoint("llama3"), *again, "--length", 32)
    assert "options (the model" in " ".join(stderr.split())
    _, _, stderr = call("trace", checkpoint("gpt2"), *again, "--length", 32)
    assert "(survey there, trace now" in " ".join(stderr.split())
    options = ("--corpus", rows, "--length", 32, "--contexts", 4, "--out", surveyed)
    _, _, stderr = call("survey", checkpoint("gpt2"), *options)
    said = " ".join(stderr.split())
    assert "--contexts 6 there, 4 now" in said
    assert "--per-label 2 there, not given now" in said
    assert "--label-by column:kind there, not given now" in said


def test_versions_are_told_apart() -> None:
    there, now = ({"versions": {"torch": version}, "model": "a"} for version in ("2.9", "2.10"))
    assert differences(there, now) == "torch 2.9 there, 2.10 now"
    there, now = {"method": "oats", "iterations": 80, "seed": 0}, {"method": "wanda"}
    assert differences(there, now) == "--method oats there, wanda now"
    there, now = {"dtype": "torch.float32"}, {"dtype": "torch.bfloat16"}
    assert differences(there, now) == "--dtype float32 there, bfloat16 now"
    there, now = ({"batch": batch, "corpus": "a", "local_sinks": batch == 1} for batch in (0, 1))
    assert differences(there, now) == "--batch 0 there, 1 now; --local-sinks not given there, given now"


def test_rules_are_not_overwritten(surveyed: Path, tmp_path: Path) -> None:
    out = tmp_path / "exclusions.json"
    out.write_text(
        '{"schema_version": 2, "rules": [], "occurrences": [], "accuracy": {}, "model": 0, "corpus": 0}'
    )
    before = out.read_bytes()
    status, _, stderr = call("exclude", surveyed, "--out", out)
    assert status == 2
    assert "exists already, with other rules" in " ".join(stderr.split())
    assert out.read_bytes() == before
    out.unlink()
    assert call("exclude", surveyed, "--out", out)[0] == call("exclude", surveyed, "--out", out)[0] == 0
