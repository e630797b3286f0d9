"""The model card of a model that `train_embedded_model` made: what was trained, on what, with which losses.

It states what the training knows. What the model's heads do is for a survey to say.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from theodolite import __version__
from theodolite.papers.training.models import EmbeddedConfig

PYTHON_TEXT = """\
The text is what CPython {python} carries: the topics of its language reference (`pydoc_data.topics`), and the
docstrings and source files of its standard library without tests, generated tables and installed packages. It
is under the [Python Software Foundation License Version 2](https://docs.python.org/3/license.html).
"""

CARD = """\
---
license: {license}
language: en
library_name: transformers
pipeline_tag: text-generation
---
# A small GPT-2-architecture model

{parameters:,} parameters: {layers} layers, {heads} heads per layer, width {width}, {length} learned positions,
tied embeddings, and a byte-level BPE vocabulary of {vocabulary:,} tokens trained on the same text.

## Training
{data}
Made by `{command}` (theodolite {theodolite}, torch {torch}, seed {seed}): {steps:,} steps of
{batch} contexts of {length} tokens, {tokens_seen:,} tokens in all, read in windows at random places.
AdamW, peak learning rate {learning_rate:g} with linear warm-up and cosine decay, no dropout, weight decay
{weight_decay:g} on matrices, products in {products}. The same command gives the same weights on the same
machine, Python and torch.

## Losses
Nats per token, in float32. Held-out documents share no label and no long paragraph with the training text. The
bigram is the best interpolated bigram model of the same training tokens, on the same held-out tokens.

| text | training tokens | held-out tokens | loss | bigram |
| --- | ---: | ---: | ---: | ---: |
{rows}

Training text, windows drawn as in training: {train_loss:.3f}.

## Limits
It exists to be measured. It is small, knows one kind of text, and has no other use: what it writes looks like
that text and is mostly wrong. It was trained without a beginning-of-sequence token.
"""


@dataclass(frozen=True)
class EmbeddedResult:
    """The result of a training run. Losses are in nats per token, measured in float32, by source where held out.

    `train_loss` is of windows of the training text, drawn as in training. `bigram_loss` is of the best
    interpolated bigram model of the same training tokens, on the same validation tokens as `validation_loss`.
    """

    folder: Path
    threads: int
    parameters: int
    steps: int
    tokens_seen: int
    training_tokens: dict[str, int]  # to draw from, each counted once
    validation_tokens: dict[str, int]
    train_loss: float
    validation_loss: dict[str, float]
    bigram_loss: dict[str, float]


def card(result: EmbeddedResult, config: EmbeddedConfig, python_text: bool) -> str:
    """The card in Markdown; `python_text` says that the text was `python_sources()`."""
    python = platform.python_version()
    return CARD.format(
        license="psfl" if python_text else "unknown",
        data=PYTHON_TEXT.format(python=python) if python_text else "The text was supplied by the user.\n",
        command=command(result, config, python_text),
        theodolite=__version__,
        torch=torch.__version__,
        rows="\n".join(_row(result, name) for name in result.training_tokens),
        parameters=result.parameters,
        tokens_seen=result.tokens_seen,
        train_loss=result.train_loss,
        products="bfloat16" if config.bfloat16 else "float32",
        **{field.name: getattr(config, field.name) for field in fields(config)},
    )


def command(result: EmbeddedResult, config: EmbeddedConfig, python_text: bool) -> str:
    """The call that repeats the training run: on the command line where that has the options, else in Python."""
    changed = {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if getattr(config, field.name) != field.default
    }
    if python_text and changed.keys() <= {"steps", "seed"}:
        options = {"out": result.folder.name, **changed, "threads": result.threads}
        return "theodolite train embedded " + " ".join(f"--{name} {value}" for name, value in options.items())
    settings = ", ".join(f"{name}={value!r}" for name, value in changed.items())
    text = "" if python_text else "sources=…, "
    arguments = f"{text}config=EmbeddedConfig({settings}), threads={result.threads}"
    return f"train_embedded_model({result.folder.name!r}, {arguments})"


def _row(result: EmbeddedResult, name: str) -> str:
    losses = [result.validation_loss.get(name), result.bigram_loss.get(name)]
    shown = ["–" if loss is None else f"{loss:.3f}" for loss in losses]
    sizes = [f"{counts[name]:,}" for counts in (result.training_tokens, result.validation_tokens)]
    return f"| {name} | {' | '.join(sizes + shown)} |"
