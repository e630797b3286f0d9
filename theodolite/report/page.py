"""`write_report`: a run as one page that opens from disk with no network, and Plotly's script beside it.

The page's strings come from anybody's files: the template escapes all of them, data blocks are made safe by
`payload`, and a content security policy lets only our two scripts run. The same run gives the same bytes.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from theodolite.files import write_text, writing
from theodolite.report import content, style
from theodolite.report.exhibit import Exhibit, Option
from theodolite.report.exhibits import exhibits, measure_glossary
from theodolite.report.payload import figure_json, script_json
from theodolite.report.summary import Finding, summarise
from theodolite.report.text import visible
from theodolite.run import Run

SECTIONS = ("position", "context", "depth", "heads", "constituents", "head", "sinks", "outliers")
PLOTLY = "plotly.min.js"


@dataclass(frozen=True)
class Block:
    """One exhibit as the template needs it: its caption, its data, its pickers."""

    exhibit: Exhibit
    json: str
    height: int
    options: list[tuple[str, list[Option]]]
    chosen: Option | None
    small: list[Option]


def write_report(run: Run, folder: str | Path) -> Path:
    """Write `folder`/index.html and Plotly's script beside it, and return the page's path.

    Files that are there already are replaced, each at once or not at all.

    Raises:
        WorkError: the folder cannot be written.
    """
    folder = Path(folder)
    page = render(run)
    existed = folder.exists()
    with writing(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / PLOTLY, get_plotlyjs())
            write_text(folder / "index.html", page)
        except BaseException:
            if not existed:
                shutil.rmtree(folder, ignore_errors=True)
            raise
    return folder / "index.html"


def render(run: Run) -> str:
    """The page as one string of HTML."""
    jinja = environment()
    blocks = {section: [block_of(run, exhibit) for exhibit in exhibits(run, section)] for section in SECTIONS}
    templates = resources.files("theodolite.report") / "templates"
    static = {name: (templates / name).read_text(encoding="utf-8") for name in ("page.css", "page.js")}
    tiles = content.tiles(run)
    values: dict[str, Any] = {
        "title": visible((run.provenance.get("model") or {}).get("id") or "a model", 80),
        "subtitle": content.subtitle(run),
        "text_line": content.text_line(run),
        "topics": _topics(summarise(run)),
        "tiles": tiles,
        "blocks": blocks,
        "glossary": measure_glossary(run),
        "sink_texts": content.sink_texts(run),
        "sink_tokens": content.sink_tokens(run),
        "outliers": content.outlier_table(run),
        "layers": content.layers_table(run),
        "heads": content.heads_table(run),
        "attribution": content.attribution_table(run),
        "errors": any(tile.error for tile in tiles),
        "first_head": content.first_head(run),
        "cards": script_json(content.head_cards(run)),
        "themes": script_json(themes()),
        "provenance": content.provenance_rows(run),
        "plotly": PLOTLY,
        **{name.replace(".", "_"): text for name, text in static.items()},
    }
    template = jinja.get_template("page.html.j2")
    # The nonce is the digest of the page without it: fixed for a run, and nothing that a text could know.
    nonce = hashlib.sha256(template.render(values, nonce="").encode("utf-8", "surrogatepass")).hexdigest()[
        :32
    ]
    return template.render(values, nonce=nonce)


def environment() -> jinja2.Environment:
    """Of all pages: whatever a template shows is escaped, and what it lacks is an error."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("theodolite.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def block_of(run: Run, exhibit: Exhibit) -> Block:
    """What a template needs of an exhibit: its figure as JSON, and the choices of its picker."""
    figure, choice = exhibit.draw(run), exhibit.choice
    height = int(figure.layout.height or style.HEIGHT)
    if choice is None:
        return Block(exhibit, figure_json(figure, {}), height, [], None, [])
    options = choice.options(run)
    json = figure_json(figure, {option.key: choice.patch(run, option.key) for option in options})
    groups: dict[str, list[Option]] = {}
    for option in options:
        groups.setdefault(option.group, []).append(option)
    small = choice.grid(run) if choice.grid else []
    by_key = {option.key: option for option in options}
    first = options[len(options) // 2 if choice.name == "layer" else 0]
    return Block(
        exhibit, json, height, list(groups.items()), first, [by_key[key] for key in small if key in by_key]
    )


def _topics(findings: list[Finding]) -> list[tuple[str, list[Finding]]]:
    topics: dict[str, list[Finding]] = {}
    for finding in findings:
        topics.setdefault(finding.topic, []).append(finding)
    return list(topics.items())


def themes() -> dict[str, Any]:
    """The figures' light and dark templates, and which colours change between them."""
    return {
        "light": style.template().to_plotly_json(),
        "dark": style.template(dark=True).to_plotly_json(),
        "swaps": style.dark_swaps(),
    }
