"""`theodolite prune`: parsing, and which functions do the work. Nothing heavy is imported."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Console

from theodolite.cli.options import AsJson, Model, Opening, Stream, Text, contexts_option, option, say_where
from theodolite.cli.screen import bars, print_json, say_dimly, stoppable
from theodolite.corpus.spec import PRESETS
from theodolite.errors import UsageError
from theodolite.prune.options import DAMPING, METHODS, RANK_RATIO, TOKENS_A_BATCH, PruningOptions
from theodolite.system.checkpoint_folders import SETTINGS, exists_already, refuse_inside
from theodolite.system.files import read_json_checked

if TYPE_CHECKING:
    from theodolite.corpus.corpus import Corpus
    from theodolite.models import OpenModel

WRITING = "writing the checkpoint and its report"


@dataclass(frozen=True)
class _CalibrationText(Text):
    contexts: int | None = contexts_option(128)

    default_contexts: ClassVar[int] = 128  # as in Zhang et al. 2025, appendix D

    def check(self) -> None:
        """Check the options, and refuse a data set's test part, on which pruned models are judged."""
        super().check()
        if self.corpus in PRESETS:
            train = PRESETS[self.corpus].replace(":test", ":train")
            raise UsageError(f"{self.corpus} is a test part, and calibrates nothing: use --corpus {train}")


@dataclass(frozen=True)
class _Pruning:
    """Options of how a model is pruned, called as `prune_model` calls them; None: its default."""

    method: str = option(f"One of {', '.join(METHODS)}.", "oats")
    sparsity: str | None = option("Share removed: a number, or one per block with commas [default: 0.5].")
    pattern: str | None = option("N:M sparsity such as 2:4: of every 4 consecutive inputs 2 are kept.")
    rank_ratio: float | None = option(f"oats: share kept in the low-rank part [default: {RANK_RATIO}].")
    damping: float | None = option(f"sparsegpt: of the Hessian's mean diagonal [default: {DAMPING}].")
    exact: bool = option(
        "Read the text in float32, not with products in bfloat16 where the processor has them; and oats as published: "
        "a full SVD in every iteration, ten times slower.",
        False,
        "--exact",
    )
    skip: str | None = option("Globs of matrices that stay dense: mlp.down_proj,model.layers.0.*")
    form: str = option(
        "merged (for transformers), adapter (low-rank parts for PEFT) or factored (smaller, for theodolite).",
        "merged",
        "--format",
    )

    def options(self, *, streamed: bool, **others: Any) -> PruningOptions:
        """Return all options of the pruning, checked; `others` are those from elsewhere on the command line."""
        given = {name: value for name, value in vars(self).items() if not (value is None or value is False)}
        given["skip"] = self.skip.split(",") if self.skip else ()
        if self.sparsity is None:
            given["sparsity"] = None if self.pattern else 0.5
        else:
            try:
                numbers = [float(part) for part in self.sparsity.split(",")]
            except ValueError:
                raise UsageError(
                    f"sparsity {self.sparsity!r} is no number, nor several with commas"
                ) from None
            given["sparsity"] = numbers if len(numbers) > 1 else numbers[0]
        return PruningOptions(**given, **others).checked(streamed=streamed)


def prune_command(
    *,
    out: Path = option("Folder for the pruned checkpoint.", MISSING, "--out", "-o"),
    model: Model = None,
    how: _Pruning,
    stream: Stream = False,
    text: _CalibrationText,
    as_json: AsJson = False,
    batch: int | None = option(f"Contexts per forward pass [default: {TOKENS_A_BATCH} tokens]."),
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
        refuse_inside(out, model)
        is_done = (out / SETTINGS).is_file()  # or it is refused, once the model and the text are known
        if out.is_file() or (out.is_dir() and any(out.iterdir()) and not is_done):
            raise exists_already(out)  # `prune_model` checks again with the folder locked

        from theodolite.prune import prune_model
        from theodolite.prune.model import check_shares
        from theodolite.report.pruned_model import PRUNING, page_at, pruned_outcome, write_page
        from theodolite.report.terminal import show_outcome

        def check(known: OpenModel, _: Corpus | None) -> None:
            check_shares(options.sparsity, known.layers)

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
        page = page_at(out / "report")
        if as_json:
            print_json(read_json_checked(page.with_name("result.json")))
        else:
            console = Console(soft_wrap=True)
            show_outcome(PRUNING, pruned_outcome(pruned), console)
            console.print(f"Checkpoint: {out}", highlight=False)
        say_where(page, as_json)
