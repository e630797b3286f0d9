"""kill -9 at random moments, a few of them; `python -m tests.chaos.kills` has a hundred.

In a process of its own: it forks, which is sound only where nothing has been computed before.
"""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["trace", "train locater"])
def test_what_was_killed_goes_on_to_the_same_bytes(stage: str) -> None:
    """Oracle: all bytes of an uninterrupted run, but for its wall time."""
    command = [sys.executable, "-m", "tests.chaos.kills", "--kills", "3", "--seed", "1", "--only", stage]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert stage in done.stdout
