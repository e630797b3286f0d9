"""Experiments that are read from a folder of training runs instead of a model: which folder belongs to which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from theodolite.papers.catch_tag_release.few_shot import FIGURE_3, few_shot_run, is_few_shot
from theodolite.papers.catch_tag_release.no_op_option import NO_OP, is_no_op_folder, no_op_run
from theodolite.papers.experiment import Experiment
from theodolite.papers.localization.locater_figures import REGULARISED, grid_run
from theodolite.papers.localization.locater_grid import is_grid
from theodolite.passes.run import Run


@dataclass(frozen=True)
class TrainingFolder:
    """A kind of folder: the command that writes it, how it is recognised, the stand-in for its run, what is read "
    "from it."""

    command: str
    is_there: Callable[[Path], bool]
    run: Callable[[Path], Run]
    experiments: Sequence[Experiment]


KINDS = (
    TrainingFolder("theodolite train locater", is_grid, grid_run, REGULARISED),
    TrainingFolder("theodolite train escape", is_no_op_folder, no_op_run, NO_OP),
    TrainingFolder("theodolite train few-shot", is_few_shot, few_shot_run, FIGURE_3),
)


def training_folder_at(place: str | Path) -> TrainingFolder | None:
    """What kind of training runs a folder holds, if any."""
    return next((kind for kind in KINDS if kind.is_there(Path(place))), None)


def made_by(experiments: Sequence[Experiment]) -> str | None:
    """The command whose folder all of these are read from; None where they need a model or nothing."""
    names = {experiment.name for experiment in experiments}
    return next((k.command for k in KINDS if names <= {e.name for e in k.experiments}), None)
