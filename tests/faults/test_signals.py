"""A terminal that is closed: progress is saved and the lock removed, as at Ctrl-C (tests/cli) and kills (tests/chaos).

Oracle: the process itself, its exit status and the files that it leaves.
"""

from __future__ import annotations

import os
import pty
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_cli import TEXT, survey_saving_always, wait_for
from tests.processes import Started
from theodolite.passes.run import Workspace


def _in_a_terminal(terminal: str, *words: Any) -> None:
    """The first process of a terminal of its own; it waits after every step, so that it is found at work."""
    os.setsid()
    opened = os.open(terminal, os.O_RDWR)  # the first that such a process opens becomes its own
    for descriptor in (1, 2):
        os.dup2(opened, descriptor)
    save = Workspace.save_progress

    def slowly(*arguments: Any) -> None:
        save(*arguments)
        time.sleep(0.5)

    Workspace.save_progress = slowly  # type: ignore[method-assign]
    survey_saving_always("survey", *words)


@pytest.mark.chaos
def test_a_terminal_that_is_closed_loses_nothing(checkpoint, tmp_path: Path) -> None:
    """Nothing can be said there any more: writing to it is an error of its own."""
    (tmp_path / "text.txt").write_text(TEXT)
    read = (checkpoint("gpt2"), "--corpus", tmp_path / "text.txt", "--length", 32, "--batch", 1)
    read += ("--contexts", 4)
    master, terminal = pty.openpty()
    process = Started(_in_a_terminal, os.ttyname(terminal), *read, "--out", tmp_path / "run", folder=tmp_path)
    wait_for(tmp_path / "run.partial" / "progress.safetensors", process)
    os.close(terminal)
    os.close(master)
    assert process.end()[0] == 130
    assert {path.name for path in tmp_path.glob("run*")} == {"run.partial"}
