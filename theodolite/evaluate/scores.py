"""Results of an evaluation: values with standard errors, and paired comparisons of models.

Nothing is measured here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy import stats

Z95 = 1.96
"""95 % quantile of |z|, for two-sided normal intervals."""

COLUMNS = (
    *("model", "task", "shots", "metric", "value", "value_se", "difference", "difference_se"),
    *("chance", "best", "count", "batch", "version", "cut"),
)


@dataclass(frozen=True, eq=False)
class Score:
    """One model's value on one task.

    Attributes:
        task: a corpus, the offline few-shot task, or a task of lm-eval; `shots`: examples in each prompt.
        value, error: with its standard error (NaN where unknown).
        count: contexts, prompts or documents, the sample of the error.
        batch: how many of them per forward pass.
        questions: hash of the questions; models are comparable where it is equal.
        each: (count,) numbers whose mean is the value, or None.
        chance, best: value of guessing and of an optimal predictor; NaN where unknown.
        version: of the task; `cut`: prompts truncated at the start to fit the model's positions.
    """

    model: str
    task: str
    shots: int
    metric: str
    value: float
    error: float
    count: int
    batch: int
    questions: str
    each: Float[np.ndarray, " count"] | None = None
    chance: float = math.nan
    best: float = math.nan
    version: str = ""
    cut: int = 0


def mean_and_error(values: Float[np.ndarray, " count"]) -> tuple[float, float]:
    """Mean, and its standard error s/√n with s² the unbiased sample variance; the error of one value is NaN."""
    error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(values.mean()), float(error)


def table(scores: Sequence[Score]) -> pd.DataFrame:
    """A row for each score, in their order.

    Columns: `model task shots metric value value_se difference difference_se chance best count batch version cut`.
    The difference is to the first model with the same questions; its error is that of the mean paired difference.
    Both are NaN for that model itself, and where the value is not a mean over questions.
    """
    rows = []
    for score in scores:
        first = next(other for other in scores if _comparable(other, score))
        difference, error = math.nan, math.nan
        if first is not score and first.model != score.model:
            difference, error = _paired(first, score)
        compared = {"value_se": score.error, "difference": difference, "difference_se": error}
        row = vars(score) | compared
        rows.append({name: row[name] for name in COLUMNS})
    return pd.DataFrame(rows)


def over_seeds(each: pd.DataFrame) -> pd.DataFrame:
    """Mean over seeds with its 95 % interval: a row for each model and number of shots, in the order of the table.

    Args:
        each: `model seed shots accuracy accuracy_se`.

    Returns:
        `model shots accuracy low high seeds`. The interval is Student's t over seeds; for a single seed, ±1.96 of its
        own standard errors.
    """
    rows = []
    for (model, shots), group in each.groupby(["model", "shots"], sort=False):
        count = len(group)
        mean, error = mean_and_error(group["accuracy"].to_numpy(dtype=np.float64))
        reach = Z95 * group["accuracy_se"].iloc[0] if count == 1 else stats.t.ppf(0.975, count - 1) * error
        ends = {"accuracy": mean, "low": mean - reach, "high": mean + reach}
        rows.append({"model": model, "shots": shots, **ends, "seeds": count})
    return pd.DataFrame(rows)


def _comparable(first: Score, second: Score) -> bool:
    same = ("task", "shots", "metric", "questions")
    return all(getattr(first, name) == getattr(second, name) for name in same)


def _paired(first: Score, second: Score) -> tuple[float, float]:
    if first.each is None or second.each is None:
        return math.nan, math.nan
    return mean_and_error(second.each - first.each)
