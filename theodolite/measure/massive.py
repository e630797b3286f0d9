"""Tokens with massive activations after the first position, and what the numbers would be with them.

Source: Sun et al. 2024; Zhang et al. 2025, section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from theodolite.accumulate.massive import with_massive
from theodolite.accumulate.means import Sample
from theodolite.accumulate.second_moments import numbers_of
from theodolite.accumulate.sums import State, part_of
from theodolite.measure.column import STREAM, Column, gives, table_of
from theodolite.measure.contexts import CONTEXT_COLUMNS, context_columns
from theodolite.measure.position import SIZE_COLUMNS, grouped_basis, sizes
from theodolite.measure.publications import ZHANG
from theodolite.system.processor import parallel_map
from theodolite.theory.smoothness import Grid
from theodolite.theory.unbiased import Jackknifed

_massive = partial(Column, "massive")


@gives(
    Column(
        "layers",
        "massive_tokens",
        "Number of tokens with a massive activation after the first position; position and context are of the others.",
        "Those that had one at the layer before count down to a tenth of the ratio. The table `massive` names them, "
        "`with_massive` has the numbers with them.",
        f"{ZHANG}, section 2",
        group=STREAM,
    )
)
def massive_counts(massive: State) -> dict[str, list[float]]:
    """Return how many tokens were left out, N values, from `MassiveTokens`."""
    return {"massive_tokens": massive["count"].tolist()}


@gives(
    _massive("layer", "Residual layer: 0 enters the first block."),
    _massive("context", "Context of the text, counted from 0."),
    _massive("position", "Position in the context, counted from 0."),
    _massive("token", "The token there.", kind="text"),
    _massive("dimension", "Dimension of the residual stream with the largest value."),
    _massive(
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


_NUMBERS = tuple(
    replace(column, table="with_massive", error="", floor="", healthy=None, short="")
    for column in (*SIZE_COLUMNS, *CONTEXT_COLUMNS)
)


@gives(
    Column("with_massive", "layer", "Residual layer: 0 enters the first block."),
    *_NUMBERS,
)
def with_massive_table(
    massive: State,
    means: State,
    residual: State,
    sketches: State,
    sample: Sample,
    labels: Int[Tensor, " sampled"],
    leading: int = 1,
    grid: Grid | None = None,
) -> pd.DataFrame:
    """Compute the numbers of position and context with the massive tokens, of the layers that have any.

    But for ranks, to which each of these tokens adds one, and for what is of directions alone.
    """
    layers = massive["count"].nonzero().flatten()
    if not len(layers):
        return table_of({"layer": layers} | {column.name: torch.empty(0) for column in _NUMBERS})

    def of_layer(layer: int) -> dict[str, Tensor]:
        of_means, of_residual = with_massive(means, residual, massive, layer)
        sketch = {name: values[layer] for name, values in sketches.items()}
        basis = grouped_basis(of_means, 0, leading, grid)
        columns: dict[str, Any] = sizes(basis, numbers_of(of_residual, 0), sketch)
        columns |= context_columns(of_means, of_residual, sample, labels, leading, grid)
        return {name: one.value.reshape(()) for name, one in columns.items() if isinstance(one, Jackknifed)}

    rows = parallel_map(of_layer, layers.tolist())
    return table_of({"layer": layers} | {name: torch.stack([row[name] for row in rows]) for name in rows[0]})
