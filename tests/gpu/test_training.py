"""The monitor and LocAteR on a GPU, against the CPU in float64."""

from __future__ import annotations

import copy

import pytest
import torch

from tests import checkpoints
from tests.gpu.conftest import assert_columns_near
from tests.train.test_locater import MEAN, SCALE, dense_penalty
from theodolite.train import GeometryMonitor, Locater

pytestmark = pytest.mark.gpu

IDS = torch.randint(checkpoints.VOCABULARY, (3, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["gpt2", "llama3", "gpt_oss"])
def test_the_monitor_sees_what_it_sees_on_the_cpu(family, dtype, device):
    """Oracle: the same weights, rounded to the dtype, in float64 (gpt_oss, whose experts have no float64: float32)."""
    if family == "gpt_oss" and dtype == torch.bfloat16:
        pytest.skip("rounding sends tokens to other experts")
    model = checkpoints.build(family).to(dtype)
    oracle = copy.deepcopy(model).to(torch.float32 if family == "gpt_oss" else torch.float64)
    monitors = [GeometryMonitor(m, IDS, every=1) for m in (model.to(device), oracle)]
    for monitor in monitors:
        assert monitor(0)
    ours, theirs = (monitor.last for monitor in monitors)
    columns = list(theirs.heads.columns)
    if dtype == torch.bfloat16:
        columns = ["layer", "head", "entropy", "trace", "spectral_norm"]
    assert_columns_near(
        ours.heads[columns], theirs.heads[columns], 5e-2 if dtype == torch.bfloat16 else 5e-4, "heads"
    )
    assert next(model.parameters()).device == device


def test_the_penalty_and_its_gradient_are_those_of_dense_matrices(device):
    """Oracle: d×d matrices and autograd through them, float64, on the CPU."""
    model = checkpoints.build("llama3").to(device)
    penalty = Locater(model, SCALE, MEAN)()
    assert penalty.device == device
    penalty.backward()
    oracle = checkpoints.build("llama3").double()
    expected = dense_penalty(oracle)
    expected.backward()
    assert penalty.item() == pytest.approx(expected.item(), rel=1e-5)
    for (name, ours), theirs in zip(model.named_parameters(), oracle.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            torch.testing.assert_close(
                ours.grad.cpu().double(), theirs.grad, rtol=1e-4, atol=1e-5 * float(theirs.grad.abs().max())
            )
