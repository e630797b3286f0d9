"""Write the page of a comparison and `comparison.json`, and print the comparison in a terminal.

The page has one table of all parts, the verdicts, figures before and after, and one head in every model.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from theodolite.comparison.audit import Audit
from theodolite.comparison.parts import MATCHED, OUTPUTS
from theodolite.comparison.survival import MORE_THAN_HARDLY_ANY, NEARLY_ALL, Survival
from theodolite.judging import Verdict, mix_of
from theodolite.passes.run import Run
from theodolite.report.data import records
from theodolite.report.drawing import compare as drawing
from theodolite.report.drawing import prompt as figures_prompt
from theodolite.report.exhibit import by_name
from theodolite.report.outcome import MARKS, Heading, Outcome, result, write_index, write_outcome
from theodolite.sinks.prompt import PromptTrace
from theodolite.system.files import disk_errors, write_text
from theodolite.system.wording import (
    counted,
    harmless,
    head_name,
    listed,
    number,
    percent,
    shown_token,
    visible,
)

PAPER_ON_LOW_RANK = "Without the low-rank term of a layer its sinks are gone (section 3.2, Fig. 4)"
LOW_RANK_CLAIM = "The low-rank term makes the sinks of its layer (section 3.2, Fig. 4)"
PROMPT_SHOWN = 600  # characters of the prompt below the maps
SCHEMA_VERSION = 2
FILE = "comparison.json"


@dataclass(frozen=True)
class HeadOnPrompt:
    """One head of every candidate on one prompt: the prompt's text and tokens, name → trace."""

    layer: int
    head: int
    prompt: str
    tokens: list[str]
    traces: dict[str, PromptTrace]


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


def outcome(
    audits: Sequence[Audit], on_prompt: HeadOnPrompt | None = None, page: Outcome | None = None
) -> Outcome:
    """Make the page's content; `on_prompt`: one head of each model; `page`: what it begins with."""
    page = page or Outcome()
    for audit in audits:
        page.verdicts += _verdicts(audit, explain=audit is audits[0])
    for name in audits[0].tables:
        tables = []
        for audit in audits:
            if (table := audit.tables.get(name)) is not None:
                pair = {"before_in": audit.reference, "after_in": audit.other} if len(audits) > 1 else {}
                tables.append(table.assign(**pair)[[*pair, *table]])
        filled = [table for table in tables if len(table)]
        page.tables[name] = pd.concat(filled or tables[:1], ignore_index=True)
    page.lead = _lead(audits)
    if on_prompt:
        _draw_side_by_side(page, on_prompt)
    _draw_parts(page, audits)
    for audit in audits:
        page.runs |= audit.runs
    del page.runs[audits[0].reference]
    return page


def _lead(audits: Sequence[Audit]) -> pd.DataFrame:
    """Make the table that the page begins with: the overview, with columns of their own for each of several models."""
    columns: dict[str, pd.Series] = {}
    for place, audit in enumerate(audits):
        table = audit.overview.set_index("part")
        for of in table:
            name = of if of in ("measure", "before") else f"{of}{' ' * place}"
            if of == "after" and len(audits) > 1:
                name = f"after in {visible(audit.other, 60)}{' ' * place}"
            columns[name] = columns[name].combine_first(table[of]) if name in columns else table[of]
    # Of models of another shape only the heads are compared, which is a part that the others do not have.
    parts = pd.Index(dict.fromkeys(part for audit in audits for part in audit.overview["part"]), name="part")
    return pd.DataFrame({name: values.reindex(parts) for name, values in columns.items()}).reset_index()


def experiment_of(audits: Sequence[Audit], content: Outcome) -> Heading:
    """Make the page's heading: which models, and the paper's finding where a low-rank term was ablated."""
    first, *others = (visible(name, 60) for name in [audits[0].reference, *(audit.other for audit in audits)])
    is_ablation = any(verdict.claim == LOW_RANK_CLAIM for verdict in content.verdicts)
    title = f"What survives of {first} in {listed(others, 4)}"
    return Heading("sinks/compare", title, PAPER_ON_LOW_RANK if is_ablation else "")


def _verdicts(audit: Audit, explain: bool) -> list[Verdict]:
    """Judge the whole mechanism and each part, with its sentence and limits; `explain` adds each part's criterion."""

    def judged(part: Survival, claim: str, sentence: str) -> Verdict:
        criterion = f" Criterion: {part.criterion}." if explain else ""
        left = number(part.family.value) if part.family.is_exact else part.family  # every unit is decided
        limits = (
            f"{NEARLY_ALL.side} {NEARLY_ALL.limit:g} is kept, at most {MORE_THAN_HARDLY_ANY.limit:g} lost"
        )
        evidence = f"{sentence}{criterion} Left: {left}; criterion: {limits} (ours)"
        return replace(part.verdict(claim), evidence=evidence)

    whole = f"The mechanism of {audit.reference} survives in {audit.other}"
    parts = [part for part in audit.parts if len(part.table)]
    if parts and parts[0].name == MATCHED:  # the only part
        return [judged(parts[0], whole, f"{audit.summary} {parts[0].sentence}")]
    of_parts = [judged(part, f"{audit.other}, {part.name}", part.sentence) for part in parts]
    return [replace(mix_of(whole, of_parts), evidence=audit.summary), *of_parts, *audit.further]


def _draw_side_by_side(page: Outcome, on_prompt: HeadOnPrompt) -> None:
    head, tokens = head_name(on_prompt.layer, on_prompt.head), on_prompt.tokens
    all_outputs = np.concatenate([trace.output.numpy() for trace in on_prompt.traces.values()])
    attention, output, listed_by_model = {}, {}, []
    for name, trace in on_prompt.traces.items():
        sinks = [int(position) for position in trace.sinks if position >= 0]
        names = [f"{position} “{shown_token(tokens[position])}”" for position in sinks]
        of_model = f"{counted(len(names), 'sink')} ({listed(names)})" if names else "no sink"
        listed_by_model.append(f"{name}: {of_model}")
        attention[name] = figures_prompt.attention(trace.attention.numpy(), tokens, sinks)
        output[name] = figures_prompt.by_dimension(trace.output.numpy(), tokens, sinks, scale_of=all_outputs)
    look_for = (
        "columns that differ. The head has no sink on this prompt: try another --prompt, --layer or --head."
    )
    if any((trace.sinks >= 0).any() for trace in on_prompt.traces.values()):
        look_for = "a strong column in one model that is weak or missing in another."
    texts = {
        "sinks": "; ".join(listed_by_model),
        "prompt": visible(on_prompt.prompt, PROMPT_SHOWN),
        "look_for": look_for,
    }
    page.show("compare", "maps", drawing.parallel_map(attention, square=True), head=head, **texts)
    dimensions = figures_prompt.DIMENSIONS
    page.show("compare", "outputs", drawing.parallel_map(output), head=head, dimensions=dimensions)


Draw = Callable[..., go.Figure]
FIGURES: dict[str, Draw] = {
    MATCHED: lambda table: drawing.scatter(table[table["match"] != ""], drawing.MATCH_DOTS),
    "sinks": functools.partial(drawing.scatter, shown=drawing.SINK_DOTS),
    "tags": functools.partial(drawing.scatter, shown=drawing.TAG_DOTS),
    OUTPUTS: functools.partial(drawing.scatter, shown=drawing.OUTPUT_DOTS),
    "entropies": drawing.entropies,
    "outlier dimensions": drawing.outliers,
    "positional basis": drawing.positions,
    "spectra": functools.partial(drawing.scatter, shown=drawing.SPECTRUM_DOTS),
}
"""How the table of each part is drawn, in the order of the page."""


def _draw_parts(page: Outcome, audits: Sequence[Audit]) -> None:
    """Draw the parts that some comparison has, with a picker where there are several comparisons."""
    for name, draw in FIGURES.items():
        tables = {audit.other: part.table for audit in audits for part in audit.parts if part.name == name}
        if not any(map(len, tables.values())):
            continue
        if draw is drawing.outliers:  # all comparisons have the same rows and columns
            dimensions = sorted({int(each) for table in tables.values() for each in table["dimension"]})
            layers = 1 + audits[0].runs[audits[0].reference]["model"]["layers"]
            draw = functools.partial(drawing.outliers, dimensions=dimensions, layers=layers)
        figures = [functools.partial(draw, table) for table in tables.values()]

        def picked(index: int, figures: Sequence[Callable[[], go.Figure]] = figures) -> go.Figure:
            return figures[index]()

        picker = by_name("model", list(tables), picked)
        page.show("compare", name.replace(" ", "-"), picker if len(figures) > 1 else picked(0))


def as_json(compared: Compared) -> dict[str, Any]:
    """Make the content of `comparison.json`: summary and parts of each pair, then verdicts, tables, provenance."""
    of_part, of_page = (
        ("name", "answer", "criterion", "sentence"),
        ("verdicts", "tables", "provenance", "other_runs"),
    )
    comparisons = [
        {name: getattr(audit, name) for name in ("reference", "other", "answer", "summary")}
        | {"loss": None if audit.loss is None else records(audit.tables["loss"])[0]}
        | {"parts": [{name: getattr(part, name) for name in of_part} for part in audit.parts]}
        for audit in compared.audits
    ]
    page = result(compared.experiment, compared.outcome, compared.run.provenance)
    content = {"schema_version": SCHEMA_VERSION, "comparisons": comparisons}
    return content | {name: page[name] for name in of_page}


def write(compared: Compared, out: Path) -> Path:
    """Write `out`/comparison.json and the page with its tables as parquet; the page's path.

    Raises:
        WorkError: the folder cannot be written.
    """
    page = write_outcome(compared.experiment, compared.outcome, compared.run.provenance, out)
    text = json.dumps(as_json(compared), indent=2, ensure_ascii=False, allow_nan=False)
    with disk_errors(out):
        write_text(out / FILE, text + "\n")
    write_index(out, "Comparison with")
    return page


def show(compared: Compared, console: Console) -> None:
    """Print, for each pair, the summary, the loss and all parts in one table, a sentence on each part, and verdicts."""

    def say(verdict: Verdict) -> None:
        line = f"{MARKS[verdict.answer]} {verdict.claim}: {verdict.answer}\n  {harmless(verdict.evidence)}"
        console.print(f"\n{line}", markup=False, highlight=False)

    for audit in compared.audits:
        pair, summary = (
            escape(harmless(text)) for text in (f"{audit.reference} → {audit.other}", audit.summary)
        )
        console.print(f"\n{MARKS[audit.answer]} [bold]{pair}[/bold]  {summary}", highlight=False)
        console.print(_overview(audit))
        for part in audit.parts:
            console.print(f"[bold]{part.name}[/bold]  {escape(harmless(part.sentence))}", highlight=False)
        names = [part.name for part in audit.parts]
        for name, ending in (("tags", "sinks"), (OUTPUTS, "outputs")):
            if name not in names and MATCHED not in names:
                why = f"Not compared: not every survey has a run FOLDER-{ending}."
                console.print(f"[bold]{name}[/bold]  {why}")
        for verdict in audit.further:
            say(verdict)
    for verdict in compared.outcome.verdicts:
        if verdict.claim == LOW_RANK_CLAIM:
            say(verdict)


def _overview(audit: Audit) -> Table:
    """Tabulate the overview of a pair."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    words = ("part", "measure", "verdict")
    for heading in audit.overview:
        is_words = heading in words
        table.add_column(heading, justify="left" if is_words else "right", no_wrap=not is_words)
    for row in audit.overview.to_dict("records"):
        row |= {side: number(row[side]) for side in ("before", "after")}
        row["left"] = percent(row["left"]) if row["survived"] else ""
        table.add_row(*row.values())
    return table
