"""Oracles: autograd through the checkpoint's own modules; planted shares."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.papers.shared import answers, assert_whole, outcome_of
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.judging import FAILS, HOLDS
from theodolite_papers import Study
from theodolite_papers.catalogue import EXPERIMENTS
from theodolite_papers.localization.gradient_lens import (
    Shares,
    advantage,
    gradient_shares,
    last_query,
    order,
)


def test_the_gradient_is_that_of_the_models_own_code(opened):
    """Oracle: autograd through the checkpoint's own modules: ∂J/∂q of the last query is Σ_i (∂J/∂ω_i) k_i/√d_h."""
    model = opened("gpt2")
    ids = Corpus.random_tokens(model.required_vocabulary(), 7, 3, 0, below=model.vocabulary).contexts
    layers = last_query(model, ids)
    heads, width, head_width = model.heads, model.width, model.head_width
    for layer, (logits, gradient, norms) in enumerate(layers):
        leaf = torch.zeros(3, width, requires_grad=True)
        keys: list[torch.Tensor] = []

        def bend(module, args, output, leaf=leaf, keys=keys):
            keys.extend([args[0].detach(), output[..., width : 2 * width].detach()])
            change = torch.zeros_like(output)
            change[:, -1, :width] = leaf
            return output + change

        handle = model.hf.transformer.h[layer].attn.c_attn.register_forward_hook(bend)
        try:
            predicted = model.hf(input_ids=ids[:, :-1]).logits[:, -1]
        finally:
            handle.remove()
        loss = functional.cross_entropy(predicted, ids[:, -1], reduction="sum")
        (by_query,) = torch.autograd.grad(loss, leaf)
        read, key = keys
        key = key.unflatten(-1, (heads, head_width))
        expected = torch.einsum("bhk,bkhd->bhd", gradient, key) / math.sqrt(head_width)
        torch.testing.assert_close(
            by_query.unflatten(-1, (heads, head_width)), expected, rtol=1e-3, atol=1e-7
        )
        torch.testing.assert_close(norms, read.double().norm(dim=-1))
        assert logits.shape == gradient.shape == (3, heads, 6)
    shares = gradient_shares(model, ids)
    size = torch.cat([gradient.double().abs() * norms[:, None] for _, gradient, norms in layers], dim=1)
    torch.testing.assert_close(shares.share, size / size.sum(-1, keepdim=True))
    assert shares.places == model.places


def planted(sign: float, contexts: int = 32, keys: int = 10) -> Shares:
    """Early keys propagate more often; those that do have e^sign times the share of others, with noise."""
    random = np.random.default_rng(0)
    propagates = random.random((contexts, 2, keys)) < np.linspace(0.9, 0.1, keys)
    size = np.exp(sign * propagates + 0.1 * random.normal(size=propagates.shape))
    share = torch.from_numpy(size / size.sum(-1, keepdims=True))
    return Shares(torch.from_numpy(propagates), share, [(0, 0), (0, 1)])


@pytest.mark.parametrize(("sign", "answer"), [(1.0, HOLDS), (-1.0, FAILS)])
def test_planted_shares(sign, answer):
    """Oracle: the ratio put in, and its sign."""
    shares = planted(sign)
    np.testing.assert_allclose(advantage(shares).values, sign, atol=0.1)
    outcome = outcome_of("localization/gradient")
    outcome.judge("larger-share", advantage(shares))
    outcome.judge("same-order", order(shares))
    assert answers(outcome) == [answer] * 2


def test_the_page(surveyed_gpt2):
    """Oracle: its own shares; the refusals by their messages."""
    run, model, corpus = surveyed_gpt2
    outcome = Study(run, model, corpus).outcome(EXPERIMENTS["localization/gradient"])
    assert len(outcome.verdicts) == 2
    assert_whole(outcome)
    assert outcome.readings[0].here == "16; 23"
    shares = gradient_shares(model, corpus.contexts)
    np.testing.assert_allclose(
        outcome.tables["heads"]["propagation"], shares.propagates.double().mean((0, 2)), rtol=1e-12
    )
    assert len(outcome.exhibits[0].choice.options) == model.layers * model.heads
    few = Corpus.random_tokens(model.required_vocabulary(), 8, 4, 0, below=model.vocabulary)
    with pytest.raises(UsageError, match="give 16 contexts or more"):
        Study(run, model, few).outcome(EXPERIMENTS["localization/gradient"])
