"""How much of the variance of vectors a grouping of them explains, and how much it would by chance."""

from __future__ import annotations

import math

from jaxtyping import Float, Int
from torch import Tensor


def variance_explained(x: Float[Tensor, "tokens width"], group: Int[Tensor, " tokens"]) -> float:
    """η²: the sum of squares between the means of the groups over the total one, both about the mean of all.

    In [0, 1]; NaN where there is one group only, or no variance: then there is nothing to explain.
    """
    names, of = group.unique(return_inverse=True)
    centred = x.double() - x.double().mean(dim=0)
    total = centred.square().sum()
    if len(names) < 2 or not total > 0:
        return math.nan
    sums = centred.new_zeros(len(names), x.shape[1]).index_add_(0, of, centred)
    between = (sums.square().sum(dim=1) / of.bincount()).sum()
    return float(between / total)


def chance_explained(group: Int[Tensor, " tokens"]) -> float:
    """What η² is on average when the same groups are dealt out at random: (groups − 1)/(tokens − 1), exactly.

    Of a random permutation, two different tokens' centred vectors have the mean product −total/(n(n − 1)), so a
    group of size m has a centred sum of mean square total · m(n − m)/(n(n − 1)).
    """
    return (len(group.unique()) - 1) / (len(group) - 1) if len(group) > 1 else math.nan
