"""Pages that open from disk with no network: what all of them share, the report of a run, and the list of runs.

The strings of a page come from untrusted files: the template escapes all of them, data blocks are made safe by
`payload`, and a content security policy lets only our two scripts run. The same run gives the same bytes.
"""

from __future__ import annotations

import functools
import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from theodolite.attention.sinks import SINK_THRESHOLD
from theodolite.measure.publications import TITLES, XIAO, ZHANG
from theodolite.passes.run import Run
from theodolite.report import content, style
from theodolite.report.drawing.heads import head_measures
from theodolite.report.exhibit import SECTIONS, Exhibit, Option
from theodolite.report.figures import EXHIBITS
from theodolite.report.key_numbers import beside_untrained, untrained_run
from theodolite.report.payload import figure_json, script_json
from theodolite.report.summary import Finding, health_line, summarise
from theodolite.system.files import disk_errors, write_text
from theodolite.system.wording import visible

SHOWN_IN = {"Localization": "heads"}  # topics that are not a section's name
HEALTH = "Health"
TABLES = ("outliers", "layers", "heads", "attribution")
STATIC = ("page.css", "page.js", "numbers.js")
PLOTLY = "plotly.min.js"


@dataclass(frozen=True)
class Block:
    """One exhibit as the template needs it: its caption, its data, its pickers; `broad`: panels side by side."""

    exhibit: Exhibit
    json: str
    height: int
    broad: bool
    options: list[tuple[str, list[Option]]]
    chosen: Option | None
    small: list[Option]


def write_report(run: Run, folder: str | Path) -> Path:
    """Write `folder`/index.html and Plotly's script, and return the page's path; existing files are replaced.

    Where the run's folder has the survey of an untrained model (`--baseline untrained`), its numbers stand beside.

    Raises:
        WorkError: the folder cannot be written.
    """
    folder = Path(folder)
    page = render(run)
    existed = folder.exists()
    try:
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / PLOTLY, get_plotlyjs())
        return write_page(folder / "index.html", page)
    except BaseException:
        if not existed:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def write_runs(rows: Sequence[Mapping[str, Any]], pages: Mapping[str, str | None], folder: Path) -> Path:
    """Write `folder`/index.html, which lists runs, and return its path.

    Args:
        rows: one run each, with the same columns; `folder` is the name of its folder.
        pages: the page of each, relative to `folder`, if it has one.
        folder: where the runs lie.

    Raises:
        WorkError: it cannot be written.
    """
    shown = [
        {
            "cells": ["–" if value is None else visible(str(value), 80) for value in row.values()],
            "page": pages[row["folder"]],
        }
        for row in rows
    ]
    headings = [name.replace("_", " ") for name in rows[0]]
    values = {"headings": headings, "rows": shown, "folder": visible(folder.name, 80)}
    return write_page(folder / "index.html", rendered("runs.html.j2", values))


def write_page(path: Path, page: str) -> Path:
    """Write a page, and return its path; `WorkError` where it cannot be written."""
    with disk_errors(path):
        write_text(path, page)
    return path


def render(run: Run) -> str:
    """The page as one string of HTML."""
    blocks = {
        section: [block_of(one.of(run)) for one in EXHIBITS if one.section == section and one.available(run)]
        for section in SECTIONS
    }
    untrained = untrained_run(run)
    tiles, findings = content.tiles(run), summarise(run)
    checks = [finding for finding in findings if finding.topic == HEALTH]
    flagged = [finding for finding in checks if finding.status == "flagged"]
    sinks = content.sink_texts(run), content.sink_tokens(run)
    shown = {section for section, drawn in blocks.items() if drawn} | ({"sinks"} if any(sinks) else set())
    return rendered(
        "page.html.j2",
        {
            "title": visible((run.provenance.get("model") or {}).get("id") or "a model", 80),
            "subtitle": content.subtitle(run.provenance),
            "text_line": content.text_line(run.provenance),
            "links": [
                ("#summary", "At a glance"),
                *((f"#{section}", name) for section, name in SECTIONS.items() if section in shown),
                ("#tables", "Tables"),
                ("#provenance", "Provenance"),
            ],
            "health": health_line(len(flagged), len(checks)),
            "flagged": flagged,
            "passed": [finding for finding in checks if finding.status == "passed"],
            "topics": _topics([finding for finding in findings if finding.topic != HEALTH], shown),
            "tiles": tiles,
            "untrained": beside_untrained(run, untrained) if untrained else None,
            "blocks": blocks,
            "glossary": [(m.title, m.meaning, m.source) for m in head_measures(run)],
            "sink_texts": sinks[0],
            "sink_tokens": sinks[1],
            "sink_threshold": SINK_THRESHOLD,
            "sinks_source": f"{XIAO}; {ZHANG}, Fig. 2",
            "publications": TITLES,
            **{name: content.run_table(run, name) for name in TABLES},
            "errors": any(tile.error for tile in tiles),
            "first_head": content.first_head(run),
            "cards": script_json(content.head_cards(run)),
            "provenance": content.provenance_rows(run.provenance),
            "plotly": PLOTLY,
        },
    )


def rendered(template: str, values: dict[str, Any]) -> str:
    """Fill a template, with the style, script and themes that all pages share; without `plotly`, no script.

    The nonce is the digest of the page without it: fixed for a page, and unpredictable to the texts on it.
    """
    css, *js = map(static_text, STATIC)
    shared = {"css": style.css() + css, "js": "".join(js), "themes": script_json(themes()), "plotly": ""}
    jinja_template = environment().get_template(template)
    context = shared | values
    page = jinja_template.render(context, nonce="")
    if not context["plotly"]:
        return page
    digest = hashlib.sha256(page.encode("utf-8", "surrogatepass")).hexdigest()
    return jinja_template.render(context, nonce=digest[:32])


def static_text(name: str) -> str:
    """The style or a script of the pages."""
    return (resources.files("theodolite.report") / "templates" / name).read_text(encoding="utf-8")


@functools.cache
def environment(package: str = "theodolite.report", folder: str = "templates") -> jinja2.Environment:
    """Set up jinja2: every value is escaped, and a missing one is an error."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader(package, folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def block_of(exhibit: Exhibit) -> Block:
    """Prepare an exhibit for a template: its figure as JSON, and the choices of its picker."""
    figure, choice = exhibit.figure, exhibit.choice
    height = int(figure.layout.height or style.HEIGHT)
    # Panels side by side, which a phone must not squeeze: x axes begin at several places.
    broad = len({axis.domain[0] for axis in figure.select_xaxes() if axis.domain is not None}) > 1
    if choice is None:
        return Block(exhibit, figure_json(figure, {}), height, broad, [], None, [])
    groups: dict[str, list[Option]] = {}
    for option in choice.options:
        groups.setdefault(option.group, []).append(option)
    small = [option for key in choice.grid for option in choice.options if option.key == key]
    chosen = choice.options[choice.start]
    return Block(
        exhibit, figure_json(figure, choice.variants()), height, broad, list(groups.items()), chosen, small
    )


def _topics(findings: list[Finding], shown: set[str]) -> list[tuple[str, str, list[Finding]]]:
    """Findings by topic, each with the section that shows it, if it is shown."""
    topics: dict[str, list[Finding]] = {}
    for finding in findings:
        topics.setdefault(finding.topic, []).append(finding)
    sections = {topic: SHOWN_IN.get(topic, topic.lower()) for topic in topics}
    return [
        (topic, sections[topic] if sections[topic] in shown else "", about) for topic, about in topics.items()
    ]


def themes() -> dict[str, Any]:
    """The figures' light and dark templates, and which colours change between them."""
    return {
        "light": style.template().to_plotly_json(),
        "dark": style.template(dark=True).to_plotly_json(),
        "swaps": style.dark_swaps(),
    }
