"""LocAteR and the monitor in two processes (DDP over gloo) against one with the doubled batch: the same weights."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests import checkpoints
from tests.processes import ranks
from tests.train.test_locater import MEAN, RATE, SCALE, batch, dense_penalty, examples, trained
from theodolite.train import GeometryCallback, Locater, LocaterCallback
from theodolite.train.geometry import GeometryReader

PROCESSES = 2
CLIP = 0.5
IDS = torch.stack([example["input_ids"] for example in examples(4)])


def work(rank: int, folder: str) -> dict[str, dict[str, Tensor]]:
    """One of the processes: the weights after a step of a plain loop, and after one of the Trainer."""
    # Gradients in another layout would cost DDP copies.
    warnings.filterwarnings("error", message=".*strides.*")
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
    return {
        name: {key: value.detach() for key, value in of.named_parameters()}
        for name, of in (("plain", plain), ("trainer", model))
    }


def test_two_processes_make_the_step_of_one(tmp_path):
    """Oracle: in one process, the whole batch and the d×d penalty once; clipped in the Trainer's case."""
    start, data = checkpoints.build("llama3"), examples(8)
    results = ranks(work, str(tmp_path), processes=PROCESSES)
    for name in ("plain", "trainer"):
        expected, whole = copy.deepcopy(start).train(), batch(data)
        if name == "plain":
            whole["labels"] = whole["input_ids"]
        (expected(**whole, use_cache=False).loss + dense_penalty(expected)).backward()
        if name == "trainer":
            torch.nn.utils.clip_grad_norm_(expected.parameters(), CLIP)
        torch.optim.SGD(expected.parameters(), RATE).step()
        for got in results:
            torch.testing.assert_close(got[name], dict(expected.named_parameters()), rtol=0, atol=1e-6)
    heads = pd.read_json(tmp_path / "geometry" / "heads.jsonl", lines=True)
    assert heads.groupby("step").size().to_dict() == {0: 12, 1: 12}  # the first process alone writes
    for step, model in ((0, start), (1, expected)):
        alone = GeometryReader(model, IDS).look().heads
        for name in ("entropy", "at_distance"):
            written = heads[name][heads["step"] == step]
            np.testing.assert_allclose(written, alone[name], rtol=1e-5)
