"""A pruning that is interrupted, refused, or cannot be written; and its low-rank parts as an adapter of PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.prune import corpus_of
from theodolite import open_model
from theodolite.errors import UsageError, WorkError
from theodolite.models.open import open_streamed
from theodolite.prune import Pruned, prune_model
from theodolite.prune.model import _Pruning
from theodolite.system import files

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks it


@pytest.fixture(scope="module")
def pruned(checkpoint):
    """pruned(family, out, method, seed, **options) → a model opened anew and pruned into `out`."""

    def prune(family: str, out: Path, method: str = "oats", seed: int = 0, **options: object) -> Pruned:
        model = open_model(checkpoint(family))
        return prune_model(
            model, corpus_of(seed=seed), method, 0.5, iterations=4, out=out, batch=4, **options
        )

    return prune


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Tensors to the bit."""
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def stop_after(matrices: int):
    def show(done: int, total: int) -> None:
        if done >= matrices:
            raise KeyboardInterrupt

    return show


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the one that says how long it took; that one without."""
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "pruning.json"
    }
    told = json.loads((folder / "pruning.json").read_text())
    assert told.pop("wall_seconds") > 0
    del told["sha256"]  # which is of the time, too
    return files | {"pruning.json": json.dumps(told).encode()}


@pytest.mark.parametrize(
    ("family", "method", "form"),
    [("gpt2", "oats", "merged"), ("gpt_oss", "oats", "factored"), ("llama3", "sparsegpt", "merged")],
)
def test_stopped_in_any_block_it_goes_on_to_the_same_bytes(
    family, method, form, tmp_path, monkeypatch, pruned
):
    """Oracle: the files of a pruning that was not stopped. The form decides how it is written, not what it is."""
    whole, parts, partial = tmp_path / "whole", tmp_path / "parts", tmp_path / "parts.partial"
    matrices = len(pruned(family, whole, method, form=form).table) // 3
    for block in range(3):
        with pytest.raises(KeyboardInterrupt):  # in the middle of each block
            pruned(family, parts, method, show_progress=stop_after(matrices * block + 2))
        assert not parts.exists()
        blocks = sorted(path.name for path in partial.glob("block-*"))
        assert blocks == [f"block-{number:03d}.safetensors" for number in range(block)]
    own, layers = _Pruning.prune, []
    monkeypatch.setattr(_Pruning, "prune", lambda s, m, of: layers.append(m.layer) or own(s, m, of))
    pruned(family, parts, method, form=form)
    assert layers == [2] * matrices  # what is done is not pruned again
    assert contents(parts) == contents(whole)
    assert not partial.exists()
    assert not list(tmp_path.glob("*.lock")) + list(tmp_path.glob("*.writing"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, pruned) -> Path:
    """A folder with a pruning of GPT-2 in `out`, which no test may change."""
    folder = tmp_path_factory.mktemp("finished")
    pruned("gpt2", folder / "out")
    return folder


def test_another_pruning_is_refused_where_one_is_unfinished(tmp_path, anew, pruned):
    with pytest.raises(KeyboardInterrupt):
        pruned("gpt2", tmp_path / "out", show_progress=stop_after(7))
    model = anew("gpt2")
    for options, seed in (({"pattern": "2:4"}, 0), ({"batch": 5}, 0), ({}, 1)):
        asked = {"sparsity": 0.5, "iterations": 4, "batch": 4, "out": tmp_path / "out"} | options
        words = r"out\.partial holds an unfinished pruning of another model, corpus"
        with pytest.raises(UsageError, match=words):
            prune_model(model, corpus_of(seed=seed), "oats", **asked)
    assert model.interventions == ()
    with pytest.raises(UsageError, match="unfinished pruning of another model"):
        pruned("llama2", tmp_path / "out")


@pytest.mark.parametrize(
    ("family", "form"), [("gpt2", "adapter"), ("gpt_oss", "merged"), ("gpt_oss", "factored")]
)
def test_a_finished_pruning_is_read_and_not_made_again(family, form, tmp_path, monkeypatch, anew):
    """Oracle: the model that was pruned and the files that it was written to; a kill behind the rename leaves more."""
    out, models = tmp_path / "out", [anew(family) for _ in range(2)]
    options = {"iterations": 4, "out": out, "form": form, "batch": 4}
    first = prune_model(models[0], corpus_of(), "oats", 0.5, **options)
    before = contents(out)
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "job.json").write_text("{}")
    monkeypatch.setattr(_Pruning, "prune", lambda *_: pytest.fail("a matrix was pruned again"))
    again = prune_model(models[1], corpus_of(), "oats", 0.5, **options)
    assert again.folder == out
    assert again.provenance == first.provenance
    assert contents(out) == before
    assert not (tmp_path / "out.partial").exists()
    assert models[1].interventions == models[0].interventions
    assert_equal(models[1].hf.state_dict(), models[0].hf.state_dict())


@pytest.mark.parametrize(
    ("options", "differs"),
    [
        ({"method": "wanda"}, "--method oats there, wanda now"),
        ({"seed": 1}, "--seed 0 there, 1 now"),
        ({"rank_ratio": 0.5}, "--rank-ratio 0.25 there, 0.5 now"),
        ({"skip": ["q"]}, "--skip"),
        ({"exact": True}, "--exact not given there, given now"),
        ({"pattern": "2:4"}, "--pattern not given there, 2:4 now"),
        ({"form": "factored"}, "--format merged there, factored now"),
    ],
)
def test_another_pruning_is_refused_where_one_is_finished(options, differs, finished, pruned):
    before = contents(finished / "out")
    with pytest.raises(UsageError, match=f"out holds .* pruning .*{differs}.*choose another --out or remove"):
        pruned("gpt2", finished / "out", **options)
    assert contents(finished / "out") == before


def test_a_folder_that_exists_is_refused_but_for_an_empty_one_or_a_link_to_one(tmp_path, pruned):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="disk exists already: choose another --out or remove it"):
        pruned("gpt2", tmp_path / "out", "magnitude")
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    (tmp_path / "out" / "notes.txt").unlink()
    pruned("gpt2", tmp_path / "out", "magnitude")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / "pruning.json").is_file()


@pytest.mark.parametrize(("what", "kept"), [("write_checked", 1), ("bytes_digest", 4)])
def test_a_full_disk_is_said_in_a_line_and_leaves_nothing_half(
    what, kept, finished, tmp_path, monkeypatch, pruned
):
    """A disk that is full from a moment on; what was kept before is still there, and is gone on with."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, what, full)
    words = r"cannot write .*: No space left on device: free space there and rerun"
    with pytest.raises(WorkError, match=words):
        pruned("gpt2", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.writing").exists()
    assert len(list((tmp_path / "out.partial").iterdir())) == kept
    monkeypatch.undo()
    pruned("gpt2", tmp_path / "out")
    table = "pruning.parquet"
    for name in ("model.safetensors", table):
        assert (tmp_path / "out" / name).read_bytes() == (finished / "out" / name).read_bytes(), name


def test_everybody_may_read_what_was_written(finished):
    """safetensors writes files for their owner only. Oracle: the mode of a file made by `open`."""
    (finished / "plain").write_text("")
    mode = (finished / "plain").stat().st_mode
    assert {path.stat().st_mode for path in (finished / "out").rglob("*") if path.is_file()} == {mode}


# Fused transposed matrices, matrices fused head by head, experts.
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "mixtral"])
def test_plain_libraries_put_it_together(family, tmp_path, pruned):
    """Oracle: the logits of the merged checkpoint, and the nonzeros that the table counts."""
    table, _ = (pruned(family, tmp_path / form, form=form).table for form in ("merged", "adapter"))
    ids = corpus_of().contexts[:3]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(input_ids=ids).logits
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
        alone = base(input_ids=ids).logits
        both = peft.PeftModel.from_pretrained(base, tmp_path / "adapter" / "adapter")
        torch.testing.assert_close(both(input_ids=ids).logits, merged, rtol=1e-4, atol=5e-5)
        with both.disable_adapter():
            assert torch.equal(both(input_ids=ids).logits, alone)
    assert (alone - merged).abs().max() > 1e-3
    state = load_file(tmp_path / "adapter" / "model.safetensors")
    for parameter, rows in table[table["expert"] < 0].groupby("parameter"):
        assert int((state[parameter] != 0).sum()) == rows["nonzeros"].sum(), parameter


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_opened_it_is_the_merged_checkpoint_bit_by_bit(family, tmp_path, anew):
    """Oracle: the merged checkpoint. Read for its weights only, too."""
    for form in ("merged", "adapter"):
        model = anew(family, "bfloat16")
        prune_model(model, corpus_of(), "oats", 0.5, iterations=4, out=tmp_path / form, form=form)
    opened, merged = open_model(tmp_path / "adapter"), open_model(tmp_path / "merged")
    assert type(opened.hf) is type(merged.hf)
    assert_equal(opened.hf.state_dict(), merged.hf.state_dict())
    assert opened.sha256 != merged.sha256
    for form in ("merged", "adapter"):  # no loader takes anything beside the weights for weights
        assert [path.name for path in (tmp_path / form).glob("*.safetensors")] == ["model.safetensors"]
    lines: list[str] = []
    lazily = open_streamed(tmp_path / "adapter", say=lines.append)
    assert lines[-1] == "opened whole, since an adapter lies beside its weights"
    assert torch.equal(lazily.head_weights(1).w_q, merged.head_weights(1).w_q)
    keys = [Pruned.load(tmp_path / form).low_rank.keys() for form in ("merged", "adapter")]
    assert keys[0] == keys[1]


def test_an_adapter_that_was_trained_on_counts(tmp_path, pruned):
    """Oracle: W + B A by hand, of the trained factors."""
    pruned("llama3", tmp_path / "adapter", form="adapter")
    folder = tmp_path / "adapter"
    before = open_model(folder)
    base = AutoModelForCausalLM.from_pretrained(folder)
    model = peft.PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True)
    name = "model.layers.1.mlp.up_proj"
    layer = model.base_model.model.get_submodule(name)
    with torch.no_grad():
        layer.lora_A["default"].weight.mul_(2)
        low_rank = layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
        by_hand = layer.base_layer.weight.double() + low_rank
    model.save_pretrained(folder / "adapter")
    after = open_model(folder)
    assert after.sha256 != before.sha256
    assert torch.equal(after.hf.get_submodule(name).weight, by_hand.float())
    (folder / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"adapter lacks its low-rank parts"):
        open_model(folder)


def test_what_cannot_be_an_adapter_is_refused_at_once(tmp_path, monkeypatch, anew):
    model = anew("gpt2")
    with pytest.raises(UsageError, match="wanda has no low-rank part that an adapter could hold: use oats"):
        prune_model(model, corpus_of(), "wanda", 0.5, out=tmp_path / "out", form="adapter")
    monkeypatch.setattr("theodolite.prune.options.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install peft"):
        prune_model(model, corpus_of(), "oats", 0.5, out=tmp_path / "out", form="adapter")
    assert model.interventions == ()
