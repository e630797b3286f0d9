"""Blocks run one by one, against the model's own passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.prune.families import FAMILIES, opened_anew
from theodolite.corpus.corpus import Corpus
from theodolite.errors import WorkError
from theodolite.models.structure import first_tensor
from theodolite.models.weights.block_matrices import one_expert_at_a_time
from theodolite.prune.sequential import BlockByBlock


def corpus_of(contexts: int = 5, length: int = 24) -> Corpus:
    return Corpus.random_tokens(300, length, contexts)


def recorded(model, layer: int, run: Callable[[], object]) -> list[torch.Tensor]:
    """What enters a block while something runs, a tensor a call."""
    seen: list[torch.Tensor] = []
    hook = model.structure.blocks[layer].register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(first_tensor(args, kwargs)), with_kwargs=True
    )
    with torch.inference_mode(), one_expert_at_a_time(model.hf):
        run()
    hook.remove()
    return seen


def entering(model, corpus: Corpus, layer: int) -> torch.Tensor:
    """What enters a block in the model's own pass over the whole corpus."""
    return recorded(model, layer, lambda: model.hf.base_model(input_ids=corpus.contexts, use_cache=False))[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_block_gets_what_the_changed_ones_before_it_give(family, tmp_path):
    """Oracle: a hook in a whole pass of the model, whose first blocks are changed. The last batch is smaller."""
    model, corpus = opened_anew(family, tmp_path), corpus_of()
    with one_expert_at_a_time(model.hf):
        stream = BlockByBlock(model, corpus, 2, lambda: None)
        for layer, block in enumerate(model.structure.blocks):
            seen = recorded(model, layer, lambda layer=layer: stream.read(layer))
            assert [len(hidden) for hidden in seen] == [2, 2, 1]
            expected = entering(model, corpus, layer)
            torch.testing.assert_close(torch.cat(seen), expected, rtol=1e-5, atol=1e-5)
            with torch.no_grad():
                for parameter in block.parameters():
                    parameter *= 0.9
            if layer + 1 < model.layers:
                stream.advance(layer)
        stream.verify_end()


def test_every_batch_is_followed_by_a_word_and_no_more_is_read_than_needed(tmp_path):
    """Oracle: by count: one pass over 3 batches, then two blocks over each; how blocks are called, a witness shows."""
    model, told, read = opened_anew("gpt2", tmp_path), [], []
    model.structure.blocks[1].mlp.register_forward_hook(lambda _, args, output: read.append(len(output)))
    stream = BlockByBlock(model, corpus_of(), 2, lambda: told.append(1))
    assert len(told) == 3
    assert read == [1, 1]
    stream.read(0)
    stream.advance(0)
    assert len(told) == 9


def test_blocks_that_are_called_by_what_others_give_get_whole_passes(tmp_path):
    """Oracle: calls by count. In its own pass, the second block is told the mean of what the first one gives."""
    model, read, given, own_pass = opened_anew("mistral", tmp_path), [], [], []
    model.hf.base_model.register_forward_pre_hook(lambda *_: own_pass.append(True))
    model.hf.base_model.register_forward_hook(lambda *_: own_pass.clear())
    first, second, _ = model.structure.blocks
    first.register_forward_hook(lambda _, args, output: given.append(output.mean()))

    def tell(_, args, kwargs):
        told = kwargs["position_ids"] + given[-1]
        return (args, kwargs | {"position_ids": told}) if own_pass else None

    second.register_forward_pre_hook(tell, with_kwargs=True)
    second.mlp.register_forward_hook(lambda _, args, output: read.append(len(output)))
    BlockByBlock(model, corpus_of(), 2, lambda: None)
    assert read == [1, 1, 2, 2, 1]


def test_arguments_that_are_alike_are_kept_once(tmp_path):
    """Oracle: the masks of Mistral's window, one a block and batch, of which two have one shape and one another."""
    model = opened_anew("mistral", tmp_path)
    stream = BlockByBlock(model, corpus_of(), 2, lambda: None)
    masks = [kwargs["attention_mask"] for calls in stream._calls for _, kwargs in calls]
    assert len(masks) == 9
    assert len({mask.data_ptr() for mask in masks}) == 2
    assert all(kwargs.get("hidden_states") is None for calls in stream._calls for _, kwargs in calls)
    assert all(args[0] is None for calls in stream._calls for args, _ in calls)


def test_a_family_that_does_something_between_its_blocks_is_refused_by_name(tmp_path):
    """In its own pass, and only there, the model adds the input of the first block once more after the second."""
    model, entered, own_pass = opened_anew("gpt2", tmp_path), [], []
    first, second, _ = blocks = model.structure.blocks
    model.hf.base_model.register_forward_pre_hook(lambda *_: own_pass.append(True))
    model.hf.base_model.register_forward_hook(lambda *_: own_pass.clear())
    first.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    second.register_forward_hook(lambda _, args, output: output + entered[-1] if own_pass else None)
    assert len(blocks) == 3
    with pytest.raises(
        WorkError, match=r"GPT2LMHeadModel: running its blocks one by one differs .* by 1\.9e-01"
    ):
        BlockByBlock(model, corpus_of(), 2, lambda: None)


def test_a_block_that_was_changed_behind_its_back_is_noticed_and_numbers_that_are_none_stop_the_work(
    tmp_path,
):
    model = opened_anew("gpt2", tmp_path)
    stream = BlockByBlock(model, corpus_of(), 2, lambda: None)
    stream.advance(0)
    stream.advance(1)
    with torch.no_grad():
        model.hf.transformer.h[0].mlp.c_proj.weight *= 0
    with pytest.raises(WorkError, match="differs from the model's own pass"):
        stream.verify_end()
    stream = BlockByBlock(model, corpus_of(), 2, lambda: None)
    with torch.no_grad():
        model.hf.transformer.h[0].mlp.c_proj.bias[0] = float("nan")
    with pytest.raises(WorkError, match="hidden states of layer 1 hold NaN or infinite values"):
        stream.advance(0)


@pytest.mark.parametrize("family", ["gpt2", "bloom", "gemma2", "mixtral"])
def test_contexts_of_unlike_lengths_enter_each_block_as_in_a_pass_of_their_own(family, tmp_path):
    """Oracle: a hook in a whole pass over each context alone."""
    model = opened_anew(family, tmp_path)
    rows, places = torch.arange(3 * 20).reshape(3, 20) % 290, torch.arange(20)
    corpus = Corpus.from_ids(rows, attention_mask=places < torch.tensor([20, 7, 20])[:, None])
    with one_expert_at_a_time(model.hf):
        stream = BlockByBlock(model, corpus, 2, lambda: None)
        for layer in range(model.layers):
            seen = recorded(model, layer, lambda layer=layer: stream.read(layer))
            ours = [own for hidden in seen for own in hidden]
            for place, own in enumerate(ours):
                alone = corpus.subset(torch.tensor([place]))
                torch.testing.assert_close(own, entering(model, alone, layer)[0], rtol=1e-5, atol=1e-5)
            assert len(ours) == 3
            if layer + 1 < model.layers:
                stream.advance(layer)
        stream.verify_end()
