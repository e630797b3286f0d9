"""First moments of the residual stream: what the positional and the context basis are made of.

Positions 1 … T−1 are averaged; position 0, whose token is an outlier in most models, is kept apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from theodolite.accumulate.sums import GROUPS, Groups, LayerSums, State


@dataclass(frozen=True)
class Sample:
    """The contexts whose vectors are kept, and the tokens of them that are kept one by one.

    `slot` says where a context's mean goes, −1 for those not kept; the k-th kept token is at position
    `token_position[k]` of context `token_context[k]` and is stored at k.
    """

    slot: Int[Tensor, " contexts"]
    token_context: Int[Tensor, " tokens"]
    token_position: Int[Tensor, " tokens"]

    @property
    def size(self) -> int:
        """Number of contexts kept."""
        return int((self.slot >= 0).sum())

    @property
    def kept(self) -> Int[Tensor, " sampled"]:
        """The contexts kept, by index in the corpus."""
        return (self.slot >= 0).nonzero().flatten()


class Means(LayerSums):
    """Sums over contexts of hidden states, norms, cosines and rank-collapse residuals; kept context means.

    State (N residual layers, G groups of contexts): contexts (N, G), position_sum (N, G, T, d), norm_sum (N, G),
    norm_first_sum (N, G), cosine_sum (N, G; layer ℓ against ℓ−1), collapse_sum (N, G), context_mean (N, S, d),
    token (N, Q, d). `position_sum` by group is the largest thing here: G·T·d float64 a layer, 25 MB at T = 512 and
    d = 768. In float32 it would be half of that, but a sum of 10⁴ values near 10⁴ would lose what differs between
    the groups.
    """

    def __init__(self, layers: int, length: int, width: int, sample: Sample) -> None:
        scalars = ("contexts", "norm_sum", "norm_first_sum", "cosine_sum", "collapse_sum")
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(scalars, (GROUPS,))
        shapes |= {
            "position_sum": (GROUPS, length, width),
            "context_mean": (sample.size, width),
            "token": (len(sample.token_context), width),
        }
        super().__init__(layers, shapes)
        self.length = length
        self.sample = sample
        self.groups = Groups(len(sample.slot))
        self._previous: Tensor | None = None

    def update(self, layer: int, hidden: Float[Tensor, "batch positions width"], first_context: int) -> None:
        """Take in one layer's hidden states of contexts `first_context …`; layers come in order."""
        for group, part in self.groups.cache_sized(first_context, len(hidden), hidden.device):
            previous = None if layer == 0 else self._previous_part(part)
            self._update(layer, group, hidden[part], previous)
        self._keep(layer, hidden, first_context)
        self._previous = hidden

    def _previous_part(self, part: slice) -> Tensor:
        if self._previous is None:
            raise RuntimeError("hidden states must come layer by layer, from layer 0")
        return self._previous[part]

    def _update(self, layer: int, group: int, hidden: Tensor, previous: Tensor | None) -> None:
        h = hidden.double()
        norm = torch.linalg.vector_norm(h, dim=-1)
        x = h[:, 1:]
        centred = x - x.mean(dim=1, keepdim=True)
        size = torch.linalg.vector_norm(norm[:, 1:], dim=-1)
        collapse = torch.linalg.vector_norm(centred, dim=(1, 2)) / size.clamp_min(1e-300)
        count = torch.tensor(float(len(h)), dtype=torch.float64, device=h.device)
        self.add("contexts", layer, count, group)
        self.add("position_sum", layer, h.sum(dim=0), group)
        self.add("norm_sum", layer, norm[:, 1:].mean(dim=1).sum(), group)
        self.add("norm_first_sum", layer, norm[:, 0].sum(), group)
        self.add("collapse_sum", layer, collapse.sum(), group)
        if previous is not None:
            p = previous[:, 1:].to(h.device).double()
            product = norm[:, 1:] * torch.linalg.vector_norm(p, dim=-1)
            cosine = torch.linalg.vecdot(x, p) / product.clamp_min(1e-300)
            self.add("cosine_sum", layer, cosine.mean(dim=1).sum(), group)

    def _keep(self, layer: int, hidden: Tensor, first_context: int) -> None:
        batch = hidden.shape[0]
        slots = self.sample.slot[first_context : first_context + batch]
        kept = (slots >= 0).nonzero().flatten()
        if len(kept):
            mean = hidden[kept.to(hidden.device), 1:].double().mean(dim=1)
            self.at("context_mean", layer, hidden.device)[slots[kept].to(hidden.device)] = mean
        local = self.sample.token_context - first_context
        here = ((local >= 0) & (local < batch)).nonzero().flatten()
        if len(here):
            vectors = hidden[
                local[here].to(hidden.device), self.sample.token_position[here].to(hidden.device)
            ]
            self.at("token", layer, hidden.device)[here.to(hidden.device)] = vectors.double()


def decomposed_means(state: State) -> tuple[Tensor, Tensor, Tensor]:
    """μ (N, d), pos (N, T, d) and ctx (N, S, d) from the state; μ is over positions 1 … T−1."""
    position_mean = state["position_sum"].sum(dim=1) / state["contexts"].sum(dim=1).view(-1, 1, 1)
    mean = position_mean[:, 1:].mean(dim=1)
    return mean, position_mean - mean[:, None], state["context_mean"] - mean[:, None]
