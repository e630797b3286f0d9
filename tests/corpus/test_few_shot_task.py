"""Oracles: prompts read back as text, all prompts of a tiny family one by one, shares of many draws."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest

from tests.checkpoints import byte_tokenizer
from theodolite.corpus.few_shot_task import LETTERS, RULES, Prompts, Rules, prompt_ids
from theodolite.errors import UsageError
from theodolite_papers.training.tasks import character_tokenizer

TINY = Rules(attributes=(0.7, 0.3), values=2, usual=0.2, shots=2, fillers=2)


def texts(prompts: Prompts, rules: Rules) -> list[str]:
    return ["".join(rules.characters[i] for i in row) for row in prompts.ids]


def items_of(text: str, rules: Rules) -> list[tuple[tuple[int, ...], int]]:
    """(value of each attribute, label) of every word."""
    found = []
    for letters, label in (word.split(":") for word in text.removeprefix("\n").split("\n")):
        places = sorted(LETTERS.index(letter) for letter in letters if letter not in "xyz")
        assert [place // rules.values for place in places] == list(range(len(rules.attributes)))
        found.append((tuple(place % rules.values for place in places), "ABCDEF".index(label)))
    return found


@pytest.mark.parametrize("rules", [RULES, TINY, Rules((0.5, 0.3, 0.2), shots=3, fillers=0)])
def test_a_prompt_is_what_it_says(rules):
    """Oracle: the text itself. Some attribute and mapping explain every label of a prompt."""
    prompts = rules.draw(50, np.random.default_rng(0))
    assert prompts.ids.shape == (50, rules.length)
    for text, asked, labels in zip(texts(prompts, rules), prompts.asked, prompts.labels, strict=True):
        assert [text[place] for place in asked] == [":"] * (rules.shots + 1)
        assert [text[place + 1] for place in asked] == ["ABC"[label] for label in labels]
        assert text.count("\n") == rules.shots + 1
        assert sum(text.count(filler) for filler in "xyz") == rules.fillers
        explained = []
        for attribute in range(len(rules.attributes)):
            said = defaultdict(set)
            for item, label in items_of(text, rules):
                said[item[attribute]].add(label)
            explained.append(all(len(labels) == 1 for labels in said.values()))
        assert any(explained)


def test_draws_have_the_shares_that_they_should():
    """Oracle: the prior, by 5 standard errors: of letters, of the deciding attribute, of the usual mapping."""
    rules = Rules(attributes=(0.7, 0.3), values=3, usual=0.4, shots=5, fillers=6)
    count = 4000
    found = [items_of(text, rules) for text in texts(rules.draw(count, np.random.default_rng(1)), rules)]
    values = np.array([[item for item, _ in words] for words in found])
    shares = [(values[..., attribute] == value).mean() for attribute in (0, 1) for value in (0, 1, 2)]
    assert np.abs(np.array(shares) - 1 / 3).max() < 5 * np.sqrt(2 / 9 / (6 * count))
    usual = [np.mean([all(label == item[a] for item, label in words) for words in found]) for a in (0, 1)]
    expected = []
    for decides, other in (rules.attributes, rules.attributes[::-1]):
        # The usual mapping of this attribute, or labels that are so by chance, exactly, over 6 words.
        mappings = np.array(list(itertools.product(range(3), repeat=3)))
        prior = np.full(27, 0.6 / 27) + 0.4 * (mappings == np.arange(3)).all(axis=1)
        agree = (mappings == np.arange(3)).mean(axis=1) ** 6
        by_other = (1 / 3) ** 6
        expected.append(decides * float(prior @ agree) + other * by_other)
    for share, wanted in zip(usual, expected, strict=True):
        assert abs(share - wanted) < 5 * np.sqrt(wanted * (1 - wanted) / count)


def test_the_best_accuracy_is_that_of_all_prompts_one_by_one():
    """Oracle: every sequence of words of a tiny family under every rule, and Bayes' formula as it is written."""
    rules, prior = TINY.table()
    assert rules.shape == (2 * 4, 4)
    assert prior.sum() == pytest.approx(1)
    for shots in range(3):
        total = 0.0
        for words in itertools.product(range(4), repeat=shots + 1):
            joint = defaultdict(float)
            for rule, weight in zip(rules, prior, strict=True):
                joint[tuple(rule[list(words)])] += weight / 4 ** (shots + 1)
            for seen in {labels[:-1] for labels in joint}:
                total += max(joint.get((*seen, label), 0.0) for label in (0, 1))
        assert TINY.best_accuracy()[shots] == pytest.approx(total, abs=1e-12)


def test_a_reader_that_knows_the_family_is_right_as_often_as_it_says():
    """Oracle: posteriors of drawn prompts, rule by rule; 4 standard errors."""
    rules, prior = RULES.table()
    count = 1500
    right = np.zeros(RULES.shots + 1)
    for text in texts(RULES.draw(count, np.random.default_rng(2)), RULES):
        left = prior.copy()
        for shot, (item, label) in enumerate(items_of(text, RULES)):
            says = rules[:, item[0] * RULES.values + item[1]]
            right[shot] += np.bincount(says, weights=left, minlength=3).argmax() == label
            left = left * (says == label)
    best = RULES.best_accuracy()
    assert np.all(np.abs(right / count - best) < 4 * np.sqrt(best * (1 - best) / count))
    assert np.all(np.diff(best) > 0.03)  # it grows with every example
    assert best[0] > 1 / 3 + 0.1  # and is above chance before any


@pytest.mark.parametrize("tokenizer", [character_tokenizer(RULES.characters, RULES.length), byte_tokenizer()])
def test_other_tokenizers_read_the_same_text(tokenizer):
    prompts = RULES.draw(5, np.random.default_rng(3))
    ids, asked, labels = prompt_ids(prompts, RULES, tokenizer)
    assert [tokenizer.decode(row) for row in ids] == texts(prompts, RULES)
    assert tokenizer.decode(labels) == "ABC"
    np.testing.assert_array_equal(asked.numpy(), prompts.asked)


def test_what_a_tokenizer_puts_before_a_sequence_is_there():
    class Framed:
        """A character's code point, after 1 where special tokens are asked for."""

        def __call__(self, text, add_special_tokens):
            return {"input_ids": [1] * add_special_tokens + [ord(c) for c in text] + [2] * add_special_tokens}

    prompts = RULES.draw(4, np.random.default_rng(4))
    ids, asked, labels = prompt_ids(prompts, RULES, Framed())
    assert ids[:, 0].tolist() == [1] * 4
    assert ["".join(map(chr, row)) for row in ids[:, 1:]] == texts(prompts, RULES)
    assert set(ids.gather(1, asked).flatten().tolist()) == {ord(":")}
    assert labels == [ord("A"), ord("B"), ord("C")]


def test_a_tokenizer_without_the_characters_is_refused():
    with pytest.raises(UsageError, match="needs a tokenizer with a token for each of"):
        prompt_ids(RULES.draw(1, np.random.default_rng(0)), RULES, character_tokenizer("abc", 36))
