"""The small models of Song & Zhong 2024 (appendix A.2 and D.3), trained here: characters, and addition.

GPT-2's architecture with learned positions, or the same with rotary ones (GPT-NeoX without its parallel
residual). `train_task_model` writes a folder that `transformers` opens, with `training.json` next to the weights: every
setting, the losses, the accuracies. The text comes from the caller, additions from a seed. The same seed gives the
same bytes on the same machine, number of threads and package versions, also when it was killed in between.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from theodolite.errors import UsageError
from theodolite.papers.training.gpt2 import gpt2
from theodolite.papers.training.tasks import Task
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
from theodolite.system.files import disk_errors, folder_written_atomically

SERIES = (0, 10, 30, 100, 300, 1000, 3000, 10000, 30000)
"""Steps whose weights a series keeps, and the last: about even on a logarithmic scale."""


@dataclass(frozen=True)
class TaskModelConfig:
    """Sizes and schedule of a model. `PUBLISHED` has the settings of the paper."""

    layers: int
    heads: int
    width: int
    batch: int  # contexts per step
    steps: int
    learning_rate: float  # the peak
    schedule: str  # "cosine" to FINAL_RATE of the peak, or "linear" to 0
    dropout: float = 0.0
    positions: str = "learned"  # or "rotary"
    warm_up: int = 100  # steps
    weight_decay: float = 0.1  # on matrices only
    bfloat16: bool = True  # products in bfloat16 (torch.autocast); weights and optimizer stay in float32
    checkpoint_every: int = 250  # steps
    series: bool = False  # keep the weights of the steps of SERIES
    seed: int = 0


PUBLISHED = {
    "characters": TaskModelConfig(6, 6, 384, 64, 5000, 1e-3, "cosine", dropout=0.1),
    "addition": TaskModelConfig(4, 4, 256, 64, 10000, 1e-4, "linear"),
}
"""Appendix A.2. Where it is silent (AdamW's β, gradient clipping), as in `training_loop.py`."""

ATTENTION = "eager"
"""On a CPU, the backward pass of `sdpa` in bfloat16 takes a quarter of a step at these lengths, this one little."""


def train_task_model(
    out: str | Path, task: Task, config: TaskModelConfig, *, threads: int = 2, console: Console | None = None
) -> dict[str, Any]:
    """Train on `task` and write the folder `out`; returns what `training.json` there says.

    A training run that was killed resumes from its last checkpoint (in `<out>.partial`) when it is called again
    with the same arguments.

    Raises:
        UsageError: `out` exists, a size, the seed or `threads` is impossible, or `<out>.partial` belongs to
            another training run.
        WorkError: the loss is no longer a number, or a file cannot be written.
    """
    out, console = Path(out), console or Console(stderr=True)
    check_numbers(config.seed, threads)
    partial = partial_of(out)
    refuse_existing(out, partial / CHECKPOINT, config.steps)
    _check(config)
    tokenizer = character_tokenizer(task.characters, task.length)
    with using(threads):
        torch.manual_seed(config.seed)
        model = _model(config, task)
        model.set_attn_implementation(ATTENTION)
        fit(model, _loop(model, tokenizer, task, config, partial, console), console)
        model.eval()
        result = {
            "task": task.name,
            "length": task.length,
            "characters": task.characters,
            "text_sha256": task.sha256,
            **asdict(config),
            "threads": threads,
            "parameters": model.num_parameters(),
        }
        with phase("measuring the model", console):
            result |= task.measure(model)
    _save(partial, out, model, tokenizer, result)
    return result


def character_tokenizer(characters: str, length: int) -> PreTrainedTokenizerFast:
    """One token per character; a character that is not among `characters` is left out."""
    vocabulary = {character: index for index, character in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=length)


def _check(config: TaskModelConfig) -> None:
    for name in ("layers", "heads", "width", "batch", "steps", "learning_rate"):
        if getattr(config, name) <= 0:
            raise UsageError(f"{name} is {getattr(config, name)}; it must be positive.")
    if config.width % config.heads:
        raise UsageError(f"A width of {config.width} does not divide into {config.heads} heads.")
    if config.positions not in ("learned", "rotary"):
        raise UsageError(f"positions are '{config.positions}'; choose learned or rotary.")


def _model(config: TaskModelConfig, task: Task) -> PreTrainedModel:
    vocabulary = len(task.characters)
    if config.positions == "learned":
        return gpt2(
            vocabulary,
            task.length,
            config.layers,
            config.heads,
            config.width,
            dropout=config.dropout,
            activation_function="gelu_pytorch_tanh",  # GPT-2's own, in one step
        )
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=vocabulary,
            max_position_embeddings=task.length,
            hidden_size=config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            intermediate_size=4 * config.width,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
            use_parallel_residual=False,
            hidden_dropout=config.dropout,
            attention_dropout=config.dropout,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def learning_rate(config: TaskModelConfig, step: int) -> float:
    """Linear warm-up, then the cosine or the line of `config.schedule`."""
    linear = config.schedule == "linear"
    return config.learning_rate * share_of_peak(step, config.warm_up, config.steps, linear=linear)


def _loop(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    task: Task,
    config: TaskModelConfig,
    partial: Path,
    console: Console,
) -> TrainingLoop:
    def loss(step: int) -> Tensor:
        model.train()
        inputs, targets = task.batch(step, config.batch, config.seed)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.bfloat16):
            logits = model(input_ids=inputs, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def saved(step: int, loss: float) -> None:
        model.eval()
        console.print(f"step {step}: training loss {loss:.4f}; {task.quick_score(model)}")

    def done(step: int, loss: float) -> None:
        if config.series and (step in SERIES or step == config.steps):
            _snapshot(partial / "series" / f"{step:06d}", model, tokenizer)

    return TrainingLoop(
        steps=config.steps,
        seed=config.seed,
        weight_decay=config.weight_decay,
        checkpoint=partial / CHECKPOINT,
        checkpoint_every=config.checkpoint_every,
        identity={"config": json.dumps(asdict(config)), "task": task.name, "data": task.sha256},
        loss=loss,
        rate=lambda step: learning_rate(config, step),
        saved=saved,
        done=done,
    )


def _snapshot(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with folder_written_atomically(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


def _save(
    partial: Path,
    out: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    result: dict[str, Any],
) -> None:
    """Write the finished folder next to the checkpoint, rename it to `out`, drop the checkpoint."""
    finished = partial / "finished"
    _snapshot(finished, model, tokenizer)
    with disk_errors(out):
        text = json.dumps(result, indent=2, ensure_ascii=False)
        (finished / "training.json").write_text(text + "\n", encoding="utf-8")
        if (partial / "series").exists():  # copied: a kill before the rename must not lose it
            shutil.copytree(partial / "series", finished / "series")
        publish(finished, out, partial / CHECKPOINT)


def changed(config: TaskModelConfig, options: Iterable[tuple[str, Any]]) -> TaskModelConfig:
    """`config` with those options that are not None."""
    return replace(config, **{name: value for name, value in options if value is not None})
