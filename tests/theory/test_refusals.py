"""Wrong calls of the theory, each named in one line. Oracle: the words."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from theodolite.errors import UsageError
from theodolite.theory import (
    decompose,
    entropy_lower_bound,
    propagation,
    propagation_exact,
    propagation_finite,
    qk_eigenvalues,
    qk_moments,
    qk_singular_values,
    regime,
    sinusoidal,
)

ONE, ZERO, EYE = torch.ones(()), torch.zeros(1), torch.eye(4)
HEAD, NAN = torch.ones(4, 2), torch.nan
SCALES = torch.tensor([NAN, -1.0, 2.0])
SHEAR = torch.eye(4) + torch.eye(4).roll(1, 0).triu()

REFUSED = [
    (lambda: qk_moments(HEAD, HEAD[:, :1]), r"w_k \(4, 1\): give both as"),
    (lambda: qk_moments(HEAD, HEAD, temperature=0.0), "temperature is 0: give a positive number"),
    (
        lambda: qk_moments(HEAD, HEAD, temperature=1 - 2 * torch.eye(2)[0]),
        "temperature is -1: give a positive",
    ),
    (lambda: qk_moments(HEAD, HEAD, SHEAR), "not symmetric"),
    *((lambda f=f: f(HEAD * NAN, HEAD), "NaN or inf") for f in (qk_eigenvalues, qk_singular_values)),
    (lambda: propagation(ZERO, ONE, ONE, variant="exact"), "unknown variant 'exact'"),
    (lambda: propagation(ZERO, ONE, SCALES), "eta is -1: a scale is not negative"),
    (lambda: propagation_finite(ONE, ONE, ONE, 0, 1.0), "length is 0"),
    *(
        (lambda t=t: propagation_finite(ONE, ONE, ONE, 3, t), r"temperature is .*: give a positive number")
        for t in (0.0, -2.0, torch.tensor(-2.0), NAN)
    ),
    (lambda: propagation_exact(torch.ones(3), 0, 1.0), "length is 0"),
    (lambda: propagation_exact(torch.ones(3), 2, 0.0), "temperature is 0"),
    (lambda: regime([1.0, 1.0], [np.nan, -1.0]), "eta is -1: a scale is not"),
    (lambda: sinusoidal(4, 3), "width 3: give a length from 1 and an even width"),
    (lambda: entropy_lower_bound(1.0, 0), "length is 0"),
    (lambda: entropy_lower_bound(-1.0, 4), "nu is -1"),
    (lambda: entropy_lower_bound(1.0, 4, variant="exact"), "unknown variant"),
    (lambda: decompose(torch.zeros(3, 4)), r"\(3, 4\)"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_a_wrong_call_is_named_in_one_line(call, words):
    with pytest.raises(UsageError, match=words) as error:
        call()
    assert "\n" not in str(error.value)


ONES = torch.ones(3)
WRONG_TYPES = [
    (lambda: propagation_exact([0.1, 0.2], 4, 1.0), "eigenvalues is a list: give a tensor"),
    (lambda: propagation_exact(ONES + 0j, 4, 1.0), "complex: give those of the symmetric part"),
]


@pytest.mark.skipif("beartype" in sys.modules, reason="annotations are checked first")
@pytest.mark.parametrize(("call", "words"), WRONG_TYPES)
def test_a_wrong_type_is_named_in_one_line(call, words):
    test_a_wrong_call_is_named_in_one_line(call, words)
