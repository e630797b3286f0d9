"""The spread of a head's logits: their standard deviation over the keys that a query sees."""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.attention.inputs import MASKED, AttentionInputs
from theodolite.measure.column import ATTENTION, Column
from theodolite.measure.extra import HeadMean

QUERIES = 8
"""Evenly spaced queries of a context: all would cost every product of queries and keys once more."""


class LogitStd(HeadMean):
    """The mean standard deviation of a query's logits, over contexts and queries."""

    column = Column(
        "heads",
        "logit_std",
        "Standard deviation of a query's logits over the keys that it sees. Near 0: uniform attention.",
        f"Mean over contexts and {QUERIES} evenly spaced queries of each, the last included.",
        title="logit spread",
        group=ATTENTION,
    )

    def values(self, inputs: AttentionInputs) -> Tensor:
        """Compute the standard deviation of each chosen query's logits, (batch, heads, queries)."""
        rows = torch.arange(1, QUERIES + 1, device=inputs.query.device) * inputs.query.shape[2] // QUERIES - 1
        logits = inputs.of_queries(rows.clamp_min(0).unique()).logits().double()
        seen = logits.masked_fill(logits < MASKED / 2, torch.nan)
        return (seen - seen.nanmean(dim=-1, keepdim=True)).square().nanmean(dim=-1).sqrt()
