"""Kills of a few commands; `python -m tests.chaos kills` has some 300.

In processes of their own: they fork, which is sound only where nothing has been computed before.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

IMPORTS = """
import sys
from pathlib import Path
from tests.chaos import kills
from tests.chaos.trials import BAD
"""


def in_a_process(code: str, *words: str) -> str:
    """What some lines of Python print that may use the suite."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS + code, *words],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


TRIALS = """
trials = list(kills.trials(int(sys.argv[1]), float(sys.argv[2])))
print(len(trials), [trial for trial in trials if trial.answer in BAD])
"""


@pytest.mark.parametrize(
    ("seed", "share"), [("1", "0.01"), pytest.param("0", "0.04", marks=pytest.mark.slow)]
)
def test_what_was_killed_goes_on_to_the_same_bytes(seed: str, share: str) -> None:
    """Oracle: all bytes of an uninterrupted run, but for its wall time."""
    count, _, wrong = in_a_process(TRIALS, seed, share).strip().partition(" ")
    assert int(count) >= 4
    assert wrong == "[]"


CARELESS = """
import numpy as np

def run(out):
    out.mkdir(exist_ok=True)
    if not (out / "numbers").exists():
        (out / "numbers.writing").write_text("0123456789" * 9)
        kills.os.replace(out / "numbers.writing", out / "numbers")
    if not (out / "more").exists():
        with open(out / "more", "w") as file:  # what is there by this name may be half of it
            file.write("01234")
            file.flush()
            (out / "between").write_text("")
            file.write("56789")

place = Path(sys.argv[1]) / "try"
trials = list(kills.of_stage(kills.Stage("careless", run), place, np.random.default_rng(0), 1.0))
print(sorted({trial.what + ": " + trial.said for trial in trials if trial.answer in BAD and " at " not in trial.what}))
"""


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    """A command that writes a file under its own name, and takes what is there for all of it."""
    found = in_a_process(CARELESS, str(tmp_path))
    for when in ("before open out/between", "after open out/between", "after open out/more"):
        assert f"{when}: run 2: other bytes in out/" in found
    assert "numbers.writing" not in found
