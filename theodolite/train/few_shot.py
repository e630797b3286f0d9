"""The few-shot task of `rules.py` for the small trainer, and how often a model answers it right.

The loss is of the labels and nothing else: the letters of a word cannot be known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedModel

from theodolite.errors import UsageError
from theodolite.reading import TOKENS_A_BATCH
from theodolite.rules import NAME, RULES, TESTED, Rules
from theodolite.train.small import SmallConfig
from theodolite.train.small_tasks import GLANCED, IGNORED, Batch

DEFAULT = SmallConfig(4, 4, 128, 32, 8000, 1e-3, "cosine", positions="rotary")
"""Layers, heads, width, prompts a step, steps, rate: a quarter of an hour on one core."""

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
        asked = torch.from_numpy(prompts.asked)
        targets = torch.full((size, self.length - 1), IGNORED)
        return ids[:, :-1], targets.scatter(1, asked, ids.gather(1, asked + 1))

    def glance(self, model: PreTrainedModel) -> str:
        """Accuracy on a few new prompts, by number of examples."""
        return "accuracy " + " ".join(f"{share:.2f}" for share in self._accuracy(model, GLANCED))

    def measure(self, model: PreTrainedModel) -> dict[str, Any]:
        """Share of right answers after 0, 1, … examples, on new prompts, and the best that is possible."""
        return {
            "tested": CHECKED,
            "accuracy_by_shots": self._accuracy(model, CHECKED),
            "best_by_shots": self.rules.best_accuracy().tolist(),
        }

    def _accuracy(self, model: PreTrainedModel, count: int) -> list[float]:
        """On prompts that no step drew."""
        prompts = self.rules.draw(count, np.random.default_rng([0, TESTED]))
        ids, asked, labels = (torch.from_numpy(part) for part in (prompts.ids, prompts.asked, prompts.labels))
        right = right_answers(model, ids, asked, labels, self.rules.label_ids)
        return right.double().mean(dim=0).tolist()


@torch.no_grad()
def right_answers(
    model: PreTrainedModel,
    ids: Int[Tensor, "prompts positions"],
    asked: Int[Tensor, "prompts words"],
    labels: Int[Tensor, "prompts words"],
    label_ids: list[int],
    *,
    batch: int | None = None,
    show_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Bool[Tensor, "prompts words"]:
    """Whether the likeliest of the labels is the right one, behind every colon.

    Args:
        model: causal, so that a word is not told what follows it.
        ids: prompts in the model's own ids; asked: where the colons are; labels: the right ones, from 0.
        label_ids: the model's ids of the labels.
        batch: prompts a forward pass; None: 4096 tokens' worth.
        show_progress: told (done, total) prompts before each batch; it may raise to stop.
    """
    batch = batch_of_prompts(ids.shape[1], batch)
    right = []
    for first in range(0, len(ids), batch):
        show_progress(first, len(ids))
        part = slice(first, first + batch)
        logits = model(input_ids=ids[part].to(model.device), use_cache=False).logits[..., label_ids].cpu()
        told = logits.gather(1, asked[part, :, None].expand(-1, -1, len(label_ids)))
        right.append(told.argmax(dim=2) == labels[part])
    show_progress(len(ids), len(ids))
    return torch.cat(right)


def batch_of_prompts(length: int, batch: int | None) -> int:
    """The prompts of a forward pass: as asked for, or 4096 tokens' worth.

    Raises:
        UsageError: none would be read.
    """
    if batch is not None and batch < 1:
        raise UsageError(f"a batch of {batch} prompts reads nothing: use --batch 1 or more")
    return batch or max(1, TOKENS_A_BATCH // length)
