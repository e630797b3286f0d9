"""`theodolite reproduce`: the list of names, and experiments made, written and shown one after the other."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from theodolite.errors import UsageError
from theodolite.judging import Verdict
from theodolite.report.outcome_page import result, write_index, write_outcome
from theodolite.report.terminal import show_outcome
from theodolite.system.progress import ShowStage
from theodolite.system.wording import harmless
from theodolite_papers.catalogue import ALIASES, EXPERIMENTS
from theodolite_papers.catch_tag_release.few_shot import few_shot_provenance, is_few_shot
from theodolite_papers.experiment import Experiment, Study
from theodolite_papers.localization.locater_figures import grid_provenance
from theodolite_papers.localization.locater_training import is_grid

KINDS = {is_grid: grid_provenance, is_few_shot: few_shot_provenance}


def provenance_reader(place: str | Path) -> Callable[[Path], dict[str, Any]] | None:
    """What reads the provenance of the training runs in a folder; None where there are none."""
    return next((read for is_there, read in KINDS.items() if is_there(place)), None)


def list_experiments(console: Console) -> None:
    """Print every name with one line, and which published figures are others on another model or text."""
    names, aliases = (Table(box=None, padding=(0, 2, 0, 0), show_header=False) for _ in range(2))
    names.add_column(no_wrap=True)
    names.add_column()
    for row in list_as_json():
        if row["name"] in ALIASES:
            aliases.add_row(row["name"], escape(row["paper"]))
        else:
            names.add_row(row["name"], escape(row["title"]))
    console.print(names)
    console.print("\nPublished figures that show the same for another model or text:", highlight=False)
    console.print(aliases)


def list_as_json() -> list[dict[str, str]]:
    """The same as plain values."""
    rows = [(each.name, each.title, each.paper) for each in EXPERIMENTS.values()]
    for alias in ALIASES.values():
        paper = f"{alias.of}, published for {alias.published_on}"
        rows.append((alias.name, EXPERIMENTS[alias.of].title, paper))
    return [{"name": name, "title": title, "paper": paper} for name, title, paper in rows]


def run_experiments(
    experiments: list[Experiment],
    study: Study,
    place: Path,
    console: Console,
    *,
    as_json: bool,
    bars: Callable[[], AbstractContextManager[ShowStage]],
) -> Path | None:
    """Make, write and show each experiment, and return the page to open: its own, or the index of several.

    Alone, an experiment that cannot be made is an error; in a group it is passed over with its reason, on `console`.
    """
    results: list[dict[str, Any]] = []
    shown_verdicts: set[Verdict] = set()
    reasons: list[str] = []
    page: Path | None = None
    for number, experiment in enumerate(experiments):
        try:
            with bars() as study.show:  # gone before anything is printed
                study.show(experiment.name, number, len(experiments))
                outcome = study.outcome(experiment)
        except UsageError as error:
            if len(experiments) == 1:
                raise
            reasons.append(str(error))
            skipped = f"{experiment.name} is skipped: {harmless(str(error))}"
            console.print(skipped, markup=False, highlight=False)
            continue
        provenance = study.provenance_of(experiment)
        page = write_outcome(experiment, outcome, provenance, place)
        results.append(result(experiment, outcome, provenance))
        if not as_json:
            show_outcome(experiment, outcome, console, shown_verdicts)
            shown_verdicts |= set(outcome.verdicts)
    if not results:
        raise UsageError(reasons[0])
    index = write_index(place)
    if as_json:
        print(json.dumps(results, ensure_ascii=False, allow_nan=False))
    return page if len(experiments) == 1 else index
