"""Weights that were changed in memory are measured under a name of their own, which is not the checkpoint's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.logits.constituents import constituents
from theodolite.models import OpenModel
from theodolite.models.opened import weights_checksum
from theodolite.passes.corpus_pass import fingerprint_of
from theodolite.passes.run import Run, describe_model
from theodolite.passes.survey import spectra, survey
from theodolite.sinks.interventions import without_low_rank

IDS = torch.arange(64).view(2, 32)
CORPUS = Corpus.from_ids(IDS)


def weight(model: OpenModel) -> torch.Tensor:
    return model.structure.attention[1].c_attn.weight


def untie(model: OpenModel) -> None:
    model.hf.lm_head.weight = torch.nn.Parameter(model.hf.lm_head.weight.clone(), requires_grad=False)


CHANGES: dict[str, Callable[[OpenModel], object]] = {
    "in place": lambda model: weight(model).requires_grad_(False).mul_(1.5),
    "data, which no version counter sees": lambda model: weight(model).data[0, 1].neg_(),
    "two signs, which sums of whole numbers do not see": lambda model: weight(model).data[0, 1:4:2].neg_(),
    "order, which no sum sees": lambda model: weight(model).data.copy_(weight(model).flip(0)),
    "replaced": lambda model: setattr(weight(model), "data", weight(model).clone() + 1),
    "untied": untie,
    "in numpy": lambda model: weight(model).detach().numpy()[0].fill(0.0),
}


@pytest.fixture
def model(anew) -> OpenModel:
    return anew("gpt2")


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(change, model):
    before = weights_checksum(model.hf)
    assert not model.weights().changed
    CHANGES[change](model)
    assert weights_checksum(model.hf) != before
    assert model.weights().changed


def test_a_pass_says_what_it_read(model, tmp_path):
    first = spectra(model, tmp_path / "out")
    assert first.provenance["model"]["sha256"] == model.sha256
    kept = weight(model).clone()
    CHANGES["order, which no sum sees"](model)
    with pytest.raises(UsageError, match=r"holds a run of another model, corpus or options \(the model\)"):
        spectra(model, tmp_path / "out")
    changed = spectra(model, tmp_path / "changed")
    told = changed.provenance["model"]
    assert told["weights"] == "in memory, changed"
    assert told["sha256"] not in (None, model.sha256)
    assert told["revision"] is None
    assert not changed.heads.equals(first.heads)
    again = spectra(model, tmp_path / "changed")  # the same changed weights are a run that is there
    assert again.heads.equals(changed.heads)
    weight(model).data.copy_(kept)
    assert spectra(model, tmp_path / "out").heads.equals(first.heads)
    assert Run.load(tmp_path / "out").provenance["model"] == first.provenance["model"]


def test_what_an_intervention_replaces_is_named_by_it(model):
    with without_low_rank(model, 1, 2):
        fingerprint = fingerprint_of(model)
    assert fingerprint["model"] == model.sha256
    assert fingerprint["interventions"]
    assert describe_model(model)["model"]["sha256"] == model.sha256


def test_a_run_of_changed_weights_serves_the_changed_model_alone(model):
    """And not one that is changed again."""
    CHANGES["order, which no sum sees"](model)
    run = survey(model, CORPUS)
    assert constituents(model, IDS[0], 1, decomposition=run).total.shape == (4, 32, 32)
    CHANGES["in place"](model)
    with pytest.raises(UsageError, match="the run is of another model"):
        constituents(model, IDS[0], 1, decomposition=run)
