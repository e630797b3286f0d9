"""Dimensions that are outliers of a layer, or carry a massive activation, and the typical size of every dimension."""

from __future__ import annotations

from functools import partial

import pandas as pd
import torch
from torch import Tensor

from theodolite.accumulate.outliers import MASSIVE_COUNTS
from theodolite.accumulate.sums import State
from theodolite.measure.column import LEFT_OUT, SHARE, WITHOUT, Array, Column, array_without, gives, table_of
from theodolite.measure.geometry import OUTLIER_SHARE
from theodolite.measure.publications import ZHANG
from theodolite.theory.outliers import typical_magnitude
from theodolite.theory.unbiased import combined, ratio

_outlier = partial(Column, "outliers")
_massive = partial(_outlier, source=f"{ZHANG}, section 2")
_COUNTED = ("massive", "massive_first")


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
    _massive("massive", "Tokens with a massive activation in this dimension.", error=LEFT_OUT),
    _massive(
        "massive_first",
        "First tokens with a massive activation in this dimension.",
        title="massive, first token",
        error=LEFT_OUT,
    ),
    _massive("massive_contexts", "Contexts with at least one such token after the first."),
    *(array_without("outliers", name) for name in _COUNTED),
)
def outliers_table(outliers: State, means: State) -> tuple[pd.DataFrame, dict[str, Tensor]]:
    """Tabulate each layer's dimensions that are outliers, or carry a massive activation, from two accumulators.

    With the arrays of what the counts are without each group of contexts, as of all contexts.
    """
    sums = {name: outliers[name].sum(dim=1) for name in ("outlier", *MASSIVE_COUNTS)}
    share = sums.pop("outlier") / outliers["tokens"].sum(dim=1, keepdim=True)
    notable = torch.stack([share >= OUTLIER_SHARE, *(count > 0 for count in sums.values())]).any(dim=0)
    layer, dimension = rows = notable.nonzero(as_tuple=True)
    columns = {"layer": layer, "dimension": dimension, "share": share[rows]}
    columns |= {name: outliers[name][rows] for name in ("maximum", "maximum_first")}
    columns |= {name: count[rows].long() for name, count in sums.items()}
    contexts = means["contexts"]
    total, known = contexts.sum(dim=1), (contexts > 0).all()
    arrays = {}
    for name in _COUNTED:
        # Of all contexts: as many times the mean.
        mean = ratio(outliers[name].transpose(0, 1), contexts.T[:, :, None])
        count = combined(lambda of: of * total[layer], mean[rows]).if_known(known)
        columns[f"{name}_se"] = count.error
        arrays[f"outliers.{name}{WITHOUT}"] = count.without.float()
    return table_of(columns), arrays


@gives(
    Array(
        "typical_magnitude",
        "(N, d)",
        "Typical size of each dimension, exp E ln |x| over the tokens of the text.",
    ),
    Array(f"typical_magnitude{WITHOUT}", "(8, N, d)", "The same without each of 8 groups of contexts."),
)
def typical_sizes(outliers: State) -> dict[str, Tensor]:
    """Compute the typical size of every dimension; without a group NaN below eight contexts."""
    tokens = outliers["tokens"]
    logs = ratio(outliers["log_magnitude"].transpose(0, 1), tokens.T[:, :, None])
    sizes = combined(typical_magnitude, logs).if_known((tokens > 0).all())
    return {
        "typical_magnitude": sizes.value.float(),
        f"typical_magnitude{WITHOUT}": sizes.without.float(),
    }
