"""Wrong calls of the theory, each named in one line. Oracle: the words."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch

from theodolite.errors import UsageError
from theodolite.theory import (
    dct2,
    decompose,
    entropy_lower_bound,
    largest_singular_value,
    low_frequency_ratio,
    propagation,
    propagation_exact,
    propagation_exact_head,
    propagation_finite,
    qk_eigenvalues,
    qk_moments,
    qk_singular_values,
    qk_spectral_norm,
    regime,
    regime_margins,
    scale_bound,
    sinusoidal,
    smoothness_bound,
    trace_bound,
)
from theodolite.theory.outliers import Thresholds

ONE, ZERO, EYE = torch.ones(()), torch.zeros(1), torch.eye(4)
HEAD, NAN = torch.ones(4, 2), torch.nan
SCALES = torch.tensor([NAN, -1.0, 2.0])
SHEAR = torch.tensor([[1.0, 0.5], [0.0, 1.0]])

REFUSED = [
    (lambda: qk_moments(HEAD, HEAD[:, :1]), r"w_k \(4, 1\): give both as"),
    (
        lambda: qk_eigenvalues(HEAD, HEAD, torch.eye(3)),
        r"covariance has shape \(3, 3\): give \(\.\.\., 4, 4\)",
    ),
    (lambda: qk_moments(HEAD, HEAD, temperature=0.0), r"temperature is 0\.0: give a positive number"),
    (lambda: qk_moments(HEAD, HEAD, temperature=1 - 2 * torch.eye(2)[0]), r"everywhere \(its least is -1\)"),
    (lambda: qk_moments(HEAD, HEAD, -EYE), "negative eigenvalue"),
    (lambda: qk_moments(HEAD, HEAD, EYE + 0j), "covariance is complex"),
    *(
        (lambda f=f: f(HEAD * NAN, HEAD), "NaN or inf")
        for f in (qk_eigenvalues, qk_singular_values, qk_spectral_norm)
    ),
    *((lambda f=f: f(HEAD, HEAD[:, :1]), "give both as") for f in (trace_bound, scale_bound)),
    *((lambda f=f: f(HEAD, HEAD, -EYE), "negative eigenvalue") for f in (trace_bound, scale_bound)),
    *((lambda f=f: f(HEAD, HEAD, EYE * NAN), "covariance holds NaN") for f in (trace_bound, scale_bound)),
    *((lambda f=f: f(HEAD * NAN, HEAD, EYE), "w_q holds NaN") for f in (trace_bound, scale_bound)),
    (lambda: propagation(ZERO, ONE, ONE, variant="exact"), "unknown variant 'exact'"),
    (lambda: propagation(ZERO, ONE, SCALES), "eta is -1: a scale is not negative"),
    (lambda: propagation_finite(ONE, ONE, ONE, 0, 1.0), "length is 0"),
    *(
        (lambda t=t: propagation_finite(ONE, ONE, ONE, 3, t), r"temperature is .*: give a positive number")
        for t in (0.0, -2.0, torch.tensor(-2.0), NAN)
    ),
    (lambda: propagation_exact(torch.ones(3), 0, 1.0), "length is 0"),
    (lambda: propagation_exact(torch.ones(3), 2, 0.0), "temperature is 0"),
    (lambda: propagation_exact_head(HEAD, HEAD, 4, positions=[1, 5]), "give keys from 1 to 4"),
    (lambda: propagation_exact_head(HEAD, HEAD, 4, positions=[]), "positions is empty"),
    (lambda: propagation_exact_head(HEAD, HEAD, 4, covariance=-EYE), "negative eigenvalue"),
    (lambda: propagation_exact_head(HEAD[:2], HEAD[:2], 4, covariance=SHEAR), "not symmetric"),
    *(
        (lambda f=f: f([1.0, 1.0], [np.nan, -1.0]), "eta is -1: a scale is not")
        for f in (regime, regime_margins)
    ),
    (lambda: low_frequency_ratio(EYE, (0, 3)), r"cutoffs are \(0, 3\)"),
    (lambda: low_frequency_ratio(EYE, ()), "give one or more"),
    (lambda: dct2(EYE, 0), "frequencies is 0"),
    (lambda: smoothness_bound(EYE, 5, 1), "k is 5: give numbers from 1 to 4"),
    (lambda: smoothness_bound(EYE, (), 1), r"k is \(\)"),
    (lambda: smoothness_bound(EYE, 1, 0), "m is 0"),
    (lambda: smoothness_bound(EYE[:, :3], 1, 1), r"shape \(4, 3\): give a square"),
    (lambda: sinusoidal(4, 3), "width 3: give a length from 1 and an even width"),
    (lambda: largest_singular_value(torch.ones(4)), r"x has shape \(4,\)"),
    (lambda: entropy_lower_bound(1.0, 0), "length is 0"),
    (lambda: entropy_lower_bound(-1.0, 4), "nu is -1"),
    (lambda: entropy_lower_bound(1.0, 4, variant="exact"), "unknown variant"),
    (lambda: decompose(torch.zeros(3, 4)), r"\(3, 4\)"),
    (lambda: decompose(torch.zeros(2, 0, 4)), r"\(2, 0, 4\)"),
    (lambda: decompose(torch.zeros(1, 2, 3, 4)), r"\(1, 2, 3, 4\)"),
    *(
        (lambda n=name, v=value: Thresholds(**{n: v}), f"threshold {name} is")
        for name, value in {"outlier": 0.0, "level": 1.5, "massive": math.inf, "massive_ratio": -1.0}.items()
    ),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_a_wrong_call_is_named_in_one_line(call, words):
    with pytest.raises(UsageError, match=words) as error:
        call()
    assert "\n" not in str(error.value)


ONES, HEADS = torch.ones(3), torch.ones(5, 2, 1)
WRONG_TYPES = [
    (lambda: propagation_exact([0.1, 0.2], 4, 1.0), "eigenvalues is a list: give a tensor"),
    (lambda: propagation_exact(ONES + 0j, 4, 1.0), "complex: an asymmetric W has its curve from"),
    (lambda: propagation_exact(ONE, 4, 1.0), r"eigenvalues has shape \(\): give \(\.\.\., d\)"),
    (lambda: propagation_exact(ONES, 4.5, 1.0), r"length is 4\.5: give a whole number of tokens"),
    (lambda: propagation_exact(ONES, 4, "a"), "temperature is 'a': give a positive number"),
    (lambda: propagation_exact(ONES, 4, None), "temperature is None: give a positive number"),
    (lambda: propagation_exact(ONES, 4, ONES), r"shape \(3,\): give .* broadcasts to the heads' \(\)"),
    (
        lambda: propagation_exact(torch.ones(2, 5), 4, ONES),
        r"shape \(3,\): give .* broadcasts to the heads' \(2,\)",
    ),
    (lambda: propagation_exact_head(HEADS, HEADS, 4), r"\(5, 2, 1\): give one head at a time, \(d, d_h\)"),
    (lambda: propagation_exact_head(HEADS[0] + 0j, HEADS[0], 4), "w_q is complex: give real numbers"),
    (lambda: propagation_exact_head(HEADS[0], HEADS[0], 4, torch.ones(2)), "give one number for one head"),
    (
        lambda: propagation_exact_head(HEADS[0], HEADS[0], 4, covariance=torch.ones(2, 3)),
        r"have shapes \[\(2, 1\), \(2, 1\), \(2, 3\)\]: give \(d, d_h\) twice, and \(d, d\)",
    ),
    (lambda: propagation_finite(ONE, ONE, ONE, 4.5, 1.0), r"length is 4\.5: give a whole number of tokens"),
    (lambda: propagation_finite(ONE * 1j, ONE, ONE, 3, 1.0), "trace is complex: give real numbers"),
    (lambda: propagation(ONES, ONE * 1j, ONE), "xi is complex: give real numbers"),
]


@pytest.mark.skipif("beartype" in sys.modules, reason="annotations are checked first")
@pytest.mark.parametrize(("call", "words"), WRONG_TYPES)
def test_a_wrong_type_is_named_in_one_line(call, words):
    test_a_wrong_call_is_named_in_one_line(call, words)
