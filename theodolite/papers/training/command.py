"""What `theodolite train embedded | characters | addition | few-shot` do, and what they say of the result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from theodolite.corpus.addition_task import parse_digits
from theodolite.papers.catch_tag_release.few_shot_training import DEFAULT, FewShot
from theodolite.papers.training.embedded_training import EmbeddedConfig, train_embedded_model
from theodolite.papers.training.task_models import PUBLISHED, TaskModelConfig, changed, train_task_model
from theodolite.papers.training.tasks import Additions, Characters, Task


def train_embedded(
    out: Path, options: dict[str, Any], *, seed: int, threads: int, console: Console
) -> list[str]:
    """Train the model inside this package again; `options` that are None are as it was trained.

    Raises:
        UsageError, WorkError: as `train_embedded_model`.
    """
    config = replace(
        EmbeddedConfig(seed=seed), **{name: value for name, value in options.items() if value is not None}
    )
    result = train_embedded_model(out, config=config, threads=threads, console=console)
    return [
        f"{source}: validation loss {loss:.3f} nats per token (bigram model {result.bigram_loss[source]:.3f})"
        for source, loss in result.validation_loss.items()
    ]


def train_characters(
    out: Path, text: Path, options: dict[str, Any], *, seed: int, threads: int, console: Console
) -> list[str]:
    """Train on the characters of a text; `options` that are None are as published.

    Raises:
        UsageError: the text cannot be read, or as `train_task_model`.
        WorkError: as `train_task_model`.
    """
    task = Characters.of_file(text)
    result = _train(PUBLISHED["characters"], out, task, options, seed=seed, threads=threads, console=console)
    return [
        f"loss {result['validation_loss']:.3f} nats per character held out, "
        f"{result['training_loss']:.3f} on the training text"
    ]


def train_addition(
    out: Path, digits: str, options: dict[str, Any], *, seed: int, threads: int, console: Console
) -> list[str]:
    """Train on sums of numbers of a range of digits; `options` that are None are as published.

    Raises:
        UsageError: `digits` is no range, or as `train_task_model`.
        WorkError: as `train_task_model`.
    """
    task = Additions(parse_digits(digits))
    result = _train(PUBLISHED["addition"], out, task, options, seed=seed, threads=threads, console=console)
    shorter = ", ".join(
        f"{n} digit{'' if n == '1' else 's'} {share:.1%}" for n, share in result["accuracy_by_digits"].items()
    )
    return [f"accuracy {result['accuracy']:.1%} in distribution; {shorter}"]


def train_few_shot(
    out: Path, options: dict[str, Any], *, seed: int, threads: int, console: Console
) -> list[str]:
    """Train on prompts whose labels follow a hidden rule; `options` that are None are those of `few_shot.DEFAULT`.

    Raises:
        UsageError, WorkError: as `train_task_model`.
    """
    result = _train(DEFAULT, out, FewShot(), options, seed=seed, threads=threads, console=console)
    return [
        f"{shots} example{'' if shots == 1 else 's'}: accuracy {share:.1%} (the best possible: {best:.1%})"
        for shots, (share, best) in enumerate(
            zip(result["accuracy_by_shots"], result["best_by_shots"], strict=True)
        )
    ]


def _train(
    settings: TaskModelConfig,
    out: Path,
    task: Task,
    options: dict[str, Any],
    *,
    seed: int,
    threads: int,
    console: Console,
) -> dict[str, Any]:
    config = replace(changed(settings, options.items()), seed=seed)
    return train_task_model(out, task, config, threads=threads, console=console)
