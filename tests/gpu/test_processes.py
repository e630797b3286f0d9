"""Many GPUs: workers of Ray with one each, and a process group (NCCL) of as many ranks as there are GPUs.

Where the CPU stands in, workers have cores, and two ranks speak gloo.
"""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests import checkpoints
from tests.gpu.conftest import TOLERANCE, assert_columns_near, assert_near, random_corpus
from tests.processes import ranks
from tests.train.test_locater import MEAN, RATE, SCALE, batch, dense_penalty, examples
from theodolite.models import open_model
from theodolite.passes.on_ray import survey_on_ray
from theodolite.passes.survey import survey
from theodolite.train import GeometryMonitor, Locater

pytestmark = pytest.mark.gpu

IDS = torch.randint(checkpoints.VOCABULARY, (5, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_workers_with_a_gpu_each_give_the_survey_of_the_cpu(checkpoint, device, tmp_path):
    """Oracle: float64 on the CPU, in one process. The driver's own copy of the model is on the CPU."""
    pytest.importorskip("ray", reason="Ray is not installed")
    corpus = random_corpus(checkpoints.VOCABULARY)
    driver = open_model(checkpoint("gpt2"), device="cpu")
    run = survey_on_ray(driver, corpus, tmp_path / "run", batch=2)
    assert run.provenance["device"] == device.type
    expected = survey(open_model(checkpoint("gpt2"), device="cpu", dtype="float64"), corpus, batch=2)
    assert_near(run, expected, TOLERANCE[torch.float32])


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
