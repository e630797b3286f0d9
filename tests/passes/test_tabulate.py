"""Tables are made of states alone."""

from __future__ import annotations

import torch

from theodolite.passes.run import TABLES
from theodolite.passes.stages import States
from theodolite.passes.survey import spectra, survey
from theodolite.passes.tabulate import tabulate
from theodolite.system.checksums import read_checked, write_checked


def test_tables_are_a_function_of_saved_states(tmp_path, opened, corpus, monkeypatch):
    """From a progress file alone, no model at hand: the run that the survey gave."""
    kept = []
    monkeypatch.setattr(
        "theodolite.passes.survey.tabulate", lambda states, extra: kept.append(states) or tabulate(states)
    )
    run = survey(opened("gpt2"), corpus)
    write_checked(tmp_path / "states", kept[0].tensors, {"notes": kept[0].notes, "seconds": kept[0].seconds})
    tensors, told = read_checked(tmp_path / "states")
    again = tabulate(States(tensors, told["notes"], told["seconds"]))
    for table in TABLES:
        assert getattr(again, table).equals(getattr(run, table)), table
    assert all(torch.equal(again.arrays[name], run.arrays[name]) for name in run.arrays)
    assert again.provenance == run.provenance


def test_states_of_weights_alone_leave_every_other_table_empty(opened):
    run = spectra(opened("gpt2"))
    assert len(run.heads) == 12
    for table in set(TABLES) - {"heads"}:
        assert getattr(run, table).empty, table
    assert not {"mean", "positional_basis", "gram"} & run.arrays.keys()
