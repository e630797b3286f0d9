"""`theodolite train locater`: what its options mean, and what to say of the grid that it trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, cast, get_args

from rich.console import Console

from theodolite.errors import UsageError, WorkError
from theodolite.papers.localization.grid_text import TextFiles
from theodolite.papers.localization.locater_grid import Grid, Job, read_grid, train_grid
from theodolite.papers.localization.locater_training import Recipe
from theodolite.train.penalty import Gradient

PUBLISHED_STEPS = 50_000
WORDS = "words"

Value = TypeVar("Value", int, float)


@dataclass(frozen=True)
class LocaterOptions:
    """As given on the command line; numbers joined by commas; None: as published (`Grid`, `Recipe`).

    Attributes:
        text, held_out: files to train on and to judge on.
        layers, widths: depths and sizes d.
        means: κ₂. decays: weight decays without LocAteR. An empty text: none of them.
        gradient: exact or published.
        vocabulary: tokens of the BPE, or `words`.
        seeds, steps: how many of each.
        side_by_side: processes, a core for each.
        device: of all of them.
    """

    text: Path
    held_out: Path
    layers: str | None = None
    widths: str | None = None
    means: str | None = None
    decays: str | None = None
    gradient: str = "exact"
    vocabulary: str | None = None
    seeds: int = 3
    steps: int | None = None
    side_by_side: int = 1
    device: str = "cpu"


def train_locater(out: Path, options: LocaterOptions, console: Console) -> list[str]:
    """Train what is missing of the grid; returns a line on each training run.

    Raises:
        UsageError: an option is wrong, or as `train_grid`.
        WorkError: as `train_grid`.
    """
    if options.gradient not in get_args(Gradient):
        raise UsageError(f"--gradient is '{options.gradient}'; choose {' or '.join(get_args(Gradient))}.")
    if options.seeds < 1:
        raise UsageError(f"--seeds is {options.seeds}; give 1 or more.")
    recipe = replace(Recipe(), vocabulary=_vocabulary(options.vocabulary))
    published = Grid()
    grid = Grid(
        layers=_numbers("layers", options.layers, int, published.layers),
        widths=_numbers("widths", options.widths, int, published.widths),
        seeds=options.seeds,
        means=_numbers("means", options.means, float, published.means),
        weight_decays=_numbers("decays", options.decays, float, published.weight_decays),
        gradient=cast(Gradient, options.gradient),
    )
    files = TextFiles(options.text, options.held_out, recipe.length, recipe.batch, recipe.vocabulary)
    steps = PUBLISHED_STEPS if options.steps is None else options.steps
    settings = grid.settings()
    train_grid(Job(out, recipe, steps, options.device), settings, files, console, options.side_by_side)
    names = {setting.name for setting in settings}
    unfinished = names - {
        run.setting.name
        for run in read_grid(out)[1]
        if run.summary is not None and run.summary["step"] >= steps
    }
    if unfinished:
        raise WorkError(
            f"{len(unfinished)} of {len(names)} training runs are not at step {steps}; another process is working on "
            "them: wait for it, then rerun the command"
        )
    return _lines(out, names)


def _numbers(
    name: str, given: str | None, kind: Callable[[str], Value], published: tuple[Value, ...]
) -> tuple[Value, ...]:
    if given is None:
        return published
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


def _lines(out: Path, names: set[str]) -> list[str]:
    lines = []
    for run in read_grid(out)[1]:
        if run.setting.name in names and run.summary is not None:
            loss, error = run.summary["held_out_loss"], run.summary["held_out_loss_se"]
            lines.append(
                f"{run.setting.name}: step {run.summary['step']}, held-out perplexity {math.exp(loss):.2f} "
                f"(± {math.exp(loss) * error:.2f} over contexts)"
            )
    return lines
