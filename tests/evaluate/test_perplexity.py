"""Oracles: float64 log-softmax written out, the loss that `transformers` itself returns, closed forms."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import normalizers, processors

from tests.checkpoints import byte_tokenizer
from tests.passes.test_end_tokens import WORDS
from tests.slow import slow_but
from tests.tokenizers import framed
from theodolite import open_model
from theodolite.corpus.corpus import Corpus
from theodolite.corpus.cutting import tokenized
from theodolite.corpus.named import make_stream
from theodolite.corpus.spec import HELD_OUT_TOPICS, python_topics
from theodolite.errors import UsageError, WorkError
from theodolite.evaluate.perplexity import Perplexity, perplexity, perplexity_scores


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
    told = []
    one, again = (
        perplexity(model, corpus, batch=1, show_progress=lambda *at: told.append(at)) for _ in range(2)
    )
    np.testing.assert_allclose(one.losses, found.losses, rtol=1e-5)
    assert np.array_equal(one.losses, again.losses)
    assert told == 2 * [(done, 7) for done in range(8)]


def test_a_model_of_nothing_has_the_perplexity_of_its_vocabulary(checkpoint):
    """Closed form: equal logits give ln V, without spread."""
    model = open_model(checkpoint("gpt2"))  # its own copy, for it is changed
    with torch.no_grad():
        model.hf.get_output_embeddings().weight.zero_()
    found = perplexity(model, corpus_of(model))
    assert found.perplexity == pytest.approx(300, rel=1e-6)
    assert found.loss_se == pytest.approx(0, abs=1e-7)
    assert Perplexity(np.array([800.0, 800.0]), np.array([2, 2]), 1).perplexity == math.inf  # beyond float64
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
    loss, perplex, per_byte = perplexity_scores("name", corpus, found)
    assert (loss.metric, loss.value, loss.error, loss.count) == ("loss", found.loss, found.loss_se, n)
    assert (perplex.metric, perplex.value) == ("perplexity", found.perplexity)
    assert perplex.error == pytest.approx(found.perplexity * found.loss_se)
    assert loss.questions == corpus.sha256
    assert np.array_equal(loss.each, found.losses)
    assert perplex.each is None
    assert (per_byte.metric, per_byte.value) == ("bits per byte", found.bits_per_byte)


SPELLED = "x <|endoftext|> y <s> [UNK] caf\u00e9 \ufb01ne \U0001f600 a\u0300 Ab  \n"


@pytest.mark.parametrize(
    "normalizer", [None, normalizers.NFKC(), normalizers.Lowercase(), normalizers.StripAccents()]
)
@pytest.mark.parametrize("words", [True, False], ids=["words", "bytes"])
def test_bytes_are_the_text_s(normalizer, words):
    """Oracle: the text in UTF-8. Special tokens that are spelled, marks that are dropped, and all spaces count."""
    tokenizer = framed(WORDS, ["[CLS]"], ["[SEP]"]) if words else byte_tokenizer()
    if normalizer:
        before = [normalizers.NFD()] if isinstance(normalizer, normalizers.StripAccents) else []
        tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([*before, normalizer])
    _, sizes = tokenized(tokenizer, SPELLED * 4)
    assert sizes.sum() == 4 * len(SPELLED.encode())
    apart = Corpus.from_texts(["a b c  \n" * 40], tokenizer, 14 if words else 16)
    # The first has no white space before it, and the last more behind.
    assert (apart.text_bytes.sum(1)[1:-1] == (32 if words else 16)).all()


def test_windows_begin_as_a_text_does_where_they_are_not_as_published(opened, tmp_path):
    """Oracle: the model on each window by itself; the same tokens are predicted, and of no special one the loss."""
    model = opened("llama3")
    before = [model.tokenizer.eos_token_id, 5]
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> & $A", special_tokens=[("<|endoftext|>", before[0]), ("&", 5)]
    )
    model = replace(model, tokenizer=tokenizer)
    (tmp_path / "text.txt").write_text("abcdefgh" * 5)
    stream = make_stream(tmp_path / "text.txt", tokenizer)
    assert stream.contexts[0, :2].tolist() == before
    ids = stream.contexts[0]

    def wanted(windows, skipped):
        with torch.no_grad():
            logits = [model.hf(of[None]).logits[0].double().log_softmax(-1) for of in windows]
        found = [
            -of[:-1].gather(1, ids[1:, None])[skip - 1 :]
            for of, ids, skip in zip(logits, windows, skipped, strict=True)
        ]
        return [float(of.mean()) for of in found]

    windows = [ids[at : at + 12] for at in range(0, 42, 12)]
    framed = [torch.cat([torch.tensor(before), of[2:]]) for of in windows]
    for as_published, read, skipped in ((False, framed, [2] * 4), (True, windows, [2, 1, 1, 1])):
        found = perplexity(model, stream, stride=12, length=12, as_published=as_published)
        np.testing.assert_allclose(found.losses, wanted(read, skipped), rtol=1e-5)
        assert found.tokens.tolist() == [len(of) - skip for of, skip in zip(read, skipped, strict=True)]
    overlapping = perplexity(model, stream, stride=5, length=12)
    assert overlapping.tokens.sum() == 40
    contexts = Corpus.from_texts(["abcdefgh" * 5], tokenizer, 12)
    np.testing.assert_allclose(
        perplexity(model, contexts).losses, wanted(contexts.contexts, [2] * 4), rtol=1e-5
    )


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
        assert found.text_bytes is None
    short = opened("gpt2")  # of 128 positions, of which a window has no more
    corpus = corpus_of(short, 1, 300)
    found = perplexity(short, corpus, stride=128)
    assert found.tokens.tolist() == [127, 127, 43]
    assert found.loss == pytest.approx(guide(short, corpus.contexts, 128, 128)[0], rel=1e-5)


def test_models_and_windows_that_cannot_be_are_refused(opened):
    for family, says in (
        ("bert", "sees later tokens too"),
        ("vit", "predicts no tokens: evaluate a decoder"),
    ):
        with pytest.raises(UsageError, match=says):
            perplexity(opened(family), Corpus.random_tokens(300, 8, 2))
    model = opened("gpt2")
    stream, long = corpus_of(model, 1, 40), corpus_of(model, 1, 300)
    for corpus, given, message in (
        (stream, {"stride": 0}, "leaves tokens out"),
        (stream, {"stride": 13, "length": 12}, "give 1 to 12"),
        (long, {"stride": 64, "length": 129}, "longer than the 128"),
        (stream, {"stride": 2, "length": 3}, "too short"),
        (stream, {"stride": 64.0}, "stride is 64.0: give a whole number"),
        (stream, {"length": 12}, "give a stride"),
        (corpus_of(model, 2, 40), {"stride": 4, "length": 12}, "one stream"),
    ):
        with pytest.raises(UsageError, match=message):
            perplexity(model, corpus, **given)
