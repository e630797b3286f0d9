"""What is asked of the monitor and of LocAteR is refused in one line where it is asked, not where it is used."""

from __future__ import annotations

import pytest
import torch

from tests import checkpoints
from theodolite.errors import UsageError
from theodolite.train import GeometryCallback, GeometryMonitor, Locater, QKClipCallback, warm_up

IDS = torch.ones((2, 8), dtype=torch.int64)


@pytest.mark.parametrize("made", [GeometryCallback, QKClipCallback])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every is 0 .* must be 1 or more"),
        ({"every": "a"}, "every is 'a' .* whole numbers"),
        ({"spectra_every": 1.5}, r"spectra_every 1\.5"),
        ({"limits": {}}, "limits is a dict"),
        ({"ids": "text"}, "the monitor batch is a str"),
        ({"ids": IDS[:, :7]}, r"shape \(2, 7\).* 8 positions or more"),
        ({"ids": IDS, "inline": True}, "and not both"),
    ],
)
def test_callbacks_refuse_at_once_and_not_when_training_begins(made, options, words):
    with pytest.raises(UsageError, match=words):
        made(**options)


@pytest.mark.parametrize("folder", [3, b"bytes", ["a"]])
def test_a_folder_that_is_no_path_is_refused(folder):
    with pytest.raises(UsageError, match=r"folder is .*: give a path, or None"):
        GeometryMonitor(checkpoints.build("gpt2"), IDS, folder=folder)


@pytest.mark.parametrize("steps", ["3", None, 0, True, float("nan")])
def test_a_warm_up_needs_steps(steps):
    with pytest.raises(UsageError, match=r"steps is .*: a warm-up needs a number of steps, one or more"):
        warm_up(1.0, steps)


@pytest.mark.parametrize("factor", ["a", None, -1.0, float("nan"), float("inf"), torch.ones(2)])
def test_a_factor_that_is_no_number_is_refused_and_leaves_no_gradient(factor):
    model = checkpoints.build("gpt2")
    locater = Locater(model, 0.1, 0.1)
    with pytest.raises(UsageError, match=r"factor is .*: give a number of 0 or more"):
        locater.add_gradient(factor=factor)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("step", ["a", 1.5, -1])
def test_a_strength_that_is_a_function_asks_for_a_whole_step(step):
    locater = Locater(checkpoints.build("gpt2"), warm_up(1.0, 3), 0.1)
    for act in (locater, locater.add_gradient):
        with pytest.raises(UsageError, match=r"step is .*: give the optimizer steps done"):
            act(step)
