"""First moments of the residual stream: what the positional and the context basis are made of.

Positions 1 … T−1 are averaged; position 0, whose token is an outlier in most models, is kept apart, and so are the
special tokens that a tokenizer puts behind every text ([SEP]). Of an image the patches are averaged, and all tokens
before them (`leading`: [CLS], registers, or none) kept apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from theodolite.accumulate.sums import LayerSums, State, cache_sized_groups, each_part
from theodolite.corpus.groups import GROUPS, Groups


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
    norm_first_sum (N, G), cosine_sum (N, G; layer ℓ against ℓ−1), collapse_sum (N, G), context_mean (N, S, d), token
    (N, Q, d), with `trailing` special tokens behind the text of every context norm_last_sum (N, G), and with more than
    one `leading` token norm_registers_sum (N, G) of those from position 1 on.
    `position_sum` by group is the largest thing here: G·T·d float64 a layer, 25 MB at T = 512 and d = 768. In float32
    it would be half of that, but a sum of 10⁴ values near 10⁴ would lose what differs between the groups.
    """

    def __init__(
        self, layers: int, length: int, width: int, sample: Sample, trailing: int = 0, leading: int = 1
    ) -> None:
        scalars = ["contexts", "norm_sum", "norm_first_sum", "cosine_sum", "collapse_sum"]
        scalars += ["norm_last_sum"] if trailing else []
        scalars += ["norm_registers_sum"] if leading > 1 else []
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(scalars, (GROUPS,))
        shapes |= {
            "position_sum": (GROUPS, length, width),
            "context_mean": (sample.size, width),
            "token": (len(sample.token_context), width),
        }
        super().__init__(layers, shapes)
        self.length = length
        self.text = slice(leading, length - trailing)
        self.sample = sample
        self.groups = Groups(len(sample.slot))
        self._previous: tuple[Tensor, Tensor] | None = None

    def update(self, layer: int, hidden: Float[Tensor, "batch positions width"], first_context: int) -> None:
        """Take in one layer's hidden states of contexts `first_context …`; layers come in order."""
        if layer and self._previous is None:
            raise RuntimeError("hidden states must come layer by layer, from layer 0")
        previous = self._previous if layer else None
        parts = each_part(
            lambda part: _lengths(hidden, previous, part, self.text), len(hidden), hidden.device
        )
        sums = {name: torch.cat([some[name] for some in parts]) for name in parts[0]}
        context_mean, norm = sums.pop("context_mean"), sums.pop("norm")
        self._previous = hidden, norm
        sums |= {"norm_sum": norm[:, self.text].mean(dim=1), "norm_first_sum": norm[:, 0]}
        if self.text.stop < self.length:
            sums["norm_last_sum"] = norm[:, self.text.stop :].mean(dim=1)
        if self.text.start > 1:
            sums["norm_registers_sum"] = norm[:, 1 : self.text.start].mean(dim=1)
        for group, part in self.groups.parts(first_context, len(hidden)):
            count = torch.tensor(float(part.stop - part.start), dtype=torch.float64, device=hidden.device)
            self.add("contexts", layer, count, group)
            for name, values in sums.items():
                self.add(name, layer, values[part].sum(), group)
        for group, part in cache_sized_groups(self.groups, first_context, len(hidden), hidden.device):
            several = part.stop - part.start > 1
            self.add(
                "position_sum", layer, hidden[part].double().sum(0) if several else hidden[part.start], group
            )
        self._keep(layer, hidden, context_mean, first_context)

    def _keep(self, layer: int, hidden: Tensor, context_mean: Tensor, first_context: int) -> None:
        batch = hidden.shape[0]
        slots = self.sample.slot[first_context : first_context + batch].to(hidden.device)
        self.at("context_mean", layer, hidden.device)[slots[slots >= 0]] = context_mean[slots >= 0]
        local = self.sample.token_context - first_context
        tokens = ((local >= 0) & (local < batch)).nonzero().flatten()
        if len(tokens):
            vectors = hidden[
                local[tokens].to(hidden.device), self.sample.token_position[tokens].to(hidden.device)
            ]
            self.at("token", layer, hidden.device)[tokens.to(hidden.device)] = vectors.double()


def _lengths(
    hidden: Float[Tensor, "batch positions width"],
    previous: tuple[Tensor, Tensor] | None,
    part: slice,
    text: slice,
) -> dict[str, Tensor]:
    """Of each context of a part: its mean, the norms of its tokens, and the terms of the sums over contexts.

    `previous` has the hidden states and the norms of the layer before; `text` are the positions that count.
    """
    h = hidden[part].to(torch.float64, copy=True)
    norm = torch.linalg.vector_norm(h, dim=-1)
    x, mean = h[:, text], h[:, text].mean(dim=1)
    values = {"context_mean": mean, "norm": norm}
    if previous is not None:
        p, p_norm = (tensor[part, text].to(h) for tensor in previous)
        cosine = torch.linalg.vecdot(x, p) / (norm[:, text] * p_norm).clamp_min(1e-300)
        values["cosine_sum"] = cosine.mean(dim=1)
    size = torch.linalg.vector_norm(norm[:, text], dim=-1)
    spread = torch.linalg.vector_norm(x.sub_(mean.unsqueeze(1)), dim=(1, 2))
    return values | {"collapse_sum": spread / size.clamp_min(1e-300)}


def decomposed_means(state: State, trailing: int = 0, leading: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """μ (N, d), pos (N, T, d) and ctx (N, S, d) from the state; μ is over positions leading … T−1−trailing."""
    position_mean = state["position_sum"].sum(dim=1) / state["contexts"].sum(dim=1).view(-1, 1, 1)
    mean = position_mean[:, leading : position_mean.shape[1] - trailing].mean(dim=1)
    return mean, position_mean - mean[:, None], state["context_mean"] - mean[:, None]
