"""Oracles: rounding in NumPy, forward passes with rounded inputs written out, a model whose outlier was planted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from theodolite import open_model
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.evaluate.int8_activations import int8_activations, rounded, rounded_activations
from theodolite.evaluate.perplexity import perplexity
from theodolite.sinks.exclusions import Exclusions, Rule


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("kept", [(), (3,), (0, 3, 7)])
def test_rounding_is_by_token_and_leaves_what_is_kept(bits, kept):
    values = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    values[..., 3] *= 100
    values[0, 0] = 0
    own = values.double().numpy()
    others = [d for d in range(8) if d not in kept]
    largest = np.abs(own[..., others]).max(axis=-1, keepdims=True)
    levels = 2 ** (bits - 1) - 1
    wanted = own.copy()
    with np.errstate(invalid="ignore"):
        on_grid = np.rint(own / largest * levels) * largest / levels
    wanted[..., others] = np.nan_to_num(on_grid)[..., others]
    found = rounded(values, kept, bits)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert torch.equal(found[..., list(kept)], values[..., list(kept)])


def test_all_linear_layers_are_rounded_and_those_that_read_the_stream_keep_dimensions(opened):
    """Oracle: the inputs that each layer's product is taken with, seen where PyTorch multiplies."""
    model, ids = opened("llama3"), torch.arange(10, 30).view(1, -1)
    names = {module: name for name, module in model.hf.named_modules() if isinstance(module, torch.nn.Linear)}
    products = torch.nn.functional.linear
    seen = {}

    def linear(input, weight, bias=None):
        seen[next(name for module, name in names.items() if module.weight is weight)] = input.detach().clone()
        return products(input, weight, bias)

    with rounded_activations(model, [[3, 5], [], [31]]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", linear)
        model.forward(ids)
    assert len(seen) == 3 * 7  # the head is none of the blocks
    for name, values in seen.items():
        layer = int(name.split(".")[2])
        reads = not name.endswith(("o_proj", "down_proj"))
        kept = [[3, 5], [], [31]][layer] if reads else []
        others = [d for d in range(values.shape[-1]) if d not in kept]
        grid = values[..., others] / values[..., others].abs().amax(dim=-1, keepdim=True) * 127
        assert (grid - grid.round()).abs().max() < 1e-3
        for dimension in kept:
            assert (values[..., dimension] - rounded(values)[..., dimension]).abs().max() > 0
    assert not any(module._forward_pre_hooks for module in names)


@pytest.mark.parametrize("family", ["gpt2", "llama3", "gpt_neox", "phi3"])
def test_layers_that_read_the_stream_are_told_by_the_norm_before_them(family, opened):
    """Oracle: their names."""
    from theodolite.evaluate.int8_activations import _readers

    model = opened(family)
    names = {module: name for name, module in model.root.named_modules()}
    reading = {names[reader.module].split(".")[-1] for reader in _readers(model) if reader.reads_stream}
    others = {names[reader.module].split(".")[-1] for reader in _readers(model) if not reader.reads_stream}
    assert (reading, others) == {
        "gpt2": ({"c_attn", "c_fc"}, {"c_proj"}),
        "llama3": ({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}, {"o_proj", "down_proj"}),
        "gpt_neox": ({"query_key_value", "dense_h_to_4h"}, {"dense", "dense_4h_to_h"}),
        "phi3": ({"qkv_proj", "gate_up_proj"}, {"o_proj", "down_proj"}),
    }[family]


def planted(checkpoint):
    """A model one dimension of whose normed stream is large in every block, and read by nothing."""
    model = open_model(checkpoint("llama3"))
    with torch.no_grad():
        for block in model.hf.model.layers:
            for norm in (block.input_layernorm, block.post_attention_layernorm):
                norm.weight[9] = 4e4  # of all else, rounding leaves nothing
            for part in ("q_proj", "k_proj", "v_proj"):
                getattr(block.self_attn, part).weight[:, 9] = 0
            for part in ("gate_proj", "up_proj"):
                getattr(block.mlp, part).weight[:, 9] = 0
    return model


RULES = Exclusions(tuple(Rule("outlier dimension", layer, dimension=9) for layer in range(3)))


def test_a_planted_outlier_is_what_rounding_costs(checkpoint):
    """Oracle: of the losses `perplexity`; nearly all of the cost is gone with the one dimension, not with another."""
    model = planted(checkpoint)
    corpus = Corpus.random_tokens(300, 20, 12, 0)
    table = int8_activations(model, corpus, RULES, seeds=3).set_index("what")
    plain = perplexity(model, corpus)
    with rounded_activations(model):
        whole = perplexity(model, corpus)
    with rounded_activations(model, [[9]] * 3):
        kept = perplexity(model, corpus)
    assert table.loc["as it is", "loss"] == pytest.approx(plain.loss)
    assert table.loc["rounded", "loss"] == pytest.approx(whole.loss)
    for name, (first, second) in {"cost": (kept, plain), "difference": (kept, whole)}.items():
        paired = first.losses - second.losses
        assert table.loc["outlier dimensions kept", name] == pytest.approx(paired.mean(), abs=1e-9)
        error = paired.std(ddof=1) / math.sqrt(12)
        assert table.loc["outlier dimensions kept", f"{name}_se"] == pytest.approx(error, abs=1e-9)
    moved = {what: np.abs(table.loc[what, "cost"]) for what in table.index[1:]}
    assert moved["outlier dimensions kept"] < 0.2 * moved["rounded"]
    assert moved["random dimensions kept"] > 0.3 * moved["rounded"]
    assert table["dimensions"].tolist() == [0, 0, 1, 1]


def test_a_loss_too_large_for_a_number_is_an_infinite_perplexity(checkpoint):
    """Closed form: exp of a loss above 710 is beyond float64."""
    model = open_model(checkpoint("llama3"))
    with torch.no_grad():
        model.hf.get_output_embeddings().weight *= 1e5
    table = int8_activations(model, Corpus.random_tokens(300, 20, 2, 0), RULES, seeds=1)
    assert table["loss"].min() > 710
    assert (table["perplexity"] == math.inf).all()


def test_wrong_calls_are_one_line(opened):
    model, corpus = opened("llama3"), Corpus.random_tokens(300, 8, 3, 0)
    with pytest.raises(UsageError, match="no outlier dimension"):
        int8_activations(model, corpus, Exclusions(()))
    with pytest.raises(UsageError, match="1 or more"):
        int8_activations(model, corpus, RULES, seeds=0)
    for kept, bits, message in (
        ([[1]], 8, "3 blocks"),
        ([[32], [], []], 8, "0 to 31"),
        (None, 1, "2 to 16"),
        (None, 2.5, "bits is 2.5: give a whole number"),
    ):
        with pytest.raises(UsageError, match=message), rounded_activations(model, kept, bits):
            pass
    with pytest.raises(UsageError, match="experts"), rounded_activations(opened("gpt_oss")):
        pass
