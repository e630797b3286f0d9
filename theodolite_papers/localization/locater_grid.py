"""A grid of LocAteR training runs (Bao et al. 2024, Figs. 6–12): which settings, resumable."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pandas as pd
import pyarrow
import torch
from filelock import FileLock, Timeout
from jaxtyping import Float
from rich.console import Console
from torch import Tensor

from theodolite.errors import TheodoliteError, UsageError, WorkError, first_line
from theodolite.passes.corpus_pass import perplexity_of
from theodolite.system.checksums import read_checked
from theodolite.system.files import check_target, disk_errors, folder_purpose
from theodolite.system.interrupt import STOPPING, interruptible
from theodolite.system.processor import multiplies_halves
from theodolite.system.threads import using_threads as using
from theodolite.train.penalty import Gradient
from theodolite_papers.localization.grid_text import TextFiles, kept_text, load_text
from theodolite_papers.localization.locater_training import (
    PUBLISHED_STEPS,
    LocaterTraining,
    Recipe,
    Reduction,
    Setting,
)

WORDS = "words"


def train_locater(
    out: Path,
    text: Path,
    held_out: Path,
    console: Console,
    *,
    seeds: int = 3,
    steps: int | None = None,
    gradient: Gradient = "exact",
    reduction: Reduction = "mean",
    vocabulary: str | None = None,
    device: str = "cpu",
    **numbers: str | None,
) -> list[str]:
    """Train what is missing of the grid; returns a line on each training run.

    vocabulary: tokens of the BPE, or `words`. numbers: layers, widths, scales (κ₁), means (κ₂) and decays of `Grid`,
    joined by commas; an empty text: none of them. None: as published.
    """
    for name, given, choices in (("gradient", gradient, Gradient), ("reduction", reduction, Reduction)):
        if given not in get_args(choices):
            raise UsageError(f"--{name} is '{given}'; choose {' or '.join(get_args(choices))}.")
    if seeds < 1:
        raise UsageError(f"--seeds is {seeds}; give 1 or more.")
    recipe = Recipe(vocabulary=_vocabulary(vocabulary), bfloat16=multiplies_halves(device))
    how: dict[str, Any] = {
        name: _numbers(name, given) for name, given in numbers.items() if given is not None
    }
    settings = Grid(seeds=seeds, gradient=gradient, reduction=reduction, **how).settings()
    files = TextFiles(text, held_out, recipe.length, recipe.batch, recipe.vocabulary)
    steps = PUBLISHED_STEPS if steps is None else steps
    train_grid(Job(out, recipe, steps, device), settings, files, console)
    names = {setting.name for setting in settings}
    summaries = {run.setting.name: run.summary for run in read_grid(out)[1] if run.summary}
    unfinished = [name for name in names if name not in summaries or summaries[name]["step"] < steps]
    if unfinished:
        raise WorkError(
            f"{len(unfinished)} of {len(names)} training runs are not at step {steps}; another process is working on "
            "them: wait for it, then rerun the command"
        )
    lines = []
    for name, summary in summaries.items():
        if name in names:
            perplexity = perplexity_of(summary["held_out_loss"])
            error = perplexity * (summary["held_out_loss_se"] or math.nan)  # null: one window
            lines.append(
                f"{name}: step {summary['step']}, held-out perplexity {perplexity:.2f} (± {error:.2f} over contexts)"
            )
    return lines


def _numbers(name: str, given: str) -> tuple[Any, ...]:
    kind = int if name in ("layers", "widths") else float
    try:
        return tuple(dict.fromkeys(kind(part) for part in given.split(",") if part.strip()))
    except ValueError:
        raise UsageError(f"--{name} is '{given}'; give numbers with commas between them.") from None


def _vocabulary(given: str | None) -> int | None:
    if given is None:
        return Recipe().vocabulary
    if given == WORDS:
        return None
    if not given.isdecimal():
        raise UsageError(f"--vocabulary is '{given}'; give a number of tokens, or {WORDS}.")
    return int(given)


ROUND = 5000
"""Steps that every training run takes before any goes further."""

RUN_FOLDERS = "points"
CLAIM = "grid.json"


@dataclass(frozen=True)
class Grid:
    """The published settings, and as many weight decays without LocAteR.

    seeds: 0 … seeds − 1. scales, means: κ₁ and κ₂ of the LocAteR training runs. decays: of those without; 0.01 is the
    published one. gradient, reduction: as in `Setting`.
    """

    layers: tuple[int, ...] = (1,)
    widths: tuple[int, ...] = (32,)
    seeds: int = 3
    scales: tuple[float, ...] = (100.0,)
    means: tuple[float, ...] = (0.0, 1e-3, 1e-2, 1e-1, 1.0)
    decays: tuple[float, ...] = (0.0, 0.01, 0.1, 1.0, 10.0)
    gradient: Gradient = "exact"
    reduction: Reduction = "mean"

    def settings(self) -> list[Setting]:
        """Every setting; a seed's before the next seed's."""
        settings = []
        how = Setting(gradient=self.gradient, reduction=self.reduction)
        for layers, width, seed in product(self.layers, self.widths, range(self.seeds)):
            pairs = product(self.scales, self.means)
            kinds = [replace(how, scale=scale, mean=mean) for scale, mean in pairs]
            kinds += [Setting(weight_decay=decay) for decay in self.decays]
            settings += [replace(kind, layers=layers, width=width, seed=seed) for kind in kinds]
        return settings


@dataclass(frozen=True)
class Job:
    """What a process needs to know besides its settings."""

    folder: Path
    recipe: Recipe
    steps: int
    device: str


def train_grid(job: Job, settings: list[Setting], files: TextFiles, console: Console) -> None:
    """Bring every setting to `job.steps` steps."""
    for what, number in (("setting", len(settings)), ("step", job.steps)):
        if number < 1:
            raise UsageError(f"there is nothing to train: give at least one {what}.")
    for setting in settings:
        setting.check()
    check_target(job.folder)
    with disk_errors(job.folder):
        job.folder.mkdir(parents=True, exist_ok=True)
    with FileLock(job.folder / "lock"):
        kept_text(job.folder, files)
        _claim(job)
    console.print(f"{len(settings)} training runs of {job.steps} steps in {job.folder}")

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    with interruptible(lambda: say(STOPPING)) as pressed:
        failed = _train_all(settings, job, pressed, say)
    if failed:
        raise WorkError("; ".join(failed))


def _claim(job: Job) -> None:
    """Write into the folder how its training runs are made, unless it says the same already."""
    claim = {**asdict(job.recipe), "device": torch.device(job.device).type}
    if folder_purpose(job.folder / CLAIM, claim) != claim:
        raise UsageError(f"{job.folder} holds a grid of another recipe or device; choose another folder.")


def _train_all(
    settings: list[Setting], job: Job, stop: Callable[[], bool], say: Callable[[str], None]
) -> list[str]:
    """Train the settings in rounds; the messages of those that failed, which are not tried again."""
    text = load_text(job.folder)
    failed: dict[Setting, str] = {}
    with using(1 if torch.device(job.device).type == "cpu" else torch.get_num_threads()):
        for target in [*range(ROUND, job.steps, ROUND), job.steps]:
            for setting in settings:
                folder = job.folder / RUN_FOLDERS / setting.name
                if stop():
                    return []
                if setting in failed:
                    continue
                folder.mkdir(parents=True, exist_ok=True)
                try:
                    with FileLock(folder / "lock", timeout=0):
                        began = time.perf_counter()
                        training = LocaterTraining(folder, setting, job.recipe, text, job.device)
                        first_step = training.step
                        if training.advance(target, stop) and target == job.steps:
                            training.finish()
                        steps = training.step - first_step
                        if steps:
                            pace = f"{steps / (time.perf_counter() - began):.1f} steps per second"
                            say(f"{setting.name}: {training.progress()}, {pace}")
                except Timeout:
                    say(f"{setting.name}: another process is training it; skipped")
                except TheodoliteError as error:
                    failed[setting] = str(error)
                    say(f"{setting.name}: {error}")
    return list(failed.values())


@dataclass(frozen=True)
class GridRun:
    """What one training run of a grid has given so far.

    propagation: ρ_i of the last query, for `propagation_steps`. summary: on all held-out text; None before the last
    step.
    """

    setting: Setting
    losses: pd.DataFrame
    heads: pd.DataFrame
    propagation: Float[Tensor, "steps layers length"]
    propagation_steps: list[int]
    summary: dict[str, Any] | None


def is_grid(folder: str | Path) -> bool:
    """Whether a grid of training runs is there, finished or not."""
    return (Path(folder) / CLAIM).is_file()


def read_grid(folder: str | Path) -> tuple[dict[str, Any], list[GridRun]]:
    """How a grid's training runs are made, and all of them by name; also while they are running."""
    folder = Path(folder)
    try:
        recipe = json.loads((folder / CLAIM).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{folder} holds no grid; make one with `theodolite train locater`.") from error
    places = sorted((folder / RUN_FOLDERS).glob("*"))
    # The last file of the first save.
    runs = [_grid_run(place) for place in places if (place / "propagation.safetensors").exists()]
    if not runs:
        raise UsageError(f"{folder} holds no saved training run yet; wait for the first checkpoint.")
    return recipe, runs


def _grid_run(folder: Path) -> GridRun:
    summary = folder / "summary.json"
    try:
        setting = Setting(**json.loads((folder / "setting.json").read_text(encoding="utf-8")))
        losses, heads = (pd.read_parquet(folder / f"{name}.parquet") for name in ("losses", "heads"))
        curves, _ = read_checked(folder / "propagation.safetensors")
        end = json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else None
        return GridRun(setting, losses, heads, curves["propagation"], curves["steps"].tolist(), end)
    except (OSError, ValueError, LookupError, TypeError, RecursionError, pyarrow.ArrowException) as error:
        raise UsageError(
            f"{folder} is damaged ({first_line(error)}); remove it and train it again."
        ) from error
