"""`theodolite compare`: parsing, and which function does the work. Nothing heavy is imported."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from theodolite.cli.options import AsJson, Batch, Opening, Text, say_where
from theodolite.cli.screen import bars, print_json, screen, stoppable
from theodolite.errors import UsageError
from theodolite.system import embedded
from theodolite.system.choices import refuse_unread
from theodolite.system.files import check_target
from theodolite.system.run_folders import is_run
from theodolite.system.wording import model_name

if TYPE_CHECKING:
    from theodolite.comparison.command import Candidate
    from theodolite.corpus.corpus import Corpus
    from theodolite.models import OpenModel
    from theodolite.passes.run import Run


def compare_command(
    *,
    models: Annotated[
        list[str],
        typer.Argument(
            help="Two or more run folders, or folders, GGUF files or hub names of checkpoints "
            f"(`{embedded.NAME}`: the model inside the package); all are compared with the first.",
            show_default=False,
        ),
    ],
    text: Text,
    prompt: Annotated[
        str | None, typer.Option(help="Prompt of the attention maps [default: a reasoning question].")
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(help="Block, from 0, of the head in the maps [default: the head that lost most sinks]."),
    ] = None,
    head: Annotated[int | None, typer.Option(help="The head in that block, from 0.")] = None,
    without_low_rank: Annotated[
        int | None,
        typer.Option(
            metavar="LAYER",
            help="Also ablate the low-rank term of W_Q, W_K, W_V of this block in the second model, with a "
            "norm-matched random term as control.",
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(help="Rank of that term, by truncated SVD, in a model that was not pruned with one."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder to write [default: runs/FIRST-against-SECOND].")
    ] = None,
    as_json: AsJson = False,
    batch: Batch = None,
    opening: Opening,
) -> None:
    """Compare models' sinks, tags, outliers, positions, head outputs, entropies, head roles and W_QK.

    Run folders of the same text are compared as they are, with their traces (FOLDER-sinks) and head outputs
    (FOLDER-outputs) if all have them. Models are first surveyed and traced and their head outputs collected, in the
    --out folder; finished parts are reused.

    Example: theodolite compare gpt2 gpt2-oats gpt2-wanda --corpus notes.txt --length 256 --out runs/pruned
    """
    with stoppable() as stopped:
        if len(models) < 2:
            raise UsageError("one model cannot be compared: give two or more")
        folder = out or Path("runs") / f"{model_name(models[0])}-against-{model_name(models[1])}"
        check_target(folder)
        runs = [is_run(model) for model in models]
        if any(runs) and not all(runs):
            other = models[runs.index(False)]
            raise UsageError(
                f"{other} is not a run folder but others are: give run folders or models, not both"
            )
        if all(runs):
            of_models = text.given() | {"--prompt": prompt, "--layer": layer, "--head": head, "--rank": rank}
            of_models |= {"--without-low-rank": without_low_rank}
            refuse_unread("run folders are compared without a model or a text", of_models)
        else:
            opening.check(*models)
            text.check()

        from theodolite.comparison import command, page
        from theodolite.models.prompts import Focus

        if all(runs):
            compared = command.compare_folders(models)
        else:
            places = ((layer, head or 0), (without_low_rank, 0))

            corpora: dict[str, Corpus | None] = {}

            def check(model: OpenModel, corpus: Corpus | None) -> None:
                corpora[model.id] = corpus
                for at_layer, at_head in places if model.source.attention is None else ():
                    if at_layer is not None:
                        model.check_place(at_layer, at_head)

            for model in dict.fromkeys(models):
                opening.read_first(model, text, stopped, batch, check)
            work = _Passes(folder, text, batch, opening, stopped, corpora)
            focus = Focus(prompt, layer, head)
            compared = command.compare_models(models, work, focus, without_low_rank, rank)
        with screen.status("writing the page"):
            written = page.write(compared, folder)
        if as_json:
            print_json(page.as_json(compared))
        else:
            page.show(compared, Console(soft_wrap=True))
        say_where(written, as_json)


@dataclass(frozen=True)
class _Passes:
    """Open, survey and trace one model, with progress bars, in folders that can be resumed."""

    folder: Path
    text: Text
    batch: int | None
    opening: Opening
    stopped: Callable[[], bool]
    corpora: dict[str, Corpus | None]

    def opened(self, source: str) -> OpenModel:
        if self.stopped():
            raise KeyboardInterrupt
        return self.opening.open(source, self.text)

    def read(self, model: OpenModel) -> Corpus:
        return self.corpora.get(model.id) or self.text.read(model, self.stopped)

    def measured(self, candidate: Candidate, model: OpenModel, corpus: Corpus) -> tuple[Run, Run, Run]:
        from theodolite.comparison.outputs import read_outputs
        from theodolite.passes.survey import survey
        from theodolite.sinks.trace import trace_sinks

        def run(read: Callable[..., Run], ending: str) -> Run:
            with bars(self.stopped, of=candidate.name) as show:
                folder = self.folder / f"{candidate.folder}{ending}"
                return read(model, corpus, folder, batch=self.batch, show_progress=show)

        seeded = functools.partial(survey, seed=self.text.seed)
        return run(seeded, ""), run(trace_sinks, "-sinks"), run(read_outputs, "-outputs")
