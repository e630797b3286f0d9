"""What a page of verdicts holds: its heading, numbers next to published ones, verdicts, tables and figures."""

from __future__ import annotations

from dataclasses import dataclass, field

import pandas as pd

from theodolite.judging import Verdict
from theodolite.report.exhibit import Exhibit


@dataclass(frozen=True)
class Heading:
    """What stands above an outcome.

    Attributes:
        name: `geometry/table1`.
        title: what it shows.
        paper: the paper's own finding in a sentence, with its section or figure.
    """

    name: str
    title: str
    paper: str


@dataclass(frozen=True)
class Reading:
    """A quantity as measured here and as the paper prints it (“…”: in its words; empty: not printed), as shown."""

    quantity: str
    here: str
    paper: str = ""


@dataclass(frozen=True)
class Outcome:
    """What an experiment gives.

    Attributes:
        readings: the headline numbers, next to the paper's where it prints them.
        verdicts: on each claim that the experiment decides.
        tables: name → table, with every number behind the figures.
        exhibits: the figures with their captions.
        runs: further runs that were surveyed: name → provenance.
    """

    readings: list[Reading]
    verdicts: list[Verdict]
    tables: dict[str, pd.DataFrame]
    exhibits: list[Exhibit] = field(default_factory=list)
    runs: dict[str, dict[str, object]] = field(default_factory=dict)
