"""LocAteR and the monitor under ZeRO 1, 2 and 3, in a loop of one's own (two and four processes) and in the Trainer.

Oracle: the same model in one process and in float64, with the d×d penalty in its loss and the whole batch: four steps.
DeepSpeed knows no float64 (its `get_data_types`: float32, or the halves): 1e-6 is what can be held.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from tests import checkpoints
from tests.processes import ranks
from tests.train.test_locater import MEAN, SCALE, dense_penalty, trained
from tests.train.test_sharded import compare
from theodolite.errors import UsageError
from theodolite.train import GeometryCallback, Locater, LocaterCallback
from theodolite.train.geometry import Geometry, GeometryReader

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
    pytest.mark.slow,
]

IDS = torch.randint(1, checkpoints.VOCABULARY, (4, 24), generator=torch.Generator().manual_seed(1))
STEPS, RATE, CLIP = 4, 0.03, 2.0
CONFIG = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
CONFIG |= {"gradient_clipping": CLIP}


def began() -> Any:
    import deepspeed

    # It would compile C++, to share memory in place of gloo. (`deepspeed.comm.torch` is also a name of PyTorch there.)
    communication: Any = importlib.import_module("deepspeed.comm.torch")
    communication.build_shm_op = lambda: None
    deepspeed.init_distributed(dist_backend="gloo")
    return deepspeed


STAGES = {2: {1: "in the loss", 2: "after", 3: "after"}, 4: {1: "after", 2: "in the loss", 3: "after"}}
"""Where the penalty's gradient is added, by the number of processes and the stage."""


def in_a_loop(rank: int, world: int) -> list[dict[str, Any]]:
    """One of the processes: each stage in turn, the penalty in the loss where it may be, or added after it."""
    deepspeed, results = began(), []
    for stage, added in STAGES[world].items():
        model = checkpoints.build("llama3").train()
        config = CONFIG | {"train_batch_size": len(IDS), "zero_optimization": {"stage": stage}}
        config |= {"train_micro_batch_size_per_gpu": len(IDS) // world}
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        locater, reader, penalties = Locater(engine, SCALE, MEAN), GeometryReader(engine, IDS), []
        if stage == 3:
            with pytest.raises(UsageError, match="call add_gradient"):
                locater()
        with pytest.raises(UsageError, match=r"between engine\.backward"):
            locater.add_gradient()  # which DeepSpeed would overwrite
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
        with pytest.raises(UsageError, match=r"between engine\.backward"):
            locater.add_gradient()  # as after accelerate's backward, which steps, too
        results.append(
            {"penalties": penalties, "look": of_heads(reader.look()), "state": whole_weights(model)}
        )
    return results


def in_the_trainer(rank: int, folder: str) -> list[dict[str, Any]]:
    """One process, each stage in turn; clipped with the penalty's gradient, two micro-batches a step."""
    began()
    rows, results = [{"input_ids": row, "labels": row} for row in IDS], []
    for stage in (1, 3):
        micro_batches = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
        options = {"deepspeed": CONFIG | micro_batches | {"zero_optimization": {"stage": stage}}}
        options |= {"max_steps": STEPS, "learning_rate": RATE, "max_grad_norm": CLIP}
        options |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
        watch, model = GeometryCallback(IDS, every=1), checkpoints.build("llama3").train()
        trainer = trained(model, rows, folder, [LocaterCallback(SCALE, MEAN), watch], **options)
        penalties = [logs["locater"] for logs in trainer.state.log_history if "locater" in logs]
        look = of_heads(watch.monitor.last)
        results.append({"penalties": penalties, "look": look, "state": whole_weights(model)})
    return results


def of_heads(look: Geometry) -> dict[str, list[float]]:
    return {name: look.heads[name].tolist() for name in ("entropy", "largest_logit")}


def whole_weights(model: nn.Module) -> dict[str, list[Any]]:
    """To be called by all ranks."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def of_one_process(rolled: bool) -> dict[str, Any]:
    model = checkpoints.build("llama3").double().train()
    optimizer, penalties = torch.optim.SGD(model.parameters(), RATE), []
    for step in range(STEPS):
        ids = IDS.roll(step, 1) if rolled else IDS
        penalty = dense_penalty(model)
        (model(input_ids=ids, labels=ids).loss + penalty).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        penalties.append(penalty.item())
    state = dict(model.named_parameters())
    return {"penalties": penalties, "look": of_heads(GeometryReader(model, IDS).look()), "state": state}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.chaos)])
def test_zero_trains_and_sees_what_one_process_does(world):
    expected = of_one_process(rolled=True)
    for results in ranks(in_a_loop, world, processes=world):
        for got in results:
            check(got, expected)


def test_the_trainer_with_zero_makes_the_steps_of_one_process(tmp_path):
    expected = of_one_process(rolled=False)
    (results,) = ranks(in_the_trainer, str(tmp_path), processes=1)
    for got in results:
        check(got, expected)


def check(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Penalties and weights to 1e-6; logits of a forward pass in float32 are as good as its rounding."""
    compare(got.pop("look"), expected["look"], 1e-5)
    compare(got, {name: expected[name] for name in ("penalties", "state")})
