"""Oracles: one question at a time by greedy decoding of transformers, on the text itself."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.checkpoints import byte_tokenizer
from tests.tokenizers import framed
from theodolite.errors import UsageError
from theodolite.evaluate.few_shot import (
    MOST_SHOTS,
    FewShotPrompts,
    few_shot_answers,
    few_shot_scores,
    word_tasks,
)
from theodolite.models import open_model


def test_tasks_have_a_hundred_items_and_no_question_twice():
    tasks = word_tasks()
    assert len(tasks) >= 6
    for items in tasks.values():
        assert len(items) >= 100
        assert Counter(question for question, _ in items).most_common(1)[0][1] == 1
        assert all(part == part.strip() and part for item in items for part in item)
    assert all(word.upper() == answer for word, answer in tasks["uppercase"])


def test_answers_are_those_of_greedy_decoding(checkpoint):
    """Oracle: `generate` from the text up to each colon; a model that copies is right now and then."""
    torch.manual_seed(0)
    model = open_model(checkpoint("gpt2"))
    with torch.no_grad():  # what it says after " c" is "a", and so on: some short answers are right
        model.hf.get_output_embeddings().weight.mul_(30)
    prompts = FewShotPrompts.draw(model.tokenizer, 2, seed=4, shots=3)
    answers = few_shot_answers(model, prompts=2, seed=4, shots=3, batch=3)
    whole = np.concatenate(list(answers.values()))
    assert whole.shape == (2 * len(word_tasks()), 4)
    shorter = few_shot_answers(model, prompts=2, seed=4, shots=1)
    assert all((shorter[task] == right[:, :2]).all() for task, right in answers.items())
    rows = zip(prompts.tasks, prompts.ids, prompts.answers, whole, strict=True)
    for task, ids, places, right in rows:
        end = int(places[-1, 1])
        text = model.tokenizer.decode(ids[:end])
        lines = [line.split(": ") for line in text.splitlines()]
        assert [tuple(line) for line in lines] == [
            (question, dict(word_tasks()[task])[question]) for question, _ in lines
        ]
        assert len({question for question, _ in lines}) == 4
        for number, ((first, behind), (_, answer)) in enumerate(zip(places.tolist(), lines, strict=True)):
            assert model.tokenizer.decode(ids[first:behind]) == f" {answer}\n"
            written = ids[:first]
            for _ in range(behind - first):
                with torch.no_grad():
                    logits = model.hf(written[None]).logits[0, -1]
                written = torch.cat([written, logits.argmax()[None]])
            assert bool(right[number]) == torch.equal(written, ids[:behind])


def test_a_model_that_knows_the_lines_is_right_and_one_token_less_is_wrong():
    """By hand: logits that say each prompt's own next token, then one of them changed."""
    prompts = FewShotPrompts.draw(byte_tokenizer(), 2, seed=0)
    ids = prompts.ids[:3]
    logits = torch.nn.functional.one_hot(ids.roll(-1, dims=1), 300).float()

    def saying(logits):
        return SimpleNamespace(logits=lambda ids, chosen: logits[chosen])

    assert prompts.right(saying(logits), slice(0, 3), ids).all()
    first, behind = prompts.answers[1, 5].tolist()
    for place, wrong in ((first, True), (behind - 1, True), (behind, False), (first - 1, False)):
        changed = logits.clone()
        changed[1, place - 1] = 0
        changed[1, place - 1, 0] = 1
        right = prompts.right(saying(changed), slice(0, 3), ids)
        assert right.sum() == 3 * (MOST_SHOTS + 1) - wrong
        assert bool(right[1, 5]) != wrong


def test_scores_are_means_over_prompts_of_all_tasks_and_of_each():
    """Oracle: numpy."""
    random = np.random.default_rng(0)
    answers = {task: random.random((40, MOST_SHOTS + 1)) < 0.3 for task in word_tasks()}
    scores = few_shot_scores("m", answers, (0, 5), 0, None)
    assert len(scores) == 2 * (1 + len(answers))
    whole = np.mean(list(answers.values()), axis=0)[:, 5]
    assert scores[1].value == pytest.approx(whole.mean())
    assert scores[1].error == pytest.approx(whole.std(ddof=1) / 40**0.5)
    assert (scores[3].task, scores[3].value) == ("few-shot, capital", answers["capital"][:, 5].mean())


def test_what_cannot_be_asked_is_said(opened, tmp_path):
    for family, more, says in (
        ("bert", {}, "sees later tokens too"),
        ("vit", {}, "predicts no tokens"),
        ("gpt2", {"prompts": 1}, "1 prompts with seed 0 .* ask for 2 prompts or more"),
        ("gpt2", {"seed": -1}, "100 prompts with seed -1"),
        ("gpt2", {"shots": 17}, "17 examples: .* up to 16 examples"),
        ("gpt2", {"prompts": 2.5}, "prompts"),
        ("gpt2", {"batch": 0, "shots": 1}, "a batch of 0 prompts reads nothing"),
    ):
        with pytest.raises(UsageError, match=says):
            few_shot_answers(opened(family), **more)
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=4, n_positions=20, bos_token_id=None)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    words = framed(["[UNK]", "<s>", "a"], ["<s>"], [])  # which drops line breaks
    with pytest.raises(UsageError, match="tokens that end with a line"):
        FewShotPrompts.draw(words, 2)
    with pytest.raises(UsageError, match=r"has positions for 20 tokens; few-shot with 16 examples needs \d+"):
        few_shot_answers(open_model(tmp_path))
