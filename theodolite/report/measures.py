"""What every column of a run means, with the formula and its source.

Hover texts, captions, table headings and pickers all read from here. Nothing here reads a run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from theodolite.measure.head_roles import (
    END_TOKEN_SINK,
    FIRST_TOKEN_SINK,
    INDUCTION,
    LATER_SINK,
    LEARNED_SINK,
    PREVIOUS_TOKEN,
    SAME_TOKEN,
    HeadRole,
)

BAO = "Bao et al. 2024"
SONG = "Song & Zhong 2024"
ZHANG = "Zhang et al. 2025"
ZHAI = "Zhai et al. 2023"
XIAO = "Xiao et al. 2024"
DARCET = "Darcet et al. 2024"
OLSSON = "Olsson et al. 2022"
TITLES = {
    BAO: "Self-attention Networks Localize When QK-eigenspectrum Concentrates",
    SONG: "Uncovering hidden geometry in Transformers via disentangling position and context",
    ZHANG: "Attention Sinks and Outlier Features: A ‘Catch, Tag, and Release’ Mechanism for Embeddings",
    ZHAI: "Stabilizing Transformer Training by Preventing Attention Entropy Collapse",
    DARCET: "Vision Transformers Need Registers",
    XIAO: "Efficient Streaming Language Models with Attention Sinks",
    OLSSON: "In-context Learning and Induction Heads",
}
"""The publications that the report names, by their short names."""

Scale = Literal["share", "balance", "amount", "decades", "signed", "kind"]


@dataclass(frozen=True)
class Measure:
    """One column: its `name` within its group and `title` anywhere, its meaning, its colours.

    `scale`: "share" (0 to 1), "balance" (shares that can be negative, −1 to 1), "amount" (from 0 or the lowest
    value up), "decades" (colour by log10), "signed" (around 0), "kind" (names).
    """

    column: str
    name: str
    group: str
    meaning: str
    scale: Scale
    source: str
    unit: str = ""

    @property
    def title(self) -> str:
        """The name, unambiguous outside the measure's group."""
        return f"{self.name} (with Σ̂)" if self.group == SPECTRUM_DATA else self.name


ATTENTION, BEHAVIOUR, SINKS = "Attention on the text", "Attention patterns", "Sinks"
CONSTITUENTS, POSITIONAL = "Constituents of its logits", "Position in the head"
SPECTRUM, SPECTRUM_DATA = "Spectrum of W_QK", "Spectrum of W_QK Σ̂"


def _of_role(role: HeadRole, group: str, source: str) -> Measure:
    return Measure(role.column, role.name, group, role.meaning, "share", source)


_MEASURED = [
    Measure(
        "entropy",
        "entropy",
        ATTENTION,
        "Mean Shannon entropy of the head's attention rows. Low: attention to a single key; high: near-uniform "
        "attention.",
        "amount",
        f"{ZHAI}; {BAO}, section 5",
        "nats",
    ),
    Measure(
        "entropy_bound",
        "entropy bound",
        ATTENTION,
        "Lower bound on the mean entropy from the norms of the tokens and of W_QK. Near 0 it is vacuous.",
        "amount",
        f"{ZHAI}, Theorem 3.1 (exact form)",
        "nats",
    ),
    Measure(
        "propagation",
        "signal propagation",
        ATTENTION,
        "Share of the last query's keys whose piecewise-linear softmax value lies in [0, 1], so that their "
        "signal reaches the gradient. 0: vanishing signal.",
        "share",
        f"{BAO}, section 3",
    ),
    _of_role(PREVIOUS_TOKEN, BEHAVIOUR, OLSSON),
    _of_role(SAME_TOKEN, BEHAVIOUR, f"{SONG}, section 5"),
    _of_role(INDUCTION, BEHAVIOUR, OLSSON),
    _of_role(FIRST_TOKEN_SINK, SINKS, f"{XIAO}; {ZHANG}"),
    _of_role(LATER_SINK, SINKS, ZHANG),
    _of_role(END_TOKEN_SINK, SINKS, "Clark et al. 2019, section 3.2"),
    _of_role(LEARNED_SINK, SINKS, "models with a sink column, such as gpt-oss"),
]

_CONSTITUENTS = [
    Measure(
        "share_position",
        "logit share: position",
        CONSTITUENTS,
        "Share of the logits' variance across keys that depends on position only: pos on one side or both, mean or "
        "bias on the other. Negative: it cancels other constituents.",
        "balance",
        f"{SONG}, section 5.2",
    ),
    Measure(
        "share_context",
        "logit share: context",
        CONSTITUENTS,
        "The share that depends on context only: what is neither mean nor position on one side or both, mean or bias "
        "on the other.",
        "balance",
        f"{SONG}, section 5.2",
    ),
    Measure(
        "share_cross",
        "logit share: both",
        CONSTITUENTS,
        "The share with position on one side and context, what is neither mean nor position, on the other.",
        "balance",
        f"{SONG}, section 5.2",
    ),
    Measure(
        "share_constant",
        "logit share: constant",
        CONSTITUENTS,
        "The share with mean or bias on both sides: it varies only with the norm's scale of each token, or with rotary "
        "positions with the distance.",
        "balance",
        f"{SONG}, section 5.2",
    ),
    Measure(
        "share_additive",
        "logit share: additive",
        CONSTITUENTS,
        "The share of a bias that the model adds to its logits, such as ALiBi.",
        "balance",
        f"{SONG}, section 5.2",
    ),
    Measure(
        "argmax_property",
        "argmax property",
        POSITIONAL,
        "Share of positions t whose row of P̃WP̃ᵀ, P̃ = pos + mean, is largest at t itself among t' ≤ t. Above 0.8, "
        "position alone makes the head attend at or near the query. Raw vectors, without the layer's norm.",
        "share",
        f"{SONG}, eq. 8 and Fig. 25",
    ),
    Measure(
        "argmax_property_normed",
        "argmax property, normed",
        POSITIONAL,
        "The argmax property of positions as the head reads them, after the layer's norm.",
        "share",
        f"{SONG}, eq. 8; the norm is ours",
    ),
    Measure(
        "pwp_low_frequency_10",
        "smoothness of PWPᵀ",
        POSITIONAL,
        "Share of the energy of PWPᵀ in its 10 × 10 lowest frequencies: near 1, neighbouring positions get "
        "similar logits.",
        "share",
        f"{SONG}, Table 3",
    ),
    Measure(
        "qk_low_frequency_10",
        "smoothness of the logits",
        POSITIONAL,
        "Share of the energy of the logits on this text, unmasked, in their 10 × 10 lowest frequencies.",
        "share",
        f"{SONG}, Table 3",
    ),
]

_SPECTRAL = [
    Measure(
        "regime",
        "predicted regime",
        SPECTRUM,
        "Where in the context signal propagates, as the spectrum predicts: early, middle or late positions, all "
        "equally (uniform), or none (vanishing). Empty where undefined.",
        "kind",
        f"{BAO}, Lemma 2",
    ),
    Measure(
        "regime_margin",
        "margin of the regime",
        SPECTRUM,
        "How far the quantity that decides the regime is from its nearest threshold: 0.02 is a borderline case, 0.3 a "
        "clear one.",
        "share",
        f"{BAO}, Lemma 2",
    ),
    Measure(
        "r",
        "r = ξη",
        SPECTRUM,
        "tr W/λ. Far beyond ±2 with a small η the signal localizes in the middle; near 0 it is uniform.",
        "signed",
        f"{BAO}, Lemma 2",
    ),
    Measure(
        "xi_symmetric",
        "ξ of the symmetric part",
        SPECTRUM,
        "tr W/√tr W² of the symmetric part of W. The sign says late (+) or early (−); the magnitude, how "
        "concentrated the spectrum is around its mean.",
        "signed",
        f"{BAO}, eq. 6",
    ),
    Measure(
        "eta_symmetric",
        "η of the symmetric part",
        SPECTRUM,
        "√tr W²/λ of the symmetric part of W: the scale of the spectrum. Large values make the signal "
        "vanish.",
        "decades",
        f"{BAO}, eq. 6",
    ),
    Measure(
        "xi",
        "ξ",
        SPECTRUM,
        "tr W/√tr W². Empty where tr W² is negative: use the ξ of the symmetric part there.",
        "signed",
        f"{BAO}, eq. 6",
    ),
    Measure("eta", "η", SPECTRUM, "√tr W²/λ. Empty where tr W² is negative.", "decades", f"{BAO}, eq. 6"),
    Measure(
        "trace",
        "trace",
        SPECTRUM,
        "tr W, the sum of the eigenvalues. Positive: queries prefer similar keys.",
        "signed",
        f"{BAO}, section 4",
    ),
    Measure(
        "trace_of_square",
        "trace of the square",
        SPECTRUM,
        "tr W², the sum of squared eigenvalues; negative where rotation outweighs stretching.",
        "signed",
        f"{BAO}, section 4",
    ),
    Measure(
        "frobenius_squared",
        "squared Frobenius norm",
        SPECTRUM,
        "‖W‖²_F = tr WᵀW, the size of the matrix. The term that LocAteR penalises.",
        "decades",
        f"{BAO}, section 6",
    ),
    Measure("mean", "spectrum mean", SPECTRUM, "tr W/d, over all d eigenvalues.", "signed", f"{BAO}, eq. 8"),
    Measure(
        "variance",
        "spectrum variance",
        SPECTRUM,
        "tr W²/d − (tr W/d)²: the variance of the eigenvalues' real parts less the mean square of their imaginary "
        "parts, since eigenvalues of an asymmetric W are complex. Negative where the imaginary parts outweigh. Small "
        "around a mean away from 0: localized attention without collapse.",
        "signed",
        f"{BAO}, eq. 8",
    ),
]

# Bao et al. 2024 state their results for W = W_QK Σ; the same columns with the text's own Σ̂ carry `_data`.
_SPECTRAL_DATA = [
    replace(
        measure,
        column=f"{measure.column}_data",
        group=SPECTRUM_DATA,
        meaning=f"{measure.meaning} Here W = W_QK Σ̂, with the covariance of the tokens in this text.",
    )
    for measure in _SPECTRAL
]

HEAD_MEASURES: dict[str, Measure] = {
    measure.column: measure for measure in [*_MEASURED, *_CONSTITUENTS, *_SPECTRAL, *_SPECTRAL_DATA]
}

ABSENT_AT_ZERO = (LEARNED_SINK.column, "share_additive")
"""Measures of what most models lack: not offered where they are 0 in every head."""

LAYER_TITLES: dict[str, str] = {
    "rank": "rank (ScreeNOT)",
    "stable_rank": "stable rank",
    "relative_norm": "relative norm",
    "low_frequency_1": "low freq. K=1",
    "low_frequency_3": "low freq. K=3",
    "low_frequency_5": "low freq. K=5",
    "low_frequency_10": "low freq. K=10",
    "incoherence_mean": "incoherence, mean",
    "incoherence_max": "incoherence, max",
    "incoherence_random": "incoherence, random",
    "incoherence_max_random": "incoherence, random max",
    "similarity_within": "similarity within",
    "similarity_between": "similarity between",
    "norm": "norm",
    "norm_first": "norm, first token",
    "norm_last": "norm, end token",
    "cosine_previous": "cosine to previous layer",
    "rank_collapse": "rank-collapse residual",
    "massive_activations": "massive activations",
    "massive_activations_first": "massive, first token",
    "massive_activations_last": "massive, end token",
    "outlier_dimensions": "outlier dimensions",
    "silhouette": "silhouette of labels",
    "cluster_ari": "k-means ARI",
    **{f"pp_low_frequency_{cutoff}": f"PPᵀ low freq. K={cutoff}" for cutoff in (1, 3, 5, 10)},
}

OTHER_TITLES: dict[str, str] = {
    f"{name}_low_frequency_{cutoff}": f"{title} low freq. K={cutoff}"
    for name, title in (("pwp", "PWPᵀ"), ("qk", "QK"))
    for cutoff in (1, 3, 5)
} | {
    f"{name}_se": f"{HEAD_MEASURES[name].title}, standard error"
    for name in ("entropy", "previous_token", "same_token", "induction")
}
"""Columns of the heads table that no picker offers: other cutoffs of a measure shown at K = 10, standard errors."""


def heading(column: str) -> str:
    """The heading of a column in a table: its measure's title, or its name with spaces."""
    if column in HEAD_MEASURES:
        return HEAD_MEASURES[column].title
    return LAYER_TITLES.get(column) or OTHER_TITLES.get(column) or column.replace("_", " ")
