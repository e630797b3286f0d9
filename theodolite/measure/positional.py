"""Heads on the positional basis: the argmax property, and low frequencies of P W Pᵀ and of Q Kᵀ.

From means of hidden states and weights, or from given queries and keys; nothing here runs a model. Position 0
is left out, as everywhere in the geometry. Source: Song & Zhong 2024, section 4.2 and appendix D.2.
"""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from theodolite.accumulate.sums import State
from theodolite.errors import UsageError
from theodolite.measure.column import POSITIONAL, SHARE, Column, gives
from theodolite.measure.position import CUTOFFS, SHOWN_CUTOFF
from theodolite.measure.publications import SONG
from theodolite.theory.smoothness import Grid, product_low_frequency_ratio

_share = partial(Column, "heads", range=SHARE, group=POSITIONAL)


def _smoothness(name: str, meaning: str, formula: str, title: str, shown: str) -> tuple[Column, ...]:
    return tuple(
        _share(
            f"{name}_low_frequency_{k}",
            meaning.format(k=f"{k} × {k}"),
            formula,
            f"{SONG}, Table 3",
            shown if k == SHOWN_CUTOFF else f"{title} low freq. K={k}",
            offered=k == SHOWN_CUTOFF,
        )
        for k in CUTOFFS
    )


_DECLARED = (
    _share(
        "argmax_property",
        "Share of positions t whose row of P̃WP̃ᵀ, P̃ = pos + mean without the layer's norm, is largest at t itself "
        "among t' ≤ t. Above 0.8, position alone makes the head attend at or near the query.",
        "Positions t ≥ 1 and 1 ≤ t' ≤ t, a tie goes to the earlier; W = W_QK without norm, bias or rotation, of the "
        "projections where `spectrum_of` says so.",
        f"{SONG}, eq. 8 and Fig. 25",
    ),
    _share(
        "argmax_property_normed",
        "The argmax property of positions as the head reads them, after the layer's norm.",
        "P̃ after the norm that precedes the layer's heads.",
        f"{SONG}, eq. 8; the norm is ours",
        "argmax property, normed",
    ),
    *_smoothness(
        "pwp",
        "Energy of PWPᵀ in its {k} lowest frequencies: near 1, neighbouring positions get similar logits.",
        "Of its 2-D DCT, P = pos, W = W_QK; empty where P W Pᵀ is zero.",
        "PWPᵀ",
        "smoothness of PWPᵀ",
    ),
)
COLUMNS = tuple(column.name for column in _DECLARED)
"""What `positional_heads` gives, all but the second without `normed` too."""

_QUERIES = 64
"""Rows of P̃WP̃ᵀ held at a time, of all heads."""


def positional_heads(
    pos: Float[Tensor, "positions width"],
    mean: Float[Tensor, " width"],
    w_q: Float[Tensor, "heads width head_width"],
    w_k: Float[Tensor, "heads width head_width"],
    normed: Float[Tensor, "positions width"] | None = None,
    leading: int = 1,
    grid: Grid | None = None,
) -> dict[str, list[float]]:
    """Compute the heads' columns that need one layer's positional basis and weights alone, H values each.

    The argmax property is that of P̃ = pos + μ and W = W_q W_kᵀ (eq. 8, appendix D.2), normed that of `normed`; the
    first position has it by itself. Frequencies are of P W Pᵀ, P the centred pos, not normalised (Table 3).

    Args:
        pos, mean: of the layer whose residual stream the heads read, position 0 included and ignored.
        w_q, w_k: grouped keys repeated; neither scaling nor its unit changes a column.
        normed: pos + μ through the layer's own norm, position 0 included and ignored; None: no such column.
        leading: so many positions are included and ignored: of an image, the tokens before its patches.
        grid: rows and columns of the others, for the frequencies; None: they lie in a line.

    Raises:
        UsageError: there is no position after those.
    """
    if len(pos) <= leading:
        raise UsageError(
            f"pos has {len(pos)} positions: position 0 is left out, so give at least {leading + 1}"
        )
    w_q, w_k = w_q.double(), w_k.double()
    p = pos[leading:].to(w_q.device).double()
    columns = {"argmax_property": argmax_property(p + mean.to(p), w_q, w_k)}
    if normed is not None:
        columns["argmax_property_normed"] = argmax_property(normed[leading:].to(p), w_q, w_k)
    ratios = qk_low_frequency(p @ w_q, p @ w_k, grid)
    for index, k in enumerate(CUTOFFS):
        columns[f"pwp_low_frequency_{k}"] = ratios[:, index]
    return {name: values.tolist() for name, values in columns.items()}


@gives(*_DECLARED)
def positional_columns(weights: State) -> dict[str, list[float]]:
    """Return the columns that a `WeightsPass` has made by `positional_heads`, L · H values each."""
    return {name: weights[name].flatten().tolist() for name in COLUMNS if name in weights}


def argmax_property(
    rows: Float[Tensor, "positions width"],
    w_q: Float[Tensor, "heads width head_width"],
    w_k: Float[Tensor, "heads width head_width"],
) -> Float64[Tensor, " heads"]:
    """Compute the share of rows t of P̃WP̃ᵀ whose largest entry among the columns t' ≤ t is the t-th (eq. 8).

    A tie goes to the earlier column, so that a constant row fails. O(T·block) memory for each head.
    """
    rows = rows.to(w_q.device).double()
    query, key = rows @ w_q.double(), rows @ w_k.double()
    length = len(rows)
    holds = query.new_zeros(len(query))
    for start in range(0, length, _QUERIES):
        stop = min(start + _QUERIES, length)
        logits = query[:, start:stop] @ key[:, :stop].mT
        own = logits.diagonal(offset=start, dim1=-2, dim2=-1)
        earlier = logits.masked_fill(_from_itself_on(start, stop, logits.device), -torch.inf).amax(-1)
        holds += (own > earlier).sum(-1)
    return holds / length


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


def _from_itself_on(start: int, stop: int, device: torch.device) -> Bool[Tensor, "rows columns"]:
    """Mark column t' ≥ t, for rows t = start … stop−1 and columns 0 … stop−1."""
    rows = torch.arange(start, stop, device=device)[:, None]
    return torch.arange(stop, device=device) >= rows
