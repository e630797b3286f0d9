"""Heads on the positional basis: the argmax property, and low frequencies of P W Pᵀ and of Q Kᵀ.

From means of hidden states and weights, or from given queries and keys; nothing here runs a model. Position 0
is left out, as everywhere in the geometry. Source: Song & Zhong 2024, section 4.2 and appendix D.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from theodolite.accumulate.sums import State
from theodolite.corpus.groups import one_of_each_stretch
from theodolite.errors import UsageError
from theodolite.measure.column import LEFT_OUT, POSITIONAL, SHARE, Column, gives
from theodolite.measure.position import CUTOFFS, SHOWN_CUTOFF, GroupedBasis
from theodolite.measure.publications import SONG
from theodolite.system.processor import parallel_map
from theodolite.theory.smoothness import Grid, frequencies_below, product_low_frequency_ratio
from theodolite.theory.unbiased import Jackknifed, combined, corner_energies, product_energy, stacked

_share = partial(Column, "heads", range=SHARE, group=POSITIONAL)


def _smoothness(
    name: str, meaning: str, formula: str, title: str, shown: str, error: str = ""
) -> tuple[Column, ...]:
    return tuple(
        _share(
            f"{name}_low_frequency_{k}",
            meaning.format(k=f"{k} × {k}"),
            formula,
            f"{SONG}, Table 3",
            shown if k == SHOWN_CUTOFF else f"{title} low freq. K={k}",
            offered=k == SHOWN_CUTOFF,
            error=error,
        )
        for k in CUTOFFS
    )


MOST_ROWS = 256
"""Of longer contexts the argmax property is of so many positions, one of each of as many stretches."""

_QUERIES = 64
"""Rows of P̃WP̃ᵀ held at a time, of one head and all groups."""


def positional_heads(
    basis: GroupedBasis,
    w_q: Float[Tensor, "heads width head_width"],
    w_k: Float[Tensor, "heads width head_width"],
) -> tuple[Float64[Tensor, " heads"], Jackknifed]:
    """Compute what needs one layer's positional basis and weights alone: argmax property, shares of frequencies.

    The argmax property is that of P̃ = pos + μ and W = W_q W_kᵀ (eq. 8, appendix D.2); the first position has it by
    itself. Frequencies are of P W Pᵀ, P the centred pos, not normalised (Table 3). Both are of products of different
    groups: a position's noise times itself would raise the diagonal. Of longer contexts the whole energy is that of
    sums over `stretches`.

    Args:
        basis: of the layer whose residual stream the heads read, by groups of contexts.
        w_q, w_k: grouped keys repeated; neither scaling nor its unit changes a column.

    Returns:
        The argmax property, (H), and the shares for `CUTOFFS`, (H, cutoffs).
    """
    rows = basis.p.shape[1]
    chosen = one_of_each_stretch(rows, MOST_ROWS)
    query = _Projected.of(basis, w_q, None if len(chosen) == rows else chosen)
    key = _Projected.of(basis, w_k)
    tilde = query.p + query.mean  # of keys the mean is the same in a row
    counts = [frequencies_below(k, rows, basis.grid) for k in CUTOFFS]
    corners = corner_energies(query.low.unsqueeze(0), key.low.unsqueeze(0), counts)

    def of_head(head: int) -> tuple[Jackknifed, Tensor]:
        argmax = argmax_property(tilde[head], key.p[head], chosen)
        return product_energy(query.summed[head], key.summed[head]), argmax

    energies, properties = zip(*parallel_map(of_head, list(range(len(w_q)))), strict=True)
    energy = stacked(energies)
    shares = combined(lambda corner, whole: corner / whole[:, None], corners, energy).corrected()
    return torch.stack(properties), shares.where(energy.above_noise()[:, None])


@dataclass(frozen=True)
class _Projected:
    """P by groups as a layer's heads project it, in float32: nothing is subtracted before the products.

    p: (H, G, rows, d_h) of some rows. mean: (H, G, 1, d_h). summed: of sums over stretches. low: of the lowest
    frequencies.
    """

    p: Tensor
    mean: Tensor
    summed: Tensor
    low: Tensor

    @classmethod
    def of(
        cls,
        basis: GroupedBasis,
        w: Float[Tensor, "heads width head_width"],
        rows: Int[Tensor, " rows"] | None = None,
    ) -> _Projected:
        """Project some rows, or all; grouped keys that are repeated are projected once."""
        other = torch.cat([torch.ones(1, dtype=torch.bool), (w[1:] != w[:-1]).flatten(1).any(dim=1).cpu()])
        distinct, repeated = w[other].double(), other.cumsum(dim=0) - 1
        flat = distinct.transpose(0, 1).flatten(1).float()

        def projected(p: Tensor) -> Tensor:
            """Multiply (G, rows, d) by (H, d, d_h)."""
            return (p.to(flat) @ flat).unflatten(-1, (len(distinct), -1)).permute(2, 0, 1, 3)

        p = projected(basis.p if rows is None else basis.p[:, rows])
        mean = (basis.mean.to(distinct) @ distinct).unsqueeze(2).to(p)
        summed = p if rows is None and basis.summed is basis.p else projected(basis.summed)
        sides = (p, mean, summed, projected(basis.low))
        return cls(*(of_heads[repeated] for of_heads in sides))


@gives(
    _share(
        "argmax_property",
        "Share of positions t whose row of P̃WP̃ᵀ, P̃ = pos + mean without the layer's norm, is largest at t itself "
        "among t' ≤ t. Above 0.8, position alone makes the head attend at or near the query.",
        "Positions t ≥ 1 and 1 ≤ t' ≤ t, a tie goes to the earlier; W = W_QK without norm, bias or rotation, of the "
        "projections where `spectrum_of` says so. P̃WP̃ᵀ is the mean of products of different groups of contexts; where "
        "its noise hides neighbours from each other, the share is near that of chance, (1 + ½ + … + 1/T)/T.",
        f"{SONG}, eq. 8 and Fig. 25",
    ),
    *_smoothness(
        "pwp",
        "Energy of PWPᵀ in its {k} lowest frequencies: near 1, neighbouring positions get similar logits.",
        "Of its 2-D DCT, P = pos, W = W_QK, by products of four groups of contexts; of more than 256 positions the "
        "whole energy is that of sums over as many stretches. Empty where the energy of P W Pᵀ is at the noise floor.",
        "PWPᵀ",
        "smoothness of PWPᵀ",
        LEFT_OUT,
    ),
)
def positional_columns(weights: State) -> dict[str, Sequence[float] | Jackknifed]:
    """Return the columns that a `WeightsPass` has made by `positional_heads`, L · H values each."""
    if "argmax_property" not in weights:
        return {}
    shares = weights["pwp_shares"].flatten(0, 1).permute(1, 2, 0)
    columns = {
        f"pwp_low_frequency_{k}": Jackknifed(of[0], of[1:]) for k, of in zip(CUTOFFS, shares, strict=True)
    }
    return {"argmax_property": weights["argmax_property"].flatten().tolist(), **columns}


def argmax_property(
    query: Float[Tensor, "groups rows head_width"],
    key: Float[Tensor, "groups positions head_width"],
    chosen: Int[Tensor, " rows"] | None = None,
) -> Float64[Tensor, ""]:
    """Estimate the share of rows t of Q Kᵀ whose largest entry among the columns t' ≤ t is the t-th (eq. 8).

    `chosen`: the positions of the rows, ascending; None: they are all.

    Q Kᵀ is the mean of the products of different groups, (ΣQ_g)(ΣK_g)ᵀ − ΣQ_gK_gᵀ. A tie goes to the earlier column,
    so that a constant row fails. O(T·block) memory; NaN with one group.
    """
    groups, count, _ = query.shape
    if groups < 2 or not (query.isfinite().all() and key.isfinite().all()):
        return torch.tensor(torch.nan, dtype=torch.float64)
    rows, keys = (torch.cat([p.sum(dim=0, keepdim=True), p]).transpose(0, 1) for p in (-query, key))
    rows[:, 0].neg_()
    rows, keys = rows.flatten(1), keys.flatten(1)
    chosen = torch.arange(count) if chosen is None else chosen
    holds = torch.zeros((), device=query.device)
    for own_rows, t in zip(rows.split(_QUERIES), chosen.to(query.device).split(_QUERIES), strict=True):
        logits = own_rows @ keys[: t[-1] + 1].T
        diagonal = logits.gather(1, t[:, None])[:, 0]
        from_itself_on = torch.arange(logits.shape[1], device=t.device) >= t[:, None]
        holds += (diagonal > logits.masked_fill_(from_itself_on, -torch.inf).amax(-1)).sum()
    return holds.double().cpu() / count


def qk_low_frequency(
    query: Float[Tensor, "*batch query_heads queries width"],
    key: Float[Tensor, "*batch key_heads keys width"],
    grid: Grid | None = None,
) -> Float64[Tensor, "*batch query_heads cutoffs"]:
    """Compute the share of the energy of the DCT of Q Kᵀ in its K×K lowest frequencies, K = 1, 3, 5, 10 (Table 3).

    Of the whole matrix, unmasked, as the published ratios; biases and rotations are those within q and k.
    The paper leaves position 0 out: cut it off before. With grouped heads, key head g serves the query heads
    `g·G … (g+1)·G − 1`. No T×T matrix is formed. `grid`: rows and columns of the positions, where they lie in a plane.

    Raises:
        UsageError: the query heads are no multiple of the key heads.
    """
    heads, key_heads = query.shape[-3], key.shape[-3]
    if heads % key_heads:
        raise UsageError(f"{heads} query heads and {key_heads} key heads: give a multiple")
    if heads != key_heads:
        key = key.repeat_interleave(heads // key_heads, dim=-3)
    return product_low_frequency_ratio(query, key, CUTOFFS, grid)


@gives(
    *_smoothness(
        "qk",
        "Share of the energy of the logits on this text, unmasked, in their {k} lowest frequencies.",
        "Of the 2-D DCT of all query-key products, biases and rotation within, mean over the contexts of "
        "`split_contexts`, position 0 left out.",
        "QK",
        "smoothness of the logits",
    )
)
def qk_frequency_columns(shares: State) -> dict[str, list[float]]:
    """Return the means over the sample of a `SharesPass`, L · H values each."""
    ratios = shares["low_frequency"].mean(dim=1)
    return {f"qk_low_frequency_{k}": ratios[..., i].flatten().tolist() for i, k in enumerate(CUTOFFS)}
