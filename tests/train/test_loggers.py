"""The monitor's numbers in loggers, offline. Oracle: each logger's own files, against the monitor's record."""

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

from tests.train.test_callbacks import BATCH, Ruin, model, trainer
from theodolite.train.alarms import alarm_lines
from theodolite.train.callbacks import GeometryCallback
from theodolite.train.monitor import GeometryMonitor, GeometryWarning, scalars

pytestmark = pytest.mark.slow
DOCS = Path(__file__).parents[2] / "docs" / "monitor.md"
Logged = dict[str, list[tuple[int, Any]]]
"""Values and texts by name, each with its step."""


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch) -> Iterator[None]:
    for name, value in {
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    yield
    gc.collect()  # a Trainer's callback looks for its run at its end, and must find this folder


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


def mlflow_log(folder: Path) -> Logged:
    import mlflow

    client = mlflow.MlflowClient((folder / "mlruns").as_uri())
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    logged = {
        name: [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    return logged | {name: [(-1, text)] for name, text in run.data.tags.items()}


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


def test_numbers_and_alarms_reach_mlflow_from_the_trainer(tmp_path):
    """Which takes texts as tags; what the others get, test_callbacks.py reads in TensorBoard."""
    pytest.importorskip("mlflow")
    run = trainer(
        tmp_path, Ruin(), GeometryCallback(BATCH, every=1, spectra_every=2), report_to="mlflow", max_steps=10
    )
    with pytest.warns(GeometryWarning):
        run.train()
    check(mlflow_log(tmp_path), tmp_path / "geometry", "geometry/")


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
def logger(tmp_path, request) -> Iterator[tuple[str, dict[str, Any], Callable[[], Logged]]]:
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


@pytest.mark.filterwarnings("ignore::theodolite.train.monitor.GeometryWarning")
def test_what_is_documented_for_a_loop_of_one_s_own_reaches_the_logger(tmp_path, logger):
    """Oracle, too: the numbers that the monitor gave, none left out."""
    name, opened, logged_by = logger
    trained = model()
    monitor = GeometryMonitor(trained, BATCH, every=1, spectra_every=2, folder=tmp_path / "record")
    lines, given = documented(name), set()
    for step in range(12):
        if numbers := monitor(step):
            names = {"numbers": numbers, "monitor": monitor, "step": step, "alarm_lines": alarm_lines}
            exec(lines, opened | names)
            given |= numbers.keys()
        with torch.no_grad():
            trained.transformer.h[1].attn.c_attn.weight[:, 8:16] *= 4
    logged = logged_by()
    assert {f"geometry/{each}" for each in given} <= logged.keys()
    check(logged, tmp_path / "record", "geometry/")


def test_names_are_those_that_every_logger_takes():
    """MLflow's rule is the strictest: https://mlflow.org, Metrics; and none says what another does."""
    monitor = GeometryMonitor(model(), BATCH, every=1)
    monitor(0)
    names = scalars(monitor.last, per_head=True)
    assert all(re.fullmatch(r"[A-Za-z0-9_./-]{1,250}", name) for name in names)
    assert len({name.lower() for name in names}) == len(names)
