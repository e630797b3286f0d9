"""Many GPUs: a process group (NCCL) of as many ranks as there are GPUs; where the CPU stands in, two speak gloo."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests import checkpoints
from tests.gpu.conftest import assert_columns_near
from tests.processes import ranks
from tests.train.test_locater import MEAN, RATE, SCALE, batch, dense_penalty, examples
from theodolite.train import GeometryMonitor, Locater

pytestmark = pytest.mark.gpu

IDS = torch.randint(checkpoints.VOCABULARY, (5, 24), generator=torch.Generator().manual_seed(1))


def rank_work(rank: int, ranks: int, kind: str) -> tuple[pd.DataFrame, dict[str, torch.Tensor]]:
    """A step with DDP and LocAteR, and a look of the monitor before it, by all ranks together; both."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    model = checkpoints.build("llama3").to(device).train()
    parallel = DistributedDataParallel(model, device_ids=[rank] if kind == "cuda" else None)
    monitor = GeometryMonitor(parallel, IDS if rank == 0 else IDS[:1], every=1, over_ranks=True)
    monitor(0)
    ids = batch(examples(8)[rank::ranks])["input_ids"].to(device)
    parallel(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    Locater(parallel, SCALE, MEAN)().backward()
    torch.optim.SGD(model.parameters(), RATE).step()
    return monitor.last.heads, {name: value.detach().cpu() for name, value in model.named_parameters()}


def test_ranks_of_a_process_group_look_and_step_as_one_process(device):
    """Oracle: float64 in one process on the CPU: the look at all contexts, and a step with the d×d penalty."""
    world = min(torch.cuda.device_count(), 8) if device.type == "cuda" else 2  # as many as there are examples
    backend = "nccl" if device.type == "cuda" else "gloo"
    results = ranks(rank_work, world, device.type, processes=world, backend=backend)
    model = checkpoints.build("llama3").double()
    monitor = GeometryMonitor(model, IDS, every=1)
    monitor(0)
    ids = batch(examples(8))["input_ids"]
    (model(input_ids=ids, labels=ids, use_cache=False).loss + dense_penalty(model)).backward()
    torch.optim.SGD(model.parameters(), RATE).step()
    for look, weights in results:
        assert_columns_near(look, monitor.last.heads, 5e-4, "heads")
        for name, expected in model.named_parameters():
            torch.testing.assert_close(weights[name].double(), expected.detach(), rtol=1e-5, atol=1e-5)
