"""How far a head's logits spread: their standard deviation over the keys that a query sees."""

from __future__ import annotations

import torch
from torch.nn import functional

from theodolite.accumulate.sums import State
from theodolite.attention.inputs import MASKED, AttentionInputs
from theodolite.measure.column import ATTENTION, Column
from theodolite.measure.extra import Extra

QUERIES = 8
"""Evenly spaced queries of a context: all would cost every product of queries and keys once more."""


class LogitStd(Extra):
    """Sums of the standard deviations of logits, and how many these are."""

    name = "logit_std"
    declared = (
        Column(
            "heads",
            "logit_std",
            "logit spread",
            "Standard deviation of a query's logits over the keys that it sees. Near 0: uniform attention.",
            f"Mean over contexts and {QUERIES} evenly spaced queries of each, the last included.",
            group=ATTENTION,
        ),
    )

    def __init__(self, layers: int, heads: int) -> None:
        super().__init__(layers, {"sum": (heads,), "count": (heads,)})
        self.heads = heads

    def attention(self, layer: int, inputs: AttentionInputs) -> None:
        """Take in a batch."""
        rows = torch.arange(1, QUERIES + 1, device=inputs.query.device) * inputs.query.shape[2] // QUERIES - 1
        logits = inputs.of_queries(rows.clamp_min(0).unique()).logits().double()
        seen = logits.masked_fill(logits < MASKED / 2, torch.nan)
        deviation = (seen - seen.nanmean(dim=-1, keepdim=True)).square().nanmean(dim=-1).sqrt()
        for name, value in (("sum", deviation.nan_to_num(0.0)), ("count", deviation.isfinite())):
            summed = value.double().sum(dim=(0, 2))
            self.add(name, layer, functional.pad(summed, (0, self.heads - len(summed))))

    def columns(self, state: State) -> dict[str, list[float]]:
        """The mean of every head."""
        return {"logit_std": (state["sum"] / state["count"]).flatten().tolist()}
