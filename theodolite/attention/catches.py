"""The queries that each sink of a context catches, computed together with the attention output.

A query is caught by the sink that it pays most, if that is more than `SINK_THRESHOLD`. Position 0 and the sinks
themselves are neither caught nor not caught: they are left out.

A local sink catches as many queries as a sink must have (`least_queries`) without being one: it dominates a contiguous
span, and another key takes over. It takes queries from the head's other sinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from theodolite.attention.inputs import AttentionInputs
from theodolite.attention.summary import (
    SINK_THRESHOLD,
    ReceivedAttention,
    is_sink,
    least_queries,
    summarise_in_blocks,
)
from theodolite.system.processor import parallel_map

LEARNED = -1
"""The position of a learned sink column, which is no token."""

Squares = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Catches:
    """The sinks of one layer in one context, ordered by head and position, a learned column (`LEARNED`) last.

    Attributes:
        received: attention that each sink gets on average from the queries that see it.
        local: whether each is a local sink.
        caught: the queries that each sink catches.
        of: the row of `counted` that is the sink's head.
        counted: for each head that has a sink, the tokens that are not left out.
    """

    head: Int[Tensor, " sinks"]
    position: Int[Tensor, " sinks"]
    received: Float[Tensor, " sinks"]
    local: Bool[Tensor, " sinks"]
    caught: Bool[Tensor, "sinks positions"]
    of: Int[Tensor, " sinks"]
    counted: Bool[Tensor, "catching_heads positions"]

    def to(self, device: torch.device) -> Catches:
        """Move all tensors to a device."""
        return Catches(**{name: values.to(device) for name, values in vars(self).items()})

    @classmethod
    def joined(cls, some: Sequence[Catches]) -> Catches:
        """Concatenate the catches of several layers of one context."""
        before, rows = 0, []
        for catches in (each.to(some[0].head.device) for each in some):
            rows.append(vars(catches) | {"of": catches.of + before})
            before += len(catches.counted)
        return cls(**{name: torch.cat([fields[name] for fields in rows]) for name in rows[0]})


def attend_and_catch(
    inputs: AttentionInputs, *, local_sinks: bool = False, trailing: int = 0
) -> tuple[Float[Tensor, "batch queries heads width"], list[Catches]]:
    """Compute the attention output, and what the sinks of each context catch, with `local_sinks` local ones, too.

    The `trailing` special tokens behind the text are left out, as position 0 is.
    """

    def work(context: int) -> tuple[Tensor, Catches]:
        return _of_one_context(inputs.of_contexts(slice(context, context + 1)), local_sinks, trailing)

    # One context at a time on every device: each has sinks of its own.
    outputs, catches = zip(*parallel_map(work, range(len(inputs.query))), strict=True)
    return torch.cat(outputs), list(catches)


def _of_one_context(inputs: AttentionInputs, local_sinks: bool, trailing: int) -> tuple[Tensor, Catches]:
    heads, length = inputs.query.shape[1:3]
    catching = torch.zeros(heads, length, dtype=torch.float64, device=inputs.value.device)

    def count(start: int, first: int, head: int, weights: Tensor) -> None:
        paid, key = weights[0].max(dim=-1)
        key += first
        not_itself = key != torch.arange(start, start + key.shape[1], device=key.device)
        of_these_heads = catching[head : head + len(key)]
        of_these_heads.scatter_add_(1, key, ((paid > SINK_THRESHOLD) & not_itself).double())

    summary = summarise_in_blocks(inputs, visit=count if local_sinks else None)
    # A query that sees nothing pays nothing: e^{logit − ∞}.
    log_total = summary.log_sum_exp[0].masked_fill(summary.log_sum_exp[0] == -torch.inf, torch.inf)
    received = ReceivedAttention.of(inputs, summary.mass)
    global_sink, mean = received.sinks[0], received.mean[0]
    sinks = global_sink | (catching >= least_queries(length))
    if summary.learned is not None:
        # The learned column is one more behind the keys.
        mean = torch.cat([mean, summary.learned[0].double().mean(dim=1, keepdim=True)], dim=1)
        sinks = torch.cat([sinks, is_sink(mean[:, length:])], dim=1)
    head, column = sinks.nonzero(as_tuple=True)
    is_learned = column == length
    position = column.masked_fill(is_learned, LEARNED)
    only_local = ~is_learned & ~global_sink[head, position]
    keys, place = position.clamp_min(0).unique(return_inverse=True)
    logits = inputs.of_queries(slice(None), keys).logits()[0]
    paid = (logits - log_total.unsqueeze(-1)).exp()[head, :, place].double()
    if summary.learned is not None:
        paid[is_learned] = summary.learned[0, head[is_learned]].double()
    catching_heads, of = head.unique(return_inverse=True)
    counted = torch.ones(len(catching_heads), length, dtype=torch.bool, device=head.device)
    counted[:, 0] = False
    counted[:, length - trailing :] = False
    counted[of[~is_learned], position[~is_learned]] = False
    rows = of.unsqueeze(1).expand_as(paid)
    most = paid.new_zeros(counted.shape).scatter_reduce_(0, rows, paid, reduce="amax")
    # Of sinks paid alike, the first.
    number = torch.arange(len(of), device=of.device).unsqueeze(1)
    alike = torch.where(paid == most[of], number, len(of))
    winner = alike.new_full(counted.shape, len(of)).scatter_reduce_(0, rows, alike, reduce="amin")
    caught = (number == winner[of]) & (paid > SINK_THRESHOLD) & counted[of]
    return summary.output, Catches(head, position, mean[head, column], only_local, caught, of, counted)


def between_and_total(x: Float[Tensor, "positions width"], catches: Catches) -> Squares:
    """Compute the sums of squares of vectors that are grouped by the sink that caught their token.

    Between the tokens that each sink caught and all others, and in total; between all groups of a head, and in total.
    """
    caught, counted = catches.caught.to(x.dtype), catches.counted.to(x.dtype)
    by_all = catches.counted.all(dim=0)
    # No sink is among these, so nothing is lost to a massive activation; and they sum to zero from here on.
    x = x - x[by_all].sum(dim=0) / by_all.sum().clamp_min(1)
    size, tokens = caught.sum(dim=1), counted.sum(dim=1).clamp_min(1)
    whole = counted[:, ~by_all] @ x[~by_all]
    sums = caught @ x - whole[catches.of] * (size / tokens[catches.of]).unsqueeze(1)
    squares = counted @ x.square().sum(dim=-1) - whole.square().sum(dim=-1) / tokens
    return sums_of_squares(sums, squares, catches)


def sums_of_squares(sums: Tensor, squares: Tensor, catches: Catches, metric: Tensor | None = None) -> Squares:
    """Compute `between_and_total` of vectors that have mean zero over the counted tokens of each catching head.

    From their sums over the tokens that each sink caught (sinks, width), and their squared norms summed over the
    counted tokens (catching heads). With a `metric` (catching heads, width, width), ‖v‖² = v metric vᵀ.
    """
    of = catches.of

    def norm(vectors: Tensor, rows: Tensor | None = None) -> Tensor:
        if metric is None:
            return vectors.square().sum(dim=-1)
        chosen = metric if rows is None else metric[rows]
        return torch.einsum("rv,rvw,rw->r", vectors, chosen, vectors)

    size = catches.caught.sum(dim=1).to(sums.dtype)
    # Of a short context, all tokens may be sinks.
    tokens = catches.counted.sum(dim=1).to(sums.dtype).clamp_min(1)
    around = norm(sums, of)
    inside, outside = size.clamp_min(1), (tokens[of] - size).clamp_min(1)
    between = around * (1 / inside + 1 / outside)
    uncaught_count = tokens - _over_sinks(size, catches)
    uncaught = _over_sinks(-sums, catches)
    groups = _over_sinks(around / inside, catches)
    return between, squares[of], groups + norm(uncaught) / uncaught_count.clamp_min(1), squares


def _over_sinks(values: Float[Tensor, "sinks ..."], catches: Catches) -> Float[Tensor, "catching_heads ..."]:
    """Sum over the sinks of each head, in their order."""
    # On a GPU `index_add_` has no order, and so no certain last bits.
    sinks = torch.bincount(catches.of, minlength=len(catches.counted))
    return torch.segment_reduce(values, "sum", lengths=sinks, axis=0)
