"""A run in a notebook: a short summary as HTML without scripts, in the reader's light or dark setting."""

from __future__ import annotations

import hashlib

import numpy as np

from theodolite.measure.head_roles import COMMON_ROLES
from theodolite.passes.run import Run
from theodolite.report import content, health
from theodolite.report.data import column, head_labels
from theodolite.report.page import environment
from theodolite.report.summary import health_line
from theodolite.system.wording import number, visible

FLAGGED = 4
"""Flagged health checks that are shown; the report has all."""


def as_html(run: Run) -> str:
    """Summarise a run as HTML: model, text, health, key numbers, the strongest heads, and what to call next."""
    checks = health.checks(run)
    flagged = [check.text for check in checks if check.flagged]
    values = {
        "name": visible((run.provenance.get("model") or {}).get("id") or "a model", 80),
        "subtitle": content.subtitle(run.provenance),
        "text_line": content.text_line(run.provenance),
        "health": health_line(len(flagged), len(checks)) if checks else "",
        "flagged": flagged[:FLAGGED],
        "tiles": content.tiles(run),
        "heads": "; ".join(f"{kind} {score}" for kind, score in strongest(run)),
    }
    template = environment().get_template("notebook.html.j2")
    digest = hashlib.sha256(template.render(values, box="").encode("utf-8", "surrogatepass")).hexdigest()
    return template.render(values, box=f"theodolite-{digest[:8]}")


def strongest(run: Run) -> list[tuple[str, str]]:
    """For each role, the head with the highest score: ("previous token", "L3H0 (0.45)")."""
    heads = []
    for role in COMMON_ROLES:
        values = column(run.heads, role.column)
        if values is not None and np.nanmax(values) > 0:
            best = int(np.nanargmax(values))
            heads.append((role.name, f"{head_labels(run)[best]} ({number(values[best], 2)})"))
    return heads
