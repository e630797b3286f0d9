"""A few trials of states and threads; `python -m tests.chaos states threads` has hundreds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tests.chaos import states
from tests.chaos.entries import ENTRIES
from tests.chaos.trials import BAD, REFUSED, WRONG, Trial


def bad(trials: Iterable[Trial]) -> list[Trial]:
    found = list(trials)
    assert found
    return [trial for trial in found if trial.answer in BAD]


def test_some_states_change_no_number() -> None:
    """Oracle: the same calls where nobody has set anything."""
    assert bad(states.trials(0, 0.03)) == []


@pytest.mark.slow
def test_more_states_change_no_number() -> None:
    assert bad(states.trials(1, 0.1)) == []


def test_some_threads_measure_what_one_does() -> None:
    """Oracle: the same calls one after the other."""
    assert bad(states.thread_trials(0, 0.05)) == []


@pytest.mark.slow
def test_more_threads_measure_what_one_does() -> None:
    assert bad(states.thread_trials(1, 0.1)) == []


@pytest.mark.slow
def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    (trial,) = states.of_environments(tmp_path, ["a folder that is gone"])
    assert trial.answer == REFUSED
    assert "error: the current folder is no more: change to another one" in trial.said


def test_what_is_wrong_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that are not guarded: one takes the default dtype, one leaves a seed."""
    models = states.Models(tmp_path)
    monkeypatch.setitem(ENTRIES, "careless", lambda model: torch.ones(3))
    monkeypatch.setitem(ENTRIES, "seeding", lambda model: torch.manual_seed(5) and torch.ones(3))
    for entry, says in (("careless", "is of torch.bfloat16"), ("seeding", "left changed: torch's generator")):
        trial = states.of_states(models, entry, "gpt2", ["bfloat16", "seeds"])
        assert trial.answer == WRONG
        assert says in trial.said
