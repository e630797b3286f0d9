"""A model that is trained into a folder which `transformers` opens: what the trainers of text and of tasks share.

Until it is finished everything is in `<out>.partial`; a killed training run resumes from its last checkpoint there.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from theodolite.errors import UsageError, WorkError
from theodolite.models.stored.loading import LOADING_ERRORS, reason_of, refuse_nonfinite_weights
from theodolite.system.checksums import check_headers
from theodolite.system.files import check_target, disk_errors, folder_purpose, folder_written_atomically
from theodolite.system.interrupt import STOPPING, interruptible
from theodolite.system.locks import locked
from theodolite.system.threads import using_threads
from theodolite_papers.training import training_loop
from theodolite_papers.training.models import ModelConfig, TaskModelConfig
from theodolite_papers.training.training_loop import BETAS, CHECKPOINT, CLIP, another_training_run

NOT_SIZES = [
    "seed",
    "weight_decay",
    "dropout",
    "schedule",
    "positions",
    "bfloat16",
    "repeats",
    "backcopies",
    "series",
]

IDENTITY = "identity.json"
"""Says which training run a folder is of, unfinished or finished."""

LARGEST_RATE = 1.0
"""An update of AdamW changes a weight by about the rate: at 1, fifty times what weights begin with."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class ModelTraining(Generic[Result]):
    """What distinguishes one training run into a folder from another.

    build: the untrained model; torch's generator is seeded before. data: names and hashes of what it is trained on.
    loss: of a step's batch. progress: what to print at a checkpoint. measure: the result, of the finished model.
    page: name and text of the file that states it. series: numbers of updates after which a copy of the model is
    kept.
    """

    config: ModelConfig
    build: Callable[[], PreTrainedModel]
    tokenizer: PreTrainedTokenizerFast
    data: dict[str, str]
    loss: Callable[[PreTrainedModel, int], Tensor]
    progress: Callable[[PreTrainedModel, float], str]
    measure: Callable[[PreTrainedModel], Result]
    page: Callable[[Result], tuple[str, str]]
    series: tuple[int, ...] = ()


def partial_of(out: Path) -> Path:
    """Folder of an unfinished training run into `out`."""
    return out.with_name(out.name + ".partial")


def check_training(out: Path, config: ModelConfig, threads: int) -> None:
    """Refuse numbers that no training run can use, and to train into what is there and is no training run."""
    training_loop.check_numbers(config.seed, threads)
    check_target(out)
    if out.exists() and not (out / IDENTITY).is_file():
        raise UsageError(f"{out} exists; give another folder or remove it.")
    if not 0 < config.learning_rate <= LARGEST_RATE:
        raise UsageError(
            f"the learning rate is {config.learning_rate}; it must be above 0 and at most {LARGEST_RATE:g}."
        )
    for name, value in asdict(config).items():
        if name not in NOT_SIZES and value <= 0:
            raise UsageError(f"{name} is {value}; it must be positive.")
    if config.width % config.heads:
        raise UsageError(f"A width of {config.width} does not divide into {config.heads} heads.")
    if isinstance(config, TaskModelConfig) and config.positions not in ("learned", "rotary"):
        raise UsageError(f"positions are '{config.positions}'; choose learned or rotary.")


def train_into(out: Path, training: ModelTraining[Result], threads: int, console: Console | None) -> Result:
    """Train a model, from its last checkpoint if there is one, and write it to `out`; measure it where it is done."""
    partial, console = partial_of(out), console or Console(stderr=True)
    identity = {"config": json.dumps(asdict(training.config)), **training.data}
    with locked(out), using_threads(threads):
        torch.manual_seed(training.config.seed)
        model = training.build()
        if out.exists():
            _check_finished(out, identity)
            console.print(f"{out} is trained already; it is measured again.", markup=False, highlight=False)
            model = _finished_model(out, model)
        else:
            _fit(model, training, identity, partial, console)
        model.eval()
        with console.status("measuring the model"):
            result = training.measure(model)
        if not out.exists():
            _publish(out, model, training, identity, result)
        shutil.rmtree(partial, ignore_errors=True)
    return result


def _check_finished(out: Path, identity: dict[str, str]) -> None:
    """Refuse a folder that another training run wrote."""
    there = folder_purpose(out / IDENTITY, identity)
    if there == identity:
        return
    said = []
    with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):  # it may say anything
        old, now = json.loads(there["config"]), json.loads(identity["config"])
        changed = [name for name in now if old.get(name) != now[name]]
        said = [f"{name} {old.get(name)} there, {now[name]} now" for name in changed]
    raise UsageError(
        f"{out} holds another training run ({'; '.join(said) or 'of another text'}); give another folder or remove it."
    )


def _finished_model(out: Path, model: PreTrainedModel) -> PreTrainedModel:
    """The trained model in the place of the untrained one, all of whose weights are there."""
    advice = "give another folder or remove it."
    architecture: Any = type(model)
    try:
        check_headers(out.glob("*.safetensors"))
        trained, info = architecture.from_pretrained(
            out,
            config=model.config,
            attn_implementation=model.config._attn_implementation,
            dtype=torch.float32,
            output_loading_info=True,
        )
        refuse_nonfinite_weights(trained)
    except (*LOADING_ERRORS, WorkError) as error:
        raise UsageError(f"{out} is damaged ({reason_of(error)}); {advice}") from error
    lacking = sorted(info["missing_keys"])
    if lacking:
        raise UsageError(f"{out} is damaged ({lacking[0]} is missing); {advice}")
    return trained


def _fit(
    model: PreTrainedModel,
    training: ModelTraining[Result],
    identity: dict[str, str],
    partial: Path,
    console: Console,
) -> None:
    config, checkpoint = training.config, partial / CHECKPOINT
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=BETAS, fused=True)
    begin, _ = training_loop.load_checkpoint(checkpoint, model, optimizer, identity)
    # A folder that does not say what it is of has to have a checkpoint, which has just been judged by its own notes.
    unknown = f"{partial} does not say which training run it holds; remove it to start over."
    refusal = None if checkpoint.exists() else unknown
    if folder_purpose(partial / IDENTITY, identity, refusal) != identity:
        raise another_training_run(partial)

    def keep(step: int) -> None:
        if step in training.series:
            _write_model(partial / "series" / f"{step:06d}", model, training)

    steps = training_loop.updates(
        model,
        optimizer,
        lambda step: training.loss(model, step),
        config.rate.at,
        range(begin, config.steps),
        seed=config.seed,
        clip=lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP),
    )
    with interruptible(lambda: console.print(STOPPING)) as pressed, Progress(console=console) as progress:
        if not begin:
            keep(0)
        task = progress.add_task("training", total=config.steps, completed=begin)
        for step, value in steps:
            loss = value.item()
            progress.update(task, description=f"training, loss {loss:.3f}")
            _check_loss(loss, step - 1, partial)
            keep(step)
            due = step % config.checkpoint_every == 0 or step == config.steps
            stop = pressed()  # asked once: what is pressed later is for the next step
            if due or stop:
                training_loop.save_checkpoint(checkpoint, model, optimizer, identity | {"step": str(step)})
            if due:
                model.eval()
                console.print(f"step {step}: {training.progress(model, loss)}")
            progress.advance(task)  # what is shown and saved after a step is a part of it
            if stop:
                raise KeyboardInterrupt
    with torch.no_grad():  # no step has seen what the last update did
        _check_loss(training.loss(model.eval(), config.steps).item(), config.steps, partial)


def _check_loss(loss: float, step: int, folder: Path) -> None:
    if not math.isfinite(loss):
        raise WorkError(f"The loss was {loss} at step {step}: remove {folder}, and train with a lower rate.")


def _write_model(folder: Path, model: PreTrainedModel, training: ModelTraining[Result]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with folder_written_atomically(folder) as temporary:
        model.save_pretrained(temporary)
        training.tokenizer.save_pretrained(temporary)


def _publish(
    out: Path,
    model: PreTrainedModel,
    training: ModelTraining[Result],
    identity: dict[str, str],
    result: Result,
) -> None:
    """Write the finished folder beside `out`, and give it its name."""
    partial = partial_of(out)
    finished = partial / "finished"
    _write_model(finished, model, training)
    with disk_errors(out):
        name, text = training.page(result)
        (finished / name).write_text(text, encoding="utf-8")
        folder_purpose(finished / IDENTITY, identity)
        if (partial / "series").exists():  # copied: a kill before the rename must not lose it
            shutil.copytree(partial / "series", finished / "series")
        os.replace(finished, out)
