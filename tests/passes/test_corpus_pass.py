"""What a pass over a text refuses, and what it hands to those who take part."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from tests import checkpoints
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError, WorkError
from theodolite.models import open_model
from theodolite.passes.corpus_pass import refuse_nonfinite_stream
from theodolite.passes.survey import survey


@pytest.mark.parametrize("batch", [0, -1])
def test_a_batch_of_nothing_is_refused(opened, corpus, batch):
    with pytest.raises(UsageError, match="reads nothing"):
        survey(opened("gpt2"), corpus, batch=batch)


@pytest.mark.parametrize(
    ("length", "top", "message"),
    [
        (200, 10, "longer than the 128"),
        (16, 5000, "does not fit the 300 tokens"),
        (2, 10, "use --length 4 or more"),
    ],
)
def test_a_corpus_that_does_not_fit_is_refused(opened, length, top, message):
    def read() -> None:
        corpus = Corpus.random_tokens(top, length, 3)
        corpus.contexts[0, 0] = top - 1
        survey(opened("gpt2"), corpus)

    with pytest.raises(UsageError, match=message):
        read()


def test_hidden_states_that_overflow_are_reported(tmp_path):
    model = checkpoints.build("gpt2")
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.bias.fill_(3e38)
        model.transformer.h[1].attn.c_proj.bias.fill_(3e38)
    model.save_pretrained(tmp_path)
    checkpoints.byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(WorkError, match="layer"):
        survey(open_model(tmp_path), Corpus.random_tokens(300, 16, 3))


@pytest.mark.parametrize(
    ("dtype", "says"),
    [
        (torch.bfloat16, "try --dtype float32"),
        (torch.float32, "try --dtype float64"),
        (torch.float64, "no dtype is wider"),
    ],
)
def test_what_to_do_about_numbers_that_are_none_fits_their_dtype(dtype, says):
    refuse_nonfinite_stream(1, torch.full((1, 2, 3), torch.finfo(dtype).max / 8, dtype=dtype))
    with pytest.raises(WorkError, match=f"hidden states of layer 1 hold NaN or infinite values: {says}"):
        refuse_nonfinite_stream(1, torch.full((1, 2, 3), torch.inf, dtype=dtype))


def test_tokens_that_the_embedding_lacks_are_refused_by_name_and_never_drawn(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("gpt2"), tmp_path / "model")
    tokenizer = checkpoints.byte_tokenizer()
    tokenizer.add_tokens([f"<new{number}>" for number in range(60)])  # the embedding has 300 rows
    tokenizer.save_pretrained(folder)
    model = open_model(folder)
    last = tokenizer.convert_tokens_to_ids("<new59>")
    drawn = Corpus.random_tokens(model.tokenizer, 64, 64)
    assert int(drawn.contexts.max()) >= 300
    with pytest.raises(UsageError, match=r"token id 3\d\d \('<new\d\d>'\) does not fit the 300 tokens"):
        survey(model, drawn)
    known = Corpus.random_tokens(model.tokenizer, 64, 64, below=model.vocabulary)
    assert int(known.contexts.max()) < 300 <= last
    assert (
        len(survey(model, replace(known, contexts=known.contexts[:4], labels=known.labels[:4])).heads) == 12
    )
