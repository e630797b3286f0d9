"""Matrices of blocks: found, read and written, and what enters them, against modules taken by their names."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from tests.checkpoints import WITH_EXPERTS
from theodolite.errors import UsageError
from theodolite.models.weights.block_matrices import (
    TappedProducts,
    block_matrices,
    left_dense,
    one_expert_at_a_time,
)


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_every_entry_of_every_linear_layer_is_in_one_matrix(family, anew):
    """Oracle: the parameters of nn.Linear, Conv1D and experts by name; each entry is negated exactly once."""
    model = anew(family)
    before = {name: value.clone() for name, value in model.hf.state_dict().items()}
    names = {module: name for name, module in model.hf.named_modules()}
    expected = {
        f"{names[module]}.weight"
        for block in model.structure.blocks
        for module in block.modules()
        if isinstance(module, nn.Linear | Conv1D)
    }
    expected |= {name for name, value in model.hf.named_parameters() if value.ndim == 3}
    matrices = [matrix for block in block_matrices(model) for matrix in block]
    assert {matrix.parameter for matrix in matrices} == expected
    assert len({(matrix.layer, matrix.key) for matrix in matrices}) == len(matrices)
    for matrix in matrices:
        assert matrix.read().shape == matrix.shape
        matrix.write(-matrix.read())
    for name, value in model.hf.state_dict().items():
        assert torch.equal(value, -before[name] if name in expected else before[name]), name


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "phi3", "bloom"])
def test_fused_projections_are_three_matrices(family, anew):
    """Oracle: `HeadWeights`, which the probe reads through the tap, whatever the layout."""
    model = anew(family)
    own = {matrix.name: matrix.read() for matrix in block_matrices(model)[1]}
    weights = model.head_weights(1)
    for name in "qkv":
        by_head = getattr(weights, f"w_{name}").float()  # (heads, width, head_width), grouped ones repeated
        repeated = own[name].unflatten(0, (-1, model.head_width))
        repeated = repeated.repeat_interleave(model.heads // len(repeated), dim=0)
        torch.testing.assert_close(repeated.mT, by_head, rtol=0, atol=1e-6)


def test_projections_that_are_no_entries_of_one_matrix_stay_whole(anew):
    """W_q = A B: two layers, each pruned as it is."""
    model = anew("llama2")
    attention = model.hf.model.layers[0].self_attn
    attention.q_proj = nn.Sequential(nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False))
    names = [matrix.name for matrix in block_matrices(model)[0]]
    assert names[:3] == ["self_attn.q_proj.0", "self_attn.q_proj.1", "self_attn.k_proj"]


class _Wider(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 37, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden)[..., 5:]


def test_what_a_layer_holds_besides_its_projection_is_a_matrix_of_its_own(anew):
    """Oracle: rows by number. A layer of 37 outputs, of which the queries are the last 32."""
    model = anew("llama2")
    model.hf.model.layers[2].self_attn.q_proj = wider = _Wider()
    parts = {matrix.name: matrix for matrix in block_matrices(model)[2]}
    assert torch.equal(parts["q"].read(), wider.inner.weight[5:])
    assert torch.equal(parts["self_attn.q_proj.inner.rest"].read(), wider.inner.weight[:5])


def test_routers_are_left_dense(anew):
    """Their names are the oracle. Biases of experts are two-dimensional, but no matrices."""
    model = anew("gpt_oss")
    matrices = [matrix for block in block_matrices(model) for matrix in block]
    assert left_dense(model, matrices) == {f"model.layers.{n}.mlp.router.weight": 64 for n in range(3)}
    dense = anew("gpt2")
    assert left_dense(dense, [matrix for block in block_matrices(dense) for matrix in block]) == {}
    dense.hf.transformer.h[0].mlp.shared_expert_gate = nn.Linear(32, 1)
    assert "mlp.shared_expert_gate" not in {matrix.name for matrix in block_matrices(dense)[0]}


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_products_with_experts_are_seen(family, anew):
    """Oracle: the rows that each expert's first matrix gets, recomputed from what the router says."""
    model = anew(family)
    (block, *_), (matrices, *_) = model.structure.blocks, block_matrices(model)
    at = {matrix.holder.data_ptr(): matrix for matrix in matrices if matrix.expert is not None}
    rows: dict[str, list[torch.Tensor]] = {}
    routed = {}

    def told(inputs, matrix):
        if matrix.data_ptr() in at:
            found = at[matrix.data_ptr()]
            assert matrix.shape == found.shape
            rows.setdefault(found.key, []).append(inputs)

    def route(module, args, output):
        routed["hidden"], routed["chosen"] = args[0].reshape(-1, 32), output[2]

    router = next(module for module in block.modules() if "Router" in type(module).__name__)
    router.register_forward_hook(route)
    ids = torch.randint(300, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        grouped = model.hf.base_model(input_ids=ids, use_cache=False).last_hidden_state
        with one_expert_at_a_time(model.hf), TappedProducts(told):
            eager = model.hf.base_model(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(eager, grouped, rtol=1e-4, atol=1e-4)
    for expert in range(2):
        _, tokens = torch.where((routed["chosen"] == expert).T)  # by rank of the choice, then by token
        (got,) = rows[f"mlp.experts.gate_up_proj.{expert}"]
        torch.testing.assert_close(got, routed["hidden"][tokens], rtol=1e-5, atol=1e-5)
        assert rows[f"mlp.experts.down_proj.{expert}"][0].shape == (len(tokens), 48)


def test_products_are_seen_whatever_the_function():
    """Oracle: the operands themselves; a matrix is told as (outputs, inputs)."""
    x, w, b = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    seen = []
    with TappedProducts(lambda inputs, matrix: seen.append((inputs, matrix))):
        results = [
            functional.linear(x, w),
            functional.linear(x, weight=w),
            functional.linear(weight=w, input=x),
            x @ w.T,
            x.matmul(other=w.T),
            x.mm(mat2=w.T),
            torch.matmul(x, other=w.T),
            torch.matmul(input=x, other=w.T),
            torch.mm(x, w.T),
            torch.mm(x, mat2=w.T),
            torch.addmm(b, x, w.T) - b,
            torch.addmm(b, mat1=x, mat2=w.T) - b,
        ]
        torch.matmul(x, b[:4])  # with a vector: no matrix
    assert len(seen) == len(results)
    for (inputs, matrix), result in zip(seen, results, strict=True):
        assert inputs is x
        assert matrix.data_ptr() == w.data_ptr()
        torch.testing.assert_close(inputs @ matrix.T, result)


def test_one_matrix_in_two_modules_is_refused(anew):
    model = anew("llama2")
    layers = model.hf.model.layers
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    with pytest.raises(
        UsageError, match=r"layers\.1\.mlp\.up_proj\.weight is model\.layers\.0\.mlp\.up_proj\.weight"
    ):
        block_matrices(model)


def test_quantised_weights_are_refused(anew):
    model = anew("llama2")
    model.hf.is_quantized = True
    with pytest.raises(UsageError, match="is quantised, so its W_q and W_k cannot be pruned"):
        block_matrices(model)
