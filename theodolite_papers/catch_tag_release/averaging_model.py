"""Build the two-layer attention model of Theorem 4.1 of Zhang et al. 2025, which averages numbers after a separator.

Pure functions of numbers and the place of [SEP]; nothing is trained here. Places are indices from 0: the paper's t
is `separator` + 1. What is printed and does not hold is in docs/errata.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from theodolite.errors import UsageError

ABSENT = -1
"""As the place of [SEP]: there is none."""


@dataclass(frozen=True)
class AveragingOutput:
    """The output f(x) of the construction, and its hidden parts.

    attention: A¹, rows are queries, causal. hidden: H = A¹ E W_V¹ + E; coordinate 0 holds the numbers, coordinate 1 the
    tags.
    """

    output: Float[Tensor, "*batch"]
    attention: Float[Tensor, "*batch length length"]
    hidden: Float[Tensor, "*batch length 2"]


def averaging_model(
    numbers: Float[Tensor, "*batch length"],
    separator: Int[Tensor, "*#batch"] | int,
    s_tag: float,
    b: float = 0.0,
    d: float = 1.0,
) -> AveragingOutput:
    """Compute the construction of Theorem 4.1 (eqs. 1 to 3) on sequences.

    Numbers are embedded as (x, −1) and [SEP] as (0, −s_tag); what `numbers` has at its place is not read. Logits of the
    first layer are E Eᵀ, W_V¹ = diag(0, −1); the last query h meets a key h' as (b h_0 + d h_1) h'_1 (W_Q² W_K² as
    printed, W_Q² (W_K²)ᵀ in eq. 2), and W_V² reads coordinate 0.

    With k ≤ t < j, and up to what vanishes as e^{−s²}, the second coordinates of H are τ_k = 0 and
    τ_j = (s − 1) A¹_jt, and the last query's logits are (b x_T + d τ_T) τ. So the output tends to the mean of the
    numbers after [SEP] as s_tag → ∞, and `averaging_error` says how fast. With [SEP] in the last place it is the sum of
    the numbers over T in the limit, and without [SEP] their mean, for any s_tag: nothing is tagged.

    Args:
        numbers: any finite values. separator: place of [SEP], `ABSENT` for none. s_tag, b, d: of the theorem.

    Raises:
        UsageError: a place that is not in the sequence, or d is not positive: the last query would then turn away from
            the tagged tokens.
    """
    separator = _checked(numbers, separator)
    if not d > 0:
        raise UsageError(f"d is {d:g}: Theorem 4.1 needs d > 0")
    here = _places(numbers) == separator[..., None]
    values = numbers.masked_fill(here, 0.0)
    tags = torch.full_like(values, -1.0).masked_fill(here, -s_tag)
    embedded = torch.stack([values, tags], -1)
    logits = embedded @ embedded.mT
    later = torch.ones_like(logits, dtype=torch.bool).triu(1)
    attention = logits.masked_fill(later, -torch.inf).softmax(-1)
    hidden = torch.stack([values, tags - (attention @ tags[..., None])[..., 0]], -1)
    slope = b * hidden[..., -1, 0] + d * hidden[..., -1, 1]
    last = (slope[..., None] * hidden[..., 1]).softmax(-1)  # the last query sees all keys
    return AveragingOutput((last * hidden[..., 0]).sum(-1), attention, hidden)


def mean_after(
    numbers: Float[Tensor, "*batch length"], separator: Int[Tensor, "*#batch"] | int
) -> Float[Tensor, "*batch"]:
    """Average the numbers after [SEP], 1/(T − t) Σ_{i>t} x_i; NaN where nothing follows.

    Raises:
        UsageError: a place that is not in the sequence.
    """
    after = _places(numbers) > _checked(numbers, separator)[..., None]
    return torch.where(after, numbers, 0.0).sum(-1) / after.sum(-1)


def averaging_error(
    numbers: Float[Tensor, "*batch length"],
    separator: Int[Tensor, "*#batch"] | int,
    s_tag: float,
    b: float = 0.0,
    d: float = 1.0,
) -> Float[Tensor, "*batch"]:
    """Compute the leading term of f(x) − mean as s_tag → ∞, signed; ours, the paper has no rate.

        −(s − 1)(b x_T + d (s − 1)) e^{−s} cov_{j>t}(S_j, x_j),   S_j = Σ_{k≤j, k≠t} exp(x_j x_k + 1)

    with the covariance over the tokens after [SEP], each counted once. Derivation: A¹_jt = 1/(1 + S_j e^{−s}), so the
    last query's logits of tagged tokens differ by −(s − 1)(b x_T + d (s − 1)) S_j e^{−s}; to first order a softmax
    with logits ℓ_j averages x to its mean plus cov(ℓ_j, x_j). What untagged tokens get is of the order of e^{−d s²}.
    The error is therefore of the order s² e^{−s} for given numbers, but not uniformly: the constant grows as
    exp(max x²), and its mean over normal numbers does not exist.

    Raises:
        UsageError: a place that is not in the sequence.
    """
    separator = _checked(numbers, separator)
    place = _places(numbers)
    is_number = place != separator[..., None]
    products = (numbers[..., :, None] * numbers[..., None, :] + 1).exp()
    sums = torch.where(is_number[..., None, :], products, 0.0).tril().sum(-1)
    after = place > separator[..., None]
    count = after.sum(-1)
    mean = torch.where(after, sums, 0.0).sum(-1) / count
    deviation = torch.where(after, sums - mean[..., None], 0.0)
    covariance = (deviation * torch.where(after, numbers, 0.0)).sum(-1) / count
    logit = (s_tag - 1) * (b * numbers[..., -1] + d * (s_tag - 1))  # of a tagged token, but for e^(−s)
    return -logit * math.exp(-s_tag) * covariance


def _places(numbers: Tensor) -> Tensor:
    return torch.arange(numbers.shape[-1], device=numbers.device)


def _checked(numbers: Tensor, separator: Tensor | int) -> Tensor:
    separator = torch.as_tensor(separator, device=numbers.device)
    length = numbers.shape[-1]
    if bool(((separator < ABSENT) | (separator >= length)).any()):
        raise UsageError(
            f"[SEP] is in a place that {length} tokens do not have: give 0 to {length - 1}, or {ABSENT} for none"
        )
    return separator
