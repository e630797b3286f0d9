"""Folders of training runs, from which some experiments are read instead of a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from theodolite_papers.catch_tag_release.few_shot import few_shot_provenance, is_few_shot
from theodolite_papers.localization.locater_figures import grid_provenance
from theodolite_papers.localization.locater_grid import is_grid

KINDS = {
    is_grid: grid_provenance,
    is_few_shot: few_shot_provenance,
}


def provenance_reader(place: str | Path) -> Callable[[Path], dict[str, Any]] | None:
    """What reads the provenance of the training runs in a folder; None where there are none."""
    return next((read for is_there, read in KINDS.items() if is_there(place)), None)
