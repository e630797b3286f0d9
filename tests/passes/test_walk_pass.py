"""Oracles: hidden states that transformers returns itself, and the covariance that a simulated walk was given."""

from __future__ import annotations

import pytest
import torch

from theodolite.accumulate.walks import simulated_walk
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.measure.walks import mean_gram, walk_table
from theodolite.passes.walk_pass import LEAST_LENGTH, check_length, read_walk


def test_the_pass_sees_what_the_model_computes(opened):
    """Oracle: hidden states that transformers returns itself."""
    model = opened("gpt2")
    corpus = Corpus.random_tokens(model.tokenizer, 24, 10)
    walk = read_walk(model, corpus, 0)
    with torch.inference_mode():
        states = model.hf.base_model(input_ids=corpus.contexts, output_hidden_states=True).hidden_states
    for layer in range(model.layers):  # the last of them is behind the final norm
        x = states[layer][:, 1:].double()
        expected = torch.einsum("csd,ctd->st", x, x) / 10
        torch.testing.assert_close(mean_gram(walk.residual_state, layer), expected, rtol=1e-5, atol=1e-5)
    norm = model.hf.transformer.h[1].ln_1(states[1])[:, 1:].double()
    gram = mean_gram(walk.input_state, 1)
    torch.testing.assert_close(gram, torch.einsum("csd,ctd->st", norm, norm) / 10, rtol=1e-5, atol=1e-5)
    again = read_walk(model, corpus, 0)
    assert all(torch.equal(again.input_state[name], value) for name, value in walk.input_state.items())


def test_the_control_walk_has_the_texts_increments(opened):
    """Oracle: a walk with covariance Σ̂ has E‖ε‖² = tr Σ̂, whatever basis it is drawn in."""
    model = opened("gpt2")
    text = read_walk(model, Corpus.random_tokens(model.tokenizer, 40, 32), 0)
    sums, state = simulated_walk(text.inputs, text.input_state, 0)
    for layer in range(model.layers):
        simulated, given = (
            float(part.trace())
            for part in (sums.covariance(state, layer), text.inputs.covariance(text.input_state, layer))
        )
        assert simulated == pytest.approx(given, rel=0.1)
    assert (walk_table(sums, state)["r_squared"] > 0.9).all()


def test_short_contexts_are_refused():
    check_length(LEAST_LENGTH)
    with pytest.raises(UsageError, match=f"--length {LEAST_LENGTH} or more"):
        check_length(LEAST_LENGTH - 1)
