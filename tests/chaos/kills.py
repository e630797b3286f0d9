"""kill -9 at random moments: does the same command then give the bytes of one that was never stopped?

`python -m tests.chaos.kills --kills 100 --seed 0` takes every command that can be gone on with (survey, trace, prune,
and the trainings), on tiny models and texts. Each is first run whole, and timed. Then, in turns, it is started anew,
killed at a moment drawn evenly from that time, started again, killed again (`IN_A_ROW` times at most), and let end.
All bytes of its folder must be those of the whole run, but for the wall time (`without_times`), and nothing may lie
beside it. A command runs in a fork of this process, which has imported everything and computed nothing, so that a
moment falls into the work and not into imports. The table says in which state of the disk the kills found each.

The exit status is 1 where anything differs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from rich.console import Console

import theodolite.cli.app
import theodolite.papers.catch_tag_release.traced_sinks
import theodolite.passes.survey
import theodolite.prune
import theodolite.report.page
import theodolite.report.pruned_model
import theodolite.sinks.trace
from tests import checkpoints
from theodolite.corpus.documents import Document
from theodolite.papers.catch_tag_release import few_shot_training as few_shot
from theodolite.papers.catch_tag_release import no_op_training
from theodolite.papers.localization import locater_grid as grid
from theodolite.papers.localization.grid_text import TextFiles
from theodolite.papers.localization.locater_training import Recipe, Setting
from theodolite.papers.training import task_models, tasks
from theodolite.papers.training.embedded_text import Source
from theodolite.papers.training.models import EmbeddedConfig

IN_A_ROW = 2
"""Kills of one try, before it may end."""

LATE = 0.25
"""Share of the moments that are drawn from the last tenth of the time, where the result is written."""

TEXT = "The theodolite stands on its tripod; one reads the angle twice, and then a third time. " * 60


@dataclass(frozen=True)
class Stage:
    """A command: what it is called, and what runs it into a folder."""

    name: str
    run: Callable[[Path], object]


@dataclass
class Tally:
    """What the kills of a stage found: the state of the disk at each, and what was wrong afterwards."""

    seconds: float
    found: Counter[str]
    wrong: list[str]


TIME = re.compile(rb"(wall_seconds\W[^0-9]{1,60}?)[0-9.e+-]+")
NONCE = re.compile(rb"nonce\W{1,2}[0-9a-f]{32}")

STATES = ("nothing yet", "in between", "writing", "written")


def stages(folder: Path) -> list[Stage]:
    """Every command that goes on where it was killed; models and texts are written to `folder`."""
    model = checkpoints.write("gpt2", folder / "model")
    text = folder / "text.txt"
    text.write_text(TEXT)
    read = (str(model), "--corpus", str(text), "--length", "32", "--batch", "1", "--contexts")
    found = [Stage(name, partial(_command, name, *read, "8")) for name in ("survey", "trace")]
    for form in ("merged", "factored"):
        options = (*read, "24", "--format", form)
        found.append(Stage(f"prune, {form}", partial(_command, "prune", *options)))
    return found + _trainings(text)


def _command(*arguments: str | Path) -> None:
    """Run a command on the last argument; progress is saved after every batch."""
    *words, out = map(str, arguments)
    theodolite.passes.survey.survey.__wrapped__.__kwdefaults__["checkpoint_seconds"] = 0.0
    theodolite.sinks.trace.trace_sinks.__wrapped__.__kwdefaults__["checkpoint_seconds"] = 0.0
    theodolite.cli.app.app([*words, "--out", out], prog_name="theodolite")


def _trainings(text: Path) -> list[Stage]:
    quiet = Console(quiet=True)
    sizes = task_models.TaskModelConfig(2, 2, 16, 4, 20, 1e-3, "cosine", checkpoint_every=4, series=True)

    def characters(out: Path) -> None:
        task = tasks.Characters.of_file(text)
        task_models.train_task_model(out, task, sizes, threads=1, console=quiet)

    def shots(out: Path) -> None:
        task = few_shot.FewShot()
        task_models.train_task_model(out, task, replace(sizes, positions="rotary"), threads=1, console=quiet)

    def no_op_models(out: Path) -> None:
        config = EmbeddedConfig(2, 2, 16, 16, 270, 4, 8, checkpoint_every=2)
        documents = tuple(Document(TEXT + str(number)) for number in range(12))
        sources = [Source("text", 1.0, documents)]
        no_op_training.train_no_op_models(
            out, seeds=1, sources=sources, config=config, threads=1, console=quiet
        )

    def locater(out: Path) -> None:
        recipe = replace(Recipe(), length=16, batch=4, vocabulary=None, measure_every=3, checkpoint_every=2)
        settings = [Setting(layers=1, width=8, seed=0, scale=100.0, mean=0.1), Setting(1, 8, 0)]
        files = TextFiles(text, text, recipe.length, recipe.batch, None)
        grid.train_grid(grid.Job(out, recipe, 9, "cpu"), settings, files, quiet)

    named = {"characters": characters, "few-shot": shots, "escape": no_op_models, "locater": locater}
    return [Stage(f"train {name}", run) for name, run in named.items()]


def main(kills: int, seed: int, only: str = "") -> int:
    torch.set_num_threads(1)
    random = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory(prefix="kills-") as place:
        folder = Path(place)
        chosen = [stage for stage in made(folder) if only in stage.name]
        for stage in chosen:
            whole(stage, folder)  # the first one finds nothing in the caches of the disk
        wholes = [whole(stage, folder) for stage in chosen]
        tallies = [Tally(seconds, Counter(), []) for _, seconds in wholes]
        rounds = 0
        while sum(tally.found.total() for tally in tallies) < kills:
            for stage, (expected, _), tally in zip(chosen, wholes, tallies, strict=True):
                attempt(stage, folder / f"try-{rounds}", expected, tally, random)
            rounds += 1
    print_table(chosen, tallies)
    return int(any(tally.wrong for tally in tallies))


def made(folder: Path) -> list[Stage]:
    """`stages`, made in a fork: writing a model computes, and this process must not have computed."""
    child = _fork(lambda: stages(folder))
    assert _ended(child) == 0
    write, checkpoints.write = checkpoints.write, lambda family, path, *_: path
    try:
        return stages(folder)
    finally:
        checkpoints.write = write


def whole(stage: Stage, folder: Path) -> tuple[dict[str, bytes], float]:
    """All that an uninterrupted run leaves, and the seconds that it took."""
    out = folder / "whole" / "out"
    began = time.monotonic()
    status = _ended(_fork(lambda: stage.run(out)))
    seconds = time.monotonic() - began
    if status:
        raise SystemExit(f"{stage.name} fails by itself (status {status})")
    found = contents(out.parent)
    shutil.rmtree(out.parent)
    return found, seconds


def attempt(
    stage: Stage, place: Path, expected: dict[str, bytes], tally: Tally, random: np.random.Generator
) -> None:
    """Kill a run once or twice, let it end, and compare."""
    out = place / "out"
    moments = []
    for _ in range(IN_A_ROW):
        low = 0.9 if random.random() < LATE else 0.0
        moments.append(random.uniform(low, 1.0) * tally.seconds)
        child = _fork(lambda: stage.run(out))
        time.sleep(moments[-1])
        os.kill(child, signal.SIGKILL)
        status = _ended(child)
        if status != -signal.SIGKILL:
            break
        tally.found[state(out)] += 1
    if status == -signal.SIGKILL:
        status = _ended(_fork(lambda: stage.run(out)))
    found = contents(place)
    names = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if status or names:
        when = ", ".join(f"{moment:.3f}" for moment in moments)
        tally.wrong.append(f"{stage.name}: killed at {when} s; status {status}; {', '.join(names)}")
    shutil.rmtree(place)


def state(out: Path) -> str:
    """How far a run was when it was killed, by what is on the disk."""
    beside = list(out.parent.glob("*")) if out.parent.is_dir() else []
    if any(path.name.endswith((".writing", "finished")) for path in out.parent.rglob("*")):
        return "writing"
    if out.is_dir() and any(out.iterdir()):
        return "written" if not out.with_name(out.name + ".partial").exists() else "writing"
    return "in between" if any(path.suffix == ".partial" for path in beside) else "nothing yet"


def contents(folder: Path) -> dict[str, bytes]:
    """Every file under a folder, without the times that it tells."""
    return {
        str(path.relative_to(folder)): without_times(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def without_times(path: Path) -> bytes:
    """The bytes of a file, but for how long the work took. A page's nonce is its hash, and so follows from that."""
    data = path.read_bytes()
    if path.suffix in (".json", ".html"):
        data = TIME.sub(rb"\1", data)
    return NONCE.sub(b"nonce", data) if path.suffix == ".html" else data


def _fork(work: Callable[[], object]) -> int:
    """Run `work` in a fork, silently; its number."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, *(() if os.environ.get("KILLS_SHOW") else (2,))):
            os.dup2(null, stream)
        torch.set_num_threads(1)
        work()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(status)


def _ended(child: int) -> int:
    """Wait for a fork; its exit status, or −N where signal N ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def print_table(chosen: Sequence[Stage], tallies: Sequence[Tally]) -> None:
    print(
        f"{'':18} {'whole':>7} {'kills':>6} " + " ".join(f"{name:>12}" for name in STATES) + f" {'wrong':>6}"
    )
    for stage, tally in zip(chosen, tallies, strict=True):
        counts = " ".join(f"{tally.found[name]:12}" for name in STATES)
        print(f"{stage.name:18} {tally.seconds:5.2f} s {tally.found.total():6} {counts} {len(tally.wrong):6}")
    for tally in tallies:
        for line in tally.wrong:
            print(line)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of the name of the commands to try")
    given = parser.parse_args()
    raise SystemExit(main(given.kills, given.seed, given.only))
