"""Stages that only count: what is resumed, kept and refused, without a model."""

from __future__ import annotations

import functools
from typing import Any

import pandas as pd
import pytest
import torch

from theodolite.errors import UsageError
from theodolite.jobs import job
from theodolite.jobs.job import Stage, States, Steps, Unfinished
from theodolite.passes.run import SCHEMA_VERSION, TABLES_TITLE, Run, run_into
from theodolite.system.files import read_checked, write_checked
from theodolite.system.progress import Progress

NAMES = ["first", "second", "third"]
STEPS = 4


class Count:
    """Adds 1 a step to the last sum of the stage before it, and writes down every step that it makes."""

    def __init__(self, name: str, begin: float, steps: list[str]) -> None:
        self.name, self.steps = name, steps
        self.total = STEPS
        self.notes: dict[str, Any] = {"made": []}
        self._sum = torch.tensor([begin])

    def run(self, progress: Progress) -> None:
        for step in range(progress.done, self.total):
            progress.checkpoint(step)
            self._sum += 1
            self.notes["made"].append(step)
            self.steps.append(f"{self.name} {step}")
        progress.checkpoint(self.total)

    def state(self) -> dict[str, torch.Tensor]:
        return {"sum": self._sum}

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        self._sum = state["sum"].clone()


def tabulate(states: States) -> Run:
    provenance = {"schema_version": SCHEMA_VERSION, "model": {"id": "m"}, "fingerprint": {"a": 1}}
    provenance |= {"notes": states.notes, "seconds": states.seconds}
    arrays = {name: states.of(name)["sum"] for name in NAMES}
    return Run(heads=pd.DataFrame({"layer": [0], "head": [0]}), arrays=arrays, provenance=provenance)


def run(out, steps, stop=None, *, fingerprint=None) -> Run:
    """All three stages; `stop` is a title and the steps done at which to raise."""

    def make(name: str, states: States) -> Steps:
        before = NAMES[NAMES.index(name) - 1]
        return Count(name, float(states.of(before)["sum"]) if states.notes else 0.0, steps)

    def show(title: str, done: int, total: int) -> None:
        assert total == (1 if title == TABLES_TITLE else STEPS)
        if stop == (title, done):
            raise KeyboardInterrupt

    stages = [Stage(name, f"the {name}", functools.partial(make, name)) for name in NAMES]
    return run_into(
        stages,
        tabulate,
        out,
        fingerprint or {"a": 1},
        show_progress=show,
    )


EVERY_STEP = [f"{name} {step}" for name in NAMES for step in range(STEPS)]


def test_each_stage_begins_with_the_states_of_those_before_it():
    steps: list[str] = []
    made = run(None, steps)
    assert steps == EVERY_STEP
    assert {name: float(made.arrays[name]) for name in NAMES} == {"first": 4, "second": 8, "third": 12}


@pytest.mark.parametrize("seconds", [0, 1e9])
@pytest.mark.parametrize("title", [f"the {name}" for name in NAMES])
@pytest.mark.parametrize("done", [0, 2, STEPS])
def test_what_was_stopped_goes_on_from_there(tmp_path, title, done, seconds, monkeypatch):
    """No step is made twice and none is left out: a stop is heard between steps, where all is saved."""
    monkeypatch.setattr(job, "CHECKPOINT_SECONDS", seconds)
    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", steps, (title, done))
    assert not (tmp_path / "run").exists()
    made = run(tmp_path / "run", steps)
    assert steps == EVERY_STEP
    assert float(made.arrays["third"]) == 12
    assert made.provenance["notes"] == {name: {"made": list(range(STEPS))} for name in NAMES}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_stage_that_fails_between_checkpoints_leaves_those_before_it(tmp_path, monkeypatch):
    steps: list[str] = []

    def fail(self, progress: Progress) -> None:
        if self.name == "third":
            raise RuntimeError("lost")
        whole(self, progress)

    whole = Count.run
    monkeypatch.setattr(Count, "run", fail)
    with pytest.raises(RuntimeError, match="lost"):
        run(tmp_path / "run", steps)
    work = Unfinished(tmp_path / "run", {"a": 1})
    assert work.names() == ["first", "second"]
    for name, total in (("first", 4), ("second", 8)):
        tensors, notes = work.load(name)
        assert (float(tensors["sum"]), notes["finished"]) == (total, True)
    monkeypatch.undo()
    run(tmp_path / "run", steps)
    assert steps == EVERY_STEP


def test_seconds_are_those_of_all_calls(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", [], ("the second", 2))
    path = tmp_path / "run.partial" / "second.safetensors"
    tensors, notes = read_checked(path)
    write_checked(path, tensors, notes | {"seconds": 1000.0})
    assert 1000 <= run(tmp_path / "run", []).provenance["seconds"] < 1100


def test_another_fingerprint_is_refused_before_and_after_the_end(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", [], ("the second", 2))
    with pytest.raises(UsageError, match="holds an unfinished survey of another model, corpus or options"):
        run(tmp_path / "run", [], fingerprint={"a": 2})
    run(tmp_path / "run", [])
    steps: list[str] = []
    with pytest.raises(UsageError, match="holds a run of another model"):
        run(tmp_path / "run", steps, fingerprint={"a": 2})
    assert float(run(tmp_path / "run", steps).arrays["third"]) == 12
    assert steps == []


def test_a_state_that_lacks_a_sum_is_refused(tmp_path):
    """As a version left it that did not keep it yet."""
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", [], ("the first", 2))
    path = tmp_path / "run.partial" / "first.safetensors"
    _, notes = read_checked(path)
    write_checked(path, {}, notes)
    with pytest.raises(UsageError, match="unfinished work of another version of theodolite"):
        run(tmp_path / "run", [])
