"""Packed checkpoints. Oracles: compressed-tensors' own unpacking, and `transformers` without this package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.sparse import _semi_structured_conversions as conversions

from tests.prune.families import opened_anew
from tests.prune.test_checkpoint import contents
from tests.prune.test_model import corpus_of
from theodolite import Corpus, open_model
from theodolite.errors import UsageError
from theodolite.models.block_matrices import block_matrices
from theodolite.models.lazy_weights import open_weights
from theodolite.models.opened import OpenModel
from theodolite.prune import Pruned, prune_model
from theodolite.prune.compressed import packed_codes
from theodolite.prune.settings import PruningSettings

helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks it

ELSEWHERE = """
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

folder, ids, out, adapter = sys.argv[1:]
unpacked = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if adapter else {}
model = AutoModelForCausalLM.from_pretrained(folder, **unpacked)
if adapter:
    from peft import PeftModel

    model = PeftModel.from_pretrained(model, adapter)
with torch.no_grad():
    logits = model(input_ids=load_file(ids)["ids"]).logits
assert "theodolite" not in sys.modules
save_file({"logits": logits}, out)
"""


def quantised(family: str, place: Path, method: str, form: str, **options: Any) -> tuple[OpenModel, Pruned]:
    model = opened_anew(family, place, **options.pop("opening", {}))
    settings = {"bits": 4, "group": 16, "iterations": 2, "batch": 4} | options
    if method == "oats":
        settings["rank_ratio"] = 0.5
    return model, prune_model(model, corpus_of(), method, out=place / form, form=form, **settings)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("inputs", [32, 37, 96])
def test_codes_are_unpacked_by_the_readers_own_code(bits, inputs):
    half = 2 ** (bits - 1)
    codes = torch.randint(-half, half, (5, inputs), generator=torch.Generator().manual_seed(0))
    words = packed_codes(codes.float(), bits)
    assert torch.equal(words, helpers.pack_to_int32(codes.to(torch.int8), bits))
    assert torch.equal(helpers.unpack_from_int32(words, bits, codes.shape), codes.to(torch.int8))


@pytest.mark.parametrize(
    ("family", "method", "more"),
    [
        ("llama3", "gptq", {}),
        ("llama3", "oats", {}),
        ("gpt_neox", "oats", {"bits": 8, "group": 0}),
        ("gpt_neox", "round", {"opening": {"dtype": torch.bfloat16}}),
    ],
)
def test_transformers_alone_computes_the_same(family, method, more, tmp_path):
    """In a process that does not know this package. Separate matrices, and fused ones; with an adapter PEFT, too."""
    model, _ = quantised(family, tmp_path, method, "compressed", **more)
    folder, ids = tmp_path / "compressed", corpus_of().contexts[:3]
    save_file({"ids": ids}, tmp_path / "ids.safetensors")
    adapter = str(folder / "adapter") if method == "oats" else ""
    words = [folder, tmp_path / "ids.safetensors", tmp_path / "logits.safetensors", adapter]
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ELSEWHERE, *map(str, words)], check=True, cwd=tmp_path
    )
    logits = load_file(tmp_path / "logits.safetensors")["logits"]
    with torch.no_grad():
        expected = model.hf(input_ids=ids).logits
    if adapter:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(logits, expected)


@pytest.mark.parametrize("method", ["gptq", "oats"])
def test_opened_it_is_the_merged_checkpoint_bit_by_bit(method, tmp_path):
    """Oracle: the merged checkpoint; read for its weights only, too. Nothing beside the weights looks like weights."""
    for form in ("merged", "compressed"):
        quantised("llama3", tmp_path, method, form, opening={"dtype": torch.bfloat16})
    theirs = open_model(tmp_path / "merged").hf.state_dict()
    opened = open_model(tmp_path / "compressed")
    mine = opened.hf.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name
    lines: list[str] = []
    weights = open_weights(tmp_path / "compressed", say=lines.append)
    assert torch.equal(weights.head_weights(1).w_q, opened.head_weights(1).w_q)
    assert len(lines) == 1
    assert [path.name for path in (tmp_path / "compressed").glob("*.safetensors")] == ["model.safetensors"]


def test_bytes_are_counted_by_hand(tmp_path):
    """Oracle: the tensors of the file, and the table."""
    _, pruned = quantised("llama3", tmp_path, "gptq", "compressed")
    tensors = load_file(tmp_path / "compressed" / "model.safetensors")
    packed = sum(t.nbytes for name, t in tensors.items() if name.endswith(("_packed", "_scale")))
    assert packed == pruned.table["compact_bytes"].sum()
    told = pruned.provenance["pruning"]
    assert told["format"] == "compressed"
    assert (
        told["bytes"] == (tmp_path / "compressed" / "model.safetensors").stat().st_size < told["dense_bytes"]
    )
    config = json.loads((tmp_path / "compressed" / "config.json").read_text())["quantization_config"]
    assert "lm_head" in config["ignore"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 16


def test_a_finished_one_is_read_and_not_made_again(tmp_path, monkeypatch):
    first, _ = quantised("llama3", tmp_path, "oats", "compressed")
    before = contents(tmp_path / "compressed")
    monkeypatch.setattr(PruningSettings, "prune", lambda *_: pytest.fail("a matrix was pruned again"))
    again, _ = quantised("llama3", tmp_path, "oats", "compressed")
    assert contents(tmp_path / "compressed") == before
    theirs = first.hf.state_dict()
    for name, tensor in again.hf.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name
    with pytest.raises(UsageError, match=r"is pruned already"):
        prune_model(open_model(tmp_path / "compressed"), corpus_of(), "gptq", bits=4, group=16)


@pytest.mark.parametrize(
    ("family", "method", "options", "words"),
    [
        ("gpt2", "gptq", {"bits": 4}, "is of Conv1D, and compressed-tensors packs nn.Linear alone"),
        ("mixtral", "gptq", {"bits": 4}, "compressed-tensors packs nn.Linear alone"),
        ("llama3", "gptq", {"bits": 3}, "--format compressed is for --bits 4 or 8"),
        ("llama3", "wanda", {"sparsity": 0.5}, "--format compressed is for --bits 4 or 8"),
    ],
)
def test_what_no_reader_unpacks_is_refused(family, method, options, words, tmp_path):
    model = opened_anew(family, tmp_path)
    with pytest.raises(UsageError, match=words):
        prune_model(model, corpus_of(), method, out=tmp_path / "out", form="compressed", group=16, **options)
    assert model.interventions == ()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_two_in_four_goes_into_pytorchs_own_packing_and_back(method):
    """The layout that CUTLASS multiplies; PyTorch makes it on any device and multiplies by it on a GPU alone."""
    model = open_model(dtype="bfloat16")
    prune_model(model, Corpus.random_tokens(model.tokenizer, 64, 8), method, pattern="2:4")
    for matrix in block_matrices(model)[0]:
        weight = matrix.read()
        assert ((weight.view(-1, 4) != 0).sum(dim=1) == 2).all(), matrix.key
        values, places = conversions.sparse_semi_structured_from_dense_cutlass(weight)
        assert values.shape == (weight.shape[0], weight.shape[1] // 2)
        assert torch.equal(conversions.sparse_semi_structured_to_dense_cutlass(values, places), weight)
