"""Every figure of the report: functions that take a `Run` and return a Plotly figure, to use anywhere.

Those of one layer or head take it as further arguments. Each raises `UsageError` where the run has no numbers
for it. This module only gathers: the drawing is in its siblings.
"""

from __future__ import annotations

from theodolite.report.figures_constituents import attribution, constituents, head_shares
from theodolite.report.figures_geometry import dct, gram, inherited_smoothness, singular_values, spiral, waves
from theodolite.report.figures_heads import head_map, regime_plane
from theodolite.report.figures_layers import (
    clusters,
    cosine_previous,
    incoherence,
    low_frequency,
    massive_activations,
    norm,
    outlier_dimensions,
    rank,
    rank_collapse,
    relative_norm,
    similarity,
    stable_rank,
)
from theodolite.report.figures_sinks import outlier_shares, sinks_by_position
from theodolite.report.figures_spectra import entropy_by_position, head_entropy, propagation, spectrum

__all__ = [
    "attribution",
    "clusters",
    "constituents",
    "cosine_previous",
    "dct",
    "entropy_by_position",
    "gram",
    "head_entropy",
    "head_map",
    "head_shares",
    "incoherence",
    "inherited_smoothness",
    "low_frequency",
    "massive_activations",
    "norm",
    "outlier_dimensions",
    "outlier_shares",
    "propagation",
    "rank",
    "rank_collapse",
    "regime_plane",
    "relative_norm",
    "similarity",
    "singular_values",
    "sinks_by_position",
    "spectrum",
    "spiral",
    "stable_rank",
    "waves",
]
