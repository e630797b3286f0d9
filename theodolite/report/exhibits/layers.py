"""The exhibits of the residual stream: position, context, depth, outliers, with their captions."""

from __future__ import annotations

import functools

from theodolite.measure.publications import BAO, SONG, ZHANG
from theodolite.passes.run import Run
from theodolite.report.data import own_columns, residual_layers
from theodolite.report.drawing import geometry
from theodolite.report.drawing import layers as curves
from theodolite.report.drawing.patches import is_of_text
from theodolite.report.exhibit import Choice, Option, SurveyExhibit, by_layer_of

_by_layer = functools.partial(by_layer_of, residual_layers)

_POSITION = [
    SurveyExhibit(
        "spiral",
        "position",
        "The positional basis and the context vectors of every layer",
        ("arrays.positional_pca",),
        geometry.spiral,
        "Each layer's mean vector per position (violet: early, green: late) on its two main directions, and context "
        "vectors (red) on the same plane; every axis has its own scale.",
        "a smooth, low-dimensional curve (a spiral in the published models), with the cloud of contexts clear of it.",
        f"{SONG}, Fig. 1",
        "a curve that breaks up or folds into a point before the last layer: position has been lost.",
        _by_layer(geometry.spiral, grid=True),
        wide=True,
        when=is_of_text,
    ),
    SurveyExhibit(
        "waves",
        "position",
        "Principal components of the positional basis",
        ("arrays.positional_pca",),
        geometry.waves,
        "The first three principal components of the positional basis against position.",
        "cosine-like curves, each oscillating faster than the one before.",
        f"{SONG}, section 3",
        "jagged lines: neighbouring positions have unrelated vectors.",
        _by_layer(geometry.waves),
        when=is_of_text,
    ),
    SurveyExhibit(
        "singular-values",
        "position",
        "Singular values of the positional basis",
        ("arrays.singular_values",),
        geometry.singular_values,
        "Singular values over the largest (violet: early layers, green: late); large dot: the ScreeNOT rank.",
        "a sharp drop after about ten values.",
        f"{SONG}, Fig. 3, left",
        "a slow decline without a knee: no low-dimensional positional structure.",
    ),
    SurveyExhibit(
        "gram",
        "position",
        "Normalised Gram matrix of positions and contexts",
        ("arrays.gram", "arrays.gram_position"),
        geometry.gram,
        "Cosines between all pairs: positions first, then contexts ordered by label.",
        "smooth shading among positions, near zero between positions and contexts, a block per label of contexts.",
        f"{SONG}, Fig. 2",
        "fractures among positions, or strong colour between positions and contexts.",
        _by_layer(geometry.gram),
    ),
    SurveyExhibit(
        "dct",
        "position",
        "Frequencies of the positional Gram matrix",
        ("arrays.dct",),
        geometry.dct,
        "The lowest 10 × 10 coefficients of the 2-D cosine transform of the positions' Gram matrix (log scale).",
        "energy concentrated in the top left corner.",
        f"{SONG}, Fig. 3, right",
        "energy far from the corner: a rough positional basis, as in models trained on addition.",
        _by_layer(geometry.dct),
        when=is_of_text,
    ),
    SurveyExhibit(
        "rank",
        "position",
        "Rank of the positional basis",
        ("layers.rank",),
        curves.rank,
        "Singular values above the noise level. Whiskers, here and below: one standard error over contexts.",
        "about ten, falling slowly with depth.",
        f"ScreeNOT; {SONG}, Table 4",
    ),
    SurveyExhibit(
        "stable-rank",
        "position",
        "Stable rank",
        ("layers.stable_rank",),
        curves.stable_rank,
        "‖P‖_F²/‖P‖₂²: the number of directions, weighted by energy.",
        "about 2 with learned positions, near 1 with ALiBi or RoPE after layer 0.",
        f"{SONG}, Table 5",
    ),
    SurveyExhibit(
        "relative-norm",
        "position",
        "Relative norm of the positional basis",
        ("layers.relative_norm",),
        curves.relative_norm,
        "The largest singular value of the positional basis over that of all centred hidden states.",
        "a large value that drops in the last layers, where position is no longer needed.",
        f"{SONG}, Table 6",
    ),
    SurveyExhibit(
        "low-frequency",
        "position",
        "Smoothness of the positional basis",
        ("layers.low_frequency_10",),
        curves.low_frequency,
        "How smoothly the vector changes with position: 1 smooth, 0 noise. Energy in the K × K lowest frequencies.",
        "K = 10 close to 1.",
        f"{SONG}, Tables 2 and 3",
        "K = 10 near one half, as in models trained on addition.",
    ),
]

_CONTEXT = [
    SurveyExhibit(
        "similarity",
        "context",
        "Similarity of contexts within and between labels",
        ("layers.similarity_within",),
        curves.similarity,
        "Mean |cosine| between context vectors: solid within labels, dashed between labels.",
        "a wide gap between the two lines.",
        f"{SONG}, Table 1",
        "both lines near 1: contexts are almost indistinguishable.",
    ),
    SurveyExhibit(
        "incoherence",
        "context",
        "Incoherence of position and context",
        ("layers.incoherence_mean",),
        curves.incoherence,
        "|cosine| between positional and context vectors, with the random baseline for the same dimensions.",
        "a mean close to the random baseline: position and context occupy nearly orthogonal subspaces.",
        f"{SONG}, section 5 and Table 1",
        "a mean of 0.3 or more: reading one interferes with the other.",
    ),
    SurveyExhibit(
        "clusters",
        "context",
        "Do context vectors cluster by label?",
        ("layers.silhouette",),
        curves.clusters,
        "Silhouette of the labels (1: compact and separated, 0: no structure), and how well k-means finds them "
        "(adjusted Rand index; 1: perfect, 0: chance), for labels with at least two contexts.",
        "both well above 0; many labels with few contexts each make that harder.",
        f"{SONG}, claim 2 of section 2; both indices are ours",
    ),
]

_DEPTH = [
    SurveyExhibit(
        "norm",
        "depth",
        "Norm of the hidden states",
        ("layers.norm",),
        curves.norm,
        "Mean norm of the hidden states, with the first token shown separately.",
        "steady growth; a first token far above the others carries massive activations.",
        f"{SONG}, Fig. 8",
    ),
    SurveyExhibit(
        "cosine",
        "depth",
        "Cosine similarity between consecutive layers",
        ("layers.cosine_previous",),
        curves.cosine_previous,
        "Mean cosine between a token's hidden states before and after a block.",
        "a low value at the first block, then values close to 1.",
        f"{SONG}, Fig. 8",
        "1 throughout: blocks that do nothing.",
    ),
    SurveyExhibit(
        "rank-collapse",
        "depth",
        "Distance from rank collapse",
        ("layers.rank_collapse",),
        curves.rank_collapse,
        "How far a context's tokens are from being one vector, ‖X − 1x̄ᵀ‖_F/‖X‖_F; dashed: the health check's limit.",
        "a curve well above the dashed line.",
        f"{BAO}, section 5",
        "a decay to 0: all tokens become the same vector, and depth adds nothing.",
    ),
]


def _by_own(run: Run) -> Choice:
    own = own_columns(run, "layers")
    options = [Option(one.name, one.title, one.group, one.meaning) for one in own]
    return Choice("column", options, lambda name: curves.own_column(run, name))


_OWN = SurveyExhibit(
    "own-columns",
    "depth",
    "Columns of your own",
    (),
    lambda run: curves.own_column(run, own_columns(run, "layers")[0].name),
    "What was added to this survey, by layer.",
    "what its declaration says.",
    "given with each column",
    choice=_by_own,
    when=lambda run: bool(own_columns(run, "layers")),
)

_OUTLIERS = [
    SurveyExhibit(
        "massive-activations",
        "outliers",
        "Massive activations",
        ("layers.massive_activations",),
        curves.massive_activations,
        "Values over 100 and over 1000 × the layer's median, summed over the contexts.",
        "the layers where they appear and disappear; usually they are at the first token only.",
        f"{ZHANG}, section 2",
        "many at later tokens.",
        when=lambda run: (
            run.layers.filter(["massive_activations", "massive_activations_first"]).sum().gt(0).any()
        ),
    ),
    SurveyExhibit(
        "outlier-dimensions",
        "outliers",
        "Outlier dimensions",
        ("layers.outlier_dimensions",),
        curves.outlier_dimensions,
        "Feature dimensions in which |x| ≥ 6 for a minimum share of the tokens.",
        "a handful of dimensions. Growth with depth often just follows the growth of the norm.",
        f"{ZHANG}, section 1",
    ),
    SurveyExhibit(
        "outlier-shares",
        "outliers",
        "Outlier dimensions by layer",
        ("arrays.outlier_share",),
        curves.outlier_shares,
        "Share of tokens with |x| ≥ 6, for the dimensions with the highest shares.",
        "columns that persist across many layers: one dimension shared by all tokens, as a tag would be.",
        f"{ZHANG}, Fig. 2(b)",
        wide=True,
    ),
]

LAYER_EXHIBITS = [*_POSITION, *_CONTEXT, *_DEPTH, _OWN, *_OUTLIERS]
