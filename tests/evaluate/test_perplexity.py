"""Oracles: float64 log-softmax written out, the loss that `transformers` itself returns, closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError, WorkError
from theodolite.evaluate.perplexity import Perplexity, perplexity, perplexity_scores


def corpus_of(model, contexts=7, length=12, seed=0):
    return Corpus.random_tokens(model.vocabulary, length, contexts, seed)


@pytest.mark.parametrize("family", ["gpt2", "llama3", "bloom", "gemma2"])
def test_losses_are_the_models_own(opened, family):
    """Oracle: log-softmax in float64, token by token, and for the mean the loss of `transformers`."""
    model = opened(family)
    corpus = corpus_of(model)
    found = perplexity(model, corpus, batch=3)
    with torch.no_grad():
        logits = model.hf(input_ids=corpus.contexts).logits.double().numpy()
        own = model.hf(input_ids=corpus.contexts, labels=corpus.contexts).loss
    wanted = []
    for row, ids in zip(logits, corpus.contexts.numpy(), strict=True):
        shifted = row[:-1] - row[:-1].max(axis=1, keepdims=True)
        normal = np.log(np.exp(shifted).sum(axis=1))
        wanted.append(np.mean(normal - shifted[np.arange(len(ids) - 1), ids[1:]]))
    np.testing.assert_allclose(found.losses, wanted, rtol=1e-5)
    assert found.loss == pytest.approx(float(own), rel=1e-5)
    assert found.loss_se == pytest.approx(np.std(wanted, ddof=1) / math.sqrt(7), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(np.mean(wanted)), rel=1e-5)
    assert found.tokens == 7 * 11
    assert found.batch == 3


def test_a_model_of_nothing_has_the_perplexity_of_its_vocabulary(checkpoint):
    """Closed form: equal logits give ln V, without spread."""
    from theodolite.models import open_model

    model = open_model(checkpoint("gpt2"))  # its own copy, for it is changed
    with torch.no_grad():
        model.hf.get_output_embeddings().weight.zero_()
    found = perplexity(model, corpus_of(model))
    assert found.perplexity == pytest.approx(300, rel=1e-6)
    assert found.loss_se == pytest.approx(0, abs=1e-7)


def test_the_standard_error_is_that_of_other_texts(opened):
    """Oracle: the spread of the mean over 60 other corpora; its own error is 1/√(2·59), 9 %."""
    model = opened("gpt2")
    means = [perplexity(model, corpus_of(model, 16, 16, seed)).loss for seed in range(60)]
    said = np.mean([perplexity(model, corpus_of(model, 16, 16, seed)).loss_se for seed in range(10)])
    assert np.std(means, ddof=1) == pytest.approx(said, rel=0.35)


def test_batches_change_nothing_and_progress_is_told(opened):
    model = opened("llama3")
    corpus, told = corpus_of(model), []
    one = perplexity(model, corpus, batch=1, show_progress=lambda done, total: told.append((done, total)))
    all_at_once = perplexity(model, corpus, batch=64)
    np.testing.assert_allclose(one.losses, all_at_once.losses, rtol=1e-5)
    assert told == [(done, 7) for done in range(8)]
    again = perplexity(model, corpus, batch=1)
    assert np.array_equal(one.losses, again.losses)


def test_scores_carry_value_error_and_text(opened):
    model = opened("gpt2")
    corpus = corpus_of(model)
    found = perplexity(model, corpus)
    loss, perplex = perplexity_scores("name", corpus, found)
    assert (loss.metric, loss.value, loss.error, loss.count) == ("loss", found.loss, found.loss_se, 7)
    assert (perplex.metric, perplex.value) == ("perplexity", found.perplexity)
    assert perplex.error == pytest.approx(found.perplexity * found.loss_se)
    assert loss.questions == corpus.sha256
    assert np.array_equal(loss.each, found.losses)
    assert perplex.each is None


def test_a_loss_too_large_for_a_number_is_an_infinite_perplexity():
    """Closed form: exp(800) is beyond float64."""
    assert Perplexity(np.array([800.0, 800.0]), 2, 1).perplexity == math.inf


@pytest.mark.parametrize(
    ("family", "says"),
    [("bert", "sees later tokens too"), ("vit", "predicts no tokens: evaluate a checkpoint")],
)
def test_what_predicts_no_next_token_is_refused(opened, family, says):
    model = opened(family)
    with pytest.raises(UsageError, match=says):
        perplexity(model, Corpus.random_tokens(300, 8, 2))


def test_numbers_that_are_none_are_said(checkpoint):
    from theodolite.models import open_model

    model = open_model(checkpoint("gpt2"))
    with torch.no_grad():
        model.hf.get_output_embeddings().weight[5] = math.nan
    with pytest.raises(WorkError, match="is NaN or infinite: try --dtype float32"):
        perplexity(model, corpus_of(model))
