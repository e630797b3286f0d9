"""The commands that the chaos suite kills: each writes a folder, on tiny models and texts, in about a second."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from rich.console import Console

import theodolite.cli.app
import theodolite.comparison.command
import theodolite.evaluate.command
import theodolite.passes.survey
import theodolite.prune
import theodolite.report.page
import theodolite.report.pruned_model
import theodolite.sinks.exclusions
import theodolite.sinks.trace
from tests import checkpoints
from theodolite.cli.screen import one_line_errors
from theodolite_papers.catalogue import EXPERIMENTS
from theodolite_papers.localization import locater_grid as grid
from theodolite_papers.localization.grid_text import TextFiles
from theodolite_papers.localization.locater_training import Recipe, Setting
from theodolite_papers.training import task_models, tasks

TEXT = "The theodolite stands on its tripod; one reads the angle twice, and then a third time. " * 60

list(EXPERIMENTS.values())  # their modules are imported


@dataclass(frozen=True)
class Stage:
    """A command.

    Attributes:
        run: runs it into a folder.
        first: what is in the folder before it runs for the first time, a folder itself.
        kills: how often it is killed at file events; fewer where it takes long.
    """

    name: str
    run: Callable[[Path], object]
    first: Path | None = None
    kills: int = 16


LONG = {
    "survey",
    "prune, merged",
    "prune, factored",
    "compare",
    "reproduce, model",
}
"""Commands that take about a second."""


def stages(folder: Path) -> list[Stage]:
    """Every command that writes; the models, texts and runs that it reads are written to `folder`."""
    model, other = (checkpoints.write("gpt2", folder / f"model-{seed}", seed) for seed in (0, 1))
    text = folder / "text.txt"
    text.write_text(TEXT)
    read = ("--corpus", text, "--length", "32", "--batch", "1", "--contexts")
    run = folder / "run"
    if not run.exists():
        _quietly(partial(_command, "survey", model, *read, "4"), run)

    found = [Stage(name, partial(_command, name, model, *read, "4")) for name in ("survey", "trace")]
    for form in ("merged", "factored"):
        options = (*read, "12", "--format", form)
        found.append(Stage(f"prune, {form}", partial(_command, "prune", model, *options)))
    found += [
        Stage("spectra", partial(_command, "spectra", model)),
        Stage("compare", partial(_command, "compare", model, other, *read, "2", "--length", "16")),
        Stage("evaluate", partial(_command, "evaluate", model, other, *read, "4", within="scores.json")),
        Stage("exclude", partial(_command, "exclude", run, within="rules.json")),
        Stage("report", lambda out: _call("report", out, "--csv", out / "tables"), run),
        Stage(
            "reproduce, theory", partial(_command, "reproduce", "localization/figure1,localization/figure3")
        ),
        Stage(
            "reproduce, model",
            partial(
                _command, "reproduce", "geometry/table1,geometry/figure2", model, *read[:4], "--contexts", "4"
            ),
        ),
    ]
    return [replace(stage, kills=8) if stage.name in LONG else stage for stage in found + _trainings(text)]


def _quietly(work: Callable[[Path], object], out: Path) -> None:
    with suppress(SystemExit):
        work(out)


def _command(*words: str | Path, within: str = "") -> None:
    """Run a command on the last argument, or a file in it; progress is saved after every batch."""
    *arguments, out = words
    _call(*arguments, "--out", Path(out) / within)


def _call(*words: str | Path) -> None:
    for measure in (theodolite.passes.survey.survey, theodolite.sinks.trace.trace_sinks):
        measure.__wrapped__.__kwdefaults__["checkpoint_seconds"] = 0.0  # type: ignore[attr-defined]
    theodolite.cli.app.app([*map(str, words)], prog_name="theodolite")


def _trainings(text: Path) -> list[Stage]:
    """Trainings smaller than the commands can make them, and ended as those are."""
    quiet = Console(quiet=True)

    def characters(out: Path) -> None:
        config = task_models.TaskModelConfig(2, 2, 16, 4, 20, 1e-3, "cosine", checkpoint_every=4, series=True)
        config = replace(config, positions="learned")
        task_models.train_task_model(out, tasks.Characters.of_file(text), config, threads=1, console=quiet)

    def locater(out: Path) -> None:
        recipe = replace(Recipe(), length=16, batch=4, vocabulary=None, measure_every=3, checkpoint_every=2)
        settings = [Setting(layers=1, width=8, seed=0, scale=100.0, mean=0.1), Setting(1, 8, 0)]
        files = TextFiles(text, text, recipe.length, recipe.batch, None)
        grid.train_grid(grid.Job(out, recipe, 9, "cpu"), settings, files, quiet)

    named = {"characters": characters, "locater": locater}
    return [Stage(f"train {name}", partial(_with_one_line, run)) for name, run in named.items()]


def _with_one_line(run: Callable[[Path], object], out: Path) -> None:
    with one_line_errors():
        run(out)


def first_time(stage: Stage, out: Path) -> None:
    """What is there before a command runs."""
    if stage.first is not None:
        shutil.copytree(stage.first, out)
