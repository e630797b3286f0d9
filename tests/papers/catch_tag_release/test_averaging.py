"""Oracles: tables made up by hand, the construction itself, and whole calls at a fraction of the size."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tests.papers.catch_tag_release.test_averaging_training import constructed
from tests.papers.shared import verdicts_of
from tests.report.drawn import drawn, finite
from theodolite.judging import FAILS, HOLDS, IN_PART, UNDECIDED, UNTESTABLE, Verdict
from theodolite.system.wording import for_plotly
from theodolite_papers.catalogue import EXPERIMENTS
from theodolite_papers.catch_tag_release import averaging, averaging_training
from theodolite_papers.catch_tag_release.averaging import (
    BELOW,
    error_of_ratio,
    judge_models,
    measured,
    random_directions,
)
from theodolite_papers.catch_tag_release.averaging_model import averaging_model
from theodolite_papers.catch_tag_release.averaging_training import (
    PUBLISHED,
    QK_NORM,
    STANDARD,
    AveragingRecipe,
    PublishedModel,
    TrainedModels,
    train_averaging,
)
from theodolite_papers.experiment import Study, of_nothing

ERRORS = {"left_se": 1e-3, "sink_se": 1e-3, "left_blind_se": 1e-3}
RANDOM = {"sink_begun": 0.05, "left_random": 0.2, "left_random_sd": 0.1, "as_costly": 0.0}
GROWN = {"sink": 0.99, "outlier": 9.0, "second_value": 0.01, "second_query_key": 0.01, "left_blind": 1.0}


def models(*rows: tuple[str, float, dict[str, float]]) -> pd.DataFrame:
    """Trained models: kind, share of residual variance, and what differs from a model that has grown everything."""
    table = pd.DataFrame(
        [
            {"kind": kind, "seed": seed, "left": left, "error": left / 5, "left_untagged": 1.0}
            | GROWN
            | RANDOM
            | ERRORS
            | other
            for seed, (kind, left, other) in enumerate(rows)
        ]
    )
    table["solved"] = table["left"] <= 0.1
    for name in ("second_value", "second_query_key"):
        table[f"{name}_begun"] = 0.5
    return table


def judged(table: pd.DataFrame, words: str) -> Verdict:
    judged = verdicts_of(judge_models, table, of="sinks/averaging")
    return next(verdict for verdict in judged if words in verdict.claim)


def verdict(table: pd.DataFrame, words: str) -> str:
    return judged(table, words).answer


def test_one_model_without_a_sink_decides_on_a_strong_one() -> None:
    """That all lose the task with [SEP] hidden is another part of the claim, which a weak catch does not refute."""
    grown = [(STANDARD, 0.01, {}), (STANDARD, 0.02, {}), (PUBLISHED, 0.01, {}), (PUBLISHED, 0.02, {})]
    assert verdict(models(*grown), "necessitate") == HOLDS
    weak = judged(models(*grown, (QK_NORM, 0.05, {"sink": 0.1})), "necessitate")
    assert weak.answer == IN_PART
    assert [part.answer for part in weak.parts] == [FAILS, HOLDS]
    none = (QK_NORM, 0.05, {"sink": 0.1, "left_blind": 0.05})
    assert verdict(models(*grown, none), "necessitate") == FAILS
    assert verdict(models(*grown, (QK_NORM, 0.5, {"sink": 0.1})), "necessitate") == HOLDS
    assert verdict(models((PUBLISHED, 0.5, {})), "necessitate") == UNTESTABLE
    assert verdict(models((PUBLISHED, 0.5, {})), "can be trained") == FAILS


def test_attention_of_just_the_threshold_makes_no_sink() -> None:
    """Oracle: a sink is paid more than 0.3 (Gu et al. 2024)."""
    part = judged(models((STANDARD, 0.01, {"sink": 0.3})), "necessitate").parts[0]
    assert f"pay [SEP] no more than 0.3: {STANDARD}: 1 of 1" in part.evidence


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("sink", 0.1, "forms an attention sink"),
        ("outlier", 2.0, "outlier feature dimension"),
        ("second_value", 0.5, "W_V¹ is low rank"),
        ("second_query_key", 0.5, "W_K² is low rank"),
        ("left_blind", 0.01, "sink is what makes the tags"),
        ("left_untagged", 0.01, "tags are what the second layer reads"),
    ],
)
def test_each_claim_has_its_number(column: str, value: float, words: str) -> None:
    """Oracle: one column moved to the wrong side; the first verdict of a claim is the paper's architecture's."""
    rows = [(kind, 0.01, {}) for kind in [PUBLISHED] * 6 + [STANDARD] * 6]
    assert verdict(models(*rows), words) == HOLDS
    moved = models(*rows)
    moved[column] = [*(value * (1 + step / 100) for step in range(6)), *moved[column][6:]]
    assert verdict(moved, words) == FAILS


def test_a_tag_that_costs_no_more_than_random_directions_is_not_called_read():
    """Oracle: by hand. All six need the direction, but any other one as well; or too few models are better."""
    words = "tags are what the second layer reads"
    table = models(*[(PUBLISHED, 0.01, {})] * 6)
    assert verdict(table, words) == HOLDS
    assert verdict(table.assign(as_costly=0.06), words) == FAILS
    assert verdict(table.assign(as_costly=[0.0, 0.0, 0.0, 0.0, 0.5, 0.5]), words) == UNDECIDED
    assert verdict(table.assign(solved=False), words) == UNTESTABLE
    assert "residual variance 0.200" in judged(table, words).evidence


def test_measures_of_the_construction() -> None:
    """Oracle: what the theorem says of it at s_tag = 12: a sink, a tag of size 11, rank one, and no error."""
    model = constructed(averaging_model(12.0, d=0.1), 12)
    initial = PublishedModel([torch.Generator().manual_seed(0)])
    with torch.no_grad():
        initial.s_tag.fill_(1)  # [SEP] like any other token of number 0
        initial.s_num.fill_(0)
    row = measured(
        TrainedModels(AveragingRecipe("built", 2, 0, 1, 0.0), (0,), initial, model, torch.zeros(1, 1))
    ).iloc[0]
    assert 0.05 < row["sink_begun"] < 0.3
    assert row["solved"]
    assert row["sink"] > 0.99
    assert row["outlier"] == pytest.approx(11, rel=0.05)
    assert row["tag_share"] == pytest.approx(1)
    assert row["eta"] > 0.95
    assert row["eta_chance"] < 0.5
    assert row["second_value"] == 0
    assert row["sink_se"] < 1e-3  # all attention, in every sequence
    assert row["stable_rank_query_key"] == pytest.approx(1)
    # Nothing tells the tokens after [SEP] any more: the mean of all.
    assert row["left_untagged"] == pytest.approx(row["left_mean_of_all"], rel=0.15)
    assert row["left_blind"] == pytest.approx(row["left_mean_of_all"], rel=0.15)


def test_the_trainings_are_the_same_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Determinism alone; `test_averaging_training.py` has the training's oracle. As many rows as seeds."""
    monkeypatch.setattr(averaging_training, "train_averaging", partial(train_averaging, steps=10))
    monkeypatch.setattr(averaging, "RECIPES", {kind: 2 for kind in averaging.RECIPES})
    monkeypatch.setattr(averaging, "HELD_OUT_SEQUENCES", 100)
    progress: list[tuple[str, int, int]] = []

    def show(*what: Any) -> None:
        progress.append(what)

    first, again = (Study(of_nothing(), show=show).outcome(averaging.averaging) for _ in range(2))
    table = first.tables["models"]
    assert len(table) == 12
    assert progress == [("training", done, 6) for done in range(7)] * 2
    pd.testing.assert_frame_equal(first.tables["models"], again.tables["models"])
    figures = {exhibit.key: exhibit.figure for exhibit in first.exhibits}
    dotted = figures.keys() & set(table)
    assert dotted
    for name in dotted:  # a dot for every model
        np.testing.assert_allclose(drawn(figures[name]), finite(table[name]), rtol=1e-6)
        np.testing.assert_allclose(drawn(figures[name], "x"), finite(table["left"]), rtol=1e-6)
    assert len(figures["losses"].data) == len(table) + 2  # a curve for every model, two levels
    for picture in figures["attention"].data:
        np.testing.assert_allclose(np.nansum(picture.z, axis=1), 1, rtol=1e-5)


def test_figure_6(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the theorem holds, the rate is the derived one, and attention falls by e a unit of s_tag."""
    monkeypatch.setattr(averaging, "SEQUENCES", 100)
    outcome = Study(of_nothing()).outcome(EXPERIMENTS["sinks/figure6"])
    assert not outcome.verdicts  # it says nothing of any model
    errors = outcome.tables["errors"].query("s_tag == 30")
    np.testing.assert_allclose(errors["median"], errors["derived_median"], rtol=1e-2)
    rest = outcome.tables["attention"].set_index("s_tag")["rest"]
    assert np.log(rest[20.0] / rest[30.0]) == pytest.approx(10, rel=1e-3)
    figures = {exhibit.key: exhibit.figure for exhibit in outcome.exhibits}
    for picture in figures["attention"].data:
        np.testing.assert_allclose(np.nansum(picture.z, axis=1), 1, rtol=1e-5)
    last = np.asarray(figures["attention"].data[-1].z)
    assert (last[averaging.LENGTH // 2 :, averaging.LENGTH // 2] > 0.9).all()
    variants = outcome.tables["errors"].query(f"median > {BELOW}")
    for name, rows in variants.groupby("b_d"):
        shown = drawn(figures["convergence"], name=for_plotly(name))
        np.testing.assert_allclose(shown, finite(rows["median"]), rtol=1e-5)
    shown = drawn(figures["rest"], name="tokens after [SEP]")
    np.testing.assert_allclose(shown, finite(rest[rest > 0]), rtol=1e-5)


def test_the_error_of_a_ratio_is_that_of_resampled_sequences():
    """Oracle: the spread of the ratio over 400 draws of as many sequences; each estimate of it is good to 10 %."""
    generator = torch.Generator().manual_seed(0)
    wholes = torch.rand(400, 300, generator=generator) + 0.5
    parts = 0.3 * wholes + 0.2 * torch.randn(400, 300, generator=generator) * wholes
    ratios = parts.sum(-1) / wholes.sum(-1)
    assert float(error_of_ratio(parts, wholes).mean()) == pytest.approx(float(ratios.std()), rel=0.1)
    assert error_of_ratio(0.3 * wholes, wholes).max() < 1e-7


def test_random_directions_are_uniform_in_what_is_written() -> None:
    """Oracle: E v vᵀ is the projection on the span of what was written over its dimension, 4 standard errors."""
    generator = torch.Generator().manual_seed(3)
    basis = torch.linalg.qr(torch.randn(16, 3, generator=generator)).Q
    sizes = torch.tensor([100.0, 1.0, 0.1])  # the size of what is written does not matter, only where
    written = (torch.randn(1, 50, 20, 3, generator=generator) * sizes) @ basis.T
    directions = random_directions(written, 4000, 0)[:, 0]
    torch.testing.assert_close(directions.norm(dim=-1), torch.ones(4000), atol=1e-5, rtol=0)
    mean = directions.T @ directions / 4000
    assert float((mean - basis @ basis.T / 3).norm()) < 4 * 4000**-0.5
    assert torch.equal(directions, random_directions(written, 4000, 0)[:, 0])
