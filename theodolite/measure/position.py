"""The positional basis of each residual layer: how large it is, of how many directions, how smooth; heads on it.

P is what the hidden states of a position have in common over contexts, less their mean over positions 1 … T−1; position
0 is apart, and with it the special tokens that a tokenizer puts behind every text. Of contexts of unlike lengths the
basis ends where too few contexts reach (`positions_read`); of an image all `leading` tokens before its patches are
apart, and the patches are a `grid`. All numbers are products of different groups of contexts (`theory.unbiased`), so
that sampling noise adds nothing on average. Source: Song & Zhong 2024.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from torch.nn import functional

from theodolite.accumulate.second_moments import low_rank, numbers_of
from theodolite.accumulate.sums import State
from theodolite.corpus.groups import GROUPS, one_of_each_stretch
from theodolite.judging import Criterion
from theodolite.measure import column
from theodolite.measure.column import Array, Column, gives
from theodolite.measure.publications import SONG
from theodolite.system.processor import once, parallel_map
from theodolite.theory import unbiased
from theodolite.theory.singular import by_gram_matrix, screenot_of_values
from theodolite.theory.smoothness import (
    Grid,
    frequencies_below,
    lowest_frequencies,
    product_low_frequency_ratio,
)
from theodolite.theory.unbiased import Jackknifed, PairProducts

SCREENOT_RANK = 20
"""Upper bound on the rank given to ScreeNOT, as published."""

DIRECTIONS = f"positional_directions{column.WITHOUT}"

REPLICATED = 3.0
"""Standard errors by which a direction's energy in contexts left out is above 0: of noise, one in a hundred is."""

STRETCHES = 256  # in longer contexts, products of all positions with all are of sums over so many stretches
MOST_ROWS = 256  # in longer contexts the argmax property is of one position of each of so many stretches

NEAR = 1.25
"""Neighbours of a position are those up to this factor away: what changes with position changes ever more slowly."""

CUTOFFS = (1, 3, 5, 10)
"""K of the low-frequency ratios, as published (Table 4)."""

SHOWN_CUTOFF = 10  # the one that maps, checks and summaries show

LEAST_SHARE = 0.1
"""Of the contexts must reach a position, where they are of unlike lengths: its mean would be that of a few contexts."""

_QUERIES = 64  # rows of P̃WP̃ᵀ held at a time, of one head and all groups

_layer = partial(Column, "layers", group=column.BASIS, error=column.LEFT_OUT)
_share = partial(_layer, range=column.SHARE)
_of_head = partial(Column, "heads", range=column.SHARE, group=column.POSITIONAL)
_SMOOTH = "Smoothness over positions: energy of the positional basis in its {k} lowest frequencies. 1 smooth, 0 noise."


def _smoothness(
    declare: Callable[..., Column],
    name: str,
    meaning: str,
    formula: str,
    source: str,
    title: str,
    shown: str = "",
    **of_shown: Any,
) -> Iterator[Column]:
    """Declare the share of energy in the K × K lowest frequencies for each K; one K is `shown` by a name of its own."""
    for k in CUTOFFS:
        named = shown if shown and k == SHOWN_CUTOFF else f"{title} K={k}"
        more = of_shown if k == SHOWN_CUTOFF else {}
        yield declare(f"{name}_{k}", meaning.format(k=f"{k} × {k}"), formula, source, named, **more)


@dataclass(frozen=True)
class GroupedBasis:
    """P of one layer by groups of contexts, centred over positions: `mean` was taken off each group's.

    Each position's mean is of so many `readers`. `groups` of the corpus and `positions` of a context say which these
    are; they lie in a line, or in the rows and columns of a `grid`.
    """

    p: Float[Tensor, "groups positions width"]
    mean: Float[Tensor, "groups width"]
    readers: Float[Tensor, "groups positions"]
    groups: Sequence[int]
    positions: Int[Tensor, " positions"]
    grid: Grid | None = None

    @once
    def stretches(self) -> Stretches:
        """The positions that are taken together where all are multiplied with all."""
        return Stretches.among(self.p.shape[1], self.grid)

    @once
    def summed(self) -> Float[Tensor, "groups stretches width"]:
        """P over these stretches; P itself where each position is one."""
        return self.stretches.summed(self.p)

    @once
    def products(self) -> PairProducts:
        """Products of all pairs of groups, over stretches."""
        return PairProducts.of(self.summed)

    @once
    def low(self) -> Float[Tensor, "groups low width"]:
        """The lowest frequencies of P."""
        return lowest_frequencies(self.p, max(CUTOFFS), self.grid)

    @once
    def squares(self) -> Jackknifed:
        """‖pos_t‖² of every position."""
        return unbiased.product(self.p)


@dataclass(frozen=True)
class Stretches:
    """Neighbouring positions that are taken together: `of` is the stretch of each position, `sizes` how many each has.

    Each of the first, where most changes, is one by itself, and on a grid every one; at most `STRETCHES` are there.
    """

    of: Int[Tensor, " positions"]
    sizes: Float[Tensor, " stretches"]

    @classmethod
    def among(cls, length: int, grid: Grid | None = None) -> Stretches:
        """Cut positions into stretches."""
        of, single = torch.arange(length), STRETCHES // 2
        if grid is None and length > STRETCHES:
            of[single:] = single + (of[single:] - single) * (STRETCHES - single) // (length - single)
        return cls(of, of.bincount().double())

    def mean(self, values: Float[Tensor, "some positions"]) -> Float[Tensor, "some stretches"]:
        """Average values over each stretch."""
        return values.new_zeros(len(values), len(self.sizes)).index_add_(1, self.of, values) / self.sizes

    def summed(self, p: Float[Tensor, "groups positions width"]) -> Float[Tensor, "groups stretches width"]:
        """Sum vectors over each stretch, over the root of its length: products have about the energies of all."""
        if len(self.sizes) == p.shape[1]:
            return p
        sums = p.new_zeros(len(p), len(self.sizes), p.shape[2]).index_add_(1, self.of, p)
        return sums / self.sizes.sqrt()[:, None]


def grouped_basis(means: State, layer: int, leading: int, grid: Grid | None = None) -> GroupedBasis:
    """Return the positional basis of a layer by groups of contexts; a position that a group lacks is left out.

    `leading` tokens are apart before the others, which lie in a line or on a `grid`; there one that a group lacks is 0.
    """
    readers = means["readers"][layer, :, leading : positions_read(means)]
    groups = (readers.sum(dim=1) > 0).nonzero().flatten().tolist()
    readers = readers[groups]
    there = (readers > 0).all(dim=0)
    # A copy, as large as anything here: the rest is done in place.
    p = means["position_sum"][layer, groups, leading : leading + len(there)]
    p.div_(readers.clamp_min(1).unsqueeze(-1))
    mean = there.to(p) @ p / there.sum()
    p.sub_(mean[:, None])
    if not there.all():
        p.mul_(there[:, None])
    used = there if grid is None else torch.ones_like(there)
    positions = leading + used.nonzero().flatten()
    p, readers = (p, readers) if used.all() else (p[:, used], readers[:, used])
    return GroupedBasis(p, mean, readers, groups, positions, grid)


def positions_read(means: State) -> int:
    """Count the positions, from 0 on, that `LEAST_SHARE` of the contexts have."""
    readers = means["readers"].sum(dim=1).amax(dim=0)
    return int((readers >= LEAST_SHARE * readers[0]).sum())


@gives(
    _layer(
        "rank",
        "Number of directions of the positional basis that contexts which did not choose them show, too.",
        "Of ScreeNOT's directions those whose energy in the group of contexts left out is above 0 by three standard "
        "errors. It grows with the contexts: weak directions need many.",
        "ours",
        "positional rank",
        short="rank",
        healthy=Criterion("more than", 0.0, "mean rank: directions of the positional basis above noise"),
    ),
    _layer(
        "rank_screenot",
        "Number of directions of the positional basis that stand out from noise, as published (ScreeNOT).",
        "P (T − 1 × d), k = 20, imputation (k is smaller where P is). It takes averaged embeddings for signal: layer 0 "
        "of a model with rotary positions has a rank of 9 or so, where the truth is 0.",
        f"ScreeNOT; {SONG}, Table 4",
        "rank as published",
    ),
    _layer(
        "stable_rank",
        "Number of directions of the positional basis, weighted by energy.",
        "‖P‖_F² / ‖P‖₂², between groups of contexts; empty where ‖P‖₂ is at the noise floor.",
        f"{SONG}, Table 5",
    ),
    _share(
        "relative_norm",
        "The largest singular value of the positional basis over that of all centred hidden states. Not above its "
        "floor: nothing is seen above the noise.",
        "‖P tiled over contexts‖₂ / ‖M‖₂, M all centred hidden states. The square of the first is estimated between "
        "groups of contexts, and may be below 0; the root keeps the sign. That of the second is corrected for few "
        "contexts by the jackknife, from a sketch of 32 directions.",
        f"{SONG}, Table 6",
        floor="relative_norm_floor",
        short="rel.",
    ),
    _share(
        "relative_norm_floor",
        "The relative norm that noise alone reaches in one of 40 texts.",
        "Two standard errors of the same estimate of differences between groups of contexts, which have no position.",
        "ours",
        "relative norm, noise",
        error="",
    ),
    _share(
        "position_energy",
        "Share of the hidden states' variance that position explains. 0 or below: nothing is seen above the noise.",
        "‖P tiled over contexts‖_F² / ‖M‖_F², between groups of contexts.",
        "ours",
        "energy of position",
    ),
    _share(
        "incoherence_random",
        "Root mean square cosine of random directions with the covariance of the hidden states.",
        "‖Σ‖_F / tr Σ.",
        "a closed form",
        "incoherence, random",
        group=column.CONTEXTS,
        error="",
    ),
    *_smoothness(
        _share,
        "pp_low_frequency",
        _SMOOTH,
        "The same share for P Pᵀ, whose rows are not normalised: the weakest positions, of which few contexts know "
        "least, weigh least.",
        f"{SONG}, Table 3",
        "PPᵀ low freq.",
        "positional smoothness",
        healthy=Criterion(
            "at least", 0.60, "energy in the 10 lowest frequencies; models of addition: about 0.5"
        ),
        short="smooth",
    ),
    *_smoothness(
        _share,
        "low_frequency",
        _SMOOTH,
        "Share of the energy of the 2-D DCT of the normalised Gram matrix of P, by products of four groups of "
        "contexts; a norm ‖pos_t‖ that is uncertain is drawn towards those of its neighbours. Empty where that energy "
        "is at the noise floor.",
        f"{SONG}, Table 2",
        "low freq.",
    ),
    Array(
        DIRECTIONS,
        "(8, N, ≤ 20, d)",
        "Leading directions of the positional basis without each of 8 groups of contexts, in float16.",
    ),
)
def position_columns(
    means: State, residual: State, sketches: State, leading: int = 1, grid: Grid | None = None
) -> dict[str, Any]:
    """Compute the columns of the positional basis, N values each, and its directions without each group.

    From states of `Means`, and of `SecondMoments` and `MomentSketches` of the stream. NaN where there are too few
    groups: of fewer than six contexts the stable rank and the floor, of fewer than five the shares, of two all.
    """

    def of_layer(layer: int, basis: GroupedBasis) -> dict[str, Jackknifed]:
        sketch = {name: values[layer] for name, values in sketches.items()}
        return _sizes(basis, numbers_of(residual, layer), sketch) | _smoothness_of_directions(basis)

    columns, directions = _of_layers(of_layer, means, leading, grid)
    return columns | {DIRECTIONS: directions}


def positional_shape(means: State) -> tuple[dict[str, Jackknifed], Tensor]:
    """Compute the ranks and `low_frequency` of a text, which need the means alone, and the directions."""
    return _of_layers(lambda _, basis: _smoothness_of_directions(basis), means, 1, None)


def _of_layers(
    numbers: Callable[[int, GroupedBasis], dict[str, Jackknifed]],
    means: State,
    leading: int,
    grid: Grid | None,
) -> tuple[dict[str, Jackknifed], Tensor]:
    """Compute ranks and further numbers of all layers, and the directions without each group of contexts."""
    most = min(SCREENOT_RANK, positions_read(means) - leading, means["position_sum"].shape[-1])

    def of_layer(layer: int) -> tuple[dict[str, Jackknifed], Tensor]:
        basis = grouped_basis(means, layer, leading, grid)
        of_ranks, axes = ranks(basis)
        directions = axes.new_full((GROUPS, most, axes.shape[-1]), math.nan)
        if len(axes) == GROUPS:  # else there is no error to be had
            directions[:, : axes.shape[1]] = axes
        return of_ranks | numbers(layer, basis), directions.half()

    rows, directions = zip(*parallel_map(of_layer, list(range(len(means["contexts"])))), strict=True)
    return unbiased.together(rows), torch.stack(directions, dim=1)


def _sizes(basis: GroupedBasis, moment: Float64[Tensor, 3], sketch: State) -> dict[str, Jackknifed]:
    """Compute one layer's sizes, given `moment_numbers` of all tokens, and a sketch of these moments by groups."""
    groups, readers = len(basis.p), basis.readers.sum(dim=0)
    # ‖M‖₂² is the largest eigenvalue of the centred moments.
    sketched = unbiased.leaving_out(lambda used: sketched_moment(sketch, basis.groups, used), groups)
    exact, (_, trace, norm) = moment[:2], moment
    # A sketch misses a part of the largest eigenvalue: what it says is how that varies.
    moments = Jackknifed(exact, sketched.without * exact / sketched.value)
    whole, variance = moments[0].corrected(), moments[1]
    energy = Jackknifed(basis.squares.value @ readers, basis.squares.without @ readers)
    scale = basis.stretches.mean(readers.sqrt()[None])[0]
    if len(scale) <= basis.p.shape[2]:
        of_tiled = basis.products.scaled(scale)
    else:
        of_tiled = PairProducts.of((basis.summed * scale[:, None]).mT)
    square = of_tiled.largest_square()
    # Two standard errors of ‖P‖₂² where there is no position, from differences of neighbouring groups.
    differences = of_tiled.of_differences()
    pairs = len(differences.upper) / (len(of_tiled.upper) or math.nan)
    noise = 2 * differences.largest_square().error * math.sqrt(pairs)
    return {
        "stable_rank": unbiased.combined(torch.div, energy, square).where(square.value > noise),
        "relative_norm": unbiased.combined(torch.div, square, whole).root(),
        "relative_norm_floor": Jackknifed.constant((noise / whole.value).sqrt(), groups),
        "position_energy": unbiased.combined(torch.div, energy, variance),
        "incoherence_random": Jackknifed.constant(norm / trace, groups),
        **_shares("pp_low_frequency", basis, basis.products.energy()),
    }


def _smoothness_of_directions(basis: GroupedBasis) -> dict[str, Jackknifed]:
    lengths, near = squared_lengths(basis.squares, basis.positions, basis.grid)
    scales = torch.where(near.value > 0, lengths.clamp_min(1e-300).rsqrt(), 0.0)
    whole = basis.products.energy(basis.stretches.mean(scales))
    return _shares("low_frequency", basis, whole, scales)


def sketched_moment(sketch: State, groups: Sequence[int], used: Float[Tensor, " groups"]) -> Float[Tensor, 2]:
    """Return the largest eigenvalue and the trace of the used groups' second moment, as of the tokens of all."""
    mean, counts, directions = sketch["mean"][groups], sketch["count"][groups], sketch["directions"]
    weight = used * counts
    difference = mean - weight @ mean / weight.sum()
    between = difference.T @ (weight[:, None] * (difference @ directions))
    factor = low_rank(torch.tensordot(used, sketch["sketch"][groups], dims=1) + between, directions)
    largest = torch.linalg.eigvalsh(factor.T @ factor)[-1]
    trace = used @ sketch["trace"][groups] + weight @ difference.square().sum(dim=1)
    return torch.stack([largest, trace]) * (counts.sum() / weight.sum())


def ranks(basis: GroupedBasis) -> tuple[dict[str, Jackknifed], Float[Tensor, "groups directions width"]]:
    """Compute ScreeNOT's rank, how many of its directions other groups show, and the directions without each group."""
    p, weights = basis.summed, basis.stretches.mean(basis.readers).unsqueeze(-1)
    sums, counts = (p * weights).sum(dim=0), weights.sum(dim=0)
    groups, bound = len(p), screenot_bound(p[0])
    others = (
        (sums - own * weight) / (counts - weight).clamp_min(1) for own, weight in zip(p, weights, strict=True)
    )
    every = (sums / counts.clamp_min(1), *others)
    values, (_, *axes) = zip(*(by_gram_matrix(matrix, SCREENOT_RANK) for matrix in every), strict=True)
    rows, width = sums.shape
    of_all, *without = screenot_of_values(torch.stack(values), (rows, width), bound).rank.double()
    screenot = Jackknifed(of_all, torch.stack(without))
    products = [
        ((own @ directions) * (other @ directions)).sum(dim=0)
        for own, other, directions in zip(p, every[1:], axes, strict=True)
    ]
    energy = torch.stack(products)[:, : int(screenot.value)]

    def replicated(used: Float[Tensor, " groups"]) -> Tensor:
        some = energy[used > 0]
        squares = (some - some.mean(dim=0)).square().sum(dim=0)
        error = (squares / (len(some) * (len(some) - 1) or math.nan)).sqrt()
        return (some.mean(dim=0) > REPLICATED * error).sum().double()

    return {"rank": unbiased.leaving_out(replicated, groups), "rank_screenot": screenot}, torch.stack(axes).mT


def screenot_bound(p: Float[Tensor, "positions width"]) -> int:
    """Bound the rank given to ScreeNOT: it needs 2k + 1 singular values below min(T − 1, d)."""
    return max(min(SCREENOT_RANK, (min(p.shape) - 2) // 2), 0)


def squared_lengths(
    own: Jackknifed, positions: Int[Tensor, " positions"], grid: Grid | None = None
) -> tuple[Float[Tensor, "uses positions"], Jackknifed]:
    """Improve `own`, ‖pos_t‖² of each position, from all groups and without each; and give its mean over neighbours.

    By empirical Bayes: each is drawn towards the mean of its neighbours by as much as its variance is of the spread
    about that mean; on a grid, which has no one line of neighbours, towards the mean of all.
    """
    place = positions.double()
    first, last = torch.searchsorted(place, place / NEAR), torch.searchsorted(place, place * NEAR, right=True)
    if grid:
        first, last = torch.zeros_like(first), torch.full_like(last, len(place))

    def around(values: Tensor) -> Tensor:
        sums = functional.pad(values.cumsum(dim=-1), (1, 0))
        return (sums[..., last] - sums[..., first]) / (last - first)

    smooth = Jackknifed(around(own.value), around(own.without))

    def drawn(value: Tensor, mean: Tensor) -> Tensor:
        spread = ((value - mean).square() - own.error.square()).mean().clamp_min(0)
        weight = spread / (spread + own.error.square()).clamp_min(1e-300)
        return mean + weight * (value - mean)

    lengths = unbiased.combined(drawn, own, smooth)
    of_uses = torch.cat([lengths.value[None], lengths.without])
    # One that is not above 0 by itself has the mean of its neighbours.
    of_uses = torch.where(of_uses > 0, of_uses, torch.cat([smooth.value[None], smooth.without]))
    return torch.where(of_uses > 0, of_uses, smooth.value), smooth


def _shares(
    name: str, basis: GroupedBasis, whole: Jackknifed, scales: Float[Tensor, "uses positions"] | None = None
) -> dict[str, Jackknifed]:
    """Compute the shares of `whole`, the energy of P Pᵀ, in its lowest frequencies, rows scaled for each use."""
    rows, grid = basis.p.shape[1], basis.grid
    lowest = basis.low.unsqueeze(0)
    if scales is not None:
        transform = lowest_frequencies(torch.eye(rows, dtype=torch.float64), max(CUTOFFS), grid)
        lowest = (transform * scales[:, None]).flatten(0, 1) @ basis.p
        lowest = lowest.unflatten(1, (len(scales), -1)).transpose(0, 1)
    corners = unbiased.corner_energies(lowest, lowest, [frequencies_below(k, rows, grid) for k in CUTOFFS])
    shares = unbiased.combined(torch.div, corners, whole).corrected().where(bool(whole.above_noise()))
    return {f"{name}_{k}": shares[place] for place, k in enumerate(CUTOFFS)}


def positional_heads(
    basis: GroupedBasis,
    w_q: Float[Tensor, "heads width head_width"],
    w_k: Float[Tensor, "heads width head_width"],
) -> tuple[Float64[Tensor, " heads"], Jackknifed]:
    """Compute a layer's argmax property, (H), and shares of frequencies for `CUTOFFS`, (H, cutoffs).

    The argmax property is that of P̃ = pos + μ and W = W_q W_kᵀ (eq. 8, appendix D.2); frequencies are of P W Pᵀ, P the
    centred pos, not normalised (Table 3). Both are of products of different groups: a position's noise times itself
    would raise the diagonal. Grouped keys are repeated in `w_k`.
    """
    rows = basis.p.shape[1]
    chosen = one_of_each_stretch(rows, MOST_ROWS)
    query, mean, query_sums, query_low = _projected(basis, w_q, None if len(chosen) == rows else chosen)
    key, _, key_sums, key_low = _projected(basis, w_k)
    tilde = query + mean  # of keys the mean is the same in a row
    counts = [frequencies_below(k, rows, basis.grid) for k in CUTOFFS]
    corners = unbiased.corner_energies(query_low.unsqueeze(0), key_low.unsqueeze(0), counts)

    def of_head(head: int) -> tuple[Jackknifed, Tensor]:
        argmax = argmax_property(tilde[head], key[head], chosen)
        return unbiased.product_energy(query_sums[head], key_sums[head]), argmax

    energies, properties = zip(*parallel_map(of_head, list(range(len(w_q)))), strict=True)
    energy = unbiased.stacked(energies)
    shares = unbiased.combined(lambda corner, whole: corner / whole[:, None], corners, energy).corrected()
    return torch.stack(properties), shares.where(energy.above_noise()[:, None])


def _projected(basis: GroupedBasis, w: Tensor, rows: Tensor | None = None) -> tuple[Tensor, ...]:
    """Project P, (H, G, rows, d_h) of some rows or all, the mean, sums over stretches and the lowest frequencies.

    In float32: nothing is subtracted before the products. Grouped keys that are repeated are projected once.
    """
    other = torch.cat([torch.ones(1, dtype=torch.bool), (w[1:] != w[:-1]).flatten(1).any(dim=1).cpu()])
    distinct, repeated = w[other].double(), other.cumsum(dim=0) - 1
    flat = distinct.transpose(0, 1).flatten(1).float()

    def projected(p: Tensor) -> Tensor:
        return (p.to(flat) @ flat).unflatten(-1, (len(distinct), -1)).permute(2, 0, 1, 3)

    p = projected(basis.p if rows is None else basis.p[:, rows])
    mean = (basis.mean.to(distinct) @ distinct).unsqueeze(2).to(p)
    summed = p if rows is None and basis.summed is basis.p else projected(basis.summed)
    return tuple(of_heads[repeated] for of_heads in (p, mean, summed, projected(basis.low)))


@gives(
    _of_head(
        "argmax_property",
        "Share of positions t whose row of P̃WP̃ᵀ, P̃ = pos + mean without the layer's norm, is largest at t itself "
        "among t' ≤ t. Above 0.8, position alone makes the head attend at or near the query.",
        "Positions t ≥ 1 and 1 ≤ t' ≤ t, a tie goes to the earlier; W = W_QK without norm, bias or rotation, of the "
        "projections where `spectrum_of` says so. P̃WP̃ᵀ is the mean of products of different groups of contexts; where "
        "its noise hides neighbours from each other, the share is near that of chance, (1 + ½ + … + 1/T)/T.",
        f"{SONG}, eq. 8 and Fig. 25",
    ),
    *_smoothness(
        partial(_of_head, error=column.LEFT_OUT, offered=False),
        "pwp_low_frequency",
        "Energy of PWPᵀ in its {k} lowest frequencies: near 1, neighbouring positions get similar logits.",
        "Of its 2-D DCT, P = pos, W = W_QK, by products of four groups of contexts; of more than 256 positions the "
        "whole energy is that of sums over as many stretches. Empty where the energy of P W Pᵀ is at the noise floor.",
        f"{SONG}, Table 3",
        "PWPᵀ low freq.",
        "smoothness of PWPᵀ",
        offered=True,
    ),
)
def positional_columns(weights: State) -> dict[str, Sequence[float] | Jackknifed]:
    """Return the columns that `weights_pass` has made by `positional_heads`, L · H values each."""
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

    `chosen`: the positions of the rows, ascending; None: they are all. Q Kᵀ is the mean of the products of different
    groups, (ΣQ_g)(ΣK_g)ᵀ − ΣQ_gK_gᵀ. A tie goes to the earlier column, so that a constant row fails; NaN with one
    group.
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

    Of the whole matrix, unmasked, as the published ratios; biases and rotations are those within q and k. The paper
    leaves position 0 out: cut it off before. With grouped heads, key head g serves the query heads
    `g·G … (g+1)·G − 1`. `grid`: rows and columns of the positions, where they lie in a plane.
    """
    key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    return product_low_frequency_ratio(query, key, CUTOFFS, grid)


@gives(
    *_smoothness(
        partial(_of_head, offered=False),
        "qk_low_frequency",
        "Share of the energy of the logits on this text, unmasked, in their {k} lowest frequencies.",
        "Of the 2-D DCT of all query-key products, biases and rotation within, mean over the contexts of "
        "`split_contexts`, position 0 left out.",
        f"{SONG}, Table 3",
        "QK low freq.",
        "smoothness of the logits",
        offered=True,
    )
)
def qk_frequency_columns(shares: State) -> dict[str, list[float]]:
    """Return the means over the sample of a `SharesPass`, L · H values each."""
    ratios = shares["low_frequency"].mean(dim=1)
    return {f"qk_low_frequency_{k}": ratios[..., i].flatten().tolist() for i, k in enumerate(CUTOFFS)}
