"""The README.md of each paper's folder: `python -m tools.paper_readmes`.

Names, their order, commands and what is smaller than published are the declarations'; answers are the gallery's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from theodolite.report.outcome_page import SOURCES
from theodolite.system.wording import reading_order
from theodolite_papers import ALIASES, EXPERIMENTS
from tools.gallery import ANSWERS, GROUPS, counted, folder_of, repeats, results, training_of

PAPERS = Path(__file__).parent.parent / "theodolite_papers"
COLUMNS = ("name", "shows", "command", "smaller than published", "verdicts")


def names(group: str) -> list[str]:
    """The experiments and the figures published elsewhere of one paper, in its order."""
    return sorted(
        (name for name in {**EXPERIMENTS, **ALIASES} if name.startswith(f"{group}/")), key=reading_order
    )


def place(group: str) -> Path:
    """Where the paper's README is."""
    module = EXPERIMENTS[names(group)[0]].fill.__module__
    return PAPERS / module.split(".")[-2] / "README.md"


def declared(name: str) -> tuple[str, ...]:
    """The columns of an experiment that need no result."""
    alias = ALIASES.get(name)
    experiment = EXPERIMENTS[alias.of if alias else name]
    shows = f"`{alias.of}`, published for {alias.published_on}" if alias else experiment.title
    return name, shows, f"`theodolite reproduce {name}{folder_of(training_of(name))}`", experiment.scaled_down


def verdicts(name: str, found: dict[str, Any]) -> str:
    """`holds 3, fails 1`."""
    if name in ALIASES:
        return f"those of `{ALIASES[name].of}`"
    if repeats(name):
        return "those of the others"
    if name not in found:
        return "needs training" if training_of(name) else "not made"
    counts = counted(found[name]["verdicts"])
    return (
        ", ".join(f"{answer} {counts[answer]}" for answer in ANSWERS if counts[answer])
        or "none: numbers only"
    )


def readme(group: str, found: dict[str, Any]) -> str:
    """The whole page."""
    trained = dict.fromkeys(command for name in names(group) if (command := training_of(name)))
    lines = [
        f"# {GROUPS[group]}",
        "",
        "<!-- written by tools/paper_readmes.py -->",
        "",
        SOURCES[group],
        "",
        f"Verdicts are those of [the gallery](../../docs/gallery-{group}.md), which has every claim with its "
        f"evidence, and what it was made of; the [findings](../../docs/findings-{group}.md) say what came of it, "
        f"and the [errata](../../docs/errata-{group}.md) which formulas do not hold as printed. All at once:",
        "",
        "```bash",
        f"theodolite reproduce {group} --length 128 --contexts {1024 if group == 'geometry' else 256}",
        *(command for command, _ in trained),
        "```",
        "",
    ]
    if trained:
        lines += ["The `theodolite train` commands write the folders that some are read from.", ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    for name in names(group):
        cells = (cell.replace("|", r"\|") for cell in (*declared(name), verdicts(name, found)))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for paper in GROUPS:
        place(paper).write_text(readme(paper, results()), encoding="utf-8")
