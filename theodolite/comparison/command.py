"""`theodolite compare`: compare run folders or models, write the page and print the result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import theodolite.comparison.matched as matched
from theodolite.comparison.audit import Audit, alike, compare, most_lost
from theodolite.comparison.candidates import Work, candidates_of, check, measure, trace_head, without_term
from theodolite.comparison.page import LOW_RANK_CLAIM, experiment_of, outcome
from theodolite.comparison.parts import OUTPUTS
from theodolite.comparison.survival import SURVIVED
from theodolite.errors import UsageError
from theodolite.judging import Verdict
from theodolite.models.prompts import Focus
from theodolite.passes.run import Run
from theodolite.report.outcome import Heading, Outcome
from theodolite.report.outcome_page import MARKS, result, write_index, write_outcome
from theodolite.system.files import disk_errors, write_text
from theodolite.system.run_folders import is_run
from theodolite.system.wording import harmless, number, percent

SCHEMA_VERSION = 2
FILE = "comparison.json"


@dataclass(frozen=True)
class Compared:
    """Audits of all pairs, the content of the page, and the reference run."""

    audits: list[Audit]
    outcome: Outcome
    run: Run

    @property
    def experiment(self) -> Heading:
        """The head of the page."""
        return experiment_of(self.audits, self.outcome)


def compare_folders(folders: Sequence[str]) -> Compared:
    """Compare surveys with the first of them.

    Tags too, where each has a trace FOLDER-sinks; head outputs and the loss, where each has FOLDER-outputs.

    Raises:
        UsageError: two runs that cannot be compared, and why.
    """
    names = [candidate.name for candidate in candidates_of(folders)]
    runs, traces, written = (_runs_ending_in(folders, ending) for ending in ("", "-sinks", "-outputs"))
    audits = []
    for place in range(1, len(runs)):
        pairs = [(each[0], each[place]) if each else () for each in (runs, traces, written)]
        pair = names[0], names[place]
        audits.append(compare(*pairs[0], *pairs[1], outputs_of=pairs[2] or None, names=pair))
    return Compared(audits, outcome(audits), runs[0])


def _runs_ending_in(folders: Sequence[str], ending: str) -> list[Run]:
    """The runs called FOLDER and the ending, if every folder has one; without an ending every folder must."""
    paths = [Path(f"{Path(folder)}{ending}") for folder in folders]
    return [Run.load(path) for path in paths] if all(map(is_run, paths)) or not ending else []


def compare_models(
    sources: Sequence[str], work: Work, focus: Focus, layer: int | None = None, rank: int | None = None
) -> Compared:
    """Survey and trace models, compare them with the first, and trace one head of each on a prompt.

    Args:
        focus: prompt (None: one that the package carries) and head (None: of those with a sink on the prompt the one
            that lost most of its sinks, in `layer` if that is given).
        layer: also the second one without the low-rank term of this block, and without a random part as large; both
            are compared with the second one.
        rank: of the term where the checkpoint has none.

    Raises:
        UsageError: models that cannot be compared, and why.
    """
    if rank is not None and layer is None:
        raise UsageError("--rank is of the term that --without-low-rank LAYER takes out: give both")
    candidates = candidates_of(sources)
    if layer is not None:
        candidates[2:2] = without_term(1, candidates[1], layer, rank)
    check(candidates, work, focus, layer)
    measured = measure(candidates, work)
    audits = []
    for other in measured[1:]:
        reference = measured[other.candidate.against]
        runs = (reference.run, other.run, reference.trace, other.trace)
        names = (reference.candidate.name, other.candidate.name)
        audits.append(compare(*runs, outputs_of=(reference.outputs, other.outputs), names=names))
    heads, first = most_lost(audits, layer), measured[0].run.provenance
    if focus.layer is not None and focus.head is not None:
        heads = [(focus.layer, focus.head)]
    same_heads = [each.candidate for each in measured if alike(first, each.run.provenance)]
    traced = None
    of_images = "grid" in first["corpus"]  # whose model reads no prompt
    if heads and len(same_heads) > 1 and not of_images:
        traced = trace_head(same_heads, work.opened, focus.prompt, heads)
    return Compared(audits, outcome(audits, measured, traced), measured[0].run)


def as_json(compared: Compared) -> dict[str, Any]:
    """What `comparison.json` holds: for each pair the summary and its parts; then verdicts, tables, provenance."""
    comparisons = [
        {
            "reference": audit.reference,
            "other": audit.other,
            "answer": audit.answer,
            "summary": audit.summary,
            "parts": [
                {name: getattr(part, name) for name in ("name", "answer", "criterion", "sentence")}
                for part in audit.parts
            ],
        }
        for audit in compared.audits
    ]
    page = result(compared.experiment, compared.outcome, compared.run.provenance)
    return {"schema_version": SCHEMA_VERSION, "comparisons": comparisons} | {
        name: page[name] for name in ("verdicts", "tables", "provenance", "other_runs")
    }


def write(compared: Compared, out: Path) -> Path:
    """Write `out`/comparison.json and the page with its tables as parquet; the page's path.

    Raises:
        WorkError: the folder cannot be written.
    """
    page = write_outcome(compared.experiment, compared.outcome, compared.run.provenance, out)
    text = json.dumps(as_json(compared), indent=2, ensure_ascii=False, allow_nan=False)
    with disk_errors(out):
        write_text(out / FILE, text + "\n")
    write_index(out)
    return page


def show(compared: Compared, console: Console) -> None:
    """Print, for each pair, the summary, the loss and all parts in one table, a sentence on each part, and verdicts."""
    for audit in compared.audits:
        pair = escape(harmless(f"{audit.reference} → {audit.other}"))
        summary = escape(harmless(audit.summary))
        console.print(f"\n{MARKS[audit.answer]} [bold]{pair}[/bold]  {summary}", highlight=False)
        console.print(_overview(audit))
        for part in audit.parts:
            console.print(f"[bold]{part.name}[/bold]  {escape(harmless(part.sentence))}", highlight=False)
        names = [part.name for part in audit.parts]
        for name, ending in (("tags", "sinks"), (OUTPUTS, "outputs")):
            if name not in names and matched.NAME not in names:
                why = f"Not compared: not every survey has a run FOLDER-{ending}."
                console.print(f"[bold]{name}[/bold]  {why}")
        _show_verdicts(audit.further, console)
    _show_verdicts([each for each in compared.outcome.verdicts if each.claim == LOW_RANK_CLAIM], console)


def _show_verdicts(verdicts: Sequence[Verdict], console: Console) -> None:
    for verdict in verdicts:
        line = f"{MARKS[verdict.answer]} {verdict.claim}: {verdict.answer}\n  {harmless(verdict.evidence)}"
        console.print(f"\n{line}", markup=False, highlight=False)


def _overview(audit: Audit) -> Table:
    """The loss, and every part: its number before and after, the verdict, and how many units survive."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("part", "before", "after", "verdict", "survived", "left"):
        table.add_column(heading, justify="left" if heading in ("part", "verdict") else "right", no_wrap=True)
    parts = {part.name: part for part in audit.parts}
    for row in audit.overview.to_dict("records"):
        cells = [row["part"], number(row["before"]), number(row["after"]), row["verdict"]]
        if part := parts.get(row["part"]):
            cells += [f"{part.count(SURVIVED)} of {part.of_reference}", percent(part.family.value)]
        table.add_row(*cells)
    return table
