"""Tokens with massive activations after the first position: named, counted, and left out of means and moments.

One of them may be a hundred times as long as any other token: in a mean over contexts it would decide alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from theodolite.accumulate.outliers import PUBLISHED
from theodolite.accumulate.sums import KeyedSums, LayerSums
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
    """Counts and names of the tokens with massive activations, which are left out of a layer's means and moments.

    State: count (N), tokens left out; named, by (layer, context, position, token id): `value`, the massive value of the
    largest size, and its `dimension`.
    """

    def __init__(self, layers: int) -> None:
        named = KeyedSums(4, {"value": (), "dimension": ()})
        super().__init__(layers, {"count": ()}, keyed={"named": named})

    def update(
        self,
        layer: int,
        hidden: Float[Tensor, "batch positions width"],
        marked: Bool[Tensor, "batch positions"],
        ids: Int[Tensor, "batch positions"],
        first_context: int,
    ) -> None:
        """Add the marked tokens of contexts `first_context …`."""
        context, position = marked.nonzero(as_tuple=True)
        vectors = hidden[context, position].double().cpu()
        context, position = context.cpu(), position.cpu()
        absolute = context + first_context
        self.add("count", layer, torch.tensor(float(len(vectors)), dtype=torch.float64))
        shown = (absolute < NAMED_CONTEXTS) & (marked.cpu().cumsum(dim=1)[context, position] <= NAMED_TOKENS)
        dimension = vectors.abs().argmax(dim=1)
        value = vectors.gather(1, dimension[:, None]).flatten()
        keys = torch.stack(
            [torch.full_like(context, layer), absolute, position, ids.cpu()[context, position]], dim=1
        )
        named = self.keyed["named"]
        named.add(named.rows(keys[shown]), {"value": value[shown], "dimension": dimension[shown]})
