"""Oracles: scipy's Theil-Sen slope; collapses built by hand in real models and in tables; a healthy training."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests import checkpoints
from theodolite.train.alarms import ADVICE, ENTROPY, RANK, VANISHING, Alarm, Alarms, alarm_lines, theil_sen
from theodolite.train.geometry import Geometry, GeometryReader

IDS = torch.randint(checkpoints.VOCABULARY, (4, 48), generator=torch.Generator().manual_seed(1))


def look(step, share=0.8, rho=0.7, residual=0.9, distance=0.1, regime=None):
    """A look at one layer of two heads, of which the second is always healthy, and two residual layers."""
    heads = {"layer": [0, 0], "head": [0, 1], "entropy_share": [share, 0.9], "propagation": [rho, 0.9]}
    heads |= {"at_distance": [distance, 0.1], "same_token": [math.nan] * 2, "sink_first": [0.0] * 2}
    heads = pd.DataFrame(heads | {"sink_learned": [0.0] * 2})
    if regime is not None:
        heads["regime"] = [regime, "uniform"]
    layers = pd.DataFrame({"layer": [0, 1], "rank_collapse": [0.9, residual]})
    return Geometry(step, heads, layers, 0.0)


def alarms_of(looks: list[Geometry]) -> list[Alarm]:
    judge = Alarms()
    return [alarm for geometry in looks for alarm in judge.update(geometry)]


def test_theil_sen_equals_scipy():
    """Oracle: scipy.stats.theilslopes, column by column."""
    generator = np.random.default_rng(0)
    x, y = np.sort(generator.choice(100, 7, replace=False)).astype(float), generator.normal(size=(7, 5))
    expected = [scipy.stats.theilslopes(column, x)[0] for column in y.T]
    np.testing.assert_allclose(theil_sen(x, y), expected, rtol=1e-12)


@pytest.mark.slow
def test_a_healthy_training_alarms_nobody():
    """Oracle: a model that learns to count at a usual rate, its loss falling; no alarm is the right answer."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=20, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    model = GPT2LMHeadModel(config).train()
    reader, judge = GeometryReader(model, (IDS[:, :1] + torch.arange(48)) % 20), Alarms()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(2)
    alarms, losses = [], []
    for step in range(81):
        if step % 5 == 0:
            alarms += judge.update(reader.look(step, spectra=step % 20 == 0))
        ids = (torch.randint(20, (8, 1), generator=generator) + torch.arange(48)) % 20
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert alarms == []


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({"share": 0.08, "rho": 0.3}, {ENTROPY}),
        ({"share": 0.08, "rho": 0.5}, set()),  # sharp, but its logits do not outgrow the context
        ({"share": 0.01, "rho": 0.5}, {ENTROPY}),
        ({"share": 0.01, "rho": 0.5, "distance": 0.9}, set()),  # a previous-token head
        ({"share": 0.01, "rho": 0.3, "distance": 0.9}, {ENTROPY}),
        ({"residual": 0.04}, {RANK}),
        ({"residual": 0.06}, set()),
        ({"rho": 0.08}, {VANISHING}),
        ({"rho": 0.3, "regime": "vanishing"}, {VANISHING}),
        ({"rho": 0.7, "regime": "vanishing"}, set()),
    ],
)
def test_levels(change, kinds):
    """Oracle: the limits as `Limits` states them, held for three looks."""
    alarms = alarms_of([look(10 * n, **change) for n in range(3)])
    assert {alarm.kind for alarm in alarms} == kinds
    places = {(alarm.layer, alarm.head) for alarm in alarms}
    assert places <= {(1, None)} if kinds == {RANK} else places <= {(0, 0)}


def test_a_fall_alarms_before_the_limit_is_reached():
    """Oracle: a straight line, 0.3 at the last look, 0.1 lower at each; it meets 0.1 in two looks."""
    falling = [look(10 * n, share=0.8 - 0.1 * n, rho=0.35) for n in range(6)]
    (alarm,) = alarms_of(falling)
    assert alarm.step == 50
    assert alarm.value == pytest.approx(0.4)  # the median of the last three
    assert alarm.slope == pytest.approx(-0.01)
    assert not alarms_of([look(10 * n, share=0.8 - 0.01 * n, rho=0.35) for n in range(6)])
    assert not alarms_of([look(10 * n, share=0.8 - 0.1 * n, rho=0.6) for n in range(6)])


def test_an_alarm_comes_once_until_it_has_recovered():
    """Oracle: the steps at which the median of three crosses 0.05 and 0.075, by hand."""
    residuals = [0.9, 0.04, 0.04, 0.04, 0.06, 0.06, 0.04, 0.04, 0.2, 0.2, 0.2, 0.04, 0.04]
    judge = Alarms()
    steps = [n for n, residual in enumerate(residuals) if judge.update(look(n, residual=residual))]
    assert steps == [2, 12]
    assert judge.active == 1
    odd = [look(n, residual=0.01 if n == 4 else 0.9, rho=0.01 if n == 6 else 0.7) for n in range(9)]
    assert not alarms_of(odd)  # one look alone alarms nobody


def test_a_fall_that_pauses_alarms_again_only_at_the_limit():
    """Oracle: by hand; it alarms while it falls, pauses for two looks, and its median of three is 0.08 at 110."""
    shares = [0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.3, 0.3, 0.2, 0.15, 0.08, 0.07, 0.06]
    alarms = alarms_of([look(10 * n, share=share, rho=0.35) for n, share in enumerate(shares)])
    assert [(alarm.step, alarm.collapsed) for alarm in alarms] == [(50, False), (110, True)]


def test_a_head_that_recovers_from_an_early_alarm_alarms_again():
    """Oracle: a reviewer's sequence: an alarm by the trend, twenty healthy looks, and then a collapse."""
    values = [(0.8 - 0.09 * n, 0.30) for n in range(6)] + [(0.60, 0.45)] * 20 + [(0.05, 0.001)] * 6
    judge, alarms = Alarms(), []
    for n, (share, rho) in enumerate(values):
        alarms += judge.update(look(10 * n, share=share, rho=rho))
        assert n != 25 or judge.active == 0
    assert {alarm.kind for alarm in alarms if alarm.step < 100} == {ENTROPY}
    late = [(alarm.kind, alarm.step, alarm.collapsed) for alarm in alarms if alarm.step > 100]
    assert sorted(late) == [(ENTROPY, 270, True), (VANISHING, 270, True)]


def test_messages_name_place_value_trend_and_remedy():
    alarms = [Alarm(300, ENTROPY, 2, head, 0.08 + head / 100, -0.001) for head in range(5)]
    alarms += [Alarm(300, RANK, layer, None, 0.03, -0.1, collapsed=True) for layer in (4, 0)]
    entropy, rank = alarm_lines(alarms)
    assert entropy == (
        "step 300: entropy collapse in L2H0: entropy over its maximum 0.08, reaches 0 in about "
        "80 steps (also L2H1, L2H2, L2H3 and 1 more); " + ADVICE[ENTROPY]
    )
    assert "rank collapse after block 3: relative residual 0.03, collapsed (also before block 0); " in rank
    assert Alarm(0, VANISHING, 1, 0, 0.3, 0.0).trend == "ρ 0.3, not falling any more"
    assert alarm_lines([]) == []
