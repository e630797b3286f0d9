"""What a program may have set elsewhere, drawn together: no number may change, and all stays as it was.

In this process one to four states at a time, entered in any order, around one of `ENTRIES` on a tiny model; a survey in
processes of its own, under what the environment says of a process. Threads measure at the same time.

The oracle is the same call in a process that nobody has touched.
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
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests import checkpoints
from tests.chaos.entries import ENTRIES, difference
from tests.chaos.kills import contents
from tests.chaos.settings import OTHERS, STATES, TOLERANCES, seen
from tests.chaos.stages import TEXT
from tests.chaos.trials import REFUSED, RIGHT, UNFORESEEN, WRONG, Trial
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
            yield of_states(models, str(rng.choice(list(ENTRIES))), str(rng.choice(FAMILIES)), states)
        names = rng.permutation(list(ENVIRONMENTS))[: round(share * len(ENVIRONMENTS))]
        yield from of_environments(Path(place), [str(name) for name in names])


def of_states(models: Models, entry: str, family: str, names: list[str]) -> Trial:
    """One call while some states are set."""
    model, expected = models.opened(family), models.untouched(family, entry)
    tolerance = max(TOLERANCES.get(name, 0.0) for name in names)
    trial = ("states", " in ".join(reversed(names)), f"{entry}, {family}")
    try:
        with ExitStack() as states:
            for name in names:
                states.enter_context((STATES | OTHERS)[name](model))
            before = seen(model)
            ours = outcome(entry, model)
            changed = [name for name, value in seen(model).items() if before.get(name) != value]
    except Exception as error:
        return Trial(*trial, UNFORESEEN, f"{type(error).__name__}: {error}")
    if changed:
        return Trial(*trial, WRONG, f"left changed: {', '.join(changed)}")
    if isinstance(ours, TheodoliteError):
        one_line = len(str(ours).splitlines()) == 1
        return Trial(*trial, REFUSED if one_line else UNFORESEEN, str(ours))
    if isinstance(expected, TheodoliteError):
        return Trial(*trial, WRONG, f"not refused: {expected}")
    with torch.inference_mode():  # what was made there may not be compared elsewhere
        other = difference(ours, expected, tolerance)
    return Trial(*trial, WRONG if other else RIGHT, other)


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
    if not names:
        return
    model = folder / "gpt2"
    if not model.exists():
        checkpoints.write("gpt2", model)
    (folder / "text.txt").write_text(TEXT)
    status, said, expected = surveyed(folder, {}, "")
    assert not status, said
    for name in names:
        status, said, files = surveyed(folder, *ENVIRONMENTS[name])
        trial = ("states", name, "theodolite survey")
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        if status:
            foreseen = status > 0 and len(errors) == 1 and "Traceback" not in said
            yield Trial(*trial, REFUSED if foreseen else UNFORESEEN, f"status {status}: {said[-600:]}")
            continue
        files |= {path.name: b"" for path in folder.glob("run.*")}  # nothing is left beside
        other = sorted(key for key in expected.keys() | files.keys() if expected.get(key) != files.get(key))
        yield Trial(*trial, WRONG if other else RIGHT, f"other bytes in {', '.join(other)}" if other else "")


def surveyed(folder: Path, variables: dict[str, str], before: str) -> tuple[int, str, dict[str, bytes]]:
    """Status, errors and files of a survey under these variables, after these words of a shell."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    words = '"$PYTHON" -m theodolite survey "$D/gpt2" --corpus "$D/text.txt" --length 16 --contexts 4 --out "$D/run"'
    own = {
        "D": str(folder),
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        ["bash", "-c", before + words], env=os.environ | own | variables, capture_output=True, text=True,
        errors="replace", timeout=300, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr, contents(folder / "run")


IN_THREADS = [entry for entry in ENTRIES if entry != "edited"]
"""An intervention that is open is so for all threads, and is not among them; `ablation` has the model to itself."""


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
            yield of_threads(models, calls, states)


def of_threads(models: Models, calls: list[tuple[str, str]], names: list[str]) -> Trial:
    """Calls that begin at once while some states are set."""
    expected = [models.untouched(family, entry) for entry, family in calls]
    works = [
        lambda entry=entry, family=family: outcome(entry, models.opened(family)) for entry, family in calls
    ]
    what = " beside ".join(f"{entry} of {family}" for entry, family in calls)
    trial = ("threads", " in ".join([what, *names]), "calls")
    with ExitStack() as states:
        for name in names:
            states.enter_context((STATES | OTHERS)[name](models.opened(calls[0][1])))
        before = seen()
        results = in_threads(*works)
        # One who puts the process's generator back may do so while another draws from it.
        changed = [
            name for name, value in seen().items() if before[name] != value and name != "torch's generator"
        ]
    if changed:
        return Trial(*trial, WRONG, f"left changed: {', '.join(changed)}")
    for (entry, family), ours, alone in zip(calls, results, expected, strict=True):
        if isinstance(ours, Exception) and not isinstance(ours, TheodoliteError):
            return Trial(*trial, UNFORESEEN, f"{entry} of {family}: {type(ours).__name__}: {ours}")
        if isinstance(ours, TheodoliteError) and str(ours) == str(alone):
            continue
        if other := str(ours) if isinstance(ours, Exception) else difference(ours, alone):
            return Trial(*trial, WRONG, f"{entry} of {family}: {other}")
    return Trial(*trial, RIGHT)


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
