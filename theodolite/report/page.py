"""Pages that open from disk with no network: what all of them share, and the report of a run.

The strings of a page come from untrusted files: the template escapes all of them, data blocks are made safe by
`script_json`, and a content security policy lets only our two scripts run. The same run gives the same bytes.
"""

from __future__ import annotations

import functools
import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.utils import PlotlyJSONEncoder

from theodolite.judging import FAILS, HOLDS, UNDECIDED
from theodolite.measure.publications import TITLES, XIAO, ZHANG
from theodolite.passes.run import Run
from theodolite.report import content, findings, style
from theodolite.report.data import opening_head
from theodolite.report.drawing.heads import head_measures
from theodolite.report.exhibit import SECTIONS, Exhibit, Option
from theodolite.report.figures import EXHIBITS
from theodolite.report.style import Patch
from theodolite.system.files import disk_errors, write_text
from theodolite.system.wording import model_name, visible

TABLES = ("outliers", "layers", "heads", "attribution")
PLOTLY = "plotly.min.js"


def write_report(run: Run, folder: str | Path) -> Path:
    """Write `folder`/index.html and Plotly's script over those there, and return the page's path; or `WorkError`."""
    folder = Path(folder)
    page = render(run)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / PLOTLY, get_plotlyjs())
    return write_page(folder / "index.html", page)


def write_page(path: Path, page: str) -> Path:
    """Write a page, and return its path; `WorkError` where it cannot be written."""
    with disk_errors(path):
        write_text(path, page)
    return path


def render(run: Run) -> str:
    """Render the page as one string of HTML."""
    blocks: dict[str, list[dict[str, Any]]] = {section: [] for section in SECTIONS}
    for each in EXHIBITS:
        if drawn := each.of(run):
            blocks[each.caption["section"]].append(block_of(drawn))
    checks, sink_tokens = findings.checks(run), content.sink_tokens(run)
    topics: dict[str, list[tuple[str, list[str]]]] = {section: [] for section in SECTIONS}
    for topic, sentences in findings.summarise(run).items():
        topics[findings.TOPICS[topic][0]].append((topic, [finding.text for finding in sentences]))
    sections = {
        section: words
        for section, words in SECTIONS.items()
        if section != "summary" and (blocks[section] or topics[section])
    }
    return rendered(
        "page.html.j2",
        {
            **_named(run),
            "links": [
                ("#summary", "At a glance"),
                *((f"#{section}", name) for section, (name, _) in sections.items()),
                ("#provenance", "Provenance"),
            ],
            "health": findings.in_a_line(checks),
            "flagged": [check for check in checks if check.answer == FAILS],
            "undecided": [check for check in checks if check.answer == UNDECIDED],
            "passed": [check for check in checks if check.answer == HOLDS],
            "unusual": findings.unusual(run, checks),
            "topics": topics,
            "linked": content.linked(run, sink_tokens),
            "sections": sections,
            "blocks": blocks,
            "glossary": head_measures(run),
            "sink_texts": content.sink_texts(run),
            "sink_tokens": sink_tokens,
            "massive": content.massive_table(run),
            "sinks_source": f"{XIAO}; {ZHANG}, Fig. 2",
            "publications": TITLES,
            **{name: content.run_table(run, name) for name in TABLES},
            "first_head": "{},{}".format(*opening_head(run)) if len(run.heads) else "",
            "cards": script_json(content.head_cards(run)),
            "provenance": content.provenance_rows(run.provenance),
            "plotly": PLOTLY,
        },
    )


def _named(run: Run) -> dict[str, Any]:
    """Write the heading of a run: the model, what it is, and the text that it has read."""
    return {
        "title": visible(model_name((run.provenance.get("model") or {}).get("id") or "a model"), 80),
        "subtitle": content.subtitle(run.provenance),
        "text_line": content.text_line(run.provenance),
    }


def as_html(run: Run) -> str:
    """Summarise a run for a notebook, without scripts: model, text, and what is unusual."""
    values = _named(run) | {"unusual": [text for text, _ in findings.unusual(run, findings.checks(run))]}
    return environment().get_template("notebook.html.j2").render(values)


def rendered(template: str, values: dict[str, Any]) -> str:
    """Fill a template, with the style, script and themes that all pages share; without `plotly`, no script.

    The nonce is the digest of the page without it: fixed for a page, and unpredictable to the texts on it.
    """
    folder = resources.files("theodolite.report") / "templates"
    css, js = ((folder / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    themes = {name: style.template(dark=name == "dark").to_plotly_json() for name in ("light", "dark")}
    shared = {"css": style.css() + css, "js": js, "plotly": ""}
    context = shared | {"themes": script_json(themes | {"swaps": style.dark_swaps()})} | values
    filled = environment().get_template(template)
    page = filled.render(context, nonce="")
    digest = hashlib.sha256(page.encode("utf-8", "surrogatepass")).hexdigest()
    return filled.render(context, nonce=digest[:32]) if context["plotly"] else page


@functools.cache
def environment() -> jinja2.Environment:
    """Set up jinja2: every value is escaped, and a missing one is an error."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("theodolite.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def block_of(exhibit: Exhibit) -> dict[str, Any]:
    """Return an exhibit as templates take it: itself, its figure as JSON, and the choices of its picker."""
    figure, choice = exhibit.figure, exhibit.choice
    x_axes = {axis.domain[0] for axis in figure.select_xaxes() if axis.domain is not None}
    bars = {trace.colorbar.x for trace in figure.select_traces("heatmap")}
    groups: dict[str, list[Option]] = {}
    by_key = {option.key: option for option in choice.options} if choice else {}
    for option in by_key.values():
        groups.setdefault(option.group, []).append(option)
    return {
        "exhibit": exhibit,
        "json": figure_json(figure, choice.variants() if choice else {}),
        "height": int(figure.layout.height or style.HEIGHT),
        # Panels or scales side by side, which a phone must not squeeze.
        "broad": len(x_axes) > 1 or len(bars) > 1,
        "options": list(groups.items()),
        "chosen": choice.options[choice.start] if choice else None,
        "small": [by_key[key] for key in choice.grid if key in by_key] if choice else [],
    }


def script_json(value: Any) -> str:
    """Encode `value` as ASCII JSON that is safe inside `<script type="application/json">`; keys sorted."""
    text = json.dumps(value, cls=PlotlyJSONEncoder, sort_keys=True, separators=(",", ":"))
    # What could close the script element, open a comment, or end a line inside a string.
    return text.translate({ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"})


def figure_json(figure: go.Figure, variants: dict[str, list[Patch]]) -> str:
    """Encode a figure without its template, and what each variant lays over each trace's own entries."""
    content = figure.to_plotly_json()
    content["layout"].pop("template", None)
    return script_json(content | {"variants": variants})
