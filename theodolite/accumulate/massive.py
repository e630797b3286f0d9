"""Tokens with massive activations after the first position: named, counted, and summed apart from all others.

One of them may be a hundred times as long as any other token: in a mean over contexts it would decide alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from theodolite.accumulate.means import Means
from theodolite.accumulate.outliers import PUBLISHED
from theodolite.accumulate.second_moments import combine
from theodolite.accumulate.sums import KeyedSums, LayerSums, State, part_of
from theodolite.theory.outliers import massive_activations

NAMED_CONTEXTS, NAMED_TOKENS = 256, 8
"""Tokens are named in the first contexts, and of each context and layer the first."""

EXCEPTIONAL = 10.0
"""A massive activation is an exception if it is so many times the median of its dimension over the batch's tokens: a
dimension that is huge in all of them is the stream's own (Gemma 3)."""

FADED = replace(PUBLISHED, massive_ratio=PUBLISHED.massive_ratio / 10)
"""A token that had one at the layer before is an exception down to a tenth of the ratio: at 947 times the median it is
no more like the others than at 1,001 times."""


def massive_tokens(
    hidden: Float[Tensor, "batch positions width"],
    text: slice,
    before: Bool[Tensor, "batch positions"] | None = None,
) -> Bool[Tensor, "batch positions"] | None:
    """Mark the tokens of the text with an exceptional massive activation in any dimension; None: there is none.

    Massive is as in Sun et al. 2024; `FADED` for those marked `before`, at the layer before.
    """
    largest = hidden.abs().amax(dim=-1)
    contexts = (largest[:, text] > PUBLISHED.massive).any(dim=1).nonzero().flatten()
    if not len(contexts):
        return None
    values = hidden[contexts].abs()
    massive = massive_activations(values.unsqueeze(2), PUBLISHED).squeeze(2)[:, text]
    if before is not None:
        again = before[contexts].any(dim=1)  # the median of a context is dear: only where there was one
        faded = massive_activations(values[again].unsqueeze(2), FADED).squeeze(2)[:, text]
        massive[again] |= faded & before[contexts[again], text].unsqueeze(-1)
    dimensions = massive.any(dim=1).any(dim=0).nonzero().flatten()
    typical = hidden[:, text, dimensions].abs().flatten(0, 1).median(dim=0).values
    exceptional = massive[..., dimensions] & (values[:, text, dimensions] > EXCEPTIONAL * typical)
    marked = torch.zeros_like(largest, dtype=torch.bool)
    marked[contexts, text] = exceptional.any(dim=-1)
    return marked if marked.any() else None


def without(
    hidden: Float[Tensor, "batch positions width"],
    left_out: Bool[Tensor, "batch positions"] | None,
    text: slice,
) -> Iterator[tuple[int, Float[Tensor, "contexts rows width"]]]:
    """Yield the hidden states of a batch's text without the tokens left out: runs of whole contexts, others alone.

    With each, which context of the batch comes first.
    """
    start = 0
    if left_out is not None:
        for context in left_out.any(dim=1).nonzero().flatten().tolist():
            if context > start:
                yield start, hidden[start:context, text]
            yield context, hidden[context, text][~left_out[context, text]].unsqueeze(0)
            start = context + 1
    if start < len(hidden):
        yield start, hidden[start:, text]


class MassiveTokens(LayerSums):
    """Sums over the tokens with massive activations, which are left out of a layer's means and moments.

    Args:
        means: what they are left out of.

    State: count (N), tokens left out; named, by (layer, context, position, token id): `value`, the massive value of the
    largest size, and its `dimension`; at_position, by (layer, group, position), and in_context, by (layer, slot, half),
    `sum` (d) and `count` of the vectors; moment, by (layer): `sum` (d), `square` (d, d), Σ x xᵀ, and `count`.
    """

    def __init__(self, layers: int, width: int, means: Means) -> None:
        vectors: dict[str, tuple[int, ...]] = {"sum": (width,), "count": ()}
        keyed = {
            "named": KeyedSums(4, {"value": (), "dimension": ()}),
            "at_position": KeyedSums(3, vectors),
            "in_context": KeyedSums(3, vectors),
            "moment": KeyedSums(1, vectors | {"square": (width, width)}),
        }
        super().__init__(layers, {"count": ()}, keyed=keyed)
        self.means = means

    def update(
        self,
        layer: int,
        hidden: Float[Tensor, "batch positions width"],
        marked: Bool[Tensor, "batch positions"],
        ids: Int[Tensor, "batch positions"],
        first_context: int,
    ) -> None:
        """Add the marked tokens, left out of `means`, of contexts `first_context …`."""
        context, position = marked.nonzero(as_tuple=True)
        vectors = hidden[context, position].double().cpu()
        context, position = context.cpu(), position.cpu()
        absolute = context + first_context
        self.add("count", layer, torch.tensor(float(len(vectors)), dtype=torch.float64))
        of_layer = torch.full_like(context, layer)
        ones = torch.ones(len(vectors))
        group, slot = self.means.groups.of(absolute), self.means.sample.slot[absolute]
        half = self.means.halves[position - self.means.leading]
        self._add("at_position", (of_layer, group, position), {"sum": vectors, "count": ones})
        kept = slot >= 0
        self._add(
            "in_context",
            (of_layer[kept], slot[kept], half[kept]),
            {"sum": vectors[kept], "count": ones[kept]},
        )
        total = {"sum": vectors.sum(dim=0), "square": vectors.T @ vectors, "count": ones.sum()}
        self._add("moment", (of_layer[:1],), {name: values.unsqueeze(0) for name, values in total.items()})
        shown = (absolute < NAMED_CONTEXTS) & (marked.cpu().cumsum(dim=1)[context, position] <= NAMED_TOKENS)
        dimension = vectors.abs().argmax(dim=1)
        named = {
            "value": vectors.gather(1, dimension[:, None]).flatten()[shown],
            "dimension": dimension[shown],
        }
        token = ids.cpu()[context, position]
        self._add("named", tuple(each[shown] for each in (of_layer, absolute, position, token)), named)

    def take_moments(self) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """Return count, mean and centred second moment of each layer that has any, and forget them."""
        rows = self.keyed["moment"].state()
        self.keyed["moment"].restore({name: values[:0] for name, values in rows.items()})
        return dict(_moments(rows))

    def _add(self, name: str, keys: tuple[Tensor, ...], values: dict[str, Tensor]) -> None:
        sums = self.keyed[name]
        sums.add(sums.rows(torch.stack(keys, dim=1)), values)


def with_massive(means: State, residual: State, massive: State, layer: int) -> tuple[State, State]:
    """Return one layer of the states of `Means` and `SecondMoments`, with its massive tokens among the others."""
    means, residual = (
        {name: values[layer : layer + 1].clone() for name, values in state.items()}
        for state in (means, residual)
    )

    def rows_of(name: str) -> State:
        rows = part_of(massive, name)
        of_layer = rows["keys"][:, 0] == layer
        return {key: values[of_layer] for key, values in rows.items()}

    rows = rows_of("at_position")
    _, group, position = rows["keys"].unbind(dim=1)
    means["position_sum"][0].index_put_((group, position), rows["sum"], accumulate=True)
    means["readers"][0].index_put_((group, position), rows["count"], accumulate=True)
    rows = rows_of("in_context")
    _, slot, half = rows["keys"].unbind(dim=1)
    mean, tokens = means["context_mean"][0], means["context_tokens"][0]
    before, after = tokens[half, slot], tokens[half, slot] + rows["count"]
    mean[half, slot] = (mean[half, slot] * before[:, None] + rows["sum"]) / after[:, None]
    tokens[half, slot] = after
    if "numbers" in residual:
        return means, {"numbers": residual["numbers_with_massive"]}
    for _, moments in _moments(rows_of("moment")):
        combine([residual[name][0] for name in ("count", "mean", "moment")], moments)
    return means, residual


def _moments(rows: State) -> Iterator[tuple[int, tuple[Tensor, Tensor, Tensor]]]:
    """Yield each layer that has massive tokens, with their count, mean and centred second moment."""
    for (layer,), total, square, count in zip(
        rows["keys"].tolist(), rows["sum"], rows["square"], rows["count"], strict=True
    ):
        mean = total / count
        yield layer, (count, mean, square - count * mean.outer(mean))
