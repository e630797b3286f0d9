"""`theodolite reproduce`: list the experiments, or make, write and show the named ones, one by one."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from theodolite.cli.options import Model, Opening, RunFolder, Text, default_folder, say_where
from theodolite.cli.screen import bars, one_line_errors, say_stopping, screen
from theodolite.errors import UsageError
from theodolite.system.choices import refuse_unread
from theodolite.system.files import check_target, json_text
from theodolite.system.progress import interruptible
from theodolite.system.wording import harmless, model_name
from theodolite_papers import catalogue
from theodolite_papers.declarations import aliases, declarations

if TYPE_CHECKING:
    from theodolite.models.texts import Focus
    from theodolite.system.progress import ShowStage
    from theodolite_papers.experiment import Experiment, Study


def _complete(incomplete: str) -> list[str]:
    """Complete names of experiments and of their groups; the last of several with commas between them."""
    before, comma, last = incomplete.rpartition(",")
    groups = dict.fromkeys(name.partition("/")[0] for name in catalogue.EXPERIMENTS)
    names = *groups, *catalogue.EXPERIMENTS, *aliases()
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
    runs (localization/figure6 to figure12) take the folder of `theodolite train` as MODEL.
    A model of `theodolite train addition` reads the additions that it learned where --corpus is left out.

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

        if name is None:
            print(json_text(list_as_json())) if as_json else _list_experiments(Console())
            return
        from theodolite.models.texts import Focus

        experiments, focus = catalogue.find(name), Focus(prompt, layer, head)
        options = {"other": other, "prompt": prompt, "layer": layer, "head": head}
        given = [option for option, value in options.items() if value is not None]
        catalogue.check_options(experiments, given)
        request = _Request(name, model, text, other, out, opening, stopped)
        study, pages = _study(request, experiments, focus)
        console, unkept = screen if as_json else Console(), partial(bars, stopped, kept=False)
        page = _run_experiments(experiments, study, pages, console, as_json=as_json, bars=unkept)
        if page is not None:
            say_where(page, as_json)


def _with_corpus(text: Text, other: str | None) -> Text:
    """Return the options of the text to compare with, whose labels do not matter."""
    return replace(text, corpus=other, label_by=None, encoding=None, per_label=None)


@dataclass(frozen=True)
class _Request:
    name: str
    model: str | None
    text: Text
    other: str | None
    out: Path | None
    opening: Opening
    stopped: Callable[[], bool]

    def unread(self) -> dict[str, object]:
        """Return the text and model options, to be refused where neither is read."""
        options = "device", "device_map", "attention"
        of_model = {f"--{name.replace('_', '-')}": getattr(self.opening, name) for name in options}
        return self.text.given() | of_model


def _study(request: _Request, experiments: list[Experiment], focus: Focus) -> tuple[Study, Path]:
    """Prepare what the experiments read, and choose the folder for their pages."""
    from theodolite_papers.experiment import Study, of_model, of_nothing
    from theodolite_papers.localization.locater import grid_provenance
    from theodolite_papers.localization.locater_training import is_grid

    name, seed, command = request.name, request.text.seed, catalogue.made_by(experiments)
    if request.model is not None and is_grid(request.model):
        refuse_unread(f"{name} of a folder of training runs reads no other text or model", request.unread())
        folder = Path(request.model)
        return Study(grid_provenance(folder)), request.out or folder / "reproduce"
    if command is not None:
        raise UsageError(
            f"{name}: pass the folder that `{command}` wrote, or, of several training runs, theirs"
        )
    if catalogue.all_need(experiments, "nothing"):
        refuse_unread(f"{name} reads no model and no text", {"MODEL": request.model} | request.unread())
        pages = request.out or Path("runs") / experiments[0].name.partition("/")[0]
        return Study(of_nothing(seed)), pages
    if catalogue.all_need(experiments, "prompt"):
        refuse_unread(f"{name} reads its prompt and no text", request.text.given())
        model = request.opening.open(request.model)
        pages = (request.out or Path("runs") / f"{model_name(model.id)}-prompts") / "reproduce"
        return Study(of_model(model, seed), model, focus=focus), pages
    return _surveyed(request, focus)


def _surveyed(request: _Request, focus: Focus) -> tuple[Study, Path]:
    """Run experiments on a survey, made here or reused; where no text is named, an adder reads what it learned."""
    from theodolite import survey
    from theodolite.report.page import write_report
    from theodolite_papers import Study
    from theodolite_papers.hidden_geometry.smoothness import is_adder, trained_on

    model = request.opening.open(request.model, request.text)
    if model.vocabulary is None:
        raise UsageError(f"{model.id} reads no text, which all experiments are on: use theodolite survey")
    if focus.layer is not None or focus.head is not None:
        model.check_place(focus.layer or 0, focus.head or 0)  # fail before the survey
    text, second = request.text, None
    if text.corpus is None and is_adder(model):
        refuse_unread("additions have no labels", {"--per-label": text.per_label})
        contexts = text.contexts or text.default_contexts
        read = trained_on(model).corpus(text.length_for(model), contexts, text.seed)
    else:
        read = text.read(model, request.stopped)
    if request.other:
        other = replace(_with_corpus(text, request.other), length=read.contexts.shape[1])
        second = other.read(model, request.stopped)
    folder = request.out or default_folder(model, read)
    with bars(request.stopped, of=model_name(read.name)) as show:
        run = survey(model, read, folder, seed=request.text.seed, show_progress=show)
    if not (folder / "report" / "index.html").is_file():
        write_report(run, folder / "report")
    pages = folder / "reproduce"
    return Study(run, model, read, second, folder=pages, focus=focus), pages


def _list_experiments(console: Console) -> None:
    """Print every name with one line, and which published figures are others on another model or text."""
    names, elsewhere = (Table(box=None, padding=(0, 2, 0, 0), show_header=False) for _ in range(2))
    names.add_column(no_wrap=True)
    names.add_column()
    for row in list_as_json():
        if row["name"] in aliases():
            elsewhere.add_row(row["name"], escape(row["paper"]))
        else:
            names.add_row(row["name"], escape(row["title"]))
    console.print(names)
    console.print("\nPublished figures that show the same for another model or text:", highlight=False)
    console.print(elsewhere)


def list_as_json() -> list[dict[str, str]]:
    """Name, title and the paper's finding of every experiment, and of the published figures that are one elsewhere."""
    declared = declarations()
    rows = [{"name": one.name, "title": one.title, "paper": one.paper} for one in declared.values()]
    for alias in aliases().values():
        paper = f"{alias.of}, published for {alias.published_on}"
        rows.append({"name": alias.name, "title": declared[alias.of].title, "paper": paper})
    return rows


def _run_experiments(
    experiments: list[Experiment],
    study: Study,
    place: Path,
    console: Console,
    *,
    as_json: bool,
    bars: Callable[[], AbstractContextManager[ShowStage]],
) -> Path | None:
    """Make, write and show each experiment, and return the page to open: its own, or the index of several.

    Alone, an experiment that cannot be made is an error; in a group it is passed over with its reason, on `console`.
    """
    from theodolite.report.outcome import result, write_index, write_outcome
    from theodolite.report.terminal import show_outcome

    results: list[dict[str, Any]] = []
    shown_verdicts: set[Any] = set()
    reasons: list[UsageError] = []
    page: Path | None = None
    for number, experiment in enumerate(experiments):
        try:
            with bars() as study.show:  # gone before anything is printed
                study.show(experiment.name, number, len(experiments))
                outcome = study.outcome(experiment)
        except UsageError as error:
            reasons.append(error)
            if len(experiments) > 1:
                skipped = f"{experiment.name} is skipped: {harmless(str(error))}"
                console.print(skipped, markup=False, highlight=False)
            continue
        provenance = study.provenance_of(experiment)
        page = write_outcome(experiment, outcome, provenance, place)
        results.append(result(experiment, outcome, provenance))
        if not as_json:
            show_outcome(experiment, outcome, console, shown_verdicts)
            shown_verdicts |= set(outcome.verdicts)
    if not results:
        raise reasons[0]
    index = write_index(place)
    if as_json:
        print(json.dumps(results, ensure_ascii=False, allow_nan=False))
    return page if len(experiments) == 1 else index
