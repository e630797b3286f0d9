"""Blocks run one by one against the model's own passes; streamed second moments against inputs that are kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from tests.checkpoints import WITH_EXPERTS
from tests.prune import corpus_of
from theodolite.corpus.corpus import Corpus
from theodolite.errors import WorkError
from theodolite.models.structure import first_tensor
from theodolite.models.weights.block_matrices import Matrix, block_matrices, one_expert_at_a_time
from theodolite.prune.model import BlockByBlock, InputMoments, Moments


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
    return recorded(model, layer, lambda: model.forward(corpus.contexts))[0]


ALIKE, UNLIKE = (24,) * 5, (20, 7, 20)


@pytest.mark.parametrize(
    ("family", "lengths"),
    [(family, ALIKE) for family in (*WITH_EXPERTS, "t5")]  # whose blocks hand on biases of position, too
    + [(family, UNLIKE) for family in ("gpt2", "bloom", "gemma2", "mixtral")],
)
def test_each_block_gets_what_the_changed_ones_before_it_give(family, lengths, anew):
    """Oracle: a hook in a whole pass over each context alone, of the model whose first blocks are changed."""
    model, corpus = anew(family), corpus_of(len(lengths), max(lengths))
    if lengths == UNLIKE:
        seen = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        corpus = Corpus.from_ids(corpus.contexts, attention_mask=seen)
    with one_expert_at_a_time(model.hf):
        stream = BlockByBlock(model, corpus, 2, lambda: None)
        for layer, block in enumerate(model.structure.blocks):
            moments = InputMoments(block_matrices(model)[layer])
            batches = recorded(model, layer, partial(stream.read, layer, moments))
            assert lengths == UNLIKE or [len(hidden) for hidden in batches] == [2, 2, 1]
            contexts = [hidden for batch in batches for hidden in batch]
            for place, hidden in enumerate(contexts):
                alone = corpus.subset(torch.tensor([place]))
                torch.testing.assert_close(hidden, entering(model, alone, layer)[0], rtol=1e-5, atol=1e-5)
            assert len(contexts) == len(lengths)
            with torch.no_grad():
                for parameter in block.parameters():
                    parameter *= 0.9
            if layer + 1 < model.layers:
                stream.advance(layer)


def test_a_family_that_does_something_between_its_blocks_is_refused_by_name(anew):
    """In a whole pass, and only there, the input of the first block is added once more after the second."""
    model, entered = anew("gpt2"), []
    first, second, _ = model.structure.blocks
    model.hf.base_model.register_forward_pre_hook(lambda *_: entered.clear())
    first.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    second.register_forward_hook(lambda _, args, output: output + entered[-1] if entered else None)
    with pytest.raises(
        WorkError, match=r"GPT2LMHeadModel: running its blocks one by one differs .* by 1\.9e-01"
    ):
        BlockByBlock(model, corpus_of(5), 2, lambda: None)


def test_numbers_that_are_none_stop_the_work(anew):
    model = anew("gpt2")
    stream = BlockByBlock(model, corpus_of(5), 2, lambda: None)
    with torch.no_grad():
        model.hf.transformer.h[0].mlp.c_proj.bias[0] = float("nan")
    with pytest.raises(WorkError, match="hidden states of layer 1 hold NaN or infinite values"):
        stream.advance(0)


def _ids(contexts: int = 6, length: int = 20) -> torch.Tensor:
    return torch.randint(300, (contexts, length), generator=torch.Generator().manual_seed(0))


def gram_of(moments: Moments) -> np.ndarray:
    """E x xᵀ, from its factor: a share of the mean diagonal was added to the diagonal."""
    upper, damping = moments.factor.upper.numpy(), moments.factor.damping
    damped = upper @ upper.T
    return damped - damping / (1 + damping) * np.diag(damped).mean() * np.eye(len(upper))


@pytest.mark.parametrize("full", [False, True], ids=["diagonal", "full"])
@pytest.mark.parametrize("family", ["gpt2", "llama3", "bloom"])
def test_moments_of_every_matrix(family, full, anew):
    """Oracle: inputs kept by hooks on the modules, XᵀX/n in float64 numpy."""
    model = anew(family)
    matrices = block_matrices(model)[1]
    kept: dict[nn.Module, list[torch.Tensor]] = {matrix.module: [] for matrix in matrices}
    for module, inputs in kept.items():
        module.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0].flatten(0, -2)))
    moments = InputMoments(matrices, damping=0.1 if full else None)
    with torch.inference_mode(), moments.collecting():
        for ids in _ids().split(4):  # the last batch is smaller
            model.hf.base_model(input_ids=ids, use_cache=False)
    for matrix in matrices:
        rows = torch.cat(kept[matrix.module]).double().numpy()
        found = moments.of(matrix)
        assert found.count == len(rows) == 120
        gram = rows.T @ rows / len(rows)
        np.testing.assert_allclose(found.diagonal.numpy(), np.diag(gram), rtol=1e-6)
        if full:
            assert found.factor.damping == 0.1
            np.testing.assert_allclose(gram_of(found), gram, atol=1e-6 * np.abs(gram).max())
        else:
            assert found.factor is None


@pytest.mark.parametrize("family", ["llama3", "gpt_oss"])
def test_a_block_is_left_once_all_inputs_are_seen(family, anew):
    """Oracle: the moments of whole passes of the first block, to the bit; and by count where experts are all chosen."""
    model, corpus = anew(family), corpus_of(6)
    block, matrices = model.structure.blocks[0], block_matrices(model)[0]
    left, moments, whole = [], InputMoments(matrices), InputMoments(matrices)
    block.register_forward_hook(lambda *_: left.append(True))
    with one_expert_at_a_time(model.hf):
        stream = BlockByBlock(model, corpus, 2, lambda: None)
        left.clear()
        stream.read(0, moments)
        assert len(left) == 1
        with torch.inference_mode(), whole.collecting():
            for part in corpus.contexts.split(2):
                model.hf.base_model(input_ids=part, use_cache=False)
    for matrix in matrices:
        assert torch.equal(moments.of(matrix).diagonal, whole.of(matrix).diagonal), matrix.key


def alone() -> tuple[nn.Linear, Matrix]:
    """A layer of two inputs, and its matrix."""
    module = nn.Linear(2, 3, bias=False).requires_grad_(False)
    return module, Matrix(0, "fc", None, "fc.weight", module, "weight", 0)


def test_a_large_common_offset_costs_no_digits():
    """Oracle: the closed form. Inputs 1000 + ±1 in float32: E x xᵀ = 10⁶ + C, and C = identity to 1e-6 of 1."""
    signs = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1]])
    module, matrix = alone()
    moments = InputMoments([matrix], damping=0.1)
    with moments.collecting():
        for _ in range(50):
            module(1000 + signs)
    found = moments.of(matrix)
    expected = 1e6 + torch.eye(2, dtype=torch.float64)
    assert found.count == 200
    np.testing.assert_allclose(gram_of(found), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.diagonal, expected.diagonal(), rtol=0, atol=1e-6)


def test_experts_are_calibrated_on_the_tokens_that_are_sent_to_them(anew):
    """Oracle: each expert's tokens by the router's choices; what is not chosen has unit moments and a count of 0."""
    model = anew("gpt_oss")
    block, matrices = model.structure.blocks[0], block_matrices(model)[0]
    experts = [matrix for matrix in matrices if matrix.name.endswith("gate_up_proj")]
    chosen = []
    block.mlp.router.register_forward_hook(
        lambda m, a, out: chosen.append((a[0].reshape(-1, 32), out[2][:, 0]))
    )
    block.mlp.router.bias.data[:] = torch.tensor([3.0, 0.0])  # both are chosen, one rarely
    moments = InputMoments(matrices)
    with torch.inference_mode(), one_expert_at_a_time(model.hf), moments.collecting():
        for ids in _ids().split(2):
            model.hf.base_model(input_ids=ids, use_cache=False)
    hidden, expert = (torch.cat(parts) for parts in zip(*chosen, strict=True))
    for matrix in experts:
        rows = hidden[expert == matrix.expert].double()
        assert len(rows) == moments.of(matrix).count
        torch.testing.assert_close(moments.of(matrix).diagonal, rows.square().mean(dim=0))
    unseen = InputMoments(matrices, damping=0.1).of(experts[0])
    assert unseen.count == 0
    np.testing.assert_allclose(gram_of(unseen), np.eye(32), rtol=0, atol=1e-15)


@pytest.mark.parametrize("damping", [None, 0.1], ids=["diagonal", "full"])
def test_no_vectors_are_none_and_numbers_that_are_none_are_refused(damping):
    module, matrix = alone()
    moments = InputMoments([matrix], damping)
    with moments.collecting():
        module(torch.empty(0, 2))
    found = moments.of(matrix)
    assert found.count == 0
    assert torch.equal(found.diagonal, torch.ones(2, dtype=torch.float64))
    moments = InputMoments([matrix], damping)
    with moments.collecting():
        module(torch.tensor([[1.0, math.inf]]))
    with pytest.raises(WorkError, match=r"the input of fc\.weight is NaN, infinite or too large"):
        moments.of(matrix)
