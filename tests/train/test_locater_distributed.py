"""LocAteR and the monitor in two processes (DDP over gloo) against one with the doubled batch: the same weights."""

from __future__ import annotations

import copy
import os
import socket
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors.torch import load_file, save_file
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from tests import checkpoints
from tests.processes import together
from tests.train.test_locater import MEAN, RATE, SCALE, batch, dense_penalty, examples, trained
from theodolite.train import GeometryCallback, Locater, LocaterCallback
from theodolite.train.geometry import GeometryReader

PROCESSES = 2
CLIP = 0.5
IDS = torch.stack([example["input_ids"] for example in examples(4)])


def work(rank: int, port: int, folder: str) -> None:
    """One of the processes: a step of a plain loop, then one of the Trainer; the first process writes weights."""
    warnings.filterwarnings(
        "error", message=".*strides.*"
    )  # gradients in another layout would cost DDP copies
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(PROCESSES),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    plain = checkpoints.build("llama3").train()
    parallel = DistributedDataParallel(plain)
    locater = Locater(parallel, SCALE, MEAN)
    mine = batch(examples(8)[rank::PROCESSES])
    mine["labels"] = mine["input_ids"]
    for number, half in enumerate(range(0, 4, 2)):  # two micro-batches, of which only the last one is reduced
        part = {name: values[half : half + 2] for name, values in mine.items()}
        parallel.require_backward_grad_sync = number == 1
        ((parallel(**part, use_cache=False).loss + locater()) / 2).backward()
    torch.optim.SGD(plain.parameters(), RATE).step()
    model = checkpoints.build("llama3")
    trained(
        model,
        examples(8),
        folder,
        [LocaterCallback(SCALE, MEAN), GeometryCallback(IDS, every=1)],
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=CLIP,
    )
    for name, written in (("plain", plain), ("trainer", model)):
        state = {key: value.detach().contiguous() for key, value in written.named_parameters()}
        save_file(state, Path(folder, f"{name}{rank}.safetensors"))
    distributed.destroy_process_group()


def test_two_processes_make_the_step_of_one(tmp_path):
    """Oracle: in one process, the whole batch and the d×d penalty once; clipped in the Trainer's case."""
    start, data = checkpoints.build("llama3"), examples(8)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together(work, (port, str(tmp_path)), PROCESSES)
    for name in ("plain", "trainer"):
        expected, whole = copy.deepcopy(start).train(), batch(data)
        if name == "plain":
            whole["labels"] = whole["input_ids"]
        (expected(**whole, use_cache=False).loss + dense_penalty(expected)).backward()
        if name == "trainer":
            torch.nn.utils.clip_grad_norm_(expected.parameters(), CLIP)
        torch.optim.SGD(expected.parameters(), RATE).step()
        for rank in range(PROCESSES):
            got = load_file(tmp_path / f"{name}{rank}.safetensors")
            for key, parameter in expected.named_parameters():
                if key in got:
                    torch.testing.assert_close(got[key], parameter.detach(), rtol=0, atol=1e-6)
            assert got.keys() == dict(expected.named_parameters()).keys()
    heads = pd.read_json(tmp_path / "geometry" / "heads.jsonl", lines=True)
    assert heads.groupby("step").size().to_dict() == {0: 12, 1: 12}  # the first process alone writes
    for step, model in ((0, start), (1, expected)):
        alone = GeometryReader(model, IDS).look().heads
        for name in ("entropy", "at_distance"):
            written = heads[name][heads["step"] == step]
            np.testing.assert_allclose(written, alone[name], rtol=1e-5)
