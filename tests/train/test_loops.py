"""Trainings as people run them, looked at and steered. Oracle: the same training without the monitor, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import checkpoints
from tests.models.modules import GPT
from theodolite import open_module
from theodolite.train import GeometryMonitor, Locater

IDS = torch.randint(3, 40, (8, 20), generator=torch.Generator().manual_seed(0))
SCALE, MEAN = 1e-2, 1e-1


class Checkpointed(GPT):
    """Blocks are computed once more in the backward pass."""

    def forward(self, ids: Tensor) -> tuple[Tensor, None]:
        """Logits."""
        x = self.embedded(ids)
        for block in self.transformer["h"]:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x)), None


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    output = model(ids)
    logits = output[0] if isinstance(output, tuple) else output.logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def model_of(change: str) -> tuple[nn.Module, Any]:
    """A model, and what the monitor and LocAteR are given."""
    torch.manual_seed(0)
    if change.startswith("own"):
        module = (Checkpointed() if "checkpointed" in change else GPT()).train()
        return module, open_module(module, vocabulary=50, longest=32)
    model = checkpoints.build("gpt2").train()
    return model, model


def trained(change: str, looked_at: bool) -> tuple[dict[str, Tensor], list[float]]:
    """Three steps with LocAteR; the weights, and the penalties."""
    model, given = model_of(change)
    locater = Locater(given, SCALE, MEAN)
    monitor = GeometryMonitor(given, IDS, every=1, spectra_every=2) if looked_at else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    forward = torch.compile(model, backend="aot_eager") if "compiled model" in change else model

    def run(ids: Tensor) -> Tensor:
        return loss_of(forward, ids)

    if "compiled step" in change:
        run = torch.compile(run, backend="aot_eager")
    torch.manual_seed(1)
    penalties = []
    for step, ids in enumerate(IDS.repeat(2, 1).split(4)[:3]):
        if monitor is not None:
            assert monitor(step)["entropy_mean"] > 0
        run(ids).backward()
        penalties.append(float(locater.add_gradient(step)))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), penalties


@pytest.mark.slow
@pytest.mark.parametrize("change", ["compiled step", "own, compiled model, checkpointed"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_a_monitored_training_is_the_same_to_the_bit(change):
    plain, penalties = trained(change, looked_at=False)
    weights, others = trained(change, looked_at=True)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in plain.items())
    assert penalties == others
    assert penalties[2] < penalties[0]
