"""The seeded trainer that made the embedded model, and can make others like it.

`train_embedded_model` takes text, trains a byte-level BPE tokenizer and a model (`embedded_model.py`) on it with plain
PyTorch,
and writes a folder that `transformers` opens. It is made for a few
million parameters on a few processor cores: no distribution, no other architectures, no options beyond
`EmbeddedConfig`. The same seed gives the same bytes on the same machine, number of threads and package versions,
also when the run was killed and resumed in between: the order of batches follows from (seed, step)
alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from jaxtyping import Float, Int
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from theodolite.errors import UsageError
from theodolite.papers.training.embedded_model import EmbeddedConfig, build
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
from theodolite.papers.training.training_loop import (
    CHECKPOINT,
    TrainingLoop,
    check_numbers,
    fit,
    partial_of,
    phase,
    publish,
    refuse_existing,
    share_of_peak,
)
from theodolite.papers.training.training_loop import threads as using
from theodolite.system.files import disk_errors

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
    out, config, console = Path(out), config or EmbeddedConfig(), console or Console(stderr=True)
    python_text = sources is None
    check_numbers(config.seed, threads)
    if sources is None:
        with phase("reading Python's text", console):
            sources = python_sources()
    partial = partial_of(out)
    refuse_existing(out, partial / CHECKPOINT, config.steps)
    _check(sources, config)
    with phase("splitting the text", console):
        training, validation = split_sources(sources, config.seed)
    with phase("training the tokenizer", console):
        tokenizer = train_tokenizer(training, config.vocabulary, config.seed)
    with phase("tokenizing", console):
        streams = token_streams(tokenizer, training, validation, config.length)
    with using(threads):
        torch.manual_seed(config.seed)
        model = build(config)
        fit(model, _loop(model, streams, config, partial, console), console)
        with phase("measuring losses", console):
            result = _result(out, model, streams, config, threads)
    _save(partial, out, model, _fast_tokenizer(tokenizer, config), card(result, config, python_text))
    return result


def _check(sources: Sequence[Source], config: EmbeddedConfig) -> None:
    if not sources or any(source.share <= 0 for source in sources):
        raise UsageError("There must be at least one source of text, each with a positive share.")
    for name, value in asdict(config).items():
        if name not in ("seed", "weight_decay", "bfloat16", "no_op") and value <= 0:
            raise UsageError(f"{name} is {value}; it must be positive.")
    if config.width % config.heads:
        raise UsageError(f"A width of {config.width} does not divide into {config.heads} heads.")


def _loop(
    model: PreTrainedModel, streams: Streams, config: EmbeddedConfig, partial: Path, console: Console
) -> TrainingLoop:
    def shown(step: int, loss: float) -> None:
        losses = _validation_loss(model, streams, config, SHOWN_CONTEXTS)
        held_out = "".join(f", {name} {value:.3f}" for name, value in losses.items())
        console.print(f"step {step}: training {loss:.3f}; held out{held_out or ': nothing'}")

    return TrainingLoop(
        steps=config.steps,
        seed=config.seed,
        weight_decay=config.weight_decay,
        checkpoint=partial / CHECKPOINT,
        checkpoint_every=config.checkpoint_every,
        identity={"config": json.dumps(asdict(config)), "data": streams.sha256()},
        loss=lambda step: _losses(model, _batch(streams, config, step), config).mean(),
        rate=lambda step: learning_rate(config, step),
        saved=shown,
    )


def learning_rate(config: EmbeddedConfig, step: int) -> float:
    """Linear warm-up, then a cosine from `config.learning_rate` down to `FINAL_RATE` of it."""
    return config.learning_rate * share_of_peak(step, max(1, round(WARM_UP * config.steps)), config.steps)


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


def _save(
    partial: Path, out: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, readme: str
) -> None:
    """Write the finished folder next to the checkpoint, rename it to `out`, drop the checkpoint."""
    finished = partial / "finished"
    with disk_errors(out):
        shutil.rmtree(finished, ignore_errors=True)
        model.save_pretrained(finished)
        tokenizer.save_pretrained(finished)
        (finished / "README.md").write_text(readme, encoding="utf-8")
        publish(finished, out, partial / CHECKPOINT)
