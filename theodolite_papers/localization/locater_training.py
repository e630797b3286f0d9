"""One training run of Bao et al. 2024 (section 7, appendix D): with LocAteR, without it, or with another weight decay.

It lives in a folder and resumes from its checkpoint to any further step, with the same bytes. Runs of one seed see the
same batches, initial weights and dropout, which pairs them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from theodolite.errors import UsageError, WorkError
from theodolite.system.checksums import write_checked
from theodolite.system.files import disk_errors, folder_purpose, json_text, write_atomically, write_text
from theodolite.system.processor import multiplies_halves
from theodolite.theory import empirical_propagation, qk_moments
from theodolite.train.penalty import Gradient, locater_penalty
from theodolite_papers.localization.decoder import Decoder, DecoderShape, as_opt
from theodolite_papers.localization.grid_text import GridText
from theodolite_papers.training import training_loop

PUBLISHED_STEPS = 50_000
BETAS = (0.9, 0.999)
EARLY = (1, 2, 5, 10, 20, 50, 100)
"""Steps that are measured besides the regular ones and step 0."""

Reduction = Literal["mean", "sum"]
"""Of the loss over a batch's tokens, where the penalty is added to it; the paper doesn't say which.

fairseq sums, and divides the gradient by the number of tokens later: added to its sum, a penalty weighs so much less.
"""

LOSSES = ("training_loss", "held_out_loss", "held_out_loss_se")
HEADS = ("trace", "trace_of_square", "frobenius_squared", "entropy", "propagation")


@dataclass(frozen=True)
class Recipe:
    """What all training runs of a grid share; the defaults are as published or, where the paper is silent, fairseq's.

    Published: length, batch, one head, width of the feed-forward layer = width, ReLU and Post-LN (`decoder.py`), Adam
    with (0.9, 0.999) and 1e-8, no clipping, a fixed rate (`published_rate`), half precision. fairseq 0.12.2: dropout
    0.1 on embeddings and on both sublayers' outputs and none in attention, sinusoidal positions, embeddings times √d,
    no tied output, its initial weights, weight decay on all parameters and decoupled (p −= rate · decay · p), batches
    of whole blocks of the running text in another order every epoch. Ours: the vocabulary (theirs is of whole words:
    None); bfloat16 in place of float16 (float32 on processors without), and in the output's products only, where nearly
    all of the time goes.
    """

    length: int = 64
    batch: int = 64
    vocabulary: int | None = 2048
    dropout: float = 0.1
    bfloat16: bool = field(default_factory=multiplies_halves)
    measure_every: int = 250  # steps
    measured_windows: int = 512  # of the held-out text, evenly chosen; the last measurement takes all
    checkpoint_every: int = 1000  # steps


@dataclass(frozen=True)
class Setting:
    """What distinguishes one training run: κ₁ and κ₂, and what the loss is that the penalty is added to."""

    layers: int = 1
    width: int = 32
    scale: float = 0.0
    mean: float = 0.0
    weight_decay: float = 0.01
    gradient: Gradient = "exact"
    seed: int = 0
    reduction: Reduction = "mean"

    @property
    def name(self) -> str:
        """`l1-d32-scale100-mean0.01-decay0.01-s0`: the folder."""
        numbers = f"scale{self.scale:g}-mean{self.mean:g}-decay{self.weight_decay:g}"
        kind = "" if self.gradient == "exact" else f"-{self.gradient}"
        kind += "" if self.reduction == "mean" else f"-{self.reduction}"
        return f"l{self.layers}-d{self.width}-{numbers}{kind}-s{self.seed}"

    def check(self) -> None:
        """Refuse what cannot be trained."""
        if self.layers < 1 or self.width < 2 or self.width % 2:
            raise UsageError(f"{self.name}: give at least one layer and an even width.")
        if not all(0 <= strength < math.inf for strength in (self.scale, self.mean, self.weight_decay)):
            raise UsageError(f"{self.name}: a strength is negative or not finite; give 0 or more.")
        if self.reduction not in get_args(Reduction):
            raise UsageError(f"{self.name}: there is no such reduction; choose mean or sum.")
        training_loop.check_numbers(self.seed)


def published_rate(width: int) -> float:
    """1e-4 at d = 32 and 2.5e-5 at d = 128 (appendix D); inversely proportional to d elsewhere, as these two are."""
    return 32e-4 / width


def measured(step: int, every: int) -> bool:
    """Whether the model is measured after `step` updates."""
    return step % every == 0 or step in EARLY


class LocaterTraining:
    """A model, its optimizer and what was measured so far; from its folder's checkpoint if there is one."""

    def __init__(self, folder: Path, setting: Setting, recipe: Recipe, text: GridText, device: str) -> None:
        setting.check()
        self.folder, self.setting, self.recipe, self.text = folder, setting, recipe, text
        self.device = torch.device(device)
        torch.manual_seed(setting.seed)
        shape = DecoderShape(
            text.tokenizer.get_vocab_size(), setting.width, setting.layers, recipe.length, recipe.dropout
        )
        self.model = Decoder(shape).to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=BETAS, weight_decay=setting.weight_decay, fused=True
        )
        # Loss since the last measurement.
        self.summed = torch.zeros((), dtype=torch.float64, device=self.device)
        self.history: dict[str, Tensor] = {
            "steps": torch.zeros(0, dtype=torch.int64),
            "losses": torch.zeros(0, len(LOSSES), dtype=torch.float64),
            "heads": torch.zeros(0, setting.layers, len(HEADS), dtype=torch.float64),
            "propagation": torch.zeros(0, setting.layers, recipe.length),
        }
        known = asdict(setting)
        if folder_purpose(folder / "setting.json", known) != known:
            raise training_loop.another_training_run(folder)
        self.step, kept = training_loop.load_checkpoint(self._checkpoint, self.model, self.optimizer)
        if kept:
            self.summed.copy_(kept["summed"])
            self.history = {name: kept[f"history/{name}"] for name in self.history}

    def advance(self, until: int, stop: Callable[[], bool] = lambda: False) -> bool:
        """Train on to step `until`, saving on the way and at the end; False where `stop` ended it before."""
        if self.step == 0 and not len(self.history["steps"]):
            self._record()
        began = self.step
        steps = training_loop.updates(
            self.model,
            self.optimizer,
            self._loss,
            lambda step: published_rate(self.setting.width),
            range(began, until),
            seed=self.setting.seed,
        )
        while self.step < until and not stop():
            self.step, _ = next(steps)
            if measured(self.step, self.recipe.measure_every):
                self._record()
            if self.step % self.recipe.checkpoint_every == 0 and self.step < until:
                self.save()
        if self.step > began or not self._checkpoint.exists():
            self.save()
        return self.step >= until

    def progress(self) -> str:
        """The step, and the loss on held-out text when it was last measured."""
        last = self.tables()[0].iloc[-1]
        return f"step {self.step}, held-out loss {last['held_out_loss']:.4f} at step {int(last['step'])}"

    def finish(self) -> None:
        """Write the model as `transformers` opens it, and its loss on all held-out text, unless that is done."""
        place = self.folder / "summary.json"
        if place.exists() and json.loads(place.read_text(encoding="utf-8"))["step"] == self.step:
            return
        losses = self._held_out(self.text.held_out)
        summary = {
            **asdict(self.setting),
            **asdict(self.recipe),
            "learning_rate": published_rate(self.setting.width),
            "text_sha256": self.text.sha256,
            "step": self.step,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "held_out_tokens": losses.numel() * self.recipe.length,
            "held_out_loss": float(losses.mean()),
            "held_out_loss_se": _standard_error(losses),
            "tokens_per_word": self.text.tokens_per_word,
        }
        length, made = self.recipe.length, self.text.tokenizer
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=length)
        with disk_errors(self.folder):
            as_opt(self.model).save_pretrained(self.folder / "model")
            tokenizer.save_pretrained(self.folder / "model")
            write_text(place, json_text(summary, 2) + "\n")

    def save(self) -> None:
        """Write the checkpoint, and what was measured as tables; each file whole or not at all."""
        tensors = {f"history/{name}": values for name, values in self.history.items()}
        tensors["summed"] = self.summed
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            losses, heads = self.tables()
            for name, table in (("losses.parquet", losses), ("heads.parquet", heads)):
                write_atomically(self.folder / name, partial(table.to_parquet, index=False))
            curves = {name: self.history[name] for name in ("steps", "propagation")}
            place = self.folder / "propagation.safetensors"
            write_atomically(place, lambda path: write_checked(path, curves))
        # Last: a training run killed before this resumes from an older one, and writes all of them again.
        notes, path = {"step": str(self.step)}, self._checkpoint
        training_loop.save_checkpoint(path, self.model, self.optimizer, notes, tensors)

    def tables(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """What was measured: losses by step; head measures by step and layer."""
        steps = self.history["steps"].numpy()
        losses = pd.DataFrame(self.history["losses"].numpy(), columns=list(LOSSES))
        losses.insert(0, "step", steps)
        layers = self.setting.layers
        heads = pd.DataFrame(self.history["heads"].flatten(0, 1).numpy(), columns=list(HEADS))
        heads.insert(0, "layer", np.tile(np.arange(layers), len(steps)))
        heads.insert(0, "step", np.repeat(steps, layers))
        return losses, heads

    @property
    def _checkpoint(self) -> Path:
        return self.folder / training_loop.CHECKPOINT

    def _loss(self, step: int) -> Tensor:
        setting, recipe = self.setting, self.recipe
        window = self.text.batch(step, recipe.batch, setting.seed).to(self.device)
        dtype = torch.bfloat16 if recipe.bfloat16 else torch.float32
        loss = self.model.loss(window[:, :-1], window[:, 1:], dtype)
        self.summed += loss.detach()
        if setting.scale or setting.mean:
            w_q, w_k = self._factors()
            penalty = locater_penalty(w_q, w_k, setting.scale, setting.mean, gradient=setting.gradient)
            loss = loss + (penalty if setting.reduction == "mean" else penalty / window[:, 1:].numel())
        return loss

    def _factors(self) -> tuple[Tensor, Tensor]:
        pairs = [block.factors() for block in self.model.blocks]  # type: ignore[operator]
        w_q, w_k = (torch.stack(part) for part in zip(*pairs, strict=True))
        return w_q, w_k

    def _record(self) -> None:
        """Measure, and add a row to every table."""
        before = int(self.history["steps"][-1]) if self.step else 0
        training = float(self.summed) / (self.step - before) if self.step else math.nan
        if self.step and not math.isfinite(training):
            raise WorkError(f"The loss of {self.setting.name} is {training} before step {self.step}.")
        self.summed.zero_()
        held_out = self.text.held_out
        count = min(self.recipe.measured_windows, len(held_out))
        losses = self._held_out(held_out[np.linspace(0, len(held_out) - 1, count).astype(int)])
        row = [training, float(losses.mean()), _standard_error(losses)]
        heads, propagation = self._heads(held_out[: self.recipe.batch, :-1])
        for name, values in (
            ("steps", torch.tensor(self.step)),
            ("losses", torch.tensor(row, dtype=torch.float64)),
            ("heads", heads),
            ("propagation", propagation.float()),
        ):
            self.history[name] = torch.cat([self.history[name], values.cpu()[None]])

    def _held_out(self, windows: Tensor) -> Float[Tensor, " windows"]:
        """Mean loss of each window in nats per token, dropout off, weights and products in float32."""
        self.model.eval()
        parts = windows.to(self.device).split(self.recipe.batch)
        losses = [self.model.losses(part[:, :-1], part[:, 1:]).double().mean(1) for part in parts]
        return torch.cat(losses).cpu()

    @torch.no_grad()
    def _heads(self, ids: Tensor) -> tuple[Float[Tensor, "layers measures"], Float[Tensor, "layers length"]]:
        """`HEADS` of every layer, dropout off, and ρ_i of the last query as a frequency over the windows."""
        self.model.eval()
        streams = self.model.streams(ids.to(self.device))
        moments = qk_moments(*self._factors())
        later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=self.device).triu(1)
        measures, propagations = [], []
        for index, block in enumerate(self.model.blocks):
            logits = block.logits(streams[index])  # type: ignore[operator]
            entropy = torch.special.entr(logits.masked_fill(later, -math.inf).softmax(-1)).sum(-1).mean()
            propagation = empirical_propagation(logits[:, -1]).double().mean(0)
            spectrum = (moments.trace, moments.trace_of_square, moments.frobenius_squared)
            numbers = [*(value[index, 0] for value in spectrum), entropy, propagation.mean()]
            measures.append(torch.stack(numbers))
            propagations.append(propagation)
        return torch.stack(measures), torch.stack(propagations)


def _standard_error(values: Float[Tensor, " windows"]) -> float:
    """Over windows, as if they were independent."""
    return float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.nan
