"""`theodolite reproduce`: parsing, and what the experiments read. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from theodolite.cli.options import Model, Opening, RunFolder, Text, default_folder, say_where, short_name
from theodolite.cli.screen import bars, one_line_errors, say_stopping, screen
from theodolite.errors import UsageError
from theodolite.system.choices import refuse_unread
from theodolite.system.files import check_target, json_text
from theodolite.system.interrupt import interruptible
from theodolite_papers import catalogue

if TYPE_CHECKING:
    from theodolite.models.prompts import Focus
    from theodolite_papers.experiment import Experiment, Study


def _complete(incomplete: str) -> list[str]:
    """Names of experiments and of their groups; the last of several with commas between them."""
    before, comma, last = incomplete.rpartition(",")
    groups = dict.fromkeys(name.partition("/")[0] for name in catalogue.EXPERIMENTS)
    names = *groups, *catalogue.EXPERIMENTS, *catalogue.ALIASES
    return [before + comma + name for name in names if name.startswith(last)]


def reproduce_command(
    *,
    name: Annotated[
        str | None,
        typer.Argument(
            help="geometry, localization, geometry/table1, …; several separated by commas. Without a name: list them.",
            autocompletion=_complete,
        ),
    ] = None,
    model: Model = None,
    text: Text,
    other: Annotated[
        str | None, typer.Option(help="Second text, for geometry/table2 [default: random tokens].")
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Prompt of geometry/figure6 and figure30 [default: repeated random tokens], and of sinks/figure2 and "
            "figure7 to figure11 [default: one is built in]."
        ),
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(
            help="Block, from 0, of the head shown there or ablated by sinks/ablation [default: the heads detected; "
            "for sinks/…, the head with the largest tag]."
        ),
    ] = None,
    head: Annotated[int | None, typer.Option(help="The head in that block, from 0.")] = None,
    out: RunFolder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the results, as JSON.")] = False,
    opening: Opening,
) -> None:
    """Reproduce published tables and figures for a model, with a verdict on each claim.

    A finished survey is reused, otherwise one is made; pages go to its folder, under reproduce/. Experiments of
    theory (localization/figure1 to figure5, sinks/figure6, …) need no model; their pages go to runs/localization or
    runs/sinks. Figures of one head on a prompt (sinks/figure2, figure7 to figure11) need no survey. Those of training
    runs (localization/figure6 to figure12, sinks/figure3, …) take the folder of `theodolite train` as MODEL.

    Example: theodolite reproduce geometry gpt2 --corpus notes.txt --out runs/gpt2
    """
    with one_line_errors(), interruptible(say_stopping) as stopped:
        if name is not None:
            catalogue.names_of(name)
            check_target(out)
            if model is not None and not Path(model).is_dir():  # a folder may be one of training runs
                opening.check(model)
            text.check()
            _with_corpus(text, other).check()

        from theodolite.models.prompts import Focus
        from theodolite_papers.command import list_as_json, list_experiments, run_experiments

        if name is None:
            print(json_text(list_as_json())) if as_json else list_experiments(Console())
            return
        experiments, focus = catalogue.find(name), Focus(prompt, layer, head)
        options = {"other": other, "prompt": prompt, "layer": layer, "head": head}
        given = [option for option, value in options.items() if value is not None]
        catalogue.check_options(experiments, given)
        request = _Request(name, model, text, other, out, opening, stopped)
        study, pages = _study(request, experiments, focus)
        console, unkept = screen if as_json else Console(), partial(bars, stopped, kept=False)
        page = run_experiments(experiments, study, pages, console, as_json=as_json, bars=unkept)
        if page is not None:
            say_where(page, as_json)


def _with_corpus(text: Text, other: str | None) -> Text:
    """The options of the text to compare with, whose labels do not matter."""
    return replace(text, corpus=other, label_column=None, label_rows=False, per_label=None)


@dataclass(frozen=True)
class _Request:
    """The arguments of the command."""

    name: str
    model: str | None
    text: Text
    other: str | None
    out: Path | None
    opening: Opening
    stopped: Callable[[], bool]

    def unread(self) -> dict[str, object]:
        """The text and model options, to be refused where neither is read."""
        options = "device", "device_map", "revision", "attention"
        of_model = {f"--{name.replace('_', '-')}": getattr(self.opening, name) for name in options}
        return self.text.given() | of_model


def _study(request: _Request, experiments: list[Experiment], focus: Focus) -> tuple[Study, Path]:
    """What the experiments read, and the folder for their pages."""
    from theodolite_papers.command import provenance_reader
    from theodolite_papers.experiment import Study, of_model, of_nothing

    name, seed = request.name, request.text.seed
    provenance, command = request.model and provenance_reader(request.model), catalogue.made_by(experiments)
    if request.model is not None and provenance:
        refuse_unread(f"{name} of a folder of training runs reads no other text or model", request.unread())
        folder = Path(request.model)
        return Study(provenance(folder)), request.out or folder / "reproduce"
    if command is not None:
        raise UsageError(
            f"{name}: pass the folder that `{command}` wrote, or, of several training runs, theirs"
        )
    if catalogue.need_no_model(experiments):
        refuse_unread(f"{name} reads no model and no text", {"MODEL": request.model} | request.unread())
        pages = request.out or Path("runs") / experiments[0].name.partition("/")[0]
        return Study(of_nothing(seed)), pages
    if catalogue.on_prompts(experiments):
        refuse_unread(f"{name} reads its prompt and no text", request.text.given())
        model = request.opening.open(request.model)
        pages = (request.out or Path("runs") / f"{short_name(model.id)}-prompts") / "reproduce"
        return Study(of_model(model, seed), model, focus=focus), pages
    return _surveyed(request, focus)


def _surveyed(request: _Request, focus: Focus) -> tuple[Study, Path]:
    """Experiments on a survey, which is made here or reused if it is finished."""
    from theodolite import survey
    from theodolite.report.page import write_report
    from theodolite_papers import Study

    model = request.opening.open(request.model)
    if model.vocabulary is None:
        raise UsageError(f"{model.id} reads no text, which all experiments are on: use theodolite survey")
    if focus.layer is not None or focus.head is not None:
        model.check_place(focus.layer or 0, focus.head or 0)  # fail before the survey
    if request.text.no_pack:
        raise UsageError("the experiments compare positions of contexts of one length: leave out --no-pack")
    read, second = request.text.read(model, request.stopped), None
    if request.other:
        other = replace(_with_corpus(request.text, request.other), length=read.contexts.shape[1])
        second = other.read(model, request.stopped)
    folder = request.out or default_folder(model, read)
    with bars(request.stopped, of=short_name(read.name)) as show:
        run = survey(model, read, folder, seed=request.text.seed, show_progress=show)
    if not (folder / "report" / "index.html").is_file():
        write_report(run, folder / "report")
    pages = folder / "reproduce"
    return Study(run, model, read, second, folder=pages, focus=focus), pages
