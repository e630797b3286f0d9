"""The bigram-backcopy task of Guo et al. 2024 for the small trainer: why sinks, value drains and large norms arise.

A text is a chain of bigrams, but for a few triggers, after which comes again the token before them. A head that looks
one token back solves the copies; at all other tokens it has nothing to do, and is kept quiet by the first token.
"""

from __future__ import annotations

import functools
import hashlib
import string
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from theodolite.corpus.few_shot_task import TEST_STREAM
from theodolite.papers.training.models import TaskModelConfig
from theodolite.papers.training.tasks import Batch

NAME = "backcopy"

BEGIN, TRIGGERS = "^", "!?"
"""The first token of every text, and after what the token before comes again."""

SERIES = 8
"""Parts of a training run, evenly spaced, after each of which a series keeps the weights."""

RATES = {"adamw": 3e-3, "sgd": 0.3}
"""By optimizer: an update of AdamW is of the rate's size, one of SGD shrinks with the gradient."""

DEFAULT = TaskModelConfig(
    1,
    1,
    32,
    32,
    2000,
    RATES["adamw"],
    "none",
    weight_decay=0.0,
    bfloat16=False,
    series=True,
    checkpoint_every=500,
)
"""Layers, heads, width, texts per step, steps, rate: a minute on one core. The rate is constant, so that growth is not
its decay's."""

CHECKED = 256
"""Texts on which a model is measured."""


@dataclass(frozen=True)
class Backcopy:
    """The next token of a chain of bigrams with triggers.

    Attributes:
        letters: tokens besides the first one and the triggers. context: tokens of a text, the first one included.
        concentration: of the Dirichlet distribution that the bigrams of each letter are drawn from.
        triggers: the share of triggers among what follows a letter.
    """

    letters: int = 16
    context: int = 48
    concentration: float = 0.3
    triggers: float = 0.15
    name: str = NAME

    @property
    def characters(self) -> str:
        """One token each: the first one, the triggers, the letters."""
        return BEGIN + TRIGGERS + string.ascii_lowercase[: self.letters]

    @property
    def length(self) -> int:
        """Of a text and the token after it."""
        return self.context + 1

    @property
    def sha256(self) -> str:
        """Of what the bigrams are drawn by: all else follows from the seed."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    @functools.cached_property
    def bigrams(self) -> Float[np.ndarray, "letters characters"]:
        """What follows each letter, the same for every model; never the first token."""
        random = np.random.default_rng([0, TEST_STREAM])
        of_letters = random.dirichlet([self.concentration] * self.letters, size=self.letters)
        of_triggers = np.full((self.letters, len(TRIGGERS)), self.triggers / len(TRIGGERS))
        none = np.zeros((self.letters, 1))
        return np.concatenate([none, of_triggers, (1 - self.triggers) * of_letters], axis=1)

    def draw(self, count: int, random: np.random.Generator) -> Int[np.ndarray, "count length"]:
        """New texts; the token after the first one is any letter."""
        first_letter = 1 + len(TRIGGERS)
        cumulative = self.bigrams.cumsum(axis=1)
        ids = np.zeros((count, self.length), dtype=np.int64)
        ids[:, 1] = first_letter + random.integers(self.letters, size=count)
        for place in range(2, self.length):
            last = ids[:, place - 1]
            rows = cumulative[np.maximum(last - first_letter, 0)]
            drawn = (rows < random.random((count, 1))).sum(axis=1).clip(max=rows.shape[1] - 1)
            ids[:, place] = np.where(self.is_trigger(last), ids[:, place - 2], drawn)
        return ids

    def is_trigger(self, ids: np.ndarray) -> Bool[np.ndarray, "*places"]:
        """Whether tokens are triggers."""
        return (ids > 0) & (ids <= len(TRIGGERS))

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """New texts at every step."""
        rows = torch.from_numpy(self.draw(size, np.random.default_rng([seed, step])))
        return rows[:, :-1], rows[:, 1:]

    def quick_score(self, model: PreTrainedModel) -> str:
        """Losses beyond what is possible, on a few new texts."""
        return ", ".join(f"{name} {value:.3f}" for name, value in self.losses(model, 32).items())

    def measure(self, model: PreTrainedModel) -> dict[str, Any]:
        """Nats beyond the best possible, at triggers and elsewhere, on texts that no step drew."""
        return {"tested": CHECKED} | self.losses(model, CHECKED)

    def texts(self, count: int) -> Int[Tensor, "count length"]:
        """Texts that no step drew."""
        return torch.from_numpy(self.draw(count, np.random.default_rng([1, TEST_STREAM])))

    @torch.no_grad()
    def losses(self, model: PreTrainedModel, count: int) -> dict[str, float]:
        """copy_loss: nats at triggers, where the next token is certain; bigram_loss: KL from the bigrams at letters."""
        rows = self.texts(count)
        inputs, targets = rows[:, :-1], rows[:, 1:]
        logits = model(input_ids=inputs, use_cache=False).logits.double()
        losses = cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        ids = inputs.numpy()
        trigger = torch.from_numpy(self.is_trigger(ids))
        letter = torch.from_numpy(ids > len(TRIGGERS))
        bigrams = torch.from_numpy(self.bigrams[ids[letter.numpy()] - 1 - len(TRIGGERS)])
        log_model = logits[letter].log_softmax(-1)
        divergence = torch.special.xlogy(bigrams, bigrams) - bigrams * log_model
        return {
            "copy_loss": float(losses[trigger].mean()),
            "bigram_loss": float(divergence.sum(-1).mean()),
        }


def series_of(steps: int) -> tuple[int, ...]:
    """Steps whose weights a series keeps: evenly spaced, so that growth can be seen to be linear."""
    return tuple(sorted({round(steps * part / SERIES) for part in range(SERIES + 1)}))
