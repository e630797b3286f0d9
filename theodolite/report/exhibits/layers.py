"""The exhibits of the residual stream: position, context, depth, outliers, with their captions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from theodolite.report.data import column, evenly, residual_layers
from theodolite.report.drawing import geometry
from theodolite.report.drawing import layers as curves
from theodolite.report.drawing import sinks as maps
from theodolite.report.exhibit import Choice, Exhibit, Option
from theodolite.report.measures import BAO, SONG, ZHANG
from theodolite.report.style import Patch

if TYPE_CHECKING:
    from theodolite.passes.run import Run

GRID = 13  # all residual layers of the twelve-block models that the papers show


def _by_layer(patch: Callable[[Run, int], list[Patch]], *, grid: bool = False) -> Choice:
    return Choice(
        "layer",
        lambda run: [Option(str(layer), f"layer {layer}") for layer in range(residual_layers(run))],
        lambda run, key: patch(run, int(key)),
        grid=(lambda run: [str(layer) for layer in evenly(residual_layers(run), GRID)]) if grid else None,
    )


_POSITION = [
    Exhibit(
        "spiral",
        "position",
        "The positional basis and the context vectors of every layer",
        ("arrays.positional_pca",),
        geometry.spiral,
        "Each layer's mean vector per position (violet: early, green: late) on the two directions in which "
        "these "
        "means vary most, with context vectors (red) projected onto the same plane. Each axis of each "
        "picture has its "
        "own scale.",
        "a smooth, low-dimensional curve (a spiral in the published models), with the cloud of contexts clear of it.",
        f"{SONG}, Fig. 1",
        "a curve that breaks up or folds into a point before the last layer: position has been lost.",
        _by_layer(geometry.spiral_traces, grid=True),
        wide=True,
    ),
    Exhibit(
        "waves",
        "position",
        "What the spiral is made of",
        ("arrays.positional_pca",),
        geometry.waves,
        "The first three principal components of the positional basis against position.",
        "slow waves, each with about half a period more than the one before.",
        f"{SONG}, section 3",
        "jagged lines: neighbouring positions are told apart abruptly.",
        _by_layer(geometry.waves_traces),
    ),
    Exhibit(
        "singular-values",
        "position",
        "How many directions position takes",
        ("arrays.singular_values",),
        geometry.singular_values,
        "Singular values of the positional basis, over the first, with a large dot at the rank that "
        "ScreeNOT keeps; "
        "violet layers are early, green ones late.",
        "a sharp drop after about ten values.",
        f"{SONG}, Fig. 3, left",
        "a slow decline without a knee: no low-dimensional positional structure.",
    ),
    Exhibit(
        "gram",
        "position",
        "Normalised Gram matrix of positions and contexts",
        ("arrays.gram", "arrays.gram_position"),
        geometry.gram,
        "Cosines between all pairs: positions first, then contexts ordered by label.",
        "smooth shading among positions (top left), nearly nothing between positions and contexts, and one "
        "block a "
        "label among contexts (bottom right).",
        f"{SONG}, Fig. 2",
        "fractures among positions, or strong colour between positions and contexts.",
        _by_layer(geometry.gram_traces),
    ),
    Exhibit(
        "dct",
        "position",
        "Frequencies of the positional Gram matrix",
        ("arrays.dct",),
        geometry.dct,
        "The lowest 10 × 10 coefficients of its two-dimensional cosine transform; each step of the scale is "
        "a "
        "factor of ten.",
        "all the strong cells in the top left corner.",
        f"{SONG}, Fig. 3, right",
        "strong cells far from the corner: a rough positional basis, as in models trained on additions.",
        _by_layer(geometry.dct_traces),
    ),
    Exhibit(
        "rank",
        "position",
        "Rank of the positional basis",
        ("layers.rank",),
        curves.rank,
        "How many singular values stand out of the noise. Whiskers, here and below, are one standard error from "
        "resampling contexts; a rank moves in whole steps, so its own is coarse.",
        "about ten, falling slowly with depth.",
        f"ScreeNOT; {SONG}, Table 4",
    ),
    Exhibit(
        "stable-rank",
        "position",
        "Stable rank",
        ("layers.stable_rank",),
        curves.stable_rank,
        "‖P‖_F²/‖P‖₂²: the number of directions weighed by their energy.",
        "about 2 with learned positions, near 1 with ALiBi or RoPE after layer 0.",
        f"{SONG}, Table 5",
    ),
    Exhibit(
        "relative-norm",
        "position",
        "How much of the hidden states is position",
        ("layers.relative_norm",),
        curves.relative_norm,
        "The largest singular value of the positional basis over that of all centred hidden states.",
        "a large share that fades in the last layers, where position is no longer needed.",
        f"{SONG}, Table 6",
    ),
    Exhibit(
        "low-frequency",
        "position",
        "Smoothness",
        ("layers.low_frequency_10",),
        curves.low_frequency,
        "Share of the Gram matrix's energy in its K × K lowest frequencies.",
        "K = 10 close to 1.",
        f"{SONG}, Tables 2 and 3",
        "K = 10 near one half, as in models trained on additions.",
    ),
]

_CONTEXT = [
    Exhibit(
        "similarity",
        "context",
        "Contexts of one label and of different labels",
        ("layers.similarity_within",),
        curves.similarity,
        "Mean |cosine| of context vectors, solid within a label and dashed between labels.",
        "a wide gap between the two lines.",
        f"{SONG}, Table 1",
        "both lines near 1: contexts can hardly be told apart.",
    ),
    Exhibit(
        "incoherence",
        "context",
        "Position against context",
        ("layers.incoherence_mean",),
        curves.incoherence,
        "|cosine| between positional and context vectors, beside random directions of the same sizes.",
        "a mean close to the random baseline: position and context live apart.",
        f"{SONG}, section 5 and Table 1",
        "a mean of 0.3 and more: reading one disturbs the other.",
    ),
    Exhibit(
        "clusters",
        "context",
        "Do contexts form the labels' clusters",
        ("layers.silhouette",),
        curves.clusters,
        "Of the directions of the context vectors whose label at least one other has: the mean silhouette of the "
        "labels (1: compact and apart, 0: none, below 0: nearer to other labels), and how well k-means, which does "
        "not know the labels, finds them again (adjusted Rand index; 1: exactly, 0: as by chance).",
        "both well above 0. Many labels of few contexts each make it hard.",
        f"{SONG}, claim 2 of section 2; both indices are ours",
    ),
]

_DEPTH = [
    Exhibit(
        "norm",
        "depth",
        "Size of the hidden states",
        ("layers.norm",),
        curves.norm,
        "Mean length of a token's hidden state, the first token apart.",
        "steady growth; a first token far above the rest carries massive activations.",
        f"{SONG}, Fig. 8",
    ),
    Exhibit(
        "cosine",
        "depth",
        "Turn from layer to layer",
        ("layers.cosine_previous",),
        curves.cosine_previous,
        "Mean cosine between a token's hidden states before and after a block.",
        "a sharp turn in the first block, small ones after it.",
        f"{SONG}, Fig. 8",
        "1 throughout: blocks that change nothing.",
    ),
    Exhibit(
        "rank-collapse",
        "depth",
        "Distance from rank collapse",
        ("layers.rank_collapse",),
        curves.rank_collapse,
        "How far the tokens of a context are from all being the same vector: ‖X − 1x̄ᵀ‖_F/‖X‖_F.",
        "a curve well above the dashed line.",
        f"{BAO}, section 5",
        "a fall towards 0: tokens become one vector, and depth adds nothing.",
    ),
]

_OUTLIERS = [
    Exhibit(
        "massive-activations",
        "outliers",
        "Massive activations",
        ("layers.massive_activations",),
        curves.massive_activations,
        "How many numbers exceed 100 and 1000 times the layer's median magnitude.",
        "where they appear and where they are taken back, usually at the first token only.",
        f"{ZHANG}, section 2",
        "many at later tokens.",
        when=lambda run: any(
            np.nansum(values) > 0
            for name in ("massive_activations", "massive_activations_first")
            if (values := column(run.layers, name)) is not None
        ),
    ),
    Exhibit(
        "outlier-dimensions",
        "outliers",
        "Outlier dimensions",
        ("layers.outlier_dimensions",),
        curves.outlier_dimensions,
        "Feature dimensions in which |x| ≥ 6 for a share of the tokens.",
        "a handful of dimensions. Growth with depth often only follows the growth of the norm.",
        f"{ZHANG}, section 1",
    ),
    Exhibit(
        "outlier-shares",
        "outliers",
        "Which dimensions are outliers",
        ("arrays.outlier_share",),
        maps.outlier_shares,
        "Share of tokens with |x| ≥ 6, for the dimensions where it is highest.",
        "columns that stay strong over many layers: the same dimension for all tokens, as a tag would be.",
        f"{ZHANG}, Fig. 2(b)",
        wide=True,
    ),
]

LAYER_EXHIBITS = [*_POSITION, *_CONTEXT, *_DEPTH, *_OUTLIERS]
