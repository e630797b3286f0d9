"""Oracles: moments by numpy, and rotated queries and keys of the released module."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from theodolite import Corpus, survey
from theodolite.accumulate.attention import QueryKeyMoments
from theodolite.attention.inputs import AttentionInputs
from theodolite.models import open_model
from theodolite.theory.propagation import propagation_of_draws

HEADS, KEY_HEADS, LENGTH, WIDTH = 4, 2, 9, 3


def _inputs(contexts: int, mask: torch.Tensor | None = None) -> AttentionInputs:
    generator = torch.Generator().manual_seed(0)
    query, key = (
        torch.randn(contexts, heads, LENGTH, WIDTH, generator=generator) + 2 for heads in (HEADS, KEY_HEADS)
    )
    return AttentionInputs(query, key, key, 0.7, mask is None, mask)


@pytest.mark.parametrize("trailing", [0, 2])
def test_moments_are_of_the_last_query_and_the_keys_that_it_sees(trailing):
    contexts = 5
    mask = torch.rand(contexts, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[3] = False  # that context's last query sees nothing
    for inputs in (_inputs(contexts), _inputs(contexts, mask)):
        whole, parts = (QueryKeyMoments(2, HEADS + 1, WIDTH + 1) for _ in range(2))
        whole.update(1, inputs, trailing)
        for place in range(contexts):
            parts.update(1, inputs.of_contexts(slice(place, place + 1)), trailing)
        last = LENGTH - 1 - trailing
        query, key, count = np.zeros((HEADS, WIDTH, WIDTH)), np.zeros((HEADS, WIDTH, WIDTH)), 0
        for place in range(contexts):
            seen = np.arange(LENGTH) <= last if inputs.mask is None else inputs.mask[place, 0, last].numpy()
            if not seen.any():
                continue
            count += 1
            for head in range(HEADS):
                one = inputs.query[place, head, last].numpy() * 0.7
                query[head] += np.outer(one, one)
                key[head] += np.cov(inputs.key[place, head // 2].numpy()[seen].T, bias=True)
        for sums in (whole, parts):
            state = {name: values[1] for name, values in sums.state().items()}
            assert state["contexts"].tolist() == [count] * HEADS + [0]
            np.testing.assert_allclose(state["query"][:HEADS, :WIDTH, :WIDTH], query, rtol=1e-6)
            np.testing.assert_allclose(state["key"][:HEADS, :WIDTH, :WIDTH], key, rtol=1e-5, atol=1e-6)


def test_propagation_of_draws_is_that_of_drawn_logits():
    """Oracle: Monte Carlo, s = (ω − mean ω + 1)/T in [0, 1]."""
    generator = torch.Generator().manual_seed(0)
    for variance, keys in ((0.04, 400), (1.0, 400), (9.0, 400), (40.0, 40)):
        logits = variance**0.5 * torch.randn(4000, keys, generator=generator)
        share = (logits - logits.mean(1, keepdim=True) + 1) / keys
        simulated = ((share >= 0) & (share <= 1)).double().mean()
        found = propagation_of_draws(torch.tensor([variance]), keys)
        assert float(found) == pytest.approx(float(simulated), abs=0.005)
    assert propagation_of_draws(torch.zeros(1), 10.0).tolist() == [1.0]


def test_the_survey_has_the_column_of_the_released_queries_and_keys(checkpoint):
    """Oracle: projections and rotation of transformers; grouped keys."""
    folder = checkpoint("llama")
    released = transformers.LlamaForCausalLM.from_pretrained(folder)
    model = open_model(folder, device="cpu")
    ids = torch.randint(5, 60, (6, 24), generator=torch.Generator().manual_seed(0))
    heads = survey(model, Corpus.from_ids(ids)).heads
    projected: dict[int, list[torch.Tensor]] = {}
    for layer, block in enumerate(released.model.layers):
        for module in (block.self_attn.q_proj, block.self_attn.k_proj):
            module.register_forward_hook(
                lambda _m, _a, out, layer=layer: projected.setdefault(layer, []).append(out)
            )
    with torch.no_grad():
        hidden = released.model(ids).last_hidden_state
    angles = released.model.rotary_emb(hidden, torch.arange(24)[None])
    width, count = released.config.head_dim, released.config.num_attention_heads
    for layer, parts in projected.items():
        query, key = (part.unflatten(-1, (-1, width)).transpose(1, 2) for part in parts)
        query, key = (x.double() for x in apply_rotary_pos_emb(query, key, *angles))
        key = key.repeat_interleave(count // key.shape[1], dim=1)
        last = query[:, :, -1] * width**-0.5
        centred = key - key.mean(dim=2, keepdim=True)
        variance = torch.einsum("chx,chy,dhtx,dhty->h", last, last, centred, centred) / (6 * 6 * 24)
        expected = propagation_of_draws(variance, 24)
        own = heads.loc[heads["layer"] == layer, "propagation_independent"]
        np.testing.assert_allclose(own, expected, rtol=1e-4)
