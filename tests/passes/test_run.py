"""The run folder: written whole or not at all, read with one clear line where it is not right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from theodolite.errors import UsageError
from theodolite.jobs.job import Unfinished
from theodolite.passes.run import SCHEMA_VERSION, TABLES, Run, finished_run
from theodolite.system.files import bytes_digest, read_json_checked, write_json_checked


def small_run() -> Run:
    table = pd.DataFrame({"layer": [0, 1], "value": [1.5, float("nan")]})
    provenance = {
        "schema_version": SCHEMA_VERSION,
        "model": {"id": "m", "layers": 1, "heads": 1},
        "fingerprint": {"a": 1},
    }
    arrays = {"x": torch.arange(6.0).view(2, 3).T}
    return Run(layers=table, heads=table.assign(head=[0, 0]), arrays=arrays, provenance=provenance)


def resealed(folder: Path, **changed: object) -> None:
    """Change run.json, with the checksum that belongs to it."""
    write_json_checked(folder / "run.json", read_json_checked(folder / "run.json") | changed)


def test_what_is_saved_is_loaded(tmp_path):
    saved = small_run().save(tmp_path / "run")
    loaded = Run.load(tmp_path / "run")
    assert loaded.layers.equals(saved.layers)
    assert torch.equal(loaded.arrays["x"], saved.arrays["x"])
    assert loaded.provenance == saved.provenance
    assert loaded.folder == tmp_path / "run"
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == sorted(
        [*(f"{name}.parquet" for name in TABLES), "arrays.safetensors", "run.json"]
    )
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    assert repr(saved) == "Run of m (1 blocks × 1 heads)"
    with pytest.raises(UsageError, match="exists already"):
        small_run().save(tmp_path / "run")


def test_missing_and_damaged_runs_and_those_of_another_schema(tmp_path):
    with pytest.raises(UsageError, match="no run at"):
        Run.load(tmp_path / "nowhere")
    folder = small_run().save(tmp_path / "run").folder
    arrays = (folder / "arrays.safetensors").read_bytes()
    (folder / "arrays.safetensors").write_bytes(arrays[:20])
    with pytest.raises(UsageError, match=rf"run is damaged \(arrays.*: remove {folder}, then run the survey"):
        Run.load(folder)
    for name in ("sinks.parquet", "arrays.safetensors"):
        (folder / name).unlink()
    lacks = (
        rf"{folder} lacks sinks\.parquet and arrays\.safetensors: remove {folder}, then run the survey again"
    )
    with pytest.raises(UsageError, match=lacks):
        Run.load(folder)
    for schema in (1, 99):
        resealed(folder, schema_version=schema)
        with pytest.raises(UsageError, match=f"schema {schema}, this theodolite reads 6: survey again"):
            finished_run(Unfinished(folder, {"a": 1}))
    (folder / "run.json").write_text("{")
    with pytest.raises(UsageError, match="damaged"):
        Run.load(folder)


EDITS = {
    "a number": lambda told: told["fingerprint"].update(a=2),
    "a size": lambda told: told["model"].update(layers=10**9),
    "an entry more": lambda told: told.update(counts={"tokens": 1}),
    "an entry less": lambda told: told.pop("fingerprint"),
    "the checksum of a table": lambda told: told["checksums"].update({"heads.parquet": "0"}),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_run_json_is_refused(edit, tmp_path):
    """Oracle: the edit. What says the same in another order and on other lines is the same."""
    folder = small_run().save(tmp_path / "run").folder
    told = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(dict(reversed(told.items()))))
    assert Run.load(folder).heads.equals(small_run().heads)
    EDITS[edit](told)
    (folder / "run.json").write_text(json.dumps(told, indent=2))
    with pytest.raises(
        UsageError,
        match=r"run is damaged \(run\.json was changed after .*: remove .*, then run the survey again",
    ):
        Run.load(folder)


def test_a_link_to_an_empty_folder_is_followed(tmp_path):
    (tmp_path / "disk").mkdir()
    link = tmp_path / "run"
    link.symlink_to(tmp_path / "disk")
    work = Unfinished(link, {"model": "a"})
    assert finished_run(work) is None
    small_run().save(work.out)
    assert link.is_symlink()
    assert Run.load(link).heads.equals(small_run().heads)


def test_a_table_that_was_written_over_is_named(tmp_path):
    """By its checksum; with one of its own, by layers that the model does not have."""
    folder = small_run().save(tmp_path / "run").folder
    (folder / "arrays.safetensors").write_bytes((folder / "arrays.safetensors").read_bytes()[:-1] + b"x")
    with pytest.raises(UsageError, match=r"arrays\.safetensors: its bytes are not those that were written"):
        Run.load(folder)
    small_run().save(tmp_path / "other")
    (folder / "arrays.safetensors").write_bytes((tmp_path / "other" / "arrays.safetensors").read_bytes())
    other = pd.DataFrame({"layer": [0, 1], "value": [2.5, 3.5], "head": [0, 0]})
    other.to_parquet(folder / "heads.parquet")
    with pytest.raises(UsageError, match=r"heads\.parquet: its bytes are not those that were written"):
        Run.load(folder)
    for wrong in ([0, 10**9], [-1, 0], [0.5, 1.0], ["0", "1"]):
        other.assign(layer=wrong).to_parquet(folder / "heads.parquet")
        sums = read_json_checked(folder / "run.json")["checksums"]
        resealed(
            folder, checksums=sums | {"heads.parquet": bytes_digest((folder / "heads.parquet").read_bytes())}
        )
        with pytest.raises(
            UsageError, match=r"heads\.parquet: the model has no such layer as in its column layer"
        ):
            Run.load(folder)


FAULTS = {
    "it has no column head": lambda table: table.drop(columns="head"),
    "its column value holds str": lambda table: table.assign(value="x"),
    "its column value holds object": lambda table: table.assign(value=[[1], [2]]),
    "its column regime holds int64": lambda table: table.assign(regime=1),
    "the model has no such head": lambda table: table.assign(head=10**9),
    "it has no heads": lambda table: table.iloc[:0],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_table_of_another_program_is_refused_by_its_columns(fault, tmp_path):
    """Its checksum is right. Oracle: what was put into it."""
    run = small_run()
    folder = replace(run, heads=FAULTS[fault](run.heads)).save(tmp_path / "run").folder
    with pytest.raises(UsageError, match=rf"{fault}.*: remove .*, then run the survey again"):
        Run.load(folder)


@pytest.mark.parametrize("entry", ["corpus", "fingerprint", "checksums", "counts"])
def test_provenance_of_another_type_is_refused(entry, tmp_path):
    folder = small_run().save(tmp_path / "run").folder
    for value in (7, "three", [1]):
        resealed(folder, **{entry: value})
        with pytest.raises(UsageError, match=r"run\.json is damaged: remove .*, then run the survey again"):
            Run.load(folder)
