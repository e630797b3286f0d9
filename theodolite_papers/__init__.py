"""Reproduce published tables and figures for any model, with a verdict on each claim."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from theodolite_papers.catalogue import EXPERIMENTS, find, reproduce
from theodolite_papers.declarations import Alias, aliases

if TYPE_CHECKING:
    from theodolite_papers.experiment import Experiment, Study

    ALIASES: dict[str, Alias]

__all__ = ["ALIASES", "EXPERIMENTS", "Experiment", "Study", "find", "reproduce"]


def __getattr__(name: str) -> Any:
    if name == "ALIASES":
        return aliases()
    if name in ("Experiment", "Study"):
        from theodolite_papers import experiment

        return getattr(experiment, name)
    raise AttributeError(f"module 'theodolite_papers' has no attribute '{name}'")
