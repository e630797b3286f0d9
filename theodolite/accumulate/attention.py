"""What each head's attention does, computed together with its output and without a T×T matrix.

`AttentionStatistics.update` walks over blocks of queries; each block's weights are read once for the output,
the entropy, the mass that each key receives, and the head scores, and are then forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from theodolite.accumulate.sums import LayerSums, State, each_part
from theodolite.theory.attention import MASKED, AttentionInputs, weigh
from theodolite.theory.propagation import empirical_propagation
from theodolite.theory.singular import largest_singular_value

BLOCK = 64
"""Queries at a time: 12 heads × 64 × 512 float32 logits fill 1.5 MB, which a core's cache holds."""

GRAM_TOLERANCE = 1e-4
"""Relative residual at which ‖X‖₂ is known: its own error is of second order in it, below float32's rounding."""

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
    sink (L, H, T) counts of contexts; sink_later (L, H); previous, same, learned (L, H) sums; entropy_squared (L, H)
    sums over contexts of the square of the context's mean entropy; gram_norm (L) the
    largest ‖XXᵀ‖₂ of a context's input X; repeated (L) queries that have an earlier equal token;
    example_received and example_head (L, E, T) for the first E contexts; sink_tokens (K, 6) int64 rows
    (layer, head, token, is first, contexts, sum of positions).
    """

    def __init__(self, layers: int, heads: int, length: int, examples: int) -> None:
        by_position = ("entropy", "received", "propagates", "last_sees", "sink")
        by_head = ("sink_later", "previous", "same", "learned", "entropy_squared")
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
        value, device = inputs.value, inputs.value.device
        output = value.new_empty(batch, length, heads, value.shape[-1])
        seen_by = inputs.visible_queries()
        enough = seen_by - 1 >= least_queries(length)

        def work(part: slice) -> dict[str, Tensor]:
            return _statistics(inputs.of_contexts(part), tokens, part, output[part])

        found = each_part(work, batch, device)
        received = torch.cat([sums.pop("received") for sums in found]) / seen_by.clamp_min(1)
        for sums in found:
            for name, sum_ in sums.items():
                self.add(name, layer, sum_)
        self.add("received", layer, received.sum(dim=0))
        self._sinks(layer, (received > SINK_THRESHOLD) & enough, tokens.ids)
        self._examples(layer, received * enough, first_context)
        self.add("visible_keys", layer, inputs.visible_keys().amax(dim=(0, 1)))
        self.add("contexts", layer, torch.tensor(float(batch), dtype=torch.float64, device=device))
        self.add("repeated", layer, torch.tensor(float(tokens.repeated), dtype=torch.float64, device=device))
        return output

    def update_input(self, layer: int, hidden: Float[Tensor, "batch positions width"]) -> None:
        """Take in the attention module's input X: ‖XXᵀ‖₂ = ‖X‖₂², the largest over contexts."""

        def work(part: slice) -> Tensor:
            x = hidden[part].to(torch.promote_types(hidden.dtype, torch.float32))
            return largest_singular_value(x, tolerance=GRAM_TOLERANCE).max() ** 2

        for norm in each_part(work, hidden.shape[0], hidden.device):
            self.add("gram_norm", layer, norm)

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


def _statistics(inputs: AttentionInputs, tokens: Tokens, part: slice, output: Tensor) -> dict[str, Tensor]:
    """Sums over the contexts of one part, and by context what each key received; `output` is written."""
    batch, heads, length, _ = inputs.query.shape
    device = output.device
    received = output.new_zeros(batch, heads, length, dtype=torch.float64)
    sums = {name: torch.zeros_like(received[0]) for name in ("entropy", "propagates", "last_sees")}
    sums |= {name: torch.zeros_like(received[0, :, 0]) for name in ("previous", "same", "learned")}
    entropies = torch.zeros_like(received[:, :, 0])
    for number, block in enumerate(inputs.blocks(BLOCK)):
        start, stop, first, last = block.start, block.stop, block.first, block.last
        if stop == length:
            seen, propagates = _last_query(block.logits[:, :, -1])
            sums["propagates"][:, seen + first] = propagates
            sums["last_sees"][:, seen + first] = float(batch)
        weights, entropy, learned = _softmax(block.logits, inputs.sink)
        output[:, start:stop] = weigh(weights, inputs.value[:, :, first:last]).transpose(1, 2)
        received[:, :, first:last] += weights.sum(dim=-2)
        sums["entropy"][:, start:stop] = entropy.double().sum(dim=0)
        entropies += entropy.double().sum(dim=-1)
        if learned is not None:
            sums["learned"] += learned.double().sum(dim=(0, 2))
        # Column c of the block is key first + c; row r's previous key is start + r − 1.
        previous = torch.diagonal(weights, offset=start - first - 1, dim1=-2, dim2=-1)
        sums["previous"] += previous.double().sum(dim=(0, 2))
        for context, (row, key) in enumerate(tokens.pairs[number][part]):
            row, key = row.to(device), key.to(device)  # layers may be on several devices
            visible = (key >= first) & (key < last)
            row, key = row[visible], key[visible]
            sums["same"] += weights[context][:, row, key - first].double().sum(dim=1)
    return sums | {"received": received, "entropy_squared": (entropies / length).square().sum(dim=0)}


def _last_query(logits: Float[Tensor, "batch heads keys"]) -> tuple[Tensor, Tensor]:
    """Which keys the last query sees, and in how many contexts each propagates to it, by head."""
    # The last query of every context and head sees the same keys: all of them, or a window's.
    seen = (logits[0, 0] > MASKED / 2).nonzero().flatten()
    return seen, empirical_propagation(logits[..., seen]).double().sum(dim=0)


def _softmax(
    logits: Float[Tensor, "batch heads rows keys"], sink: Float[Tensor, " heads"] | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weights, the entropy a row in nats, the weight of the learned sink column.

    With x = logit − max, the largest weight is 1/Z and the entropy ln Z − Σ p x: no logarithm of another weight,
    no digits lost to a large common logit. `logits` is overwritten. The learned column counts as one more outcome:
    with its weight λ, the entropy is that of (λ, 1 − λ) and 1 − λ times that of the others.
    """
    largest = logits.amax(dim=-1)
    shifted = logits.sub_(largest.unsqueeze(-1))
    weights = shifted.softmax(dim=-1)
    log_total = -weights.amax(dim=-1).log()
    entropy = log_total - torch.linalg.vecdot(weights, shifted)
    if sink is None:
        return weights, entropy, None
    odds = sink.to(logits.dtype).view(1, -1, 1) - largest - log_total
    learned, others = odds.sigmoid(), (-odds).sigmoid()
    either = F.softplus(-odds) * learned + F.softplus(odds) * others
    return weights.mul_(others.unsqueeze(-1)), either + others * entropy, learned
