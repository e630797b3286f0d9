"""Few-shot prompts: labelled words under a hidden rule that is drawn anew for every prompt.

A word is a few letters in any order: one per attribute, and meaningless fillers. One attribute determines the label,
through a map from its values. The Bayes-optimal accuracy after k examples is computed exactly.
"""

from __future__ import annotations

import itertools
import string
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from theodolite.corpus.spec import FEW_SHOT
from theodolite.errors import UsageError

NAME = FEW_SHOT

BREAK, ASK = "\n", ":"
"""A word begins after a line break and ends with a colon; its label follows."""

FILLERS = "xyz"

LETTERS = string.ascii_lowercase.removesuffix(FILLERS)

TEST_STREAM, CORPUS_STREAM = 1 << 40, 2 << 40
"""Second seeds of test prompts and of prompts as a corpus; those of training are below 2³²."""


@dataclass(frozen=True)
class Prompts:
    """N prompts of k examples and a question, as indices of `Rules.characters`.

    Every word is a question with the words before it as examples, so one prompt asks at 0, 1, …, k shots.

    Attributes:
        ids: characters, (N, length).
        asked: where the colons are, (N, k + 1): what follows them is the label.
        labels: the correct one, (N, k + 1), from 0.
    """

    ids: Int[np.ndarray, "prompts length"]
    asked: Int[np.ndarray, "prompts words"]
    labels: Int[np.ndarray, "prompts words"]


@dataclass(frozen=True)
class Rules:
    """The family that rules are drawn from, and the form of a prompt.

    Attributes:
        attributes: how likely each attribute is the one that decides.
        values: letters of an attribute, and labels. Any mapping of the one to the other is as likely as another …
        usual: … but for the usual one (first letter to first label, and so on), which has this probability more.
        shots: examples before the last word.
        fillers: letters without meaning in a prompt, each in any word, so that words differ in length.
    """

    attributes: tuple[float, ...] = (0.6, 0.4)
    values: int = 3
    usual: float = 0.3
    shots: int = 5
    fillers: int = 6

    @property
    def characters(self) -> str:
        """The alphabet: line break, colon, labels, the letters of every attribute, fillers."""
        letters = LETTERS[: len(self.attributes) * self.values]
        return BREAK + ASK + string.ascii_uppercase[: self.values] + letters + FILLERS

    @property
    def length(self) -> int:
        """Characters of a prompt, the label of the last word included."""
        return (self.shots + 1) * (3 + len(self.attributes)) + self.fillers

    @property
    def label_ids(self) -> list[int]:
        """The places of the labels among `characters`."""
        return list(range(2, 2 + self.values))

    def draw(self, count: int, random: np.random.Generator) -> Prompts:
        """Draw prompts, each with its own rule."""
        words, attributes = self.shots + 1, len(self.attributes)
        rules, prior = self.table()
        items = random.integers(self.values, size=(count, words, attributes))
        rule = random.choice(len(rules), size=count, p=prior)
        labels = rules[rule[:, None], self._number(items)]
        letters = 2 + self.values * (1 + np.arange(attributes)) + items
        first_filler = 2 + self.values * (1 + attributes)
        fillers = first_filler + random.integers(len(FILLERS), size=(count, self.fillers))
        home = random.integers(words, size=(count, self.fillers))
        # A place is the number of its word, plus 0 for the break, 0.1 … 0.9 for letters, and then colon and label.
        word = np.broadcast_to(np.arange(words), (count, words))
        scattered = np.concatenate([word.repeat(attributes, 1), home], axis=1)
        sort_keys = [word, word + 0.92, word + 0.96, scattered + random.uniform(0.1, 0.9, scattered.shape)]
        marks = [np.zeros_like(labels), np.ones_like(labels), 2 + labels]
        order = np.argsort(np.concatenate(sort_keys, axis=1), axis=1)
        tokens = np.concatenate([*marks, letters.reshape(count, -1), fillers], axis=1)
        ids = np.take_along_axis(tokens, order, axis=1)
        return Prompts(ids, np.nonzero(ids == 1)[1].reshape(count, words), labels)

    def table(self) -> tuple[Int[np.ndarray, "rules items"], Float[np.ndarray, " rules"]]:
        """List the label of every item under every rule, and how likely the rule is.

        An item is one value of each attribute, numbered as digits of a number of base `values`.
        """
        items = np.array(list(itertools.product(range(self.values), repeat=len(self.attributes))))
        mappings = np.array(list(itertools.product(range(self.values), repeat=self.values)))
        rules = np.concatenate([mappings[:, items[:, attribute]] for attribute in range(items.shape[1])])
        mapping = np.full(len(mappings), (1 - self.usual) / len(mappings))
        mapping[(mappings == np.arange(self.values)).all(axis=1)] += self.usual
        return rules, np.outer(self.attributes, mapping).ravel()

    def best_accuracy(self) -> Float[np.ndarray, " words"]:
        """Compute the Bayes-optimal accuracy after 0, 1, …, `shots` examples, given the family of rules: exact.

        E max_y P(label y | examples). What examples leave is the set of rules that agree with them all; the sets that
        can be reached with k examples are followed together with how many sequences of examples reach each.
        """
        rules, prior = self.table()
        # Columns: an item and a label each.
        says = (rules[..., None] == np.arange(self.values)).reshape(len(rules), -1)
        left = np.ones((1, len(rules)), dtype=bool)
        weight: np.ndarray = np.ones(1)
        accuracy = []
        for _ in range(self.shots + 1):
            weight = weight / rules.shape[1]  # items are all as likely
            mass = ((left * prior) @ says).reshape(len(left), -1, self.values)
            accuracy.append(weight @ mass.max(axis=2).sum(axis=1))
            state, event = np.nonzero(mass.reshape(len(left), -1))
            left, into = _distinct(left[state] & says.T[event])
            weight = np.bincount(into, weights=weight[state])
        return np.array(accuracy)

    def _number(self, items: Int[np.ndarray, "*places attributes"]) -> Int[np.ndarray, "*places"]:
        return items @ self.values ** np.arange(items.shape[-1])[::-1]


RULES = Rules()
"""The family of the task."""


def prompt_ids(
    prompts: Prompts, rules: Rules, tokenizer: Any
) -> tuple[Int[Tensor, "prompts positions"], Int[Tensor, "prompts words"], list[int]]:
    """Tokenize the prompts: (ids, where the colons are, ids of the labels).

    Every character is a token of its own, after what the tokenizer puts before a sequence.

    Raises:
        UsageError: a character has no token of its own.
    """
    spelled = [list(tokenizer(c, add_special_tokens=False)["input_ids"]) for c in rules.characters]
    if any(len(ids) != 1 for ids in spelled) or len({ids[0] for ids in spelled}) < len(spelled):
        raise UsageError(
            f"{NAME} needs a tokenizer with a token for each of {rules.characters!r}, as `theodolite train` makes"
        )
    id_of = np.array(spelled)[:, 0]
    framed = list(tokenizer(rules.characters[-1], add_special_tokens=True)["input_ids"])
    before = framed[: framed.index(id_of[-1])]
    prefix = np.tile(before, (len(prompts.ids), 1)).astype(np.int64)
    ids = np.concatenate([prefix, id_of[prompts.ids]], axis=1)
    asked = torch.from_numpy(prompts.asked + len(before))
    return torch.from_numpy(ids), asked, id_of[rules.label_ids].tolist()


def _distinct(rows: Bool[np.ndarray, "rows columns"]) -> tuple[np.ndarray, np.ndarray]:
    """Find the distinct rows, and which of them each row is."""
    packed = np.packbits(rows, axis=1)
    _, first, into = np.unique(packed, axis=0, return_index=True, return_inverse=True)
    return rows[first], into.ravel()
