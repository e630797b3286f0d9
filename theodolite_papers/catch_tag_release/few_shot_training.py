"""The few-shot task of `few_shot_task.py` for the small trainer, and how often a model answers it right.

The loss is of the labels and nothing else: the letters of a word cannot be known.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from theodolite.corpus.few_shot_task import NAME, RULES, TEST_STREAM, Rules
from theodolite.evaluate.few_shot import right_answers
from theodolite_papers.training.models import TaskModelConfig
from theodolite_papers.training.tasks import IGNORED, QUICK_TEST, Batch

DEFAULT = TaskModelConfig(4, 4, 128, 32, 8000, 1e-3, "cosine", positions="rotary")
"""Layers, heads, width, prompts per step, steps, rate: 15 minutes on one core."""

CHECKED = 4000
"""Prompts on which a finished model is tested."""


@dataclass(frozen=True)
class FewShot:
    """The label of every word of a prompt, given the words and labels before it."""

    rules: Rules = RULES
    name: str = NAME

    @property
    def characters(self) -> str:
        """One token each."""
        return self.rules.characters

    @property
    def length(self) -> int:
        """Of a prompt; every one has the same."""
        return self.rules.length

    @property
    def sha256(self) -> str:
        """Of the family of rules: everything else follows from the seed."""
        return hashlib.sha256(repr(self.rules).encode()).hexdigest()

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """New prompts at every step, each with a rule of its own."""
        prompts = self.rules.draw(size, np.random.default_rng([seed, step]))
        ids = torch.from_numpy(prompts.ids)
        query_positions = torch.from_numpy(prompts.asked)
        targets = torch.full((size, self.length - 1), IGNORED)
        return ids[:, :-1], targets.scatter(1, query_positions, ids.gather(1, query_positions + 1))

    def quick_score(self, model: PreTrainedModel) -> str:
        """Accuracy on a few new prompts, by number of examples."""
        return "accuracy " + " ".join(f"{share:.2f}" for share in self._accuracy(model, QUICK_TEST))

    def measure(self, model: PreTrainedModel) -> dict[str, Any]:
        """Share of right answers after 0, 1, … examples, on new prompts, and the best that is possible."""
        return {
            "tested": CHECKED,
            "accuracy_by_shots": self._accuracy(model, CHECKED),
            "best_by_shots": self.rules.best_accuracy().tolist(),
        }

    def _accuracy(self, model: PreTrainedModel, count: int) -> list[float]:
        """On prompts that no step drew."""
        prompts = self.rules.draw(count, np.random.default_rng([0, TEST_STREAM]))
        ids, query_positions, labels = (
            torch.from_numpy(part) for part in (prompts.ids, prompts.asked, prompts.labels)
        )
        correct = right_answers(model, ids, query_positions, labels, self.rules.label_ids)
        return correct.double().mean(dim=0).tolist()
