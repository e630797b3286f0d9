"""A survey in shards against the survey of one process."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests import checkpoints
from tests.calls import call, same_bytes
from theodolite import merge
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.jobs import job
from theodolite.jobs.job import Unfinished
from theodolite.models import open_model
from theodolite.passes import survey as survey_module
from theodolite.passes.run import Run
from theodolite.passes.survey import chunks_of, chunks_of_shard, packed, survey, unpacked
from theodolite.passes.survey_pass import SurveyPass
from theodolite.system.files import locked

BATCH, CONTEXTS, LENGTH = 2, 40, 32
SCALING = Path(__file__).parent.parent.parent / "docs" / "scaling.md"


@pytest.fixture(autouse=True)
def few_chunks(monkeypatch):
    """Longer than a batch, as of a long text: 10 of two batches."""
    monkeypatch.setattr(survey_module, "CHUNKS", 10)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    drawn = Corpus.random_tokens(checkpoints.VOCABULARY, LENGTH, CONTEXTS)
    return Corpus("drawn", drawn.contexts, torch.arange(CONTEXTS) % 3, ["a", "b", "c"], 0)


@pytest.fixture(scope="module")
def alone(opened, corpus, tmp_path_factory) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survey_module, "CHUNKS", 10)
        return survey(opened("gpt2"), corpus, tmp_path_factory.mktemp("alone") / "run", batch=BATCH)


class Stopped(Exception):
    """Raised where a test stops a survey."""


def stop_at(steps: int):
    def show(what: str, done: int, total: int) -> None:
        if done >= steps:
            raise Stopped

    return show


def test_shards_in_any_order_give_the_bytes_of_one_process(alone, opened, corpus, tmp_path, monkeypatch):
    """One is stopped in the middle of a chunk, and goes on."""
    monkeypatch.setattr(job, "CHECKPOINT_SECONDS", 0)
    out, model = tmp_path / "run", opened("gpt2")
    for number in (8, 2, 5, 1, 4, 7, 3, 6):
        shard = number, 8
        with pytest.raises(Stopped):
            survey(model, corpus, out, batch=BATCH, shard=shard, show_progress=stop_at(2))
        assert not out.exists()
        read: list[int] = []
        survey(
            model,
            corpus,
            out,
            batch=BATCH,
            shard=shard,
            show_progress=lambda what, done, total, read=read: read.append(done),
        )
        assert read[0] == 2
        survey(model, corpus, out, batch=BATCH, shard=shard, show_progress=stop_at(0))  # it is read
    run = merge(out)
    same_bytes(alone.folder, out)
    assert {**run.provenance, "wall_seconds": 0} == {**alone.provenance, "wall_seconds": 0}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert merge(out).heads.equals(run.heads)  # from disk
    survey(model, corpus, out, batch=BATCH, shard=(1, 2), show_progress=stop_at(0))
    assert not list(tmp_path.glob("*.partial"))


def test_one_process_goes_on_with_what_shards_have_read(alone, opened, corpus, tmp_path):
    out = tmp_path / "run"
    survey(opened("gpt2"), corpus, out, batch=BATCH, shard=(2, 3))
    survey(opened("gpt2"), corpus, out, batch=BATCH)
    same_bytes(alone.folder, out)


def test_missing_shards_are_named(opened, corpus, tmp_path):
    out, model = tmp_path / "run", opened("gpt2")
    with pytest.raises(UsageError, match=r"no shards at .*run: survey each with --shard K/N"):
        merge(out)
    for number in (1, 3, 4):
        survey(model, corpus, out, batch=BATCH, shard=(number, 5))
    with pytest.raises(UsageError, match="run lacks shards 2/5, 5/5: run what is missing"):
        merge(out)
    survey(model, corpus, out, batch=BATCH, shard=(5, 5))
    status, _, errors = call("merge", out)
    assert (status, "run lacks shard 2/5: run what is missing" in errors) == (2, True)


def test_two_processes_on_one_shard_are_told_what_else_to_choose(opened, corpus, tmp_path):
    out = tmp_path / "run"
    survey(opened("gpt2"), corpus, out, batch=BATCH, shard=(1, 3))
    says = r"another process is writing to .*chunk-\d+: wait, or choose another shard or another --out"
    with ExitStack() as held:
        for chunk in chunks_of(len(corpus.contexts), BATCH):
            held.enter_context(locked(tmp_path / "run.partial" / chunk.name))
        with pytest.raises(UsageError, match=says):
            survey(opened("gpt2"), corpus, out, batch=BATCH, shard=(2, 3))


def test_shards_of_something_else_are_refused(opened, corpus, tmp_path):
    out, model = tmp_path / "run", opened("gpt2")
    survey(model, corpus, out, batch=BATCH, shard=(1, 2))
    with pytest.raises(UsageError, match=r"unfinished survey of another .*--seed 0 there, 1 now"):
        survey(model, corpus, out, batch=BATCH, seed=1, shard=(2, 2))
    with pytest.raises(UsageError, match=r"run\.partial holds shards of 2: give --shard K/2, or remove it"):
        survey(model, corpus, out, batch=BATCH, shard=(1, 3))
    survey(model, corpus, out, batch=BATCH, shard=(2, 2))
    with pytest.raises(UsageError, match="unfinished survey of another model"):
        merge(out, opened("llama2"))


def test_a_shard_that_lacks_a_sum_is_refused_in_a_line(opened, corpus, tmp_path):
    out = tmp_path / "run"
    for number in (1, 2):
        survey(opened("gpt2"), corpus, out, batch=BATCH, shard=(number, 2))
    work = Unfinished(out, {})
    sums, notes = work.load("chunk-001")
    work.save("chunk-001", {name: sums[name] for name in sums if name != "massive.count"}, notes)
    with pytest.raises(
        UsageError, match=r"run\.partial holds unfinished work of another version .* with other sums"
    ):
        merge(out)


def test_a_model_in_memory_is_given_to_merge(corpus, tmp_path):
    model = open_model(checkpoints.build("gpt2"))
    for number in (1, 2):
        survey(model, corpus, tmp_path / "run", batch=BATCH, shard=(number, 2))
    with pytest.raises(UsageError, match=r"was in memory only: give it, merge\(folder, model\)"):
        merge(tmp_path / "run")
    assert len(merge(tmp_path / "run", model).layers) == 4


def test_shards_that_are_none_are_refused(opened, corpus, tmp_path):
    out, model = tmp_path / "run", opened("gpt2")
    for shard, says in (
        ((0, 3), "no shard 0 of 3"),
        ((4, 3), "no shard 4 of 3"),
        ((1, 11), "cut into 10 chunks"),
    ):
        with pytest.raises(UsageError, match=says):
            survey(model, corpus, out, batch=BATCH, shard=shard)
    with pytest.raises(UsageError, match="say which, the same for all shards"):
        survey(model, corpus, shard=(1, 2))


@pytest.mark.parametrize(("contexts", "batch"), [(27, 2), (1, 4), (8, 8), (100_000, 8), (4097, 4)])
def test_chunks_cover_every_context_once_in_whole_batches(contexts, batch, monkeypatch):
    monkeypatch.setattr(survey_module, "CHUNKS", 64)
    whole = chunks_of(contexts, batch)
    assert [chunk.first for chunk in whole] == [0, *(chunk.last for chunk in whole[:-1])]
    assert whole[-1].last == contexts
    assert all(chunk.first % batch == 0 for chunk in whole)
    assert len(whole) <= 64
    for count in range(1, len(whole) + 1):
        shards = [chunks_of_shard(whole, (number, count)) for number in range(1, count + 1)]
        assert [chunk for shard in shards for chunk in shard] == whole
        assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_what_is_zero_is_left_out_of_a_chunk(opened, corpus):
    """A part of a text fills one group of contexts: most of a state is left out, and nothing is lost."""
    part = SurveyPass(opened("gpt2"), corpus, 0, BATCH)
    part.read(0, 2)
    state = part.state()
    saved = packed(state)
    back = unpacked(saved)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)
    assert saved["means.position_sum"].shape == (4, 1, LENGTH, 32)
    assert sum(map(torch.Tensor.numel, saved.values())) < 0.5 * sum(map(torch.Tensor.numel, state.values()))


@pytest.mark.slow
def test_the_script_of_the_docs_gives_the_bytes_of_one_process(checkpoint, tmp_path):
    """Every task of the array in a process of its own, as SLURM starts it."""
    page = SCALING.read_text(encoding="utf-8")
    script = next(block for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if "SLURM" in block)
    assert len(script.splitlines()) <= 10
    tasks = range(1, 1 + int(re.search(r"--array=1-(\d+)", script)[1]))
    shutil.copytree(checkpoint("gpt2"), tmp_path / "gpt2")
    text = "The theodolite stands on its tripod; one reads the angle twice, and then a third time. "
    (tmp_path / "notes.txt").write_text(text * 120)
    (tmp_path / "survey.sh").write_text(script)
    command = tmp_path / "theodolite"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m theodolite "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    here = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **here}

    def run(*words: str, **variables: str) -> None:
        done = subprocess.run(
            words, cwd=tmp_path, env={**environment, **variables}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr

    for task in tasks:
        run("bash", "survey.sh", SLURM_ARRAY_TASK_ID=str(task))
    run("theodolite", "merge", "runs/gpt2")
    run(*["theodolite", "survey", "gpt2", "--corpus", "notes.txt", "--batch", "8", "--out", "runs/alone"])
    same_bytes(tmp_path / "runs" / "alone", tmp_path / "runs" / "gpt2")
    assert (tmp_path / "runs" / "gpt2" / "report" / "index.html").is_file()
