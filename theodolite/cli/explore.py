"""`theodolite explore`: parsing, and which functions do the work. Nothing heavy is imported."""

from __future__ import annotations

import importlib.util
import os
import threading
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from rich.console import Console

from theodolite.cli.options import Model, Opening, Text, contexts_option, option
from theodolite.cli.screen import bars, one_line_errors, say_dimly, say_stopping
from theodolite.errors import UsageError
from theodolite.system.choices import refuse_unread
from theodolite.system.progress import interruptible
from theodolite.system.run_folders import check_run
from theodolite.system.wording import model_name, names_of, with_extra

if TYPE_CHECKING:
    from theodolite.corpus.corpus import Corpus
    from theodolite.explore.subject import PlannedSurvey
    from theodolite.models import OpenModel
    from theodolite.passes.run import Run
    from theodolite.system.progress import ShowStage

_GRADIO = dict.fromkeys(("GRADIO_ANALYTICS_ENABLED", "GRADIO_MCP_SERVER", "GRADIO_SSR_MODE"), "False") | {
    "HF_HUB_DISABLE_TELEMETRY": "1"
}
"""Nothing is sent, and nothing served but the page."""


@dataclass(frozen=True)
class _SurveyText(Text):
    contexts: int | None = contexts_option(32)

    default_contexts: ClassVar[int] = 32  # takes a minute, and is enough for a mean at each position


def explore_command(
    *,
    model: Model = None,
    other: Annotated[
        str | None,
        typer.Argument(
            help="A second model, such as a pruned one, shown next to the first; same tokenizer and shape."
        ),
    ] = None,
    runs: list[Path] | None = option("Folder of a finished survey; once per model.", None, "--run"),
    text: _SurveyText,
    port: int | None = option("Port [default: the first free one from 7860]."),
    browser: bool = option("Open the page in a browser.", True),
    opening: Opening,
) -> None:
    """Explore a model head by head on prompts of your own, on a page served to this machine only.

    After the first prompt the model is surveyed on a short text, for statistics over contexts; --run uses a finished
    survey instead.

    Example: theodolite explore gpt2 runs/gpt2-pruned
    """
    with one_line_errors(saves=False):
        names = [model] if other is None else [model, other]
        if runs:
            refuse_unread("--run brings its own text", text.given())
            if len(runs) != len(names):
                raise UsageError(f"{len(runs)} --run for {len(names)} models: give one per model, in order")
            for folder in runs:
                check_run(folder)
        opening.check(*names)
        text.check()

        if importlib.util.find_spec("gradio") is None:
            raise UsageError(f"the page needs gradio: {with_extra('explore')}")
        with TemporaryDirectory(prefix="theodolite-explore-") as temporary:  # what gradio writes
            os.environ |= _GRADIO | {"GRADIO_TEMP_DIR": temporary}  # before it is imported
            from theodolite.explore.page import application, listen, serve
            from theodolite.explore.subject import Subject, check_pair
            from theodolite.logits.constituents import check_run as check_run_of
            from theodolite.passes.run import Run

            ended = threading.Event()
            with listen(port) as listening:
                finished = list(map(Run.load, runs or ()))
                corpora = [opening.read_first(name, None if runs else text) for name in names]
                opened = [opening.open(name) for name in names]
                called = names_of([each.id for each in opened])
                check_pair(dict(zip(called, opened, strict=True)))
                surveys: list[Run] | list[PlannedSurvey] = finished
                for each, run in zip(opened, finished, strict=bool(runs)):
                    check_run_of(each, run)
                if not runs:
                    with interruptible(say_stopping) as stopped:
                        surveys = [
                            _planned(each, corpus or text.read(each, stopped), text.seed, ended)
                            for each, corpus in zip(opened, corpora, strict=True)
                        ]
                subjects = list(map(Subject, called, opened, surveys))

                def say(address: str) -> None:
                    console = Console(soft_wrap=True)
                    console.print(f"Explorer: {address} (Ctrl-C ends it)", highlight=False)
                    if browser and not webbrowser.open(address):
                        say_dimly("no browser was found: open the address yourself")

                serve(application(subjects), listening, say, ended)


def _planned(model: OpenModel, corpus: Corpus, seed: int, ended: threading.Event) -> PlannedSurvey:
    """Plan the survey of the model on a text, which stops once the page has ended."""
    from theodolite.explore.subject import PlannedSurvey
    from theodolite.models.open import sharing_weights
    from theodolite.passes.corpus_pass import check_fit
    from theodolite.passes.run import describe_model, describe_pass
    from theodolite.passes.survey import survey_heads

    model.check_weights()
    check_fit(model, corpus)

    def make(tell: ShowStage) -> Run:
        with bars(ended.is_set, of=model_name(model.id)) as show:

            def both(what: str, done: int, total: int) -> None:
                show(what, done, total)
                tell(what, done, total)

            return survey_heads(sharing_weights(model), corpus, seed=seed, show_progress=both)

    return PlannedSurvey(describe_model(model) | describe_pass(model, corpus, seed, {}), make)
