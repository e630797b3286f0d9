"""Train language models with LocAteR and without (Bao et al. 2024, section 7): the text, one run, a grid of runs.

A training run lives in a folder and resumes from its checkpoint to any further step, with the same bytes. Runs of one
seed see the same batches, initial weights and dropout, which pairs them.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from rich.console import Console
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from theodolite.errors import TheodoliteError, UsageError, WorkError
from theodolite.evaluate.scores import mean_and_error
from theodolite.jobs.job import JOB, Unfinished, read_job
from theodolite.passes.corpus_pass import perplexity_of
from theodolite.system.files import (
    check_target,
    disk_errors,
    json_text,
    read_checked,
    write_atomically,
    write_checked,
    write_text,
)
from theodolite.system.processor import multiplies_halves, using_threads
from theodolite.system.progress import STOPPING, interruptible
from theodolite.theory import empirical_propagation, qk_moments
from theodolite.train.locater import Gradient, locater_penalty
from theodolite_papers.localization.decoder import Decoder, DecoderShape, as_opt
from theodolite_papers.training.tasks import byte_pair_tokenizer, read_text
from theodolite_papers.training.trainer import Trainer, check_numbers

END_OF_LINE, UNKNOWN = "</s>", "<unk>"


@dataclass(frozen=True)
class GridText:
    """Windows of length + 1 tokens, each sharing one token with the next, so that every token is predicted once.

    tokenizer: trained on the training text alone. tokens_per_word: of the held-out text; a line end is a word, as in
    the usual perplexity of WikiText. sha256: of both files' text and of how it was cut.
    """

    tokenizer: Tokenizer
    train: Int[Tensor, "windows window"]
    held_out: Int[Tensor, "windows window"]
    tokens_per_word: float
    sha256: str

    def batch(self, step: int, size: int, seed: int) -> Int[Tensor, "size window"]:
        """Return the windows of a step: every epoch in another order, its last incomplete batch left out."""
        epoch, place = divmod(step, len(self.train) // size)
        return self.train[_order(len(self.train), seed, epoch)[place * size : (place + 1) * size]]


@lru_cache(maxsize=4)
def _order(windows: int, seed: int, epoch: int) -> Int[Tensor, " windows"]:
    return torch.from_numpy(np.random.default_rng([seed, epoch]).permutation(windows))


@dataclass(frozen=True)
class TextFiles:
    """The text to train on, and the held-out one."""

    train: Path
    held_out: Path

    def read(self, recipe: Recipe) -> GridText:
        """Tokenize and cut both."""
        texts = [read_text(path, "file") for path in (self.train, self.held_out)]
        vocabulary, length = recipe.vocabulary, recipe.length
        tokenizer = (
            word_tokenizer(texts[0]) if vocabulary is None else byte_pair_tokenizer(texts[:1], vocabulary)
        )
        streams = [np.array(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]
        for path, stream, least in zip((self.train, self.held_out), streams, (recipe.batch, 1), strict=True):
            if len(stream) <= least * length:
                needed = least * length + 1
                raise UsageError(f"{path} has {len(stream)} tokens; give a text of {needed} or more.")
        words = len(texts[1].split()) + texts[1].count("\n")
        cut = [_windows(stream, length) for stream in streams]
        return GridText(tokenizer, cut[0], cut[1], len(streams[1]) / words, self.sha256(recipe))

    def sha256(self, recipe: Recipe) -> str:
        """Hash of both files' text and of how they are cut."""
        digest = hashlib.sha256(f"{recipe.length} {recipe.vocabulary}".encode())
        for path in (self.train, self.held_out):
            digest.update(hashlib.sha256(read_text(path, "file").encode()).digest())
        return digest.hexdigest()


def kept_text(work: Unfinished, files: TextFiles, recipe: Recipe) -> GridText:
    """Return the text of a grid as its folder keeps it, which the first call reads from `files`."""

    def read() -> tuple[dict[str, Tensor], dict[str, Any]]:
        text = files.read(recipe)
        notes = {"sha256": text.sha256, "tokens_per_word": text.tokens_per_word}
        notes |= {"tokenizer": text.tokenizer.to_str()}
        return {"train": text.train, "held_out": text.held_out}, notes

    work.save_once("text", read)
    tensors, notes = work.load("text") or ({}, {})
    if notes["sha256"] != files.sha256(recipe):
        raise UsageError(f"{work.folder} holds a grid of another text or vocabulary; choose another folder.")
    tokenizer = Tokenizer.from_str(notes["tokenizer"])
    cut = tensors["train"], tensors["held_out"]
    return GridText(tokenizer, *cut, notes["tokens_per_word"], notes["sha256"])


def word_tokenizer(text: str) -> Tokenizer:
    """Make a tokenizer of words between white space, frequent ones first, and line ends; others become `<unk>`."""
    counts = Counter(text.split())
    words = sorted(counts.keys() - {END_OF_LINE, UNKNOWN}, key=lambda word: (-counts[word], word))
    vocabulary = {word: index for index, word in enumerate([END_OF_LINE, UNKNOWN, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Replace(Regex("\n"), f" {END_OF_LINE} ")
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def _windows(stream: np.ndarray, length: int) -> Int[Tensor, "windows window"]:
    starts = np.arange((len(stream) - 1) // length) * length
    return torch.from_numpy(stream[starts[:, None] + np.arange(length + 1)].astype(np.int64))


PUBLISHED_STEPS = 50_000
BETAS = (0.9, 0.999)
EARLY = (1, 2, 5, 10, 20, 50, 100)  # steps that are measured besides the regular ones and step 0

Reduction = Literal["mean", "sum"]
"""Of the loss over a batch's tokens, where the penalty is added to it; the paper doesn't say which.

fairseq sums, and divides the gradient by the number of tokens later: added to its sum, a penalty weighs so much less.
"""

LOSSES = ("training_loss", "held_out_loss", "held_out_loss_se")
HEADS = ("trace", "trace_of_square", "frobenius_squared", "entropy", "propagation")


@dataclass(frozen=True)
class Recipe:
    """Settings that all runs of a grid share; the defaults are as published or, where the paper is silent, fairseq's.

    Published: length, batch, one head, the decoder, Adam with (0.9, 0.999) and 1e-8, no clipping, a fixed rate, half
    precision. fairseq 0.12.2: dropout 0.1 on embeddings and on both sublayers' outputs and none in attention, its
    positions, embeddings, initial weights and untied output, decoupled weight decay on all parameters, batches of whole
    blocks of the running text in another order every epoch. Ours: the vocabulary (theirs is of whole words: None);
    bfloat16 in the output's products only, where nearly all of the time goes (float32 on processors without).
    """

    length: int = 64  # tokens of a context
    batch: int = 64  # contexts per step
    vocabulary: int | None = 2048  # of a byte-level BPE; None: one token per word
    dropout: float = 0.1
    bfloat16: bool = field(default_factory=multiplies_halves)
    measure_every: int = 250  # steps
    measured_windows: int = 512  # of the held-out text, evenly chosen; the last measurement takes all
    checkpoint_every: int = 1000  # steps


@dataclass(frozen=True)
class Setting:
    """Settings that distinguish one training run: κ₁ and κ₂, and the loss that the penalty is added to."""

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
        for given, choices in ((self.gradient, Gradient), (self.reduction, Reduction)):
            if given not in get_args(choices):
                raise UsageError(
                    f"{self.name}: there is no {given}; choose {' or '.join(get_args(choices))}."
                )
        check_numbers(self.seed)


def published_rate(width: int) -> float:
    """Return 1e-4 at d = 32 and 2.5e-5 at d = 128 (appendix D); inversely proportional to d elsewhere, as these two."""
    return 32e-4 / width


class LocaterTraining:
    """A model and what was measured of it so far; from its folder's checkpoint if there is one."""

    def __init__(self, folder: Path, setting: Setting, recipe: Recipe, text: GridText, device: str) -> None:
        setting.check()
        self.folder, self.setting, self.recipe, self.text = folder, setting, recipe, text
        self.device = torch.device(device)
        torch.manual_seed(setting.seed)
        shape = DecoderShape(
            text.tokenizer.get_vocab_size(), setting.width, setting.layers, recipe.length, recipe.dropout
        )
        self.model = Decoder(shape).to(self.device)
        parameters, decay = self.model.parameters(), setting.weight_decay
        self.trainer = Trainer(
            work=Unfinished(folder, asdict(setting), kind="training run", folder=folder),
            model=self.model,
            optimizer=torch.optim.AdamW(parameters, betas=BETAS, weight_decay=decay, fused=True),
            loss=self._loss,
            rate=lambda step: published_rate(setting.width),
            seed=setting.seed,
            save_every=recipe.checkpoint_every,
            measure=self._measure,
            before_save=self._write_tables,
            kept={
                # The loss since the last measurement.
                "summed": torch.zeros((), dtype=torch.float64, device=self.device),
                "history/steps": torch.zeros(0, dtype=torch.int64),
                "history/losses": torch.zeros(0, len(LOSSES), dtype=torch.float64),
                "history/heads": torch.zeros(0, setting.layers, len(HEADS), dtype=torch.float64),
                "history/propagation": torch.zeros(0, setting.layers, recipe.length),
            },
        )
        self.trainer.resume()

    @property
    def step(self) -> int:
        """Number of updates done."""
        return self.trainer.step

    def history(self, name: str) -> Tensor:
        """Return the measurements so far: `steps`, `losses`, `heads` or `propagation`, a row each."""
        return self.trainer.kept[f"history/{name}"]

    def progress(self) -> str:
        """Report the step, and the held-out loss when it was last measured."""
        last = self.tables()[0].iloc[-1]
        return f"step {self.step}, held-out loss {last['held_out_loss']:.4f} at step {int(last['step'])}"

    def finish(self) -> None:
        """Write the model as `transformers` opens it, and its loss on all held-out text, unless that is done."""
        place = self.folder / "summary.json"
        if place.exists() and json.loads(place.read_text(encoding="utf-8"))["step"] == self.step:
            return
        losses = self._held_out(self.text.held_out)
        mean, error = mean_and_error(losses.numpy())
        summary = {
            **asdict(self.setting),
            **asdict(self.recipe),
            "learning_rate": published_rate(self.setting.width),
            "text_sha256": self.text.sha256,
            "step": self.step,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "held_out_tokens": losses.numel() * self.recipe.length,
            "held_out_loss": mean,
            "held_out_loss_se": error,
            "tokens_per_word": self.text.tokens_per_word,
        }
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=self.text.tokenizer, model_max_length=self.recipe.length
        )
        with disk_errors(self.folder):
            as_opt(self.model).save_pretrained(self.folder / "model")
            tokenizer.save_pretrained(self.folder / "model")
            write_text(place, json_text(summary, 2) + "\n")

    def tables(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Tabulate the measurements: losses by step; head measures by step and layer."""
        steps, layers = self.history("steps").numpy(), self.setting.layers
        losses = pd.DataFrame(self.history("losses").numpy(), columns=list(LOSSES))
        heads = pd.DataFrame(self.history("heads").flatten(0, 1).numpy(), columns=list(HEADS))
        heads.insert(0, "layer", np.tile(np.arange(layers), len(steps)))
        for table, of_rows in ((losses, steps), (heads, np.repeat(steps, layers))):
            table.insert(0, "step", of_rows)
        return losses, heads

    def _write_tables(self) -> None:
        """Write what was measured, each file whole or not at all: never older than the checkpoint that follows."""
        for name, table in zip(("losses.parquet", "heads.parquet"), self.tables(), strict=True):
            write_atomically(self.folder / name, partial(table.to_parquet, index=False))
        curves = {name: self.history(name) for name in ("steps", "propagation")}
        write_atomically(self.folder / "propagation.safetensors", lambda path: write_checked(path, curves))

    def _loss(self, step: int) -> Tensor:
        setting, recipe = self.setting, self.recipe
        window = self.text.batch(step, recipe.batch, setting.seed).to(self.device)
        dtype = torch.bfloat16 if recipe.bfloat16 else torch.float32
        loss = self.model.loss(window[:, :-1], window[:, 1:], dtype)
        self.trainer.kept["summed"] += loss.detach()
        if setting.scale or setting.mean:
            w_q, w_k = self._factors()
            penalty = locater_penalty(w_q, w_k, setting.scale, setting.mean, gradient=setting.gradient)
            loss = loss + (penalty if setting.reduction == "mean" else penalty / window[:, 1:].numel())
        return loss

    def _factors(self) -> tuple[Tensor, Tensor]:
        pairs = [block.factors() for block in self.model.blocks]  # type: ignore[operator]
        w_q, w_k = (torch.stack(part) for part in zip(*pairs, strict=True))
        return w_q, w_k

    def _measure(self, step: int, _: Tensor | None) -> None:
        """Add a row to every table, after the steps that are measured."""
        if step % self.recipe.measure_every and step not in EARLY:
            return
        kept = self.trainer.kept
        before = int(self.history("steps")[-1]) if step else 0
        training = float(kept["summed"]) / (step - before) if step else math.nan
        if step and not math.isfinite(training):
            raise WorkError(f"The loss of {self.setting.name} is {training} before step {step}.")
        kept["summed"].zero_()
        held_out = self.text.held_out
        count = min(self.recipe.measured_windows, len(held_out))
        losses = self._held_out(held_out[np.linspace(0, len(held_out) - 1, count).astype(int)])
        row = [training, *mean_and_error(losses.numpy())]
        heads, propagation = self._heads(held_out[: self.recipe.batch, :-1])
        for name, values in (
            ("steps", torch.tensor(step)),
            ("losses", torch.tensor(row, dtype=torch.float64)),
            ("heads", heads),
            ("propagation", propagation.float()),
        ):
            kept[f"history/{name}"] = torch.cat([self.history(name), values.cpu()[None]])

    def _held_out(self, windows: Tensor) -> Float[Tensor, " windows"]:
        """Compute each window's mean loss in nats per token, dropout off, weights and products in float32."""
        self.model.eval()
        parts = windows.to(self.device).split(self.recipe.batch)
        losses = [self.model.losses(part[:, :-1], part[:, 1:]).double().mean(1) for part in parts]
        return torch.cat(losses).cpu()

    @torch.no_grad()
    def _heads(self, ids: Tensor) -> tuple[Float[Tensor, "layers measures"], Float[Tensor, "layers length"]]:
        """Measure `HEADS` of every layer, dropout off, and ρ_i of the last query as a frequency over the windows."""
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


WORDS = "words"


def train_locater(
    out: Path,
    text: Path,
    held_out: Path,
    console: Console,
    *,
    seeds: int = 3,
    steps: int | None = None,
    gradient: Gradient = "exact",
    reduction: Reduction = "mean",
    vocabulary: str | None = None,
    device: str = "cpu",
    **numbers: str | None,
) -> list[str]:
    """Train what is missing of the grid; returns a line on each training run.

    vocabulary: tokens of the BPE, or `words`. numbers: layers, widths, scales (κ₁), means (κ₂) and decays of
    `grid_settings`, joined by commas; an empty text: none of them. None: as published.
    """
    if seeds < 1:
        raise UsageError(f"--seeds is {seeds}; give 1 or more.")
    if vocabulary not in (None, WORDS) and not vocabulary.isdecimal():
        raise UsageError(f"--vocabulary is '{vocabulary}'; give a number of tokens, or {WORDS}.")
    recipe = Recipe(bfloat16=multiplies_halves(device))
    if vocabulary is not None:
        recipe = replace(recipe, vocabulary=None if vocabulary == WORDS else int(vocabulary))
    how: dict[str, Any] = {
        name: _numbers(name, given) for name, given in numbers.items() if given is not None
    }
    settings = grid_settings(Setting(gradient=gradient, reduction=reduction), seeds=seeds, **how)
    steps = PUBLISHED_STEPS if steps is None else steps
    train_grid(Job(out, recipe, steps, device), settings, TextFiles(text, held_out), console)
    lines = []
    for run in read_grid(out)[1]:
        if run.summary and run.setting in settings:
            perplexity = perplexity_of(run.summary["held_out_loss"])
            error = perplexity * (run.summary["held_out_loss_se"] or math.nan)  # null: one window
            known = f"held-out perplexity {perplexity:.2f} (± {error:.2f} over contexts)"
            lines.append(f"{run.setting.name}: step {run.summary['step']}, {known}")
    return lines


def _numbers(name: str, given: str) -> tuple[Any, ...]:
    kind = int if name in ("layers", "widths") else float
    try:
        return tuple(dict.fromkeys(kind(part) for part in given.split(",") if part.strip()))
    except ValueError:
        raise UsageError(f"--{name} is '{given}'; give numbers with commas between them.") from None


RUN_FOLDERS = "points"


def grid_settings(
    how: Setting = Setting(),
    *,
    seeds: int = 3,
    layers: Sequence[int] = (1,),
    widths: Sequence[int] = (32,),
    scales: Sequence[float] = (100.0,),
    means: Sequence[float] = (0.0, 1e-3, 1e-2, 1e-1, 1.0),
    decays: Sequence[float] = (0.0, 0.01, 0.1, 1.0, 10.0),
) -> list[Setting]:
    """List the published settings, and as many weight decays without LocAteR; a seed's before the next seed's.

    how: gradient and reduction of the LocAteR runs. scales, means: their κ₁ and κ₂. decays: of the runs without; 0.01
    is the published one.
    """
    kinds = [replace(how, scale=scale, mean=mean) for scale, mean in product(scales, means)]
    kinds += [Setting(weight_decay=decay) for decay in decays]
    return [
        replace(kind, layers=depth, width=width, seed=seed)
        for depth, width, seed in product(layers, widths, range(seeds))
        for kind in kinds
    ]


@dataclass(frozen=True)
class Job:
    """What the runs of a grid share: the folder, the recipe, the steps and the device."""

    folder: Path
    recipe: Recipe
    steps: int
    device: str

    @property
    def work(self) -> Unfinished:
        """The folder: how its training runs are made, and their text."""
        claim = {**asdict(self.recipe), "device": torch.device(self.device).type}
        return Unfinished(self.folder, claim, kind="grid", folder=self.folder)


def train_grid(job: Job, settings: list[Setting], files: TextFiles, console: Console) -> None:
    """Bring every setting to `job.steps` steps."""
    if not settings or job.steps < 1:
        raise UsageError(f"there is nothing to train: give at least one {'step' if settings else 'setting'}.")
    for setting in settings:
        setting.check()
    check_target(job.folder)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    with job.work.claimed():
        text = kept_text(job.work, files, job.recipe)
        say(f"{len(settings)} training runs of {job.steps} steps in {job.folder}")
        with interruptible(lambda: say(STOPPING)) as pressed:
            failed = train_in_turn(settings, job, text, pressed, say)
    if failed:
        raise WorkError("; ".join(failed))


def train_in_turn(
    settings: list[Setting], job: Job, text: GridText, stop: Callable[[], bool], say: Callable[[str], None]
) -> list[str]:
    """Train the settings one after another; returns why some failed."""
    failed = []
    with using_threads(1 if torch.device(job.device).type == "cpu" else torch.get_num_threads()):
        for setting in settings:
            if stop():
                return []
            try:
                began, folder = time.perf_counter(), job.folder / RUN_FOLDERS / setting.name
                training = LocaterTraining(folder, setting, job.recipe, text, job.device)
                first_step = training.step
                if training.trainer.advance(job.steps, stop):
                    training.finish()
                if steps := training.step - first_step:
                    pace = f"{steps / (time.perf_counter() - began):.1f} steps per second"
                    say(f"{setting.name}: {training.progress()}, {pace}")
            except TheodoliteError as error:
                failed.append(str(error))
                say(f"{setting.name}: {error}")
    return failed


@dataclass(frozen=True)
class GridRun:
    """The measurements of one training run of a grid so far."""

    setting: Setting
    losses: pd.DataFrame
    heads: pd.DataFrame
    propagation: Float[Tensor, "steps layers length"]  # ρ_i of the last query
    propagation_steps: list[int]
    summary: dict[str, Any] | None  # on all held-out text; None before the last step


def is_grid(folder: str | Path) -> bool:
    """Tell whether a grid of training runs is there, finished or not."""
    return (Path(folder) / JOB).is_file() and (Path(folder) / RUN_FOLDERS).is_dir()


def read_grid(folder: str | Path) -> tuple[dict[str, Any], list[GridRun]]:
    """Read the recipe of a grid and all of its training runs by name; also while they are running."""
    folder = Path(folder)
    if not is_grid(folder):
        raise UsageError(f"{folder} holds no grid; make one with `theodolite train locater`.")
    recipe, _ = read_job(folder)
    places = sorted((folder / RUN_FOLDERS).glob("*"))
    # The last file of the first save.
    runs = [_grid_run(place) for place in places if (place / "propagation.safetensors").exists()]
    if not runs:
        raise UsageError(f"{folder} holds no saved training run yet; wait for the first checkpoint.")
    return recipe, runs


def _grid_run(folder: Path) -> GridRun:
    summary = folder / "summary.json"
    setting = Setting(**read_job(folder)[0])
    losses, heads = (pd.read_parquet(folder / f"{name}.parquet") for name in ("losses", "heads"))
    curves, _ = read_checked(folder / "propagation.safetensors")
    end = json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else None
    return GridRun(setting, losses, heads, curves["propagation"], curves["steps"].tolist(), end)
