"""Sparse parts as a checkpoint, low-rank parts as an adapter. Oracles: plain `transformers` with PEFT, merged files."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.prune.families import opened_anew
from theodolite import open_model
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.models.stored.lazy_weights import open_weights
from theodolite.prune import Pruned, prune_model

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks it

CORPUS = Corpus.random_tokens(300, 24, 10, 0)
FAMILIES = ("gpt2", "gpt_neox", "mixtral")
"""Fused transposed matrices, matrices fused head by head, experts."""


def pruned(family: str, place: Path, form: str, **options: object) -> Pruned:
    model = opened_anew(family, place, **options)
    return prune_model(model, CORPUS, "oats", 0.5, iterations=4, out=place / form, form=form, batch=4)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_libraries_put_it_together(family, tmp_path):
    """Oracle: the logits of the merged checkpoint, and the nonzeros that the table counts."""
    table = pruned(family, tmp_path, "merged").table
    pruned(family, tmp_path, "adapter")
    ids = CORPUS.contexts[:3]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(input_ids=ids).logits
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
        alone = base(input_ids=ids).logits
        both = peft.PeftModel.from_pretrained(base, tmp_path / "adapter" / "adapter")
        torch.testing.assert_close(both(input_ids=ids).logits, merged, rtol=1e-4, atol=1e-5)
        with both.disable_adapter():
            assert torch.equal(both(input_ids=ids).logits, alone)
    assert (alone - merged).abs().max() > 1e-3
    state = load_file(tmp_path / "adapter" / "model.safetensors")
    for parameter, rows in table[table["expert"] < 0].groupby("parameter"):
        assert int((state[parameter] != 0).sum()) == rows["nonzeros"].sum(), parameter


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_opened_it_is_the_merged_checkpoint_bit_by_bit(family, tmp_path):
    """Oracle: the merged checkpoint. Read for its weights only, too."""
    pruned(family, tmp_path, "merged", dtype=torch.bfloat16)
    pruned(family, tmp_path, "adapter", dtype=torch.bfloat16)
    opened, merged = open_model(tmp_path / "adapter"), open_model(tmp_path / "merged")
    assert type(opened.hf) is type(merged.hf)
    theirs = merged.hf.state_dict()
    mine = opened.hf.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name
    assert opened.sha256 != merged.sha256
    for form in ("merged", "adapter"):  # no loader takes anything beside the weights for weights
        assert [path.name for path in (tmp_path / form).glob("*.safetensors")] == ["model.safetensors"]
    lines: list[str] = []
    lazily = open_weights(tmp_path / "adapter", say=lines.append)
    assert lines == ["opened whole, since an adapter lies beside its weights"]
    assert torch.equal(lazily.head_weights(1).w_q, merged.head_weights(1).w_q)
    assert (
        Pruned.load(tmp_path / "adapter").low_rank.keys() == Pruned.load(tmp_path / "merged").low_rank.keys()
    )


def test_an_adapter_that_was_trained_on_counts(tmp_path):
    """Oracle: W + B A by hand, of the trained factors."""
    pruned("llama3", tmp_path, "adapter")
    folder = tmp_path / "adapter"
    before = open_model(folder)
    model = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder), folder / "adapter", is_trainable=True
    )
    name = "model.layers.1.mlp.up_proj"
    layer = model.base_model.model.get_submodule(name)
    with torch.no_grad():
        layer.lora_A["default"].weight.mul_(2)
        by_hand = (
            layer.base_layer.weight.double()
            + layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
        )
    model.save_pretrained(folder / "adapter")
    after = open_model(folder)
    assert after.sha256 != before.sha256
    assert torch.equal(after.hf.get_submodule(name).weight, by_hand.float())
    (folder / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"adapter lacks its low-rank parts"):
        open_model(folder)


def test_what_cannot_be_an_adapter_is_refused_at_once(tmp_path, monkeypatch):
    model = opened_anew("gpt2", tmp_path)
    with pytest.raises(UsageError, match="wanda has no low-rank part that an adapter could hold: use oats"):
        prune_model(model, CORPUS, "wanda", 0.5, out=tmp_path / "out", form="adapter")
    monkeypatch.setattr("theodolite.prune.options.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install peft"):
        prune_model(model, CORPUS, "oats", 0.5, out=tmp_path / "out", form="adapter")
    assert model.interventions == ()
