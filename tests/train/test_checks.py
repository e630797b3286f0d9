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


NAN = float("nan")
STEP = "step is .*: give the optimizer steps done"


def test_what_is_no_folder_step_loss_or_factor_is_refused_and_leaves_no_gradient():
    model = checkpoints.build("gpt2")
    monitor, locater = GeometryMonitor(model, IDS), Locater(model, warm_up(1.0, 3), 0.1)
    for call, wrong, words in (
        (
            lambda x: GeometryMonitor(model, IDS, folder=x),
            (3, b"a", ["a"]),
            "folder is .*: give a path, or None",
        ),
        (monitor, ("a", None, 1.5, NAN, -1), f"^{STEP}, a whole number of 0 or more$"),
        (
            lambda x: monitor(0, x),
            ("a", torch.ones(2), [1.0]),
            "loss is .*: give one number, or a tensor of one",
        ),
        (
            lambda x: warm_up(1.0, x),
            ("3", None, 0, True, NAN),
            "steps is .*: a warm-up needs a number of steps",
        ),
        (
            lambda x: locater.add_gradient(1, factor=x),
            ("a", None, -1.0, NAN, float("inf"), torch.ones(2)),
            "factor is .*: give a number of 0 or more",
        ),
        (locater, ("a", 1.5, -1), STEP),
        (locater.add_gradient, ("a", 1.5, -1), STEP),
    ):
        for each in wrong:
            with pytest.raises(UsageError, match=words):
                call(each)
    assert all(p.grad is None for p in model.parameters())
