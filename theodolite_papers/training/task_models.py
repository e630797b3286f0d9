"""The small models of Song & Zhong 2024 (appendix A.2 and D.3), trained here: characters, and addition.

`training.json` next to the weights has every setting, the losses and the accuracies. The same seed gives the same bytes
on the same machine, threads and package versions, also when killed and resumed.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from theodolite.system.files import json_text
from theodolite_papers.training.model_folder import ModelTraining, check_training, train_into
from theodolite_papers.training.models import TaskModelConfig, task_model
from theodolite_papers.training.tasks import Task

SERIES = (0, 10, 30, 100, 300, 1000, 3000, 10000, 30000)
"""Steps whose weights a series keeps, and the last: about even on a logarithmic scale."""

PUBLISHED = {
    "characters": TaskModelConfig(6, 6, 384, 64, 5000, 1e-3, "cosine", dropout=0.1),
    "addition": TaskModelConfig(4, 4, 256, 64, 10000, 1e-4, "linear"),
}
"""Appendix A.2. Where it is silent (AdamW's β, gradient clipping), as in `training_loop.py`."""


def train_task_model(
    out: str | Path, task: Task, config: TaskModelConfig, *, threads: int = 2, console: Console | None = None
) -> dict[str, Any]:
    """Train on `task` and write the folder `out`; returns what `training.json` there says.

    A killed training run resumes. With `config.series` the weights of the steps of `SERIES`, and of the last, are kept.
    """
    out = Path(out)
    check_training(out, config, threads)

    def loss(model: PreTrainedModel, step: int) -> Tensor:
        inputs, targets = task.batch(step, config.batch, config.seed)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.bfloat16):
            logits = model(input_ids=inputs, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def measure(model: PreTrainedModel) -> dict[str, Any]:
        return {
            "task": task.name,
            "length": task.length,
            "characters": task.characters,
            "text_sha256": task.sha256,
            **asdict(config),
            "threads": threads,
            "parameters": model.num_parameters(),
            **task.measure(model),
        }

    run = ModelTraining(
        config=config,
        build=lambda: task_model(config, len(task.characters), task.length),
        tokenizer=character_tokenizer(task.characters, task.length),
        data={"task": task.name, "data": task.sha256},
        loss=loss,
        progress=lambda model, loss: f"training loss {loss:.4f}; {task.quick_score(model)}",
        measure=measure,
        page=lambda result: ("training.json", json_text(result, 2) + "\n"),
        series=(*SERIES, config.steps) if config.series else (),
    )
    return train_into(out, run, threads, console)


def character_tokenizer(characters: str, length: int) -> PreTrainedTokenizerFast:
    """One token per character; a character that is not among `characters` is left out."""
    vocabulary = {character: index for index, character in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=length)
