"""Decide which keys are attention sinks of a head in a context. What sinks catch is in `catches.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theodolite.attention.inputs import AttentionInputs

SINK_THRESHOLD = 0.3
"""ε: a key is a sink when the queries that see it pay it more than this on average (Gu et al. 2024)."""


def is_sink(mean: Float[Tensor, "*keys"]) -> Bool[Tensor, "*keys"]:
    """Tell which keys, or learned sink columns, are sinks by the mean attention of the queries that see them."""
    return mean > SINK_THRESHOLD


def least_queries(length: int) -> int:
    """Return how many other queries must see a key of a context of `length` tokens for it to count as a sink."""
    return min(16, math.ceil(length / 4))


@dataclass(frozen=True)
class ReceivedAttention:
    """The mean attention that each key receives from the queries that see it, and whether `least_queries` others do."""

    mean: Float[Tensor, "batch heads keys"]
    candidate: Bool[Tensor, "batch_or_1 heads_or_1 keys"]

    @classmethod
    def of(cls, inputs: AttentionInputs, mass: Float[Tensor, "batch heads keys"]) -> ReceivedAttention:
        """Average what each key receives, from its attention weights summed over the queries."""
        queries = inputs.visible_queries()
        candidate = queries - 1 >= least_queries(inputs.query.shape[2])
        return cls(mass / queries.clamp_min(1), candidate)

    @property
    def sinks(self) -> Bool[Tensor, "batch heads keys"]:
        """The keys that are sinks."""
        return is_sink(self.mean) & self.candidate

    @property
    def of_candidates(self) -> Float[Tensor, "batch heads keys"]:
        """The mean; NaN for keys that too few queries see for a sink."""
        return self.mean.masked_fill(~self.candidate, torch.nan)
