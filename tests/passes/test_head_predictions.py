"""Oracle: covariances and QK forms formed as d×d matrices."""

from __future__ import annotations

import pytest
import torch

from theodolite.corpus.corpus import Corpus
from theodolite.passes.head_predictions import from_increments
from theodolite.passes.walk_pass import read_walk
from theodolite.theory.propagation import propagation_finite


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
