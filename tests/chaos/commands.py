"""The commands that the chaos suite disturbs, what they read, and the rule that each must end by.

The rule: the right bytes or numbers; or a refusal, one line and a status other than 0; and nothing lost.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack, redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from tests import checkpoints
from theodolite.cli.app import app
from theodolite.cli.screen import one_line_errors
from theodolite.corpus.corpus import Corpus
from theodolite.jobs import job
from theodolite.jobs.job import Unfinished
from theodolite.models import open_model
from theodolite.passes.survey import merge, survey
from theodolite_papers.localization import locater_training as grid
from theodolite_papers.localization.locater_training import Recipe, Setting, TextFiles
from theodolite_papers.training import models, tasks
from theodolite_papers.training.trainer import Trainer

RIGHT, REFUSED = "right", "refused"
WRONG = "wrong"
"""Other bytes or numbers than those of an undisturbed run, and no word of it."""
UNFORESEEN = "unforeseen"
"""It ended in an error that nobody had foreseen: a traceback, several lines, a signal, or no end at all."""
LOST = "lost"
"""What had been there, or had been computed and kept, is gone; or something is left that a rerun falls over."""
BAD = (WRONG, UNFORESEEN, LOST)


@dataclass(frozen=True)
class Trial:
    """One disturbance of one command, its answer, and what was said."""

    what: str
    command: str
    answer: str
    said: str = ""


@dataclass(frozen=True)
class Command:
    """A command: its words, "@" the folder of all files, or a function of that folder.

    Attributes:
        numbers: patterns of the files that hold its numbers; without any, standard output holds them.
        kills: how often it is killed at file events; fewer where it takes about a second.
    """

    words: tuple[str, ...] | Callable[[Path], object]
    numbers: tuple[str, ...] = ()
    kills: int = 0


TEXT = "The theodolite stands on its tripod; one reads the angle twice, and then a third time. " * 60


def _train(root: Path, out: str = "out") -> object:
    """A training smaller than the command can make it."""
    config = models.TaskModelConfig(2, 2, 16, 4, 20, 1e-3, "cosine", checkpoint_every=4)
    config = replace(config, positions="learned")
    task = tasks.Characters.of_text(TEXT, length=32)
    return models.train_task_model(root / out, task, config, threads=1, console=Console(quiet=True))


def _train_grid(root: Path) -> None:
    recipe = replace(Recipe(), length=16, batch=4, vocabulary=None, measure_every=3, checkpoint_every=2)
    settings = [Setting(layers=1, width=8, seed=0, scale=100.0, mean=0.1), Setting(1, 8, 0)]
    files = TextFiles(root / "text.txt", root / "text.txt")
    grid.train_grid(grid.Job(root / "out", recipe, 9, "cpu"), settings, files, Console(quiet=True))


def _in_shards(root: Path) -> None:
    """A survey in two shards, and what merges them."""
    model = open_model(root / "model")
    corpus = Corpus.from_path(root / "text.txt", model.tokenizer, 32, contexts=4)
    for number in (1, 2):
        survey(model, corpus, root / "out", batch=1, shard=(number, 2))
    merge(root / "out", model)


ONE = ("--batch", "1", "--contexts", "4")
READ = ("--corpus", "@/text.txt", "--length", "32", *ONE)
NUMBERS = ("out/*.parquet", "out/*.safetensors")
SURVEY = ("survey", "@/model", *READ, "--out", "@/out")
PRUNE = ("prune", "@/model", *READ, "--json")
EVALUATE = ("evaluate", "@/model", "--task", "few-shot", "--prompts", "4", "--shots", "0,2", "--json")
TRAINED = ("*/training.json", "*/*.safetensors")


COMMANDS: dict[str, Command] = {
    "survey": Command(SURVEY, NUMBERS, kills=8),
    "survey, resumed": Command((*SURVEY[:-1], "@/half"), ("half/*.parquet", "half/*.safetensors")),
    "survey, run": Command((*SURVEY[:-1], "@/run"), NUMBERS),
    "survey in shards": Command(_in_shards, NUMBERS, kills=16),
    "trace": Command(("trace", "@/model", *READ, "--out", "@/out"), kills=16),
    "trace, kept": Command(("trace", "@/model", *READ, "--out", "@/trace")),
    "spectra": Command(("spectra", "@/model", "--out", "@/out"), NUMBERS, kills=16),
    "spectra of factors": Command(("spectra", "@/factored", "--out", "@/out"), NUMBERS),
    "prune": Command((*PRUNE, "--out", "@/out"), kills=8),
    "prune to factors": Command((*PRUNE, "--format", "factored", "--out", "@/out"), kills=8),
    "prune, again": Command((*PRUNE, "--method", "oats", "--out", "@/pruned")),
    "prune to factors, again": Command(
        (*PRUNE, "--method", "oats", "--format", "factored", "--out", "@/factored")
    ),
    "compare": Command(
        ("compare", "@/model", "@/other", *READ[:2], "--length", "16", *ONE, "--out", "@/out"), kills=8
    ),
    "evaluate": Command(("evaluate", "@/model", "@/other", *READ, "--out", "@/scores.json"), kills=16),
    "answers": Command((*EVALUATE, "--out", "@/answers.json")),
    "exclude": Command(("exclude", "@/run", "--out", "@/out.json"), ("out.json",), kills=16),
    "exclude by a trace": Command(("exclude", "@/trace", "--out", "@/out.json"), ("out.json",)),
    "report": Command(("report", "@/run"), ("run/report/index.html",), kills=16),
    "reproduce theory": Command(
        ("reproduce", "localization/figure1,localization/figure3", "--out", "@/out"), kills=16
    ),
    "reproduce": Command(
        (
            "reproduce",
            "geometry/table1,geometry/figure2",
            "@/model",
            *READ[:4],
            "--contexts",
            "4",
            "--out",
            "@/out",
        ),
        kills=8,
    ),
    "train characters": Command(_train, TRAINED, kills=16),
    "train, trained": Command(partial(_train, out="trained"), TRAINED),
    "train, begun": Command(partial(_train, out="begun"), TRAINED),
    "train locater": Command(_train_grid, kills=16),
}


def called(command: Command, root: Path) -> tuple[int, str, str]:
    """Run it in this process, saving progress after every batch: status, standard output and errors."""
    with ExitStack() as around:
        around.enter_context(mock.patch.object(job, "CHECKPOINT_SECONDS", 0.0))
        if isinstance(command.words, tuple):
            words = [word.replace("@", str(root)) for word in command.words]
            result = CliRunner().invoke(app, words, prog_name="theodolite", catch_exceptions=False)
            return result.exit_code, result.stdout, result.stderr
        stderr, status = around.enter_context(redirect_stderr(io.StringIO())), 0
        try:
            with one_line_errors():
                command.words(root)
        except typer.Exit as end:
            status = end.exit_code
        return status, "", stderr.getvalue()


def is_refusal(status: int, stderr: str) -> bool:
    """Whether it ended as commands do that refuse something: in one line."""
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    return status > 0 and len(errors) == 1 and "Traceback" not in stderr


TIME = re.compile(rb"(wall_seconds\W[^0-9]{1,60}?)[0-9.e+-]+")
NONCE = re.compile(rb"nonce\W{1,2}[0-9a-f]{32}")


def contents(folder: Path) -> dict[str, bytes]:
    """All below a folder, but for how long the work took; a page's nonce is its hash, and follows from that."""
    found = {}
    for path in sorted(folder.rglob("*")):
        data = os.readlink(path).encode() if path.is_symlink() else b"folder"
        if path.is_file():
            data = path.read_bytes()
            data = TIME.sub(rb"\1", data) if path.suffix in (".json", ".html") else data
            data = NONCE.sub(b"nonce", data) if path.suffix == ".html" else data
        found[str(path.relative_to(folder))] = data
    return found


def other_bytes(found: dict[str, bytes], expected: dict[str, bytes]) -> str:
    """The files that differ, or are in one of both only."""
    return ", ".join(sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name)))


class Files:
    """What commands read, always at one place, `root`: a model's name is a part of what is written."""

    def __init__(self, folder: Path) -> None:
        self.root, self.whole = folder / "files", folder / "whole"

    def prepare(self, commands: Iterable[Command], named: str = "") -> None:
        """Write what the commands and the words of `named` name, by the commands that write it."""
        words = [
            word for each in commands if isinstance(each.words, tuple) for word in each.words if "@" in word
        ]
        names = {*re.findall("[a-z]+", f"{words} {named}")}
        shutil.rmtree(self.whole, ignore_errors=True)
        self.root.mkdir(exist_ok=True)
        _with_sinks(checkpoints.build("gpt2")).save_pretrained(self.root / "model")
        checkpoints.byte_tokenizer().save_pretrained(self.root / "model")
        (self.root / "text.txt").write_text(TEXT)
        for name in sorted(names & MAKERS.keys()):
            MAKERS[name](self.root)
        for script in self.root.rglob("plotly.min.js"):
            script.unlink()  # four megabytes, which are written anew
        self.root.rename(self.whole)

    def restore(self) -> None:
        """All as it was prepared, and nothing else."""
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.whole, self.root, symlinks=True)


def _with_sinks(model: Any) -> Any:
    """With sinks and massive activations, so that no table is without rows."""
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight.mul_(3)
        model.transformer.wpe.weight[0, 5] = 300.0
    return model


def _by(name: str) -> Callable[[Path], None]:
    """What a command itself writes where nothing is there to be read."""

    def make(root: Path) -> None:
        status, _, stderr = called(COMMANDS[name], root)
        assert status == 0, (name, stderr)

    return make


def _interrupted(command: str, module: Any, name: str) -> Callable[[Path], None]:
    """What a command leaves that is interrupted when it has saved its progress for the first time."""
    save = getattr(module, name)

    def then_interrupt(*args: Any, **kwargs: Any) -> None:
        save(*args, **kwargs)
        raise KeyboardInterrupt

    def make(root: Path) -> None:
        with mock.patch.object(module, name, then_interrupt):
            assert called(COMMANDS[command], root)[0] == 130

    return make


MAKERS: dict[str, Callable[[Path], object]] = {
    "other": lambda root: checkpoints.write("gpt2", root / "other", 1),
    "run": _by("survey, run"),
    "trace": _by("trace, kept"),
    "pruned": _by("prune, again"),
    "factored": _by("prune to factors, again"),
    "answers": _by("answers"),
    "trained": _by("train, trained"),
    "half": _interrupted("survey, resumed", Unfinished, "save"),
    "begun": _interrupted("train, begun", Trainer, "save"),
}
"""What writes each kind of file, by the name that it begins with; the model and the text are always there."""
