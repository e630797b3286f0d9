"""Many GPUs: workers of Ray with one each, and a process group (NCCL) of as many ranks as there are GPUs.

Where the CPU stands in, workers have cores, and two ranks speak gloo.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from tests import checkpoints
from tests.gpu.conftest import TOLERANCE, assert_columns_near, assert_near, random_corpus
from tests.processes import together
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
    lost: list[str] = []
    driver = open_model(checkpoint("gpt2"), device="cpu")
    run = survey_on_ray(driver, corpus, tmp_path / "run", batch=2, say=lost.append)
    assert not lost
    assert run.provenance["device"] == device.type
    expected = survey(open_model(checkpoint("gpt2"), device="cpu", dtype="float64"), corpus, batch=2)
    assert_near(run, expected, TOLERANCE[torch.float32])


def rank_work(rank: int, ranks: int, port: int, folder: str, kind: str) -> None:
    """A step with DDP and LocAteR, and a look of the monitor before it, by all ranks together."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
    model = checkpoints.build("llama3").to(device).train()
    parallel = DistributedDataParallel(model, device_ids=[rank] if kind == "cuda" else None)
    monitor = GeometryMonitor(parallel, IDS if rank == 0 else IDS[:1], every=1, over_ranks=True)
    monitor(0)
    mine = {name: values.to(device) for name, values in batch(examples(8)[rank::ranks]).items()}
    (parallel(input_ids=mine["input_ids"], labels=mine["input_ids"], use_cache=False).loss).backward()
    Locater(parallel, SCALE, MEAN)().backward()
    torch.optim.SGD(model.parameters(), RATE).step()
    weights = {name: value.detach().cpu().contiguous() for name, value in model.named_parameters()}
    save_file(weights, Path(folder, f"{rank}.safetensors"))
    Path(folder, f"{rank}.json").write_text(json.dumps(monitor.last.heads.to_dict("list")))
    distributed.destroy_process_group()


def test_ranks_of_a_process_group_look_and_step_as_one_process(device, tmp_path):
    """Oracle: float64 in one process on the CPU: the look at all contexts, and a step with the d×d penalty."""
    ranks = torch.cuda.device_count() if device.type == "cuda" else 2
    ranks = min(ranks, 8)  # as many as there are examples
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together(rank_work, (ranks, port, str(tmp_path), device.type), ranks)
    model = checkpoints.build("llama3").double()
    monitor = GeometryMonitor(model, IDS, every=1)
    monitor(0)
    ids = batch(examples(8))["input_ids"]
    (model(input_ids=ids, labels=ids, use_cache=False).loss + dense_penalty(model)).backward()
    torch.optim.SGD(model.parameters(), RATE).step()
    for rank in range(ranks):
        look = pd.DataFrame(json.loads((tmp_path / f"{rank}.json").read_text()))
        assert_columns_near(look, monitor.last.heads, 5e-4, "heads")
        weights = load_file(tmp_path / f"{rank}.safetensors")
        for name, expected in model.named_parameters():
            torch.testing.assert_close(weights[name].double(), expected.detach(), rtol=1e-5, atol=1e-5)
