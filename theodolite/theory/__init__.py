"""Pure, batched torch functions for the mathematics of attention geometry.

They take tensors and give tensors (float64), read no files and know no model. Formulas that differ from the
published ones are explained in docs/errata.md.
"""

from __future__ import annotations

from theodolite.attention.piecewise import empirical_propagation, piecewise_softmax
from theodolite.attention.summary import AttentionSummary, attention_summary
from theodolite.theory.decomposition import Decomposition, decompose
from theodolite.theory.entropy import entropy_lower_bound
from theodolite.theory.exact_propagation import propagation_exact, propagation_exact_head
from theodolite.theory.propagation import (
    curve_centre,
    curve_spread,
    curve_width,
    propagation,
    propagation_finite,
    propagation_of_draws,
)
from theodolite.theory.quadratic_form import probability_between
from theodolite.theory.regimes import REGIMES, RegimeMargins, regime, regime_margins, regime_of_curve
from theodolite.theory.singular import ScreeNOT, largest_singular_value, screenot, stable_rank
from theodolite.theory.smoothness import (
    SmoothnessBound,
    dct2,
    low_frequency_ratio,
    normalised_gram,
    product_low_frequency_ratio,
    sinusoidal,
    smoothness_bound,
)
from theodolite.theory.spectrum import (
    QKMoments,
    ScaleBound,
    TraceBound,
    qk_eigenvalues,
    qk_moments,
    qk_singular_values,
    qk_spectral_norm,
    scale_bound,
    trace_bound,
)

__all__ = [
    "REGIMES",
    "AttentionSummary",
    "Decomposition",
    "QKMoments",
    "RegimeMargins",
    "ScaleBound",
    "ScreeNOT",
    "SmoothnessBound",
    "TraceBound",
    "attention_summary",
    "curve_centre",
    "curve_spread",
    "curve_width",
    "dct2",
    "decompose",
    "empirical_propagation",
    "entropy_lower_bound",
    "largest_singular_value",
    "low_frequency_ratio",
    "normalised_gram",
    "piecewise_softmax",
    "probability_between",
    "product_low_frequency_ratio",
    "propagation",
    "propagation_exact",
    "propagation_exact_head",
    "propagation_finite",
    "propagation_of_draws",
    "qk_eigenvalues",
    "qk_moments",
    "qk_singular_values",
    "qk_spectral_norm",
    "regime",
    "regime_margins",
    "regime_of_curve",
    "scale_bound",
    "screenot",
    "sinusoidal",
    "smoothness_bound",
    "stable_rank",
    "trace_bound",
]
