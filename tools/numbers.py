"""Where the measured numbers in the prose come from: `python -m tools.numbers` counts them, and prints new ones.

A measured number is a decimal, a percentage, one beside ±, a count out of a count (“3 of 8”), an end of a range, so
many “times”, or alone in the cell of a table. docs/results/prose.json has those of `PAGES`, paragraph by paragraph and
row by row in the order of reading, each with its source, which is one of

- an experiment of the gallery (`geometry/table1`), whose evidence or readings have the number;
- a file of docs/results (`theory`), with values out of a `result.json` and what made them;
- a name in docs/results/recorded.json: a run that was not kept, so that nothing but the page has the number;
- a name in docs/results/not-measured.json: settings, criteria, published figures and the like.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
PAGES = [
    "README.md",
    "docs/costs.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("findings*.md")),
    "theodolite/assets/embedded/README.md",
]
_PLAIN = r"\d{1,3}(?:,\d{3})+(?!\d)|\d+(?:\.\d+)?"
NUMBER = re.compile(
    rf"(?<![\w.])[−-]?(?:{_PLAIN})(?:e[+-]?\d+| ?· ?10[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)?(?:[ \u00a0]?%)?(?![\w]|\.\d)"
)
_NAMED = re.compile(r"(?:section|Theorem|Version|Python|CPython|theodolite|torch) $")
_RANGE = re.compile(r" ±|(?: of (?:its |the )?| to |–)[−\d]| (?:or more )?times")
_ALONE = re.compile(r"[−-]?\d+(?: %)?")
_NOT_PROSE = re.compile(
    r"^---\n.*?^---\n|```.*?```|<!--.*?-->|^#.*?$|!\[[^\]]*\]\([^)]*\)|(?<=\])\([^)]*\)|`[^`]*`", re.M | re.S
)
_POWERS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹−", "-0123456789-")


def units(page: str) -> Iterator[tuple[str, list[str]]]:
    """(where, measured numbers) of every paragraph, list item and row: heading and opening words, digits left out."""
    text = (ROOT / page).read_text(encoding="utf-8")
    seen: Counter[str] = Counter()
    for section in re.split(r"^(?=#+ )", re.sub(r"```.*?```", "", text, flags=re.S), flags=re.M):
        heading = section.partition("\n")[0].strip("# ") if section.startswith("#") else ""
        prose = _NOT_PROSE.sub("", section)
        for unit in re.split(r"\n\s*\n|\n(?=- |\d+\. |\|)", prose):
            numbers = measured(unit)
            if numbers:
                row = unit.strip().startswith("|")
                opening = re.split(r"(?<!\\)\|", unit.strip("| \n-"))[0].strip() if row else unit
                words = " ".join(re.findall(r"[^\W\d_]+", opening)[:6])
                where = f"{heading}: {opening if row else words}"
                seen[where] += 1
                yield where + (f" ({seen[where]})" if seen[where] > 1 else ""), numbers


def measured(unit: str) -> list[str]:
    """The numbers of a paragraph or row that look measured, as printed; “8 ± 2 points” and “5 ± 1 %” with their %."""
    found = []
    row = unit.strip().startswith("|")
    for part in re.split(r"(?<!\\)\|", unit.strip().strip("|")) if row else [unit]:
        for number in NUMBER.finditer(part):
            before, after = part[: number.start()], part[number.end() :]
            if _NAMED.search(before) or not (
                re.search(r"[.%e·]", number[0])
                or before.endswith("± ")
                or _RANGE.match(after)
                or re.search(r"\d(?: of (?:its |the )?| to |–)$", before)
                or (row and _ALONE.fullmatch(part.strip()))
            ):
                continue
            percent = "%" in number[0] or re.match(r"(?: ± [\d.]+)? ?(?:%|points)", after)
            found.append(re.sub(r"[\s%]", "", number[0]) + (" %" if percent else ""))
    return found


def value(printed: str) -> tuple[float, float, bool]:
    """(value, half a unit of its last digit, whether it is in %) of a printed number."""
    number, _, power = re.sub(r"[\s,%]", "", printed).translate(_POWERS).partition("·10")
    digits, _, exponent = number.partition("e")
    scale = 10.0 ** int(power or exponent or 0)
    half = 0.5 * 10.0 ** -len(digits.partition(".")[2])
    return float(digits) * scale, half * scale, printed.endswith("%")


def agrees(printed: str, source: list[str | float]) -> bool:
    """Whether a number is that of a source at its printed precision; “lower by 2” may be −2 there, 3 % may be 0.03."""
    wanted, half, percent = value(printed)
    for entry in source:
        known, known_half, known_percent = value(entry) if isinstance(entry, str) else (entry, 0.0, False)
        if percent and not known_percent:
            known, known_half = 100 * known, 100 * known_half
        if percent < known_percent or (wanted < 0 < known) or known_half > half * 1.001:
            continue
        if abs(abs(known) - abs(wanted)) <= half * (1 + 1e-9):
            return True
    return False


@cache
def gallery() -> dict[str, list[str | float]]:
    """Experiment → the numbers of its evidence, criteria left out, and of its readings."""
    found: dict[str, list[str | float]] = {}
    for path in sorted((RESULTS / "gallery").glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        evidence = (re.sub(r"criterion: [^;]*", "", verdict["evidence"]) for verdict in result["verdicts"])
        found[result["name"]] = NUMBER.findall(
            "; ".join([*evidence, *(r["here"] for r in result["readings"])])
        )
    return found


@cache
def committed(name: str) -> list[str | float] | None:
    """The values of a source, or None where there is nothing to compare with."""
    path = RESULTS / f"{name}.json"
    return list(json.loads(path.read_text())["values"].values()) if path.exists() else gallery().get(name)


def named(kind: str) -> dict[str, Any]:
    """docs/results/recorded.json or not-measured.json."""
    return dict(json.loads((RESULTS / f"{kind}.json").read_text(encoding="utf-8")))


def prose() -> dict[str, dict[str, list[list[str]]]]:
    """docs/results/prose.json: page → where → [source, numbers of it in a row] in order."""
    return dict(json.loads((RESULTS / "prose.json").read_text(encoding="utf-8")))


def problems() -> list[str]:
    """What is wrong: numbers without a source, numbers that their source does not have, entries without a number."""
    listed = prose()
    known = {*named("recorded"), *named("not-measured")}
    wrong = []
    for page in PAGES:
        entries = dict(listed.get(page, {}))
        for where, numbers in units(page):
            entry = entries.pop(where, [])
            if [number for _, run in entry for number in run.split("; ")] != numbers:
                wrong.append(f'{page}: not as listed: "{where}": [["", "{"; ".join(numbers)}"]]')
                continue
            for source, run in entry:
                values = committed(source)
                if values is None and source not in known:
                    wrong.append(f"{page}: {where}: no source {source!r}")
                for number in run.split("; ") if values is not None else ():
                    if not agrees(number, values or []):
                        wrong.append(f"{page}: {where}: {source} has no {number}")
        wrong += [f"{page}: listed, but not there: {where}" for where in entries]
    return wrong


def count() -> Counter[str]:
    """How many numbers each kind of source has."""
    recorded, unmeasured = named("recorded"), named("not-measured")
    kinds: Counter[str] = Counter()
    for entries in prose().values():
        for source, run in (pair for entry in entries.values() for pair in entry):
            kind = (
                f"recorded only ({source})"
                if source in recorded
                else "not measured"
                if source in unmeasured
                else "backed by a committed result"
            )
            kinds[kind] += len(run.split("; "))
    return kinds


if __name__ == "__main__":
    print("\n".join([*problems(), "", *(f"{number:5} {kind}" for kind, number in sorted(count().items()))]))
