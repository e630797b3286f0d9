"""Tokens with massive activations after the first position: how many, and which.

Source: Sun et al. 2024; Zhang et al. 2025, section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pandas as pd

from theodolite.accumulate.sums import State, part_of
from theodolite.measure.column import STREAM, Column, gives, table_of
from theodolite.measure.publications import ZHANG

_massive = partial(Column, "massive")


@gives(
    Column(
        "layers",
        "massive_tokens",
        "Number of tokens with a massive activation after the first position; position and context are of the others.",
        "Those that had one at the layer before count down to a tenth of the ratio. The table `massive` names them.",
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
