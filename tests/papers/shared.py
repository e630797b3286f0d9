"""What tests of several papers share."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from theodolite.judging import Verdict
from theodolite.report.outcome import Outcome


def quiet() -> Console:
    """A console that nobody reads."""
    return Console(file=io.StringIO())


def hashes(folder: Path) -> dict[str, str]:
    """Of every file, by its path."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def verdicts_of(fill: Callable[..., object], *evidence: object, **options: object) -> list[Verdict]:
    """Those that a function adds to an outcome."""
    outcome = Outcome()
    fill(outcome, *evidence, **options)
    return outcome.verdicts


def answers(of: Outcome | list[Verdict]) -> list[str]:
    """Of the verdicts of an outcome."""
    return [verdict.answer for verdict in (of.verdicts if isinstance(of, Outcome) else of)]
