"""[SEP] at the end of every context is no text.

Oracle: hidden states and attentions that `transformers` gives, in NumPy. The model is a tiny BERT
whose first layer has queries that look for the [SEP] at the end, and a WordPiece tokenizer.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests import checkpoints
from tests.dense import position_columns
from tests.tokenizers import framed
from theodolite import Corpus, constituents, open_model, survey, trace_sinks
from theodolite.attention.inputs import AttentionInputs
from theodolite.attention.summary import empirical_propagation, last_query
from theodolite.corpus.special_tokens import special_ends
from theodolite.models import OpenModel
from theodolite.passes.run import Run
from theodolite.sinks.outliers import find_outliers

LENGTH = 24
TEXT = slice(1, LENGTH - 1)
WORDS = [
    "[UNK]",
    "[CLS]",
    "[SEP]",
    *["gael", "##ic", "game", "##s", "as", "through", "express", "##ed", "a", ","],
]


def word_piece() -> PreTrainedTokenizerFast:
    """As BERT's: [CLS] in front, [SEP] behind."""
    split = pre_tokenizers.BertPreTokenizer()
    tokenizer = framed(WORDS, ["[CLS]"], ["[SEP]"], models.WordPiece, split)
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OpenModel:
    folder: Path = tmp_path_factory.mktemp("bert")
    bert = checkpoints.build("bert")
    with torch.no_grad():
        embedded = bert.bert.embeddings(torch.full((1, LENGTH), 2))[0, -1]
        attention = bert.bert.encoder.layer[0].attention.self
        attention.query.bias.copy_(3 * attention.key(embedded))
    bert.save_pretrained(folder)
    word_piece().save_pretrained(folder)
    return open_model(folder)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    words = ["gaelic", "games", "as", "through", "expressed", "a", ","]
    generator = np.random.default_rng(0)
    return Corpus.from_texts(
        [" ".join(generator.choice(words, 400)) for _ in range(3)], word_piece(), LENGTH, 12
    )


@pytest.fixture(scope="module")
def run(model: OpenModel, corpus: Corpus) -> Run:
    return survey(model, corpus)


@pytest.fixture(scope="module")
def dense(model: OpenModel, corpus: Corpus) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states (layers + 1, contexts, T, d) and attentions (layers, contexts, H, T, T)."""
    model.hf.set_attn_implementation("eager")
    with torch.no_grad():
        output = model.hf(corpus.contexts, output_hidden_states=True, output_attentions=True)
    model.hf.set_attn_implementation("sdpa")
    return tuple(torch.stack(list(of)).double().numpy() for of in (output.hidden_states, output.attentions))


def test_which_tokens_stand_behind_a_text_is_seen_from_the_tokenizer(corpus: Corpus) -> None:
    assert corpus.trailing(word_piece()) == 1
    assert special_ends(word_piece(), corpus.contexts[:, :-1])[1] == 0
    assert corpus.trailing(checkpoints.byte_tokenizer()) == 0
    assert corpus.trailing(None) == 0


def test_layers_are_measured_on_the_text_alone(run: Run, dense: tuple[np.ndarray, np.ndarray]) -> None:
    hidden = dense[0]
    text, norms = hidden[:, :, TEXT], np.linalg.norm(hidden, axis=-1)
    mean = text.mean((1, 2))
    np.testing.assert_allclose(run.arrays["mean"], mean, atol=1e-5)
    basis = hidden.mean(1) - mean[:, None]
    np.testing.assert_allclose(run.arrays["positional_basis"], basis[:, :-1], atol=1e-5)
    np.testing.assert_allclose(run.arrays["positional_basis_last"], basis[:, -1:], atol=1e-5)
    centred = text - text.mean(2, keepdims=True)
    collapse = np.linalg.norm(centred, axis=(2, 3)) / np.linalg.norm(text, axis=(2, 3))
    cosine = (text[1:] * text[:-1]).sum(-1) / (norms[1:, :, TEXT] * norms[:-1, :, TEXT])
    expected = {
        "norm": norms[:, :, TEXT].mean((1, 2)),
        "norm_first": norms[:, :, 0].mean(1),
        "norm_last": norms[:, :, -1].mean(1),
        "rank_collapse": collapse.mean(1),
        "cosine_previous": np.concatenate([[np.nan], cosine.mean((1, 2))]),
        "position_energy": [position_columns(x)["position_energy"] for x in text],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(run.layers[name], values, rtol=2e-4, err_msg=name)
    assert (run.layers["norm_last_se"] >= 0).all()
    assert run.provenance["corpus"]["trailing_special_tokens"] == 1


def test_heads_are_asked_by_the_last_query_of_the_text(run, dense):
    weights = dense[1]
    # Of a bidirectional model every query sees every key; logits are log-weights, up to a constant.
    logits = torch.from_numpy(np.log(weights[..., -2, :]))
    propagates = empirical_propagation(logits).double().mean(1).numpy()
    np.testing.assert_allclose(run.arrays["propagation_by_position"], propagates, atol=0.01)
    received = weights.mean(-2)
    sinks = {
        "sink_first": received[..., 0] > 0.3,
        "sink_later": (received[..., TEXT] > 0.3).any(-1),
        "sink_last": received[..., -1] > 0.3,
    }
    for name, found in sinks.items():
        np.testing.assert_allclose(run.heads[name], found.mean(1).flatten(), err_msg=name)
    assert run.heads["sink_last"].max() > 0


def test_constituents_reach_to_the_end_of_a_context(model: OpenModel, corpus: Corpus, run: Run) -> None:
    of_context = constituents(model, corpus.contexts[0], 1, decomposition=run)
    np.testing.assert_allclose(of_context.logits.sum((1, 2)), of_context.total, atol=1e-3)
    assert of_context.total.shape[-1] == LENGTH


def test_outliers_and_traces_are_of_the_text(model, corpus, dense):
    sizes = np.abs(dense[0])
    found = find_outliers(model, corpus).dimensions
    shape = (len(sizes), -1)
    np.testing.assert_allclose(
        found["maximum"].to_numpy().reshape(shape), sizes[:, :, TEXT].max((1, 2)), rtol=1e-4
    )
    np.testing.assert_allclose(
        found["rms"].to_numpy().reshape(shape), np.sqrt((sizes[:, :, TEXT] ** 2).mean((1, 2))), rtol=1e-4
    )
    traces = trace_sinks(model, corpus).traces
    # Every token of the text can be caught, 22 a context, and no other.
    caught = traces["caught"].to_numpy() * len(corpus.contexts) * (LENGTH - 2)
    np.testing.assert_allclose(caught, caught.round(), atol=1e-6)


def test_a_causal_query_before_the_end_sees_nothing_behind_it() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 2, 3, 9, 4, generator=generator)
    whole = AttentionInputs(query, key, key, 0.5, causal=True)
    short = AttentionInputs(query[:, :, :-2], key[:, :, :-2], key[:, :, :-2], 0.5, causal=True)
    (visible, propagates), (of_short_visible, of_short) = last_query(whole, 2), last_query(short)
    assert not visible[..., -2:].any()
    assert not propagates[..., -2:].any()
    assert torch.equal(visible[..., :-2], of_short_visible)
    assert torch.equal(propagates[..., :-2], of_short)
