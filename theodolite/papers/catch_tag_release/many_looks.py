"""What the choice of the most extreme of several numbers does to its error."""

from __future__ import annotations

from scipy.stats import norm

from theodolite.estimates import CONFIDENCE, SIGMAS


def most_extreme(count: int) -> float:
    """By what factor an error grows where the number is the largest, or least, of `count` (Bonferroni)."""
    return float(norm.ppf(1 - (1 - CONFIDENCE) / 2 / max(1, count))) / SIGMAS
