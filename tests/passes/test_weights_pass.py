"""Passes over weights, a layer at a time."""

from __future__ import annotations

import pytest

from theodolite.errors import UsageError
from theodolite.models import OpenModel
from theodolite.models.calls import NotAffine
from theodolite.models.weights.head_weights import NO_MATRIX, HeadWeights
from theodolite.passes.run import TABLES
from theodolite.passes.survey import spectra
from theodolite.passes.weights_pass import weights_pass
from theodolite.system.progress import Progress


def test_spectra_are_of_one_model_and_replace_nothing(opened, tmp_path):
    spectra(opened("gpt2"), tmp_path / "run")
    with pytest.raises(UsageError, match="holds a run of another model"):
        spectra(opened("llama2"), tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists and is no run: choose another --out"):
        spectra(opened("gpt2"), tmp_path / "other")


def test_a_layer_that_is_not_affine_has_no_spectrum(opened, monkeypatch):
    model, head_weights = opened("gpt2"), OpenModel.head_weights

    def refuse(self: OpenModel, layer: int) -> HeadWeights:
        if layer == 1:
            raise NotAffine("no matrix gives its logits")
        return head_weights(self, layer)

    monkeypatch.setattr(OpenModel, "head_weights", refuse)
    running = weights_pass(model)
    running.run(Progress(model.layers))
    assert running.notes["spectrum_of"][1] == NO_MATRIX
    assert running.state()["trace"][1].isnan().all()
    assert running.state()["trace"][[0, 2]].isfinite().all()


def test_states_of_weights_alone_leave_every_other_table_empty(opened):
    run = spectra(opened("gpt2"))
    assert len(run.heads) == 12
    for table in set(TABLES) - {"heads"}:
        assert getattr(run, table).empty, table
    assert not {"mean", "positional_basis"} & run.arrays.keys()
