"""What is unusual about a model, in a few sentences, and the links from sentences to what they name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from markupsafe import Markup, escape

from theodolite.judging import FAILS
from theodolite.passes.run import Run
from theodolite.report import published
from theodolite.report.content import Table
from theodolite.report.data import grid_of, head_labels, layer_mean
from theodolite.report.findings import CHECKS, TOPICS, Finding
from theodolite.system.wording import number, percent_with_error, with_error

MOST = 5
"""Sentences."""

USUAL = ("Sinks", "Heads", "Outliers", "Context", "Constituents", "Localization")
"""Topics whose first sentences follow where less than `MOST` is unusual."""

_NAMED = re.compile(r"\bL\d+H\d+\b|\blayer \d+\b|‘[^‘’]+’")


def unusual(run: Run, checks: Sequence[Finding]) -> list[tuple[str, str]]:
    """Choose the sentences that a reader should know first, the most unusual first, each with its section of the page.

    What a health check flags comes first; then numbers by how many times they differ from the published ones by more
    than their error allows; then what every model has.
    """
    # A caller's own columns may be of layers or of heads.
    section_of = {about: section for about, (section, _) in CHECKS.items()}
    flagged = [(check.text, section_of.get(check.about, "")) for check in checks if check.answer == FAILS]
    differing = [(text, "position") for _, text in sorted(_against_published(run), reverse=True)]
    usual = (TOPICS[topic] for topic in USUAL)
    firsts = [(str(first), section) for section, sentences in usual for first in islice(sentences(run), 1)]
    return list(dict.fromkeys([*flagged, *differing, *firsts]))[:MOST]


def _against_published(run: Run) -> Iterator[tuple[float, str]]:
    """Compare mean numbers with the published ones of the closest model: how many times they differ, and a sentence."""
    if grid_of(run):
        return  # the published models read text
    model = published.closest(run)
    average = published.AVERAGES[model]
    for name, title, expected, in_percent in (
        ("relative_norm", "The relative norm of the positional basis", average.relative_norm[0], True),
        ("rank_screenot", "The positional rank, as published,", average.rank[0], False),
    ):
        if (measured := layer_mean(run, name)) is None or measured[0] <= 0:
            continue
        value, error = measured
        least, most = value - 1.96 * max(error, 0.0), value + 1.96 * max(error, 0.0)
        times = max(least / expected, expected / most if most > 0 else 0.0)
        if times > 1:
            shown = percent_with_error(value, error) if in_percent else with_error(value, error)
            of_published = percent_with_error(expected, 0.0) if in_percent else number(expected)
            ratio = number(value / expected, 2)
            yield times, f"{title} is {shown}, {ratio} times the {of_published} published for {model}."


def linked(run: Run, tokens: Table | None) -> Callable[[str], Markup]:
    """Return a function that links every head, layer and token named in a sentence to its place on the page.

    The rest of the sentence is escaped. `tokens`: the table of tokens that are sinks.
    """
    targets = {name: name for name in head_labels(run)} if len(run.heads) else {}
    targets |= {f"layer {int(layer)}": f"layer-{int(layer)}" for layer in run.layers.get("layer", ())}
    for row, anchor in zip(tokens.rows, tokens.ids, strict=True) if tokens else ():
        targets.setdefault(str(escape(f"‘{row[0].shown}’")), anchor)

    def link(match: re.Match[str]) -> str:
        target = targets.get(match[0])
        return f'<a href="#{target}">{match[0]}</a>' if target else match[0]

    return lambda text: Markup(_NAMED.sub(link, str(escape(text))))
