"""A number with its standard error, what the error rests on, and the interval that follows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri, stdtrit  # `scipy.stats` has them too, and takes long to start

from theodolite.system.wording import counted, with_error

Floats = npt.NDArray[np.float64]

CONFIDENCE = 0.95
SIGMAS = float(ndtri((1 + CONFIDENCE) / 2))
"""Standard errors on either side of the 95 % interval, where the error is no estimate itself; else Student's t."""
RESTS_ON_NOTHING = "a standard error needs the number of independent things that it rests on"
INTERVAL = f"the {CONFIDENCE:.0%} interval".replace("%", "\u00a0%")


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error (NaN: none known, so that nothing is decided) and what the error rests on.

    It rests on `n` independent things, called `of` ("seeds"). `by_chance`: it follows from n, as that of a share of n
    trials does, and is no estimate from their spread. `is_exact`: see `exact`.
    """

    value: float
    error: float = math.nan
    n: int = 0
    of: str = ""
    by_chance: bool = False
    is_exact: bool = False

    def __post_init__(self) -> None:
        if math.isfinite(self.error) and not (self.n or self.is_exact):
            raise ValueError(RESTS_ON_NOTHING)

    @classmethod
    def exact(cls, value: float) -> Estimate:
        """Make a number without sampling error: a formula in closed form, a function of weights, a count over all."""
        return cls(float(value), 0.0, is_exact=True)

    @classmethod
    def share(cls, share: float, count: float, of: str) -> Estimate:
        """Make a share of `count` independent trials, with the largest standard error that such a share can have.

        That is the one at a share of ½, so that 0 or n of few trials do not look certain. Half a trial is added to the
        interval (Yates's correction).
        """
        error = 0.5 / math.sqrt(count) + 0.5 / count / SIGMAS
        return cls(share, error, max(1, round(count)), of, by_chance=True)

    @classmethod
    def mean(cls, values: npt.ArrayLike, of: str) -> Estimate:
        """Compute the mean of independent values, its error s/√n with s² the unbiased variance; one value has none."""
        values = np.asarray(values, dtype=np.float64)
        error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return cls(float(values.mean()), error, len(values), of)

    def floored(self, span: float = 1.0, count: int = 0) -> Estimate:
        """Widen the interval to span·(1 − 0.025^{1/n}) or more on either side: no spread is no certainty.

        What was alike in n things is otherwise in up to that share of all (Clopper & Pearson's bound). For numbers that
        take few values: shares, counts; two of them are at most `span` apart. `count` is n, if the error rests on
        fewer, as on parts of n contexts.
        """
        if self.n < 2:
            return self
        least = span * (1 - ((1 - CONFIDENCE) / 2) ** (1 / (count or self.n)))
        return replace(self, error=float(np.maximum(self.error, least / replace(self, error=1.0).margin)))

    @property
    def margin(self) -> float:
        """Half the width of the 95 % interval; NaN where no error is known."""
        if self.is_exact:
            return 0.0
        return (SIGMAS if self.by_chance else float(sigmas(self.n))) * self.error

    def __str__(self) -> str:
        shown = with_error(self.value, self.error)
        if self.is_exact:
            return f"{shown} (exact)"
        if self.n == 1 or math.isfinite(self.error):
            return f"{shown} ({counted(self.n, self.of.removesuffix('s'))})"
        return f"{shown} (no standard error)"


@dataclass(frozen=True)
class Estimates:
    """One number a layer, or of `each` (N,), with standard errors (N,) and what these rest on, as of an `Estimate`."""

    values: Floats
    errors: Floats | None = None
    n: int = 0
    of: str = ""
    each: str = "layers"
    is_exact: bool = False

    def __post_init__(self) -> None:
        known = self.errors is not None and np.isfinite(self.errors).any()
        if known and not (self.n or self.is_exact):
            raise ValueError(RESTS_ON_NOTHING)

    @classmethod
    def exact(cls, values: npt.ArrayLike, each: str = "layers") -> Estimates:
        """Make numbers without sampling error."""
        values = np.asarray(values, dtype=np.float64)
        return cls(values, np.zeros(values.shape), each=each, is_exact=True)

    def at(self, place: int) -> Estimate:
        """Return one layer's number."""
        error = math.nan if self.errors is None else float(self.errors[place])
        return Estimate(float(self.values[place]), error, self.n, self.of, is_exact=self.is_exact)

    @property
    def looks(self) -> int:
        """The number of intervals that share the 5 % of a claim on more than half of N: ⌈N/2⌉.

        That is Bonferroni's bound for a partial conjunction (Benjamini & Heller 2008).
        """
        return max(1, math.ceil(np.isfinite(self.values).sum() / 2))

    @property
    def margins(self) -> Floats:
        """Half the widths of the 95 % intervals of single layers; NaN where no error is known."""
        return self._margins(1)

    @property
    def shared_margins(self) -> Floats:
        """Half the widths of the intervals that a claim on most of them goes by: see `looks`."""
        return self._margins(self.looks)

    def _margins(self, looks: int) -> Floats:
        if self.is_exact:
            return np.zeros(np.shape(self.values))
        errors = np.full(np.shape(self.values), np.nan) if self.errors is None else self.errors
        return sigmas(self.n, looks) * errors


def sigmas(n: npt.ArrayLike, looks: npt.ArrayLike = 1) -> Floats:
    """Compute the standard errors on either side of an interval from n things that misses in 5 % / `looks` of cases."""
    miss = (1 - CONFIDENCE) / 2 / np.asarray(looks)
    return np.asarray(stdtrit(np.asarray(n, dtype=np.float64) - 1, 1 - miss))


def most_extreme(count: int) -> float:
    """Return the factor by which an error grows where the number is the largest, or least, of `count` (Bonferroni)."""
    return float(ndtri(1 - (1 - CONFIDENCE) / 2 / max(1, count))) / SIGMAS


def jackknife_error(left_out: npt.ArrayLike) -> Floats:
    """Return the jackknife's standard error, from the numbers without each of n things, (n, …)."""
    left_out = np.asarray(left_out, dtype=np.float64)
    return np.asarray(left_out.std(axis=0) * math.sqrt(len(left_out) - 1))
