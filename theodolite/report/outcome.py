"""Outcomes: numbers next to published ones, verdicts, tables and figures; their page, `result.json`, tables, index."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from theodolite import judging
from theodolite.estimates import Estimate, Estimates
from theodolite.judging import FAILS, HOLDS, IN_PART, UNDECIDED, UNTESTABLE, Criterion, Verdict, judge
from theodolite.measure.publications import BAO, SONG, TITLES, ZHANG
from theodolite.report import content
from theodolite.report.data import packaged, records
from theodolite.report.exhibit import Choice, Exhibit
from theodolite.report.page import PLOTLY, block_of, rendered, write_page
from theodolite.system import files
from theodolite.system.wording import harmless, model_name, reading_order, visible

RESULT = "result.json"
PAPERS = {"geometry": SONG, "localization": BAO, "sinks": ZHANG}  # of each group of experiments
SOURCES = {group: f"{paper}: {TITLES[paper]}." for group, paper in PAPERS.items()}

MARKS = {HOLDS: "✓", IN_PART: "◐", FAILS: "✗", UNDECIDED: "–", UNTESTABLE: "–"}
KINDS = {HOLDS: "holds", IN_PART: "partly", FAILS: "fails", UNDECIDED: "open", UNTESTABLE: "open"}
SCHEMA_VERSION = 2
# Page → figure → title, shows, look_for, source, wide.
CAPTIONS = packaged("figures.toml")

JUDGED = "judged"  # the table with the numbers behind the verdicts


@dataclass(frozen=True)
class Heading:
    """The heading of an outcome."""

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
    """An experiment's outcome; it is filled in the order in which the page shows it."""

    readings: list[Reading] = field(default_factory=list)  # headline numbers, next to the paper's
    verdicts: list[Verdict] = field(default_factory=list)
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)  # every number behind the figures
    exhibits: list[Exhibit] = field(default_factory=list)
    runs: dict[str, dict[str, object]] = field(default_factory=dict)  # further ones: name → provenance
    lead: pd.DataFrame | None = None  # a table that the page begins with
    # Experiments whose verdicts these are: name → what was asked (`folder_of`).
    collected: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def read(self, quantity: str, here: str, paper: str = "") -> None:
        """Show a quantity as measured here and as the paper prints it."""
        self.readings.append(Reading(quantity, here, paper))

    def claim(
        self, claim: str, what: str, estimate: Estimate | Estimates | float, criterion: Criterion
    ) -> None:
        """Judge a claim, as `judge` does."""
        self.verdicts.append(judge(claim, what, estimate, criterion))

    def show(self, page: str, key: str, figure: go.Figure | Choice, **values: object) -> None:
        """Show a figure under its caption of `figures.toml`, which `values` fill."""
        self.captioned(key, figure, CAPTIONS[page][key], values)

    def captioned(
        self, key: str, figure: go.Figure | Choice, caption: Mapping[str, Any], values: Mapping[str, object]
    ) -> None:
        """Show a figure, or what its picker offers, under a caption, whose texts `values` fill."""
        texts = {name: text.format(**values) for name, text in caption.items() if values and name != "wide"}
        choice = figure if isinstance(figure, Choice) else None
        drawn = figure.first_shown() if isinstance(figure, Choice) else figure
        self.exhibits.append(Exhibit(key, figure=drawn, choice=choice, **{**caption, **texts}))


def folder_of(name: str, root: Path, asked: Mapping[str, Any] | None = None) -> Path:
    """Return the folder of an outcome below `root`, one for each prompt, head or second text: `asked` in provenance."""
    parts = [name.replace("/", "-")]
    asked = asked or {}
    for text in (asked[key] for key in ("prompt", "other") if key in asked):
        words = re.sub(r"[^a-z0-9]+", "-", text.lower())[:24].strip("-")
        parts.append(f"{words}-{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:8]}".strip("-"))
    if "head" in asked:
        parts.append(f"L{asked['layer']}H{asked['head']}")
    return root / "-".join(parts)


def result(experiment: Heading, outcome: Outcome, provenance: dict[str, Any]) -> dict[str, Any]:
    """Collect what `result.json` holds: verdicts, numbers, provenance; NaN as null."""
    return {
        "schema_version": SCHEMA_VERSION,
        **{name: getattr(experiment, name) for name in Heading.__annotations__},
        "verdicts": [verdict.words for verdict in outcome.verdicts],
        "readings": [vars(reading) for reading in outcome.readings],
        "tables": {name: records(frame) for name, frame in _tables(outcome).items()},
        "provenance": provenance,
        "other_runs": outcome.runs,
    }


def _tables(outcome: Outcome) -> dict[str, pd.DataFrame]:
    """List the outcome's tables, first the one with the numbers behind the verdicts."""
    return ({JUDGED: judging.table(outcome.verdicts)} if outcome.verdicts else {}) | outcome.tables


def write_outcome(
    experiment: Heading, outcome: Outcome, provenance: dict[str, Any], root: str | Path
) -> Path:
    """Write `root`/NAME/ (`folder_of`) with index.html, result.json and table-*.parquet, and return the page's path.

    An existing folder is replaced atomically; Plotly's script lies in `root`. `WorkError`: it cannot be written.
    """
    root = Path(root)
    folder = folder_of(experiment.name, root, provenance.get("asked"))
    pages = {name: folder_of(name, Path(), asked) / "index.html" for name, asked in outcome.collected.items()}
    links = {name: f"../{page.as_posix()}" for name, page in pages.items() if (root / page).is_file()}
    page = render(experiment, outcome, provenance, links)
    with files.folder_written_atomically(folder, replace=True) as temporary:
        if not (root / PLOTLY).is_file():
            files.write_text(root / PLOTLY, get_plotlyjs())
        (temporary / "index.html").write_text(page, encoding="utf-8")
        files.write_json_checked(temporary / RESULT, result(experiment, outcome, provenance))
        for name, frame in _tables(outcome).items():
            frame.to_parquet(temporary / f"table-{name}.parquet", index=False)
    return folder / "index.html"


def render(
    experiment: Heading, outcome: Outcome, provenance: dict[str, Any], links: Mapping[str, str] | None = None
) -> str:
    """Render the page of one outcome as one string of HTML; `links`: to the pages of experiments it collects."""
    tables = {name: content.frame_table(frame) for name, frame in _tables(outcome).items()}
    others = {visible(name, 80): content.provenance_rows(other) for name, other in outcome.runs.items()}
    return rendered(
        "experiment.html.j2",
        {
            **{name: getattr(experiment, name) for name in Heading.__annotations__},
            "model": visible(model_name(provenance["model"]["id"]), 80),
            # An experiment of a user's own has none.
            "source": SOURCES.get(experiment.name.partition("/")[0], ""),
            "subtitle": content.subtitle(provenance),
            "text_line": content.text_line(provenance),
            "lead": content.frame_table(outcome.lead),
            "tally": tally(outcome.verdicts),
            "verdicts": [_shown(verdict, links) for verdict in outcome.verdicts],
            "readings": [
                {key: harmless(value) for key, value in vars(reading).items()} for reading in outcome.readings
            ],
            "blocks": [block_of(exhibit) for exhibit in outcome.exhibits],
            "tables": {name: shown for name, shown in tables.items() if shown is not None},
            "provenance": content.provenance_rows(provenance),
            "others": list(others.items()),
            "cards": "{}",
            "plotly": f"../{PLOTLY}",
        },
    )


def write_index(
    root: str | Path, kicker: str = "Published tables and figures, reproduced for"
) -> Path | None:
    """Write `root`/index.html, which links every outcome below it, with `kicker` before the model; None where none is.

    One whose file is damaged is named instead. `WorkError`: it cannot be written.
    """
    root, report = Path(root), "../report/index.html"
    read = {path.parent.name: _entry(path) for path in sorted(root.glob(f"*/{RESULT}"))}
    entries = [entry for entry in read.values() if entry is not None]
    if not entries:
        return None
    entries.sort(key=lambda entry: reading_order(entry["name"]))
    values = {
        "kicker": kicker,
        "entries": entries,
        "damaged": [visible(name, 80) for name, entry in read.items() if entry is None],
        "model": entries[0]["model"],
        "report": report if root.name != "report" and (root / report).is_file() else "",
    }
    return write_page(root / "index.html", rendered("experiments.html.j2", values))


def _entry(path: Path) -> dict[str, Any] | None:
    """Read an outcome's entry in the index; None where its file is not one of ours, or is damaged."""
    try:
        loaded = files.read_json_checked(path)
        asked = loaded["provenance"].get("asked") or {}
        parts = [f"“{visible(str(asked[key]), 60)}”" for key in ("prompt", "other") if key in asked]
        parts += [f"L{asked['layer']}H{asked['head']}"] if "head" in asked else []
        verdicts = [Verdict(**verdict) for verdict in loaded["verdicts"]]
        return {
            "name": str(loaded["name"]),
            "title": harmless(f"{loaded['title']} ({', '.join(parts)})" if parts else loaded["title"]),
            "model": visible(model_name(loaded["provenance"]["model"]["id"]), 80),
            "link": f"{path.parent.name}/index.html",
            "verdicts": [_shown(verdict) for verdict in verdicts],
            "tally": tally(verdicts),
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def tally(verdicts: list[Verdict]) -> str:
    """Word the count of claims: `3 claims: 2 hold, 1 in part`; empty where there is one or none."""
    counted = judging.independent(verdicts)
    counts = {answer: sum(verdict.answer == answer for verdict in counted) for answer in MARKS}
    many = {HOLDS: "hold", FAILS: "fail"}
    words = [f"{n} {many.get(answer, answer) if n > 1 else answer}" for answer, n in counts.items() if n]
    repeated = "; claims judged by the same number count once" if len(counted) < len(verdicts) else ""
    return f"{len(counted)} claims: {', '.join(words)}{repeated}" if len(verdicts) > 1 else ""


def _shown(verdict: Verdict, links: Mapping[str, str] | None = None) -> dict[str, str]:
    return {
        "experiment": verdict.experiment,
        "link": (links or {}).get(verdict.experiment, ""),
        "claim": harmless(verdict.claim),
        "answer": verdict.answer,
        "evidence": harmless(verdict.evidence),
        "mark": MARKS[verdict.answer],
        "kind": KINDS[verdict.answer],
    }
