"""Passes over weights, a layer at a time."""

from __future__ import annotations

import pytest
import torch

from theodolite.errors import UsageError
from theodolite.models import OpenModel
from theodolite.models.calls import NotAffine
from theodolite.models.weights.head_weights import NO_MATRIX, HeadWeights
from theodolite.passes.run import TABLES
from theodolite.passes.survey import spectra
from theodolite.passes.weights_pass import WeightsPass
from theodolite.system.progress import Progress


def test_spectra_are_of_one_model_and_replace_nothing(opened, tmp_path):
    spectra(opened("gpt2"), tmp_path / "run")
    with pytest.raises(UsageError, match="holds a run of another model"):
        spectra(opened("llama2"), tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists and is no run: choose another --out"):
        spectra(opened("gpt2"), tmp_path / "other")


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_a_pass_that_goes_on_reads_each_layer_once(family, opened, monkeypatch):
    """Oracle: the same pass without a stop, and the layers that it was seen to read."""
    model, read = opened(family), []
    head_weights = OpenModel.head_weights
    monkeypatch.setattr(
        OpenModel, "head_weights", lambda self, layer: read.append(layer) or head_weights(self, layer)
    )
    whole = WeightsPass(model)
    whole.run(Progress(model.layers))
    assert read == list(range(model.layers))

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    first, again = WeightsPass(model), WeightsPass(model)
    with pytest.raises(KeyboardInterrupt):
        first.run(Progress(model.layers, 0, stop))
    again.restore(first.state())
    again.notes = first.notes
    read.clear()
    again.run(Progress(model.layers, 2))
    assert read == list(range(2, model.layers))
    assert again.notes == whole.notes
    for name, values in whole.state().items():
        assert torch.equal(again.state()[name].nan_to_num(-1), values.nan_to_num(-1)), name


def test_a_layer_that_is_not_affine_has_no_spectrum(opened, monkeypatch):
    model, head_weights = opened("gpt2"), OpenModel.head_weights

    def refuse(self: OpenModel, layer: int) -> HeadWeights:
        if layer == 1:
            raise NotAffine("no matrix gives its logits")
        return head_weights(self, layer)

    monkeypatch.setattr(OpenModel, "head_weights", refuse)
    running = WeightsPass(model)
    running.run(Progress(model.layers))
    assert running.notes["spectrum_of"][1] == NO_MATRIX
    assert running.state()["trace"][1].isnan().all()
    assert running.state()["trace"][[0, 2]].isfinite().all()


def test_states_of_weights_alone_leave_every_other_table_empty(opened):
    run = spectra(opened("gpt2"))
    assert len(run.heads) == 12
    for table in set(TABLES) - {"heads"}:
        assert getattr(run, table).empty, table
    assert not {"mean", "positional_basis", "gram"} & run.arrays.keys()
