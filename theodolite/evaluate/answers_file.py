"""Scores saved to a file as they are measured, so that an interrupted evaluation can be resumed.

The key of a score is all that determines it: fingerprints of model and questions, and package versions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from theodolite.errors import UsageError
from theodolite.evaluate.scores import Score
from theodolite.system.checksums import CorruptFile, read_json_checked, write_json_checked
from theodolite.system.files import disk_errors

SCHEMA_VERSION = 1


class AnswersFile:
    """The scores in a file; without a path, in memory only."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._scores: dict[str, list[Score]] = {}
        if path is not None and path.exists():
            try:
                self._scores = _read(path)
            except CorruptFile as error:
                raise UsageError(
                    f"{path} is not an evaluation file ({error}): choose another --out or remove it"
                ) from error
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UsageError(
                    f"{path} is not an evaluation file: choose another --out or remove it"
                ) from error

    def get(self, key: dict[str, Any], measure: Callable[[], list[Score]]) -> list[Score]:
        """The scores with this key: from the file, or measured now and saved (`WorkError` where that cannot be)."""
        name = json.dumps(key, sort_keys=True)
        if name not in self._scores:
            self._scores[name] = measure()
            self._write()
        return self._scores[name]

    def _write(self) -> None:
        if self._path is None:
            return
        rows = [
            {"key": json.loads(name), "scores": [_as_json(score) for score in scores]}
            for name, scores in sorted(self._scores.items())
        ]
        answers = {"schema_version": SCHEMA_VERSION, "measured": rows}
        with disk_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json_checked(self._path, answers, indent=None)


def _read(path: Path) -> dict[str, list[Score]]:
    read = read_json_checked(path)
    if read["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"schema {read['schema_version']}")
    return {
        json.dumps(row["key"], sort_keys=True): [_of_json(score) for score in row["scores"]]
        for row in read["measured"]
    }


def _as_json(score: Score) -> dict[str, Any]:
    """Plain values; NaN and infinities become null."""
    plain = vars(score) | {"each": None if score.each is None else score.each.tolist()}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in plain.items()}


def _of_json(row: dict[str, Any]) -> Score:
    each = row.pop("each")
    known: dict[str, Any] = {name: math.nan if value is None else value for name, value in row.items()}
    return Score(**known, each=None if each is None else np.array(each, dtype=np.float64))
