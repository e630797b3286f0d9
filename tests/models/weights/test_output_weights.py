"""W_O of every family, against the parameters by name and against what the attention module computes."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests import checkpoints
from tests.models.test_every_family import output_module
from theodolite.errors import WorkError
from theodolite.models import open_model

HEADS = 4


def test_attention_that_takes_no_single_token():
    """DINOv3 rotates its patches, and splits them off the tokens before them."""
    config = transformers.DINOv3ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=48,
        image_size=16,
        patch_size=8,
        num_register_tokens=2,
    )
    torch.manual_seed(0)
    hf = transformers.DINOv3ViTModel(config).eval()
    for parameter in hf.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model = open_model(hf)
    for layer in range(2):
        weight = model.structure.attention_at(layer).o_proj.weight.detach().double()
        torch.testing.assert_close(model.output_weights(layer), weight.T.reshape(HEADS, -1, 32))


def test_weights_are_kept_until_the_parameters_change(tmp_path):
    """Oracle: the parameters by name, before and after an optimizer's kind of step."""
    model = open_model(checkpoints.write("bert", tmp_path))
    first = model.output_weights(1)
    assert model.output_weights(1) is first
    with torch.no_grad():
        output_module("bert", model.hf, 1).weight.mul_(2)
    assert torch.equal(model.output_weights(1), 2 * first)
    hf = model.hf
    hf.load_state_dict({name: 3 * value for name, value in hf.state_dict().items()}, assign=True)
    torch.testing.assert_close(model.output_weights(1), 6 * first, rtol=1e-6, atol=0)


class _Gated(torch.nn.Sequential):
    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        return super().forward(heads * torch.sigmoid(heads))


def _gate_of_the_hidden_states(attention: torch.nn.Module) -> None:
    """Affine in the heads for each hidden state, but with another matrix for each."""
    attention.register_forward_hook(
        lambda module, args, kwargs, output: (output[0] * (1 + kwargs["hidden_states"].tanh()), output[1]),
        with_kwargs=True,
    )


@pytest.mark.parametrize(
    "gated",
    [lambda attention: setattr(attention, "o_proj", _Gated(attention.o_proj)), _gate_of_the_hidden_states],
)
def test_a_gate_is_refused_by_name(gated):
    model = open_model(checkpoints.build("llama2"))
    gated(model.hf.model.layers[1].self_attn)
    model.output_weights(0)
    said = r"layer 1: what leaves model\.layers\.1\.self_attn is no fixed affine .*a gate or a norm"
    with pytest.raises(WorkError, match=said):
        model.output_weights(1)


def test_a_model_whose_heads_are_the_output_has_the_identity(tmp_path):
    """A pre-norm block whose attention returns its heads as they are: W_O is the identity, and nothing takes it on."""
    model = open_model(checkpoints.write("llama2", tmp_path))
    model.hf.model.layers[0].self_attn.o_proj = torch.nn.Identity()
    assert torch.equal(model.output_weights(0).flatten(0, 1), torch.eye(32, dtype=torch.float64))
