"""Oracles: losses drawn by hand, a training written out, the tables' own columns."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch

from theodolite.papers.localization.monitor_runs import (
    BATCH,
    BEHIND,
    HEADS,
    LAYERS,
    LEARNING_RATES,
    LENGTH,
    SMOOTHED,
    STALLED,
    WIDTH,
    LossThresholds,
    behind,
    compare_learning_rates,
    restricted_lead,
    rises,
    stalls,
    train_with_monitor,
)
from theodolite.papers.training.models import gpt2
from theodolite.papers.training.tasks import Characters
from theodolite.papers.training.training_loop import BETAS

FALLING = 4 - 0.01 * np.arange(200.0)
"""0.01 nats per step, so 1 nat in the steps over which a stall is judged."""

TWO = list(LEARNING_RATES.items())[:2]

SIGNS = LossThresholds(rise=0.05, gain=0.01)


def test_a_falling_loss_is_not_noticed():
    assert rises(FALLING, SIGNS) is None
    assert stalls(FALLING, SIGNS) is None
    assert behind(FALLING, FALLING) is None


def test_a_rise_is_noticed_when_the_mean_of_twenty_exceeds_its_minimum():
    """Oracle: from step 100 on the loss is 1 higher; k of them raise the mean of 20 by k/20 above the fall."""
    losses = FALLING.copy()
    losses[100:] = losses[99] + 1 + 0.01 * np.arange(100)
    means = [losses[t - SMOOTHED + 1 : t + 1].mean() for t in range(SMOOTHED - 1, 200)]
    lowest = np.minimum.accumulate(means)
    expected = next(t for t, (mean, low) in enumerate(zip(means, lowest, strict=True)) if mean > low + 0.05)
    assert rises(losses, SIGNS) == expected + SMOOTHED


def test_a_loss_that_is_no_number_is_a_rise():
    losses = FALLING.copy()
    losses[50] = math.nan
    assert rises(losses, SIGNS) == 51


def test_a_stall_is_noticed_after_its_steps():
    """Oracle: constant from step 60 on; 100 steps later the mean of twenty has been constant for 81."""
    losses = np.minimum(FALLING, 4)
    losses[60:] = losses[60]
    means = pd.Series(losses).rolling(SMOOTHED).mean()
    expected = next(t for t in range(STALLED + SMOOTHED, 200) if means[t - STALLED] - means[t] < 0.01)
    assert stalls(losses, SIGNS) == expected + 1
    assert rises(losses, SIGNS) is None


def test_signs_are_the_weakest_that_no_healthy_loss_shows():
    """Oracle: noisy losses; at the signs none is noticed, and just inside them one rises and one stalls."""
    random = np.random.default_rng(0)
    healthy = [4 - 0.01 * np.arange(300) + random.normal(0, 0.3, 300) for _ in range(3)]
    signs = LossThresholds.beyond(healthy)
    assert [rises(losses, signs) for losses in healthy] == [None] * 3
    assert [stalls(losses, signs) for losses in healthy] == [None] * 3
    weaker = LossThresholds(signs.rise * (1 - 1e-9), signs.gain * (1 + 1e-9))
    assert sum(rises(losses, weaker) is not None for losses in healthy) == 1
    assert sum(stalls(losses, weaker) is not None for losses in healthy) == 1


def test_behind_by_a_constant():
    """Oracle: a gap of 2 · BEHIND from step 40 on reaches the mean of 20 halfway, ten steps later."""
    losses = FALLING.copy()
    losses[40:] += 2 * BEHIND
    assert behind(losses, FALLING) in (50, 51)  # the tenth step is a tie, decided by rounding


@pytest.mark.parametrize(
    ("first", "other", "lead"),
    [
        (40, 100, 60),
        (100, 40, -60),
        (40, None, 160),
        (math.nan, 150, -50),
        (math.nan, None, 0),
        (40, math.nan, 160),
    ],
)
def test_what_never_comes_comes_at_the_end(first, other, lead):
    """Oracle: by hand, of 200 steps."""
    assert restricted_lead(first, other, 200) == lead


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Characters:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog; " * 300)
    return Characters.of_file(path, LENGTH)


def test_tables_are_whole_and_the_same_again(task):
    """Oracle: numbers of rows by hand; that the same call gives the same tables is determinism alone."""
    calls: list[tuple[str, int, int]] = []

    def tables() -> dict[str, pd.DataFrame]:
        return compare_learning_rates(
            task,
            learning_rates=dict(TWO),
            seeds=(3,),
            steps=24,
            every=8,
            show_progress=lambda *what: calls.append(what),
        )

    first, second = tables(), tables()
    assert calls[:3] == [("training", done, 2) for done in (0, 1, 2)]
    assert len(first["runs"]) == 2
    assert len(first["losses"]) == 2 * 24
    assert first["looks"]["step"].tolist() == [0, 8, 16, 24] * 2
    for name, table in first.items():
        pd.testing.assert_frame_equal(table, second[name])
    healthy = first["runs"].iloc[0]
    assert pd.isna(healthy["first_alarm"])
    assert pd.isna(healthy["behind_healthy"])


@pytest.mark.parametrize("learning_rate", list(LEARNING_RATES.values())[1:], ids=list(LEARNING_RATES)[1:])
def test_the_losses_are_those_of_a_plain_loop(task, learning_rate):
    """Oracle: AdamW written out for the same model and batches, and nobody who looks at it."""
    run = train_with_monitor(task, learning_rate, seed=3, steps=5, every=2)
    torch.manual_seed(3)
    model = gpt2(len(task.characters), LENGTH, LAYERS, HEADS, WIDTH).train()
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    losses = []
    for step in range(1, 6):
        inputs, targets = task.batch(step - 1, BATCH, 3)
        logits = model(input_ids=inputs).logits.log_softmax(-1)
        loss = -logits.gather(-1, targets[..., None]).mean()
        losses.append(loss.item())
        model.zero_grad()
        loss.backward()
        rate = learning_rate.peak * min(1, step / learning_rate.warm_up)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                first, second = moments[name]
                first.lerp_(parameter.grad, 1 - BETAS[0])
                second.lerp_(parameter.grad.square(), 1 - BETAS[1])
                size = (second / (1 - BETAS[1] ** step)).sqrt() + 1e-8
                parameter -= rate * first / (1 - BETAS[0] ** step) / size
    np.testing.assert_allclose(run["losses"]["loss"], losses, rtol=1e-4)
    assert run["looks"]["step"].tolist() == [0, 2, 4]


def test_the_pace_warms_up_on_a_line():
    _, at_once, rising = LEARNING_RATES.values()
    assert rising.at(0) == pytest.approx(rising.peak / rising.warm_up)
    assert rising.at(rising.warm_up - 1) == rising.at(10_000) == rising.peak
    assert at_once.at(0) == at_once.peak
