"""Oracles: float64 log-softmax written out, the loss that `transformers` itself returns, closed forms."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.models.test_token_texts import sentence_piece
from tests.passes.test_end_tokens import word_piece
from tests.slow import slow_but
from theodolite import open_model
from theodolite.corpus.corpus import Corpus
from theodolite.corpus.documents import HELD_OUT_TOPICS, python_topics
from theodolite.errors import UsageError, WorkError
from theodolite.evaluate.perplexity import Perplexity, perplexity, perplexity_scores
from theodolite.models.token_texts import token_bytes


def corpus_of(model, contexts=7, length=12, seed=0):
    return Corpus.random_tokens(model.vocabulary, length, contexts, seed)


@pytest.mark.parametrize("family", ["llama3", "gemma2"])
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
    assert found.tokens.tolist() == 7 * [11]
    assert found.batch == 3


def test_a_model_of_nothing_has_the_perplexity_of_its_vocabulary(checkpoint):
    """Closed form: equal logits give ln V, without spread."""
    model = open_model(checkpoint("gpt2"))  # its own copy, for it is changed
    with torch.no_grad():
        model.hf.get_output_embeddings().weight.zero_()
    found = perplexity(model, corpus_of(model))
    assert found.perplexity == pytest.approx(300, rel=1e-6)
    assert found.loss_se == pytest.approx(0, abs=1e-7)


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
    loss, perplex, _ = perplexity_scores("name", corpus, found)
    assert (loss.metric, loss.value, loss.error, loss.count) == ("loss", found.loss, found.loss_se, 7)
    assert (perplex.metric, perplex.value) == ("perplexity", found.perplexity)
    assert perplex.error == pytest.approx(found.perplexity * found.loss_se)
    assert loss.questions == corpus.sha256
    assert np.array_equal(loss.each, found.losses)
    assert perplex.each is None


def test_a_loss_too_large_for_a_number_is_an_infinite_perplexity():
    """Closed form: exp(800) is beyond float64."""
    assert Perplexity(np.array([800.0, 800.0]), np.array([2, 2]), 1).perplexity == math.inf


@pytest.mark.parametrize(
    ("family", "says"),
    [("bert", "sees later tokens too"), ("vit", "predicts no tokens: evaluate a decoder")],
)
def test_what_predicts_no_next_token_is_refused(opened, family, says):
    model = opened(family)
    with pytest.raises(UsageError, match=says):
        perplexity(model, Corpus.random_tokens(300, 8, 2))


def test_numbers_that_are_none_are_said(checkpoint):
    model = open_model(checkpoint("gpt2"))
    with torch.no_grad():
        model.hf.get_output_embeddings().weight[5] = math.nan
    with pytest.raises(WorkError, match="is NaN or infinite: try --dtype float64"):
        perplexity(model, corpus_of(model))


def test_bits_per_byte_are_of_the_text_that_is_predicted(opened):
    """Oracle by hand: one token a byte, so é is two, and the end of text none; the ratio's error by the jackknife."""
    model = opened("gpt2")
    corpus = Corpus.from_texts(["aé", "bcd", "ef"] * 20, model.tokenizer, 12)
    found = perplexity(model, corpus)
    end = model.tokenizer.eos_token_id
    sizes = (corpus.contexts[:, 1:] != end).sum(1).numpy()
    np.testing.assert_array_equal(found.text_bytes, sizes)
    bits = found.losses * 11 / math.log(2)
    assert found.bits_per_byte == pytest.approx(bits.sum() / sizes.sum(), rel=1e-9)
    n = len(bits)
    left_out = np.array([np.delete(bits, i).sum() / np.delete(sizes, i).sum() for i in range(n)])
    jackknife = math.sqrt((n - 1) / n * np.square(left_out - left_out.mean()).sum())
    assert found.bits_per_byte_se == pytest.approx(jackknife, rel=0.1)
    assert [score.metric for score in perplexity_scores("m", corpus, found)] == [
        "loss",
        "perplexity",
        "bits per byte",
    ]


@pytest.mark.parametrize("tokenizer", [word_piece, sentence_piece], ids=["WordPiece", "SentencePiece"])
def test_bytes_of_words_count_the_spaces_between_them(tokenizer):
    """Oracle: the length of the text in UTF-8."""
    tokenizer = tokenizer()
    size = token_bytes(SimpleNamespace(tokenizer=tokenizer, required_tokenizer=lambda: tokenizer))
    text = "as as a as"
    ids = tokenizer(text)["input_ids"]
    assert sum(map(size, ids)) == len((" " + text).encode())


@pytest.mark.slow
def test_held_out_text_is_what_the_card_of_the_embedded_model_says():
    """Oracle: the card, 9,216 held-out tokens of topics in windows of 257, at 3.293 nats."""
    model = open_model()
    topics = [d for d in python_topics() if d.label in HELD_OUT_TOPICS]
    assert len(topics) == len(HELD_OUT_TOPICS)
    if sys.version_info[:3] != (3, 11, 7):
        pytest.skip("the card is of the text of CPython 3.11.7")
    tokens = [len(model.tokenizer(d.text, verbose=False)["input_ids"]) // 257 * 256 for d in topics]
    assert sum(tokens) == 9216
    found = perplexity(model, Corpus.python_docs(model.tokenizer, 256, held_out=True))
    assert found.loss == pytest.approx(3.293, abs=0.05)


def guide(model, ids, window, stride):
    """The loop of transformers' guide to the perplexity of models with a fixed length, with exact counts of tokens."""
    total, count, before = 0.0, 0, 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + window, ids.shape[1])
        part = ids[:, begin:end]
        labels = part.clone()
        labels[:, : -(end - before)] = -100
        predicted = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            loss = model.hf(input_ids=part, labels=labels).loss if predicted else torch.zeros(())
        total, count, before = total + float(loss) * predicted, count + predicted, end
        if end == ids.shape[1]:
            break
    return total / count, count


@pytest.mark.parametrize(
    ("tokens", "window", "stride"),
    slow_but([(50, 12, 5)], [(50, 12, 5), (49, 12, 12), (50, 12, 1), (9, 12, 4), (13, 12, 12)]),
)
def test_strided_windows_are_those_of_the_guide(tokens, window, stride, opened):
    model = opened("llama3")
    corpus = corpus_of(model, 1, tokens)
    wanted, count = guide(model, corpus.contexts, window, stride)
    for batch in (None, 3):
        found = perplexity(model, corpus, stride=stride, length=window, batch=batch)
        assert found.tokens.sum() == count
        assert found.loss == pytest.approx(wanted, rel=1e-5)
        assert found.perplexity == pytest.approx(math.exp(wanted), rel=1e-5)
        if count == tokens - 1:
            sizes = map(token_bytes(model), corpus.contexts[0, 1:].tolist())
            assert found.text_bytes.sum() == sum(sizes)


def test_windows_are_as_long_as_the_model_where_it_is_shorter_than_2048(opened):
    model = opened("gpt2")  # of 128 positions
    corpus = corpus_of(model, 1, 300)
    found = perplexity(model, corpus, stride=128)
    assert found.tokens.tolist() == [127, 127, 43]
    assert found.loss == pytest.approx(guide(model, corpus.contexts, 128, 128)[0], rel=1e-5)


def test_windows_that_cannot_be_are_refused(opened):
    model = opened("gpt2")
    stream = corpus_of(model, 1, 40)
    for given, message in (
        ({"stride": 0}, "leaves tokens out"),
        ({"stride": 13, "length": 12}, "give 1 to 12"),
        ({"stride": 64, "length": 129}, "longer than the 128"),
        ({"stride": 2, "length": 3}, "too short"),
        ({"stride": 2, "length": 0}, "0 tokens are too short"),
        ({"stride": 2, "length": 1}, "1 tokens are too short"),
        ({"stride": 64.0}, "stride is 64.0: give a whole number"),
        ({"stride": True}, "stride is True"),
        ({"stride": 2, "length": "12"}, "length is '12'"),
        ({"length": 12}, "give a stride"),
    ):
        with pytest.raises(UsageError, match=message):
            perplexity(model, corpus_of(model, 1, 300) if given.get("length") == 129 else stream, **given)
    with pytest.raises(UsageError, match="one stream"):
        perplexity(model, corpus_of(model, 2, 40), stride=4, length=12)
