"""Oracles: a grid in one go against one that was stopped; the paper's settings."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.papers.shared import hashes, quiet
from theodolite.errors import UsageError, WorkError
from theodolite.system.files import read_checked
from theodolite_papers.localization import locater_training as module
from theodolite_papers.localization.locater_training import (
    Job,
    Recipe,
    Setting,
    TextFiles,
    grid_settings,
    read_grid,
    train_grid,
    train_locater,
)

RECIPE = Recipe(length=16, batch=2, vocabulary=None, measure_every=2, measured_windows=3, checkpoint_every=2)
SETTINGS = [Setting(width=8), Setting(width=8, scale=100.0, mean=1.0), Setting(width=8, seed=1)]


@pytest.fixture
def files(tmp_path: Path) -> TextFiles:
    """Two texts of a few words."""
    for name, count in (("train.txt", 60), ("held.txt", 20)):
        (tmp_path / name).write_text("to be or not to be\nthat is the question\n" * count, encoding="utf-8")
    return TextFiles(tmp_path / "train.txt", tmp_path / "held.txt")


def step_of(folder: Path) -> int:
    return int(read_checked(folder / "checkpoint.safetensors")[1]["step"])


def test_the_published_grid() -> None:
    """Oracle: section 7 and appendix D: κ₁ = 100, five κ₂, decay 0.01; and as many decays; once without LocAteR."""
    settings = grid_settings(layers=(1, 3, 6), widths=(32, 128))
    assert len(settings) == len({setting.name for setting in settings}) == 6 * 3 * (5 + 5)
    first = [setting for setting in settings if (setting.layers, setting.width, setting.seed) == (3, 128, 2)]
    assert {s.mean for s in first if s.scale == 100} == {0, 1e-3, 1e-2, 1e-1, 1}
    assert {s.weight_decay for s in first if s.scale == 100} == {0.01}
    assert sorted(s.weight_decay for s in first if s.scale == s.mean == 0) == [0, 0.01, 0.1, 1, 10]
    assert [s.seed for s in settings[:30]] == [0] * 10 + [1] * 10 + [2] * 10


def test_stopping(files: TextFiles, tmp_path: Path) -> None:
    """Oracle: a grid in one go."""
    job = Job(tmp_path / "g", RECIPE, 6, "cpu")
    train_grid(replace(job, folder=tmp_path / "whole"), SETTINGS, files, quiet())
    text, asked = module.kept_text(job.work, files, RECIPE), iter([False] * 12 + [True] * 99)
    assert module.train_in_turn(SETTINGS, job, text, lambda: next(asked), lambda line: None) == []
    assert 0 < step_of(job.folder / "points" / SETTINGS[1].name) < 6
    train_grid(job, SETTINGS, files, quiet())
    assert hashes(job.folder) == hashes(tmp_path / "whole")
    recipe, points = read_grid(job.folder)
    assert recipe["length"] == 16
    assert {point.setting for point in points} == set(SETTINGS)
    for point in points:
        assert point.propagation.shape == (len(point.propagation_steps), 1, 16)
        assert point.losses["step"].tolist() == point.propagation_steps == [0, 1, 2, 4, 5, 6]
        assert point.summary is not None
        assert point.summary["step"] == 6
        pd.testing.assert_series_equal(point.losses["step"], point.heads["step"])


def test_a_damaged_checkpoint_stops_its_own_training_run_alone(files: TextFiles, tmp_path: Path) -> None:
    """Oracle: the folder, and the message that names the file."""
    train_grid(Job(tmp_path / "g", RECIPE, 1, "cpu"), SETTINGS[:2], files, quiet())
    damaged, other = (tmp_path / "g/points" / setting.name for setting in SETTINGS[:2])
    checkpoint = damaged / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-9])
    with pytest.raises(WorkError, match=f"{checkpoint} is damaged: remove it"):
        train_grid(Job(tmp_path / "g", RECIPE, 3, "cpu"), SETTINGS[:2], files, quiet())
    assert step_of(other) == 3


def test_a_grid_that_another_process_trains_is_refused(files: TextFiles, tmp_path: Path) -> None:
    job = Job(tmp_path / "g", RECIPE, 2, "cpu")
    with job.work.claimed(), pytest.raises(UsageError, match="another process"):
        train_grid(job, SETTINGS[:1], files, quiet())


def test_refuses_another_grid(files: TextFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the messages."""
    job = Job(tmp_path / "g", RECIPE, 1, "cpu")
    with pytest.raises(UsageError, match="holds no grid"):
        read_grid(job.folder)
    train_grid(job, SETTINGS[:1], files, quiet())
    with pytest.raises(
        UsageError, match=r"unfinished grid of another model, corpus or options \(dropout 0.1 there, 0"
    ):
        train_grid(replace(job, recipe=replace(RECIPE, dropout=0.0)), SETTINGS[:1], files, quiet())
    other = replace(files, held_out=files.train)
    with pytest.raises(UsageError, match="another text"):
        train_grid(job, SETTINGS[:1], other, quiet())
    with pytest.raises(UsageError, match="at least one"):
        train_grid(replace(job, steps=0), SETTINGS[:1], files, quiet())
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(UsageError, match="is no name of its own"):
        train_grid(replace(job, folder=Path(".")), SETTINGS[:1], files, quiet())
    assert list(Path(".").iterdir()) == []
    Job(tmp_path / "empty", RECIPE, 1, "cpu").work.begin()
    (tmp_path / "empty/points").mkdir()
    with pytest.raises(UsageError, match="no saved training run"):
        read_grid(tmp_path / "empty")


def test_the_command(files: TextFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the folder, and the perplexity that the summaries have."""
    monkeypatch.setattr(module, "Recipe", lambda **given: RECIPE)
    options = {"widths": "8,4", "scales": "7,100", "means": "1", "decays": "", "seeds": 1, "steps": 2}
    how: dict[str, Any] = {"reduction": "sum"}
    lines = train_locater(tmp_path / "g", files.train, files.held_out, quiet(), **options, **how)
    points = read_grid(tmp_path / "g")[1]
    assert {(p.setting.width, p.setting.scale) for p in points} == {(8, 7), (8, 100), (4, 7), (4, 100)}
    assert {(p.setting.mean, p.setting.reduction) for p in points} == {(1, "sum")}
    for line, point in zip(lines, points, strict=True):
        assert point.summary is not None
        assert f"step 2, held-out perplexity {math.exp(point.summary['held_out_loss']):.2f}" in line


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gradient": "best"}, "no best; choose exact or published"),
        ({"layers": "1.5"}, "numbers with commas"),
        ({"vocabulary": "many"}, "or words"),
        ({"seeds": 0}, "1 or more"),
        ({"means": "", "decays": ""}, "at least one"),
    ],
)
def test_the_command_refuses(change: dict[str, Any], words: str, files: TextFiles, tmp_path: Path) -> None:
    """Oracle: the messages."""
    with pytest.raises(UsageError, match=words):
        train_locater(
            tmp_path / "g", files.train, files.held_out, quiet(), **{"vocabulary": "words"} | change
        )
