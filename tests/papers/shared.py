"""What tests of several papers share."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from theodolite.judging import FAILS, HOLDS, IN_PART, UNDECIDED, UNTESTABLE, Verdict
from theodolite.measure.column import WITHOUT
from theodolite.passes.run import Run
from theodolite.theory.unbiased import Jackknifed
from theodolite_papers.declarations import declarations
from theodolite_papers.experiment import Outcome


def quiet() -> Console:
    """A console that nobody reads."""
    return Console(file=io.StringIO())


def hashes(folder: Path) -> dict[str, str]:
    """Of every file, by its path."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def outcome_of(name: str) -> Outcome:
    """An empty one, with the declaration of an experiment."""
    return Outcome(declared=declarations()[name])


def verdicts_of(
    fill: Callable[..., object], *evidence: object, of: str = "geometry/claims", **options: object
) -> list[Verdict]:
    """Those that a function adds to the outcome of an experiment."""
    outcome = outcome_of(of)
    fill(outcome, *evidence, **options)
    return outcome.verdicts


def answers(of: Outcome | list[Verdict]) -> list[str]:
    """Of the verdicts of an outcome."""
    return [verdict.answer for verdict in (of.verdicts if isinstance(of, Outcome) else of)]


def assert_whole(outcome: Outcome) -> None:
    """Every claim has a verdict with a number, and every figure a caption; all that its picker offers can be drawn."""
    assert not outcome.unjudged
    for verdict in outcome.verdicts:
        assert verdict.answer in (HOLDS, IN_PART, FAILS, UNDECIDED, UNTESTABLE)
        assert any(c.isdigit() for c in verdict.evidence) or "missing in this run" in verdict.evidence
        assert verdict.answer == UNTESTABLE or "criterion: " in verdict.evidence
    for exhibit in outcome.exhibits:
        assert exhibit.shows
        assert exhibit.look_for
        assert exhibit.source
        if exhibit.choice:
            last = exhibit.choice.variants()[exhibit.choice.options[-1].key]
            assert len(last) == len(exhibit.figure.data)
    assert all(len(table) for table in outcome.tables.values())


def changed(run: Run, **columns: object) -> Run:
    """The run with other columns of layers, and what they are without each group of contexts, by their errors."""
    layers = run.layers.assign(**columns)
    arrays = dict(run.arrays)
    for name in layers.columns:
        if f"{name}_se" in layers:
            value, error = (torch.tensor(layers[each].to_numpy(float)) for each in (name, f"{name}_se"))
            arrays[f"layers.{name}{WITHOUT}"] = Jackknifed.constant(value, 8).about(value, error).without
    return replace(run, layers=layers, arrays=arrays)
