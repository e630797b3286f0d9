"""Low-rank parts trained after pruning. Oracles: plain `transformers` with PEFT, trained by hand in the same steps."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.prune.families import opened_anew
from tests.prune.test_checkpoint import contents
from theodolite import open_model
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.prune import Pruned, prune_model
from theodolite.prune.recover import LEARNING_RATE
from theodolite.report.pruned_model import pruned_outcome

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks it

CORPUS = Corpus.random_tokens(40, 16, 20, 0)
READ, HELD_OUT = CORPUS.contexts[:18], CORPUS.contexts[18:]
STEPS, BATCH = 12, 6


def pruned(family: str, place: Path, out: str, **options: object) -> Pruned:
    options = {"corpus": CORPUS, "recover": STEPS, "form": "adapter", "batch": BATCH, **options}
    model = opened_anew(family, place, dtype=options.pop("dtype", torch.float32))
    return prune_model(model, method="oats", sparsity=0.5, iterations=3, out=place / out, **options)


def with_adapter(folder: Path, *, trainable: bool = False) -> peft.PeftModel:
    base = AutoModelForCausalLM.from_pretrained(folder)
    return peft.PeftModel.from_pretrained(base, folder / "adapter", is_trainable=trainable).eval()


def loss_of(model: torch.nn.Module, ids: torch.Tensor) -> float:
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)


def trained_by_hand(model: torch.nn.Module, factors: list[torch.nn.Parameter]) -> None:
    optimizer, generator = torch.optim.AdamW(factors, weight_decay=0), torch.Generator().manual_seed(0)
    rows = torch.cat([torch.randperm(18, generator=generator) for _ in range(STEPS * BATCH // 18)])
    for step, some in enumerate(rows.split(BATCH)):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / STEPS)
        optimizer.zero_grad()
        model(input_ids=READ[some], labels=READ[some]).loss.backward()
        torch.nn.utils.clip_grad_norm_(factors, 1.0)
        optimizer.step()


def test_it_is_the_fine_tuning_of_the_adapter_by_peft(tmp_path):
    """Of a model with separate projections, where PEFT trains the same numbers. Nothing held out is read."""
    told = pruned("llama3", tmp_path, "trained").provenance["pruning"]["recovery"]
    read = Corpus.from_ids(READ)
    pruned("llama3", tmp_path, "before", corpus=read, recover=None)
    trained, oracle = with_adapter(tmp_path / "trained"), with_adapter(tmp_path / "before", trainable=True)
    base = "model.safetensors"
    assert (tmp_path / "trained" / base).read_bytes() == (tmp_path / "before" / base).read_bytes()
    assert told["loss"]["pruned"] == pytest.approx(loss_of(oracle, HELD_OUT), rel=1e-5)
    before = {name: factor.clone() for name, factor in oracle.named_parameters()}
    trained_by_hand(oracle, [factor for factor in oracle.parameters() if factor.requires_grad])
    found = dict(trained.named_parameters())
    for name, expected in oracle.named_parameters():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-5, msg=name)
        assert ("lora" in name) == (not torch.equal(found[name], before[name])), name
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "llama3").eval()
    assert told["loss"]["recovered"] == pytest.approx(loss_of(trained, HELD_OUT), rel=1e-5)
    assert told["loss"]["dense"] == pytest.approx(loss_of(dense, HELD_OUT), rel=1e-5)
    assert (told["steps"], told["held_out_contexts"]) == (STEPS, 2)


def test_what_is_learnt_is_told_with_its_error(tmp_path):
    """Contexts of one repeated token are learnt, by the pruned model and by the dense one. Errors by hand."""
    ids = torch.arange(20).repeat_interleave(16).view(20, 16) % 3 + 5
    result = pruned("gpt2", tmp_path, "out", corpus=Corpus.from_ids(ids), recover=60)
    told = result.provenance["pruning"]["recovery"]
    loss, difference = told["loss"], told["difference"]
    assert loss["recovered"] < loss["pruned"]
    assert loss["dense, trained"] < loss["dense"]
    for name, each in difference.items():
        one, other = name.split(" − ")
        assert each["mean"] == pytest.approx(loss[one] - loss[other], abs=1e-9)
    trained = with_adapter(tmp_path / "out")
    with trained.disable_adapter():
        sparse = [loss_of(trained, row[None]) for row in ids[18:]]
    each = [loss_of(trained, row[None]) for row in ids[18:]]
    assert loss["recovered"] == pytest.approx(sum(each) / 2, rel=1e-5)
    assert sparse != each
    assert difference["recovered − pruned"]["error"] >= 0
    shown = {reading.quantity: reading.here for reading in pruned_outcome(result).readings}
    assert shown["loss on 2 held-out contexts, 60 steps"].startswith("pruned ")
    assert shown["recovered − pruned"].endswith("nats per token")


@pytest.mark.parametrize(("family", "dtype"), [("gpt2", torch.float32), ("mixtral", torch.bfloat16)])
def test_what_is_read_again_has_the_trained_parts(family, dtype, tmp_path):
    """Oracle: B A of the adapter's file; the opened folder, and the model in memory."""
    model = opened_anew(family, tmp_path, dtype=dtype)
    options = {"recover": 3, "form": "adapter", "batch": BATCH, "out": tmp_path / "out", "iterations": 3}
    prune_model(model, CORPUS, "oats", 0.5, **options)
    stored = Pruned.load(tmp_path / "out").low_rank
    factors = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    prefix = "base_model.model.transformer.h.1.attn.c_attn" if family == "gpt2" else None
    if prefix:
        both = factors[f"{prefix}.lora_B.weight"] @ factors[f"{prefix}.lora_A.weight"]
        mine = torch.cat([stored[1, name][0] @ stored[1, name][1] for name in "qkv"])
        torch.testing.assert_close(mine, both)
    else:
        name = "base_model.model.model.layers.1.self_attn.o_proj"
        left, right = stored[1, "self_attn.o_proj"]
        assert torch.equal(left, factors[f"{name}.lora_B.weight"])
        assert torch.equal(right, factors[f"{name}.lora_A.weight"])
    again = opened_anew(family, tmp_path, dtype=dtype)
    prune_model(again, CORPUS, "oats", 0.5, **options)
    opened = open_model(tmp_path / "out").hf.state_dict()
    for name, tensor in model.hf.state_dict().items():
        assert torch.equal(opened[name], tensor), name
        assert torch.equal(again.hf.state_dict()[name], tensor), name


def test_in_a_half_precision_losses_are_of_matrices_rounded_alike(tmp_path, monkeypatch):
    """Steps of length 0 bring nothing, to the last bit."""
    monkeypatch.setattr("theodolite.prune.recover.LEARNING_RATE", 0.0)
    told = pruned("llama3", tmp_path, "out", dtype=torch.bfloat16).provenance["pruning"]["recovery"]
    assert told["loss"]["recovered"] == told["loss"]["pruned"] != told["loss"]["dense"]
    assert told["loss"]["dense, trained"] == told["loss"]["dense"]


@pytest.mark.parametrize("steps", [STEPS, STEPS + 5])
def test_stopped_while_it_trains_it_goes_on_to_the_same_bytes(steps, tmp_path, monkeypatch):
    """Oracle: the files of a call that was not stopped. What is pruned is not pruned again, for other steps neither."""
    whole, calls = pruned("gpt2", tmp_path, "whole"), []
    total = len(whole.table)

    def stop(done: int, of: int) -> None:
        calls.append(done)
        if calls.count(total - 1) == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pruned("gpt2", tmp_path, "parts", recover=steps, show_progress=stop)
    assert not (tmp_path / "parts").exists()
    saved = {
        path.name: path.stat().st_mtime_ns for path in (tmp_path / "parts.partial").glob("*.safetensors")
    }
    assert len(saved) == 3
    monkeypatch.setattr("theodolite.prune.pruning_run.pruned_block", None)
    pruned("gpt2", tmp_path, "parts")
    whole_files, files = contents(tmp_path / "whole"), contents(tmp_path / "parts")
    config = json.loads(whole_files.pop("adapter/adapter_config.json"))
    assert config | {"base_model_name_or_path": ""} == json.loads(
        files.pop("adapter/adapter_config.json")
    ) | {"base_model_name_or_path": ""}
    assert files == whole_files


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "merged"}, "--recover trains an adapter: give --format adapter in place of merged"),
        ({"recover": 0}, "recover is 0: give a number of steps"),
        ({"corpus": Corpus.random_tokens(40, 16, 19, 0)}, "give 20 or more, all of one length"),
        ({"dtype": torch.float16}, "leave the range of float16"),
        ({"skip": ["q"]}, "skip all of its parts, or none"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_pruning(options, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        pruned("gpt2", tmp_path, "out", **options)
    assert not (tmp_path / "out").exists()


def test_without_a_folder_there_is_no_adapter():
    model = open_model(device="cpu")
    with pytest.raises(UsageError, match=r"^recover writes an adapter: give out, a folder$"):
        prune_model(model, CORPUS, "oats", 0.5, recover=3, form="adapter")
