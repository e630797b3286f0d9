"""The callbacks in the Trainer, and the monitor's numbers in loggers, offline.

Oracles: each logger's own files against the monitor's record, the Trainer's log without us, an uninterrupted training.
"""

from __future__ import annotations

import gc
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
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

from theodolite.train.alarms import alarm_lines
from theodolite.train.callbacks import GeometryCallback, LocaterCallback, TrackedCallback
from theodolite.train.geometry import GeometryReader
from theodolite.train.monitor import GeometryMonitor, GeometryWarning, scalars

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
    usual = {"max_steps": 6, "per_device_train_batch_size": 4, "logging_steps": 2, "report_to": "none"}
    usual |= {"use_cpu": True, "save_strategy": "no", "dataloader_pin_memory": False}
    arguments = TrainingArguments(output_dir=str(folder), **usual | options)
    trainer = OriginalTrainer(model(), arguments, train_dataset=DATA)
    for callback in callbacks:
        if isinstance(callback, TrackedCallback):
            callback.attach(trainer)
        else:
            trainer.add_callback(callback)
    return trainer


def logged(run: OriginalTrainer, name: str) -> list[tuple[int, Any]]:
    """The Trainer's own log of a name, with its steps."""
    return [(entry["step"], entry[name]) for entry in run.state.log_history if name in entry]


def events_in(folder: Path) -> EventAccumulator:
    """What TensorBoard reads from its event files."""
    return EventAccumulator(str(next(folder.rglob("events.out.*")).parent)).Reload()


def ruin(attention: torch.nn.Module) -> None:
    """Quadruple the queries of head 1."""
    with torch.no_grad():
        attention.c_attn.weight[:, 8:16] *= 4


class Ruin(TrainerCallback):
    """Ruins a head of layer 1 after every step."""

    def on_step_end(self, args, state, control, **kwargs):
        ruin(kwargs["model"].transformer.h[1].attn)


def test_numbers_reach_tensorboard_and_the_log(tmp_path):
    """Oracle: event files as TensorBoard reads them, beside the table that the callback wrote."""
    run = trainer(tmp_path, GeometryCallback(every=2, spectra_every=2), report_to="tensorboard")
    run.train()
    events = events_in(tmp_path)
    entropy = events.Scalars("train/geometry/entropy_mean")
    assert [event.step for event in entropy] == [0, 2, 4, 6]
    heads = pd.read_json(tmp_path / "geometry" / "heads.jsonl", lines=True)
    expected = heads.groupby("step")["entropy"].mean()
    assert [event.value for event in entropy] == pytest.approx(expected.tolist(), rel=1e-6)  # float32
    tags = events.Tags()["scalars"]
    assert {"train/geometry/propagation/layer_1", "train/geometry/spectral_norm_max"} <= set(tags)
    assert not any("head_" in tag for tag in tags)
    assert [event.step for event in events.Scalars("train/geometry/trace_mean")] == [0, 4]
    assert [event.step for event in events.Scalars("train/loss")] == [2, 4, 6]
    assert [step for step, _ in logged(run, "geometry/entropy_mean")] == [0, 2, 4, 6]
    assert not any({"loss", "geometry/entropy_mean"} <= entry.keys() for entry in run.state.log_history)
    lines = (tmp_path / "geometry" / "losses.jsonl").read_text().splitlines()
    assert [(row["step"], row["loss"]) for row in map(json.loads, lines)] == logged(run, "loss")
    assert "The run ended at" in (tmp_path / "geometry" / "watch.html").read_text()


@pytest.mark.slow
def test_a_training_its_log_and_its_terminal_are_the_same_without_us(tmp_path, capsys):
    """Oracle: the Trainer alone; weights to the bit, its losses; it would print our thirty numbers, too."""
    with_us = trainer(tmp_path / "a", GeometryCallback(BATCH, every=1), disable_tqdm=True)
    with_us.train()  # before the next one is built, which seeds the random numbers
    printed = capsys.readouterr().out
    assert "loss" in printed
    assert "geometry" not in printed
    assert any("geometry/entropy_mean" in entry for entry in with_us.state.log_history)
    alone = trainer(tmp_path / "b")
    alone.train()
    assert all(map(torch.equal, with_us.model.parameters(), alone.model.parameters()))
    assert logged(with_us, "loss") == logged(alone, "loss")
    assert [step for step, _ in logged(alone, "loss")] == [2, 4, 6]


def test_an_alarm_is_warned_logged_and_recorded(tmp_path):
    """Oracle: the head that `Ruin` ruins."""
    run = trainer(tmp_path, Ruin(), GeometryCallback(BATCH, every=1), report_to="tensorboard", max_steps=10)
    words = r"entropy collapse in L1H1: .* (reaches 0 in about|collapsed)"
    with pytest.warns(GeometryWarning) as caught:
        run.train()
    assert any(re.search(words, str(warning.message)) for warning in caught)
    assert any("L1H1" in text for _, text in logged(run, "geometry/alarm"))
    lines = (tmp_path / "geometry" / "alarms.jsonl").read_text().splitlines()
    assert {(alarm["layer"], alarm["head"]) for alarm in map(json.loads, lines)} == {(1, 1)}
    assert "train/geometry/alarm/text_summary" in events_in(tmp_path).Tags()["tensors"]


def test_it_attaches_to_a_trainer_once(tmp_path):
    """Oracle: the Trainer's own list; it was given the callback beforehand, too."""
    callback, attached = GeometryCallback(BATCH, every=3), trainer(tmp_path)
    attached.add_callback(callback)
    for _ in range(2):
        assert callback.attach(attached) is callback
    assert attached.callback_handler.callbacks.count(callback) == 1
    assert attached.callback_handler.callbacks[0] is callback


@pytest.mark.slow
def test_given_as_one_of_the_callbacks_it_logs_but_not_to_trackers(tmp_path):
    """Oracle: the Trainer's own log, and event files as TensorBoard reads them."""
    arguments = trainer(tmp_path, report_to="tensorboard").args
    callbacks = [GeometryCallback(BATCH, every=2), LocaterCallback(0.1, 0.1)]
    unattached = OriginalTrainer(model(), arguments, train_dataset=DATA, callbacks=callbacks)
    unattached.train()
    tags = events_in(tmp_path).Tags()["scalars"]
    assert "train/loss" in tags
    for name in ("geometry/entropy_mean", "locater"):
        assert len(logged(unattached, name)) >= 3
        assert f"train/{name}" not in tags


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


DOCS = Path(__file__).parents[2] / "docs" / "monitor.md"
Logged = dict[str, list[tuple[int, Any]]]
"""Values and texts by name, each with its step."""


@pytest.fixture
def offline(tmp_path, monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    yield
    gc.collect()  # a Trainer's callback looks for its run at its end, and must find this folder


def tensorboard_log(folder: Path) -> Logged:
    events = events_in(folder)
    scalars = {
        name: [(at.step, at.value) for at in events.Scalars(name)] for name in events.Tags()["scalars"]
    }
    return scalars | {
        name.removesuffix("/text_summary"): [
            (at.step, at.tensor_proto.string_val[0].decode()) for at in events.Tensors(name)
        ]
        for name in events.Tags()["tensors"]
    }


def mlflow_log(folder: Path) -> Logged:
    import mlflow

    client = mlflow.MlflowClient((folder / "mlruns").as_uri())
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    metrics = {
        name: [(at.step, at.value) for at in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    return metrics | {name: [(-1, text)] for name, text in run.data.tags.items()}


def check(found: Logged, folder: Path, alarm: bool = True) -> None:
    """Every scalar at every look, as the record in `folder` has it, and the alarms in words."""
    heads = pd.read_json(folder / "heads.jsonl", lines=True)
    assert heads["step"].nunique() > 3
    for name, rows in (("entropy_mean", heads), ("propagation/layer_1", heads.query("layer == 1"))):
        expected = rows.groupby("step")[re.split("[_/]", name)[0]].mean()
        steps, values = zip(*found[f"geometry/{name}"], strict=True)
        assert list(steps) == expected.index.tolist()
        assert list(values) == pytest.approx(expected.tolist(), rel=1e-5)
    assert {f"geometry/{name}" for name in ("alarms", "trace_mean", "rank_collapse/layer_2")} <= found.keys()
    if not alarm:
        return
    last = json.loads((folder / "alarms.jsonl").read_text().splitlines()[-1])
    _, text = found["geometry/alarm"][-1]
    assert f"step {last['step']}: " in text
    assert f"L{last['layer']}H{last['head']}" in text


@pytest.mark.slow
def test_numbers_reach_mlflow_from_the_trainer(tmp_path, offline):
    """Which takes no texts."""
    pytest.importorskip("mlflow")
    callback = GeometryCallback(BATCH, every=1, spectra_every=2)
    with pytest.warns(GeometryWarning):
        trainer(tmp_path, Ruin(), callback, report_to="mlflow", max_steps=10).train()
    check(mlflow_log(tmp_path), tmp_path / "geometry", alarm=False)


def documented(logger: str) -> str:
    """What docs/monitor.md tells to write at a look, for a logger of one's own loop."""
    (row,) = re.findall(rf"^\| {logger} \| (.*) \|$", DOCS.read_text(), re.MULTILINE)
    return "\n".join(re.findall(r"`([^`]+)`", row))


class Wandb:
    """What a run of Weights & Biases is given: by name each value, with its step."""

    def __init__(self) -> None:
        self.logged: Logged = defaultdict(list)

    def log(self, values: dict[str, Any], step: int) -> None:
        """As `wandb.log`."""
        for name, value in values.items():
            self.logged[name].append((step, value))


@pytest.fixture(params=["TensorBoard", "Weights & Biases", "MLflow"])
def logger(tmp_path, request, offline) -> Iterator[tuple[str, dict[str, Any], Callable[[], Logged]]]:
    """Its name in the docs, what a loop has to hand once it is open, and what it has logged in the end."""
    if request.param == "TensorBoard":
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(tmp_path) as writer:
            yield request.param, {"writer": writer}, lambda: (writer.close(), tensorboard_log(tmp_path))[1]
    elif request.param == "MLflow":
        mlflow = pytest.importorskip("mlflow")
        with mlflow.start_run():
            yield request.param, {"mlflow": mlflow}, lambda: mlflow_log(tmp_path)
    else:
        wandb = Wandb()
        yield request.param, {"wandb": wandb}, lambda: wandb.logged


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::theodolite.train.monitor.GeometryWarning")
def test_what_is_documented_for_a_loop_of_one_s_own_reaches_the_logger(tmp_path, logger):
    """Oracle, too: the numbers that the monitor gave, none left out."""
    name, opened, logged_by = logger
    trained, lines, given = model(), documented(name), set()
    monitor = GeometryMonitor(trained, BATCH, every=1, spectra_every=2, folder=tmp_path / "record")
    for step in range(12):
        if numbers := monitor(step):
            names = {"numbers": numbers, "monitor": monitor, "step": step, "alarm_lines": alarm_lines}
            exec(lines, opened | names)
            given |= numbers.keys()
        ruin(trained.transformer.h[1].attn)
    found = logged_by()
    assert {f"geometry/{each}" for each in given} <= found.keys()
    check(found, tmp_path / "record")
    # MLflow's rule of names is the strictest: https://mlflow.org, Metrics; and none says what another does.
    names = scalars(monitor.last)
    assert all(re.fullmatch(r"[A-Za-z0-9_./-]{1,250}", name) for name in names)
    assert len({name.lower() for name in names}) == len(names)
