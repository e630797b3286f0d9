"""Results of an evaluation: values with standard errors, saved as they are measured, and compared in pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from theodolite.errors import UsageError
from theodolite.jobs.job import Job, Notes, Stage, Steps, Tensors, Unfinished
from theodolite.system import files
from theodolite.system.progress import ShowStage

SCHEMA_VERSION = 2
COLUMNS = (
    *("model", "task", "shots", "metric", "value", "value_se", "difference", "difference_se"),
    *("count", "batch", "version", "chat_template", "system"),
)


@dataclass(frozen=True, eq=False)
class Score:
    """One model's value on one task."""

    model: str
    task: str  # a corpus, a word task, or a task of lm-eval
    shots: int  # examples in each prompt
    metric: str
    value: float
    error: float  # its standard error, NaN where unknown
    count: int  # contexts, prompts or documents, the sample of the error
    batch: int  # of them per forward pass
    questions: str  # hash of the questions; models are comparable where it is equal
    each: Float[np.ndarray, " count"] | None = None  # numbers whose mean is the value
    version: str = ""  # of the task
    chat_template: bool = False  # whether the tokenizer's made conversations of the prompts
    system: str = ""  # the text of the system's turn


class Evaluation:
    """The scores in a JSON file, by all that determines them, and beside it the job that measures what is missing."""

    def __init__(self, out: Path | None) -> None:
        self._out = out
        self._work = Unfinished(out, {"schema_version": SCHEMA_VERSION}, kind="evaluation")
        self._measured: dict[str, tuple[dict[str, Any], list[Score]]] = {}
        if out is None or not out.exists():
            return
        try:
            read = files.read_json_checked(out)
            if read["schema_version"] != SCHEMA_VERSION:
                raise ValueError("of another version")
            for row in read["measured"]:
                scores = [score_of_json(score) for score in row["scores"]]
                self._measured[files.json_digest(row["key"])] = row["key"], scores
        except (files.CorruptFile, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{out} is not an evaluation file ({error}): choose another --out or remove it"
            ) from error

    def scores(
        self,
        key: dict[str, Any],
        title: str,
        make: Callable[[], Steps],
        scores_in: Callable[[Tensors, Notes], list[Score]],
        show_progress: ShowStage = lambda what, done, total: None,
    ) -> list[Score]:
        """Return the scores with this key: known, or read by `scores_in` from the steps made now, called `title`."""
        name = files.json_digest(key)

        def measure() -> list[Score]:
            states = Job([Stage(name, title, lambda _: make())], self._work, show_progress).run()
            return scores_in(states.tensors[name], states.notes[name])

        return self.kept(key, measure)

    def kept(self, key: dict[str, Any], measure: Callable[[], list[Score]]) -> list[Score]:
        """Return the scores with this key: known, or measured now, and then in the file at once."""
        name = files.json_digest(key)
        if name not in self._measured:
            self._measured[name] = key, measure()
            if self._out is not None:
                rows = [
                    {"key": key, "scores": [score_as_json(score) for score in scores]}
                    for _, (key, scores) in sorted(self._measured.items())
                ]
                with files.disk_errors(self._out):
                    self._out.parent.mkdir(parents=True, exist_ok=True)
                    values = {"schema_version": SCHEMA_VERSION, "measured": rows}
                    files.write_json_checked(self._out, values, indent=None)
        # What was begun, and is not asked for, stays.
        if self._out is not None and self._measured.keys() >= set(self._work.names()):
            self._work.remove()
        return self._measured[name][1]


def score_as_json(score: Score) -> dict[str, Any]:
    """Convert a score to what JSON can hold, where NaN and infinities become null."""
    return vars(score) | {"each": None if score.each is None else score.each.tolist()}


def score_of_json(row: dict[str, Any]) -> Score:
    """Return the score that `score_as_json` was given."""
    known: dict[str, Any] = {name: math.nan if value is None else value for name, value in row.items()}
    each = None if row["each"] is None else np.array(row["each"], dtype=np.float64)
    return Score(**known | {"each": each})


def mean_and_error(values: Float[np.ndarray, " count"]) -> tuple[float, float]:
    """Compute the mean and its standard error s/√n with s² the unbiased sample variance; one value has error NaN."""
    error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(values.mean()), float(error)


def table(scores: Sequence[Score]) -> pd.DataFrame:
    """Tabulate the scores, a row each, in their order.

    The difference is to the first model with the same questions; its error is that of the mean paired difference. Both
    are NaN for that model itself, and where the value is not a mean over questions.
    """
    first_of: dict[tuple[Any, ...], Score] = {}
    rows = []
    for score in scores:
        first = first_of.setdefault((score.task, score.shots, score.metric, score.questions), score)
        difference, error = math.nan, math.nan
        if first.model != score.model and first.each is not None and score.each is not None:
            difference, error = mean_and_error(score.each - first.each)
        rows.append(vars(score) | {"value_se": score.error, "difference": difference, "difference_se": error})
    return pd.DataFrame(rows, columns=list(COLUMNS))
