"""Oracles: hidden states that transformers returns itself, and the covariance that a simulated walk was given."""

from __future__ import annotations

import pytest
import torch

from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.theory.propagation import propagation_finite
from theodolite_papers.localization.head_predictions import from_increments
from theodolite_papers.localization.walk_pass import LEAST_LENGTH, check_length, read_walk
from theodolite_papers.localization.walks import mean_gram, simulated_walk, walk_table


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


@pytest.mark.parametrize("family", ["gpt2", "llama3"])
def test_increments_predict_from_the_full_covariance(opened, family):
    """Oracle: W_QK Σ̂ and Σ̂^½ W_QK Σ̂^½ formed as d×d matrices, with grouped heads too."""
    model = opened(family)
    corpus = Corpus.random_tokens(model.tokenizer, 24, 16)
    walk = read_walk(model, corpus, 0)
    prediction = from_increments(model, walk, 24)
    weights = model.head_weights(1)
    sigma = walk.inputs.covariance(walk.input_state, 1)
    values, vectors = torch.linalg.eigh(sigma)
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    full = weights.w_q[0].double() @ weights.w_k[0].double().T
    form = root @ full @ root
    expected = propagation_finite(
        (full @ sigma).trace(),
        form.square().sum(),
        (full @ sigma @ full @ sigma).trace(),
        24,
        1 / weights.scaling,
    )
    torch.testing.assert_close(prediction.curve[model.heads], expected, rtol=0, atol=1e-6)
    symmetric = ((form + form.T) / 2).square().sum().sqrt() * weights.scaling
    assert float(prediction.eta[model.heads]) == pytest.approx(float(symmetric), rel=1e-5)
