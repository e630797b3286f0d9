"""`theodolite train KIND`: parsing only. Nothing heavy is imported."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from theodolite.cli.options import with_option_groups
from theodolite.cli.screen import one_line_errors, screen
from theodolite.system.files import json_text

if TYPE_CHECKING:
    from theodolite_papers.training.models import TaskModelConfig
    from theodolite_papers.training.tasks import Task

training = typer.Typer(
    help="Train a small model of a paper: one of characters, one that adds, or a grid with LocAteR.\n\n"
    "Example: theodolite train addition --digits 10 --out adder",
    no_args_is_help=True,
    rich_markup_mode=None,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print only a record of the training, as JSON.")]


@dataclass(frozen=True)
class _Small:
    steps: Annotated[int | None, typer.Option(help="Training steps [default: as published].")] = None
    batch: Annotated[int | None, typer.Option(help="Contexts per step [default: as published].")] = None
    learning_rate: Annotated[
        float | None, typer.Option("--rate", help="Peak learning rate [default: as published].")
    ] = None
    positions: Annotated[str, typer.Option(help="learned or rotary.")] = "learned"


@dataclass(frozen=True)
class _Running:
    """Options of where a training run goes, and how."""

    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the models and the tokenizer.")]
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2
    as_json: AsJson = False

    def train(self, task: Task, config: TaskModelConfig, options: _Small) -> None:
        """Train a model on a task and print its results; `config` has what no option gives."""
        from theodolite_papers.training.models import train_task_model

        given = {name: value for name, value in asdict(options).items() if value is not None}
        config, console = replace(config, **given, seed=self.seed), _quiet_screen()
        result = train_task_model(self.out, task, config, threads=self.threads, console=console)
        _say(task.summary(result), self.out, self.as_json, result)


@training.command("characters")
@with_option_groups
def characters_command(
    *,
    text: Annotated[Path, typer.Option(help="Training text, such as Shakespeare's plays.")],
    options: _Small,
    running: _Running,
) -> None:
    """Train a character-level model on a text.

    Size, learning rate and steps as in Song & Zhong 2024, appendix A.2.

    Example: theodolite train characters --text shakespeare.txt --out shakespeare
    """
    with one_line_errors():
        from theodolite_papers.training.models import PUBLISHED
        from theodolite_papers.training.tasks import Characters

        running.train(Characters.of_file(text), PUBLISHED["characters"], options)


@training.command("addition")
@with_option_groups
def addition_command(
    *,
    digits: Annotated[str, typer.Option(help="Digits of the operands, as 10 or 5-10.")] = "5-10",
    options: _Small,
    running: _Running,
) -> None:
    """Train a model that adds two numbers.

    Size, learning rate and steps as in Song & Zhong 2024, appendices A.2 and D.3.

    Example: theodolite train addition --digits 10 --positions rotary --out adder
    """
    with one_line_errors():
        from theodolite_papers.training.models import PUBLISHED
        from theodolite_papers.training.tasks import Additions

        running.train(Additions.of_digits(digits), PUBLISHED["addition"], options)


@dataclass(frozen=True)
class _Locater:
    text: Annotated[Path, typer.Option(help="Text to train on, such as a part of WikiText-2.")]
    held_out: Annotated[Path, typer.Option(help="Held-out text to evaluate on.")]
    layers: Annotated[str | None, typer.Option(help="Depths [default: 1].")] = None
    widths: Annotated[str | None, typer.Option(help="Widths d [default: 32].")] = None
    scales: Annotated[str | None, typer.Option(help="κ₁ of training runs with LocAteR [default: 100].")] = (
        None
    )
    means: Annotated[
        str | None,
        typer.Option(help="κ₂ of training runs with LocAteR; '' for none [default: 0,0.001,0.01,0.1,1]."),
    ] = None
    decays: Annotated[
        str | None,
        typer.Option(help="Weight decays of training runs without; '' for none [default: 0,0.01,0.1,1,10]."),
    ] = None
    gradient: Annotated[
        str,
        typer.Option(
            help="Gradient of LocAteR's second term: exact, or published (as printed, which is wrong)."
        ),
    ] = "exact"
    reduction: Annotated[
        str,
        typer.Option(
            help="What LocAteR's κ weighs against: the mean loss of a batch's tokens, or their sum (as fairseq's)."
        ),
    ] = "mean"
    vocabulary: Annotated[
        str | None, typer.Option(help="Number of byte-pair tokens, or words [default: 2048].")
    ] = None
    seeds: Annotated[int, typer.Option(help="Training runs of each setting.")] = 3
    steps: Annotated[int | None, typer.Option(help="Training steps [default: 50000].")] = None
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")] = "cpu"


@training.command("locater")
@with_option_groups
def locater_command(
    *,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder of the grid; an existing grid is resumed or extended.")
    ],
    options: _Locater,
    as_json: AsJson = False,
) -> None:
    """Train with and without LocAteR: every combination of depth, width, κ₂ or weight decay, and seed.

    Bao et al. 2024, section 7. Numbers have commas between them. The training runs follow each other, and can be
    stopped and started again at any time.

    Example: theodolite train locater --text train.txt --held-out test.txt --out grid
    """
    with one_line_errors():
        from theodolite_papers.localization.locater_training import train_locater

        _say(train_locater(out, console=_quiet_screen(), **vars(options)), out, as_json)


def _quiet_screen() -> Console:
    """Hide the progress bars of `transformers`, and return the console that trainers report on."""
    from theodolite.models.stored.loading import hide_progress_bars

    hide_progress_bars()
    return screen


def _say(lines: list[str], out: Path, as_json: bool, training: dict[str, Any] | None = None) -> None:
    if as_json:
        print(json_text({"folder": str(out), "said": lines, "training": training}, 2))
    else:
        print(*lines, out, sep="\n")
