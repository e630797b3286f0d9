"""Geometry of position and context, from the means and second moments of hidden states.

One row a residual layer; all over positions 1 … T−1, position 0 apart, and with it the special tokens that a
tokenizer puts behind every text: T counts without them. Of contexts of unlike lengths, what is of tokens is over all
tokens, and the positional basis ends where too few contexts reach (`positions_read`). Of an image all `leading` tokens
before its patches are apart, and the patches are a `grid` of rows and columns, with frequencies in two dimensions.
Source: Song & Zhong 2024.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.special import betaincc
from torch import Tensor

from theodolite.accumulate.means import Sample, decomposed_means
from theodolite.accumulate.outliers import PUBLISHED
from theodolite.accumulate.sums import State
from theodolite.corpus.groups import GROUPS
from theodolite.judging import Criterion
from theodolite.measure.clusters import CLUSTER_COLUMNS, clusters
from theodolite.measure.column import HALVES, SHARE, SIGNED, Array, Column, gives
from theodolite.measure.publications import BAO, SONG, ZHANG
from theodolite.theory.singular import largest_singular_value, screenot_of_values
from theodolite.theory.smoothness import (
    Grid,
    frequencies_below,
    grid_frequencies,
    lowest_frequencies,
    unit_rows,
)

SCREENOT_RANK = 20
"""Upper bound on the rank given to ScreeNOT, as published."""

CUTOFFS = (1, 3, 5, 10)
"""K of the low-frequency ratios, as published (Table 4)."""

SHOWN_CUTOFF = 10
"""The one that maps, checks and summaries show."""

OUTLIER_SHARE = PUBLISHED.outlier_tokens
"""A dimension is an outlier dimension where at least this share of tokens exceeds 6 (Dettmers et al. 2022)."""

LEAST_SHARE = 0.1
"""Of the contexts must reach a position, where they are of unlike lengths: its mean would be that of a few contexts."""

SHOWN_SINGULAR_VALUES = 60
SHOWN_FREQUENCIES = 10
SHOWN_POSITIONS = 64
SHOWN_CONTEXTS = 64

Columns = dict[str, list[float]]


_layer = partial(Column, "layers", error=HALVES)
_share = partial(_layer, range=SHARE)
_DEPTH = f"{SONG}, Fig. 8"


def _smoothness(
    name: str, title: str, formula: str, source: str, shown: str = "", healthy: Criterion | None = None
) -> tuple[Column, ...]:
    return tuple(
        _share(
            f"{name}_{k}",
            "How smoothly the positional basis changes with position: 1 smooth, 0 noise. Energy in the "
            f"{k} × {k} lowest frequencies.",
            formula,
            source,
            shown if shown and k == SHOWN_CUTOFF else f"{title} K={k}",
            healthy=healthy if k == SHOWN_CUTOFF else None,
            short="smooth" if shown and k == SHOWN_CUTOFF else "",
        )
        for k in CUTOFFS
    )


def _apart(name: str, title: str, of: str, when: str = "", short: str = "") -> tuple[Column, Column]:
    """Declare the columns of tokens that are told apart."""
    massive = f"Massive activations at {of}, summed over the contexts."
    return (
        _layer(
            f"norm_{name}", f"Mean norm ‖h‖₂ of the hidden states of {of}.", when, _DEPTH, f"norm, {title}"
        ),
        _layer(f"massive_activations_{name}", massive, when, ZHANG, f"massive, {title}", short=short),
    )


LAYER_COLUMNS = (
    Column(
        "layers",
        "layer",
        "Residual layer: 0 is the input of the first block, ℓ the stream after block ℓ, before any final norm.",
        short="layer",
    ),
    _layer(
        "rank",
        "Number of directions of the positional basis that stand out from noise (ScreeNOT).",
        "P (T − 1 × d), k = 20, imputation (k is smaller where P is).",
        f"ScreeNOT; {SONG}, Table 4",
        "positional rank",
        short="rank",
        healthy=Criterion(
            "more than",
            0.0,
            "mean ScreeNOT rank: directions of the positional basis that stand out from noise",
        ),
    ),
    _layer(
        "stable_rank",
        "Number of directions of the positional basis, weighted by energy.",
        "‖P‖_F² / ‖P‖₂².",
        f"{SONG}, Table 5",
        range=(1.0, math.inf),
    ),
    _share(
        "relative_norm",
        "The largest singular value of the positional basis over that of all centred hidden states.",
        "‖P tiled over contexts‖₂ / ‖M‖₂, M all centred hidden states; the error is from a sketch of 32 directions.",
        f"{SONG}, Table 6",
        short="rel.",
    ),
    *_smoothness(
        "low_frequency",
        "low freq.",
        "Share of the energy of the 2-D DCT of the normalised Gram matrix of P.",
        f"{SONG}, Tables 2 and 3",
        "positional smoothness",
        healthy=Criterion(
            "at least",
            0.60,
            "share of the Gram matrix's energy in the 10 lowest frequencies; models of addition: about 0.5",
        ),
    ),
    *_smoothness(
        "pp_low_frequency",
        "PPᵀ low freq.",
        "The same share for P Pᵀ, whose rows are not normalised.",
        f"{SONG}, Table 3",
    ),
    _share(
        "incoherence_mean",
        "Mean |cosine| between positional and context vectors. Near 0: nearly orthogonal subspaces.",
        source=f"{SONG}, section 5 and Table 1",
        title="incoherence, mean",
        floor="incoherence_random",
        short="incoh.",
        healthy=Criterion("at most", 0.30, "mean |cosine| of position and context; GPT-2: 0.051"),
    ),
    _share(
        "incoherence_max",
        "Largest |cosine| between a positional and a context vector.",
        source=f"{SONG}, section 5",
        title="incoherence, max",
        floor="incoherence_max_random",
    ),
    _share(
        "incoherence_random",
        "Mean |cosine| of random directions of the same width.",
        "Γ(d/2) / (√π · Γ((d+1)/2)); its standard error is 0.",
        "a closed form",
        "incoherence, random",
    ),
    _share(
        "incoherence_max_random",
        "Expected largest |cosine| of as many pairs of random directions.",
        "The pairs are taken as independent; its standard error is 0.",
        "ours",
        "incoherence, random max",
    ),
    *(
        _share(
            f"similarity_{where}",
            f"Mean |cosine| between context vectors with {labels}.",
            "Empty where there are fewer than two labels.",
            f"{SONG}, Table 1",
            short=where,
        )
        for where, labels in (("within", "the same label"), ("between", "different labels"))
    ),
    _layer("norm", "Mean norm ‖h‖₂ of the hidden states.", source=_DEPTH, short="norm"),
    *_apart("first", "first token", "the first token", short="mass."),
    *_apart(
        "last", "end token", "the special tokens that end every context", "Only where there are such tokens."
    ),
    *_apart(
        "registers",
        "registers",
        "the tokens between [CLS] and the patches",
        "Only of images with such tokens.",
    ),
    _layer(
        "cosine_previous",
        "Mean cosine between a token's hidden states before and after a block. Near 1: the block does little.",
        source=_DEPTH,
        title="cosine to previous layer",
        range=SIGNED,
    ),
    _share(
        "rank_collapse",
        "How far a context's tokens are from being one vector; 0 is collapsed.",
        "Mean over contexts of ‖X − 1x̄ᵀ‖_F / ‖X‖_F.",
        f"{BAO}, section 5",
        "rank-collapse residual",
        short="resid.",
        healthy=Criterion("at least", 0.10, "residual ‖X − 1x̄ᵀ‖/‖X‖: a layer's tokens are nearly one vector"),
    ),
    _layer(
        "massive_activations",
        "Values over 100 and over 1000 × the layer's median, summed over the contexts.",
        "|x| > 100 and > 1000 × the median magnitude of the context at this layer.",
        f"{ZHANG}, section 2",
        healthy=Criterion("at most", 0.0, "massive activations of a layer after the first token"),
    ),
    _layer(
        "outlier_dimensions",
        "Feature dimensions in which |x| ≥ 6 for at least 6 % of the tokens.",
        "Of this layer; that a quarter of the layers agree, the rest of the published rule, is for `find_outliers`.",
        f"{ZHANG}, section 1",
        short="outl.",
    ),
    *CLUSTER_COLUMNS,
)
"""What `geometry` gives a number of, and `uncertainty.standard_errors` the standard error."""


@gives(
    *LAYER_COLUMNS,
    Array("context_basis", "(N, S, d)", "ctx, the mean of each kept context less μ, in each layer."),
    Array("context_label", "(S)", "The label of each kept context, −1 for none."),
    Array("context_cluster", "(N, S)", "The k-means cluster of each kept context, −1 for none."),
    Array("positional_pca", "(N, T, 3)", "pos on the principal directions of P."),
    Array("cvec_pca", "(N, Q, 3)", "Single tokens less μ and pos, on the principal directions of P."),
    Array("cvec_position", "(Q)", "The positions of these tokens."),
    Array("singular_values", "(N, ≤ 60)", "Singular values of P, decreasing."),
    Array("gram", "(N, n + m, n + m)", "Cosines of n positions and m contexts."),
    Array("gram_position", "(n)", "These positions."),
    Array("gram_label", "(m)", "The labels of these contexts."),
    Array("dct", "(N, 10, 10)", "Magnitudes of the lowest frequencies of the normalised Gram matrix of P."),
    Array("outlier_share", "(N, d)", "Share of tokens with |x| ≥ 6 in each dimension."),
)
def geometry(
    means: State,
    residual: State,
    outliers: State,
    sample: Sample,
    labels: Int[Tensor, " sampled"],
    leading: int = 1,
    grid: Grid | None = None,
) -> dict[str, Any]:
    """Compute the geometry columns of the layers table (`uncertainty.py` has their standard errors) and their arrays.

    Args:
        means, residual, outliers: states of `Means`, `SecondMoments` (of the residual stream) and `OutlierCounts`.
        sample: which contexts and tokens `means` kept.
        labels: label of each kept context, −1 for none.
        leading: tokens apart before the others.
        grid: rows and columns of the others; None: they lie in a line.
    """
    mean, pos, ctx = decomposed_means(means, leading=leading)
    tokens = means["token"] - mean[:, None] - pos[:, sample.token_position]
    pos = pos[:, : positions_read(means)]
    positions = pos.shape[1] - leading
    readers = means["readers"].sum(dim=1)
    everything = torch.ones(GROUPS, dtype=torch.float64)
    baseline = random_maximum(pos.shape[-1], positions * len(labels))
    found: list[Tensor] = []
    rows: list[dict[str, float]] = []
    arrays: dict[str, list[Tensor]] = {}
    order = _ordered_by_label(labels)
    shown = torch.linspace(leading, pos.shape[1] - 1, min(SHOWN_POSITIONS, positions)).round().long()
    for layer in range(len(mean)):
        p = pos[layer, leading:]
        unit, spectrum = unit_rows(p), torch.linalg.svd(p, full_matrices=False)
        counts = readers[layer, leading : pos.shape[1]]
        # ‖M‖₂² is the largest eigenvalue of the centred moments.
        whole = float(largest_singular_value(residual["moment"][layer].unsqueeze(0), tolerance=1e-10)[0])
        row: dict[str, float] = {
            "rank": float(screenot_of_values(spectrum[1], (len(p), p.shape[1]), screenot_bound(p)).rank)
        }
        row |= positional(p, counts, whole, grid, spectrum[1].square())[0]
        row |= contextual(p, ctx[layer], labels) | {"incoherence_max_random": baseline}
        row |= residual_columns(means, outliers, layer, everything, leading)
        numbers, cluster = clusters(ctx[layer], labels)
        rows.append(row | numbers)
        found.append(cluster)
        for name, value in _pictures(
            pos[layer], ctx[layer], unit, spectrum, tokens[layer], shown, order, grid
        ).items():
            arrays.setdefault(name, []).append(value)
    stacked = {name: torch.stack(values) for name, values in arrays.items()}
    stacked |= {
        "context_basis": ctx.float(),
        "context_label": labels,
        "context_cluster": torch.stack(found),
        "cvec_position": sample.token_position,
        "gram_position": shown,
        "gram_label": labels[order],
        "outlier_share": (outliers["outlier"].sum(dim=1) / readers[:, leading:].sum(dim=1)[:, None]).float(),
    }
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {"layer": list(range(len(rows)))} | columns | stacked


@gives(
    Array("mean", "(N, d)", "μ, the mean hidden state of each residual layer."),
    Array("positional_basis", "(N, T, d)", "pos, the mean of each position less μ."),
    Array("positional_basis_last", "(N, trailing, d)", "The same of special tokens that end every context."),
)
def position_arrays(
    mu: Float[Tensor, "layers width"],
    pos: Float[Tensor, "layers positions width"],
    means: State,
    trailing: int,
) -> dict[str, Tensor]:
    """Return the means by position of `accumulate.means.decomposed_means`, as far as enough contexts reach."""
    end = pos.shape[1] - trailing
    arrays = {"mean": mu, "positional_basis": pos[:, : positions_read(means)].float()}
    return arrays | ({"positional_basis_last": pos[:, end:].float()} if trailing else {})


def positions_read(means: State) -> int:
    """Count the positions, from 0 on, that `LEAST_SHARE` of the contexts have."""
    readers = means["readers"][0].sum(dim=0)
    return int((readers >= LEAST_SHARE * readers[0]).sum())


def positional(
    p: Float[Tensor, "positions width"],
    readers: Float[Tensor, " positions"],
    largest: float,
    grid: Grid | None = None,
    squares: Float[Tensor, " values"] | None = None,
) -> tuple[dict[str, float], Float[Tensor, " values"]]:
    """Compute the columns of the positional basis P but its rank, and its squared singular values, decreasing.

    Args:
        p: the positional basis, (T−1, d).
        readers: how many contexts each position's mean is of.
        largest: ‖M‖₂² of the centred hidden states M of those contexts.
        grid: rows and columns of the positions; None: they lie in a line.
        squares: known already; None: they are those of the smaller Gram matrix, without singular vectors.
    """
    rows, columns = p.shape
    unit = unit_rows(p)
    gram = p @ p.T if rows <= columns else p.T @ p
    if squares is None:
        squares = torch.linalg.eigvalsh(gram).flip(0).clamp_min(0)
    lengths = torch.linalg.vector_norm(p, dim=1)
    if rows <= columns:  # the energy of the cosines, without the larger matrix
        weights = torch.where(lengths > 0, lengths.square().reciprocal(), 0.0)
        whole = weights @ gram.square() @ weights
    else:
        whole = (unit.T @ unit).square().sum()
    low = lowest_frequencies(unit, max(CUTOFFS), grid)
    energy = (low @ low.T).square().cumsum(0).cumsum(1)
    lowest = {k: frequencies_below(k, rows, grid) - 1 for k in CUTOFFS}
    row = {
        "stable_rank": float(squares.sum() / torch.where(squares[0] > 0, squares[0], 1.0)),
        "relative_norm": math.sqrt(tiled_norm(p, squares, readers) / largest) if largest > 0 else math.nan,
        **{f"low_frequency_{k}": float(energy[lowest[k], lowest[k]] / whole) for k in CUTOFFS},
        **product_frequencies(p, squares, grid),
    }
    return row, squares


def tiled_norm(
    p: Float[Tensor, "positions width"],
    squares: Float[Tensor, " values"],
    readers: Float[Tensor, " positions"],
) -> float:
    """Compute ‖P tiled over contexts‖₂²: C · ‖P‖₂², or where not all C have every position ‖diag(√readers) P‖₂²."""
    if (readers == readers[0]).all():
        return float(readers[0] * squares[0])
    return float(torch.linalg.matrix_norm(p * readers.sqrt()[:, None], ord=2) ** 2)


def product_frequencies(
    p: Float[Tensor, "positions width"], squares: Float[Tensor, " values"], grid: Grid | None = None
) -> dict[str, float]:
    """Compute pp_low_frequency_1, _3, _5, _10 of P Pᵀ, rows not normalised (Table 3); `squares` are its eigenvalues."""
    low = lowest_frequencies(p, max(CUTOFFS), grid)
    energy = (low @ low.T).square().cumsum(0).cumsum(1) / squares.square().sum()
    lowest = (frequencies_below(k, len(p), grid) - 1 for k in CUTOFFS)
    return {f"pp_low_frequency_{k}": float(energy[i, i]) for k, i in zip(CUTOFFS, lowest, strict=True)}


def screenot_bound(p: Float[Tensor, "positions width"]) -> int:
    """Bound the rank given to ScreeNOT: it needs 2k + 1 singular values below min(T − 1, d)."""
    return max(min(SCREENOT_RANK, (min(p.shape) - 2) // 2), 0)


def contextual(
    p: Float[Tensor, "positions width"], ctx: Float[Tensor, "sampled width"], labels: Int[Tensor, " sampled"]
) -> dict[str, float]:
    """Compute incoherence of positional and context basis, and similarity of contexts within and between labels."""
    direction = torch.nn.functional.normalize(ctx, dim=-1)
    incoherence = (torch.nn.functional.normalize(p, dim=-1) @ direction.T).abs()
    similarity = (direction @ direction.T).abs()
    pairs = torch.ones_like(similarity, dtype=torch.bool).triu(1) & (labels >= 0) & (labels[:, None] >= 0)
    same = labels == labels[:, None]
    return {
        "incoherence_mean": _mean(incoherence),
        "incoherence_max": float(incoherence.max()) if incoherence.numel() else math.nan,
        "incoherence_random": random_cosine(p.shape[-1]),
        "similarity_within": _mean(similarity[pairs & same]),
        "similarity_between": _mean(similarity[pairs & ~same]),
    }


def random_cosine(width: int) -> float:
    """Compute E|cos| of two random directions of R^d: Γ(d/2) / (√π · Γ((d+1)/2))."""
    return math.exp(math.lgamma(width / 2) - math.lgamma((width + 1) / 2)) / math.sqrt(math.pi)


def random_maximum(width: int, pairs: int) -> float:
    """Compute E max |cos| over so many pairs of random directions of R^d, taken as independent of each other.

    ∫₀¹ 1 − F(x)ⁿ dx with F(x) = P(|cos| ≤ x), the regularised incomplete beta function I_{x²}(½, (d−1)/2). The
    (T−1)·S pairs of T−1 positions and S contexts share their vectors, and so are independent two by two only;
    that makes their expected maximum a little smaller (by at most 1 % up to 60 positions and 40 contexts).
    """
    if width == 1 or not pairs:
        return 1.0 if pairs else math.nan
    edges = np.linspace(0, 1, 20_001)
    x = (edges[1:] + edges[:-1]) / 2
    below = np.exp(pairs * np.log1p(-np.minimum(betaincc(0.5, (width - 1) / 2, x**2), 1 - 1e-16)))
    return float(np.mean(1 - below))


def residual_columns(
    means: State, outliers: State, layer: int, chosen: Float[Tensor, " groups"], leading: int = 1
) -> dict[str, float]:
    """Compute means and counts over the groups of contexts that are `chosen` (weights of 0 and 1)."""
    contexts = float(chosen @ means["contexts"][layer])
    tokens = float(chosen @ means["readers"][layer, :, leading:].sum(dim=1))

    def mean(name: str, count: float = contexts) -> float:
        return float(chosen @ means[name][layer]) / count

    massive, first, outlier = (
        chosen @ outliers[name][layer] for name in ("massive", "massive_first", "outlier")
    )
    columns = {
        "norm": mean("norm_sum", tokens),
        "norm_first": mean("norm_first_sum"),
        "cosine_previous": mean("cosine_sum", tokens) if layer else math.nan,
        "rank_collapse": mean("collapse_sum"),
        "massive_activations": float(massive.sum()),
        "massive_activations_first": float(first.sum()),
        "outlier_dimensions": float((outlier / tokens >= OUTLIER_SHARE).sum()),
    }
    for ending in ("last", "registers"):
        if f"norm_{ending}_sum" in means:
            columns[f"norm_{ending}"] = mean(f"norm_{ending}_sum")
            apart = chosen @ outliers[f"massive_{ending}"][layer]
            columns[f"massive_activations_{ending}"] = float(apart.sum())
    return columns


def _pictures(
    pos: Float[Tensor, "positions width"],
    ctx: Float[Tensor, "sampled width"],
    unit: Tensor,
    spectrum: tuple[Tensor, Tensor, Tensor],
    cvec: Float[Tensor, "tokens width"],
    shown: Tensor,
    order: Tensor,
    grid: Grid | None,
) -> dict[str, Tensor]:
    """Return what one layer's figures need: principal directions of P, the normalised Gram matrix, its DCT."""
    _, values, directions = spectrum
    axes = torch.zeros(3, pos.shape[-1], dtype=pos.dtype)
    axes[: min(3, len(directions))] = directions[:3]
    coordinates = pos @ axes.T
    # The sign of a principal direction is arbitrary: let the farthest position have a positive coordinate.
    apart = coordinates[len(pos) - len(unit) :]
    farthest = apart.abs().argmax(dim=0)
    sign = apart.gather(0, farthest[None]).sign()
    sign[sign == 0] = 1
    both = torch.nn.functional.normalize(torch.cat([pos[shown], ctx[order]]), dim=-1)
    shown_dct = torch.zeros(SHOWN_FREQUENCIES, SHOWN_FREQUENCIES, dtype=torch.float64)
    if grid is None:
        low = lowest_frequencies(unit, SHOWN_FREQUENCIES)
        lowest = (low @ low.T).abs()
    else:  # of the transform's four dimensions the diagonal: how much of P̄ there is of each pair of frequencies
        lowest = grid_frequencies(unit, SHOWN_FREQUENCIES, grid).square().sum(dim=-1)
    shown_dct[: lowest.shape[0], : lowest.shape[1]] = lowest
    return {
        "positional_pca": (coordinates * sign).float(),
        "cvec_pca": (cvec @ axes.T * sign).float(),
        "singular_values": values[:SHOWN_SINGULAR_VALUES],
        "gram": (both @ both.T).float(),
        "dct": shown_dct,
    }


def _ordered_by_label(labels: Int[Tensor, " sampled"]) -> Tensor:
    """Order kept contexts for the Gram matrix: grouped by label, the most frequent labels first."""
    values, inverse, counts = labels.unique(return_inverse=True, return_counts=True)
    frequency = torch.where(values < 0, -1, counts)[inverse]
    key = sorted(range(len(labels)), key=lambda i: (-int(frequency[i]), int(labels[i]), i))
    return torch.tensor(key[:SHOWN_CONTEXTS], dtype=torch.int64)


def _mean(values: Tensor) -> float:
    return float(values.mean()) if values.numel() else math.nan
