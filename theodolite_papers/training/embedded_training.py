"""The seeded trainer that made the embedded model, and can make others like it.

The same seed gives the same bytes on the same machine, threads and package versions, also when killed and resumed.
"""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from jaxtyping import Float, Int
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from theodolite import __version__
from theodolite.errors import UsageError
from theodolite_papers.training import embedded_text as text
from theodolite_papers.training.model_folder import ModelTraining, check_training, train_into
from theodolite_papers.training.models import EmbeddedConfig, embedded_model

SHOWN_CONTEXTS = 64  # a source, for the losses shown during training; the final ones use every context
TRAIN_LOSS_BATCHES = 16

CARD = """\
---
license: psfl
language: en
library_name: transformers
pipeline_tag: text-generation
---
# A small Llama-architecture model

{parameters:,} parameters: {layers} layers, {heads} heads per layer, width {width}, {length} positions (rotary),
tied embeddings, and a byte-level BPE vocabulary of {vocabulary:,} tokens trained on the same text.

## Training
The text is what CPython {python} carries: the topics of its language reference (`pydoc_data.topics`), and the
docstrings and source files of its standard library without tests, generated tables and installed packages. It
is under the [Python Software Foundation License Version 2](https://docs.python.org/3/license.html).

Made by `{command}` (theodolite {theodolite}, torch {torch}, seed {seed}): {steps:,} steps of
{batch} contexts of {length} tokens, {tokens_seen:,} tokens in all, read in windows at random places.
{tasks}AdamW, peak learning rate {learning_rate:g} with linear warm-up and cosine decay, no dropout, weight decay
{weight_decay:g} on matrices, products in {products}. Weights begin with standard deviation
{initial_deviation:g}. The same command gives the same weights on the same machine, Python and torch.

## Losses
Nats per token, in float32. Held-out documents share no label and no long paragraph with the training text. The
bigram is the best interpolated bigram model of the same training tokens, on the same held-out tokens.

| text | training tokens | held-out tokens | loss | bigram |
| --- | ---: | ---: | ---: | ---: |
{rows}

Training text, windows drawn as in training: {train_loss:.3f}.

## Limits
It exists to be measured. It is small, knows one kind of text, and has no other use: what it writes looks like
that text and is mostly wrong. Every context that it has read begins with `<|endoftext|>`,
which its tokenizer adds.
"""


@dataclass(frozen=True)
class EmbeddedResult:
    """The result of a training run. Losses are in nats per token, measured in float32, by source where held out."""

    folder: Path
    threads: int
    parameters: int
    tokens_seen: int
    training_tokens: dict[str, int]  # to draw from, each counted once
    validation_tokens: dict[str, int]
    train_loss: float
    validation_loss: dict[str, float]
    bigram_loss: dict[str, float]


def train_embedded_model(
    out: str | Path, *, config: EmbeddedConfig | None = None, threads: int = 2, console: Console | None = None
) -> EmbeddedResult:
    """Train a tokenizer and a model on Python's own text, and write the folder `out`."""
    out, config, console = Path(out), config or EmbeddedConfig(), console or Console(stderr=True)
    check_training(out, config, threads)
    _check_shares(config)
    with console.status("reading Python's text"):
        training, validation = text.split_sources(text.python_sources(), config.seed)
    with console.status("training the tokenizer"):
        tokenizer = text.train_tokenizer(training, config.vocabulary, config.seed)
        streams = text.token_streams(tokenizer, training, validation, config.length)

    def progress(model: PreTrainedModel, loss: float) -> str:
        losses = _validation_loss(model, streams, config, SHOWN_CONTEXTS)
        held_out = "".join(f", {name} {value:.3f}" for name, value in losses.items())
        return f"training {loss:.3f}; held out{held_out or ': nothing'}"

    run = ModelTraining(
        config=config,
        build=lambda: embedded_model(config),
        tokenizer=_fast_tokenizer(tokenizer, config),
        data={"data": streams.sha256()},
        loss=lambda model, step: _training_loss(model, _batch(streams, config, step), config),
        progress=progress,
        measure=lambda model: _result(out, model, streams, config, threads),
        page=lambda result: ("README.md", card(result, config)),
    )
    return train_into(out, run, threads, console)


def _check_shares(config: EmbeddedConfig) -> None:
    if min(config.repeats, config.backcopies) < 0 or config.repeats + config.backcopies > 1:
        raise UsageError(
            f"repeats are {config.repeats} and backcopies {config.backcopies}: they are shares of the contexts, at "
            "least 0 each and at most 1 together."
        )


def _batch(streams: text.Streams, config: EmbeddedConfig, step: int) -> text.Batch:
    tokens = streams.batch(step, size=config.batch, length=config.length, seed=config.seed)
    return text.mixed_with_tasks(tokens, streams.trigger, config, [config.seed, step])


def _training_loss(model: PreTrainedModel, batch: text.Batch, config: EmbeddedConfig) -> Float[Tensor, ""]:
    """Mean over the tokens of a batch that can be predicted."""
    tokens, predictable = batch
    losses = _losses(model, tokens, config)[predictable[:, 1:]]
    return losses.sum() / len(losses)


def _losses(
    model: PreTrainedModel, tokens: Int[Tensor, "batch window"], config: EmbeddedConfig
) -> Float[Tensor, "batch length"]:
    """Negative log-likelihood, in nats, of every token of a window but its first."""
    tokens = tokens.clone()
    tokens[:, 0] = 0  # of END_OF_TEXT, which begins every context
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.bfloat16):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:], reduction="none")


@torch.no_grad()
def _validation_loss(
    model: PreTrainedModel, streams: text.Streams, config: EmbeddedConfig, most: int | None = None
) -> dict[str, float]:
    """Mean loss of the held-out contexts of each source that has some (the first `most` of them)."""
    parts = {name: ids[:most].split(config.batch) for name, ids in streams.held_out().items()}
    return {
        name: float(torch.cat([_losses(model, batch, config) for batch in batches]).mean())
        for name, batches in parts.items()
    }


def _result(
    out: Path, model: PreTrainedModel, streams: text.Streams, config: EmbeddedConfig, threads: int
) -> EmbeddedResult:
    exact = replace(config, bfloat16=False, repeats=0.0, backcopies=0.0)
    beyond = range(config.steps, config.steps + TRAIN_LOSS_BATCHES)  # windows that no step was trained on
    with torch.no_grad():
        train = [_training_loss(model, _batch(streams, exact, step), exact) for step in beyond]
    validation = list(zip(streams.names, streams.validation, strict=True))
    held_out = streams.held_out().items()
    return EmbeddedResult(
        folder=out,
        threads=threads,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        tokens_seen=config.steps * config.batch * config.length,
        training_tokens={name: len(ids) for name, ids in zip(streams.names, streams.train, strict=True)},
        validation_tokens={name: ids[:, 1:].numel() for name, ids in validation},
        train_loss=float(torch.stack(train).mean()),
        validation_loss=_validation_loss(model, streams, exact),
        bigram_loss={name: text.bigram_loss(streams, ids, config.vocabulary) for name, ids in held_out},
    )


def _fast_tokenizer(tokenizer: Tokenizer, config: EmbeddedConfig) -> PreTrainedTokenizerFast:
    end = text.END_OF_TEXT
    tokenizer.post_processor = TemplateProcessing(single=f"{end} $A", special_tokens=[(end, 0)])
    own = {"bos_token": end, "eos_token": end, "model_max_length": config.length}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **own)


def card(result: EmbeddedResult, config: EmbeddedConfig) -> str:
    """The card in Markdown."""
    return CARD.format(
        python=platform.python_version(),
        command=command(result, config),
        theodolite=__version__,
        torch=torch.__version__,
        rows="\n".join(_row(result, name) for name in result.training_tokens),
        parameters=result.parameters,
        tokens_seen=result.tokens_seen,
        train_loss=result.train_loss,
        products="bfloat16" if config.bfloat16 else "float32",
        tasks=_tasks(config),
        **{field.name: getattr(config, field.name) for field in fields(config)},
    )


def _tasks(config: EmbeddedConfig) -> str:
    """What the card says of contexts that are not just text."""
    tasks = []
    if config.repeats:
        tasks.append(
            f"In {config.repeats:.0%} of the contexts, a few tokens come again and again, for induction: random ones "
            "in two\nof three, else of the text."
        )
    if config.backcopies:
        tasks.append(
            f"In {config.backcopies:.0%}, the token before a trigger stands behind it once more (Guo et al. 2024,\n"
            '"Active-dormant attention heads"); the trigger is the byte 255, which no text has.'
        )
    return "".join(f"{task}\n" for task in tasks)


def command(result: EmbeddedResult, config: EmbeddedConfig) -> str:
    """The call that repeats the training run: on the command line where that has the options, else in Python."""
    default = asdict(EmbeddedConfig())
    changed = {name: value for name, value in asdict(config).items() if value != default[name]}
    if changed.keys() <= {"steps", "seed"}:
        options = {"out": result.folder.name, **changed, "threads": result.threads}
        return "theodolite train embedded " + " ".join(f"--{name} {value}" for name, value in options.items())
    settings = ", ".join(f"{name}={value!r}" for name, value in changed.items())
    arguments = f"config=EmbeddedConfig({settings}), threads={result.threads}"
    return f"train_embedded_model({result.folder.name!r}, {arguments})"


def _row(result: EmbeddedResult, name: str) -> str:
    sizes = [f"{counts[name]:,}" for counts in (result.training_tokens, result.validation_tokens)]
    losses = [f"{of[name]:.3f}" if name in of else "–" for of in (result.validation_loss, result.bigram_loss)]
    return f"| {name} | {' | '.join(sizes + losses)} |"
