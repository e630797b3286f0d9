"""`theodolite train KIND`: which trainer a kind of model is made by, and what to say of the result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from theodolite.arithmetic import parse_digits
from theodolite.errors import UsageError
from theodolite.train.small import PUBLISHED, changed, train_small
from theodolite.train.small_tasks import Additions, Characters, Task
from theodolite.train.tiny import TinyConfig, train_tiny

EMBEDDED_OPTIONS = {"steps", "batch", "learning_rate"}


def train(
    kind: str,
    out: Path,
    *,
    text: Path | None,
    digits: str | None = None,
    options: dict[str, Any],
    seed: int,
    threads: int,
    console: Console,
) -> list[str]:
    """Train a model of a kind; `options` that are None are as published. Gives lines that say how good it is.

    Raises:
        UsageError: an unknown kind, or an option that the kind does not have.
        WorkError: as the trainers.
    """
    given = {name for name, value in options.items() if value is not None}
    if kind != "characters" and text is not None:
        raise UsageError(f"--text is for characters; {kind} has its own.")
    if kind != "addition" and digits is not None:
        raise UsageError(f"--digits is for addition; {kind} adds nothing.")
    if kind == "embedded":
        if given - EMBEDDED_OPTIONS:
            raise UsageError(f"--{min(given - EMBEDDED_OPTIONS)} is for characters and addition.")
        return _embedded(out, {name: options[name] for name in given}, seed, threads, console)
    if kind not in PUBLISHED:
        raise UsageError(f"'{kind}' is no kind of model; choose embedded, {' or '.join(PUBLISHED)}.")
    if kind == "characters" and text is None:
        raise UsageError("characters needs a text to read; give --text FILE.")
    task: Task = Characters.of_file(text) if text is not None else Additions(parse_digits(digits or "5-10"))
    config = replace(changed(PUBLISHED[kind], options.items()), seed=seed)
    return _measured(train_small(out, task, config, threads=threads, console=console))


def _embedded(out: Path, options: dict[str, Any], seed: int, threads: int, console: Console) -> list[str]:
    result = train_tiny(
        out, config=replace(TinyConfig(seed=seed), **options), threads=threads, console=console
    )
    return [
        f"{source}: validation loss {loss:.3f} nats a token (bigram model {result.bigram_loss[source]:.3f})"
        for source, loss in result.validation_loss.items()
    ]


def _measured(result: dict[str, Any]) -> list[str]:
    if "accuracy" in result:
        shorter = ", ".join(
            f"{n} digit{'' if n == '1' else 's'} {share:.1%}"
            for n, share in result["accuracy_by_digits"].items()
        )
        return [f"accuracy {result['accuracy']:.1%} in distribution; {shorter}"]
    return [
        f"loss {result['validation_loss']:.3f} nats a character held out, "
        f"{result['training_loss']:.3f} on the training text"
    ]
