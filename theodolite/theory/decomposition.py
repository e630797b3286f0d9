"""Decompose hidden states into a mean, a positional, a contextual and a residual part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from theodolite.errors import UsageError

PARTS = ("mean", "pos", "ctx", "resid", "bias")
"""The parts of a query or a key: those of its hidden state, and what it is made of without any (biases)."""


@dataclass(frozen=True)
class Decomposition:
    """h[c, t] = mean + pos[t] + ctx[c] + resid[c, t] (Song & Zhong 2024, section 1.1), float64.

    `pos` and `ctx` sum to zero; `resid` sums to zero over contexts and over positions.
    """

    mean: Float64[Tensor, " width"]
    pos: Float64[Tensor, "positions width"]
    ctx: Float64[Tensor, "contexts width"]
    resid: Float64[Tensor, "contexts positions width"]

    @property
    def cvec(self) -> Float64[Tensor, "contexts positions width"]:
        """The residual without mean and position: ctx[c] + resid[c, t]."""
        return self.ctx[:, None] + self.resid

    def by_groups(self) -> DecompositionByGroups:
        """Return it as one around the means of a single group."""
        group = torch.zeros(len(self.ctx), dtype=torch.int64, device=self.ctx.device)
        level = self.mean + self.ctx
        h = level[:, None] + self.pos + self.resid
        return DecompositionByGroups(self.mean[None], self.pos[None], group, group, level, h)


@dataclass(frozen=True)
class DecompositionByGroups:
    """Hidden states around means of other contexts: those of one group for queries, those of another one for keys.

    h[c, t] = mean[g] + pos[g, t] + ctx[c] + resid[c, t] on either side, with the group g that it has for context c, so
    that the noise of means is not twice in a product. `level` is mean[g] + ctx[c], the context's mean over positions.
    """

    mean: Float64[Tensor, "groups width"]
    pos: Float64[Tensor, "groups positions width"]
    query_group: Int[Tensor, " contexts"]
    key_group: Int[Tensor, " contexts"]
    level: Float64[Tensor, "contexts width"]
    h: Float64[Tensor, "contexts positions width"]

    def resid(
        self, group: Int[Tensor, " contexts"], contexts: int
    ) -> Float64[Tensor, "some positions width"]:
        """Return what is left of the first contexts without mean, position and context."""
        return (self.h - self.level[:, None])[:contexts] - self.pos[group[:contexts]]


def decompose(h: Tensor) -> Decomposition:
    """Split hidden states (contexts, positions, width) of one layer by two-way means; `UsageError` for other shapes."""
    if h.ndim != 3 or 0 in h.shape:
        raise UsageError(f"h has shape {tuple(h.shape)}: give non-empty (contexts, positions, width)")
    position_mean = h.double().mean(0)
    mean = position_mean.mean(0)
    return decompose_around(h, mean, position_mean - mean, leading=0)


def decompose_around(h: Tensor, mean: Tensor, pos: Tensor, leading: int = 1) -> Decomposition:
    """Decompose hidden states (C, T, d) with μ (d) and pos (T or more, d) from elsewhere.

    ctx is the mean over positions `leading` … T−1 of h − μ − pos, zero where there are none; resid is what is left.
    """
    h = h.double()
    mean, pos = mean.to(h), pos[: h.shape[1]].to(h)
    without_pos = h - mean - pos
    apart = h.shape[1] <= leading
    ctx = torch.zeros_like(without_pos[:, 0]) if apart else without_pos[:, leading:].mean(dim=1)
    return Decomposition(mean=mean, pos=pos, ctx=ctx, resid=without_pos - ctx[:, None])


def decompose_by_groups(
    h: Tensor,
    mean: Float[Tensor, "groups width"],
    pos: Float[Tensor, "groups positions width"],
    query_group: Int[Tensor, " contexts"],
    key_group: Int[Tensor, " contexts"],
    leading: int = 1,
) -> DecompositionByGroups:
    """Decompose hidden states (C, T, d) with each context's two groups' μ and pos; levels as in `decompose_around`."""
    h = h.double()
    mean, pos = mean.to(h), pos[:, : h.shape[1]].to(h)
    query_group, key_group = query_group.to(h.device), key_group.to(h.device)
    apart = h.shape[1] <= leading
    level = mean[query_group] if apart else (h - pos[query_group])[:, leading:].mean(dim=1)
    return DecompositionByGroups(mean, pos, query_group, key_group, level, h)


def decompose_apart(h: Tensor) -> Decomposition:
    """Decompose hidden states (C, T, d) as a survey does: position 0 apart, μ and ctx over the others."""
    position_mean = h.double().mean(dim=0)
    mean = position_mean[1:].mean(dim=0) if len(position_mean) > 1 else position_mean[0]
    return decompose_around(h, mean, position_mean - mean)
