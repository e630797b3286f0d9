"""Each published table and figure by name: made again for a model that one names, with a verdict on each claim.

An experiment reads a `Run` and, where it must, the model; what it gives is plain data, tables and Plotly figures.
"""

from __future__ import annotations

from theodolite.experiments.base import Comparison, Experiment, Outcome, Verdict
from theodolite.experiments.page import write_index, write_outcome
from theodolite.experiments.registry import ALIASES, EXPERIMENTS, find
from theodolite.experiments.study import Focus, Study, reproduce

__all__ = [
    "ALIASES",
    "EXPERIMENTS",
    "Comparison",
    "Experiment",
    "Focus",
    "Outcome",
    "Study",
    "Verdict",
    "find",
    "reproduce",
    "write_index",
    "write_outcome",
]
