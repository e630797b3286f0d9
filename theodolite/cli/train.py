"""`theodolite train KIND`: the commands of the trainers. Nothing is trained here, and nothing heavy is imported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from theodolite.cli.screen import one_line_errors, screen

training = typer.Typer(
    help="Train a small model: the embedded one again, one of characters, one that adds, one that learns from "
    "examples, models with a no-op option, or a grid with LocAteR.\n\n"
    "Example: theodolite train addition --digits 10 --series --out adder",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Out = Annotated[
    Path, typer.Option("--out", "-o", help="Folder for the model, or the models, and the tokenizer.")
]
Steps = Annotated[int | None, typer.Option(help="Training steps [default: as published].")]
Batch = Annotated[int | None, typer.Option(help="Contexts a step [default: as published].")]
Rate = Annotated[float | None, typer.Option(help="Peak learning rate [default: as published].")]
Positions = Annotated[str, typer.Option(help="learned or rotary.")]
Series = Annotated[bool, typer.Option("--series", help="Keep weights along the way, as OUT/series.")]
Seed = Annotated[int, typer.Option(help="Of every random choice.")]
Threads = Annotated[int, typer.Option(help="Processor cores to use.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print what was trained as JSON and nothing else.")]

RECORDS = ("training.json", "escape.json", "grid.json")
"""What a trainer writes of itself into its folder; the embedded model's card is its README."""


@training.command("embedded")
def embedded_command(
    out: Out,
    steps: Steps = None,
    batch: Batch = None,
    rate: Rate = None,
    seed: Seed = 0,
    threads: Threads = 2,
    as_json: AsJson = False,
) -> None:
    """Train the model inside this package again, on the text inside every Python.

    Example: theodolite train embedded --out topics --seed 0
    """
    with one_line_errors():
        from theodolite.papers.training.command import train_embedded

        options = {"steps": steps, "batch": batch, "learning_rate": rate}
        _say(train_embedded(out, options, seed=seed, threads=threads, console=_quiet_screen()), out, as_json)


@training.command("characters")
def characters_command(
    out: Out,
    text: Annotated[Path, typer.Option(help="Text to read, such as Shakespeare's plays.")],
    positions: Positions = "learned",
    steps: Steps = None,
    batch: Batch = None,
    rate: Rate = None,
    series: Series = False,
    seed: Seed = 0,
    threads: Threads = 2,
    as_json: AsJson = False,
) -> None:
    """Train a model of the characters of a text.

    Song & Zhong 2024, appendix A.2, has sizes, rate and steps.

    Example: theodolite train characters --text shakespeare.txt --series --out shakespeare
    """
    with one_line_errors():
        from theodolite.papers.training.command import train_characters

        options = {
            "positions": positions,
            "steps": steps,
            "batch": batch,
            "learning_rate": rate,
            "series": series,
        }
        _say(
            train_characters(out, text, options, seed=seed, threads=threads, console=_quiet_screen()),
            out,
            as_json,
        )


@training.command("addition")
def addition_command(
    out: Out,
    digits: Annotated[str, typer.Option(help="Digits of what is added, as 10 or 5-10.")] = "5-10",
    positions: Positions = "learned",
    steps: Steps = None,
    batch: Batch = None,
    rate: Rate = None,
    series: Series = False,
    seed: Seed = 0,
    threads: Threads = 2,
    as_json: AsJson = False,
) -> None:
    """Train a model that adds two numbers.

    Song & Zhong 2024, appendices A.2 and D.3, has sizes, rate and steps.

    Example: theodolite train addition --digits 10 --positions rotary --series --out adder
    """
    with one_line_errors():
        from theodolite.papers.training.command import train_addition

        options = {
            "positions": positions,
            "steps": steps,
            "batch": batch,
            "learning_rate": rate,
            "series": series,
        }
        _say(
            train_addition(out, digits, options, seed=seed, threads=threads, console=_quiet_screen()),
            out,
            as_json,
        )


@training.command("few-shot")
def few_shot_command(
    out: Out,
    positions: Annotated[str, typer.Option(help="learned or rotary.")] = "rotary",
    steps: Annotated[int | None, typer.Option(help="Training steps [default: 8000].")] = None,
    batch: Annotated[int | None, typer.Option(help="Prompts a step [default: 32].")] = None,
    rate: Annotated[float | None, typer.Option(help="Peak learning rate [default: 0.001].")] = None,
    series: Series = False,
    seed: Seed = 0,
    threads: Threads = 2,
    as_json: AsJson = False,
) -> None:
    """Train a model that learns a hidden rule from the examples in its prompt: about 15 minutes on one core.

    A label follows from one of two attributes of a word, which and how differs from prompt to prompt. `theodolite
    evaluate OUT --task few-shot` says how often it is right after 0, 1, … 5 examples. Can be stopped and started again.

    Example: theodolite train few-shot --out few-shot --seed 0
    """
    with one_line_errors():
        from theodolite.papers.training.command import train_few_shot

        options = {
            "positions": positions,
            "steps": steps,
            "batch": batch,
            "learning_rate": rate,
            "series": series,
        }
        _say(train_few_shot(out, options, seed=seed, threads=threads, console=_quiet_screen()), out, as_json)


@training.command("escape")
def escape_command(
    out: Out,
    steps: Annotated[int | None, typer.Option(help="Training steps [default: 2000].")] = None,
    seeds: Annotated[int, typer.Option(help="Models of each kind.")] = 3,
    threads: Threads = 2,
    as_json: AsJson = False,
) -> None:
    """Train models whose heads have a no-op option, and models whose heads have none.

    The escape is in the softmax and carries no value: off by one, or a learned logit. Sinks would be one too; whether
    they are still grown is for `theodolite reproduce sinks/escape OUT` to say. Can be stopped and started again.

    Example: theodolite train escape --out escape --seeds 3
    """
    with one_line_errors():
        from theodolite.papers.catch_tag_release.escape_training import DEFAULT, train_escapes

        config = DEFAULT if steps is None else replace(DEFAULT, steps=steps)
        _say(
            train_escapes(out, seeds=seeds, config=config, threads=threads, console=_quiet_screen()),
            out,
            as_json,
        )


@training.command("locater")
def locater_command(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder of the grid; one that is there is gone on with.")
    ],
    text: Annotated[Path, typer.Option(help="Text to train on, such as a part of WikiText-2.")],
    held_out: Annotated[Path, typer.Option(help="Text to judge on.")],
    layers: Annotated[str | None, typer.Option(help="Depths [default: 1].")] = None,
    widths: Annotated[str | None, typer.Option(help="Widths d [default: 32].")] = None,
    means: Annotated[
        str | None,
        typer.Option(help="κ₂ of training runs with LocAteR; '' for none [default: 0,0.001,0.01,0.1,1]."),
    ] = None,
    decays: Annotated[
        str | None,
        typer.Option(help="Weight decays of training runs without; '' for none [default: 0,0.01,0.1,1,10]."),
    ] = None,
    gradient: Annotated[
        str, typer.Option(help="Of LocAteR's second term: exact, or published (as printed, and wrong).")
    ] = "exact",
    vocabulary: Annotated[
        str | None, typer.Option(help="Number of byte-pair tokens, or words [default: 2048].")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Training runs of each setting.")] = 3,
    steps: Annotated[int | None, typer.Option(help="Training steps [default: 50000].")] = None,
    side_by_side: Annotated[int, typer.Option(help="Training runs at a time, on a core each.")] = 1,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Train with LocAteR and without: every depth, width, κ₂ or weight decay, and seed.

    Bao et al. 2024, section 7. Numbers have commas between them. The training runs go on in rounds of 5,000 steps, and
    can be stopped and started again at any time.

    Example: theodolite train locater --text train.txt --held-out test.txt --out grid --side-by-side 2
    """
    with one_line_errors():
        from theodolite.papers.localization.locater_command import LocaterOptions, train_locater

        options = LocaterOptions(
            text,
            held_out,
            layers,
            widths,
            means,
            decays,
            gradient,
            vocabulary,
            seeds,
            steps,
            side_by_side,
            device,
        )
        _say(train_locater(out, options, _quiet_screen()), out, as_json)


def _quiet_screen() -> Console:
    """Where trainers say how they are, without the bars of `transformers` between their lines."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    return screen


def _say(lines: list[str], out: Path, as_json: bool) -> None:
    if not as_json:
        for line in [*lines, str(out)]:
            print(line)
        return
    records = (
        json.loads((out / name).read_text(encoding="utf-8")) for name in RECORDS if (out / name).is_file()
    )
    print(json.dumps({"folder": str(out), "said": lines, "training": next(records, None)}, indent=2))
