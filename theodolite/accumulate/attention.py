"""What each head's attention does, computed together with its output and without a T×T matrix.

`AttentionStatistics.update` walks over blocks of queries; each block's weights are read once for the output,
the entropy, the mass that each key receives, and the head scores, and are then forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from theodolite.accumulate.sums import LayerSums, State, cache_sized
from theodolite.theory.attention import MASKED, AttentionInputs, weigh
from theodolite.theory.propagation import empirical_propagation
from theodolite.theory.singular import largest_singular_value

BLOCK = 64
"""Queries at a time: 12 heads × 64 × 512 float32 logits fill 1.5 MB, which a core's cache holds."""

SINK_THRESHOLD = 0.3
"""ε: a key is a sink when the queries that see it pay it more than this on average (Gu et al. 2024)."""


def least_queries(length: int) -> int:
    """How many other queries must see a key before it can count as a sink."""
    return min(16, math.ceil(length / 4))


@dataclass(frozen=True)
class Tokens:
    """A batch of token ids, and for every block of queries the pairs of equal tokens, the earlier one first.

    `pairs[b][c]` holds (query − block start, key) for block b of context c.
    """

    ids: Int[Tensor, "batch positions"]
    pairs: list[list[tuple[Tensor, Tensor]]]
    repeated: int

    @classmethod
    def of(cls, ids: Int[Tensor, "batch positions"], device: torch.device) -> Tokens:
        """Find the pairs, a block of queries at a time."""
        length = ids.shape[1]
        positions = torch.arange(length)
        pairs = []
        repeated = 0
        for start in range(0, length, BLOCK):
            rows = slice(start, min(start + BLOCK, length))
            earlier = positions[: rows.stop] < positions[rows, None]
            found = []
            for context in ids.cpu():
                equal = (context[rows, None] == context[: rows.stop]) & earlier
                repeated += int(equal.any(dim=1).sum())
                row, column = equal.nonzero(as_tuple=True)
                found.append((row.to(device), column.to(device)))
            pairs.append(found)
        return cls(ids, pairs, repeated)


class AttentionStatistics(LayerSums):
    """Sums over contexts of what L layers of H heads do with T positions.

    State: contexts (L); visible_keys (L, T) that a query sees; entropy (L, H, T) nats;
    received (L, H, T) mean attention a key gets; propagates and last_sees (L, H, T) counts for the last query;
    sink (L, H, T) counts of contexts; sink_later (L, H); previous, same, learned (L, H) sums; gram_norm (L) the
    largest ‖XXᵀ‖₂ of a context's input X; repeated (L) queries that have an earlier equal token;
    example_received and example_head (L, E, T) for the first E contexts; sink_tokens (K, 6) int64 rows
    (layer, head, token, is first, contexts, sum of positions).
    """

    def __init__(self, layers: int, heads: int, length: int, examples: int) -> None:
        by_position = ("entropy", "received", "propagates", "last_sees", "sink")
        by_head = ("sink_later", "previous", "same", "learned")
        shapes: dict[str, tuple[int, ...]] = {"contexts": (), "repeated": ()}
        shapes |= dict.fromkeys(by_position, (heads, length)) | dict.fromkeys(by_head, (heads,))
        shapes |= dict.fromkeys(("example_received", "example_head"), (examples, length))
        shapes |= {"gram_norm": (), "visible_keys": (length,)}
        super().__init__(layers, shapes, maxima=("gram_norm", "visible_keys"))
        self.examples = examples
        self._sink_tokens: dict[tuple[int, int, int, int], tuple[int, int]] = {}

    def update(
        self, layer: int, inputs: AttentionInputs, tokens: Tokens, first_context: int
    ) -> Float[Tensor, "batch queries heads value_width"]:
        """Take in one layer's attention and return its output."""
        batch, heads, length, _ = inputs.query.shape
        value = inputs.value
        output = value.new_empty(batch, length, heads, value.shape[-1])
        for part in cache_sized(batch, value.device):
            self._update(layer, _part(inputs, part), tokens, part, first_context + part.start, output[part])
        device = value.device
        self.add("visible_keys", layer, inputs.visible_keys().amax(dim=(0, 1)))
        self.add("contexts", layer, torch.tensor(float(batch), dtype=torch.float64, device=device))
        self.add("repeated", layer, torch.tensor(float(tokens.repeated), dtype=torch.float64, device=device))
        return output

    def update_input(self, layer: int, hidden: Float[Tensor, "batch positions width"]) -> None:
        """Take in the attention module's input X: ‖XXᵀ‖₂ = ‖X‖₂², the largest over contexts."""
        for part in cache_sized(hidden.shape[0], hidden.device):
            x = hidden[part].to(torch.promote_types(hidden.dtype, torch.float32))
            self.add("gram_norm", layer, largest_singular_value(x).max() ** 2)

    def _update(
        self,
        layer: int,
        inputs: AttentionInputs,
        tokens: Tokens,
        part: slice,
        first_context: int,
        output: Tensor,
    ) -> None:
        batch, heads, length, _ = inputs.query.shape
        received = output.new_zeros(batch, heads, length, dtype=torch.float64)
        for number, block in enumerate(inputs.blocks(BLOCK)):
            start, stop, first, last = block.start, block.stop, block.first, block.last
            if stop == length:
                self._last_query(layer, block.logits[:, :, -1], first)
            weights, share, entropy, learned = _softmax(block.logits, inputs.sink)
            summed = weigh(weights, inputs.value[:, :, first:last]) * share.unsqueeze(-1)
            output[:, start:stop] = summed.transpose(1, 2)
            received[:, :, first:last] += (share.unsqueeze(-2) @ weights).squeeze(-2)
            self.at("entropy", layer, output.device)[:, start:stop] += entropy.double().sum(dim=0)
            if learned is not None:
                self.add("learned", layer, learned.double().sum(dim=(0, 2)))
            # Column c of the block is key first + c; row r's previous key is start + r − 1.
            diagonal = torch.diagonal(weights, offset=start - first - 1, dim1=-2, dim2=-1)
            previous = diagonal * share[:, :, -diagonal.shape[-1] :]
            self.add("previous", layer, previous.double().sum(dim=(0, 2)))
            for context, (row, key) in enumerate(tokens.pairs[number][part]):
                row, key = row.to(output.device), key.to(output.device)  # layers may be on several devices
                seen = (key >= first) & (key < last)
                row, key = row[seen], key[seen]
                same = weights[context][:, row, key - first] * share[context][:, row]
                self.add("same", layer, same.double().sum(dim=1))
        seen_by = inputs.visible_queries()
        received /= seen_by.clamp_min(1)
        self.add("received", layer, received.sum(dim=0))
        counts = seen_by - 1 >= least_queries(length)
        self._sinks(layer, (received > SINK_THRESHOLD) & counts, tokens.ids[part])
        self._examples(layer, received * counts, first_context)

    def _last_query(self, layer: int, logits: Float[Tensor, "batch heads keys"], first: int) -> None:
        # The last query of every context and head sees the same keys: all of them, or a window's.
        seen = (logits[0, 0] > MASKED / 2).nonzero().flatten()
        propagates = empirical_propagation(logits[..., seen]).double().sum(dim=0)
        self.at("propagates", layer, logits.device)[:, seen + first] += propagates
        self.at("last_sees", layer, logits.device)[:, seen + first] += logits.shape[0]

    def _sinks(
        self, layer: int, sink: Bool[Tensor, "batch heads keys"], ids: Int[Tensor, "batch keys"]
    ) -> None:
        self.add("sink", layer, sink.sum(dim=0))
        self.add("sink_later", layer, sink[:, :, 1:].any(dim=-1).sum(dim=0))
        for context, head, position in sink.nonzero().tolist():
            key = (layer, head, int(ids[context, position]), int(position == 0))
            contexts, positions = self._sink_tokens.get(key, (0, 0))
            self._sink_tokens[key] = (contexts + 1, positions + position)

    def _examples(self, layer: int, received: Tensor, first_context: int) -> None:
        for context in range(first_context, min(first_context + len(received), self.examples)):
            largest, head = received[context - first_context].max(dim=0)
            self.at("example_received", layer, received.device)[context] = largest
            self.at("example_head", layer, received.device)[context] = head.double()

    def state(self) -> State:
        """All tensors, stacked over layers, on the CPU; sink tokens as sorted rows."""
        rows = [[*key, *value] for key, value in sorted(self._sink_tokens.items())]
        return super().state() | {"sink_tokens": torch.tensor(rows, dtype=torch.int64).reshape(-1, 6)}

    def restore(self, state: State) -> None:
        """Continue from what `state` gave."""
        super().restore(state)
        self._sink_tokens = dict(_sink_items(state))

    def merge(self, other: LayerSums) -> None:
        """Take in what another accumulator has seen."""
        state = other.state()
        super().merge(other)
        for key, (contexts, positions) in _sink_items(state):
            own = self._sink_tokens.get(key, (0, 0))
            self._sink_tokens[key] = (own[0] + contexts, own[1] + positions)


def _sink_items(state: State) -> Iterator[tuple[tuple[int, int, int, int], tuple[int, int]]]:
    for layer, head, token, first, contexts, positions in state["sink_tokens"].tolist():
        yield (layer, head, token, first), (contexts, positions)


def _part(inputs: AttentionInputs, part: slice) -> AttentionInputs:
    def cut(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or tensor.shape[0] == 1 else tensor[part]

    return replace(
        inputs,
        query=inputs.query[part],
        key=inputs.key[part],
        value=inputs.value[part],
        mask=cut(inputs.mask),
        bias=cut(inputs.bias),
    )


def _softmax(
    logits: Float[Tensor, "batch heads rows keys"], sink: Float[Tensor, " heads"] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Unnormalised weights, 1/Z a row, the entropy a row in nats, the weight of the learned sink column.

    With x = logit − max, the entropy is ln Z − Σ e^x x / Z: no logarithm of a weight, no digits lost to a large
    common logit. `logits` is overwritten. The entropy counts the learned column as one more outcome.
    """
    largest = logits.amax(dim=-1)
    column = None
    if sink is not None:
        column = sink.to(logits.dtype).view(1, -1, 1).expand_as(largest)
        largest = torch.maximum(largest, column)
        column = column - largest
    shifted = logits.sub_(largest.unsqueeze(-1))
    weights = shifted.exp()
    total = weights.sum(dim=-1)
    product = torch.linalg.vecdot(weights, shifted)
    if column is not None:
        total += column.exp()
        product += column.exp() * column
    share = 1 / total
    learned = None if column is None else column.exp() * share
    return weights, share, total.log() - product * share, learned
