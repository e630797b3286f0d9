"""The outliers table: dimensions that are outliers of a layer, or carry a massive activation."""

from __future__ import annotations

import math
from functools import partial

import pandas as pd
import torch
from torch import Tensor

from theodolite.accumulate.outliers import MASSIVE_COUNTS
from theodolite.accumulate.sums import State
from theodolite.measure.column import HALVES, SHARE, Column, gives, table_of
from theodolite.measure.geometry import OUTLIER_SHARE
from theodolite.measure.publications import ZHANG
from theodolite.measure.uncertainty import balanced_halves, half_sample_error

_outlier = partial(Column, "outliers")
_massive = partial(_outlier, source=f"{ZHANG}, section 2")


@gives(
    _outlier("layer", "Residual layer: 0 enters the first block."),
    _outlier("dimension", "Dimension of the residual stream, counted from 0."),
    _outlier(
        "share",
        "Share of tokens with |x| ≥ 6: an outlier dimension where it is 6 % or more.",
        source=f"{ZHANG}, section 1",
        range=SHARE,
    ),
    _outlier("maximum", "The largest |x| of the text."),
    _outlier("maximum_first", "The largest |x| at position 0.", title="maximum, first token"),
    _massive("massive", "Tokens with a massive activation in this dimension.", error=HALVES),
    _massive(
        "massive_first",
        "First tokens with a massive activation in this dimension.",
        title="massive, first token",
        error=HALVES,
    ),
    _massive("massive_contexts", "Contexts with at least one such token after the first."),
)
def outliers_table(outliers: State, means: State, leading: int = 1) -> pd.DataFrame:
    """Tabulate each layer's dimensions that are outliers, or carry a massive activation.

    Args:
        outliers, means: states of `OutlierCounts` and `Means`.
        leading: tokens apart before the others.
    """
    sums = {name: outliers[name].sum(dim=1) for name in ("outlier", *MASSIVE_COUNTS)}
    tokens = means["readers"][:, :, leading:].sum(dim=(1, 2))
    share = sums.pop("outlier") / tokens[:, None]
    notable = torch.stack([share >= OUTLIER_SHARE, *(count > 0 for count in sums.values())]).any(dim=0)
    layer, dimension = rows = notable.nonzero(as_tuple=True)
    columns = {"layer": layer, "dimension": dimension, "share": share[rows]}
    columns |= {name: outliers[name][rows] for name in ("maximum", "maximum_first")}
    columns |= {name: count[rows].long() for name, count in sums.items()}
    for name in ("massive", "massive_first"):
        columns[f"{name}_se"] = _count_errors(outliers[name], means)[rows].double()
    return table_of(columns)


def _count_errors(counts: Tensor, means: State) -> Tensor:
    """Compute standard errors (N, d) of counts of the whole corpus, in float32; NaN below eight contexts."""
    contexts = means["contexts"]
    if not (contexts > 0).all():
        return torch.full_like(counts.sum(dim=1), math.nan).float()
    halves = balanced_halves()
    of_halves = torch.einsum("hg,ngd->hnd", halves, counts.double())
    scale = contexts.sum(dim=1, keepdim=True) / (contexts @ halves.T)
    return half_sample_error(of_halves * scale.T.unsqueeze(2)).float()
