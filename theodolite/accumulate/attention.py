"""Statistics of each head's attention, computed together with its output and without a T×T matrix.

`AttentionStatistics.update` has it summarised (`attention/summary.py`): in blocks of queries whose weights are
read once for the output, the entropy, the mass that each key receives and the head scores, and are then forgotten; or
on a CUDA device, where no weights are ever written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from theodolite.accumulate.sums import (
    PAIRS,
    KeyedSums,
    LayerSums,
    Mergeable,
    each_part,
    include,
    pair_sums,
    placed,
)
from theodolite.attention.inputs import BLOCK, AttentionInputs
from theodolite.attention.sinks import ReceivedAttention
from theodolite.attention.summary import AttentionSummary, last_query, summarise, weights_at
from theodolite.theory.singular import largest_singular_value

SCORES = ("previous", "same")

GRAM_TOLERANCE = 1e-4
"""Relative residual at which ‖X‖₂ is known: its own error is of second order in it, below float32's rounding."""


@dataclass(frozen=True)
class Tokens:
    """A batch of token ids, and for every block of queries the pairs of equal tokens, the earlier one first.

    `pairs[b][c]` holds (query − block start, key) for block b of context c; `repeated`: queries of it that have one.
    """

    ids: Int[Tensor, "batch positions"]
    pairs: list[list[tuple[Tensor, Tensor]]]
    repeated: Int[Tensor, " batch"]

    @classmethod
    def of(cls, ids: Int[Tensor, "batch positions"], device: torch.device) -> Tokens:
        """Find the pairs, a block of queries at a time."""
        length = ids.shape[1]
        positions = torch.arange(length)
        pairs = []
        repeated = torch.zeros(len(ids), dtype=torch.int64)
        for start in range(0, length, BLOCK):
            rows = slice(start, min(start + BLOCK, length))
            earlier = positions[: rows.stop] < positions[rows, None]
            of_contexts = []
            for place, context in enumerate(ids.cpu()):
                equal = (context[rows, None] == context[: rows.stop]) & earlier
                repeated[place] += equal.any(dim=1).sum()
                row, column = equal.nonzero(as_tuple=True)
                of_contexts.append((row.to(device), column.to(device)))
            pairs.append(of_contexts)
        return cls(ids, pairs, repeated)


class AttentionStatistics(LayerSums):
    """Sums over contexts of entropy, received attention, propagation, sinks and head scores.

    State: contexts (L); readers (L, T), how many of them have a position; visible_keys (L, T) that a query sees;
    entropy (L, H, T) nats; received (L, H, T) mean
    attention a key gets; propagates and last_sees (L, H, T) counts for the last query before trailing special
    tokens; sink (L, H, T) counts of contexts; sink_later (L, H), and with trailing special tokens sink_last (L,
    H), contexts with a sink among these, with more than one leading token sink_registers (L, H) likewise; previous,
    same (L, H, PAIRS) sums over contexts of what queries pay the token before, or earlier equal ones, and of how many
    queries have such a token, and of their products; learned (L, H) sums; largest_logit (L, H) maxima over the keys
    that queries see, −∞ before the first context; log_sum_exp (L, H) sums, 0 of a query that sees no key;
    squared_lengths (L), squared_entropy and entropy_spread (L, H): sums over contexts of their squared lengths, and
    weighted by these of their mean entropies, and of the squared deviations from the mean so weighted; gram_norm (L)
    the largest ‖XXᵀ‖₂ of a context's input X; example_received and
    example_head (L, E, T) for the first E contexts; sink_tokens, keyed by layer, head, token and whether it is first:
    contexts, sinks and the sum of their positions; a token may be a sink at several positions of a context.

    `trailing` is how many special tokens stand behind the text of every context (`trailing_special_tokens`), `leading`
    how many before it: those from position 1 on (an image's registers) are no later sinks. A layer
    with fewer heads than H has the first rows; one that does not attend is never updated, and its contexts stay 0.
    """

    def __init__(
        self, layers: int, heads: int, length: int, examples: int, trailing: int = 0, leading: int = 1
    ) -> None:
        by_position = ("entropy", "received", "propagates", "last_sees", "sink")
        by_head = ["sink_later", "learned", "squared_entropy", "entropy_spread"]
        by_head += ["largest_logit", "log_sum_exp"]
        by_head += ["sink_last"] if trailing else []
        by_head += ["sink_registers"] if leading > 1 else []
        shapes: dict[str, tuple[int, ...]] = {"contexts": (), "squared_lengths": ()}
        shapes |= dict.fromkeys(by_position, (heads, length)) | dict.fromkeys(by_head, (heads,))
        shapes |= dict.fromkeys(SCORES, (heads, PAIRS))
        self._of_heads = frozenset((*by_position, *by_head, *SCORES))
        self._by_position = frozenset((*by_position, "readers", "visible_keys"))
        shapes |= dict.fromkeys(("example_received", "example_head"), (examples, length))
        shapes |= {"gram_norm": (), "visible_keys": (length,), "readers": (length,)}
        sink_tokens = KeyedSums(4, dict.fromkeys(("contexts", "sinks", "positions"), ()))
        maxima = ("gram_norm", "visible_keys", "largest_logit")
        super().__init__(layers, shapes, maxima, {"sink_tokens": sink_tokens})
        for largest in self._tensors["largest_logit"]:
            largest.fill_(-torch.inf)
        self.length, self.examples = length, examples
        self.trailing, self.leading = trailing, leading

    def update(
        self, layer: int, inputs: AttentionInputs, tokens: Tokens, first_context: int
    ) -> Float[Tensor, "batch queries heads value_width"]:
        """Add one layer's attention to the sums, and return its output."""
        batch, heads, length, _ = inputs.query.shape
        value, device = inputs.value, inputs.value.device
        output = value.new_empty(batch, length, heads, value.shape[-1])

        def work(part: slice) -> dict[str, Tensor]:
            return _statistics(inputs.of_contexts(part), tokens, part, output[part], self.trailing)

        parts = each_part(work, batch, device)
        received = ReceivedAttention.of(inputs, torch.cat([sums.pop("received") for sums in parts]))
        for sums in parts:
            self._between(layer, sums["squared_lengths"], sums["squared_entropy"])
            for name, sum_ in sums.items():
                self.add(name, layer, sum_)
        self.add("received", layer, received.mean.sum(dim=0))
        self._sinks(layer, received.sinks, tokens.ids)
        self._examples(layer, received.mean * received.candidate, first_context)
        self.add("visible_keys", layer, inputs.visible_keys().amax(dim=(0, 1)))
        return output

    def add(self, name: str, layer: int, value: Tensor, group: int | None = None) -> None:
        """Add `value`, whose heads may be fewer than those of another layer, and its positions fewer than T."""
        if name in self._by_position and value.shape[-1] < self.length:
            whole = value.new_zeros(*value.shape[:-1], self.length)
            for source, place in placed(value.shape[-1], self.length, self.trailing):
                whole[..., place] = value[..., source]
            value = whole
        if name in self._of_heads:
            include(self.at(name, layer, value.device)[: len(value)], value, maximum=name in self.maxima)
        else:
            super().add(name, layer, value, group)

    def _between(self, layer: int, weight: Tensor, weighted: Float[Tensor, " heads"]) -> None:
        """Add to the spread of entropies what the distance between the old and the new contexts' means adds.

        By the formula of Chan, Golub & LeVeque (1979). The mean of the squares less the square of the mean would keep
        few digits of a small spread, and other ones in every order.
        """
        weight_before = self.at("squared_lengths", layer, weighted.device)
        weighted_before = self.at("squared_entropy", layer, weighted.device)[: len(weighted)]
        difference = weighted / weight.clamp_min(1) - weighted_before / weight_before.clamp_min(1)
        shared = weight_before * weight / (weight_before + weight).clamp_min(1)
        self.add("entropy_spread", layer, difference.square() * shared)

    def update_input(self, layer: int, hidden: Float[Tensor, "batch positions width"]) -> None:
        """Update the largest ‖XXᵀ‖₂ = ‖X‖₂² over contexts, X the attention module's input."""

        def work(part: slice) -> Tensor:
            x = hidden[part].to(torch.promote_types(hidden.dtype, torch.float32))
            return largest_singular_value(x, tolerance=GRAM_TOLERANCE).max() ** 2

        for norm in each_part(work, hidden.shape[0], hidden.device):
            self.add("gram_norm", layer, norm)

    def _sinks(
        self, layer: int, sink: Bool[Tensor, "batch heads keys"], ids: Int[Tensor, "batch keys"]
    ) -> None:
        self.add("sink", layer, sink.sum(dim=0))
        end = sink.shape[-1] - self.trailing
        self.add("sink_later", layer, sink[:, :, max(1, self.leading) : end].any(dim=-1).sum(dim=0))
        if self.trailing:
            self.add("sink_last", layer, sink[:, :, end:].any(dim=-1).sum(dim=0))
        if self.leading > 1:
            self.add("sink_registers", layer, sink[:, :, 1 : self.leading].any(dim=-1).sum(dim=0))
        context, head, position = sink.cpu().nonzero(as_tuple=True)
        token = ids.cpu()[context, position]
        keys = torch.stack([torch.full_like(head, layer), head, token, (position == 0).long()], dim=1)
        sums = self.keyed["sink_tokens"]
        rows = sums.rows(keys)
        sums.add(rows, {"sinks": torch.ones(len(rows)), "positions": position})
        sums.count_contexts(rows, context)

    def _examples(self, layer: int, received: Tensor, first_context: int) -> None:
        for context in range(first_context, min(first_context + len(received), self.examples)):
            largest, head = received[context - first_context].max(dim=0)
            self.at("example_received", layer, received.device)[context, : len(largest)] = largest
            self.at("example_head", layer, received.device)[context, : len(largest)] = head.double()

    def merge(self, other: Mergeable) -> None:
        """Merge another accumulator, or its saved state, into this one."""
        state = other.state()
        for layer in range(self.layers):
            device = self._tensors["entropy"][layer].device
            weight, weighted = (
                state[name][layer].to(device) for name in ("squared_lengths", "squared_entropy")
            )
            self._between(layer, weight, weighted)
        super().merge(other)


def _statistics(
    inputs: AttentionInputs, tokens: Tokens, part: slice, output: Tensor, trailing: int
) -> dict[str, Tensor]:
    """Sum over the contexts of one part, and by context what each key received; `output` is written."""
    device = output.device
    none = output.new_zeros(len(output), inputs.query.shape[1], len(SCORES), dtype=torch.float64)
    scores = HeadScores(tokens, part, none)
    summary = summarise(inputs, output, scores.visit, scores.visit_whole)
    visible, propagates = last_query(inputs, trailing)
    entropy, log_sum_exp = summary.entropy.double(), summary.log_sum_exp.double()
    means = entropy.mean(dim=-1)
    contexts = torch.tensor(float(len(entropy)), dtype=torch.float64, device=device)
    square = entropy.shape[-1] ** 2
    sums = {
        "contexts": contexts,
        "readers": contexts.expand(entropy.shape[-1]),
        "entropy": entropy.sum(dim=0),
        "squared_lengths": contexts * square,
        "squared_entropy": means.sum(dim=0) * square,
        "entropy_spread": (means - means.mean(dim=0)).square().sum(dim=0) * square,
        "propagates": propagates.double().sum(dim=0),
        "last_sees": visible.double().sum(dim=0).to(device),
        "received": summary.mass,
        "largest_logit": summary.largest.double().amax(dim=(0, 2)),
        "log_sum_exp": log_sum_exp.masked_fill(log_sum_exp == -torch.inf, 0).sum(dim=(0, 2)),
    }
    queries = torch.full((len(output),), entropy.shape[-1] - 1), tokens.repeated[part]
    for name, paid, able in zip(SCORES, scores.sums.unbind(dim=2), queries, strict=True):
        sums[name] = pair_sums(paid, able.to(paid)[:, None]).sum(dim=0)
    learned = summary.learned
    sums["learned"] = (
        torch.zeros_like(sums["squared_entropy"]) if learned is None else learned.double().sum(dim=(0, 2))
    )
    return sums


@dataclass(frozen=True)
class HeadScores:
    """Attention to the previous token and to earlier equal tokens, summed over queries, by context and head.

    From the weights of blocks as they pass, or from normalisers where no weights are ever there.
    """

    tokens: Tokens
    part: slice
    sums: Float64[Tensor, "batch heads kinds"]

    def visit(
        self, start: int, first: int, head: int, weights: Float[Tensor, "batch heads rows keys"]
    ) -> None:
        """Add the scores of a block: queries from `start`, keys from `first`, heads from `head`."""
        sums = self.sums[:, head : head + weights.shape[1]]
        # Column c of the block is key first + c; row r's previous key is start + r − 1.
        previous = torch.diagonal(weights, offset=start - first - 1, dim1=-2, dim2=-1)
        sums[:, :, 0] += previous.double().sum(dim=2)
        for context, (row, key) in enumerate(self.tokens.pairs[start // BLOCK][self.part]):
            row, key = row.to(weights.device), key.to(weights.device)  # layers may be on several devices
            visible = (key >= first) & (key < first + weights.shape[-1])
            row, key = row[visible], key[visible]
            sums[context, :, 1] += weights[context][:, row, key - first].double().sum(dim=1)

    def visit_whole(self, summary: AttentionSummary) -> None:
        """Add the scores of whole contexts from their summary."""
        inputs, normaliser = summary.inputs, summary.log_sum_exp
        query = torch.arange(1, inputs.query.shape[2], device=normaliser.device)
        self.sums[:, :, 0] += weights_at(inputs, normaliser, query, query - 1).double().sum(dim=2)
        for number, pairs in enumerate(self.tokens.pairs):
            for context, (row, key) in enumerate(pairs[self.part]):
                part = slice(context, context + 1)
                row, key = row.to(normaliser.device) + number * BLOCK, key.to(normaliser.device)
                paid = weights_at(inputs.of_contexts(part), normaliser[part], row, key)
                self.sums[context, :, 1] += paid[0].double().sum(dim=1)
