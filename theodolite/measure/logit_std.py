"""The spread of a head's logits: their standard deviation over the keys that a query sees."""

from __future__ import annotations

from torch import Tensor

from theodolite.attention.inputs import AttentionInputs
from theodolite.measure.column import ATTENTION, Column
from theodolite.measure.extra import QUERIES, HeadMean, sampled_logits


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
        seen = sampled_logits(inputs)
        return (seen - seen.nanmean(dim=-1, keepdim=True)).square().nanmean(dim=-1).sqrt()
