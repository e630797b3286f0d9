"""The measured part of the page of families, docs/families.md: `python -m tools.families`.

Every text family of `transformers` is measured by `tools/measured_families.py`, whose results are written out here.
"""

from __future__ import annotations

import re
from pathlib import Path

from tools import measured_families
from tools.measured_families import OUTCOMES, Measured

PAGE = Path(__file__).parent.parent / "docs" / "families.md"
BEGIN, END = "<!-- measured by tools/measured_families.py -->", "<!-- end of what is measured -->"


def measured() -> str:
    """The measured part of the page."""
    facts, families = measured_families.read()
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    parts = [f"Measured on {facts['date']} with {versions}.", _counts(families)]
    for outcome in OUTCOMES:
        chosen = [family for family in families if family.outcome == outcome]
        if chosen:
            parts.append(f"### {outcome.capitalize()}")
            parts.append(_names(chosen) if outcome == "surveyed" else _reasons(chosen))
    return "\n\n".join(parts)


def _counts(families: list[Measured]) -> str:
    counts = {outcome: sum(family.outcome == outcome for family in families) for outcome in OUTCOMES}
    rows = [f"| {outcome} | {counts[outcome]} | {meaning} |" for outcome, meaning in OUTCOMES.items()]
    table = "\n".join(["| outcome | families | |", "| --- | ---: | --- |", *rows])
    attending = len(families) - counts["not built"] - counts["no attention"]
    read = counts["surveyed"] + counts["partly"]
    share = f"{read / attending:.0%}"
    return f"{table}\n\nOf {attending} that can be built and attend, {read} are surveyed whole or in part ({share})."


def _names(families: list[Measured]) -> str:
    whole = ", ".join(_shown(family) for family in families if family.compared == "layers and heads")
    others = [family for family in families if family.compared != "layers and heads"]
    listed = "\n".join(f"- {_shown(family)}: {family.compared}" for family in others)
    return (
        f"{whole}\n\nLess could be compared, since their own models return less:\n\n{listed}"
        if others
        else whole
    )


def _shown(family: Measured) -> str:
    attending = f" ({family.attending} of {family.blocks} blocks attend)"
    return f"`{family.name}`" + (attending if family.attending < family.blocks else "")


def _reasons(families: list[Measured]) -> str:
    rows = [f"| `{family.name}` | {_escaped(family.why)} |" for family in families]
    return "\n".join(["| family | |", "| --- | --- |", *rows])


def _escaped(text: str) -> str:
    """Prose that holds names from code, for the cell of a table."""
    return re.sub(r"([|<*_\[\]])", r"\\\1", text)


def page() -> str:
    """The page with its measured part made anew."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return f"{before}{BEGIN}\n\n{measured()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
