"""The monitor's numbers in loggers, offline. Oracle: each logger's own files, against the monitor's record."""

from __future__ import annotations

import gc
import json
import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.train.test_callbacks import BATCH, Ruin, model, trainer
from theodolite.train.alarms import alarm_lines
from theodolite.train.callbacks import GeometryCallback
from theodolite.train.monitor import GeometryMonitor, GeometryWarning, scalars

DOCS = Path(__file__).parents[2] / "docs" / "monitor.md"
Logged = dict[str, list[tuple[int, Any]]]
"""Values and texts by name, each with its step."""


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch) -> Iterator[None]:
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_DIR": str(tmp_path),
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    yield
    gc.collect()  # a Trainer's callback looks for its run at its end, and must find this folder
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # it remembers the folder, and has a process of its own


def tensorboard_log(folder: Path) -> Logged:
    events = EventAccumulator(str(next(folder.rglob("events.out.*")).parent)).Reload()
    logged = {
        name: [(each.step, each.value) for each in events.Scalars(name)] for name in events.Tags()["scalars"]
    }
    for name in events.Tags()["tensors"]:
        logged[name.removesuffix("/text_summary")] = [
            (each.step, each.tensor_proto.string_val[0].decode()) for each in events.Tensors(name)
        ]
    return logged


BLOCK, FULL, LAST = 1 << 15, 1, 4


def wandb_records(path: Path) -> Iterator[bytes]:
    """The records of an offline run: LevelDB's log format, with a checksum of each part, after a header of 7 bytes."""
    data, at, record = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at < len(data):
        if BLOCK - at % BLOCK < 7:  # what is left of a block is too short for a part, and padded
            at += BLOCK - at % BLOCK
            continue
        checksum, length, kind = (
            int.from_bytes(data[at : at + 4], "little"),
            int.from_bytes(data[at + 4 : at + 6], "little"),
            data[at + 6],
        )
        part = data[at + 7 : at + 7 + length]
        assert zlib.crc32(bytes([kind]) + part) == checksum
        record += part
        at += 7 + length
        if kind in (FULL, LAST):
            yield record
            record = b""


def wandb_log(folder: Path) -> Logged:
    from wandb.proto.wandb_internal_pb2 import Record

    logged: Logged = defaultdict(list)
    for data in wandb_records(next(folder.rglob("*.wandb"))):
        record = Record.FromString(data)
        items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        step = items.get("train/global_step", record.history.step.num)
        for name, value in items.items():
            logged[name].append((step, value))
    return logged


def mlflow_log(folder: Path) -> Logged:
    import mlflow

    client = mlflow.MlflowClient((folder / "mlruns").as_uri())
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    logged = {
        name: [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    return logged | {name: [(-1, text)] for name, text in run.data.tags.items()}


LOGS = {"tensorboard": tensorboard_log, "wandb": wandb_log, "mlflow": mlflow_log}


def check(logged: Logged, folder: Path, prefix: str) -> None:
    """Every scalar at every look, as the record in `folder` has it, and the alarms in words."""
    heads = pd.read_json(folder / "heads.jsonl", lines=True)
    assert heads["step"].nunique() > 3
    for name, of in {"entropy_mean": "entropy", "propagation/layer_1": "propagation"}.items():
        rows = heads[heads["layer"] == 1] if "layer" in name else heads
        expected = rows.groupby("step")[of].mean()
        assert [step for step, _ in logged[prefix + name]] == expected.index.tolist()
        assert [value for _, value in logged[prefix + name]] == pytest.approx(expected.tolist(), rel=1e-5)
    assert {prefix + name for name in ("alarms", "trace_mean", "rank_collapse/layer_2")} <= logged.keys()
    last = json.loads((folder / "alarms.jsonl").read_text().splitlines()[-1])
    _, text = logged[prefix + "alarm"][-1]
    assert f"step {last['step']}: " in text
    assert f"layer {last['layer']} head {last['head']}" in text


@pytest.mark.parametrize("logger", LOGS)
def test_numbers_and_alarms_reach_the_trainer_s_loggers(tmp_path, logger):
    pytest.importorskip(logger)
    run = trainer(
        tmp_path, Ruin(), GeometryCallback(BATCH, every=1, spectra_every=2), report_to=logger, max_steps=10
    )
    with pytest.warns(GeometryWarning):
        run.train()
    if logger == "wandb":
        import wandb

        wandb.finish()
        wandb.teardown()  # the process that writes the file has ended
    logged = LOGS[logger](tmp_path)
    prefix = "geometry/" if logger == "mlflow" else "train/geometry/"
    check(logged, tmp_path / "geometry", prefix)


def documented(logger: str) -> str:
    """What docs/monitor.md tells to write at a look, for a logger of one's own loop."""
    (row,) = re.findall(rf"^\| {logger} \| (.*) \|$", DOCS.read_text(), re.MULTILINE)
    return "\n".join(re.findall(r"`([^`]+)`", row))


@pytest.fixture
def opened(tmp_path, request) -> Iterator[dict[str, Any]]:
    """What a loop has to hand once its logger is open, by the names that the docs use."""
    if request.param == "TensorBoard":
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(tmp_path) as writer:
            yield {"writer": writer, "close": writer.close}
    elif request.param == "MLflow":
        mlflow = pytest.importorskip("mlflow")
        with mlflow.start_run():
            yield {"mlflow": mlflow, "close": mlflow.end_run}
    else:
        wandb = pytest.importorskip("wandb")
        with wandb.init(project="p"):
            yield {"wandb": wandb, "close": wandb.finish}


DOCUMENTED = {"TensorBoard": "tensorboard", "Weights & Biases": "wandb", "MLflow": "mlflow"}


@pytest.mark.filterwarnings("ignore::theodolite.train.monitor.GeometryWarning")
@pytest.mark.parametrize(("opened", "name"), [(name, name) for name in DOCUMENTED], indirect=["opened"])
def test_what_is_documented_for_a_loop_of_one_s_own_reaches_the_logger(tmp_path, opened, name):
    """Oracle, too: the numbers that the monitor gave, none left out."""
    trained = model()
    monitor = GeometryMonitor(trained, BATCH, every=1, spectra_every=2, folder=tmp_path / "record")
    lines, given = documented(name), set()
    for step in range(12):
        if numbers := monitor(step):
            exec(
                lines,
                opened | {"numbers": numbers, "monitor": monitor, "step": step, "alarm_lines": alarm_lines},
            )
            given |= numbers.keys()
        with torch.no_grad():
            trained.transformer.h[1].attn.c_attn.weight[:, 8:16] *= 4
    opened["close"]()
    if name == "Weights & Biases":
        opened["wandb"].teardown()  # the process that writes the file has ended
    logged = LOGS[DOCUMENTED[name]](tmp_path)
    assert {f"geometry/{each}" for each in given} <= logged.keys()
    check(logged, tmp_path / "record", "geometry/")


def test_names_are_those_that_every_logger_takes():
    """MLflow's rule is the strictest: https://mlflow.org, Metrics; and none says what another does."""
    monitor = GeometryMonitor(model(), BATCH, every=1)
    monitor(0)
    names = scalars(monitor.last, per_head=True)
    assert all(re.fullmatch(r"[A-Za-z0-9_./-]{1,250}", name) for name in names)
    assert len({name.lower() for name in names}) == len(names)
