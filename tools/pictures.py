"""The pictures of docs/measurements, from the run folders that its pages read: `python -m tools.pictures [FOLDER]`.

Without a folder in which they lie they are made anew.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import plotly.graph_objects as go

from theodolite.passes.run import Run
from theodolite.report import figures
from theodolite.report.drawing import sinks as of_sinks
from tools.chromium import browser, write_figure
from tools.outputs import DOCS, FIRST, SINKS, make_runs

# Name → the figure, of the survey or of the trace.
OF_SURVEY: dict[str, Callable[[Run], go.Figure]] = {
    "spiral": lambda run: figures.spiral(run, 4),
    "gram": lambda run: figures.gram(run, 4),
    "incoherence": figures.incoherence,
    "similarity": figures.similarity,
    "rank_collapse": figures.rank_collapse,
    "entropy": lambda run: figures.head_map(run, "entropy"),
    "regime_plane": figures.regime_plane,
    "propagation": lambda run: figures.propagation(run, 5, 1),
    "head_shares": lambda run: figures.head_shares(run, 2),
    "attribution": lambda run: figures.attribution(run, "previous"),
    "previous_token": lambda run: figures.head_map(run, "previous_token"),
    "argmax_property": lambda run: figures.head_map(run, "argmax_property"),
    "sinks_by_position": figures.sinks_by_position,
    "outlier_shares": figures.outlier_shares,
}
OF_TRACE: dict[str, Callable[[Run], go.Figure]] = {
    "strength": lambda run: of_sinks.strength(run.traces),
}
SQUARE = ("spiral", "gram")


def main() -> None:
    """Draw all of them."""
    with tempfile.TemporaryDirectory() as scratch, browser() as page:
        place = Path(sys.argv[1] if len(sys.argv) > 1 else scratch)
        if not (place / SINKS).is_dir():
            make_runs(place)
        for folder, drawings in ((FIRST, OF_SURVEY), (SINKS, OF_TRACE)):
            run = Run.load(place / folder)
            for name, draw in drawings.items():
                written = write_figure(
                    page, draw(run), DOCS / "images" / "measures" / name, 460 if name in SQUARE else 320
                )
                print(written.name, written.stat().st_size)


if __name__ == "__main__":
    main()
