"""Oracle: the numbers that the figure was given, read back from what Plotly got."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd

from theodolite.report import style
from theodolite.report.drawing.caches import loss_by_cache
from theodolite.report.payload import figure_json


def test_a_line_per_policy_and_the_whole_context_as_a_bound():
    rows = [("full", 256, 3.0, 0.01)]
    rows += [
        (name, size, 3 + shift + 1 / size, 0.02)
        for name, shift in (("window", 1.0), ("more", 0.5))
        for size in (8, 16)
    ]
    table = pd.DataFrame(rows, columns=["policy", "size", "loss", "loss_se"])
    figure = loss_by_cache(table)
    drawn = [trace for trace in figure.data if trace.name in ("window", "more")]
    assert [trace.name for trace in drawn] == ["window", "more"]
    for trace, colour in zip(drawn, style.CATEGORIES, strict=False):
        own = table[table["policy"] == trace.name]
        np.testing.assert_allclose(trace.x, own["size"])
        np.testing.assert_allclose(trace.y, own["loss"], rtol=1e-6)
        np.testing.assert_allclose(trace.error_y.array, own["loss_se"], rtol=1e-6)
        assert trace.line.color == colour
    np.testing.assert_allclose(figure.data[-1].y, [3.0, 3.0])
    assert figure.layout.xaxis.type == "log"
    assert figure.layout.xaxis.tickvals == (8, 16)
    json.loads(figure_json(figure, {}))
