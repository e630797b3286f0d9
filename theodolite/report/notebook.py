"""A run in a notebook: a short summary as HTML without scripts.

Every string of the run is escaped. Colours follow the reader's light or dark setting; nothing here is interactive.
"""

from __future__ import annotations

import hashlib
from html import escape

import numpy as np

from theodolite.measure.head_roles import COMMON_ROLES
from theodolite.passes.run import Run
from theodolite.report import content, health
from theodolite.report.data import column, head_labels
from theodolite.report.summary import health_line
from theodolite.system.wording import number, visible

FLAGGED = 4
"""Flagged health checks that are shown; the report has all."""

STYLE = """
.{0} {{ max-width: 60rem; padding: .9rem 1.1rem; border: 1px solid #e2dfd6; border-radius: 8px; background: #fdfcf9;
  color: #22272e; font: 14px/1.5 system-ui, sans-serif; }}
.{0} p {{ margin: .35rem 0; }} .{0} .of {{ color: #646a73; }}
.{0} .name {{ font-size: 1.25em; font-weight: 650; overflow-wrap: anywhere; }}
.{0} ul {{ display: flex; flex-wrap: wrap; gap: .3rem 1.6rem; margin: .6rem 0; padding: 0; list-style: none; }}
.{0} li {{ margin: 0; }} .{0} li b {{ display: block; font-size: 1.15em; }}
.{0} code {{ background: none; color: inherit; }}
@media (prefers-color-scheme: dark) {{ .{0} {{ background: #15191f; color: #dfe2e7; border-color: #2c333d; }}
  .{0} .of {{ color: #9aa2ad; }} }}
"""


def as_html(run: Run) -> str:
    """What was surveyed on what text, health, the key numbers, the strongest heads, and what to call next."""
    name = visible((run.provenance.get("model") or {}).get("id") or "a model", 80)
    parts = [
        f'<p class="name">{escape(name)}</p>',
        f'<p class="of">{escape(content.subtitle(run.provenance))}<br>{escape(content.text_line(run.provenance))}</p>',
    ]
    checks = health.checks(run)
    flagged = [check for check in checks if check.flagged]
    if checks:
        parts.append(f"<p><strong>{escape(health_line(len(flagged), len(checks)))}</strong></p>")
    parts += [f"<p>{escape(check.text)}</p>" for check in flagged[:FLAGGED]]
    tiles = "".join(
        f"<li><b>{escape(tile.value + (f' ± {tile.error}' if tile.error else ''))}</b>{escape(tile.label)}"
        f'<br><span class="of">{escape(tile.note)}</span></li>'
        for tile in content.tiles(run)
    )
    parts.append(f"<ul>{tiles}</ul>" if tiles else "")
    heads = "; ".join(f"{kind} {score}" for kind, score in strongest(run))
    parts.append(f"<p>Strongest heads: {escape(heads)}.</p>" if heads else "")
    parts.append(
        '<p class="of">Next: <code>theodolite.write_report(run, "report")</code> for the full report, '
        "<code>theodolite.report.figures.available(run)</code> for its figures, <code>run.heads</code> and "
        "<code>run.layers</code> for the tables.</p>"
    )
    inner = "".join(parts)
    # A class name of its own, so that the style of one run's box touches no other part of the notebook.
    name = f"theodolite-{hashlib.sha256(inner.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"
    return f'<div class="{name}"><style>{STYLE.format(name)}</style>{inner}</div>'


def strongest(run: Run) -> list[tuple[str, str]]:
    """For each role, the head with the highest score: ("previous token", "L3H0 (0.45)")."""
    strongest_heads = []
    for role in COMMON_ROLES:
        values = column(run.heads, role.column)
        if values is None:
            continue
        best = int(np.nanargmax(values))
        if values[best] > 0:
            strongest_heads.append((role.name, f"{head_labels(run)[best]} ({number(values[best], 2)})"))
    return strongest_heads
