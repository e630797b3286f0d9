"""The README.md of each paper's folder, from a `reproduce` of the embedded model: `python -m tools.paper_readmes RUN`.

Names, their order, commands and what is smaller than published are the declarations'; answers are from the
`result.json` files below the folder.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from theodolite.judging import reading_order
from theodolite.papers import ALIASES, EXPERIMENTS
from theodolite.report.outcome_page import SOURCES
from tools.gallery import ANSWERS, GROUPS, folder_of, results, training_of

PAPERS = Path(__file__).parent.parent / "theodolite" / "papers"
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
    if name not in found:
        return "needs training" if training_of(name) else "not made"
    counts = Counter(verdict["answer"] for verdict in found[name][0]["verdicts"])
    return (
        ", ".join(f"{answer} {counts[answer]}" for answer in ANSWERS if counts[answer])
        or "none: numbers only"
    )


def readme(group: str, found: dict[str, Any]) -> str:
    """The whole page."""
    made = next(result["provenance"] for result, _ in found.values() if result["provenance"].get("corpus"))
    model, corpus, versions = made["model"], made["corpus"], made["versions"]
    options = f"--length {corpus['length']} --contexts {corpus['contexts']}"
    trained = dict.fromkeys(command for name in names(group) if (command := training_of(name)))
    lines = [
        f"# {GROUPS[group]}",
        "",
        "<!-- written by tools/paper_readmes.py -->",
        "",
        SOURCES[group],
        "",
        f"Verdicts are of the embedded model ({model['parameters']:,} parameters), on "
        f"{corpus['contexts']} contexts of {corpus['length']} tokens of {corpus['name']}, seed {made['seed']}, "
        f"theodolite {versions['theodolite']}, torch {versions['torch']}, transformers {versions['transformers']}. "
        f"[Every claim with its evidence](../../../docs/gallery-{group}.md) is of a run of its own; the "
        f"[findings](../../../docs/findings-{group}.md) say what came of it, and the "
        f"[errata](../../../docs/errata-{group}.md) which formulas do not hold as printed. All at once:",
        "",
        "```bash",
        f"theodolite reproduce {group} {options}",
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


def main(folder: str) -> None:
    """Write all of them."""
    found = results([Path(folder)])
    if not found:
        raise SystemExit("give the folder of a run of which `theodolite reproduce` made the experiments")
    for group in GROUPS:
        place(group).write_text(readme(group, found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
