"""Make the gallery of every claim of the papers, by model: pages of the site, from committed results.

`make real` takes in the results of the real models: docs/results/real has one file for each, of every `result.json`
without its tables. What needs no model, or one that is trained for it, is in docs/results/gallery:
`python -m tools.gallery FOLDER …` takes that in from folders of `theodolite reproduce`. Pictures go to
docs/images/gallery.
"""

from __future__ import annotations

import html
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from theodolite.corpus import spec
from theodolite.judging import FAILS, HOLDS, IN_PART, UNDECIDED, UNTESTABLE, Verdict, independent
from theodolite.report.outcome import JUDGED, KINDS, RESULT, SOURCES
from theodolite_papers import ALIASES, EXPERIMENTS
from theodolite_papers.catalogue import all_need
from tools.pictures import browser, few_colours
from tools.real_models import MODELS

DOCS = Path(__file__).parent.parent / "docs"
PICTURES, RESULTS, REAL = DOCS / "images" / "gallery", DOCS / "results" / "gallery", DOCS / "results" / "real"
ANSWERS = (HOLDS, IN_PART, FAILS, UNDECIDED, UNTESTABLE)
GROUPS = {"geometry": "Position and context", "localization": "Localization", "sinks": "Sinks and pruning"}
NAMES = {"smollm2": "SmolLM2", "gemma3": "Gemma 3", "minilm": "MiniLM"}
"""How the real models are called in tables."""

_ADDER = "theodolite train addition --digits 10 --positions rotary --rate 3e-4 --steps 8000 --out adder"
_LOCATER = "theodolite train locater --text wikitext-2/valid.txt --held-out wikitext-2/test.txt --out grid"
TRAININGS = {
    **dict.fromkeys(
        (f"geometry/{name}" for name in ("addition", "figure21", "figure22", "figure23")), _ADDER
    ),
    **dict.fromkeys((f"localization/figure{number}" for number in (6, 7, 8, 9, 10, 11, 12)), _LOCATER),
}
"""Experiment → the command that trains what it is read from."""

Result = dict[str, Any]


def names() -> list[str]:
    """List the experiments of the gallery: pages of claims repeat those of the others."""
    return [name for name in EXPERIMENTS if not name.endswith("/claims")]


def new_results(folders: Sequence[Path]) -> dict[str, tuple[Result, Path]]:
    """Find name → (result, folder) of every experiment in the folders or their `reproduce/`."""
    found: dict[str, tuple[Result, Path]] = {}
    for folder in folders:
        for path in sorted([*folder.glob(f"*/{RESULT}"), *folder.glob(f"reproduce/*/{RESULT}")]):
            loaded = json.loads(path.read_text(encoding="utf-8"))
            if loaded["name"] in {*names(), *ALIASES}:
                found[loaded["name"]] = loaded, path.parent
    return found


def kept(result: Result) -> Result:
    """Take from a result what the pages show: judged tables, verdicts, readings, and a short provenance."""
    provenance = {"seed": result["provenance"]["seed"], "versions": result["provenance"]["versions"]}
    for of, told in {"model": ("id", "sha256"), "corpus": ("name", "length", "contexts", "sha256")}.items():
        if of in result["provenance"]:
            provenance[of] = {entry: result["provenance"][of].get(entry) for entry in told}
    parts = ("name", "title", "paper", "readings", "verdicts")
    judged = result["tables"].get(JUDGED, [])
    return {part: result[part] for part in parts} | {JUDGED: judged, "provenance": provenance}


def results() -> dict[str, dict[str, Result]]:
    """Load name → model → result of what was taken in; the model "" is none, or one that was trained for it."""
    found: dict[str, dict[str, Result]] = {}
    for model in MODELS:
        path = REAL / f"{model}.json"
        taken = json.loads(path.read_text(encoding="utf-8"))["results"] if path.is_file() else {}
        for name, result in taken.items():
            found.setdefault(name, {})[NAMES[model]] = result
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        found.setdefault(result["name"], {})[""] = result
    return found


def pages() -> dict[str, str]:
    """Write name → text of the index and of the page of every paper."""
    found = results()
    rows = ["| | model | " + " | ".join(ANSWERS) + " |", "| --- | --- |" + " ---: |" * len(ANSWERS)]
    made = {}
    for group, title in GROUPS.items():
        members = [name for name in [*names(), *sorted({*found} & {*ALIASES})] if name.startswith(group)]
        for model in (*NAMES.values(), ""):
            verdicts = [
                Verdict(**each)
                for name in members
                for each in found.get(name, {}).get(model, {"verdicts": []})["verdicts"]
            ]
            answers = [verdict.answer for verdict in independent(verdicts)]
            counts = " | ".join(str(answers.count(answer)) for answer in ANSWERS)
            rows.append(f"| [{title}](gallery-{group}.md) | {model or 'theory, small models'} | {counts} |")
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

The papers' tables and figures, made again for three models that people use, with a
[verdict](reproduce.md#how-a-claim-is-judged) on every claim: SmolLM2-135M-Instruct and Gemma 3 270M
(decoders, GGUF files of four bits a weight) and all-MiniLM-L6-v2 (an encoder), on Python's documentation.
`make real` makes all of it. What is theory, or of models that are trained for it, is counted apart.

"""


def _entry(name: str, by_model: Mapping[str, Result]) -> list[str]:
    result = next(iter(by_model.values()))
    lines = [f"## {name}", "", f"**{plain(result['title'])}.** {plain(result['paper'])}.", ""]
    for picture in sorted(PICTURES.glob(f"{_file(name)}.*")):
        lines += [f"![{plain(result['title'])}](images/gallery/{picture.name})", ""]
    claims: dict[str, dict[str, dict[str, str]]] = {}
    for model, one in by_model.items():
        for verdict in one["verdicts"]:
            claims.setdefault(verdict["claim"], {})[model] = verdict
    if claims:
        lines += [
            "| claim | " + " | ".join(model or "verdict" for model in by_model) + " |",
            "| --- |" + " --- |" * len(by_model),
        ]
        for claim, verdicts in claims.items():
            answers = (_answer(verdicts[model]) if model in verdicts else "" for model in by_model)
            lines.append(f"| {plain(claim)} | {' | '.join(answers)} |")
        evidence = "".join(
            f"<p>{plain(claim)}"
            + "".join(
                f"<br><small>{model + ': ' if model else ''}{plain(verdict['evidence'])}</small>"
                for model, verdict in verdicts.items()
            )
            + "</p>"
            for claim, verdicts in claims.items()
        )
        lines += ["", f"<details><summary>The numbers</summary>{evidence}</details>"]
    else:
        lines.append("No claim is judged here; the page has the numbers.")
    return [*lines, "", *_commands(name, by_model)]


def _answer(verdict: Mapping[str, str]) -> str:
    return f'<span class="verdict {KINDS[verdict["answer"]]}">{verdict["answer"]}</span>'


def _missing(name: str) -> list[str]:
    experiment = EXPERIMENTS[name]
    why = "Needs training." if name in TRAININGS else "Needs nothing but the command."
    lines = [f"## {name}", "", f"**{plain(experiment.title)}.** {plain(experiment.paper)}.", ""]
    return [*lines, f'- <span class="verdict open">not made here</span> {why}', "", *_commands(name, {})]


def _commands(name: str, by_model: Mapping[str, Result]) -> list[str]:
    """List the commands that make an experiment, with the text of the committed one."""
    training = TRAININGS.get(name)
    folder = " " + training.split("--out ")[1].split("/")[0].split()[0] if training else ""
    experiment, alone = EXPERIMENTS[ALIASES[name].of if name in ALIASES else name], _alone(name)
    options, made = "", ""
    for model, result in list(by_model.items())[:1]:
        corpus = result["provenance"].get("corpus")
        # Theory reads no text, and what is on a prompt reads that: their numbers are the same for any run.
        if corpus is not None and not alone and "prompt" not in experiment.declared.needs:
            text = "" if corpus["name"] == spec.DOCS or training is _ADDER else f" --corpus {corpus['name']}"
            options = f"{text} --length {corpus['length']} --contexts {corpus['contexts']}"
        folder = folder or (" MODEL" if model else "")
        of = (
            "no model"
            if alone
            else ", ".join(by_model)
            if model
            else Path(result["provenance"]["model"]["id"]).name
        )
        made = f"<small>Made of {of}, seed {result['provenance']['seed']}.</small>"
    commands = [*([training] if training else []), f"theodolite reproduce {name}{folder}{options}"]
    return ["```bash", *commands, "```", "", made]


def _alone(name: str) -> bool:
    """Tell whether an experiment reads no model: it is theory, or a simulation."""
    return all_need([EXPERIMENTS[ALIASES[name].of if name in ALIASES else name]], "nothing")


def _file(name: str) -> str:
    return name.replace("/", "-")


def plain(text: str) -> str:
    """Escape a sentence for Markdown: no tags, no emphasis, no machine's paths, no full stop at the end."""
    text = re.sub(r"(?<![\w.])/(?:[\w.-]+/)+", "", text)
    return re.sub(r"([\\`*_{}\[\]|$])", r"\\\1", html.escape(text, quote=False)).removesuffix(".")


def take_in(runs: Path, model_of: Mapping[str, str], seconds: Mapping[str, int]) -> None:
    """Take in the runs of the real models, by folder; a picture is of the first model that has it."""
    pictured: dict[str, Path] = {}
    REAL.mkdir(parents=True, exist_ok=True)
    for model in dict.fromkeys(model_of.values()):
        folders = [folder for folder, of in model_of.items() if of == model]
        found = new_results([runs / folder for folder in folders])
        of_model = {name: kept(result) for name, (result, _) in found.items() if not _alone(name)}
        for name, (result, _) in found.items():
            if _alone(name):
                _write(RESULTS / f"{_file(name)}.json", kept(result))
        if of_model:
            took = {folder: seconds[folder] for folder in folders if folder in seconds}
            lines = ",\n".join(f"{_json(name)}: {_json(result)}" for name, result in of_model.items())
            text = f'{{"seconds": {_json(took)}, "results": {{\n{lines}\n}}}}\n'
            (REAL / f"{model}.json").write_text(text, encoding="utf-8")
        pictured = {name: folder for name, (_, folder) in found.items()} | pictured
    draw(pictured)


def _json(what: object) -> str:
    return json.dumps(what, ensure_ascii=False, separators=(",", ":"))


def _write(path: Path, what: Result) -> None:
    path.write_text(json.dumps(what, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def draw(folders: Mapping[str, Path]) -> None:
    """Draw the first figure of each experiment's page, as Chromium shows it."""
    with browser() as page:
        for name, folder in folders.items():
            page.goto((folder / "index.html").resolve().as_uri())
            figure = page.locator("[data-figure].js-plotly-plot:not(.compact)").first
            shown = page.locator("[data-figure]:not(.compact)")
            if shown.count():
                shown.first.scroll_into_view_if_needed()  # figures are drawn when they are seen
                for old in PICTURES.glob(f"{_file(name)}.*"):
                    old.unlink()
                figure.wait_for()
                (PICTURES / f"{_file(name)}.png").write_bytes(few_colours(figure.screenshot()))


def main(folders: Sequence[str]) -> None:
    """Take in what needs no real model."""
    found = new_results([Path(folder) for folder in folders])
    if not found:
        raise SystemExit("give folders that `theodolite reproduce` wrote")
    for name, (result, _) in found.items():
        _write(RESULTS / f"{_file(name)}.json", kept(result))
    draw({name: folder for name, (_, folder) in found.items()})


if __name__ == "__main__":
    main(sys.argv[1:])
