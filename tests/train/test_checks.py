"""What is asked of the monitor and of LocAteR is refused in one line where it is asked, not where it is used."""

from __future__ import annotations

import pytest
import torch

from tests import checkpoints
from theodolite.errors import UsageError
from theodolite.train import GeometryCallback, GeometryMonitor, Locater, QKClipCallback, warm_up

IDS = torch.ones((2, 8), dtype=torch.int64)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every is 0 .* must be 1 or more"),
        ({"every": "a"}, "every is 'a' .* whole numbers"),
        ({"spectra_every": 1.5}, r"spectra_every 1\.5"),
        ({"limits": {}}, r"limits is a dict: give .*Limits\(\.\.\.\)"),
        ({"ids": "text"}, "the monitor batch is a str: give a tensor of token ids"),
        ({"ids": IDS[:, :7]}, r"shape \(2, 7\).* 8 positions or more"),
        ({"ids": IDS.bool()}, r"dtype torch\.bool: give token ids"),
        ({"ids": IDS, "inline": True}, "and not both"),
    ],
)
def test_a_monitor_and_callbacks_refuse_at_once(options, words):
    for made in (GeometryCallback, QKClipCallback):
        with pytest.raises(UsageError, match=words):
            made(**options)
    with pytest.raises(UsageError, match=words):
        GeometryMonitor(checkpoints.build("gpt2"), **{"ids": IDS} | options)


def test_a_folder_that_is_no_path_is_refused():
    model = checkpoints.build("gpt2")
    for folder in (3, b"bytes", ["a"]):
        with pytest.raises(UsageError, match=r"folder is .*: give a path, or None"):
            GeometryMonitor(model, IDS, folder=folder)


def test_a_step_or_a_loss_that_is_no_number_is_refused():
    monitor = GeometryMonitor(checkpoints.build("gpt2"), IDS)
    for step in ("a", None, 1.5, float("nan"), -1):
        with pytest.raises(
            UsageError, match=r"^step is .*: give the optimizer steps done, a whole number of 0 or more$"
        ):
            monitor(step)
    for loss in ("much", torch.ones(2), [1.0]):
        with pytest.raises(UsageError, match=r"loss is .*: give one number, or a tensor of one"):
            monitor(0, loss)


def test_a_warm_up_needs_steps():
    for steps in ("3", None, 0, True, float("nan")):
        with pytest.raises(UsageError, match=r"steps is .*: a warm-up needs a number of steps, one or more"):
            warm_up(1.0, steps)


def test_a_factor_or_a_step_that_is_no_number_is_refused_and_leaves_no_gradient():
    model = checkpoints.build("gpt2")
    locater = Locater(model, warm_up(1.0, 3), 0.1)
    for factor in ("a", None, -1.0, float("nan"), float("inf"), torch.ones(2)):
        with pytest.raises(UsageError, match=r"factor is .*: give a number of 0 or more"):
            locater.add_gradient(1, factor=factor)
    for step in ("a", 1.5, -1):
        for act in (locater, locater.add_gradient):
            with pytest.raises(UsageError, match=r"step is .*: give the optimizer steps done"):
                act(step)
    assert all(p.grad is None for p in model.parameters())
