"""Second moments of each head's queries and keys, as its attention uses them: behind norms and turned by position."""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.accumulate.sums import LayerSums
from theodolite.attention.inputs import AttentionInputs


class QueryKeyMoments(LayerSums):
    """Sums over contexts of the last query's second moment and of the covariance of the keys that it sees.

    State: contexts (L, H) in which the last query sees a key; query (L, H, w, w), sums of q qᵀ · scaling²; key
    (L, H, w, w), sums of the covariance of the context's keys. w is the widest head's; a layer with fewer or narrower
    heads has the first rows.
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
        self._add("contexts", layer, sees.double().sum(dim=0))
        self._add("query", layer, torch.einsum("chx,chy->hxy", query, query))
        counted = seen[:, :: heads // key_heads, :, None]  # query heads with one key head see the same keys
        count = counted.sum(dim=2, keepdim=True).clamp_min(1)
        key = inputs.key.to(torch.promote_types(inputs.key.dtype, torch.float32)) * counted
        centred = (key - key.sum(dim=2, keepdim=True) / count) * counted
        covariance = ((centred.mT @ centred).double() / count).sum(dim=0)
        self._add("key", layer, covariance.repeat_interleave(heads // key_heads, dim=0))

    def _add(self, name: str, layer: int, value: Tensor) -> None:
        self.at(name, layer, value.device)[tuple(map(slice, value.shape))] += value
