"""Statistics of attention from queries and keys, without a T×T matrix: entropies, normalisers, mass, sinks, ρ.

On a CPU in blocks of queries (here), on a CUDA device in the Triton kernels of `triton.py` where they can.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from theodolite.attention import triton as attention_triton
from theodolite.attention.inputs import MASKED, AttentionInputs, weigh
from theodolite.errors import UsageError
from theodolite.system.processor import parallel_map

SINK_THRESHOLD = 0.3
"""ε: a key is a sink when the queries that see it pay it more than this on average (Gu et al. 2024)."""


def is_sink(mean: Float[Tensor, "*keys"]) -> Bool[Tensor, "*keys"]:
    """Tell which keys, or learned sink columns, are sinks by the mean attention of the queries that see them."""
    return mean > SINK_THRESHOLD


def least_queries(length: int) -> int:
    """Return how many other queries must see a key of a context of `length` tokens for it to count as a sink."""
    return min(16, math.ceil(length / 4))


@dataclass(frozen=True)
class ReceivedAttention:
    """The mean attention that each key receives from the queries that see it, and whether `least_queries` others do."""

    mean: Float[Tensor, "batch heads keys"]
    candidate: Bool[Tensor, "batch_or_1 heads_or_1 keys"]

    @classmethod
    def of(cls, inputs: AttentionInputs, mass: Float[Tensor, "batch heads keys"]) -> ReceivedAttention:
        """Average what each key receives, from its attention weights summed over the queries."""
        queries = inputs.visible_queries()
        candidate = queries - 1 >= least_queries(inputs.query.shape[2])
        return cls(mass / queries.clamp_min(1), candidate)

    @property
    def sinks(self) -> Bool[Tensor, "batch heads keys"]:
        """The keys that are sinks."""
        return is_sink(self.mean) & self.candidate

    @property
    def of_candidates(self) -> Float[Tensor, "batch heads keys"]:
        """The mean; NaN for keys that too few queries see for a sink."""
        return self.mean.masked_fill(~self.candidate, torch.nan)


@dataclass(frozen=True)
class AttentionSummary:
    """Entropy, normalisers, received attention and output of every head on every context.

    Attributes:
        output: the attention output, in the values' dtype (width 0 where there are no values).
        entropy: of each query's attention, nats; a learned sink column counts as one more outcome.
        log_sum_exp: logarithm of the sum of the exponentials of each query's logits, a learned column's too.
        largest: of the logits of the keys that each query sees.
        mass: attention that each key receives, summed over the queries.
        learned: each query's weight of the learned sink column, where there is one.
        inputs: what it was computed from.
    """

    output: Float[Tensor, "batch queries heads value_width"]
    entropy: Float[Tensor, "batch heads queries"]
    log_sum_exp: Float[Tensor, "batch heads queries"]
    largest: Float[Tensor, "batch heads queries"]
    mass: Float64[Tensor, "batch heads keys"]
    learned: Float[Tensor, "batch heads queries"] | None
    inputs: AttentionInputs

    @property
    def received(self) -> Float64[Tensor, "batch heads keys"]:
        """Mean attention that each key gets from the queries that see it."""
        return ReceivedAttention.of(self.inputs, self.mass).mean

    @property
    def sinks(self) -> Bool[Tensor, "batch heads keys"]:
        """The keys that are attention sinks."""
        return ReceivedAttention.of(self.inputs, self.mass).sinks

    @property
    def propagates(self) -> Bool[Tensor, "batch heads keys"]:
        """The keys whose signals propagate to the last query (Bao et al. 2024, definition 1); its mean is ρ."""
        return last_query(self.inputs)[1]


Visit = Callable[[int, int, int, Tensor], None]
"""A callback with (first query, first key, first head) of a block and its weights (batch, heads, rows, keys)."""


def attention_summary(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    *,
    scaling: float | None = None,
    causal: bool = True,
    mask: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
) -> AttentionSummary:
    """Compute entropy, log-sum-exp, largest logit, mass, sinks and ρ of every head, in O(T) memory a head.

    Computed in float32, or in float64 where that is what is given; masses are summed in float64. A query that sees no
    key, as padding does, pays nothing: its output and entropy are 0, its log-sum-exp and largest logit −∞, or with a
    learned column that column's.

    Args:
        query: (batch, heads, queries, width), after rotary positions.
        key: (batch, key heads, keys, width); each is shared by `heads / key_heads` neighbouring query heads.
        value: (batch, key heads, keys, value width); None where the output is not wanted.
        scaling: of the products; None: 1/√width.
        causal: whether a query sees no later key; not looked at where there is a mask.
        mask: (batch or 1, heads or 1, queries, keys), True where the query sees the key: windows and padding.
        softcap: c of c·tanh(logit / c).
        bias: (batch or 1, heads, queries or 1, keys), added to the logits after capping; −∞ hides a key.
        sink: (heads,), a learned logit of each head that every query sees beside its keys.

    Raises:
        UsageError: queries and keys that do not go together, or a softcap that is not positive.
    """
    causal = causal and mask is None
    value = key[..., :0] if value is None else value
    if query.ndim != 4 or key.ndim != 4 or query.shape[1] % key.shape[1]:
        raise UsageError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} do not go together: give "
            "(batch, heads, positions, width), heads a multiple of the key heads"
        )
    if causal and query.shape[2] != key.shape[2]:
        raise UsageError(
            f"{query.shape[2]} queries and {key.shape[2]} keys: say by a mask which keys a query sees"
        )
    if softcap is not None and not softcap > 0:
        raise UsageError(f"softcap {softcap} is not positive: give None for none")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return summarise(AttentionInputs(query, key, value, scaling, causal, mask, softcap, bias, sink))


def summarise(
    inputs: AttentionInputs,
    output: Tensor | None = None,
    visit: Visit | None = None,
    visit_whole: Callable[[AttentionSummary], None] | None = None,
) -> AttentionSummary:
    """Compute the `attention_summary` of a layer's inputs.

    Args:
        output: where the output goes.
        visit: sees the weights of each block, and must copy what it keeps of them.
        visit_whole: sees the summary instead, where kernels made it and no weights were ever written.
    """
    summary = attention_triton.tried(lambda: _by_kernels(inputs)) if attention_triton.can_do(inputs) else None
    if summary is None:
        return summarise_in_blocks(inputs, output, visit)
    if output is not None:
        output.copy_(summary.output)
    if visit_whole:
        visit_whole(summary)
    return summary


def _by_kernels(inputs: AttentionInputs) -> AttentionSummary:
    output, entropy, log_sum_exp, largest = attention_triton.summarise(inputs)
    blind = _see_nothing(entropy, log_sum_exp, largest)
    output.masked_fill_(blind.transpose(1, 2).unsqueeze(-1), 0)
    entropy, log_sum_exp, learned, others = _with_sink(entropy, log_sum_exp, inputs.sink)
    mass = attention_triton.mass(inputs, log_sum_exp)
    if others is not None:
        output.mul_(others.transpose(1, 2).unsqueeze(-1))
    return AttentionSummary(output, entropy, log_sum_exp, largest, mass, learned, inputs)


def summarise_in_blocks(
    inputs: AttentionInputs, output: Tensor | None = None, visit: Visit | None = None
) -> AttentionSummary:
    """Compute the summary by torch operations, a block of queries at a time."""
    batch, heads, queries, _ = inputs.query.shape
    value, dtype = inputs.value, torch.promote_types(inputs.query.dtype, torch.float32)
    if output is None:
        output = value.new_empty(batch, queries, heads, value.shape[-1])
    # Entropy, log-sum-exp, largest logit and weight of the learned column.
    rows = [value.new_empty(batch, heads, queries, dtype=dtype) for _ in range(3 + (inputs.sink is not None))]
    mass = value.new_zeros(batch, heads, inputs.key.shape[2], dtype=torch.float64)

    def work(part: slice) -> None:
        heads_inputs = inputs if part == slice(0, heads) else inputs.of_heads(part)
        for block in heads_inputs.blocks():
            queries_now, keys_now = slice(block.start, block.stop), slice(block.first, block.last)
            weights, *of_block = weights_and_rows(block.logits, heads_inputs.sink)
            summed = weigh(weights, heads_inputs.value[:, :, keys_now])
            output[:, queries_now, part] = summed.transpose(1, 2)
            mass[:, part, keys_now] += weights.sum(dim=-2)
            for row, values in zip(rows, of_block, strict=True):
                row[:, part, queries_now] = values
            if visit:
                visit(block.start, block.first, part.start, weights)

    parallel_map(work, list(inputs.head_parts()))
    entropy, log_sum_exp, largest, *of_sink = rows
    learned = of_sink[0] if of_sink else None
    return AttentionSummary(output, entropy, log_sum_exp, largest, mass, learned, inputs)


def last_query(inputs: AttentionInputs, trailing: int = 0) -> tuple[Bool[Tensor, "batch heads keys"], Tensor]:
    """Mark the keys that the last query before `trailing` special tokens sees, and those that propagate to it."""
    last = inputs.query.shape[2] - 1 - trailing
    logits = inputs.of_queries(slice(last, last + 1)).logits()[:, :, 0]
    visible = logits > MASKED / 2
    return visible, empirical_propagation(logits, visible)


def piecewise_softmax(logits: Float[Tensor, "*batch keys"]) -> Float64[Tensor, "*batch keys"]:
    """Compute S̃(ω)_i = clamp(ω_i/T − mean(ω)/T + 1/T, 0, 1) of the T visible keys (Bao et al. 2024, section 2)."""
    return _expansion(logits, logits.shape[-1]).clamp(0, 1)


def empirical_propagation(
    logits: Float[Tensor, "*batch keys"], visible: Bool[Tensor, "*batch keys"] | None = None
) -> Bool[Tensor, "*batch keys"]:
    """Mark the visible keys that propagate for one query (None: all are): s_i = ω_i/T − mean(ω)/T + 1/T in [0, 1].

    Averaged over contexts, this is the measured ρ_i (Bao et al. 2024, definition 1 and Fig. 7). A NaN logit makes the
    whole row false.
    """
    visible = torch.ones_like(logits, dtype=torch.bool) if visible is None else visible
    value = _expansion(logits.masked_fill(~visible, 0), visible.sum(-1, keepdim=True))
    return visible & (value >= 0) & (value <= 1)


def _expansion(logits: Tensor, keys: Tensor | int) -> Tensor:
    """Expand softmax of so many keys to first order at zero logits, along the last dimension; others are 0."""
    logits = logits.double()
    return (logits - logits.sum(-1, keepdim=True) / keys + 1) / keys


def weights_at(
    inputs: AttentionInputs, log_sum_exp: Float[Tensor, "batch heads queries"], query: Tensor, key: Tensor
) -> Float[Tensor, "batch heads pairs"]:
    """Compute the attention that some queries (by position) pay to some keys: 0 where they do not see them."""
    normaliser = log_sum_exp[..., query]
    return (inputs.at_pairs(query, key) - normaliser).exp().masked_fill_(normaliser == -torch.inf, 0)


def weights_and_rows(
    logits: Float[Tensor, "batch heads rows keys"], sink: Float[Tensor, " heads"] | None
) -> tuple[Tensor, ...]:
    """Return weights; of each row the entropy in nats, the log-sum-exp, the largest logit, a learned column's weight.

    With x = logit − max, the largest weight is 1/Z and the entropy ln Z − Σ p x. `logits` is overwritten.
    """
    largest = logits.amax(dim=-1)
    shifted = logits.sub_(largest.unsqueeze(-1))
    weights = shifted.softmax(dim=-1)
    log_total = -weights.amax(dim=-1).log()
    entropy, log_sum_exp = log_total - torch.linalg.vecdot(weights, shifted), largest + log_total
    blind = _see_nothing(entropy, log_sum_exp, largest)
    if blind.any():
        weights.masked_fill_(blind.unsqueeze(-1), 0)
    entropy, log_sum_exp, learned, others = _with_sink(entropy, log_sum_exp, sink)
    if learned is None or others is None:
        return weights, entropy, log_sum_exp, largest
    return weights.mul_(others.unsqueeze(-1)), entropy, log_sum_exp, largest, learned


def _see_nothing(
    entropy: Float[Tensor, "batch heads rows"], log_sum_exp: Tensor, largest: Tensor
) -> Bool[Tensor, "batch heads rows"]:
    """Mark the queries that see no key: they pay nothing. (A softmax of equal logits would pay every invisible key.)"""
    blind = largest <= MASKED / 2
    entropy.masked_fill_(blind, 0)
    for tensor in (log_sum_exp, largest):
        tensor.masked_fill_(blind, -torch.inf)
    return blind


def _with_sink(
    entropy: Tensor, log_sum_exp: Tensor, sink: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Add the learned column as one more outcome to entropy and log-sum-exp; return them, its weight λ and 1 − λ.

    The entropy is that of (λ, 1 − λ) and 1 − λ times that of the others.
    """
    if sink is None:
        return entropy, log_sum_exp, None, None
    column = sink.to(entropy.dtype).view(1, -1, 1)
    odds, nothing = column - log_sum_exp, torch.zeros((), dtype=entropy.dtype, device=entropy.device)
    learned, others = odds.sigmoid(), (-odds).sigmoid()
    # ln(1 + e^x) by logaddexp: torch's softplus is x itself from 20 on, which is off by 2e-9.
    either = learned * torch.logaddexp(-odds, nothing)
    either += torch.where(others > 0, others * torch.logaddexp(odds, nothing), nothing)
    return either + others * entropy, torch.logaddexp(log_sum_exp, column), learned, others
