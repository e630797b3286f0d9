"""Signals that ask a command to end: its progress is saved and its lock removed, as at Ctrl-C.

Oracle: the process itself, its exit status and the files that it leaves.
"""

from __future__ import annotations

import os
import pty
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_cli import TEXT, wait_for
from tests.processes import Started, command
from tests.slow import chaos_but
from theodolite.prune.checkpoint import UnfinishedPruning
from theodolite_papers.training import training_loop


def _slowly(*words: Any) -> None:
    """Progress is saved at every step, which then waits, so that a signal finds the command at work."""
    import theodolite.passes.survey
    import theodolite.sinks.trace
    from theodolite.passes.run import Workspace

    for work in (theodolite.passes.survey.survey, theodolite.sinks.trace.trace_sinks):
        work.__wrapped__.__kwdefaults__["checkpoint_seconds"] = 0.0  # type: ignore[attr-defined]
    for owner, name in (
        (Workspace, "save_progress"),
        (UnfinishedPruning, "save"),
        (training_loop, "save_checkpoint"),
    ):
        setattr(owner, name, _then_waiting(getattr(owner, name)))
    command(*words)


def _then_waiting(work: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*arguments: Any) -> None:
        work(*arguments)
        time.sleep(0.5)

    return slow


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def _commands(model: Path, text: Path) -> dict[str, tuple[list[object], str]]:
    """Each with what says that it has begun: of a training the untrained model, once signals wait for a step's end."""
    read = [model, "--corpus", text, "--length", 32, "--batch", 1, "--contexts", 4]
    tiny = ["characters", "--text", text, "--steps", 260, "--batch", 1, "--threads", 1, "--series"]
    return {
        "survey": (["survey", *read], "progress.safetensors"),
        "trace": (["trace", *read], "progress.safetensors"),
        "prune": (["prune", *read, "--method", "wanda"], "block-000.safetensors"),
        "train": (["train", *tiny], "series/000000"),
    }


CALLS = [
    ("survey", signal.SIGTERM),
    ("trace", signal.SIGHUP),
    ("prune", signal.SIGTERM),
    ("train", signal.SIGTERM),
]


@pytest.mark.parametrize(("name", "number"), chaos_but(CALLS[:1], CALLS))
def test_a_signal_that_ends_it_ends_it_as_ctrl_c_does(
    name: str, number: int, checkpoint, text: Path, tmp_path: Path
) -> None:
    words, begun = _commands(checkpoint("gpt2"), text)[name]
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    process = Started(_slowly, *words, "--out", out, folder=tmp_path)
    wait_for(partial / begun, process)
    os.kill(process.pid, number)
    status, _, stderr = process.end()
    assert status == 130, stderr
    assert "error: interrupted; rerun the command to resume" in stderr
    assert not out.exists()
    assert not (tmp_path / "out.lock").exists()
    assert list(partial.glob("*.safetensors"))


def _in_a_terminal(terminal: str, *words: Any) -> None:
    """The first process of a terminal of its own."""
    os.setsid()
    opened = os.open(terminal, os.O_RDWR)  # the first that such a process opens becomes its own
    for descriptor in (1, 2):
        os.dup2(opened, descriptor)
    _slowly(*words)


@pytest.mark.chaos
def test_a_terminal_that_is_closed_loses_nothing(checkpoint, text: Path, tmp_path: Path) -> None:
    """Nothing can be said there any more: writing to it is an error of its own."""
    words, begun = _commands(checkpoint("gpt2"), text)["survey"]
    master, terminal = pty.openpty()
    process = Started(
        _in_a_terminal, os.ttyname(terminal), *words, "--out", tmp_path / "run", folder=tmp_path
    )
    wait_for(tmp_path / "run.partial" / begun, process)
    os.close(terminal)
    os.close(master)
    assert process.end()[0] == 130
    assert {path.name for path in tmp_path.glob("run*")} == {"run.partial"}
