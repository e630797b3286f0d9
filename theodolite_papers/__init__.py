"""Each published table and figure by name: made again for a model that one names, with a verdict on each claim."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from theodolite_papers.catalogue import ALIASES, EXPERIMENTS, find, reproduce

if TYPE_CHECKING:
    from theodolite_papers.experiment import Experiment, Study

_HOMES = {
    "Experiment": "theodolite_papers.experiment",
    "Study": "theodolite_papers.experiment",
}

__all__ = ["ALIASES", "EXPERIMENTS", "Experiment", "Study", "find", "reproduce"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'theodolite_papers' has no attribute '{name}'")
