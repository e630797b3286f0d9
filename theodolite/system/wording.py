"""Show strings and numbers: tokens made visible and harmless, for they come from anybody's files, numbers short."""

from __future__ import annotations

import difflib
import html
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

MISSING = "–"
NARROW_SPACE = "\u202f"
TOKEN_LIMIT = 40
MOST_DECIMALS = 6  # of a value beside its error; finer ones are shown as powers of ten

_MARKS = {"\n": "↵", "\r": "␍", "\t": "⇥", "\v": "␋", "\f": "␌", "\x00": "␀", "\x1b": "␛", "\x7f": "␡"}
_MARKS |= {"\u00a0": "⍽", "\u2028": "⟨U+2028⟩", "\u2029": "⟨U+2029⟩"}


def _visible_character(character: str) -> str:
    hidden = unicodedata.category(character).startswith("C")
    return _MARKS.get(character) or (f"⟨U+{ord(character):04X}⟩" if hidden else character)


def visible(text: object, limit: int | None = None) -> str:
    """Show every control, format, surrogate, private or unassigned character as a mark; markup is not escaped."""
    source = str(text)
    if limit is not None and len(source) > limit:
        source = source[: limit - 1] + "…"
    return source if source.isprintable() else "".join(map(_visible_character, source))


def shown_token(text: object) -> str:
    """Show a token on its own, in a table or a label: spaces at either end as ␣."""
    shown = re.sub("^ +| +$", lambda spaces: "␣" * len(spaces[0]), visible(text, TOKEN_LIMIT))
    return shown or "(empty)"


def for_plotly(text: object) -> str:
    """Make `text` visible and escape it for Plotly, whose labels read tags and entities."""
    return html.escape(visible(text), quote=False)


def tokens_of(described: Mapping[str, Any]) -> str:
    """Say how many tokens a context of a described corpus has: "64", or "5 to 64"."""
    shortest = f"{number(described['shortest'])} to " if "shortest" in described else ""
    return shortest + number(described["length"])


def number(value: object, digits: int = 3) -> str:
    """Write a number in at most `digits` significant digits (integers whole), `–` where there is none."""
    try:
        amount = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return MISSING
    if math.isnan(amount):
        return MISSING
    if math.isinf(amount):
        return "∞" if amount > 0 else "−∞"
    if amount == 0:
        return "0"
    size = abs(amount)
    if amount == int(amount) and size < 1e6:
        shown = f"{int(amount)}" if size < 1e4 else f"{int(amount):,}".replace(",", NARROW_SPACE)
    elif size >= 1e5 or size < 1e-3:
        mantissa, exponent = f"{amount:.{digits - 1}e}".split("e")
        shown = f"{mantissa}·10{str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
    else:
        decimals = max(0, digits - 1 - math.floor(math.log10(size)))
        shown = f"{amount:.{decimals}f}"
    return shown.replace("-", "−")


def percent(share: float) -> str:
    """Write a share of one in per cent, with a decimal only where it matters (below 10 and above 99)."""
    if math.isnan(share):
        return MISSING
    amount = 100 * share
    decimals = 1 if (0 < abs(amount) < 10 or 99 < amount < 100) else 0
    shown = f"{amount:z.{decimals}f}".removesuffix(".0")  # z: no minus before a zero
    return shown.replace("-", "−") + "\u00a0%"


def rounded_with_error(value: float, error: float) -> tuple[str, str]:
    """Round to the error's one significant digit, or two where the first is 1: ("0.452", "0.006"); no error is ""."""
    if not (math.isfinite(value) and math.isfinite(error) and error > 0):
        return number(value), ""
    leading, exponent = f"{error:.0e}".split("e")
    decimals = -int(exponent) + (leading == "1")
    if decimals > MOST_DECIMALS or abs(value) >= 1e6:
        return number(value), number(error, 1)
    shown = (f"{round(amount, decimals):.{max(decimals, 0)}f}" for amount in (value, error))
    first, second = (text.replace("-", "−") for text in shown)
    return (number(value) if value == int(value) else first), second


def with_error(value: float, error: float = math.nan) -> str:
    """Write a value with its standard error, where it has one: `0.452 ± 0.006`."""
    shown, spread = rounded_with_error(value, error)
    return f"{shown} ± {spread}" if spread else shown


def percent_with_error(share: float, error: float = math.nan) -> str:
    """Write a share of one in per cent with its standard error, where it has one: `45.2 ± 0.6 %`."""
    shown, spread = rounded_with_error(100 * share, 100 * error)
    return f"{shown} ± {spread}\u00a0%" if spread else percent(share)


def head_name(layer: int, head: int) -> str:
    """Name a head: `L3H5` is block 3, head 5, both counted from 0."""
    return f"L{layer}H{head}"


def model_name(model_id: str) -> str:
    """Name a model without the folder or the owner that it is called by, and without the ending of a GGUF file."""
    return Path(model_id).name.removesuffix(".gguf") or model_id


def names_of(models: Sequence[str]) -> list[str]:
    """Name each model by the last part of its path or hub name, revision included, numbered where some share it."""
    names: list[str] = []
    for model in models:
        short = model_name(model).replace("@", "-")
        numbered = (f"{short}-{number}" for number in range(2, len(models) + 2))
        names.append(next(name for name in (short, *numbered) if name not in names))
    return names


def nearest(word: str, known: Iterable[str], otherwise: str) -> str:
    """Ask whether the known words nearest to a misspelt one were meant, or say something else where none is near."""
    words = list(known)
    begun = [each for each in words if word and (each.startswith(word) or each.endswith(f"/{word}"))]
    near = begun[:3] or difflib.get_close_matches(word, words, 3)
    return f"did you mean {', '.join(near)}?" if near else otherwise


def with_extra(name: str) -> str:
    """Say how an optional part is installed: by a path, since the name is not ours on the package index."""
    return f"pip install '.[{name}]' in the folder of theodolite's source"


def listed(items: list[str], limit: int = 5) -> str:
    """List items as `a, b and c`; past `limit` items the rest is counted."""
    if len(items) > limit:
        items = [*items[:limit], f"{len(items) - limit} more"]
    if len(items) <= 1:
        return "".join(items)
    return ", ".join(items[:-1]) + " and " + items[-1]


def spans(numbers: list[int]) -> str:
    """Write runs of neighbours as ranges: `0–3, 7`."""
    spans: list[tuple[int, int]] = []
    for value in sorted(numbers):
        first = spans.pop()[0] if spans and value == spans[-1][1] + 1 else value
        spans.append((first, value))
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in spans)


def counted(amount: int, noun: str) -> str:
    """Count things in words: `1 head`, `3 heads`."""
    return f"{amount} {noun}" if amount == 1 else f"{amount} {noun}s"


def harmless(text: str) -> str:
    """Make a sentence that may quote names from files harmless: control and direction characters visible."""
    # theodolite puts non-breaking spaces between a number and its unit
    return visible(text.replace("\u00a0", " "))


def reading_order(name: str) -> tuple[str, bool, str, int]:
    """Return a key that sorts names as one reads them: tables, figures by number, then the rest."""
    group, _, short_name = name.rpartition("/")
    kind = short_name.rstrip("0123456789")
    is_numbered, in_turn = kind in ("table", "figure"), {"table": "", "figure": " "}.get(kind, short_name)
    return group, not is_numbered, in_turn, int(short_name[len(kind) :] or 0)


def gguf_described(quantisation: str, dtype: str) -> str:
    """Say how a GGUF file stores the weights, and as what they are used."""
    return f"GGUF, {quantisation} (weights decoded to {dtype})"
