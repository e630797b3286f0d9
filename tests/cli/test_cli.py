"""The command line as its users meet it: results, one-line errors with their exit status, interruptions."""

from __future__ import annotations

import importlib
import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer import Exit
from typer.testing import CliRunner

from tests.calls import call, error_of, same_bytes
from tests.processes import Started, command
from tests.slow import slow_but
from theodolite import __version__, models
from theodolite.cli.app import app, main
from theodolite.cli.options import Opening
from theodolite.cli.screen import one_line_errors
from theodolite.jobs import job
from theodolite.models import OpenModel
from theodolite.passes.run import Run
from theodolite.system import processor
from theodolite_papers import ALIASES, EXPERIMENTS


def test_survey_writes_a_run_and_a_report(checkpoint, text, tmp_path):
    out = tmp_path / "run"
    of = ("--corpus", text, "--length", 32, "--contexts", 6, "--out", out)
    status, stdout, _ = call("survey", checkpoint("qwen3"), *of)
    assert status == 0
    assert "Residual stream, by layer" in stdout
    assert stdout.rstrip().endswith(f"Report: {out}/report/index.html")
    assert (out / "report" / "index.html").is_file()
    assert Run.load(out).provenance["corpus"]["contexts"] == 6
    before = (out / "arrays.safetensors").stat().st_mtime_ns
    status, stdout, _ = call("survey", checkpoint("qwen3"), *of, "--json")
    assert status == 0
    assert (out / "arrays.safetensors").stat().st_mtime_ns == before  # done already, and not done again
    tables = json.loads(stdout)  # JSON, and nothing else
    assert len(tables["layers"]) == 4
    assert len(tables["heads"]) == 12
    assert tables["layers"][0]["cosine_previous"] is None
    assert tables["heads"][0]["spectrum_of"] == "projection before norm"


def test_spectra_need_no_text(checkpoint, tmp_path):
    status, stdout, _ = call("spectra", checkpoint("vit"), "--json")
    assert status == 0
    assert set(json.loads(stdout)) == {"provenance", "heads"}
    status, stdout, _ = call("spectra", checkpoint("gpt2"), "--out", tmp_path / "run")
    assert status == 0
    assert "Query-key spectra, by head" in stdout
    assert (tmp_path / "run" / "report" / "index.html").is_file()


@pytest.mark.parametrize(("name", "keeps"), [("survey", True), ("trace", True), ("spectra", False)])
def test_only_a_pass_over_a_text_keeps_freed_memory(name, keeps, tmp_path, monkeypatch):
    """Oracle: what is asked of the C library by the whole command; it ends where the model has no weights."""
    calls: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *of: calls.append(of))
    monkeypatch.setattr(processor, "ctypes", SimpleNamespace(CDLL=lambda _: library))
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).touch()
    monkeypatch.setattr("sys.argv", ["theodolite", name, str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    assert bool(calls) == keeps


def test_report_renders_a_run_again(surveyed, tmp_path):
    out = shutil.copytree(surveyed, tmp_path / "run")
    page = out / "report" / "index.html"
    first = page.read_bytes()
    page.unlink()
    assert call("report", out)[0] == 0
    assert page.read_bytes() == first
    status, stdout, _ = call("report", out, "--json")
    assert status == 0
    assert len(json.loads(stdout)["heads"]) == len(Run.load(out).heads)
    status, stdout, _ = call("exclude", out, "--json", "--out", tmp_path / "exclusions.json")
    assert status == 0
    assert json.loads(stdout) == json.loads((tmp_path / "exclusions.json").read_text())


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("me/model@v2", ("me/model", "v2")),
        ("me/model", ("me/model", None)),
        (None, (None, None)),
        ("embedded", (None, None)),
    ],
)
def test_a_hub_name_brings_its_revision(given, read, monkeypatch):
    asked = []

    def opened(name, **options):
        asked.append((name, options["revision"]))
        return SimpleNamespace(stored={})

    monkeypatch.setattr(models, "open_model", opened)
    Opening().open(given)
    assert asked == [read]


def test_options_and_folders_that_do_not_exist_are_status_2(tmp_path, monkeypatch):
    assert call("survey", "--no-such-option")[0] == 2
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a@b").mkdir()
    assert "a@b is no checkpoint" in call("survey", "a@b")[2]


def test_version_and_help():
    assert call("--version")[1].strip() == __version__
    for name in ("survey", "spectra", "report", "runs", "reproduce", "train", "prune", "evaluate"):
        status, stdout, _ = call(name, "--help")
        assert status == 0
        assert f"Example: theodolite {name}" in stdout


def test_a_shell_can_complete_commands_and_options():
    """As bash asks: the words so far, and which of them the cursor is on."""

    def completed(words: str) -> set[str]:
        asked = {"_THEODOLITE_COMPLETE": "complete_bash", "COMP_WORDS": words}
        asked["COMP_CWORD"] = str(words.count(" "))
        return set(CliRunner().invoke(app, env=asked, prog_name="theodolite").stdout.split())

    assert completed("theodolite sur") == {"survey"}
    assert {"spectra", "survey"} <= completed("theodolite s")
    assert "--contexts" in completed("theodolite survey --con")
    assert completed("theodolite reproduce geometry/table1,sinks/trac") == {"geometry/table1,sinks/trace"}
    offered = (completed(f"theodolite reproduce {first}") for first in "gls")
    assert {*EXPERIMENTS, *ALIASES} <= set().union(*offered)


def test_reproduce_lists_what_there_is():
    status, stdout, _ = call("reproduce")
    assert status == 0
    assert "geometry/table1" in stdout
    assert "geometry/figure13" in stdout
    listed = json.loads(call("reproduce", "--json")[1])
    assert {"geometry/table1", "geometry/figure24", "geometry/claims"} <= {row["name"] for row in listed}


def test_reproduce_surveys_once_and_writes_pages(checkpoint, text, tmp_path):
    out = tmp_path / "run"
    options = ("--corpus", text, "--length", 40, "--contexts", 8, "--out", out)
    names = "geometry/table1,geometry/table2,geometry/figure2"
    status, stdout, _ = call("reproduce", names, checkpoint("gpt2"), *options)
    assert status == 0
    assert "paper" in stdout
    assert "here" in stdout
    assert "criterion: at most" in " ".join(stdout.split())
    left_out = "geometry/figure2 is skipped: geometry/figure2 needs contexts with at least two labels"
    assert left_out in " ".join(stdout.split())
    assert stdout.rstrip().endswith(f"Report: {out}/reproduce/index.html")
    assert (out / "report" / "index.html").is_file()
    before = (out / "arrays.safetensors").stat().st_mtime_ns
    status, stdout, _ = call("reproduce", "geometry/table4", checkpoint("gpt2"), *options, "--json")
    assert status == 0
    (result,) = json.loads(stdout)
    written = json.loads((out / "reproduce" / "geometry-table4" / "result.json").read_text())
    assert result | {"sha256": written["sha256"]} == written
    assert len(result["tables"]["this_run"]) == len(Run.load(out).layers)
    assert (out / "arrays.safetensors").stat().st_mtime_ns == before


def test_a_figure_of_a_prompt_surveys_nothing_and_has_a_page_for_each(checkpoint, text, tmp_path):
    out = tmp_path / "run"
    of = ("reproduce", "sinks/figure2", checkpoint("gpt2"), "--out", out)
    for prompt in ("one two three four one two three four", "five six five six five six"):
        status, stdout, stderr = call(*of, "--layer", 1, "--head", 2, "--prompt", prompt, "--json")
        assert status == 0, stderr
        assert json.loads(stdout)[0]["provenance"]["asked"] == {"prompt": prompt, "layer": 1, "head": 2}
    assert [path.name for path in out.iterdir()] == ["reproduce"]
    pages = [page.parent.name for page in (out / "reproduce").glob("sinks-figure2-*-L1H2/index.html")]
    assert len(pages) == 2
    assert any(name.startswith("sinks-figure2-one-two-three-four-one-t-") for name in pages)
    index = (out / "reproduce" / "index.html").read_text()
    assert all(f"{name}/index.html" in index for name in pages)
    assert "“five six five six five six”, L1H2" in index
    page = (out / "reproduce" / pages[0] / "index.html").read_text()
    assert "on a prompt" in page
    assert '<th scope="col">paper</th>' not in page  # nothing is printed there
    status, _, stderr = call(*of, "--prompt", "one two", "--corpus", text)
    assert status == 2
    assert "reads its prompt and no text: leave out --corpus" in " ".join(stderr.split())


def test_traces_of_local_sinks_have_a_folder_of_their_own(checkpoint, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ("--corpus", text, "--length", 40, "--contexts", 4)
    for more in ((), ("--local-sinks",)):
        assert call("trace", checkpoint("gpt2"), *options, *more)[0] == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "gpt2-text.txt-local-sinks",
        "gpt2-text.txt-sinks",
    ]


def test_a_grid_is_trained_and_its_figures_are_drawn(tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("the angle is read twice and the mean of both is kept as the angle " * 400)
    grid = tmp_path / "grid"
    train = ("train", "locater", "--text", words, "--held-out", words, "--vocabulary", "words", "--out", grid)
    status, stdout, stderr = call(*train, "--steps", 1, "--means", "0,1", "--decays", "0.01", "--seeds", 2)
    assert status == 0, stderr
    assert stdout.count("held-out perplexity") == 6
    assert stdout.rstrip().endswith(str(grid))
    status, stdout, stderr = call("reproduce", "localization/fig8,localization/fig9,localization/fig1", grid)
    assert status == 0, stderr
    said = " ".join(stdout.split())
    assert "With stronger κ₂ the attention entropy increases" in said
    assert "localization/figure9 is skipped: the grid has no training run of 3 layers" in said
    assert said.endswith(f"Report: {grid}/reproduce/index.html")
    assert (grid / "reproduce" / "localization-figure1" / "index.html").is_file()
    status, stdout, _ = call("reproduce", "localization/fig7", grid, "--json")
    assert [each["name"] for each in json.loads(stdout)] == ["localization/figure7"]


EMPTY = ("--means", "", "--decays", "")


def _bad_calls(tmp_path: Path, model: Path, text: Path) -> dict[str, tuple[list[object], str]]:
    out = tmp_path / "run"
    survey = ["survey", model, "--out", out, "--corpus"]
    return {
        "option of others": (
            ["reproduce", "geometry/table1", model, "--prompt", "so"],
            "--prompt is not for geometry/table1: only geometry/figure6",
        ),
        "head without layer": (
            ["reproduce", "geometry/figure6", model, "--head", 1],
            "both --layer and --head",
        ),
        "a grid's figure without a grid": (
            ["reproduce", "localization/figure8", model],
            "pass the folder that `theodolite train locater` wrote",
        ),
        "theory with a model": (["reproduce", "localization/figure1", model], "leave out MODEL"),
        "a grid of nothing": (
            ["train", "locater", *("--text", text), *("--held-out", text), *EMPTY, "--out", out],
            "at least one",
        ),
        "a place for no files": ([*survey, text, "--length", 32, "--out", "/proc/run"], "cannot write"),
        "unwritable": ([*survey, text, "--length", 32, "--out", text / "run"], "is a file, not a folder"),
    }


def test_bad_calls_get_one_line_and_leave_nothing(checkpoint, text, tmp_path):
    """What needs no model is in test_before_imports.py, and what needs no weights in test_before_weights.py."""
    for name, (arguments, words) in _bad_calls(tmp_path, checkpoint("gpt2"), text).items():
        before = sorted(tmp_path.rglob("*"))
        status, stdout, stderr = call(*arguments)
        assert status in (1, 2), name
        assert words in error_of(stderr), name
        assert "surveying" not in stderr, name
        assert not stdout, name
        assert sorted(tmp_path.rglob("*")) == before, name


def _allocate_a_pebibyte() -> None:
    torch.empty(1 << 50, dtype=torch.uint8)


def _out_of_gpu_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has …")


def _out_of_pythons_memory() -> None:
    raise MemoryError


@pytest.mark.parametrize("fail", [_allocate_a_pebibyte, _out_of_gpu_memory, _out_of_pythons_memory])
def test_too_little_memory_gets_one_line_of_advice(fail, capsys):
    with pytest.raises(Exit) as ended, one_line_errors():
        fail()
    said, more = capsys.readouterr().err.splitlines()
    assert ended.value.exit_code == 1
    assert said.startswith("error: out of memory: use a smaller --batch or --length, or --dtype bfloat16")
    assert ("--device-map auto" in said) == (fail is _out_of_gpu_memory)
    assert more == "more:  theodolite explain memory-and-scaling"


def survey_saving_always(*words: Any) -> None:
    job.CHECKPOINT_SECONDS = 0.0
    command(*words)


def wait_for(path: Path, process: Started) -> None:
    """Until a process has written a file."""
    deadline = time.monotonic() + 240
    while not path.exists():
        assert process.running(), process.end()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", slow_but([signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]))
def test_a_stopped_survey_resumes_to_the_same_tables(number, checkpoint, text, tmp_path):
    """As by a scheduler, or at Ctrl-C; tests/chaos kills."""
    model = checkpoint("gpt2")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    reading = ["--corpus", text, "--length", 32, "--batch", 1, "--contexts", 12]
    assert call("survey", model, *reading, "--out", whole)[0] == 0
    process = Started(survey_saving_always, "survey", model, *reading, "--out", parts, folder=tmp_path)
    wait_for(tmp_path / "parts.partial" / "corpus.safetensors", process)
    os.kill(process.pid, number)
    status, _, stderr = process.end()
    assert status == 130
    assert not parts.exists()
    assert not (tmp_path / "parts.lock").exists()
    assert "error: interrupted; rerun the command to resume" in stderr
    assert call("survey", model, *reading, "--out", parts)[0] == 0
    same_bytes(whole, parts)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["parts", "whole"]


def test_what_saves_no_progress_does_not_promise_to_resume(checkpoint, tmp_path, monkeypatch):
    words = ["spectra", checkpoint("gpt2"), "--out", tmp_path / "run"]
    monkeypatch.setattr("theodolite.report.page.write_report", lambda *_: signal.raise_signal(signal.SIGINT))
    status, _, stderr = call(*words)
    assert status == 130
    assert stderr.splitlines()[-1] == "error: interrupted"


@pytest.mark.parametrize(
    ("after_the_passes", "presses"),
    [("theodolite.passes.survey.tabulate", 1), ("theodolite.report.page.write_report", 2)],
)
def test_ctrl_c_after_the_passes_ends_in_a_line_and_no_pass_is_made_again(
    after_the_passes, presses, checkpoint, text, tmp_path, monkeypatch
):
    """Oracle: the signal itself, once and twice, while tables are made and while the report is written."""
    out = tmp_path / "run"
    words = ["survey", checkpoint("gpt2"), "--corpus", text, "--length", 32, "--contexts", 6, "--out", out]
    module, _, name = after_the_passes.rpartition(".")
    work = getattr(importlib.import_module(module), name)

    def interrupted(*arguments, **options):
        for _ in range(presses):
            signal.raise_signal(signal.SIGINT)
        return work(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(after_the_passes, interrupted)
        status, _, stderr = call(*words)
    assert status == 130, stderr
    assert stderr.count("error: interrupted; rerun the command to resume") == 1
    assert "stopping after this step" in " ".join(stderr.split())
    assert "Traceback" not in stderr

    def read_again(*_):
        pytest.fail("a pass was made again")

    monkeypatch.setattr(OpenModel, "forward", read_again)
    assert call(*words)[0] == 0
    assert (out / "report" / "index.html").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "text.txt"]


def test_a_terminal_that_cannot_write_greek_gets_escapes(surveyed, checkpoint, rows, monkeypatch):
    """Oracle: the same tables written as UTF-8."""

    def printed(encoding: str, *words: object) -> bytes:
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "argv", ["theodolite", *map(str, (*survey, *words))])
        with redirect_stdout(stream), pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        stream.flush()
        return stream.buffer.getvalue()

    survey = ("survey", checkpoint("gpt2"), "--out", surveyed, "--length", 32)  # which is there already
    survey += ("--corpus", rows, "--label-by", "column:kind", "--per-label", 2)
    monkeypatch.setenv("COLUMNS", "40")  # so narrow that a table has ellipses
    assert rb"\u" in printed("ascii")
    one, other = (printed(encoding, "--json") for encoding in ("ascii", "utf-8"))
    assert one.isascii()
    assert json.loads(one) == json.loads(other)


def test_a_reader_that_leaves_is_no_error():
    """Oracle: what other programs end with where `| head` has read enough."""
    words = [sys.executable, "-m", "theodolite", "explain"]
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")


def test_deepspeed_writes_nothing_in_front_of_json(tmp_path):
    """Oracle: its logger, whose handler writes to standard output, after a command has begun."""
    CliRunner().invoke(app, ["runs", str(tmp_path)])
    logger = logging.getLogger("DeepSpeed")
    assert not logger.filter(logging.makeLogRecord({"levelno": logging.WARNING}))
    assert logger.filter(logging.makeLogRecord({"levelno": logging.ERROR}))
