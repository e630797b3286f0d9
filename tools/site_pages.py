"""Generate the site's pages that are made from other files: mkdocs-gen-files runs this script.

Pages from files outside docs/, from the command line and from committed results; and, where a page of docs/ has a
comment such as `<!-- families -->`, what belongs there.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mkdocs_gen_files

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # mkdocs runs this file alone, from wherever it is called

DOCS, RESULTS = ROOT / "docs", ROOT / "docs" / "results"
OUTSIDE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "theodolite/assets/embedded/README.md": "embedded-model.md",
    "theodolite/assets/errors.md": "trust.md",
    "examples/attention.ipynb": "notebooks/attention.ipynb",
    "examples/collapse.ipynb": "notebooks/collapse.ipynb",
    "examples/pruning.ipynb": "notebooks/pruning.ipynb",
}
"""File of the repository → page of the site. Links of pages to the former become links to the latter."""

DISTURBED = {
    "kills": "kills at file events and at random moments",
    "files": "damaged files",
}
_MARK = re.compile(
    r"^<!-- (table|columns|arrays|families|chaos|errors|gpu|experiments)(?:: (.*))? -->$", re.MULTILINE
)
_LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
_PLOTLY = "application/vnd.plotly.v1+json"


def main() -> None:
    """Write all generated pages."""
    from tools import gallery

    write("commands.md", commands())
    for page, text in gallery.pages().items():
        write(page, text)
    for source, page in OUTSIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        if page.endswith(".ipynb"):
            write(page, with_figures(text))
        elif page != "trust.md":
            write(page, _LINK.sub(_from_root, text))
    write("notebooks/plotly.min.js", _plotly())
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        made = _LINK.sub(_into_site, _MARK.sub(lambda mark: PARTS[mark[1]](mark[2]), text))
        if made != text:
            write(path.name, made)


def write(page: str, text: str) -> None:
    """Add a page to the site, or take the place of one of docs/."""
    with mkdocs_gen_files.open(page, "w", encoding="utf-8") as file:
        file.write(text)


def _from_root(link: re.Match[str]) -> str:
    """Rewrite a link of a file in the repository's root, or in a folder that links upwards, as seen from docs/."""
    if "://" in link[1]:
        return link[0]
    target = re.sub(r"^(\.\./)+", "", link[1])
    return f"]({OUTSIDE.get(target) or target.removeprefix('docs/')}{link[2] or ''})"


def _into_site(link: re.Match[str]) -> str:
    inside = OUTSIDE.get(link[1].removeprefix("../")) if link[1].startswith("../") else None
    return f"]({inside}{link[2] or ''})" if inside else link[0]


def commands() -> str:
    """List every command with its arguments, options and defaults, as its help has them."""
    import typer
    from typer.cli import get_docs_for_click

    from theodolite.cli.app import app

    command = typer.main.get_command(app)
    context = command.make_context("theodolite", [], resilient_parsing=True)
    text = get_docs_for_click(obj=command, ctx=context, name="theodolite", title="Commands")
    text = re.sub(r"^\*\*Commands\*\*:\n\n(\* .*\n)+", "", text, flags=re.MULTILINE)  # cut short there
    text = re.sub(r"^Example: (theodolite .*)$", r"```bash\n\1\n```", text, flags=re.MULTILINE)
    text = re.sub(r"^(\* `[^`]+`: )(.*)$", lambda row: row[1] + escaped(row[2]), text, flags=re.MULTILINE)
    return re.sub(r"^(#+) `(.*)`$", r"\1 \2", text, flags=re.MULTILINE).replace("$ theodolite", "theodolite")


def with_figures(notebook: str) -> str:
    """Let a notebook's figures be drawn by the Plotly beside it: kept outputs have their data alone."""
    loaded = json.loads(notebook)
    outputs = [output for cell in loaded["cells"] for output in cell.get("outputs", [])]
    for number, output in enumerate(outputs):
        if figure := output.get("data", {}).get(_PLOTLY):
            drawn = json.dumps({key: figure[key] for key in ("data", "layout")}).replace("</", "<\\/")
            output["data"]["text/html"] = (
                f'<script src="plotly.min.js"></script><div id="figure-{number}"></div>'
                f"<script>Plotly.newPlot('figure-{number}', {drawn})</script>"
            )
    return json.dumps(loaded)


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def table(name: str) -> str:
    """Tabulate every column of a table of the run folder, from the declarations beside their formulas."""
    from theodolite.measure.column import declared

    described = declared(name)
    errors: dict[str, list[str]] = {}
    for column in described.values():
        if column.error:
            errors.setdefault(column.error, []).append(f"`{column.name}`")
    lines = [_rows(described, list(described))]
    for error, names in errors.items():
        lines.append(f"Standard errors `…_se` of {', '.join(names)}: by {error}.")
    return "\n\n".join(lines)


def columns(names: str) -> str:
    """Write the rows of the run folder's page for these columns, of layers and heads or named as `TABLE.COLUMN`."""
    from theodolite.measure.column import declared

    described = declared("layers") | declared("heads")
    wanted = names.split(", ")
    for name in wanted:
        of, _, column = name.rpartition(".")
        described |= {name: declared(of)[column]} if of else {}
    return _rows(described, wanted)


def _rows(described: dict[str, Any], names: list[str]) -> str:
    """Tabulate columns: those that differ by a number, or by the matrix that they are of, share a row."""
    rows: dict[str, list[str]] = {}
    for name in names:
        column = described[name]
        if name.removesuffix("_data") in names and name.endswith("_data"):
            continue
        parts = [column.meaning, column.formula, f"In {column.unit}." if column.unit else ""]
        parts += [f"Chance alone gives `{column.floor}`." if column.floor else ""]
        text = re.sub(r"\d+ × \d+ (?=lowest)", "K × K ", " ".join(part for part in parts if part))
        both = [column.name, f"{column.name}_data"] if f"{name}_data" in described else [column.name]
        rows.setdefault(f"{escaped(text)} | {escaped(column.source)}", []).extend(f"`{one}`" for one in both)
    lines = ["| column | meaning | source |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {', '.join(of)} | {text} |" for text, of in rows.items())])


def arrays(_: str | None) -> str:
    """Tabulate every array of a run, from the declarations."""
    from theodolite.measure import column

    rows = [f"| `{a.name}` | {a.shape} | {escaped(a.meaning)} |" for a in column.arrays().values()]
    return "\n".join(["| name | shape | what |", "| --- | --- | --- |", *rows])


def families(_: str | None) -> str:
    """List every text family of `transformers` by outcome."""
    from tools.measured_families import OUTCOMES, read

    facts, measured = read()
    by_outcome = {outcome: [one for one in measured if one.outcome == outcome] for outcome in OUTCOMES}
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines = [
        f"Measured on {facts['date']} with {versions}.",
        "",
        "| outcome | families | |",
        "| --- | ---: | --- |",
    ]
    lines += [f"| {outcome} | {len(by_outcome[outcome])} | {why} |" for outcome, why in OUTCOMES.items()]
    for outcome, chosen in by_outcome.items():
        if chosen:
            lines += ["", f"## {outcome.capitalize()}", ""]
        if outcome == "surveyed":
            lines.append(", ".join(f"`{one.name}`" for one in chosen))
        elif chosen:
            lines += ["| family | |", "| --- | --- |"]
            lines += [f"| `{one.name}` | {escaped(one.why)} |" for one in chosen]
    return "\n".join(lines)


def chaos(_: str | None) -> str:
    """Tabulate how often disturbed commands were right, refused, or else, in the last whole `make chaos`."""
    result = json.loads((RESULTS / "chaos.json").read_text("utf-8"))
    answers = list(next(iter(result["counts"].values())))
    lines = [f"On {result['date']} (commit {result['commit']}, seed {result['seed']}):", ""]
    lines += ["| disturbed by | " + " | ".join(answers) + " |", "| --- |" + " ---: |" * len(answers)]
    for kind, title in DISTURBED.items():
        lines.append(
            f"| {title} | " + " | ".join(f"{result['counts'][kind][answer]:,}" for answer in answers) + " |"
        )
    return "\n".join(lines)


def errors(_: str | None) -> str:
    """Include what `theodolite explain` reads, one level of heading lower."""
    text = (ROOT / "theodolite" / "assets" / "errors.md").read_text("utf-8").partition("\n")[2]
    return re.sub(r"^##", "###", text, flags=re.MULTILINE).strip()


def gpu(_: str | None, folder: Path = ROOT / "benchmarks" / "results") -> str:
    """Tabulate each device that `make bench-gpu` has measured."""
    results = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]
    if not results:
        return "No GPU has been measured yet: what these pages say of time and memory is of CPUs."
    return "\n\n".join(map(_of_device, results))


def _of_device(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    lines = [f"{result['device']}, {result['memory_gib']} GiB, {result['date']}; {versions}:", ""]
    lines += ["| ratio | median | range | bound |", "| --- | --- | --- | --- |"]
    for benchmark in result["benchmarks"]:
        if benchmark["error"]:
            lines.append(f"| `{benchmark['name']}` was not measured | {escaped(benchmark['error'])} | | |")
        for ratio in benchmark["ratios"]:
            bound = "" if ratio["budget"] is None else f"{ratio['budget']:g}"
            middle, low, high = (f"{ratio[name]:.3g}" for name in ("median", "low", "high"))
            lines.append(f"| {ratio['what']} | {middle} | {low} to {high} | {bound} |")
    return "\n".join(lines)


def experiments(_: str | None) -> str:
    """List every name that `theodolite reproduce` takes, with what it shows, needs and has smaller than published."""
    from theodolite_papers import EXPERIMENTS

    lines = ["| name | shows | needs | smaller than published |", "| --- | --- | --- | --- |"]
    for name, experiment in EXPERIMENTS.items():
        needs = ", ".join(
            need for need in experiment.declared.needs if need in ("model", "nothing", "prompt", "labels")
        )
        lines.append(
            f"| `{name}` | {escaped(experiment.title)} | {needs} | {escaped(experiment.declared.scaled_down)} |"
        )
    return "\n".join(lines)


def escaped(text: str) -> str:
    """Escape prose that holds names from code, for the cell of a table; what is between backticks stays."""
    return re.sub(r"(`[^`|]*`)|([|<*_\[\]])", lambda match: match[1] or f"\\{match[2]}", text)


PARTS: dict[str, Callable[[Any], str]] = {
    part.__name__: part for part in (table, columns, arrays, families, chaos, errors, gpu, experiments)
}

if __name__ == "<run_path>":  # as mkdocs-gen-files calls it
    main()
