"""Make the gallery of every claim of the papers; `python -m tools.gallery FOLDER …` takes in new results.

What folders of `theodolite reproduce` have goes into docs/results/gallery (each `result.json` without its tables) and
docs/images/gallery; where several have an experiment, the last one. The pages are made of these when the site is built.
"""

from __future__ import annotations

import html
import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from theodolite.corpus import spec
from theodolite.judging import FAILS, HOLDS, IN_PART, UNDECIDED, UNTESTABLE, Verdict, independent
from theodolite.report.outcome import JUDGED, KINDS, RESULT, SOURCES
from theodolite_papers import ALIASES, EXPERIMENTS
from theodolite_papers.catalogue import all_need

DOCS = Path(__file__).parent.parent / "docs"
PICTURES, RESULTS = DOCS / "images" / "gallery", DOCS / "results" / "gallery"
ANSWERS = (HOLDS, IN_PART, FAILS, UNDECIDED, UNTESTABLE)
GROUPS = {"geometry": "Position and context", "localization": "Localization", "sinks": "Sinks and pruning"}

_ADDER = (
    "theodolite train addition --digits 10 --positions rotary --rate 3e-4 --steps 8000 --series --out adder"
)
_LOCATER = "theodolite train locater --text wikitext-2/valid.txt --held-out wikitext-2/test.txt --out grid"
TRAININGS = {
    **dict.fromkeys(
        (f"geometry/{name}" for name in ("training", "addition", "figure21", "figure22", "figure23")), _ADDER
    ),
    **dict.fromkeys((f"localization/figure{number}" for number in (6, 7, 8, 9, 10, 11, 12)), _LOCATER),
}
"""Experiment → the command that trains what it is read from."""


def names() -> list[str]:
    """List the experiments of the gallery: pages of claims repeat those of the others."""
    return [name for name in EXPERIMENTS if not name.endswith("/claims")]


def new_results(folders: list[Path]) -> dict[str, tuple[dict[str, Any], Path]]:
    """Find name → (result, folder) of every experiment in the folders or their `reproduce/`."""
    found: dict[str, tuple[dict[str, Any], Path]] = {}
    for folder in folders:
        for path in sorted([*folder.glob(f"*/{RESULT}"), *folder.glob(f"reproduce/*/{RESULT}")]):
            loaded = json.loads(path.read_text(encoding="utf-8"))
            if loaded["name"] in {*names(), *ALIASES}:
                found[loaded["name"]] = loaded, path.parent
    return found


def kept(result: dict[str, Any]) -> dict[str, Any]:
    """Take from a result what the pages show: judged tables, verdicts, readings, and a short provenance."""
    provenance = {"seed": result["provenance"]["seed"], "versions": result["provenance"]["versions"]}
    for of, told in {"model": ("id", "sha256"), "corpus": ("name", "length", "contexts", "sha256")}.items():
        if of in result["provenance"]:
            provenance[of] = {entry: result["provenance"][of].get(entry) for entry in told}
    parts = ("name", "title", "paper", "readings", "verdicts")
    judged = result["tables"].get(JUDGED, [])
    return {part: result[part] for part in parts} | {JUDGED: judged, "provenance": provenance}


def results() -> dict[str, dict[str, Any]]:
    """Load name → result of what was taken in."""
    loaded = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json")))
    return {result["name"]: result for result in loaded}


def pages() -> dict[str, str]:
    """Write name → text of the index and of the page of every paper."""
    found = results()
    rows = ["| | " + " | ".join(ANSWERS) + " |", "| --- |" + " ---: |" * len(ANSWERS)]
    made = {}
    for group, title in GROUPS.items():
        members = [name for name in [*names(), *sorted({*found} & {*ALIASES})] if name.startswith(group)]
        verdicts = [Verdict(**each) for name in members if name in found for each in found[name]["verdicts"]]
        answers = [verdict.answer for verdict in independent(verdicts)]
        counts = " | ".join(str(answers.count(answer)) for answer in ANSWERS)
        rows.append(f"| [{title}](gallery-{group}.md) | {counts} |")
        lines = [
            f"# Gallery: {title[0].lower()}{title[1:]}",
            "",
            f"{SOURCES[group]} [All papers](gallery.md).",
        ]
        for name in members:
            lines += ["", *(_entry(name, found[name]) if name in found else _missing(name))]
        made[f"gallery-{group}.md"] = "\n".join(lines) + "\n"
    made["gallery.md"] = _INDEX + "\n".join(rows) + "\n"
    return made


_INDEX = """# Gallery

The papers' tables and figures, made again, with a [verdict](reproduce.md#how-a-claim-is-judged) on every claim.

Most is of the [model inside the package](embedded-model.md), which has 1.5 million parameters: what fails here may
hold in larger models, and the same commands say so for yours.

"""


def _entry(name: str, result: dict[str, Any]) -> list[str]:
    lines = [f"## {name}", "", f"**{plain(result['title'])}.** {plain(result['paper'])}.", ""]
    for picture in sorted(PICTURES.glob(f"{_file(name)}.*")):
        lines += [f"![{plain(result['title'])}](images/gallery/{picture.name})", ""]
    for verdict in result["verdicts"]:
        lines.append(
            f'- <span class="verdict {KINDS[verdict["answer"]]}">{verdict["answer"]}</span> {plain(verdict["claim"])}'
            f"<br><small>{plain(verdict['evidence'])}</small>"
        )
    if not result["verdicts"]:
        lines.append("No claim is judged here; the page has the numbers.")
    return [*lines, "", *_commands(name, result["provenance"])]


def _missing(name: str) -> list[str]:
    experiment = EXPERIMENTS[name]
    why = "Needs training." if name in TRAININGS else "Needs nothing but the command."
    lines = [f"## {name}", "", f"**{plain(experiment.title)}.** {plain(experiment.paper)}.", ""]
    return [*lines, f'- <span class="verdict open">not made here</span> {why}', "", *_commands(name, None)]


def _commands(name: str, provenance: dict[str, Any] | None) -> list[str]:
    """List the commands that make an experiment, with the text of the committed one."""
    training = TRAININGS.get(name)
    folder = " " + training.split("--out ")[1].split("/")[0].split()[0] if training else ""
    experiment = EXPERIMENTS[ALIASES[name].of if name in ALIASES else name]
    alone = all_need([experiment], "nothing")
    options, made = "", ""
    if provenance is not None:
        corpus = provenance.get("corpus")
        # Theory reads no text, and what is on a prompt reads that: their numbers are the same for any run.
        if corpus is not None and not alone and "prompt" not in experiment.declared.needs:
            text = "" if corpus["name"] == spec.DOCS or training is _ADDER else f" --corpus {corpus['name']}"
            options = f"{text} --length {corpus['length']} --contexts {corpus['contexts']}"
        of = "no model" if alone else Path(provenance["model"]["id"]).name
        made = f"<small>Made of {of}, seed {provenance['seed']}.</small>"
    commands = [*([training] if training else []), f"theodolite reproduce {name}{folder}{options}"]
    return ["```bash", *commands, "```", "", made]


def _file(name: str) -> str:
    return name.replace("/", "-")


def plain(text: str) -> str:
    """Escape a sentence for Markdown: no tags, no emphasis, no machine's paths, no full stop at the end."""
    text = re.sub(r"(?<![\w.])/(?:[\w.-]+/)+", "", text)
    return re.sub(r"([\\`*_{}\[\]|$])", r"\\\1", html.escape(text, quote=False)).removesuffix(".")


def main(folders: list[str]) -> None:
    """Take in what the folders have, with the first figure of each page as Chromium draws it."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    found = new_results([Path(folder) for folder in folders])
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not found or chromium is None:
        raise SystemExit("give folders that `theodolite reproduce` wrote; pictures need Chromium")
    with sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"]).new_page()
        for name, (result, folder) in found.items():
            text = json.dumps(kept(result), indent=1, ensure_ascii=False)
            (RESULTS / f"{_file(name)}.json").write_text(text + "\n", encoding="utf-8")
            page.goto((folder / "index.html").resolve().as_uri())
            figure = page.locator("[data-figure].js-plotly-plot:not(.compact)").first
            shown = page.locator("[data-figure]:not(.compact)")
            if shown.count():
                shown.first.scroll_into_view_if_needed()  # figures are drawn when they are seen
                for old in PICTURES.glob(f"{_file(name)}.*"):
                    old.unlink()
                figure.wait_for()
                picture = Image.open(io.BytesIO(figure.screenshot())).convert("RGB")
                # In the 256 colours that are nearest to its own: a third of the room, and fewer would bend scales.
                picture = picture.quantize(256, kmeans=3, dither=Image.Dither.NONE)
                picture.save(PICTURES / f"{_file(name)}.png", optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])
