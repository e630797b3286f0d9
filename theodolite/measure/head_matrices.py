"""One head on one context, queries by keys: its constituents, what is in neither, their sum, and its attention.

Of a split of logits, rows are centred, parts summed and shares of variance taken. Nothing here draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from theodolite.errors import UsageError
from theodolite.measure.constituents import ADDITIVE, Constituents, share_sums
from theodolite.theory.decomposition import PARTS

MOST_POSITIONS = 128
"""Positions shown: seven panels of so many squared are under a megabyte of page."""

QK, ATTENTION, CONSTANT = "QK", "attention", "constant"

WITH_CONSTANTS = {
    ("pos", "pos"): "position",
    ("pos", CONSTANT): "position",
    (CONSTANT, "pos"): "position",
    ("cvec", "cvec"): "context",
    ("cvec", CONSTANT): "context",
    (CONSTANT, "cvec"): "context",
}
"""Matrices that mean and bias are within, by what is on the other side; all others are named after their sides."""


@dataclass(frozen=True)
class HeadMatrix:
    """A matrix of a head: values (n, n) of queries by keys, NaN where the query does not see the key.

    `share`: of the variance of the logits that the softmax sees; those of the constituents sum to 1. NaN for
    attention, and where logits do not vary.
    """

    name: str
    values: NDArray[np.float64]
    share: float


def head_matrices(
    split: Constituents, head: int, *, context: int = 0, first: int = 1, raw: bool = False
) -> list[HeadMatrix]:
    """Compute a head's four constituents, what is in neither, their sum, and the attention.

    "position" is pos × pos with the pairs of pos and a constant part (mean or bias), "context" the same of cvec;
    "constant" has the pairs of constant parts, "additive" is there where the family adds a bias to its logits.
    They sum to "QK", the model's own logits before a cap. `raw`, as published: "pos-pos" and "cvec-cvec"
    without the constant parts, which are then all in "constant".

    Args:
        split: from `constituents`, or made coarser into "pos", "cvec" and "constant".
        head, context: which.
        first: the first position shown, as query and key; `MOST_POSITIONS` are shown at most.
        raw: the logits as they are, and constant parts apart; else every row less its mean over the keys that
            the query sees (without position 0, unless it is shown), which the softmax does not notice.

    Shares are those of a survey: over all positions but position 0, whatever is shown.

    Raises:
        UsageError: no such head, context or position, or a split into other parts.
    """
    of_head = _single_head(split, head, context)
    length = of_head.query.shape[3]
    if not 0 <= first < length:
        raise UsageError(f"position {first} does not exist: this context has positions 0 to {length - 1}")
    sums = share_sums(of_head.query, of_head.key, of_head.inputs)
    shares, additive_share = (of.value for of in sums.shares())
    matrices: dict[str, torch.Tensor] = {}
    shares_of: dict[str, float] = {}
    logits = of_head.logits_of(0).cpu()
    for a, query in enumerate(of_head.names):
        for b, key in enumerate(of_head.names):
            name = _matrix_name(query, key, raw)
            matrices[name] = matrices.get(name, 0) + logits[a, b]
            shares_of[name] = shares_of.get(name, 0.0) + float(shares[0, a, b])
    if of_head.inputs.bias is not None:
        matrices[ADDITIVE], shares_of[ADDITIVE] = of_head.additive[0].cpu(), float(additive_share[0])
    matrices[QK], shares_of[QK] = of_head.total[0].cpu(), float(sum(shares_of.values()))
    visible = of_head.visible[0].cpu()
    centred_over = visible.clone()
    centred_over[:, : min(first, 1)] = False
    window = slice(first, first + MOST_POSITIONS)

    def matrix(name: str, values: torch.Tensor) -> HeadMatrix:
        if not raw and name != ATTENTION:
            mean = (values * centred_over).sum(-1, keepdim=True) / centred_over.sum(
                -1, keepdim=True
            ).clamp_min(1)
            values = values - mean
        visible_values = values.masked_fill(~visible, math.nan)[window, window]
        return HeadMatrix(name, visible_values.numpy(), shares_of.get(name, math.nan))

    return [
        matrix(name, values) for name, values in (matrices | {ATTENTION: of_head.attention[0].cpu()}).items()
    ]


def _matrix_name(query: str, key: str, raw: bool) -> str:
    if raw:
        return CONSTANT if CONSTANT in (query, key) else f"{query}-{key}"
    return CONSTANT if query == key == CONSTANT else WITH_CONSTANTS.get((query, key), f"{query}-{key}")


def _single_head(split: Constituents, head: int, context: int) -> Constituents:
    """Split one context and head into position, context and constants."""
    _, contexts, heads, _, _ = split.query.shape
    if not 0 <= head < heads:
        raise UsageError(f"head {head} does not exist: this layer has heads 0 to {heads - 1}")
    if not 0 <= context < contexts:
        raise UsageError(f"context {context} does not exist: the split has contexts 0 to {contexts - 1}")
    if split.names == PARTS:
        split = split.coarse()
    if set(split.names) != {"pos", "cvec", CONSTANT}:
        raise UsageError(
            f"the parts are {', '.join(split.names)}: give all of them, or pos, cvec and constant"
        )
    own = slice(context, context + 1)
    inputs = split.inputs.of_heads([head]).of_contexts(own)
    inputs = replace(inputs, query=inputs.query.double(), key=inputs.key.double())
    query, key = (side[:, own, head : head + 1] for side in (split.query, split.key))
    return replace(split, query=query, key=key, inputs=inputs)
