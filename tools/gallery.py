"""The gallery, docs/gallery*.md, from folders of `theodolite reproduce`: `python -m tools.gallery FOLDER …`.

One page per paper, and an index. What the folders have is taken into docs/results/gallery (each `result.json` without
its tables) and docs/images/gallery; where several have an experiment, the last one. The pages are made of what is
there: verdicts with their numbers, what was measured on what, and the picture. An experiment that was never taken in is
named with what it takes. Without a folder, only the pages are written.
"""

from __future__ import annotations

import html
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from theodolite.corpus import spec
from theodolite.judging import FAILS, HOLDS, IN_PART, UNDECIDED, UNTESTABLE, Verdict, independent
from theodolite.report.outcome_page import JUDGED, KINDS, RESULT, SOURCES
from theodolite.system import embedded
from theodolite_papers import ALIASES, EXPERIMENTS

DOCS = Path(__file__).parent.parent / "docs"
INDEX, PICTURES, RESULTS = DOCS / "gallery.md", DOCS / "images" / "gallery", DOCS / "results" / "gallery"
ANSWERS = (HOLDS, IN_PART, FAILS, UNDECIDED, UNTESTABLE)
GROUPS = {"geometry": "Position and context", "localization": "Localization", "sinks": "Sinks"}

LOCATER = "theodolite train locater --text wikitext-2/valid.txt --held-out wikitext-2/test.txt --out grid"


def _begun(layers: int, width: int, steps: int, took: str) -> tuple[str, str]:
    """The first steps of a published depth and width, in both readings of κ."""
    of = f"{LOCATER} --layers {layers} --widths {width} --seeds 2 --steps {steps} --means 1"
    return (
        f'{of} --decays 0.01; {of} --decays "" --reduction sum',
        f"six training runs of {steps:,} of the published 50,000 steps, some {took} each on one core",
    )


# Experiment → the command that makes what it is read from, and how long that takes.
TRAININGS: dict[str, tuple[str, str]] = {
    "geometry/training": (
        "theodolite train addition --digits 10 --positions rotary --rate 3e-4 --steps 8000 --series --out adder",
        "half an hour on one core",
    ),
    "localization/figure8": (
        f'{LOCATER} --means 1 --decays 0.01; {LOCATER} --means 1 --decays "" --reduction sum',
        "nine training runs of 50,000 steps, some 18 minutes each on one core",
    ),
    "localization/figure6": _begun(1, 128, 500, "four minutes"),
    "localization/figure9": _begun(3, 32, 2500, "seven minutes"),
    "localization/figure10": _begun(6, 32, 1000, "six minutes"),
    "localization/figure11": _begun(3, 128, 250, "three minutes"),
    "localization/figure12": _begun(6, 128, 250, "five minutes"),
    "sinks/figure3": (
        "for seed in 0 1 2 3 4 5; do theodolite train few-shot --seed $seed --out shots/$seed --threads 1; done",
        "six training runs, a quarter of an hour each on one core",
    ),
}
_SAME = {
    "geometry/addition": "geometry/training",
    "sinks/examples": "sinks/figure3",
    "localization/figure7": "localization/figure8",
}
_ALIASES_OF_TRAINING = ("geometry/figure21", "geometry/figure22", "geometry/figure23")


def training_of(name: str) -> tuple[str, str] | None:
    """What must be trained first, and how long that takes; None where nothing must."""
    where = "geometry/training" if name in _ALIASES_OF_TRAINING else _SAME.get(name, name)
    return TRAININGS.get(where)


def new_results(folders: list[Path]) -> dict[str, tuple[dict[str, Any], Path]]:
    """Name → (result, folder) of every experiment below the folders, at any depth of two."""
    found: dict[str, tuple[dict[str, Any], Path]] = {}
    for folder in folders:
        for path in sorted([*folder.glob(f"*/{RESULT}"), *folder.glob(f"reproduce/*/{RESULT}")]):
            loaded = json.loads(path.read_text(encoding="utf-8"))
            if (loaded["name"] in EXPERIMENTS or loaded["name"] in ALIASES) and not repeats(loaded["name"]):
                found[loaded["name"]] = loaded, path.parent
    return found


def kept(result: dict[str, Any]) -> dict[str, Any]:
    """What of a result is taken in: of tables what verdicts rest on, of what it was made of what pages say."""
    provenance = {"seed": result["provenance"]["seed"], "versions": result["provenance"]["versions"]}
    for of, told in {"model": ("id", "sha256"), "corpus": ("name", "length", "contexts", "sha256")}.items():
        if of in result["provenance"]:
            provenance[of] = {entry: result["provenance"][of].get(entry) for entry in told}
    parts = ("name", "title", "paper", "readings", "verdicts")
    judged = result["tables"].get(JUDGED, [])
    return {part: result[part] for part in parts} | {JUDGED: judged, "provenance": provenance}


def results() -> dict[str, dict[str, Any]]:
    """Name → what was taken in."""
    loaded = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json")))
    return {result["name"]: result for result in loaded}


def pictures() -> dict[str, str]:
    """Name of the picture without its ending → with it."""
    return {path.stem: path.name for path in sorted(PICTURES.iterdir())}


def _file(name: str) -> str:
    return name.replace("/", "-")


def repeats(name: str) -> bool:
    """Whether it is a page of claims, which repeats those of the others."""
    return name.endswith("/claims")


def names() -> list[str]:
    """Every experiment that has a place in the gallery."""
    return [name for name in EXPERIMENTS if not repeats(name)]


def page_of(group: str) -> Path:
    """The page of one paper."""
    return DOCS / f"gallery-{group}.md"


def pages(found: dict[str, dict[str, Any]], drawn: dict[str, str]) -> dict[Path, str]:
    """The index, and the page of every paper, of results and pictures by name."""
    versions = next(iter(found.values()))["provenance"]["versions"]
    of_group = {
        group: [n for n in [*names(), *sorted(set(found) & set(ALIASES))] if n.startswith(group)]
        for group in GROUPS
    }
    made = (
        f"Made with theodolite {versions['theodolite']}, torch {versions['torch']}, transformers "
        f"{versions['transformers']} on Python {versions['python']}, one thread of a CPU."
    )
    index = [
        "# Reproductions",
        "",
        "<!-- written by tools/gallery.py -->",
        "",
        "The papers' tables and figures, made again, with a verdict on every claim. All of it is read from the "
        "folders that `theodolite reproduce` writes; the commands make them again. Most is of the model inside the "
        "package ([its card](../theodolite/assets/embedded/README.md)), which has 1.5 million parameters: what fails "
        "here may hold in larger models, and the same commands say so for yours. "
        "[How a claim is judged](reproduce.md#how-a-claim-is-judged), and [what came of it](findings.md).",
        "",
        made,
        "",
        *_overview(of_group, found),
    ]
    made_pages = {INDEX: "\n".join(index) + "\n"}
    for group, members in of_group.items():
        lines = [f"# Reproductions: {GROUPS[group]}", "", "<!-- written by tools/gallery.py -->", ""]
        lines += [f"{SOURCES[group]} [All papers, and how a claim is judged](gallery.md).", "", made]
        for name in members:
            entry = _entry(name, found[name], drawn.get(_file(name))) if name in found else _missing(name)
            lines += ["", *entry]
        made_pages[page_of(group)] = "\n".join(lines) + "\n"
    return made_pages


def _overview(of_group: dict[str, list[str]], found: dict[str, Any]) -> list[str]:
    rows = ["| | " + " | ".join(ANSWERS) + " |", "| --- |" + " ---: |" * len(ANSWERS)]
    for group, members in of_group.items():
        counts = counted(
            [verdict for name in members if name in found for verdict in found[name]["verdicts"]]
        )
        title = f"[{GROUPS[group]}]({page_of(group).name})"
        rows.append(f"| {title} | " + " | ".join(str(counts[answer]) for answer in ANSWERS) + " |")
    return rows


def counted(verdicts: list[dict[str, str]]) -> Counter[str]:
    """Answer → how many, a number that decides several claims once."""
    return Counter(verdict.answer for verdict in independent([Verdict(**each) for each in verdicts]))


def _entry(name: str, result: dict[str, Any], picture: str | None) -> list[str]:
    lines = [f"## {name}", "", f"**{_plain(result['title'])}.** {_plain(result['paper'])}."]
    if picture is not None:
        lines += ["", f"![{_plain(result['title'])}](images/gallery/{picture})"]
    lines += ["", *_verdicts(result), "", *_commands(name, result)]
    return lines


def _verdicts(result: dict[str, Any]) -> list[str]:
    if not result["verdicts"]:
        return ["No claim is judged here; the page has the numbers."]
    rows = []
    for verdict in result["verdicts"]:
        kind = KINDS[verdict["answer"]]
        rows.append(
            f'- <span class="verdict {kind}">{verdict["answer"]}</span> {_plain(verdict["claim"])}'
            f"<br><small>{_plain(verdict['evidence'])}</small>"
        )
    return rows


def _commands(name: str, result: dict[str, Any]) -> list[str]:
    provenance = result["provenance"]
    corpus, model = provenance.get("corpus"), provenance["model"]
    trained = training_of(name)
    where = folder_of(trained)
    options = ""
    # Theory reads no text, and what is on a prompt reads that: their numbers are the same for any run.
    if (
        corpus is not None
        and "prompt" not in EXPERIMENTS[ALIASES[name].of if name in ALIASES else name].needs
    ):
        text = "" if corpus["name"] == spec.DOCS else f" --corpus {corpus['name']}"
        options = f"{text} --length {corpus['length']} --contexts {corpus['contexts']}"
    if name in _alone():
        options = ""
    shown = [trained[0]] if trained else []
    lines = ["```bash", *shown, f"theodolite reproduce {name}{where}{options}", "```", ""]
    of = (
        "no model"
        if name in _alone()
        else model["id"]
        if model["id"] == embedded.NAME
        else Path(model["id"]).name
    )
    made = (
        f"Made of: {of}, seed {provenance['seed']}."
        if name not in _alone()
        else f"Needs no model; seed {provenance['seed']}."
    )
    took = f" Training: {trained[1]}." if trained else ""
    return [*lines, f"<small>{made}{took}</small>"]


def folder_of(trained: tuple[str, str] | None) -> str:
    """The folder that a training command writes, as an argument."""
    return " " + trained[0].split("--out ")[1].split("/")[0].split()[0] if trained else ""


def _alone() -> set[str]:
    from theodolite_papers.catalogue import need_no_model

    return {name for name, experiment in EXPERIMENTS.items() if need_no_model([experiment])}


def _missing(name: str) -> list[str]:
    experiment = EXPERIMENTS[name]
    trained = training_of(name)
    why = f"Needs training: {trained[1]}." if trained else "Not made here."
    folder = folder_of(trained)
    commands = [trained[0]] if trained else []
    return [
        f"## {name}",
        "",
        f"**{_plain(experiment.title)}.** {_plain(experiment.paper)}.",
        "",
        f'- <span class="verdict open">not made here</span> {why}',
        "",
        "```bash",
        *commands,
        f"theodolite reproduce {name}{folder}",
        "```",
    ]


def _plain(text: str) -> str:
    """A sentence as Markdown shows it: no tags, no emphasis, no machine's paths, no full stop at the end."""
    text = re.sub(r"(?<![\w.])/(?:[\w.-]+/)+", "", text)
    return re.sub(r"([\\`*_{}\[\]|$])", r"\\\1", html.escape(text, quote=False)).removesuffix(".")


def main(folders: list[str]) -> None:
    """Take in what the folders have, and write the pages."""
    from tools.chromium import browser, write_first_figure

    found = new_results([Path(folder) for folder in folders])
    if folders and not found:
        raise SystemExit("give folders that `theodolite reproduce` wrote")
    if found:
        with browser() as chromium:
            for name, (result, folder) in found.items():
                for old in PICTURES.glob(f"{_file(name)}.*"):
                    old.unlink()
                write_first_figure(chromium, folder / "index.html", PICTURES / _file(name))
                text = json.dumps(kept(result), indent=1, ensure_ascii=False)
                (RESULTS / f"{_file(name)}.json").write_text(text + "\n", encoding="utf-8")
    for path, text in pages(results(), pictures()).items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
