"""LocAteR and the monitor under ZeRO 1, 2 and 3, in a loop of one's own (two processes) and in the Trainer.

Oracle: the same model in one process, with the d×d penalty in its loss and the whole batch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from tests import checkpoints
from tests.processes import together
from tests.train.test_locater import MEAN, SCALE, dense_penalty
from theodolite.errors import UsageError
from theodolite.train import GeometryCallback, Locater, LocaterCallback
from theodolite.train.geometry import GeometryReader

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
    pytest.mark.slow,
]

IDS = torch.randint(1, checkpoints.VOCABULARY, (4, 24), generator=torch.Generator().manual_seed(1))
STEPS, RATE, CLIP = 5, 0.1, 2.0
CONFIG: dict[str, Any] = {
    "gradient_clipping": CLIP,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def began(rank: int, port: int, world: int) -> Any:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
    }
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    return deepspeed


def in_a_loop(rank: int, port: int, folder: str, world: int) -> None:
    """One of the processes: each stage in turn, the penalty in the loss where it may be, and added after it."""
    deepspeed, results = began(rank, port, world), {}
    for stage, added in ((1, "in the loss"), (1, "after"), (2, "in the loss"), (2, "after"), (3, "after")):
        model = checkpoints.build("llama3").train()
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), RATE),
            config=CONFIG
            | {
                "train_micro_batch_size_per_gpu": len(IDS) // world,
                "train_batch_size": len(IDS),
                "zero_optimization": {"stage": stage},
            },
        )
        locater, reader, penalties = Locater(engine, SCALE, MEAN), GeometryReader(engine, IDS), []
        if stage == 3:
            with pytest.raises(UsageError, match="call add_gradient"):
                locater()
        for step in range(STEPS):
            ids = IDS.roll(step, 1)[rank::world]
            loss = engine(input_ids=ids, labels=ids).loss
            if added == "after":
                engine.backward(loss)
                penalty = locater.add_gradient()
            else:
                penalty = locater()
                engine.backward(loss + penalty)
            engine.step()
            penalties.append(penalty.item())
        results[f"{stage} {added}"] = penalties + seen(reader)
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


def in_the_trainer(rank: int, port: int, folder: str) -> None:
    """One process, each stage in turn; clipped with the penalty's gradient, two micro-batches a step."""
    began(rank, port, 1)
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    results = {}
    for stage in (1, 3):
        arguments = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=CLIP,
            save_strategy="no",
            report_to=[],
            logging_steps=1,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            deepspeed=CONFIG
            | {
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
                "zero_optimization": {"stage": stage},
            },
        )
        locater, watch = LocaterCallback(SCALE, MEAN), GeometryCallback(IDS, every=1)
        model = checkpoints.build("llama3").train()
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[locater, watch])
        trainer.train()
        assert watch.monitor is not None
        penalties = [logs["locater"] for logs in trainer.state.log_history if "locater" in logs]
        assert watch.monitor.last is not None
        results[str(stage)] = [*penalties, *watch.monitor.last.heads["entropy"].tolist()]
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


def seen(reader: GeometryReader) -> list[float]:
    heads = reader.look().heads
    return [*heads["entropy"].tolist(), *heads["trace"].tolist()]


def of_one_process(rolled: bool) -> tuple[list[float], nn.Module]:
    model = checkpoints.build("llama3").train()
    optimizer, penalties = torch.optim.SGD(model.parameters(), RATE), []
    for step in range(STEPS):
        ids = IDS.roll(step, 1) if rolled else IDS
        penalty = dense_penalty(model)
        (model(input_ids=ids, labels=ids).loss + penalty).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        penalties.append(penalty.item())
    return penalties, model


def run(work: Any, arguments: tuple[Any, ...], folder: Path, processes: int) -> list[dict[str, list[float]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together(work, (port, str(folder), *arguments), processes)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


def test_zero_trains_and_sees_what_one_process_does(tmp_path):
    penalties, model = of_one_process(rolled=True)
    expected = torch.tensor(penalties + seen(GeometryReader(model, IDS)))
    for results in run(in_a_loop, (2,), tmp_path, 2):
        for got in results.values():
            torch.testing.assert_close(torch.tensor(got), expected, rtol=1e-4, atol=1e-5)


def test_the_trainer_with_zero_makes_the_steps_of_one_process(tmp_path):
    penalties, model = of_one_process(rolled=False)
    heads = GeometryReader(model, IDS).look().heads
    expected = torch.tensor([*penalties, *heads["entropy"].tolist()])
    (results,) = run(in_the_trainer, (), tmp_path, 1)
    for got in results.values():
        torch.testing.assert_close(torch.tensor(got), expected, rtol=1e-4, atol=1e-5)
