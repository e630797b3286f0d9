"""Models whose blocks are read from their files as they run: what they compute, and how they are pruned."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from safetensors.torch import load_file

from tests import checkpoints
from tests.checkpoints import with_tensors
from tests.prune import corpus_of
from tests.prune.test_checkpoint import assert_equal
from tests.test_larger import split_map
from theodolite.errors import TheodoliteError, UsageError, WorkError
from theodolite.models import open_model
from theodolite.models.open import open_streamed
from theodolite.models.weights.block_matrices import block_matrices, one_expert_at_a_time
from theodolite.prune import Pruned, prune_model
from theodolite.prune.model import _Pruning
from theodolite.system.checkpoint_folders import refuse_inside

FAMILIES = ("gpt2", "gpt_neox", "mixtral")
PRUNINGS = (
    ("gpt2", "sparsegpt", "factored"),
    ("gpt2", "magnitude", "merged"),
    ("llama3", "oats", "adapter"),
    ("gpt_oss", "wanda", "factored"),
    ("mixtral", "oats", "merged"),  # transformers changes its names and shapes on loading, and back on saving
)


def tensors_in(folder):
    found = {}
    for path in folder.rglob("*.safetensors"):
        at = path.parent.relative_to(folder).as_posix()
        found |= {f"{at}/{name}": tensor for name, tensor in load_file(path).items()}
    return found


def assert_same_tensors(one, other) -> None:
    """Two folders have the same tensors, bit by bit."""
    assert_equal(tensors_in(other), tensors_in(one))


def in_memory(model) -> list[int]:
    """The layers whose weights are there."""
    blocks = enumerate(model.structure.blocks)
    return [layer for layer, block in blocks if not any(p.is_meta for p in block.parameters())]


@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_what_the_whole_model_does(family, checkpoint):
    """Oracle: the model in memory, bit by bit; between passes no block is there."""
    folder = checkpoint(family)
    whole, streamed = open_model(folder), open_streamed(folder)
    ids = corpus_of().contexts
    with one_expert_at_a_time(whole.root):
        assert torch.equal(streamed.logits(ids), whole.logits(ids))
    assert streamed.sha256 == whole.sha256
    assert in_memory(streamed) == []
    with streamed.block_present(1):
        assert in_memory(streamed) == [1]
    for own, other in zip(block_matrices(streamed)[1], block_matrices(whole)[1], strict=True):
        with streamed.block_present(1):
            assert own.key == other.key
            assert torch.equal(own.read(), other.read())
    assert torch.equal(streamed.output_weights(1), whole.output_weights(1))
    assert torch.equal(streamed.head_weights(1).w_q, whole.head_weights(1).w_q)
    assert in_memory(streamed) == []


@pytest.mark.parametrize(("family", "method", "form"), PRUNINGS)
def test_what_is_written_is_what_the_whole_model_gives(family, method, form, tmp_path, checkpoint):
    """Oracle: the same pruning of the model in memory: tensors, table, low-rank parts and config."""
    folder = checkpoint(family)
    options = {"iterations": 3, "form": form}
    whole = prune_model(open_model(folder), corpus_of(), method, 0.5, out=tmp_path / "whole", **options)
    model = open_streamed(folder)
    streamed = prune_model(model, corpus_of(), method, 0.5, out=tmp_path / "streamed", **options)
    assert_same_tensors(tmp_path / "whole", tmp_path / "streamed")
    assert whole.table.equals(streamed.table)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("whole", "streamed")]
    assert configs[0] == configs[1]
    again = Pruned.load(tmp_path / "streamed").low_rank
    assert whole.low_rank.keys() == streamed.low_rank.keys() == again.keys()
    for at, factors in whole.low_rank.items():
        assert all(map(torch.equal, again[at], factors))
    ids = corpus_of().contexts
    reopened = [open_model(tmp_path / name).logits(ids) for name in ("whole", "streamed")]
    assert torch.equal(*reopened)
    assert in_memory(model) == []
    assert model.interventions == ()


def test_one_block_is_in_memory_at_a_time(tmp_path, monkeypatch, checkpoint):
    """So is one pruned block: none is held while the next is read and pruned."""
    model = open_streamed(checkpoint("llama3"))
    blocks, pruned, made = [], [], []
    own = _Pruning.prune

    def noted(*arguments):
        matrix, row = own(*arguments)
        made.append(weakref.ref(matrix))
        return matrix, row

    def look(done: int, total: int) -> None:
        blocks.append(len(in_memory(model)))
        pruned.append(sum(matrix() is not None for matrix in made))

    monkeypatch.setattr(_Pruning, "prune", noted)
    prune_model(model, corpus_of(), "oats", 0.5, iterations=2, out=tmp_path / "out", show_progress=look)
    assert max(blocks) == 1
    assert 0 < max(pruned) < len(block_matrices(model)[0])  # the last one is there when nobody looks


def test_stopped_it_goes_on_to_the_same_bytes(tmp_path, checkpoint):
    """Oracle: a run that was not stopped."""
    folder = checkpoint("llama3")

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = {"iterations": 2, "out": parts}
    prune_model(open_streamed(folder), corpus_of(), "oats", 0.5, iterations=2, out=whole)
    with pytest.raises(KeyboardInterrupt):
        prune_model(open_streamed(folder), corpus_of(), "oats", 0.5, **options, show_progress=stop)
    assert (tmp_path / "parts.partial" / "block-000.safetensors").is_file()
    # What was begun in memory may go on from the files, and the other way round.
    prune_model(open_model(folder), corpus_of(), "oats", 0.5, **options)
    assert_same_tensors(whole, parts)
    assert prune_model(open_streamed(folder), corpus_of(), "oats", 0.5, **options).folder == parts


def test_offloaded_blocks_are_refused(checkpoint):
    folder = checkpoint("llama3")
    model = open_model(folder, device_map=split_map(folder, "cpu", "disk"))
    with pytest.raises(UsageError, match=r"is offloaded: read it as it runs .*--stream, open_streamed"):
        prune_model(model, corpus_of(), "wanda", 0.5)


def test_what_is_not_kept_or_written_into_its_own_folder_is_refused(tmp_path, monkeypatch, copied):
    folder = copied("llama3")
    model = open_streamed(folder)
    with pytest.raises(UsageError, match="read from its files and not kept: give out, a folder"):
        prune_model(model, corpus_of(), "wanda", 0.5)
    with pytest.raises(UsageError, match="lies in the folder of the dense model"):
        prune_model(model, corpus_of(), "wanda", 0.5, out=folder / "out")
    monkeypatch.chdir(tmp_path)
    # A folder called as a model of the hub is not that model.
    refuse_inside(tmp_path / "gpt2" / "out", "gpt2")
    checkpoints.write("gpt2", tmp_path / "gpt2")
    with pytest.raises(UsageError, match="lies in the folder of the dense model"):
        refuse_inside(tmp_path / "gpt2" / "out", "gpt2")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(WorkError, match=r"cannot write .*: No space left on device"):
        prune_model(model, corpus_of(), "wanda", 0.5, out=tmp_path / "out")


def test_what_cannot_be_streamed_is_opened_whole_and_says_so(tmp_path, checkpoint):
    said: list[str] = []
    folder = checkpoint("llama3")
    prune_model(open_model(folder), corpus_of(), "wanda", 0.5, out=tmp_path / "out", form="factored")
    model = open_streamed(tmp_path / "out", say=said.append)
    assert model.streamed is None
    assert said == ["opened whole, since its matrices are factored"]


@pytest.mark.parametrize("where", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_weights_that_are_no_numbers_are_refused(where, copied):
    """Those outside the blocks on opening, those of a block when it is first read."""
    folder = with_tensors(copied("llama3"), lambda tensors: tensors[where][0, 0].fill_(torch.nan))
    with pytest.raises(TheodoliteError, match=where.replace(".", r"\.")):
        open_streamed(folder).forward(corpus_of().contexts)
