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
        "Mean Shannon entropy of the head's attention rows. Low: a single key; high: near-uniform attention.",
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
        "Share of the last query's keys that receive gradient (linearised softmax). 0: vanishing signal.",
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

_SHARES = {
    "position": "Share of the logits' variance across keys that depends on position only: pos on one side or both, "
    "mean or bias on the other. Negative: it cancels other constituents.",
    "context": "The share that depends on context only, with mean or bias on the other side.",
    "cross": "The share with position on one side and context on the other.",
    "constant": "The share with mean or bias on both sides: it depends on no token; with RoPE, on relative distance.",
    "additive": "The share of a bias that the model adds to its logits, such as ALiBi.",
}

_CONSTITUENTS = [
    *(
        Measure(f"share_{part}", name, CONSTITUENTS, meaning, "balance", f"{SONG}, section 5.2")
        for part, meaning in _SHARES.items()
        for name in [f"logit share: {'both' if part == 'cross' else part}"]
    ),
    Measure(
        "argmax_property",
        "argmax property",
        POSITIONAL,
        "Share of positions t whose row of P̃WP̃ᵀ, P̃ = pos + mean without the layer's norm, is largest at t itself "
        "among t' ≤ t. Above 0.8, position alone makes the head attend at or near the query.",
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
        "Energy of PWPᵀ in its 10 × 10 lowest frequencies: near 1, neighbouring positions get similar logits.",
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

_OF_SPECTRUM = {
    "regime": "Where signal should propagate: early, middle or late positions, all equally (uniform), none "
    "(vanishing).",
    "regime_margin": "How far what decides the regime is from its nearest threshold: 0.02 is borderline, 0.3 clear.",
    "r": "tr W/λ. Far beyond ±2 with a small η the signal localizes in the middle; near 0 it is uniform.",
    "xi_symmetric": "tr W/√tr W² of the symmetric part of W. Sign: late (+) or early (−); size: concentration of "
    "the spectrum.",
    "eta_symmetric": "√tr W²/λ of the symmetric part of W: the scale of the spectrum. Large: the signal vanishes.",
    "xi": "tr W/√tr W². Empty where tr W² is negative: use the ξ of the symmetric part there.",
    "eta": "√tr W²/λ. Empty where tr W² is negative.",
    "trace": "tr W, the sum of the eigenvalues. Positive: queries prefer similar keys.",
    "trace_of_square": "tr W², the sum of squared eigenvalues; negative where rotation outweighs stretching.",
    "frobenius_squared": "‖W‖²_F = tr WᵀW, the size of the matrix. The term that LocAteR penalises.",
    "mean": "tr W/d, over all d eigenvalues.",
    "variance": "tr W²/d − (tr W/d)²: the variance of the eigenvalues' real parts less the mean square of their "
    "imaginary parts. Small around a mean away from 0: localized attention without collapse.",
}

_SPECTRAL_COLUMNS: list[tuple[str, str, Scale, str]] = [
    ("regime", "predicted regime", "kind", "Lemma 2"),
    ("regime_margin", "margin of the regime", "share", "Lemma 2"),
    ("r", "r = ξη", "signed", "Lemma 2"),
    ("xi_symmetric", "ξ of the symmetric part", "signed", "eq. 6"),
    ("eta_symmetric", "η of the symmetric part", "decades", "eq. 6"),
    ("xi", "ξ", "signed", "eq. 6"),
    ("eta", "η", "decades", "eq. 6"),
    ("trace", "trace", "signed", "section 4"),
    ("trace_of_square", "trace of the square", "signed", "section 4"),
    ("frobenius_squared", "squared Frobenius norm", "decades", "section 6"),
    ("mean", "spectrum mean", "signed", "eq. 8"),
    ("variance", "spectrum variance", "signed", "eq. 8"),
]

_SPECTRAL = [
    Measure(name, title, SPECTRUM, _OF_SPECTRUM[name], scale, f"{BAO}, {where}")
    for name, title, scale, where in _SPECTRAL_COLUMNS
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
