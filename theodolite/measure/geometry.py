"""The hidden states of each residual layer: norms, how much a block changes them, massive activations, and figures.

Position 0 is apart, and with it the special tokens that a tokenizer puts behind every text; so are tokens with massive
activations. Of an image all `leading` tokens before its patches are apart. Source: Song & Zhong 2024.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from theodolite.accumulate.means import Sample, decomposed_means
from theodolite.accumulate.outliers import MASSIVE_COUNTS, PUBLISHED
from theodolite.accumulate.sums import State, part_of
from theodolite.judging import Criterion
from theodolite.measure import column
from theodolite.measure.column import Array, Column, array_without, gives, table_of
from theodolite.measure.position import positions_read
from theodolite.measure.publications import BAO, SONG, ZHANG
from theodolite.theory.outliers import typical_magnitude
from theodolite.theory.singular import by_gram_matrix
from theodolite.theory.unbiased import Jackknifed, combined, ratio

OUTLIER_SHARE = PUBLISHED.outlier_tokens
"""A dimension is an outlier dimension where at least this share of tokens exceeds 6 (Dettmers et al. 2022)."""

SHOWN_SINGULAR_VALUES = 60

_layer = partial(Column, "layers", group=column.STREAM, error=column.LEFT_OUT)
_share = partial(_layer, range=column.SHARE)
_DEPTH = f"{SONG}, Fig. 8"
_outlier = partial(Column, "outliers")
_massive = partial(_outlier, source=f"{ZHANG}, section 2")
_counted = partial(_massive, error=column.LEFT_OUT)
_token = partial(Column, "massive")
_COUNTED = ("massive", "massive_first")


def _apart(name: str, title: str, of: str, when: str = "", short: str = "") -> tuple[Column, Column]:
    """Declare the columns of tokens that are told apart."""
    massive = f"Massive activations at {of}, summed over the contexts."
    return (
        _layer(
            f"norm_{name}", f"Mean norm ‖h‖₂ of the hidden states of {of}.", when, _DEPTH, f"norm, {title}"
        ),
        _layer(f"massive_activations_{name}", massive, when, ZHANG, f"massive, {title}", short=short),
    )


@gives(
    Column(
        "layers",
        "layer",
        "Residual layer: 0 is the input of the first block, ℓ the stream after block ℓ, before any final norm.",
        short="layer",
    ),
    _layer("norm", "Mean norm ‖h‖₂ of the hidden states.", source=_DEPTH, short="norm"),
    *_apart("first", "first token", "the first token", short="mass."),
    *_apart(
        "last", "end token", "the special tokens that end every context", "Only where there are such tokens."
    ),
    _layer(
        "cosine_previous",
        "Mean cosine between a token's hidden states before and after a block. Near 1: the block does little.",
        source=_DEPTH,
        title="cosine to previous layer",
        range=column.SIGNED,
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
        "Values over 100 and over 1000 × the layer's median, summed over contexts.",
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
    _layer(
        "massive_tokens",
        "Number of tokens with a massive activation after the first position; position and context are of the others.",
        "Those that had one at the layer before count down to a tenth of the ratio. The table `massive` names them.",
        f"{ZHANG}, section 2",
        error="",
    ),
)
def stream_columns(
    means: State, outliers: State, leading: int = 1, massive: State | None = None
) -> dict[str, Any]:
    """Compute the columns of size and change, N values each, from `Means`, `OutlierCounts` and `MassiveTokens`."""
    filled = (means["contexts"] > 0).any(dim=0)
    contexts = means["contexts"][:, filled].T
    tokens = means["readers"][:, filled, leading:].sum(dim=2).T

    def mean(name: str, count: Tensor = contexts) -> Jackknifed:
        return ratio(means[name][:, filled].T, count)

    def occurrences(name: str) -> Jackknifed:
        counts = outliers[name][:, filled].sum(dim=2).T
        total = counts.sum(dim=0)  # of the whole corpus, also without a group
        number = Jackknifed(total, ratio(counts, contexts).without * contexts.sum(dim=0))
        # What is rare may be in none of the contexts by luck: no count is more certain than by one.
        return number.about(total, number.error.clamp_min(1))

    outlier_shares = ratio(outliers["outlier"][:, filled].transpose(0, 1), tokens.unsqueeze(2))
    columns = {
        "norm": mean("norm_sum", tokens),
        "norm_first": mean("norm_first_sum"),
        "cosine_previous": mean("cosine_sum", tokens).where(torch.arange(contexts.shape[1]) > 0),
        "rank_collapse": mean("collapse_sum"),
        "massive_activations": occurrences("massive"),
        "massive_activations_first": occurrences("massive_first"),
        "outlier_dimensions": combined(lambda of: (of >= OUTLIER_SHARE).sum(dim=1).double(), outlier_shares),
    }
    if "norm_last_sum" in means:
        columns["norm_last"] = mean("norm_last_sum")
        columns["massive_activations_last"] = occurrences("massive_last")
    tokens_left_out = {} if massive is None else {"massive_tokens": massive["count"].tolist()}
    return {"layer": list(range(contexts.shape[1])), **columns, **tokens_left_out}


@gives(
    Array("mean", "(N, d)", "μ, the mean hidden state of each residual layer."),
    Array("positional_basis", "(N, T, d)", "pos, the mean of each position less μ."),
    Array("positional_basis_last", "(N, trailing, d)", "The same of special tokens that end every context."),
    Array("positional_pca", "(N, T, 3)", "pos on the principal directions of P."),
    Array("cvec_pca", "(N, Q, 3)", "Single tokens less μ and pos, on the principal directions of P."),
    Array("singular_values", "(N, ≤ 60)", "Singular values of P, decreasing."),
)
def position_arrays(
    whole_means: State, means: State, trailing: int, leading: int, sample: Sample | None = None
) -> dict[str, Tensor]:
    """Return the means by position, as far as enough contexts reach, from `Means` with and without special tokens.

    With the `sample` whose tokens were kept, also what figures of P are drawn of.
    """
    mean, pos, _ = decomposed_means(whole_means, trailing, leading)
    basis = pos[:, : positions_read(means)]
    arrays = {"mean": mean, "positional_basis": basis.float()}
    if trailing:
        arrays["positional_basis_last"] = pos[:, -trailing:].float()
    if sample is not None:
        axes, values = zip(*(principal_axes(of_layer[leading:]) for of_layer in basis), strict=True)
        directions = torch.stack(axes).mT
        tokens = means["token"] - mean[:, None] - pos[:, sample.token_position]
        arrays["positional_pca"] = (basis @ directions).float()
        arrays["cvec_pca"] = (tokens @ directions).float()
        arrays["singular_values"] = torch.stack(values)[:, :SHOWN_SINGULAR_VALUES]
    return arrays


def principal_axes(
    pos: Float[Tensor, "positions width"],
) -> tuple[Float[Tensor, "3 width"], Float[Tensor, " values"]]:
    """Compute three principal directions of the positional basis, zeros where it has fewer, and its singular values.

    The sign of a principal direction is arbitrary: the farthest position has a positive coordinate.
    """
    values, directions = by_gram_matrix(pos, 3)
    axes = functional.pad(directions, (0, 3 - directions.shape[1])).T
    coordinates = pos @ axes.T
    sign = coordinates.gather(0, coordinates.abs().argmax(dim=0)[None]).sign()
    sign[sign == 0] = 1
    return axes * sign.T, values


@gives(
    _outlier("layer", "Residual layer: 0 enters the first block."),
    _outlier("dimension", "Dimension of the residual stream, counted from 0."),
    _outlier(
        "share",
        "Share of tokens with |x| ≥ 6: an outlier dimension where it is 6 % or more.",
        source=f"{ZHANG}, section 1",
    ),
    _outlier("maximum", "The largest |x| of the text."),
    _outlier("maximum_first", "The largest |x| at position 0.", title="maximum, first token"),
    _counted("massive", "Tokens with a massive activation in this dimension."),
    _counted("massive_first", "First tokens with a massive activation in it.", title="massive, first token"),
    _massive("massive_contexts", "Contexts with at least one such token after the first."),
    *(array_without("outliers", name) for name in _COUNTED),
    Array("outlier_share", "(N, d)", "Share of tokens with |x| ≥ 6 in each dimension."),
    Array(
        "typical_magnitude", "(N, d)", "Typical size of each dimension, exp E ln |x| over the text's tokens."
    ),
    Array(
        f"typical_magnitude{column.WITHOUT}", "(8, N, d)", "The same without each of 8 groups of contexts."
    ),
)
def outliers_table(outliers: State, means: State) -> tuple[pd.DataFrame, dict[str, Tensor]]:
    """Tabulate each layer's outlier dimensions and those with massive activations; with the size of every dimension.

    What is without a group of contexts is NaN below eight contexts.
    """
    sums = {name: outliers[name].sum(dim=1) for name in ("outlier", *MASSIVE_COUNTS)}
    tokens = outliers["tokens"]
    share = sums.pop("outlier") / tokens.sum(dim=1, keepdim=True)
    notable = torch.stack([share >= OUTLIER_SHARE, *(count > 0 for count in sums.values())]).any(dim=0)
    layer, dimension = rows = notable.nonzero(as_tuple=True)
    columns = {"layer": layer, "dimension": dimension, "share": share[rows]}
    columns |= {name: outliers[name][rows] for name in ("maximum", "maximum_first")}
    columns |= {name: count[rows].long() for name, count in sums.items()}
    contexts = means["contexts"]
    total, known = contexts.sum(dim=1), (contexts > 0).all()
    logs = ratio(outliers["log_magnitude"].transpose(0, 1), tokens.T[:, :, None])
    sizes = combined(typical_magnitude, logs).if_known((tokens > 0).all())
    arrays = {"outlier_share": share.float(), "typical_magnitude": sizes.value.float()}
    arrays[f"typical_magnitude{column.WITHOUT}"] = sizes.without.float()
    for name in _COUNTED:
        # Of all contexts: as many times the mean.
        mean = ratio(outliers[name].transpose(0, 1), contexts.T[:, :, None])
        count = combined(lambda of: of * total[layer], mean[rows]).if_known(known)
        columns[f"{name}_se"] = count.error
        arrays[f"outliers.{name}{column.WITHOUT}"] = count.without.float()
    return table_of(columns), arrays


@gives(
    _token("layer", "Residual layer: 0 enters the first block."),
    _token("context", "Context of the text, counted from 0."),
    _token("position", "Position in the context, counted from 0."),
    _token("token", "The token there.", kind="text"),
    _token("dimension", "Dimension of the residual stream with the largest value."),
    _token(
        "value",
        "That value.",
        "|x| > 100 and > 1000 × the median magnitude of the context at this layer.",
        f"{ZHANG}, section 2",
    ),
)
def massive_table(massive: State, text: Callable[[int], str]) -> pd.DataFrame:
    """Tabulate the massive tokens of the first 256 contexts, at most eight a context and layer."""
    named = part_of(massive, "named")
    layer, context, position, token = named["keys"].unbind(dim=1)
    columns = {"layer": layer, "context": context, "position": position}
    texts = [text(token_id) for token_id in token.tolist()]
    return table_of(
        columns | {"token": texts, "dimension": named["dimension"].long(), "value": named["value"]}
    )
