"""Names of experiments and which are meant by one, known before any library of models is imported.

The experiments themselves are in `papers`; a test holds the names against them.
"""

from __future__ import annotations

import difflib
import re

from theodolite.errors import UsageError

_NAMES = """
geometry: table1 table2 table3 table4 table5 table6 figure1 figure2 figure3 figure4 figure5 figure6 figure7
  figure8 figure19 figure24 figure25 figure30 addition attribution clusters constituents incoherence
  theorem1 theorem2 training claims
localization: figure1 figure2 figure3 figure4 figure5 figure6 figure7 figure8 figure9 figure10 figure11 figure12
  behaviour collapse gradient walk width claims
sinks: figure2 figure3 figure4 figure5 figure6 figure7 figure8 figure9 figure10 figure11 ablation averaging
  examples outliers trace claims
"""

_ELSEWHERE = """
geometry/figure1  9   GPT-2 on GitHub
geometry/figure1  10  GPT-2 on WikiText
geometry/figure1  11  BLOOM on OpenWebText
geometry/figure1  12  BERT on OpenWebText
geometry/figure1  13  Llama 2 on OpenWebText
geometry/figure1  14  Llama 2 on GitHub
geometry/figure2  15  BLOOM on OpenWebText
geometry/figure2  16  Llama 2 on OpenWebText
geometry/figure2  17  Llama 2 on GitHub
geometry/figure4  26  GPT-2, layer 6
geometry/figure4  27  GPT-2, layer 10
geometry/figure4  28  BERT, layer 6
geometry/figure4  29  BERT, layer 10
geometry/figure5  18  addition with absolute positions, Gram matrices
geometry/figure5  20  addition with absolute positions, frequencies
geometry/figure5  21  addition with rotary positions, Gram matrices
geometry/figure5  23  addition with rotary positions, frequencies
geometry/figure6  32  BLOOM, layer 10, head 1
geometry/figure6  33  BLOOM, layer 7, head 6
geometry/figure6  34  GPT-2, layer 4, head 11
geometry/figure19 22  addition with rotary positions
geometry/figure30 31  the half without the global mean
"""


def _names() -> list[str]:
    lines = re.sub(r"\n  ", " ", _NAMES.strip()).splitlines()
    groups = (line.split(": ") for line in lines)
    return [f"{group}/{name}" for group, names in groups for name in names.split()]


def _elsewhere(row: str) -> tuple[str, tuple[str, str]]:
    of, number, published_on = row.split(maxsplit=2)
    return f"{of.partition('/')[0]}/figure{number}", (of, published_on)


NAMES = tuple(_names())
"""In the order in which they are listed."""

PUBLISHED_ELSEWHERE = dict(map(_elsewhere, _ELSEWHERE.strip().splitlines()))
"""Published figures that are others on another model or text: name → (that experiment, the model or text)."""


def named(name: str) -> list[str]:
    """The names that are meant by one, by several joined by commas, or by a group such as `geometry`.

    `fig5` is `figure5`.

    Raises:
        UsageError: there is no such name; the error suggests the nearest ones.
    """
    meant: list[str] = []
    for pattern in filter(None, (part.strip().rstrip("/") for part in name.split(","))):
        pattern = re.sub(r"(^|/)fig(\d+)$", r"\1figure\2", pattern)
        if pattern in NAMES or pattern in PUBLISHED_ELSEWHERE:
            chosen = [pattern]
        else:
            chosen = [each for each in NAMES if each.startswith(f"{pattern}/")]
        if not chosen:
            raise UsageError(f"there is no experiment {pattern!r}: {_nearest(pattern)}")
        meant += chosen
    if not meant:
        raise UsageError(f"{name!r} names no experiment: `theodolite reproduce` lists them all")
    return list(dict.fromkeys(meant))


def _nearest(pattern: str) -> str:
    names = [*NAMES, *PUBLISHED_ELSEWHERE]
    # A name without its group is compared with names without theirs.
    short = {key.rsplit("/", 1)[-1]: key for key in names}
    near = (
        sorted({key.split("/")[0] for key in names if key.startswith(pattern)})
        or difflib.get_close_matches(pattern, names, 3, 0.75)
        or [short[key] for key in difflib.get_close_matches(pattern.rsplit("/", 1)[-1], short, 3, 0.6)]
    )
    return f"did you mean {', '.join(near)}?" if near else "`theodolite reproduce` lists them all"


def reading_order(name: str) -> tuple[str, bool, str, int]:
    """A key that sorts names as one reads them: tables, figures in the order of their numbers, then the rest."""
    group, _, short_name = name.rpartition("/")
    kind = short_name.rstrip("0123456789")
    is_numbered = kind in ("table", "figure")
    return (
        group,
        not is_numbered,
        {"table": "", "figure": " "}.get(kind, short_name),
        int(short_name[len(kind) :] or 0),
    )
