"""Models spread over a GPU and the CPU by `device_map`, against the CPU alone."""

from __future__ import annotations

import pytest
import torch

from tests import checkpoints
from tests.gpu.conftest import TOLERANCE, assert_near, random_corpus
from tests.test_larger import split_map
from theodolite.models import open_model
from theodolite.passes.survey import survey
from theodolite.sinks.trace import trace_sinks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("how", ["auto", "split"])
@pytest.mark.parametrize("family", ["gpt2", "llama3"])
def test_a_spread_model_is_surveyed_and_traced_as_on_the_cpu(family, how, checkpoint, device):
    """Oracle: float64 on the CPU, for weights by head too."""
    folder = checkpoint(family)
    places = (0, "cpu") if device.type == "cuda" else ("cpu", "disk")
    model = open_model(folder, device_map="auto" if how == "auto" else split_map(folder, *places))
    assert model.device == device
    offloaded = sum(parameter.is_meta for parameter in model.hf.parameters())
    assert (offloaded > 0) == (how == "split")
    whole = open_model(folder, device="cpu", dtype="float64")
    corpus = random_corpus(checkpoints.VOCABULARY)
    for work in (survey, trace_sinks):
        assert_near(work(model, corpus), work(whole, corpus), TOLERANCE[torch.float32])
    for layer in range(model.layers):
        ours, theirs = model.head_weights(layer), whole.head_weights(layer)
        for name in ("w_q", "w_k", "w_v"):
            torch.testing.assert_close(
                getattr(ours, name).double().cpu(), getattr(theirs, name).double(), rtol=0, atol=1e-6
            )
