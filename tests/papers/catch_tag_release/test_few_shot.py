"""Fig. 3 of the third paper, on small models of the offline task."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from tests.papers.shared import quiet
from theodolite.errors import UsageError
from theodolite.evaluate.few_shot import few_shot_accuracy
from theodolite.models import open_model
from theodolite.report.outcome import Outcome
from theodolite_papers import command as folders
from theodolite_papers.catalogue import made_by
from theodolite_papers.catch_tag_release import few_shot as shots
from theodolite_papers.catch_tag_release.few_shot import (
    DENSE,
    few_shot_provenance,
    figure_3,
    models_in,
    shots_table,
    show_accuracy,
)
from theodolite_papers.experiment import Study
from theodolite_papers.training.task_models import train_task_model
from theodolite_papers.training.tasks import DEFAULT, FewShot


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    out = tmp_path_factory.mktemp("trained")
    for seed in (0, 1):
        config = replace(DEFAULT, layers=1, heads=2, width=16, batch=4, steps=3, seed=seed, bfloat16=False)
        train_task_model(out / f"few-{seed}", FewShot(), config, threads=1, console=quiet())
    (out / "other").mkdir()
    (out / "other" / "training.json").write_text('{"task": "characters"}')
    return out


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(shots, "PROMPTS", 60)
    monkeypatch.setattr(shots, "CALIBRATION", 32)
    monkeypatch.setattr(shots, "SPARSITIES", (0.5,))


def shown(table: pd.DataFrame) -> Outcome:
    outcome = Outcome()
    show_accuracy(outcome, table)
    return outcome


def test_every_model_and_method_answers_the_same_prompts(folder):
    assert [place.name for place in models_in(folder)] == ["few-0", "few-1"]
    table = shots_table(folder)
    assert len(table) == 2 * 5 * 6
    dense_rows = table[(table["folder"] == "few-1") & (table["model"] == DENSE)]
    direct = few_shot_accuracy(open_model(folder / "few-1"), prompts=60, seed=shots.PROMPT_SEED)
    np.testing.assert_array_equal(dense_rows["accuracy"], direct["accuracy"])
    np.testing.assert_array_equal(dense_rows["accuracy_se"], direct["accuracy_se"])
    outcome = shown(table)
    assert len(outcome.verdicts) == 5
    assert [exhibit.key for exhibit in outcome.exhibits] == ["accuracy-50"]
    assert {"dense", "OATS", "Wanda"} <= {trace.name for trace in outcome.exhibits[0].figure.data}


def made_up(curves: dict[str, list[float]], spread: float) -> pd.DataFrame:
    random = np.random.default_rng(0)
    return pd.DataFrame(
        [
            {"model": name, "folder": f"m{seed}", "seed": seed, "sparsity": 0.5, "shots": k}
            | {"accuracy": value + spread * random.normal(), "accuracy_se": 0.01, "prompts": 60}
            for seed in range(3)
            for name, curve in curves.items()
            for k, value in enumerate(curve)
        ]
    )


def test_verdicts_follow_the_numbers():
    curves = {
        "dense": [0.5, 0.55, 0.6, 0.65, 0.7, 0.75],
        "OATS": [0.5, 0.55, 0.6, 0.65, 0.7, 0.72],
        "Wanda": [0.5, 0.5, 0.5, 0.5, 0.5, 0.5],
        "SparseGPT": [0.4, 0.45, 0.5, 0.55, 0.6, 0.62],
        "magnitude": [0.4, 0.4, 0.4, 0.4, 0.4, 0.4],
    }
    sharp = shown(made_up(curves, 1e-4)).verdicts
    assert [verdict.answer for verdict in sharp[:4]] == ["holds", "holds", "holds", "fails"]
    # The lead over SparseGPT is the same at 0 and at 5.
    assert sharp[4].answer == "not decided"
    assert {verdict.answer for verdict in shown(made_up(curves, 0.5)).verdicts} == {"not decided"}


def test_the_folder_is_known_and_others_are_refused(folder):
    assert folders.provenance_reader(folder) is few_shot_provenance
    assert made_by([figure_3]) == "theodolite train few-shot"
    study = Study(few_shot_provenance(folder))
    assert study.provenance["few_shot"]["models"] == ["few-0", "few-1"]
    del study.provenance["few_shot"]
    with pytest.raises(UsageError, match="pass the folder that `theodolite train few-shot` wrote"):
        study.outcome(figure_3)
