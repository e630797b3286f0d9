"""`theodolite train locater`: what its options mean, and what to say of the grid that it trained."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast, get_args

from rich.console import Console

from theodolite.errors import UsageError, WorkError
from theodolite.passes.corpus_pass import perplexity_of
from theodolite.system.processor import multiplies_halves
from theodolite.train.penalty import Gradient
from theodolite_papers.localization.grid_text import TextFiles
from theodolite_papers.localization.locater_grid import Grid, Job, read_grid, train_grid
from theodolite_papers.localization.locater_training import PUBLISHED_STEPS, Recipe, Reduction

WORDS = "words"


def train_locater(
    out: Path,
    text: Path,
    held_out: Path,
    console: Console,
    *,
    seeds: int = 3,
    steps: int | None = None,
    gradient: str = "exact",
    reduction: str = "mean",
    off_at: int | None = None,
    vocabulary: str | None = None,
    side_by_side: int = 1,
    device: str = "cpu",
    **numbers: str | None,
) -> list[str]:
    """Train what is missing of the grid; returns a line on each training run.

    Args:
        text, held_out: files to train on and to judge on.
        seeds, steps: how many of each.
        gradient: exact or published.
        reduction: of the loss that the penalty is added to: mean or sum.
        off_at: updates after which there is no penalty.
        vocabulary: tokens of the BPE, or `words`.
        side_by_side: processes, a core for each; device: of all of them.
        numbers: layers, widths, scales (κ₁), means (κ₂) and decays of `Grid`, joined by commas; an empty text: none of
            them. None, here and above: as published.

    Raises:
        UsageError: an option is wrong, or as `train_grid`.
        WorkError: as `train_grid`.
    """
    for name, given, choices in (("gradient", gradient, Gradient), ("reduction", reduction, Reduction)):
        if given not in get_args(choices):
            raise UsageError(f"--{name} is '{given}'; choose {' or '.join(get_args(choices))}.")
    if seeds < 1:
        raise UsageError(f"--seeds is {seeds}; give 1 or more.")
    recipe = Recipe(vocabulary=_vocabulary(vocabulary), bfloat16=multiplies_halves(device))
    lists: dict[str, Any] = {
        name: _numbers(name, given) for name, given in numbers.items() if given is not None
    }
    settings = Grid(
        seeds=seeds,
        gradient=cast(Gradient, gradient),
        reduction=cast(Reduction, reduction),
        off_at=off_at,
        **lists,
    ).settings()
    files = TextFiles(text, held_out, recipe.length, recipe.batch, recipe.vocabulary)
    steps = PUBLISHED_STEPS if steps is None else steps
    train_grid(Job(out, recipe, steps, device), settings, files, console, side_by_side)
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
