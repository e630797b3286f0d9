"""Encoder-decoders: which half is pruned, and that all who ask are told so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from tests.prune.test_model import corpus_of
from theodolite.models import open_model
from theodolite.prune import Pruned, prune_model
from theodolite.report.pruned_model import pruned_outcome


@pytest.fixture(scope="module")
def t5(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("t5")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(vocab_size=300, decoder_start_token_id=0, **sizes)).save_pretrained(
        folder
    )
    return folder


@pytest.mark.parametrize(
    ("attention", "half", "other"),
    [(None, "decoder", "encoder"), ("cross", "decoder", "encoder"), ("encoder", "encoder", "decoder")],
)
def test_the_half_that_is_pruned_is_named_and_read_back(t5, tmp_path, attention, half, other):
    """The same call finds it finished, and puts it into the model."""
    first, again = (open_model(t5, attention=attention) for _ in range(2))
    for model in (first, again):
        pruned = prune_model(model, corpus_of(), "magnitude", 0.5, out=tmp_path / "out")
    assert all(name.startswith(f"{half}.") for name in pruned.table["parameter"])
    assert json.loads((tmp_path / "out" / "pruning.json").read_text())["pruning"]["half"] == half
    said = {
        reading.quantity: reading.here for reading in pruned_outcome(Pruned.load(tmp_path / "out")).readings
    }
    assert (
        said["pruned half"] == f"{half} alone; the {other} is dense (--attention {other} prunes it instead)"
    )
    theirs = again.hf.state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in first.hf.state_dict().items())
