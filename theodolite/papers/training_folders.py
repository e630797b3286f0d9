"""Folders of training runs, from which some experiments are read instead of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from theodolite.papers.catch_tag_release.few_shot import few_shot_provenance, is_few_shot
from theodolite.papers.catch_tag_release.no_op_option import is_no_op_folder, no_op_provenance
from theodolite.papers.localization.locater_figures import grid_provenance
from theodolite.papers.localization.locater_grid import is_grid


@dataclass(frozen=True)
class TrainingFolder:
    """A kind of folder: the command that writes it, how it is recognised, and its provenance."""

    command: str
    is_there: Callable[[Path], bool]
    provenance: Callable[[Path], dict[str, Any]]


KINDS = (
    TrainingFolder("theodolite train locater", is_grid, grid_provenance),
    TrainingFolder("theodolite train escape", is_no_op_folder, no_op_provenance),
    TrainingFolder("theodolite train few-shot", is_few_shot, few_shot_provenance),
)


def training_folder_at(place: str | Path) -> TrainingFolder | None:
    """What kind of training runs a folder holds, if any."""
    return next((kind for kind in KINDS if kind.is_there(Path(place))), None)
