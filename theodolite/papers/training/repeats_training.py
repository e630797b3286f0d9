"""Random letters, twice, for the small trainer: the task that an induction head solves and nothing else does."""

from __future__ import annotations

import hashlib
import string
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from theodolite.corpus.few_shot_task import TEST_STREAM
from theodolite.papers.training.models import TaskModelConfig
from theodolite.papers.training.tasks import IGNORED, Batch

NAME = "repeats"

DEFAULT = TaskModelConfig(2, 4, 64, 32, 3000, 3e-3, "cosine", bfloat16=False)
"""Two layers, the fewest with which a head can look for what came before: two minutes on one core."""

CHECKED = 256
QUICK = 32


@dataclass(frozen=True)
class Repeats:
    """Letters at random, and the same again from a random place on, so that no fixed distance gives them away.

    Attributes:
        letters: how many there are. least, most: of the letters that are repeated, before padding by new ones.
    """

    letters: int = 24
    least: int = 8
    most: int = 24
    name: str = NAME

    @property
    def characters(self) -> str:
        """One token each."""
        return string.ascii_lowercase[: self.letters]

    @property
    def length(self) -> int:
        """Of two copies."""
        return 2 * self.most

    @property
    def sha256(self) -> str:
        """Of the sizes: all else follows from the seed."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def draw(self, count: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Texts (count, length), and the length of what each repeats (count,): it comes again and again to the end."""
        period = random.integers(self.least, self.most + 1, size=count)
        letters = random.integers(self.letters, size=(count, self.most))
        place = np.arange(self.length) % period[:, None]
        return np.take_along_axis(letters, place, axis=1), period

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """New texts at every step; the loss is of letters that came before."""
        return self._asked(*self.draw(size, np.random.default_rng([seed, step])))

    def quick_score(self, model: PreTrainedModel) -> str:
        """Accuracy on a few new texts."""
        return f"accuracy {self.accuracy(model, QUICK):.3f}"

    def measure(self, model: PreTrainedModel) -> dict[str, Any]:
        """Share of right letters where they repeat, on texts that no step drew."""
        return {"tested": CHECKED, "accuracy": self.accuracy(model, CHECKED), "chance": 1 / self.letters}

    @torch.no_grad()
    def accuracy(self, model: PreTrainedModel, count: int) -> float:
        """On texts that no step drew."""
        inputs, targets = self._asked(*self.draw(count, np.random.default_rng([1, TEST_STREAM])))
        answers = model(input_ids=inputs, use_cache=False).logits.argmax(-1)
        return float((answers == targets)[targets != IGNORED].double().mean())

    def _asked(
        self, ids: np.ndarray, period: np.ndarray
    ) -> tuple[Int[Tensor, "count length"], Int[Tensor, "count length"]]:
        """What is read, and what should follow where it is known: from the second letter of the repetition on."""
        rows = torch.from_numpy(ids)
        known = torch.arange(1, self.length) > torch.from_numpy(period)[:, None]
        return rows[:, :-1], torch.where(known, rows[:, 1:], IGNORED)
