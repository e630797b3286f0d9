"""Oracles: TensorBoard's own reader of its event files, the Trainer's log without us, an uninterrupted training."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers import Trainer as OriginalTrainer

from theodolite.errors import UsageError
from theodolite.train.callbacks import GeometryCallback, LocaterCallback
from theodolite.train.geometry import GeometryReader
from theodolite.train.monitor import GeometryWarning
from theodolite.train.trackers import TrackedCallback, TrackerWarning

DATA = [
    {"input_ids": row, "labels": row}
    for row in torch.randint(50, (24, 16), generator=torch.Generator().manual_seed(0)).tolist()
]
BATCH = torch.tensor([row["input_ids"] for row in DATA[:2]])


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def trainer(folder: Path, *callbacks: TrainerCallback, **options: Any) -> OriginalTrainer:
    """A Trainer on the CPU, 6 steps of 4 rows, the loss logged at every second; its bars are its own."""
    arguments = TrainingArguments(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "max_steps": 6,
            "per_device_train_batch_size": 4,
            "logging_steps": 2,
            "report_to": "none",
            "save_strategy": "no",
            "dataloader_pin_memory": False,
            **options,
        }
    )
    trainer = OriginalTrainer(model(), arguments, train_dataset=DATA)
    for callback in callbacks:
        if isinstance(callback, TrackedCallback):
            callback.attach(trainer)
        else:
            trainer.add_callback(callback)
    return trainer


class Ruin(TrainerCallback):
    """Doubles the queries of layer 1, head 1 after every step."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        with torch.no_grad():
            attention = kwargs["model"].transformer.h[1].attn.c_attn
            attention.weight[:, 8:16] *= 4


def test_numbers_reach_tensorboard_and_the_log(tmp_path):
    """Oracle: event files as TensorBoard reads them, beside the table that the callback wrote."""
    run = trainer(tmp_path, GeometryCallback(every=2, spectra_every=2), report_to="tensorboard")
    run.train()
    events = EventAccumulator(str(next((tmp_path / "runs").iterdir()))).Reload()
    entropy = events.Scalars("train/geometry/entropy_mean")
    assert [event.step for event in entropy] == [0, 2, 4, 6]
    rows = [json.loads(line) for line in (tmp_path / "geometry" / "heads.jsonl").read_text().splitlines()]
    for event in entropy:
        expected = [row["entropy"] for row in rows if row["step"] == event.step]
        assert event.value == pytest.approx(sum(expected) / 4, rel=1e-6)  # event files hold float32
    tags = events.Tags()["scalars"]
    assert {"train/geometry/propagation/layer_1", "train/geometry/spectral_norm_max"} <= set(tags)
    assert not any("head_" in tag for tag in tags)
    assert [event.step for event in events.Scalars("train/geometry/trace_mean")] == [0, 4]
    assert [event.step for event in events.Scalars("train/loss")] == [2, 4, 6]
    logged = [entry for entry in run.state.log_history if "geometry/entropy_mean" in entry]
    assert [entry["step"] for entry in logged] == [0, 2, 4, 6]
    assert all("loss" not in entry for entry in logged)


def test_a_training_and_its_log_are_the_same_without_us(tmp_path):
    """Oracle: the Trainer alone; weights to the bit, and every entry of its log but the times."""
    with_us = trainer(tmp_path / "a", GeometryCallback(BATCH, every=1))
    with_us.train()  # before the next one is built, which seeds the random numbers
    alone = trainer(tmp_path / "b")
    alone.train()
    assert all(
        torch.equal(a, b) for a, b in zip(with_us.model.parameters(), alone.model.parameters(), strict=True)
    )

    def losses(run: OriginalTrainer) -> list[tuple[int, float]]:
        return [(entry["step"], entry["loss"]) for entry in run.state.log_history if "loss" in entry]

    assert losses(with_us) == losses(alone)
    assert [step for step, _ in losses(alone)] == [2, 4, 6]


def test_the_loss_that_the_trainer_logs_is_in_the_record(tmp_path):
    """Oracle: the Trainer's own log."""
    run = trainer(tmp_path, GeometryCallback(BATCH, every=5))
    run.train()
    lines = (tmp_path / "geometry" / "losses.jsonl").read_text().splitlines()
    logged = [(entry["step"], entry["loss"]) for entry in run.state.log_history if "loss" in entry]
    assert [(row["step"], row["loss"]) for row in map(json.loads, lines)] == logged
    assert [step for step, _ in logged] == [2, 4, 6]


def test_every_head_is_logged_when_asked(tmp_path):
    run = trainer(tmp_path, GeometryCallback(BATCH, every=6, per_head=True))
    run.train()
    first = next(entry for entry in run.state.log_history if "geometry/entropy_mean" in entry)
    assert {f"geometry/entropy/layer_{n // 2}_head_{n % 2}" for n in range(4)} <= set(first)


def test_an_alarm_is_warned_logged_and_recorded(tmp_path):
    """Oracle: the head that `Ruin` ruins."""
    run = trainer(tmp_path, Ruin(), GeometryCallback(BATCH, every=1), report_to="tensorboard", max_steps=10)
    with pytest.warns(GeometryWarning) as caught:
        run.train()
    assert any(
        re.search(
            r"entropy collapse in layer 1 head 1: .* (reaches 0 in about|collapsed)", str(warning.message)
        )
        for warning in caught
    )
    texts = [entry["geometry/alarm"] for entry in run.state.log_history if "geometry/alarm" in entry]
    assert any("layer 1 head 1" in text for text in texts)
    lines = (tmp_path / "geometry" / "alarms.jsonl").read_text().splitlines()
    assert {(alarm["layer"], alarm["head"]) for alarm in map(json.loads, lines)} == {(1, 1)}
    events = EventAccumulator(str(next((tmp_path / "runs").iterdir()))).Reload()
    assert "train/geometry/alarm/text_summary" in events.Tags()["tensors"]


def test_the_terminal_is_spared(tmp_path, capsys):
    """Oracle: what the Trainer prints; it would print our thirty numbers, too."""
    trainer(tmp_path, GeometryCallback(BATCH, every=1), disable_tqdm=True).train()
    printed = capsys.readouterr().out
    assert "loss" in printed
    assert "geometry" not in printed


def sharp(trained: GPT2LMHeadModel) -> GPT2LMHeadModel:
    """Without dropout, and with weights so large that attention, and what is learned, is far from uniform."""
    for name, parameter in trained.named_parameters():
        if parameter.ndim > 1:
            parameter.data *= 20 if "c_attn" in name else 5
    for module in trained.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return trained


def plain_loop(options: dict[str, Any]) -> list[GPT2LMHeadModel]:
    """The model before the first step and after every second one, trained on the rows in order without a Trainer."""
    trained = sharp(model()).train()
    optimizer = torch.optim.SGD(trained.parameters(), options["learning_rate"])
    parts, start = options.get("gradient_accumulation_steps", 1), 0
    models = [copy.deepcopy(trained)]
    for step in range(options["max_steps"]):
        optimizer.param_groups[0]["lr"] = options["learning_rate"] * (1 - step / options["max_steps"])
        for _ in range(parts):
            rows = torch.tensor([row["input_ids"] for row in DATA[start : start + 4]])
            start = (start + 4) % len(DATA)
            with torch.autocast("cpu", torch.bfloat16, enabled=options.get("bf16", False)):
                loss = trained(input_ids=rows, labels=rows).loss
            # The Trainer divides by the number of labels, of which each row predicts all but the first.
            (loss * 15 / 16 / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            models.append(copy.deepcopy(trained))
    return models


@pytest.mark.parametrize(
    "options",
    [{"bf16": True}, {"activation_checkpointing": True}, {"gradient_accumulation_steps": 2}],
    ids=lambda options: next(iter(options)),
)
def test_it_works_under_the_options_of_a_trainer(tmp_path, options):
    """Oracle: a plain loop over the same rows under the same option, and the entropy of its own eager attention."""
    options |= {"train_sampling_strategy": "sequential", "max_steps": 4, "learning_rate": 0.3, "optim": "sgd"}
    run = trainer(tmp_path, GeometryCallback(BATCH, every=2), max_grad_norm=0.0, **options)
    sharp(run.model)
    run.train()
    logged = [entry for entry in run.state.log_history if "geometry/entropy_mean" in entry]
    assert [entry["step"] for entry in logged] == [0, 2, 4]
    tolerance = (
        2e-3 if "bf16" in options else 1e-4
    )  # a look rounds as training does; training moves it by more
    for entry, same in zip(logged, plain_loop(options), strict=True):
        same.set_attn_implementation("eager")
        with torch.no_grad():
            attention = torch.stack(same.eval()(BATCH, output_attentions=True).attentions)
        expected = torch.special.entr(attention.double()).sum(-1).mean().item()
        assert entry["geometry/entropy_mean"] == pytest.approx(expected, rel=tolerance)
    assert abs(logged[0]["geometry/entropy_mean"] / logged[2]["geometry/entropy_mean"] - 1) > 10 * tolerance


def test_a_resumed_training_goes_on_with_the_record(tmp_path):
    """Oracle: the record of a training run that was not stopped."""

    def record(folder: Path) -> str:
        return (folder / "geometry" / "heads.jsonl").read_text()

    trainer(tmp_path / "whole", GeometryCallback(BATCH, every=2)).train()
    saving = {"save_strategy": "steps", "save_steps": 4}
    trainer(tmp_path / "cut", GeometryCallback(BATCH, every=2), **saving).train()
    trainer(tmp_path / "cut", GeometryCallback(BATCH, every=2)).train(
        resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-4")
    )
    assert record(tmp_path / "cut") == record(tmp_path / "whole")


TWO_PROCESSES = """
import os, sys
from pathlib import Path
from tests.train.test_callbacks import BATCH, GeometryCallback, trainer

callback = GeometryCallback(BATCH, every=3)
run = trainer(Path(sys.argv[1]), callback, ddp_backend="gloo")
run.train()
steps = [entry["step"] for entry in run.state.log_history if "geometry/entropy_mean" in entry]
total = sum(float(p.detach().double().sum()) for p in run.model.parameters())
wrapper = type(run.model_wrapped).__name__
looks = callback.monitor.last.heads["entropy"].tolist()
Path(sys.argv[1], os.environ["RANK"] + ".txt").write_text(f"{wrapper} {steps} {looks} {total}")
"""


@pytest.mark.slow
def test_two_processes_train_and_look_together_and_one_tells(tmp_path):
    """Oracle: DDP itself: both processes end, with the same weights; 2 layers of 2 heads at 3 looks make 12 rows.

    What they see before the first step is what one process sees that reads the whole batch.
    """
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    (tmp_path / "run.py").write_text(TWO_PROCESSES)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, *launch, str(tmp_path / "run.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in range(2))
    assert first.startswith("DistributedDataParallel [0, 3, 6] ")
    assert second.startswith("DistributedDataParallel [] ")
    assert first.partition("] ")[2] == second.partition("] ")[2]
    rows = [json.loads(line) for line in (tmp_path / "geometry" / "heads.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    alone = GeometryReader(model(), BATCH).look().heads
    for row, (_, expected) in zip(rows[:4], alone.iterrows(), strict=True):
        assert row["entropy"] == pytest.approx(expected["entropy"], rel=1e-5)
        assert row["at_distance"] == pytest.approx(expected["at_distance"], rel=1e-5)


def test_without_a_process_group_other_processes_do_nothing(tmp_path):
    """Oracle: the state of a second process, as the Trainer would have it there; no look, no file."""
    callback = GeometryCallback(BATCH)
    state = TrainerState(is_world_process_zero=False)
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    callback.on_train_begin(arguments, state, TrainerControl(), model=model())
    callback.on_step_begin(arguments, state, TrainerControl())
    callback.on_step_end(arguments, state, TrainerControl())
    assert callback.monitor is None
    assert not (tmp_path / "geometry").exists()


@pytest.mark.parametrize("callback", [GeometryCallback(BATCH), LocaterCallback(0.1, 0.1)])
def test_it_attaches_to_a_trainer_only_and_says_what_else_to_use(callback):
    with pytest.raises(UsageError, match=r"not to a GPT2LMHeadModel; .* use GeometryMonitor or Locater"):
        callback.attach(model())


def test_attached_again_it_is_called_once(tmp_path):
    """Oracle: the steps at which looks are due, each once; the Trainer was given the callback beforehand, too."""
    callback = GeometryCallback(BATCH, every=3)
    attached = trainer(tmp_path, callback, callback)
    assert callback.attach(attached) is callback
    attached.train()
    looks = [e["step"] for e in attached.state.log_history if "geometry/entropy_mean" in e]
    assert looks == [0, 3, 6]


@pytest.mark.parametrize(
    ("callback", "name"),
    [(GeometryCallback(BATCH, every=2), "geometry/entropy_mean"), (LocaterCallback(0.1, 0.1), "locater")],
)
def test_given_as_one_of_the_callbacks_it_logs_but_not_to_trackers(callback, name, tmp_path):
    """Oracle: the Trainer's own log, and event files as TensorBoard reads them."""
    arguments = trainer(tmp_path, report_to="tensorboard").args
    unattached = OriginalTrainer(model(), arguments, train_dataset=DATA, callbacks=[callback])
    with pytest.warns(TrackerWarning, match=r"^tensorboard will not get .*\.attach\(trainer\)") as caught:
        unattached.train()
    assert len(caught) == 1
    assert sum(name in entry for entry in unattached.state.log_history) >= 3
    events = EventAccumulator(str(next((tmp_path / "runs").iterdir()))).Reload()
    assert "train/loss" in events.Tags()["scalars"]
    assert f"train/{name}" not in events.Tags()["scalars"]


def test_called_by_something_else_than_a_trainer_it_looks(tmp_path):
    """Oracle: the look of the monitor itself."""
    callback, state = GeometryCallback(BATCH), TrainerState()
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    callback.on_train_begin(arguments, state, TrainerControl(), model=model())
    callback.on_step_begin(arguments, state, TrainerControl())
    expected = GeometryReader(model(), BATCH).look().heads["entropy"].mean()
    assert state.log_history[0]["geometry/entropy_mean"] == expected


def test_nothing_is_warned_in_a_healthy_training(tmp_path):
    """Oracle: random tokens at a usual rate teach nothing and ruin nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", GeometryWarning)
        done = trainer(tmp_path, GeometryCallback(BATCH, every=1), max_steps=12, learning_rate=1e-3).train()
    assert done.global_step == 12
