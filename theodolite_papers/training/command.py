"""What `theodolite train embedded | characters | addition | few-shot` do, and what they say of the result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from theodolite.corpus.addition_task import parse_digits
from theodolite_papers.training.embedded_training import train_embedded_model
from theodolite_papers.training.models import EmbeddedConfig
from theodolite_papers.training.task_models import PUBLISHED, train_task_model
from theodolite_papers.training.tasks import FEW_SHOT, Additions, Characters, FewShot


def train_embedded(out: Path, options: dict[str, Any], *, seed: int, **running: Any) -> list[str]:
    """Train the model inside this package again."""
    result = train_embedded_model(out, config=EmbeddedConfig(**_given(options, seed)), **running)
    return [
        f"{source}: validation loss {loss:.3f} nats per token (bigram model {result.bigram_loss[source]:.3f})"
        for source, loss in result.validation_loss.items()
    ]


def train_characters(
    out: Path, text: Path, options: dict[str, Any], *, seed: int, **running: Any
) -> list[str]:
    """Train on the characters of a text."""
    config = replace(PUBLISHED["characters"], **_given(options, seed))
    result = train_task_model(out, Characters.of_file(text), config, **running)
    return [
        f"loss {result['validation_loss']:.3f} nats per character held out, "
        f"{result['training_loss']:.3f} on the training text"
    ]


def train_addition(
    out: Path, digits: str, options: dict[str, Any], *, seed: int, **running: Any
) -> list[str]:
    """Train on sums of numbers of a range of digits."""
    config = replace(PUBLISHED["addition"], **_given(options, seed))
    result = train_task_model(out, Additions(parse_digits(digits)), config, **running)
    shorter = ", ".join(
        f"{n} digit{'' if n == '1' else 's'} {share:.1%}" for n, share in result["accuracy_by_digits"].items()
    )
    return [f"accuracy {result['accuracy']:.1%} in distribution; {shorter}"]


def train_few_shot(out: Path, options: dict[str, Any], *, seed: int, **running: Any) -> list[str]:
    """Train on prompts whose labels follow a hidden rule."""
    result = train_task_model(out, FewShot(), replace(FEW_SHOT, **_given(options, seed)), **running)
    accuracies = zip(result["accuracy_by_shots"], result["best_by_shots"], strict=True)
    return [
        f"{shots} example{'' if shots == 1 else 's'}: accuracy {share:.1%} (the best possible: {best:.1%})"
        for shots, (share, best) in enumerate(accuracies)
    ]


def _given(options: dict[str, Any], seed: int) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None} | {"seed": seed}
