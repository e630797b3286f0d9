"""Statistics of each head's attention, computed together with its output and without a T×T matrix.

Weights are there in blocks of queries (`attention/summary.py`), are read once for all that is summed, and forgotten; on
a CUDA device no weights are ever written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from theodolite.accumulate.sums import (
    KeyedSums,
    LayerSums,
    cache_sized_groups,
    contexts_in_cache,
    each_part,
    position_slices,
    share_of_thread,
    token_slices,
)
from theodolite.attention.inputs import BLOCK, AttentionInputs
from theodolite.attention.summary import (
    AttentionSummary,
    ReceivedAttention,
    Visit,
    last_query,
    summarise,
    weights_at,
)
from theodolite.corpus.groups import GROUPS, Groups
from theodolite.system.processor import parallel_map
from theodolite.theory.singular import largest_singular_value

SCORES = ("previous", "same")

GRAM_TOLERANCE = 1e-4
"""Relative residual at which ‖X‖₂ is known: its own error is of second order in it, below float32's rounding."""


@dataclass(frozen=True)
class Tokens:
    """A batch of token ids, of the keys too, and for every block of queries the pairs of equal tokens, the key earlier.

    `pairs[b][c]` holds (query − block start, key) for block b of context c; `repeated`: queries of it that have one.
    `of_picture` marks the tokens of pictures in a text; None where it has none.
    """

    ids: Int[Tensor, "batch positions"]
    keys: Int[Tensor, "batch positions"]
    pairs: list[list[tuple[Tensor, Tensor]]]
    repeated: Int[Tensor, " batch"]
    of_picture: Bool[Tensor, "batch positions"] | None = None

    @classmethod
    def of(
        cls,
        ids: Int[Tensor, "batch positions"],
        device: torch.device,
        keys: Int[Tensor, "batch positions"] | None = None,
    ) -> Tokens:
        """Find the pairs, a block of queries at a time; `keys`: ids of other tokens that these attend to."""
        keys = ids if keys is None else keys
        length = ids.shape[1]
        positions = torch.arange(length)
        pairs = []
        repeated = torch.zeros(len(ids), dtype=torch.int64)
        for start in range(0, length, BLOCK):
            rows = slice(start, min(start + BLOCK, length))
            earlier = positions[: rows.stop] < positions[rows, None]
            of_contexts = []
            for place, (context, own_keys) in enumerate(zip(ids.cpu(), keys.cpu(), strict=True)):
                equal = (context[rows, None] == own_keys[: rows.stop]) & earlier
                repeated[place] += equal.any(dim=1).sum()
                row, column = equal.nonzero(as_tuple=True)
                of_contexts.append((row.to(device), column.to(device)))
            pairs.append(of_contexts)
        return cls(ids, keys, pairs, repeated)


class AttentionStatistics(LayerSums):
    """Sums over contexts of entropy, received attention, propagation, sinks and head scores.

    State: readers (L, T), how many contexts have a position; visible_keys (L, T) that a query sees; entropy (L, H, T)
    nats; propagates and last_sees (L, H, T) counts for the last query before trailing special tokens; sink (L, H, T)
    counts of contexts; largest_logit (L, H) maxima over the keys that queries see; log_sum_exp (L, H) sums, 0 of a
    query that sees no key; gram_norm (L) the largest ‖XXᵀ‖₂ of a context's input X; example_received and example_head
    (L, E, T).

    By group of contexts: contexts, queries, previous_queries and same_queries (L, G), how many queries there are, with
    a token before them, and with an earlier equal one; previous and same (L, G, H), what these pay; with `pictured`
    text_queries (L, G) behind a picture's last token, and what these pay to it, picture (L, G, H); total_entropy,
    learned, total_propagates and total_last_sees (L, G, H), sums; sink_first, sink_later (L, G, H) counts of contexts,
    and with trailing special tokens sink_last; sink_tokens, keyed by layer, head, token and whether it is first:
    contexts (G), sinks and the sum of their positions.

    `corpus_contexts` is how many contexts the whole corpus has; `trailing` special tokens stand behind each, and
    `leading` tokens before it, of which those from position 1 on (an image's registers) are no later sinks.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        length: int,
        corpus_contexts: int,
        examples: int,
        trailing: int = 0,
        leading: int = 1,
        *,
        pictured: bool = False,
    ) -> None:
        by_position = ("entropy", "propagates", "last_sees", "sink")
        by_group = ["total_entropy", "total_propagates", "total_last_sees", "learned", *SCORES]
        by_group += [f"sink{ending or '_later'}" for ending in token_slices(0, trailing, leading)]
        counts = ["contexts", "queries", *(f"{name}_queries" for name in SCORES)]
        if pictured:
            by_group.append("picture")
            counts.append("text_queries")
        shapes: dict[str, tuple[int, ...]] = {
            **dict.fromkeys(by_position, (heads, length)),
            **dict.fromkeys(("visible_keys", "readers"), (length,)),
            **dict.fromkeys(("largest_logit", "log_sum_exp"), (heads,)),
            **dict.fromkeys(by_group, (GROUPS, heads)),
            **dict.fromkeys(counts, (GROUPS,)),
            **dict.fromkeys(("example_received", "example_head"), (examples, length)),
            "gram_norm": (),
        }
        sink_tokens = KeyedSums(4, {"contexts": (GROUPS,), "sinks": (), "positions": ()})
        maxima = ("gram_norm", "visible_keys", "largest_logit")
        super().__init__(layers, shapes, maxima, {"sink_tokens": sink_tokens})
        for largest in self._tensors["largest_logit"]:
            largest.fill_(-torch.inf)
        self._by_position = frozenset((*by_position, "readers", "visible_keys"))
        self.length, self.examples = length, examples
        self.trailing, self.leading = trailing, leading
        self.groups = Groups(corpus_contexts)

    def update(
        self, layer: int, inputs: AttentionInputs, tokens: Tokens, first_context: int
    ) -> Float[Tensor, "batch queries heads value_width"]:
        """Add one layer's attention to the sums, and return its output."""
        batch, heads, length, _ = inputs.query.shape
        value, device = inputs.value, inputs.value.device
        output = value.new_empty(batch, length, heads, value.shape[-1])

        def work(place: tuple[int, slice]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            _, part = place
            return _statistics(inputs.of_contexts(part), tokens, part, output[part], self.trailing)

        cached = contexts_in_cache(heads * min(BLOCK, length) * inputs.key.shape[2])
        at_once = min(cached, share_of_thread(batch))
        places = list(cache_sized_groups(self.groups, first_context, batch, device, at_once))
        parts = parallel_map(work, places)
        received = ReceivedAttention.of(inputs, torch.cat([sums.pop("received") for sums, _ in parts]))
        for (group, _), (sums, of_group) in zip(places, parts, strict=True):
            for name, sum_ in sums.items():
                self.add(name, layer, sum_)
            for name, sum_ in of_group.items():
                self.add(name, layer, sum_, group)
        self._sinks(layer, received.sinks, tokens.keys, first_context)
        shown = (received.mean * received.candidate)[: max(self.examples - first_context, 0)]
        contexts, keys = slice(first_context, first_context + len(shown)), slice(shown.shape[-1])
        for name, values in zip(("example_received", "example_head"), shown.max(dim=1), strict=True):
            self.at(name, layer, device)[contexts, keys] = values.double()
        self.add("visible_keys", layer, inputs.visible_keys().amax(dim=(0, 1)))
        return output

    def add(self, name: str, layer: int, value: Tensor, group: int | None = None) -> None:
        """Add `value`, whose positions may be fewer than T."""
        if name in self._by_position and value.shape[-1] < self.length:
            whole = value.new_zeros(*value.shape[:-1], self.length)
            for source, place in position_slices(value.shape[-1], self.length, self.trailing):
                whole[..., place] = value[..., source]
            value = whole
        super().add(name, layer, value, group)

    def update_input(self, layer: int, hidden: Float[Tensor, "batch positions width"]) -> None:
        """Update the largest ‖XXᵀ‖₂ = ‖X‖₂² over contexts, X the attention module's input."""

        def work(part: slice) -> Tensor:
            x = hidden[part].to(torch.promote_types(hidden.dtype, torch.float32))
            return largest_singular_value(x, tolerance=GRAM_TOLERANCE).max() ** 2

        for norm in each_part(work, hidden.shape[0], hidden.device):
            self.add("gram_norm", layer, norm)

    def _sinks(self, layer: int, sink: Tensor, ids: Tensor, first_context: int) -> None:
        self.add("sink", layer, sink.sum(dim=0))
        slices = token_slices(sink.shape[-1], self.trailing, max(1, self.leading))
        for group, part in self.groups.parts(first_context, len(sink)):
            for ending, positions in slices.items():
                sinks = sink[part, :, positions].any(dim=-1).sum(dim=0)
                self.add(f"sink{ending or '_later'}", layer, sinks, group)
        context, head, position = sink.cpu().nonzero(as_tuple=True)
        token = ids.cpu()[context, position]
        keys = torch.stack([torch.full_like(head, layer), head, token, (position == 0).long()], dim=1)
        sums = self.keyed["sink_tokens"]
        rows = sums.rows(keys)
        sums.add(rows, {"sinks": torch.ones(len(rows)), "positions": position})
        sums.count_contexts(rows, first_context + context, self.groups)


def _statistics(
    inputs: AttentionInputs, tokens: Tokens, part: slice, output: Tensor, trailing: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Write the `output` of some contexts, and return sums over these: of all, and of their group of contexts."""
    scores = output.new_zeros(len(output), inputs.query.shape[1], len(SCORES), dtype=torch.float64)
    summary = summarise(inputs, output, *_head_scores(tokens, part, scores))
    visible, propagates = last_query(inputs, trailing)
    entropy, log_sum_exp = summary.entropy.double().sum(dim=0), summary.log_sum_exp.double()
    contexts = torch.tensor(float(len(output)), dtype=torch.float64, device=output.device)
    length = entropy.shape[-1]
    sums = {
        "readers": contexts.expand(length),
        "entropy": entropy,
        "propagates": propagates.double().sum(dim=0),
        "last_sees": visible.double().sum(dim=0).to(output.device),
        "received": summary.mass,
        "largest_logit": summary.largest.double().amax(dim=(0, 2)),
        "log_sum_exp": log_sum_exp.masked_fill(log_sum_exp == -torch.inf, 0).sum(dim=(0, 2)),
    }
    of_group = {
        "contexts": contexts,
        "queries": contexts * length,
        "previous_queries": contexts * (length - 1),
        "same_queries": tokens.repeated[part].sum().to(contexts),
        **{f"total_{name}": sums[name].sum(dim=-1) for name in ("entropy", "propagates", "last_sees")},
        **dict(zip(SCORES, scores.sum(dim=0).unbind(dim=-1), strict=True)),
    }
    if summary.learned is not None:
        of_group["learned"] = summary.learned.double().sum(dim=(0, 2))
    if tokens.of_picture is not None:
        of_group |= _paid_to_pictures(inputs, tokens.of_picture[part])
    return sums, of_group


def _paid_to_pictures(inputs: AttentionInputs, picture: Bool[Tensor, "batch positions"]) -> dict[str, Tensor]:
    """Sum what queries behind a picture's last token pay to its tokens, by head, and count these queries."""
    value, picture = inputs.value, picture.to(inputs.value.device)
    is_picture = picture[:, None, :, None].to(value.dtype).expand(-1, value.shape[1], -1, 1)
    paid = summarise(replace(inputs, value=is_picture)).output[..., 0].double()
    behind = (picture.flip(1).cumsum(dim=1).flip(1) == 0) & picture.any(dim=1, keepdim=True)
    return {"picture": (paid * behind[:, :, None]).sum(dim=(0, 1)), "text_queries": behind.sum().double()}


def _head_scores(
    tokens: Tokens, part: slice, sums: Float64[Tensor, "batch heads kinds"]
) -> tuple[Visit, Callable[[AttentionSummary], None]]:
    """Make what adds `SCORES`, by context and head, from blocks of weights or, where there are none, from a summary."""

    def visit(start: int, first: int, head: int, weights: Float[Tensor, "batch heads rows keys"]) -> None:
        of_heads = sums[:, head : head + weights.shape[1]]
        # Column c of the block is key first + c; row r's previous key is start + r − 1.
        previous = torch.diagonal(weights, offset=start - first - 1, dim1=-2, dim2=-1)
        of_heads[:, :, 0] += previous.double().sum(dim=2)
        for context, (row, key) in enumerate(tokens.pairs[start // BLOCK][part]):
            row, key = row.to(weights.device), key.to(weights.device)  # layers may be on several devices
            visible = (key >= first) & (key < first + weights.shape[-1])
            row, key = row[visible], key[visible]
            of_heads[context, :, 1] += weights[context][:, row, key - first].double().sum(dim=1)

    def visit_whole(summary: AttentionSummary) -> None:
        inputs, normaliser = summary.inputs, summary.log_sum_exp
        query = torch.arange(1, inputs.query.shape[2], device=normaliser.device)
        sums[:, :, 0] += weights_at(inputs, normaliser, query, query - 1).double().sum(dim=2)
        for number, pairs in enumerate(tokens.pairs):
            for context, (row, key) in enumerate(pairs[part]):
                one = slice(context, context + 1)
                row, key = row.to(normaliser.device) + number * BLOCK, key.to(normaliser.device)
                paid = weights_at(inputs.of_contexts(one), normaliser[one], row, key)
                sums[context, :, 1] += paid[0].double().sum(dim=1)

    return visit, visit_whole


class QueryKeyMoments(LayerSums):
    """Second moments of each head's queries and keys, as its attention uses them: behind norms and turned by position.

    State: contexts (L, H) in which the last query sees a key; query (L, H, w, w), sums of q qᵀ · scaling²; key (L, H,
    w, w), sums of the covariance of the keys that it sees. w is the widest head's.
    """

    def __init__(self, layers: int, heads: int, width: int) -> None:
        square = (heads, width, width)
        super().__init__(layers, {"contexts": (heads,), "query": square, "key": square})

    def update(self, layer: int, inputs: AttentionInputs, trailing: int = 0) -> None:
        """Add a layer's contexts; `trailing` special tokens stand behind the last query."""
        batch, heads, length, _ = inputs.query.shape
        key_heads, keys = inputs.key.shape[1:3]
        last = inputs.of_queries(slice(length - 1 - trailing, length - trailing))
        every = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=inputs.key.device)
        seen = (every if last.mask is None else last.mask)[:, :, 0].expand(batch, heads, keys)
        sees = seen.any(dim=-1)
        query = last.query[:, :, 0].double() * inputs.scaling * sees.unsqueeze(-1)
        self.add("contexts", layer, sees.double().sum(dim=0))
        self.add("query", layer, torch.einsum("chx,chy->hxy", query, query))
        counted = seen[:, :: heads // key_heads, :, None]  # query heads with one key head see the same keys
        count = counted.sum(dim=2, keepdim=True).clamp_min(1)
        key = inputs.key.to(torch.promote_types(inputs.key.dtype, torch.float32)) * counted
        centred = (key - key.sum(dim=2, keepdim=True) / count) * counted
        covariance = ((centred.mT @ centred).double() / count).sum(dim=0)
        self.add("key", layer, covariance.repeat_interleave(heads // key_heads, dim=0))
