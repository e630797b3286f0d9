"""Build the two-layer attention model of Theorem 4.1 of Zhang et al. 2025, which averages numbers after a separator.

Pure functions of numbers and the place of [SEP]; nothing is trained here. Places are indices from 0: the paper's t
is `separator` + 1. What is printed and does not hold is in docs/errata.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from theodolite.errors import UsageError

ABSENT = -1
"""As the place of [SEP]: there is none."""


@dataclass(frozen=True)
class AveragingOutput:
    """The output of an averaging model, and its hidden parts.

    output: f(x), the average that it finds.
    attention: A¹, rows are queries, causal.
    hidden: H = A¹ E W_V¹ + E; coordinate 0 holds the numbers, coordinate 1 the tags.
    last_attention: the last query's row of A².
    """

    output: Float[Tensor, "*batch"]
    attention: Float[Tensor, "*batch length length"]
    hidden: Float[Tensor, "*batch length 2"]
    last_attention: Float[Tensor, "*batch length"]


@dataclass(frozen=True)
class AveragingModel:
    """Eqs. (1) and (2) with any weights; those with leading dimensions broadcast against the sequences.

    Numbers are embedded as (x, −1) and [SEP] as (s_num, −s_tag). The first layer's logits are E Eᵀ without weights
    or temperature. Rows are tokens, so that a query h meets a key h' as h · query_key · h'.

    Attributes:
        value_1: W_V¹. query_key: W_Q² W_K² as printed, W_Q² (W_K²)ᵀ in eq. (2). value_2: W_V².
        s_num, s_tag: of [SEP].
    """

    value_1: Float[Tensor, "*#batch 2 2"]
    query_key: Float[Tensor, "*#batch 2 2"]
    value_2: Float[Tensor, "*#batch 2 1"]
    s_num: Float[Tensor, "*#batch"]
    s_tag: Float[Tensor, "*#batch"]

    def embed(
        self, numbers: Float[Tensor, "*batch length"], separator: Int[Tensor, "*#batch"]
    ) -> Float[Tensor, "*batch length 2"]:
        """Embed the numbers: E; what `numbers` has at the place of [SEP] is not read."""
        here = _places(numbers) == separator[..., None]
        values = torch.where(here, self.s_num[..., None], numbers)
        tags = torch.where(here, -self.s_tag[..., None], -1.0)
        return torch.stack([values, tags.expand_as(values)], -1)

    def __call__(
        self, numbers: Float[Tensor, "*batch length"], separator: Int[Tensor, "*#batch"] | int
    ) -> AveragingOutput:
        """Compute the output and what leads to it.

        In the construction, with [SEP] in the last place the output is the sum of the numbers over T in the limit,
        and without [SEP] it is their mean, for any s_tag: nothing is tagged, and all tokens count alike.

        Args:
            numbers: any finite values. separator: place of [SEP], `ABSENT` for none.

        Raises:
            UsageError: a place that is not in the sequence.
        """
        separator = _checked(numbers, separator)
        embedded = self.embed(numbers, separator)
        attention = causal_softmax(embedded @ embedded.mT)
        hidden = attention @ (embedded @ self.value_1) + embedded
        last = (hidden[..., -1:, :] @ self.query_key @ hidden.mT).softmax(-1)  # the last query sees all keys
        output = last @ (hidden @ self.value_2)
        return AveragingOutput(output[..., 0, 0], attention, hidden, last[..., 0, :])


def averaging_model(
    s_tag: float | Tensor, b: float | Tensor = 0.0, d: float | Tensor = 1.0
) -> AveragingModel:
    """Build the construction of Theorem 4.1 (eq. 3), in float64 and differentiable in all three.

    With k ≤ t < j, and up to what vanishes as e^{−s²}, the second coordinates of H are τ_k = 0 and
    τ_j = (s − 1) A¹_jt, and the last query's logits are (b x_T + d τ_T) τ. So the output tends to the mean of the
    numbers after [SEP] as s_tag → ∞, and `averaging_error` says how fast.

    Args:
        s_tag, b, d: numbers, or tensors of one shape () or that broadcasts against the sequences' leading
            dimensions.

    Raises:
        UsageError: d is not positive: the last query would then turn away from the tagged tokens.
    """
    tag, number, gain = torch.broadcast_tensors(
        *(torch.as_tensor(value, dtype=torch.float64) for value in (s_tag, b, d))
    )
    if not bool((gain > 0).all()):
        raise UsageError(f"d is {gain.min().item():g}: Theorem 4.1 needs d > 0")
    zero = torch.zeros_like(tag)
    return AveragingModel(
        value_1=torch.tensor([[0.0, 0.0], [0.0, -1.0]], dtype=torch.float64),
        query_key=torch.stack([torch.stack([zero, number], -1), torch.stack([zero, gain], -1)], -2),
        value_2=torch.tensor([[1.0], [0.0]], dtype=torch.float64),
        s_num=zero,
        s_tag=tag,
    )


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
    s_tag: float | Tensor,
    b: float | Tensor = 0.0,
    d: float | Tensor = 1.0,
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
    tag = torch.as_tensor(s_tag, dtype=torch.float64)
    place = _places(numbers)
    is_number = place != separator[..., None]
    products = (numbers[..., :, None] * numbers[..., None, :] + 1).exp()
    sums = torch.where(is_number[..., None, :], products, 0.0).tril().sum(-1)
    after = place > separator[..., None]
    count = after.sum(-1)
    mean = torch.where(after, sums, 0.0).sum(-1) / count
    deviation = torch.where(after, sums - mean[..., None], 0.0)
    covariance = (deviation * torch.where(after, numbers, 0.0)).sum(-1) / count
    logit = (tag - 1) * (b * numbers[..., -1] + d * (tag - 1))  # of a tagged token, but for e^(−s)
    return -logit * (-tag).exp() * covariance


def causal_softmax(
    logits: Float[Tensor, "*batch length length"],
) -> Float[Tensor, "*batch length length"]:
    """Compute softmax over keys; rows are queries, and no query sees a later key."""
    later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
    return logits.masked_fill(later, -torch.inf).softmax(-1)


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
