"""Streamed second moments of what enters matrices, against inputs that are kept."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from tests.prune.families import opened_anew
from theodolite.errors import WorkError
from theodolite.models.weights.block_matrices import Matrix, block_matrices, one_expert_at_a_time
from theodolite.prune.methods import factor_hessian
from theodolite.prune.moments import InputMoments, Moments


def _ids(contexts: int = 6, length: int = 20) -> torch.Tensor:
    return torch.randint(300, (contexts, length), generator=torch.Generator().manual_seed(0))


def gram_of(moments: Moments) -> np.ndarray:
    """E x xᵀ, from its factor."""
    upper = moments.factor.upper.numpy()
    return upper @ upper.T - moments.factor.added * np.eye(len(upper))


@pytest.mark.parametrize("full", [False, True], ids=["diagonal", "full"])
@pytest.mark.parametrize("family", ["gpt2", "llama3", "bloom"])
def test_moments_of_every_matrix(family, full, tmp_path):
    """Oracle: inputs kept by hooks on the modules, XᵀX/n in float64 numpy."""
    model = opened_anew(family, tmp_path)
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


def test_matrices_that_take_on_the_same_vectors_share_their_sum(tmp_path):
    """Oracle: which matrices of Llama do, by name."""
    model = opened_anew("llama2", tmp_path)
    matrices = block_matrices(model)[0]
    moments = InputMoments(matrices)
    with torch.inference_mode(), moments.collecting():
        model.hf.base_model(input_ids=_ids(), use_cache=False)
    assert len(moments._sums) == 4  # of q, k, v; of o; of gate and up; of down
    by_name = {matrix.name: moments.of(matrix).diagonal for matrix in matrices}
    assert torch.equal(by_name["q"], by_name["v"])
    assert torch.equal(by_name["mlp.gate_proj"], by_name["mlp.up_proj"])
    assert not torch.equal(by_name["q"], by_name["self_attn.o_proj"])


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


def test_experts_are_calibrated_on_the_tokens_that_are_sent_to_them(tmp_path):
    """Oracle: each expert's tokens by the router's choices; what is not chosen has unit moments and a count of 0."""
    model = opened_anew("gpt_oss", tmp_path)
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


def test_squared_norms():
    """Oracle: the vectors themselves. ‖M x‖² on average, and with the correlations between inputs left out."""
    generator = torch.Generator().manual_seed(0)
    rows, matrix = (torch.randn(shape, generator=generator).double() for shape in ((50, 4), (3, 4)))
    rows[:, 1] += rows[:, 0]
    full = rows.T @ rows / 50
    exact, scaled = Moments(50, full.diagonal(), factor_hessian(full)).squared_norms(matrix)
    assert math.isclose(exact, float((rows @ matrix.T).square().sum() / 50), rel_tol=1e-12)
    assert math.isclose(scaled, float((matrix * full.diagonal().sqrt()).square().sum()), rel_tol=1e-12)
    assert math.isnan(Moments(50, full.diagonal(), None).squared_norms(matrix)[0])


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
