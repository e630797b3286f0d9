"""Two kills and a handful of the other trials of the chaos suite; `make chaos` runs them all.

Oracle: the same command undisturbed, and the rule of `commands`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from tests.chaos import files, kills
from tests.chaos.commands import BAD, COMMANDS, Command, Trial
from tests.processes import Started


def bad(trials: Iterable[Trial]) -> list[Trial]:
    tried = list(trials)
    assert tried
    return [trial for trial in tried if trial.answer in BAD]


def careless(root: Path) -> None:
    """Write a file under its own name, and take what is there for all of it."""
    out = root / "out"
    out.mkdir(exist_ok=True)
    if not (out / "numbers").exists():
        (out / "numbers.writing").write_text("0123456789" * 9)
        (out / "numbers.writing").rename(out / "numbers")
    if not (out / "more").exists():
        with open(out / "more", "w") as file:
            file.write("01234")
            file.flush()
            (out / "between").write_text("")
            file.write("56789")


def killed() -> None:
    """Print what is wrong after kills of two commands and of `careless`; where nothing has been computed, to fork."""
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    for name in ("survey", "prune"):
        print(name, bad(kills.of_command(name, random, 1)))
    COMMANDS["careless"] = Command(careless)
    for trial in bad(kills.of_command("careless", random, 16)):
        print(f"{trial.what}: {trial.said}")


def test_what_was_killed_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    """And a command that would not is found."""
    status, stdout, stderr = Started(killed, folder=tmp_path).end()
    assert status == 0, stderr
    survey, prune, *wrong = stdout.splitlines()
    assert (survey, prune) == ("survey []", "prune []")
    for when in ("before open out/between", "after open out/between", "after open out/more"):
        assert any(line.startswith(f"{when}: other bytes in out/") for line in wrong)
    assert "numbers.writing" not in stdout


HANDFUL = {
    ("run/run.json", "nested deeply"),
    ("run/*.parquet", "a bit flipped"),
    ("run/arrays.safetensors", "rubbish"),
    ("half.partial/corpus.safetensors", "cut near its end"),
    ("half.partial/job.json", "{}"),
}


def test_a_handful_of_tampered_files() -> None:
    chosen = [way for way in files.all_ways() if (way[0], way[2]) in HANDFUL]
    assert {(way[0], way[2]) for way in chosen} == HANDFUL
    assert bad(files.tried(chosen, 0)) == []
