"""Oracles: the signal of Ctrl-C itself, the words of a refusal, an uninterrupted run.

By way of the trainer of additions, which is the quickest.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.papers.shared import hashes, quiet
from tests.papers.training.test_tasks import TINY
from theodolite.errors import UsageError, WorkError
from theodolite.system.files import read_checked
from theodolite_papers.training.models import TaskModelConfig, train_task_model
from theodolite_papers.training.tasks import Additions

SMALL = replace(TINY, checkpoint_every=4, dropout=0.2)


def adder(out: Path, **change: object) -> None:
    train_task_model(out, Additions(), replace(SMALL, **change), threads=1, console=quiet())


def at_step(monkeypatch: pytest.MonkeyPatch, wanted: int, act: Callable[[], object]) -> list[int]:
    """Do `act` in the middle of a step, once its learning rate is asked; gives the steps that begin."""
    begun: list[int] = []
    at = TaskModelConfig.rate

    def rate(self: TaskModelConfig, step: int) -> float:
        begun.append(step)
        if step == wanted:
            act()
        return at(self, step)

    monkeypatch.setattr(TaskModelConfig, "rate", rate)
    return begun


def kill() -> None:
    raise KeyboardInterrupt


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def saved_step(partial: Path) -> str:
    return str(read_checked(partial / "checkpoint.safetensors")[1]["step"])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("uninterrupted") / "model"
    adder(out)
    return hashes(out)


def test_unfinished_work_is_not_taken_over_by_another_training(tmp_path, uninterrupted, monkeypatch):
    """Oracle: the words; the uninterrupted run for the training it is of."""
    partial = tmp_path / "m.partial"
    at_step(monkeypatch, 5, kill)
    with pytest.raises(KeyboardInterrupt):
        adder(tmp_path / "m")
    monkeypatch.undo()
    assert sorted(path.name for path in partial.iterdir()) == ["checkpoint.safetensors", "job.json"]
    before = hashes(partial)
    for change in ({"seed": 1}, {"steps": 5}, {"dropout": 0.1}):
        with pytest.raises(
            UsageError,
            match=r"holds an unfinished training run of another model, corpus or options \(.* there, ",
        ):
            adder(tmp_path / "m", **change)
    assert hashes(partial) == before
    adder(tmp_path / "m")
    assert hashes(tmp_path / "m") == uninterrupted
    assert not partial.exists()


def test_ctrl_c_saves_the_last_whole_step(tmp_path, uninterrupted, monkeypatch):
    """Oracle: the signal itself, in the middle of the update of step 1 of 6, and the uninterrupted run."""
    begun = at_step(monkeypatch, -1, press)
    update = torch.optim.AdamW.step

    def pressed(self: torch.optim.AdamW) -> None:
        if begun == [0, 1]:
            press()
        update(self)

    monkeypatch.setattr(torch.optim.AdamW, "step", pressed)
    with pytest.raises(KeyboardInterrupt):
        adder(tmp_path / "m")
    assert begun == [0, 1]
    assert saved_step(tmp_path / "m.partial") == "2"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.undo()
    begun = at_step(monkeypatch, -1, press)
    adder(tmp_path / "m")
    assert begun == [2, 3, 4, 5]
    assert hashes(tmp_path / "m") == uninterrupted


def test_a_finished_training_is_done(tmp_path, uninterrupted, monkeypatch):
    """Oracle: its own files, after a kill behind the rename (which leaves more), and the words."""
    adder(tmp_path / "m")
    (tmp_path / "m.partial").mkdir()
    at_step(monkeypatch, 0, lambda: pytest.fail("a step was taken again"))
    adder(tmp_path / "m")
    assert hashes(tmp_path / "m") == uninterrupted
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    for change, differs in (({"seed": 1}, "--seed 0 there, 1 now"), ({"steps": 5}, "steps 6 there, 5 now")):
        with pytest.raises(UsageError, match=f"another training run .{differs}.; give another folder"):
            adder(tmp_path / "m", **change)
    assert hashes(tmp_path / "m") == uninterrupted


def test_weights_that_are_no_numbers_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last update breaks them, whose loss no step sees. Oracle: the checkpoint of step 4 stays as it is."""
    at = TaskModelConfig.rate
    monkeypatch.setattr(
        TaskModelConfig, "rate", lambda self, step: float("inf") if step == 5 else at(self, step)
    )
    said = "weights are no longer finite numbers: remove .*/m.partial, and train with a lower rate"
    with pytest.raises(WorkError, match=said):
        adder(tmp_path / "m")
    assert saved_step(tmp_path / "m.partial") == "4"
    assert not (tmp_path / "m").exists()


def test_a_last_loss_that_is_no_number_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finite weights may be so large that their loss is not."""
    step = torch.optim.AdamW.step
    steps: list[int] = []

    def last(self: torch.optim.AdamW) -> None:
        step(self)
        steps.append(1)
        if len(steps) == 6:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.fill_(1e38)

    monkeypatch.setattr(torch.optim.AdamW, "step", last)
    said = r"loss was (nan|inf) at step 6: remove .*/m.partial, and train with a lower rate"
    with pytest.raises(WorkError, match=said):
        adder(tmp_path / "m", bfloat16=False)
    assert not (tmp_path / "m").exists()
