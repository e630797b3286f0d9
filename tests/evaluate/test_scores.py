"""Oracles: numpy's own variance, closed forms, simulated coverage."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from theodolite.errors import UsageError
from theodolite.evaluate.scores import Evaluation, Score, mean_and_error, table
from theodolite.jobs.job import Rows


def score(model: str, each: list[float] | None, questions: str = "q", **more) -> Score:
    value, error = (0.5, 0.1) if each is None else mean_and_error(np.array(each))
    values = None if each is None else np.array(each)
    given = {"task": "t", "shots": 2, "metric": "accuracy", "count": 4, "batch": 8}
    return Score(model=model, value=value, error=error, questions=questions, each=values, **given | more)


def test_the_error_of_a_share_is_the_binomial_one():
    """Closed form √(p (1 − p)/(n − 1))."""
    values = np.array([1.0] * 30 + [0.0] * 10)
    mean, error = mean_and_error(values)
    assert mean == 0.75
    assert error == pytest.approx(math.sqrt(0.75 * 0.25 / 39))
    assert math.isnan(mean_and_error(values[:1])[1])


def test_models_are_compared_on_the_same_questions_alone():
    """Oracle: the mean and the standard error of the differences, by hand."""
    dense, pruned = score("dense", [1, 1, 0, 1]), score("pruned", [1, 0, 0, 0])
    other = score("other", [0, 0, 0, 0], questions="others")
    unknown = score("unknown", None)
    rows = table([dense, pruned, other, unknown])
    assert list(rows["model"]) == ["dense", "pruned", "other", "unknown"]
    assert rows["difference"][1] == -0.5
    assert rows["difference_se"][1] == pytest.approx(np.std([0, -1, 0, -1], ddof=1) / 2)
    assert rows["difference"][[0, 2, 3]].isna().all()
    assert rows["value_se"][0] == pytest.approx(math.sqrt(0.75 * 0.25 / 3))


def test_what_is_kept_is_not_measured_again(tmp_path):
    """Oracle: the scores themselves; every number comes back as it was, and one that is none as NaN."""
    path, asked = tmp_path / "new" / "scores.json", []
    first, second = (
        score("m", [1, 0, 1, 1]),
        replace(score("m", None), error=math.nan, version="1"),
    )

    def scores(key: dict) -> list[Score]:
        steps = partial(Rows, [0], lambda _: asked.append(1) or {})
        return Evaluation(path).scores(key, "", steps, lambda *_: [first, second])

    scores({"model": "a", "shots": 1})
    again = scores({"shots": 1, "model": "a"})
    assert asked == [1]
    assert np.array_equal(again[0].each, first.each)
    pairs = zip(again, (first, second), strict=True)
    assert all(repr(replace(x, each=None)) == repr(replace(y, each=None)) for x, y in pairs)
    assert len(json.loads(path.read_text())["measured"]) == 1
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 9, "measured": []}'])
def test_another_file_is_left_alone(tmp_path, text):
    path = tmp_path / "notes.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"is not an evaluation file.*: choose another --out or remove it"):
        Evaluation(path)
    assert path.read_text() == text
