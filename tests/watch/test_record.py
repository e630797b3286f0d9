"""The record as it grows. Oracles: pandas' own reader of the files, the record of a file that was read at once."""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.watch.conftest import LOOKS, training
from theodolite.train.monitor import RecordWarning
from theodolite.watch.record import LEAST, OF_HEADS, PATIENCE, QUIET, TrainingRecord


def read(run: Path) -> TrainingRecord:
    record = TrainingRecord(run)
    assert record.refresh() == run.exists()
    assert not record.refresh()
    return record


def shown(record: TrainingRecord) -> str:
    """All that a record knows, to compare."""
    columns = {name: record.heads.of(name) for name in OF_HEADS} | {"rank": record.layers.of("rank_collapse")}
    values = {name: None if of is None else of.tolist() for name, of in columns.items()}
    return repr([values, record.heads.steps.tolist(), record.alarms, record.losses, record.notes()])


@pytest.mark.parametrize("inside", ["", "geometry"])
def test_it_holds_what_the_files_hold(recorded, inside):
    """Whether the folder itself is named, or the `output_dir` around it."""
    record = read(recorded / inside)
    files = {
        name: pd.read_json(recorded / "geometry" / f"{name}.jsonl", lines=True)
        for name in ("heads", "layers", "losses", "alarms")
    }
    assert tuple(record.heads.steps) == LOOKS
    for name in ("entropy_share", "propagation", "sink_first", "sink_later"):
        table = files["heads"].pivot(index="step", columns=["layer", "head"], values=name)
        np.testing.assert_allclose(record.heads.of(name), table.to_numpy(), rtol=1e-6)
        assert record.heads.places == list(table.columns)
    table = files["layers"].pivot(index="step", columns="layer", values="rank_collapse")
    np.testing.assert_allclose(record.layers.of("rank_collapse"), table.to_numpy(), rtol=1e-6)
    assert record.loss() == (
        dict(zip(files["losses"]["step"], files["losses"]["loss"], strict=True)),
        "losses.jsonl",
    )
    assert len(files["alarms"])
    assert [alarm.step for alarm in record.alarms] == files["alarms"]["step"].tolist()
    assert record.heads.of("no_column") is None
    assert record.notes() == []


def test_one_that_grows_is_read_as_one_that_is_there(recorded, tmp_path):
    """Cut anywhere: within a line, a number, a character."""
    chance = random.Random(0)
    record = TrainingRecord(tmp_path)
    for name in ("alarms", "losses", "heads", "layers"):
        whole = (recorded / "geometry" / f"{name}.jsonl").read_bytes()
        cuts = sorted(chance.sample(range(1, len(whole)), 12))
        for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            with (tmp_path / f"{name}.jsonl").open("ab") as file:
                file.write(whole[start:end])
            record.refresh()
            assert record.notes() == []
    assert shown(record) == shown(read(recorded))


def test_a_run_that_begins_again_is_read_anew_and_says_so(tmp_path):
    """A run that goes on keeps its looks up to there; one from the start moves them aside."""
    record = TrainingRecord(tmp_path)

    def steps(numbers: range) -> None:
        with training(tmp_path) as step, warnings.catch_warnings():
            warnings.simplefilter("ignore", RecordWarning)
            for number in numbers:
                step(number)
                record.refresh()

    steps(range(5))
    steps(range(3, 7))
    assert record.heads.steps.tolist() == [*range(7)]
    assert record.notes() == []
    steps(range(2))
    assert record.heads.steps.tolist() == sorted(record.losses) == [0, 1]
    assert record.alarms == []
    assert record.notes() == ["Records of earlier runs, moved aside: heads.1.jsonl."]
    for path in tmp_path.glob("*.jsonl"):
        path.unlink()
    assert record.refresh()
    assert not len(record.heads.steps)
    assert record.notes() == []


DAMAGED = {
    "heads": [
        "7",
        "",
        '{"step": 1, "layer": 0, "hea',
        '{"step": -1, "layer": 0, "head": 0}',
        '{"step": 4294967296, "layer": 0, "head": 0}',
        '{"step": 1, "layer": 0}',
        '{"step": 1, "layer": 0, "head": 1e3}',
        '{"step": 1, "layer": 0, "head": ' + "9" * 30 + "}",
        '{"step": 1, "layer": [0], "head": {}}',
        "[" * 100_000,
        "\udcff\udcfe",
    ],
    "layers": ['{"step": 1}', "null"],
    "alarms": [
        '{"step": 1}',
        '{"step": 1, "kind": ["rank collapse"], "layer": 0}',
        '{"step": 1, "kind": "<b>", "layer": 0}',
        '{"step": 1, "kind": "rank collapse", "layer": "x"}',
        '{"step": 1, "kind": "vanishing signal", "layer": 0, "head": 0, "value": 1e20, "slope": -1e-300}',
    ],
    "losses": ['{"step": 1}', '{"loss": 2}'],
}


def test_damaged_lines_are_left_out_and_counted(recorded, tmp_path):
    folder = shutil.copytree(recorded, tmp_path / "out") / "geometry"
    for name, lines in DAMAGED.items():
        whole = (folder / f"{name}.jsonl").read_text().splitlines()
        half = len(whole) // 2
        text = "\n".join([*whole[:half], *lines, *whole[half:], '{"step": 99, "lay'])
        (folder / f"{name}.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    record = read(folder)
    assert record.notes() == [
        f"{len(DAMAGED[name])} damaged lines of {name}.jsonl left out."
        for name in ("heads", "layers", "alarms", "losses")
    ]
    sound = read(recorded)
    assert shown(record).rpartition("['")[0] == shown(sound).rpartition("[]")[0]


def test_values_that_are_no_numbers_are_gaps(tmp_path):
    values = ["null", '"a"', "NaN", "Infinity", "1e300", "9" * 400, "[1]", "true", "0.5"]
    rows = [
        f'{{"step": {n}, "layer": 0, "head": 0, "propagation": {value}, "loss": {value}}}\n'
        for n, value in enumerate(values)
    ]
    for name in ("heads", "losses"):
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    record = read(tmp_path)
    propagation = record.heads.of("propagation")
    for column in (propagation[:, 0], np.array(list(record.losses.values()))):
        assert np.isnan(column[:-1]).all()
        assert column[-1] == 0.5


def test_what_cannot_be_read_is_named(recorded, tmp_path):
    folder = shutil.copytree(recorded, tmp_path / "out") / "geometry"
    (folder / "layers.jsonl").unlink()
    (folder / "layers.jsonl").mkdir()
    record = read(folder)
    assert record.notes() == ["layers.jsonl cannot be read: Is a directory."]
    assert tuple(record.heads.steps) == LOOKS


def test_without_losses_of_its_own_the_trainer_s_newest_state_is_read(recorded, tmp_path):
    output = shutil.copytree(recorded, tmp_path / "out")
    (output / "geometry" / "losses.jsonl").unlink()
    for number, step in enumerate((20, 3, 100)):
        (output / f"checkpoint-{step}").mkdir()
        state = output / f"checkpoint-{step}" / "trainer_state.json"
        history = [{"loss": 0.5, "step": step}, {"eval_loss": 1.0, "step": step}, {"loss": 1.5}]
        state.write_text(json.dumps({"log_history": history}) if step != 100 else '{"log_his')
        os.utime(state, (1e9 + number, 1e9 + number))
        if step == 3:
            record = read(output)
            assert record.loss() == ({3: 0.5}, "checkpoint-3/trainer_state.json")
    record.refresh()
    assert record.loss() == ({3: 0.5}, "checkpoint-3/trainer_state.json")  # the newest is half written
    assert read(output).loss() == ({}, "losses.jsonl")


def test_how_long_it_may_be_silent_follows_its_pace(tmp_path):
    """Oracle: the times that the file is given, by hand."""
    record = TrainingRecord(tmp_path)
    record.refresh()
    assert record.heard == 0
    assert record.patience == QUIET
    path, now = tmp_path / "losses.jsonl", 1e9
    for seconds, expected in ((0, QUIET), (1, LEAST), (40, PATIENCE * 40), (2, PATIENCE * 40)):
        now += seconds
        with path.open("a") as file:
            file.write('{"step": 1, "loss": 2}\n')
        os.utime(path, (now, now))
        assert record.refresh()
        assert (record.heard, record.patience) == (now, expected)
