"""Figures as JSON that may stand inside a page: compact, deterministic, and unable to end its own element.

Numbers travel as base64 typed arrays, which Plotly reads (float32: about 7 digits in 5.3 bytes each). Cosine
heat maps travel as hundredths in a byte each, which the page's script turns back. No figure is drawn here.
"""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import numpy as np
import plotly.graph_objects as go

from theodolite.report.style import Patch

COSINE_STEPS = 100
MISSING_BYTE = -128

# What could close the script element, open a comment, or end a line inside a string.
_UNSAFE = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def script_json(value: Any) -> str:
    """`value` as ASCII JSON that is safe inside `<script type="application/json">`; keys sorted."""
    text = json.dumps(value, ensure_ascii=True, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.translate(_UNSAFE)


def figure_json(figure: go.Figure, variants: dict[str, list[Patch]]) -> str:
    """A figure without its template, and the data that each of its variants puts in place.

    `variants`: key → one patch a trace, laid over the trace's own entries.
    """
    content = figure.to_plotly_json()
    content["layout"].pop("template", None)
    cosines = [trace.get("zmin") == -1 and trace.get("zmax") == 1 for trace in content["data"]]

    def packed(traces: list[Patch]) -> list[Patch]:
        pairs = zip(traces, cosines, strict=True)
        return [_packed_cosines(trace) if is_cosine and "z" in trace else trace for trace, is_cosine in pairs]

    patches = {key: packed(traces) for key, traces in variants.items()}
    return script_json(
        _plain({"data": packed(content["data"]), "layout": content["layout"], "variants": patches})
    )


def _packed_cosines(trace: dict[str, Any]) -> dict[str, Any]:
    """The trace with its z in steps of 1/100, a byte a cell."""
    z = trace["z"]
    if isinstance(z, dict):
        shape = tuple(int(size) for size in z["shape"].split(","))
        z = np.frombuffer(base64.b64decode(z["bdata"]), dtype=z["dtype"]).reshape(shape)
    steps = np.rint(np.clip(z, -1, 1) * COSINE_STEPS)
    packed = _typed(np.where(np.isnan(steps), MISSING_BYTE, steps).astype(np.int8))
    return trace | {"z": packed | {"steps": COSINE_STEPS}}


def _typed(values: np.ndarray[Any, Any]) -> dict[str, Any]:
    """A numeric array as Plotly's typed-array object, float64 as float32 and int64 as int32."""
    dtype = {"f": np.float32, "i": np.int32 if values.dtype.itemsize > 1 else np.int8}.get(values.dtype.kind)
    if dtype is not None:
        values = values.astype(dtype, copy=False)
    spec: dict[str, Any] = {
        "dtype": f"{values.dtype.kind}{values.dtype.itemsize}",
        "bdata": base64.b64encode(np.ascontiguousarray(values).tobytes()).decode("ascii"),
    }
    if values.ndim > 1:
        spec["shape"] = ", ".join(str(size) for size in values.shape)
    return spec


def _plain(value: Any) -> Any:
    """`value` with arrays packed, numpy numbers made plain, and NaN made null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _typed(value) if value.dtype.kind in "fi" else _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
