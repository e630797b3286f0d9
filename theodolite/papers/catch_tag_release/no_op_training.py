"""Tiny models with and without a no-op option, on the same text, tokens and seeds: do sinks need the tag?

One folder: `none-0`, `off-by-one-0`, `learned-0`, `none-1`, …, each a model that `transformers` opens, and the text
that no model of a seed was trained on, `held-out-0.jsonl`, …. A model that exists is not trained again; a training
run that was killed resumes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from theodolite.errors import UsageError
from theodolite.papers.training.embedded_text import Source, python_sources, split_sources
from theodolite.papers.training.embedded_training import train_embedded_model
from theodolite.papers.training.model_folder import partial_of
from theodolite.papers.training.models import NO_OPS, EmbeddedConfig, NoOp
from theodolite.papers.training.training_loop import check_numbers
from theodolite.system.files import check_target, disk_errors, folder_purpose, write_text
from theodolite.system.locks import locked

DEFAULT = EmbeddedConfig(
    layers=4,
    length=128,
    batch=8,
    steps=2000,
    initial_deviation=0.02,
    repeats=0.0,
    backcopies=0.0,
)
"""Two hours for three seeds on one core of a laptop."""


CLAIM = "escape.json"
"""Says that a folder holds such models, and how they are trained."""


def place_of(folder: Path, no_op: NoOp, seed: int) -> Path:
    """Folder of a model."""
    return folder / f"{no_op}-{seed}"


def held_out_of(folder: Path, seed: int) -> Path:
    """File of the text that the models of a seed were not trained on: JSON rows with `text` and `label`."""
    return folder / f"held-out-{seed}.jsonl"


def train_no_op_models(
    out: str | Path,
    *,
    seeds: int = 3,
    sources: list[Source] | None = None,
    config: EmbeddedConfig = DEFAULT,
    threads: int = 2,
    console: Console | None = None,
) -> list[str]:
    """Train a model with every no-op option and seed, those of a seed on the same tokens in the same order.

    Args:
        out: folder; models that are there already are left as they are.
        seeds: 0 … seeds − 1, of weights, batches, tokenizer and of what text is held out.
        sources: None: `python_sources()`.
        config: sizes and steps; its `no_op` and `seed` are set here.
        threads: of every training run; console: where it says how it is.

    Returns:
        A line for each model that was trained now.

    Raises:
        UsageError, WorkError: as `train_embedded_model`; the folder holds something else, or models of other settings.
    """
    out, console = Path(out), console or Console(stderr=True)
    if seeds < 1:
        raise UsageError(f"seeds is {seeds}; it must be positive.")
    check_numbers(seeds - 1, threads)
    check_target(out)
    texts = python_sources() if sources is None else sources
    with locked(out):
        _claim(out, config)
        losses_of_models = []
        for seed in range(seeds):
            _hold_out(held_out_of(out, seed), texts, seed)
            for no_op in NO_OPS:
                folder = place_of(out, no_op, seed)
                if folder.exists() and not partial_of(folder).exists():
                    # Left where the process was killed after the model had its name.
                    folder.with_name(folder.name + ".lock").unlink(missing_ok=True)
                    continue
                console.print(f"{folder.name}: training", highlight=False)
                settings = replace(config, no_op=no_op, seed=seed)
                result = train_embedded_model(
                    folder, sources=texts, config=settings, threads=threads, console=console
                )
                losses = ", ".join(f"{name} {loss:.3f}" for name, loss in result.validation_loss.items())
                losses_of_models.append(f"{folder.name}: held-out loss {losses}")
    return losses_of_models


def _claim(out: Path, config: EmbeddedConfig) -> None:
    """Write into the folder how its models are trained, unless it says the same already."""
    claim = {name: value for name, value in asdict(config).items() if name not in ("seed", "no_op")}
    something_else = f"{out} holds something else; choose another folder."
    existing = folder_purpose(out / CLAIM, claim, something_else)
    if existing is None:
        raise UsageError(something_else)
    if existing != claim:
        differing = next(name for name in claim if existing.get(name) != claim[name])
        raise UsageError(
            f"{out} holds models with {differing} = {existing.get(differing)}, not {claim[differing]}; "
            "choose another folder."
        )


def _hold_out(path: Path, sources: list[Source], seed: int) -> None:
    _, validation = split_sources(sources, seed)
    rows = [
        json.dumps({"text": document.text, "label": source.name}, ensure_ascii=False)
        for source in validation
        for document in source.documents
    ]
    text = "\n".join(rows) + "\n"
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise UsageError(f"{path.parent} was trained on another text; choose another folder.")
    with disk_errors(path):
        write_text(path, text)
