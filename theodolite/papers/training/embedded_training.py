"""The seeded trainer that made the embedded model, and can make others like it.

`train_embedded_model` takes text, trains a byte-level BPE tokenizer and a model (`models.py`) on it with plain PyTorch,
and writes a folder that `transformers` opens. It is made for a few million parameters on a few processor cores: no
distribution, no other architectures, no options beyond `EmbeddedConfig`. The same seed gives the same bytes on the
same machine, number of threads and package versions, also when the run was killed and resumed in between: the order
of batches follows from (seed, step) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Float, Int
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from theodolite.errors import UsageError
from theodolite.papers.training.embedded_text import (
    END_OF_TEXT,
    Source,
    Streams,
    bigram_loss,
    python_sources,
    split_sources,
    token_streams,
    train_tokenizer,
)
from theodolite.papers.training.model_card import EmbeddedResult, card
from theodolite.papers.training.model_folder import ModelTraining, check_training, train_into
from theodolite.papers.training.models import EmbeddedConfig, embedded_model
from theodolite.papers.training.training_loop import LearningRate

WARM_UP = 0.04  # share of the steps
SHOWN_CONTEXTS = 64  # a source, for the losses shown during training; the final ones use every context
TRAIN_LOSS_BATCHES = 16


def train_embedded_model(
    out: str | Path,
    *,
    sources: Sequence[Source] | None = None,
    config: EmbeddedConfig | None = None,
    threads: int = 2,
    console: Console | None = None,
) -> EmbeddedResult:
    """Train a tokenizer and a model on `sources` (default: `python_sources()`), and write the folder `out`.

    A training run that was killed resumes from its last checkpoint (in `<out>.partial`) when it is called again
    with the same arguments. Raises `UsageError` when `out` exists, when a size, the seed or `threads` is
    impossible, when the text is too short, or when `<out>.partial` belongs to another training run; `WorkError`
    when the loss is no longer a number or a file cannot be written.
    """
    out, config = Path(out), config or EmbeddedConfig()
    check_training(out, config, threads)
    texts = python_sources() if sources is None else sources
    if not texts or any(source.share <= 0 for source in texts):
        raise UsageError("There must be at least one source of text, each with a positive share.")
    training, validation = split_sources(texts, config.seed)
    tokenizer = train_tokenizer(training, config.vocabulary, config.seed)
    streams = token_streams(tokenizer, training, validation, config.length)

    def progress(model: PreTrainedModel, loss: float) -> str:
        losses = _validation_loss(model, streams, config, SHOWN_CONTEXTS)
        held_out = "".join(f", {name} {value:.3f}" for name, value in losses.items())
        return f"training {loss:.3f}; held out{held_out or ': nothing'}"

    run = ModelTraining(
        config=config,
        build=lambda: embedded_model(config),
        tokenizer=_fast_tokenizer(tokenizer, config),
        data={"data": streams.sha256()},
        rate=learning_rate(config),
        loss=lambda model, step: _losses(model, _batch(streams, config, step), config).mean(),
        progress=progress,
        measure=lambda model: _result(out, model, streams, config, threads),
        page=lambda result: ("README.md", card(result, config, sources is None)),
    )
    return train_into(out, run, threads, console or Console(stderr=True))


def learning_rate(config: EmbeddedConfig) -> LearningRate:
    """Linear warm-up, then a cosine from `config.learning_rate` down to `FINAL_RATE` of it."""
    warm_up = max(1, round(WARM_UP * config.steps))
    return LearningRate(config.learning_rate, warm_up, "cosine", config.steps)


def _batch(streams: Streams, config: EmbeddedConfig, step: int) -> Int[Tensor, "batch window"]:
    return streams.batch(step, size=config.batch, length=config.length, seed=config.seed)


def _losses(
    model: PreTrainedModel, tokens: Int[Tensor, "batch window"], config: EmbeddedConfig
) -> Float[Tensor, "batch length"]:
    """Negative log-likelihood, in nats, of every token of a window but its first."""
    if config.no_op is not None:
        tokens = tokens.clone()
        tokens[:, 0] = 0  # of END_OF_TEXT
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.bfloat16):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:], reduction="none")


@torch.no_grad()
def _validation_loss(
    model: PreTrainedModel, streams: Streams, config: EmbeddedConfig, most: int | None = None
) -> dict[str, float]:
    """Mean loss of the held-out contexts of each source that has some (the first `most` of them)."""
    losses = {}
    for name, contexts in zip(streams.names, streams.validation, strict=True):
        if len(contexts):
            batches = contexts[:most].split(config.batch)
            losses[name] = float(torch.cat([_losses(model, batch, config) for batch in batches]).mean())
    return losses


def _result(
    out: Path, model: PreTrainedModel, streams: Streams, config: EmbeddedConfig, threads: int
) -> EmbeddedResult:
    exact = replace(config, bfloat16=False)
    beyond = range(config.steps, config.steps + TRAIN_LOSS_BATCHES)  # windows that no step was trained on
    with torch.no_grad():
        train = [_losses(model, _batch(streams, config, step), exact).mean() for step in beyond]
    held_out = dict(zip(streams.names, streams.validation, strict=True))
    return EmbeddedResult(
        folder=out,
        threads=threads,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        steps=config.steps,
        tokens_seen=config.steps * config.batch * config.length,
        training_tokens={name: len(ids) for name, ids in zip(streams.names, streams.train, strict=True)},
        validation_tokens={name: contexts[:, 1:].numel() for name, contexts in held_out.items()},
        train_loss=float(torch.stack(train).mean()),
        validation_loss=_validation_loss(model, streams, exact),
        bigram_loss={
            name: bigram_loss(streams, contexts, config.vocabulary)
            for name, contexts in held_out.items()
            if len(contexts)
        },
    )


def _fast_tokenizer(tokenizer: Tokenizer, config: EmbeddedConfig) -> PreTrainedTokenizerFast:
    if config.no_op is not None:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=config.length,
    )
