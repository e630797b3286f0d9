"""Oracles: one prompt at a time by `transformers` on text, and lm-eval on the same prompts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.checkpoints import byte_tokenizer
from theodolite.corpus.few_shot_task import RULES, TEST_STREAM
from theodolite.corpus.named import make_corpus
from theodolite.errors import UsageError
from theodolite.evaluate.few_shot import few_shot_accuracy, few_shot_answers
from theodolite.models import open_model


def test_answers_are_those_of_each_prompt_alone(opened):
    """Oracle: the text up to the colon through tokenizer and model, one by one, in float64."""
    model = opened("llama3")
    right = few_shot_answers(model, prompts=6, seed=4)
    prompts = RULES.draw(6, np.random.default_rng([4, TEST_STREAM]))
    for row, labels, answers in zip(prompts.ids, prompts.labels, right, strict=True):
        text = "".join(RULES.characters[i] for i in row)
        cuts = [place + 1 for place, character in enumerate(text) if character == ":"]
        for cut, label, answer in zip(cuts, labels, answers, strict=True):
            ids = torch.tensor([model.tokenizer(text[:cut])["input_ids"]])
            with torch.no_grad():
                logits = model.hf(ids).logits[0, -1].double()
            choices = [float(logits[model.tokenizer(c)["input_ids"][0]]) for c in "ABC"]
            assert answer == (int(np.argmax(choices)) == label)


def test_the_table_has_shares_errors_and_bounds(opened):
    """Oracle: numpy on the answers; the best accuracy is tested in test_rules.py."""
    model = opened("gpt2")
    right = few_shot_answers(model, prompts=50)
    rows = few_shot_accuracy(model, prompts=50)
    share = right.mean(axis=0)
    np.testing.assert_allclose(rows["accuracy"], share)
    np.testing.assert_allclose(rows["accuracy_se"], np.sqrt(share * (1 - share) / 49))
    assert list(rows["shots"]) == [0, 1, 2, 3, 4, 5]
    assert set(rows["chance"]) == {1 / 3}
    np.testing.assert_allclose(rows["best"], RULES.best_accuracy())


def test_a_model_that_always_says_the_same_guesses(checkpoint):
    """Closed form: labels are equally likely over all rules, so a third is right, within 4 standard errors."""
    model = open_model(checkpoint("gpt2"))  # its own copy, for it is changed
    with torch.no_grad():
        model.hf.get_output_embeddings().weight.zero_()
    rows = few_shot_accuracy(model, prompts=300)
    assert np.all(np.abs(rows["accuracy"] - rows["chance"]) < 4 * math.sqrt(2 / 9 / 300))


def test_calibration_prompts_are_none_of_those_tested(opened):
    """Oracle: the texts themselves, of the same seed."""
    tokenizer = opened("gpt2").tokenizer
    corpus = make_corpus("few-shot", tokenizer, RULES.length, 50, seed=0)
    assert corpus.contexts.shape == (50, RULES.length)
    read = {tokenizer.decode(row) for row in corpus.contexts}
    tested = RULES.draw(50, np.random.default_rng([0, TEST_STREAM]))
    assert not read & {"".join(RULES.characters[i] for i in row) for row in tested.ids}
    shorter = make_corpus("few-shot", tokenizer, 20, 50, seed=0)
    assert torch.equal(shorter.contexts, corpus.contexts[:, :20])
    with pytest.raises(UsageError, match="these prompts have 36 tokens; use a --length from 4 to 36"):
        make_corpus("few-shot", tokenizer, 37, 2)


def test_what_cannot_be_asked_is_said(opened, tmp_path):
    for family, more, says in (
        ("bert", {}, "sees later tokens too"),
        ("vit", {}, "predicts no tokens"),
        ("gpt2", {"prompts": 1}, "1 prompts with seed 0: ask for 2 or more"),
        ("gpt2", {"seed": -1}, "4000 prompts with seed -1"),
        ("gpt2", {"batch": 0}, "a batch of 0 prompts reads nothing"),
    ):
        with pytest.raises(UsageError, match=says):
            few_shot_answers(opened(family), **more)
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=4, n_positions=20, bos_token_id=None)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="has positions for 20 tokens; few-shot needs 36"):
        few_shot_answers(open_model(tmp_path))
