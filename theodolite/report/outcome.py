"""What a page of verdicts holds: its heading, numbers next to published ones, verdicts, tables and figures."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pandas as pd
import plotly.graph_objects as go

from theodolite.judging import Criterion, Estimate, Estimates, Verdict, judge, untestable
from theodolite.report.drawing.grammar import Sketch
from theodolite.report.exhibit import Choice, Exhibit


@dataclass(frozen=True)
class Heading:
    """What stands above an outcome."""

    name: str  # `geometry/table1`
    title: str
    paper: str  # the paper's own finding in a sentence, with its section or figure


@dataclass(frozen=True)
class Reading:
    """A quantity as measured here and as the paper prints it (“…”: in its words; empty: not printed), as shown."""

    quantity: str
    here: str
    paper: str = ""


@dataclass
class Outcome:
    """What an experiment gives; it is filled in the order in which the page shows it."""

    readings: list[Reading] = field(default_factory=list)  # headline numbers, next to the paper's
    verdicts: list[Verdict] = field(default_factory=list)
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)  # every number behind the figures
    exhibits: list[Exhibit] = field(default_factory=list)
    runs: dict[str, dict[str, object]] = field(default_factory=dict)  # further ones: name → provenance
    lead: pd.DataFrame | None = None  # a table that the page begins with

    def take(self, other: Outcome) -> None:
        """Add all of another outcome."""
        self.readings += other.readings
        self.verdicts += other.verdicts
        self.tables |= other.tables
        self.exhibits += other.exhibits
        self.runs |= other.runs

    def read(self, quantity: str, here: str, paper: str = "") -> None:
        """Show a quantity as measured here and as the paper prints it."""
        self.readings.append(Reading(quantity, here, paper))

    def claim(
        self,
        claim: str,
        what: str,
        estimate: Estimate | Estimates | float,
        criterion: Criterion,
        more: str = "",
    ) -> None:
        """Judge a claim, as `judge` does; `more` ends its evidence."""
        verdict = judge(claim, what, estimate, criterion)
        self.verdicts.append(replace(verdict, evidence=verdict.evidence + more))

    def cannot_test(self, claim: str, why: str) -> None:
        """Say why a claim is not testable here."""
        self.verdicts.append(untestable(claim, why))

    def figure(
        self,
        key: str,
        title: str,
        figure: go.Figure | Choice,
        shows: str,
        look_for: str,
        source: str,
        *,
        wide: bool = False,
    ) -> None:
        """Show a figure, or what its picker offers; caption: what is drawn, what to see, whose it is."""
        choice = None
        if isinstance(figure, Choice):
            choice, first = figure, figure.draw(figure.options[figure.start].key)
            figure = first.figure if isinstance(first, Sketch) else first
        self.exhibits.append(Exhibit(key, title, figure, shows, look_for, source, "", choice, wide))
