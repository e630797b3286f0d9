"""Each published table and figure by name: made again for a model that one names, with a verdict on each claim.

An experiment reads a `Run` and, where it must, the model; what it gives is plain data, tables and Plotly figures.
"""

from __future__ import annotations

from theodolite.judging import Verdict
from theodolite.models.prompts import Focus
from theodolite.papers.catalogue import ALIASES, EXPERIMENTS, find, reproduce
from theodolite.papers.experiment import Experiment, Study
from theodolite.report.outcome import Outcome, Reading
from theodolite.report.outcome_page import write_index, write_outcome

__all__ = [
    "ALIASES",
    "EXPERIMENTS",
    "Experiment",
    "Focus",
    "Outcome",
    "Reading",
    "Study",
    "Verdict",
    "find",
    "reproduce",
    "write_index",
    "write_outcome",
]
