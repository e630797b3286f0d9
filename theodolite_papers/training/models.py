"""Train a toy model on a task (Song & Zhong 2024, A.2, D.3): GPT-2, or GPT-NeoX with rotary positions.

Until a model is finished everything is in `<out>.partial`. `training.json` next to the weights has every setting, the
losses and the accuracies.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from theodolite import open_model
from theodolite.errors import UsageError, WorkError
from theodolite.jobs.job import JOB, Unfinished, read_job
from theodolite.system.files import check_target, folder_written_atomically, json_text, locked
from theodolite.system.processor import multiplies_halves, using_threads
from theodolite.system.progress import STOPPING, interruptible
from theodolite.system.run_folders import differences
from theodolite_papers.training.tasks import Task, character_tokenizer
from theodolite_papers.training.trainer import Trainer, check_numbers

GELU = "gelu_pytorch_tanh"  # GPT-2's own, in one step
CLIP = 1.0  # Euclidean norm of the whole gradient
BETAS = (0.9, 0.95)  # AdamW
FINAL_RATE = 0.1  # of the peak learning rate, where a cosine ends
LARGEST_RATE = 1.0  # AdamW changes a weight by about the rate: weights begin at a 50th of this
OR_ZERO = {"or_zero": True}  # metadata of a field that need not be positive


@dataclass(frozen=True)
class TaskModelConfig:
    """Sizes and schedule of a model of a task. `PUBLISHED` has the settings of the paper."""

    layers: int
    heads: int
    width: int
    batch: int  # contexts per step
    steps: int
    learning_rate: float  # the peak
    schedule: Literal["cosine", "linear"]  # to FINAL_RATE of the peak, or to 0
    dropout: float = field(default=0.0, metadata=OR_ZERO)
    positions: str = "learned"  # or "rotary"
    warm_up: int = 100  # steps
    weight_decay: float = field(default=0.1, metadata=OR_ZERO)  # on matrices only
    # Products in bfloat16 (torch.autocast), where this processor has them; weights and optimizer stay in float32.
    bfloat16: bool = field(default_factory=multiplies_halves)
    checkpoint_every: int = 250  # steps
    seed: int = field(default=0, metadata=OR_ZERO)

    def rate(self, step: int) -> float:
        """Return the rate of a step: a line from 0 over `warm_up`, then the cosine or the line of `schedule`."""
        done = max(0.0, (step - self.warm_up) / max(1, self.steps - self.warm_up))
        cosine = FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done))
        share = cosine if self.schedule == "cosine" else 1 - done
        return self.learning_rate * (min(1.0, (step + 1) / self.warm_up) * share)

    def check(self) -> None:
        """Refuse invalid settings."""
        if not 0 < self.learning_rate <= LARGEST_RATE:
            raise UsageError(
                f"the learning rate is {self.learning_rate}; it must be above 0 and at most {LARGEST_RATE:g}."
            )
        for option in fields(self):
            value = getattr(self, option.name)
            if option.metadata != OR_ZERO and not isinstance(value, bool | str) and value <= 0:
                raise UsageError(f"{option.name} is {value}; it must be positive.")
        if self.positions not in ("learned", "rotary"):
            raise UsageError(f"positions are '{self.positions}'; choose learned or rotary.")


PUBLISHED = {
    "characters": TaskModelConfig(6, 6, 384, 64, 5000, 1e-3, "cosine", dropout=0.1),
    "addition": TaskModelConfig(4, 4, 256, 64, 10000, 1e-4, "linear"),
}
"""Appendix A.2. Where it is silent (AdamW's β, gradient clipping), ours."""


def task_model(config: TaskModelConfig, vocabulary: int, length: int) -> PreTrainedModel:
    """Make an untrained GPT-2, or with rotary positions GPT-NeoX without its parallel residual."""
    model: PreTrainedModel
    if config.positions == "learned":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=vocabulary,
                n_positions=length,
                n_embd=config.width,
                n_layer=config.layers,
                n_head=config.heads,
                activation_function=GELU,
                bos_token_id=None,
                eos_token_id=None,
                resid_pdrop=config.dropout,
                embd_pdrop=config.dropout,
                attn_pdrop=config.dropout,
            )
        )
    else:
        model = transformers.GPTNeoXForCausalLM(
            transformers.GPTNeoXConfig(
                vocab_size=vocabulary,
                max_position_embeddings=length,
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
    # On a CPU, the backward pass of `sdpa` in bfloat16 takes a quarter of a task model's step, this one little.
    model.set_attn_implementation("eager")
    return model


def train_task_model(
    out: str | Path, task: Task, config: TaskModelConfig, *, threads: int = 2, console: Console | None = None
) -> dict[str, Any]:
    """Train on `task` and write the folder `out`; returns what `training.json` there says.

    A killed training run resumes, with the same bytes on the same machine, threads and package versions. One that is
    finished is measured again.
    """
    out, console = Path(out), console or Console(stderr=True)
    check_numbers(config.seed, threads)
    config.check()
    check_target(out)
    if out.exists() and not (out / JOB).is_file():
        raise UsageError(f"{out} exists; give another folder or remove it.")
    of_data = {"task": task.name, "data": task.sha256}
    work = Unfinished(out, {**asdict(config), **of_data}, kind="training run")
    with locked(out), using_threads(threads):
        finished = out.exists()
        model = _finished(out, work.fingerprint, console) if finished else _fit(task, config, work, console)
        with console.status("measuring the model"):
            result = {
                "task": task.name,
                "length": task.length,
                "characters": task.characters,
                "text_sha256": task.sha256,
                **asdict(config),
                "threads": threads,
                "parameters": model.num_parameters(),
                **task.measure(model),
            }
        if not finished:
            with folder_written_atomically(out) as folder:
                model.save_pretrained(folder)
                character_tokenizer(task.characters, task.length).save_pretrained(folder)
                (folder / "training.json").write_text(json_text(result, 2) + "\n", encoding="utf-8")
                shutil.copyfile(work.folder / JOB, folder / JOB)
        work.remove()
    return result


def _finished(out: Path, fingerprint: dict[str, Any], console: Console) -> PreTrainedModel:
    """Open the finished model; refuse a folder of another training run."""
    there, _ = read_job(out)
    if there != fingerprint:
        differs = differences(there, fingerprint)
        raise UsageError(f"{out} holds another training run ({differs}); give another folder or remove it.")
    console.print(f"{out} is trained already; it is measured again.", markup=False, highlight=False)
    return open_model(out, device="cpu").hf


def _fit(task: Task, config: TaskModelConfig, work: Unfinished, console: Console) -> PreTrainedModel:
    """Train to the last step, with a bar, and say how far it is at every checkpoint."""
    torch.manual_seed(config.seed)
    model = task_model(config, len(task.characters), task.length)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]

    def loss_at(step: int) -> Tensor:
        inputs, targets = task.batch(step, config.batch, config.seed)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.bfloat16):
            logits = model(input_ids=inputs, use_cache=False).logits
        return cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def check(loss: float, step: int) -> None:
        if not math.isfinite(loss):
            raise WorkError(
                f"The loss was {loss} at step {step}: remove {work.folder}, and train with a lower rate."
            )

    def measure(step: int, loss: Tensor | None) -> None:
        if loss is None:
            return
        value = loss.item()
        progress.update(bar, description=f"training, loss {value:.3f}", completed=step)
        check(value, step - 1)
        if step % config.checkpoint_every == 0 or step == config.steps:
            console.print(f"step {step}: training loss {value:.4f}; {task.quick_score(model.eval())}")

    trainer = Trainer(
        work=work,
        model=model,
        optimizer=torch.optim.AdamW(groups, betas=BETAS, fused=True),
        loss=loss_at,
        rate=config.rate,
        seed=config.seed,
        save_every=config.checkpoint_every,
        measure=measure,
        clip=CLIP,
    )
    trainer.resume()
    with interruptible(lambda: console.print(STOPPING)) as pressed, Progress(console=console) as progress:
        bar = progress.add_task("training", total=config.steps, completed=trainer.step)
        if not trainer.advance(config.steps, pressed):
            raise KeyboardInterrupt
    model.eval()
    with torch.no_grad():  # no step has seen what the last update did
        check(loss_at(config.steps).item(), config.steps)
    return model
