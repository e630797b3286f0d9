"""Oracles: TensorBoard's own reader of its event files, the Trainer's log without us, an uninterrupted training."""

from __future__ import annotations

import json
import re
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
from theodolite.train.callbacks import GeometryCallback, LocaterCallback, TrackedCallback, TrackerWarning
from theodolite.train.geometry import GeometryReader
from theodolite.train.monitor import GeometryWarning

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

    def on_step_end(self, args, state, control, **kwargs):
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
    lines = (tmp_path / "geometry" / "losses.jsonl").read_text().splitlines()
    losses = [(entry["step"], entry["loss"]) for entry in run.state.log_history if "loss" in entry]
    assert [(row["step"], row["loss"]) for row in map(json.loads, lines)] == losses
    assert "The run ended at" in (tmp_path / "geometry" / "watch.html").read_text()


@pytest.mark.slow
def test_a_training_its_log_and_its_terminal_are_the_same_without_us(tmp_path, capsys):
    """Oracle: the Trainer alone; weights to the bit, its losses; it would print our thirty numbers, too."""
    with_us = trainer(tmp_path / "a", GeometryCallback(BATCH, every=1, per_head=True), disable_tqdm=True)
    with_us.train()  # before the next one is built, which seeds the random numbers
    printed = capsys.readouterr().out
    assert "loss" in printed
    assert "geometry" not in printed
    first = next(entry for entry in with_us.state.log_history if "geometry/entropy_mean" in entry)
    assert {f"geometry/entropy/layer_{n // 2}_head_{n % 2}" for n in range(4)} <= set(first)
    alone = trainer(tmp_path / "b")
    alone.train()
    assert all(
        torch.equal(a, b) for a, b in zip(with_us.model.parameters(), alone.model.parameters(), strict=True)
    )

    def losses(run: OriginalTrainer) -> list[tuple[int, float]]:
        return [(entry["step"], entry["loss"]) for entry in run.state.log_history if "loss" in entry]

    assert losses(with_us) == losses(alone)
    assert [step for step, _ in losses(alone)] == [2, 4, 6]


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


@pytest.mark.slow
def test_a_resumed_training_goes_on_with_the_record(tmp_path):
    """Oracle: the record of a training run that was not stopped."""

    def record(folder: Path) -> str:
        return (folder / "geometry" / "heads.jsonl").read_text()

    trainer(tmp_path / "whole", GeometryCallback(BATCH, every=2)).train()
    saving = {"save_strategy": "steps", "save_steps": 4}
    trainer(tmp_path / "cut", GeometryCallback(BATCH, every=2), **saving).train()
    checkpoint = str(tmp_path / "cut" / "checkpoint-4")
    trainer(tmp_path / "cut", GeometryCallback(BATCH, every=2)).train(resume_from_checkpoint=checkpoint)
    assert record(tmp_path / "cut") == record(tmp_path / "whole")


def test_it_attaches_to_a_trainer_only_and_once(tmp_path):
    """Oracle: the Trainer's own list; it was given the callback beforehand, too."""
    callback, attached = GeometryCallback(BATCH, every=3), trainer(tmp_path)
    attached.add_callback(callback)
    for _ in range(2):
        assert callback.attach(attached) is callback
    assert attached.callback_handler.callbacks.count(callback) == 1
    assert attached.callback_handler.callbacks[0] is callback
    for other in (callback, LocaterCallback(0.1, 0.1)):
        with pytest.raises(UsageError, match=r"not to a GPT2LMHeadModel; .* use GeometryMonitor or Locater"):
            other.attach(model())


@pytest.mark.slow
def test_given_as_one_of_the_callbacks_it_logs_but_not_to_trackers(tmp_path):
    """Oracle: the Trainer's own log, and event files as TensorBoard reads them."""
    arguments = trainer(tmp_path, report_to="tensorboard").args
    callbacks = [GeometryCallback(BATCH, every=2), LocaterCallback(0.1, 0.1)]
    unattached = OriginalTrainer(model(), arguments, train_dataset=DATA, callbacks=callbacks)
    with pytest.warns(TrackerWarning, match=r"^tensorboard will not get .*\.attach\(trainer\)") as caught:
        unattached.train()
    assert len(caught) == 2
    events = EventAccumulator(str(next((tmp_path / "runs").iterdir()))).Reload()
    assert "train/loss" in events.Tags()["scalars"]
    for name in ("geometry/entropy_mean", "locater"):
        assert sum(name in entry for entry in unattached.state.log_history) >= 3
        assert f"train/{name}" not in events.Tags()["scalars"]


@pytest.mark.parametrize("first", [True, False])
def test_called_by_something_else_than_a_trainer_it_looks_in_the_first_process(first, tmp_path):
    """Oracle: the look of the monitor itself. A second process without a process group looks and writes nothing."""
    callback, state = GeometryCallback(BATCH), TrainerState(is_world_process_zero=first)
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    callback.on_train_begin(arguments, state, TrainerControl(), model=model())
    callback.on_step_begin(arguments, state, TrainerControl())
    if first:
        expected = GeometryReader(model(), BATCH).look().heads["entropy"].mean()
        assert state.log_history[0]["geometry/entropy_mean"] == expected
        return
    callback.on_step_end(arguments, state, TrainerControl())
    assert callback.monitor is None
    assert not (tmp_path / "geometry").exists()
