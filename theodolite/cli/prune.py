"""`theodolite prune`: parsing, and which functions do the work. Nothing heavy is imported."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.console import Console

from theodolite.cli.options import AsJson, Model, Opening, Stream, Text, contexts_help, say_where
from theodolite.cli.screen import bars, print_json, say_dimly, stoppable
from theodolite.errors import UsageError
from theodolite.prune.options import DAMPING, METHODS, RANK_RATIO, TOKENS_A_BATCH, PruningOptions
from theodolite.system.checkpoint_folders import SETTINGS, exists_already, refuse_inside

if TYPE_CHECKING:
    from theodolite.corpus.corpus import Corpus
    from theodolite.models import OpenModel
    from theodolite.prune import Pruned

WRITING = "writing the checkpoint and its report"


@dataclass(frozen=True)
class _CalibrationText(Text):
    contexts: Annotated[int | None, typer.Option(help=contexts_help(128))] = None

    default_contexts: ClassVar[int] = 128  # as in Zhang et al. 2025, appendix D

    def check(self) -> None:
        """Check the options, and refuse a data set's test part, on which pruned models are judged."""
        from theodolite.corpus.spec import PRESETS

        super().check()
        if self.corpus in PRESETS:
            train = PRESETS[self.corpus].replace(":test", ":train")
            raise UsageError(f"{self.corpus} is a test part, and calibrates nothing: use --corpus {train}")


@dataclass(frozen=True)
class _Pruning:
    """Options of how a model is pruned, called as `prune_model` calls them; None: its default."""

    method: Annotated[
        str,
        typer.Option(help=f"One of {', '.join(METHODS)}."),
    ] = "oats"
    sparsity: Annotated[
        str | None,
        typer.Option(
            help="Share of entries removed: one number, or one per block with commas [default: 0.5, or the pattern's]."
        ),
    ] = None
    pattern: Annotated[
        str | None,
        typer.Option(help="N:M sparsity such as 2:4: at most 2 of every 4 consecutive inputs are kept."),
    ] = None
    rank_ratio: Annotated[
        float | None,
        typer.Option(
            help=f"oats only: share of the kept parameters in the low-rank part [default: {RANK_RATIO}]."
        ),
    ] = None
    damping: Annotated[
        float | None,
        typer.Option(
            help="sparsegpt only: added to the Hessian's diagonal, as a share of its mean "
            f"[default: {DAMPING}]."
        ),
    ] = None
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Read the text in float32, not with products in bfloat16 where the processor has them; and oats as "
            "published: a full SVD in every iteration, ten times slower.",
        ),
    ] = False
    skip: Annotated[
        str | None,
        typer.Option(help="Globs of matrices that stay dense, with commas: mlp.down_proj,model.layers.0.*"),
    ] = None
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="merged (for transformers), adapter (low-rank parts for PEFT) or factored (smaller, for theodolite).",
        ),
    ] = "merged"

    def options(self, *, streamed: bool, **others: Any) -> PruningOptions:
        """Return all options of the pruning, checked; `others` are those from elsewhere on the command line."""
        given = {name: value for name, value in vars(self).items() if not (value is None or value is False)}
        given |= {"sparsity": self._sparsity(), "skip": self.skip.split(",") if self.skip else ()}
        return PruningOptions(**given, **others).checked(streamed=streamed)

    def _sparsity(self) -> float | list[float] | None:
        if self.sparsity is None:
            return None if self.pattern else 0.5
        try:
            numbers = [float(part) for part in self.sparsity.split(",")]
            return numbers if "," in self.sparsity else numbers[0]
        except ValueError:
            raise UsageError(
                f"sparsity {self.sparsity!r} is neither a number nor numbers separated by commas"
            ) from None


def prune_command(
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the pruned checkpoint.")],
    model: Model = None,
    how: _Pruning,
    stream: Stream = False,
    text: _CalibrationText,
    as_json: AsJson = False,
    batch: Annotated[
        int | None, typer.Option(help=f"Contexts per forward pass [default: {TOKENS_A_BATCH} tokens].")
    ] = None,
    opening: Opening,
) -> None:
    """Prune a model layer by layer, each block calibrated on the pruned ones before it, and write the checkpoint.

    All linear layers inside the blocks are pruned, Q, K and V separately; embeddings, head, norms and routers are not.
    If interrupted, rerun the command to resume.

    Example: theodolite prune gpt2 --method oats --sparsity 0.5 --corpus notes.txt --out gpt2-oats
    """
    with stoppable() as stopped:
        options = how.options(streamed=stream, out=out, batch=batch, seed=text.seed)
        opening.check(model)
        text.check()
        _refuse_existing(out, model)
        is_done = (out / SETTINGS).is_file()  # or it is refused, once the model and the text are known

        from theodolite.prune import prune_model
        from theodolite.prune.model import check_shares
        from theodolite.report.pruned_model import page_at, write_page

        def check(known: OpenModel, _: Corpus | None) -> None:
            check_shares(options.sparsity, options.rank_ratio, known.layers)

        corpus = opening.read_first(model, text, stopped, batch, check)
        opened = opening.open_streamed(model, stopped) if stream else opening.open(model)
        corpus = corpus or text.read(opened, stopped)
        with bars(stopped) as show:

            def show_progress(done: int, total: int) -> None:
                show("pruning matrices", done, total)
                if done == total:
                    show(WRITING, 0, 1)

            pruned = prune_model(opened, corpus, **vars(options), show_progress=show_progress)
            if not page_at(out / "report").is_file():
                write_page(pruned, out / "report")
            if is_done:
                say_dimly(f"{out} holds this pruning already: nothing is pruned again")
            else:
                with suppress(KeyboardInterrupt):  # too late to stop: all is written
                    show(WRITING, 1, 1)
        _finish(pruned, out, page_at(out / "report"), as_json)


def _refuse_existing(out: Path, model: str | None) -> None:
    """Fail before the model is opened; `prune_model` checks again with the folder locked."""
    refuse_inside(out, model)
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not (out / SETTINGS).is_file()):
        raise exists_already(out)


def _finish(pruned: Pruned, out: Path, page: Path, as_json: bool) -> None:
    """Show the result or print it as JSON, and say where the checkpoint and the report are."""
    from theodolite.report.pruned_model import PRUNING, pruned_outcome
    from theodolite.report.terminal import show_outcome
    from theodolite.system.files import read_json_checked

    if as_json:
        print_json(read_json_checked(page.with_name("result.json")))
    else:
        console = Console(soft_wrap=True)
        show_outcome(PRUNING, pruned_outcome(pruned), console)
        console.print(f"Checkpoint: {out}", highlight=False)
    say_where(page, as_json)
