"""Pure, batched torch functions for the mathematics of attention geometry.

They take tensors and give tensors (float64), read no files and know no model. Formulas that differ from the
published ones are explained in docs/errata.md. Public names are imported when they are first used, but for one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from theodolite.system.lazy_names import lazy_names
from theodolite.theory.propagation import propagation as propagation  # at once: the module has its name

if TYPE_CHECKING:
    from theodolite.attention.summary import AttentionSummary as AttentionSummary
    from theodolite.attention.summary import attention_summary as attention_summary
    from theodolite.attention.summary import empirical_propagation as empirical_propagation
    from theodolite.attention.summary import piecewise_softmax as piecewise_softmax
    from theodolite.theory.decomposition import Decomposition as Decomposition
    from theodolite.theory.decomposition import decompose as decompose
    from theodolite.theory.entropy import entropy_lower_bound as entropy_lower_bound
    from theodolite.theory.exact_propagation import probability_between as probability_between
    from theodolite.theory.exact_propagation import propagation_exact as propagation_exact
    from theodolite.theory.propagation import curve_width as curve_width
    from theodolite.theory.propagation import propagation_finite as propagation_finite
    from theodolite.theory.propagation import propagation_of_draws as propagation_of_draws
    from theodolite.theory.regimes import REGIMES as REGIMES
    from theodolite.theory.regimes import RegimeMargins as RegimeMargins
    from theodolite.theory.regimes import regime as regime
    from theodolite.theory.regimes import regime_margins as regime_margins
    from theodolite.theory.regimes import regime_of_curve as regime_of_curve
    from theodolite.theory.singular import ScreeNOT as ScreeNOT
    from theodolite.theory.singular import largest_singular_value as largest_singular_value
    from theodolite.theory.singular import screenot as screenot
    from theodolite.theory.smoothness import dct2 as dct2
    from theodolite.theory.smoothness import low_frequency_ratio as low_frequency_ratio
    from theodolite.theory.smoothness import normalised_gram as normalised_gram
    from theodolite.theory.smoothness import product_low_frequency_ratio as product_low_frequency_ratio
    from theodolite.theory.smoothness import sinusoidal as sinusoidal
    from theodolite.theory.spectrum import QKMoments as QKMoments
    from theodolite.theory.spectrum import qk_eigenvalues as qk_eigenvalues
    from theodolite.theory.spectrum import qk_moments as qk_moments
    from theodolite.theory.spectrum import qk_singular_values as qk_singular_values
    from theodolite.theory.spectrum import qk_spectral_norm as qk_spectral_norm

_names, __getattr__, __dir__ = lazy_names(__name__)
__all__ = ["propagation", *_names]
