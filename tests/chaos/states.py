"""What a program may have set elsewhere, drawn together: no number may change, and all stays as it was.

In this process one to four states at a time, entered in any order, around one of `ENTRIES` on a tiny model, or several
in threads; a survey in processes of its own, in other environments. Oracle: the same where nobody has touched anything.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests import checkpoints
from tests.chaos.commands import (
    REFUSED,
    RIGHT,
    TEXT,
    UNFORESEEN,
    WRONG,
    Trial,
    contents,
    is_refusal,
    other_bytes,
)
from tests.chaos.entries import ENTRIES, difference
from tests.chaos.settings import OTHERS, STATES, TOLERANCES, seen
from theodolite.errors import TheodoliteError
from theodolite.models import OpenModel, open_model

FAMILIES = ("gpt2", "llama3", "gemma2", "gpt_oss", "bert", "bloom")

TRIALS = 220
"""Of states drawn together; each takes about half a second."""

THREADS = 60
"""Trials of threads."""

OF_THE_PROCESS = ("bfloat16", "float64", "rounded products", "plain attention", "no attention")
"""States that threads share; one of them is set in half of their trials."""

AT_ONCE = 4
"""At most so many states together, or so many threads."""


def drawn(names: list[str], rng: np.random.Generator) -> list[str]:
    """One to four of them, in any order."""
    return [str(name) for name in rng.permutation(names)[: rng.integers(1, AT_ONCE + 1)]]


class Models:
    """Tiny models of several families, each with what its calls give where nobody has set anything."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: dict[str, OpenModel] = {}
        self._known: dict[tuple[str, str], Any] = {}

    def opened(self, family: str) -> OpenModel:
        if family not in self._opened:
            path = checkpoints.write(family, self._folder / family)
            self._opened[family] = open_model(path)
        return self._opened[family]

    def untouched(self, family: str, entry: str) -> Any:
        if (family, entry) not in self._known:
            self._known[family, entry] = outcome(entry, self.opened(family))
        return self._known[family, entry]


def outcome(entry: str, model: OpenModel) -> Any:
    """What a call gives, or the line in which it is refused."""
    try:
        return ENTRIES[entry](model)
    except TheodoliteError as error:
        return error


def trials(seed: int, share: float) -> Iterator[Trial]:
    """States drawn together around calls, and commands in environments."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory(prefix="states-") as place:
        models = Models(Path(place))
        for _ in range(round(TRIALS * share)):
            states = drawn([*STATES, *OTHERS], rng)
            call = str(rng.choice(list(ENTRIES))), str(rng.choice(FAMILIES))
            yield of_calls(models, [call], states)
        if names := rng.permutation(list(ENVIRONMENTS))[: round(share * len(ENVIRONMENTS))].tolist():
            yield from of_environments(Path(place) / "environments", names)


def of_calls(models: Models, calls: list[tuple[str, str]], names: list[str]) -> Trial:
    """A call of an entry on a family, or several that begin at once in threads, while some states are set."""
    threads = len(calls) > 1
    model = models.opened(calls[0][1])
    expected = [models.untouched(family, entry) for entry, family in calls]
    tolerance = max((TOLERANCES.get(name, 0.0) for name in names), default=0.0)
    what = " beside ".join(f"{entry} of {family}" for entry, family in calls)
    trial = ("threads" if threads else "states", " in ".join(reversed(names)), what)
    works = [partial(outcome, entry, models.opened(family)) for entry, family in calls]
    try:
        with ExitStack() as states:
            for name in names:
                states.enter_context((STATES | OTHERS)[name](model))
            before = seen(None if threads else model)
            results = in_threads(*works) if threads else [works[0]()]
            now = seen(None if threads else model)
    except Exception as error:
        return Trial(*trial, UNFORESEEN, f"{type(error).__name__}: {error}")
    # One who puts the process's generator back may do so while another thread draws from it.
    left_out = {"torch's generator"} if threads else set()
    if changed := [name for name in now.keys() - left_out if before.get(name) != now[name]]:
        return Trial(*trial, WRONG, f"left changed: {', '.join(changed)}")
    for ours, alone in zip(results, expected, strict=True):
        answer, said = judged(ours, alone, tolerance)
        if answer != RIGHT:
            return Trial(*trial, WRONG if threads and answer == REFUSED else answer, said)
    return Trial(*trial, RIGHT)


def judged(ours: Any, alone: Any, tolerance: float) -> tuple[str, str]:
    """A result beside that of the same call alone, where either may be a refusal."""
    if isinstance(ours, Exception) and str(ours) == str(alone):
        return RIGHT, ""
    if isinstance(ours, Exception):
        one_line = isinstance(ours, TheodoliteError) and len(str(ours).splitlines()) == 1
        return REFUSED if one_line else UNFORESEEN, f"{type(ours).__name__}: {ours}"
    if isinstance(alone, TheodoliteError):
        return WRONG, f"not refused: {alone}"
    with torch.inference_mode():  # what was made there may not be compared elsewhere
        other = difference(ours, alone, tolerance)
    return (WRONG, other) if other else (RIGHT, "")


ENVIRONMENTS: dict[str, tuple[dict[str, str], str]] = {
    # name → variables, and what a shell does before
    "ASCII": (
        {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        "",
    ),
    "Latin-1": ({"PYTHONIOENCODING": "latin-1"}, ""),
    "a home that takes no files": (
        {"HF_HOME": "/proc/none", "HOME": "/proc/none", "XDG_CACHE_HOME": "/proc/none"},
        "",
    ),
    "umask 077": ({}, "umask 077; "),
    "a folder that is gone": ({}, 'mkdir "$D/gone"; cd "$D/gone"; rmdir "$D/gone"; '),
    "no compiler": ({"TORCH_COMPILE_DISABLE": "1", "TORCHDYNAMO_DISABLE": "1"}, ""),
    "narrow terminal": ({"COLUMNS": "20", "TERM": "dumb", "NO_COLOR": "1"}, ""),
    "strict warnings": ({"PYTHONWARNINGS": "error"}, ""),
    "no assertions": ({"PYTHONOPTIMIZE": "1"}, ""),
    "hashes": ({"PYTHONHASHSEED": "77"}, ""),
    "time zone": ({"TZ": "Asia/Kathmandu"}, ""),
    "few files": ({}, "ulimit -n 64; "),
    "closed output": ({}, "exec >&-; "),
    "closed errors": ({}, "exec 2>&-; "),
    "closed input": ({}, "exec <&-; "),
    "development mode": ({"PYTHONDEVMODE": "1"}, ""),
}
"""Of the whole process; each leaves all files of a survey as they are."""


def of_environments(folder: Path, names: Sequence[str]) -> Iterator[Trial]:
    """A survey in a process of its own, against one where nobody has set anything."""
    checkpoints.write("gpt2", folder / "model")
    (folder / "text.txt").write_text(TEXT)
    status, said = surveyed(folder, {}, "")
    assert not status, said
    expected = contents(folder)
    for name in names:
        status, said = surveyed(folder, *ENVIRONMENTS[name])
        other = "" if status else other_bytes(contents(folder), expected)  # nothing is left beside
        answer = (REFUSED if is_refusal(status, said) else UNFORESEEN) if status else RIGHT
        said = f"other bytes in {other}" if other else f"status {status}: {said[-600:]}"
        yield Trial("states", name, "theodolite survey", WRONG if other else answer, said)


def surveyed(folder: Path, variables: dict[str, str], before: str) -> tuple[int, str]:
    """Status and errors of a survey under these variables, after these words of a shell."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    words = '"$PYTHON" -m theodolite survey "$D/model" --corpus "$D/text.txt" --length 16 --contexts 4 --out "$D/run"'
    root = str(Path(__file__).parents[2])
    own = {"D": str(folder), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    done = subprocess.run(
        ["bash", "-c", before + words], env=os.environ | own | variables, capture_output=True, text=True,
        errors="replace", timeout=300, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


IN_THREADS = [entry for entry in ENTRIES if entry != "edited"]
"""An intervention that is open is so for all threads, and is not among them."""


def thread_trials(seed: int, share: float) -> Iterator[Trial]:
    """Two to four threads that begin at once, on one model or on several: what each gives alone."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory(prefix="threads-") as place:
        models = Models(Path(place))
        for _ in range(round(THREADS * share)):
            count = int(rng.integers(2, AT_ONCE + 1))
            families = rng.choice(FAMILIES, size=count if rng.random() < 0.5 else 1)
            calls = [
                (str(rng.choice(IN_THREADS)), str(families[number % len(families)]))
                for number in range(count)
            ]
            states = [str(rng.choice(OF_THE_PROCESS))] if rng.random() < 0.5 else []
            yield of_calls(models, calls, states)


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """What each gives, or raises, begun at the same moment; one that does not end within two minutes is an error."""
    results: dict[int, Any] = {}
    begin = threading.Barrier(len(works))

    def run(number: int) -> None:
        begin.wait()
        try:
            results[number] = works[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    return [results.get(number, TimeoutError("it had not ended")) for number in range(len(works))]
