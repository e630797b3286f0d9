"""`theodolite evaluate`: parsing, and which functions do the work.

Nothing is measured here, and nothing heavy is imported.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from theodolite.cli.options import AsJson, Opening, Text
from theodolite.cli.screen import bars, print_json, stoppable
from theodolite.errors import UsageError
from theodolite.system import embedded
from theodolite.system.choices import refuse_unread
from theodolite.system.files import check_target, locked

if TYPE_CHECKING:
    from theodolite.evaluate.scores import Score

FEW_SHOT_TASK, SHOTS, PROMPTS = "few-shot", "0-5", 100
"""The task of this package; numbers of examples, and prompts, unless others are given."""


def evaluate_command(
    *,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Folders, GGUF files or hub names of checkpoints (`{embedded.NAME}`: the model inside the package, "
            "which is also the default).",
            show_default=False,
        ),
    ] = None,
    text: Text,
    task: Annotated[
        list[str] | None,
        typer.Option(help="few-shot (word tasks, offline), or a task or group of lm-eval; repeatable."),
    ] = None,
    tasks: Annotated[
        Path | None, typer.Option(help="Folder of custom lm-eval tasks (may run Python code in it).")
    ] = None,
    shots: Annotated[
        str | None,
        typer.Option(help=f"Numbers of examples in the prompt, as 3, 0,2,5 or 0-5 [default: {SHOTS}]."),
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(help=f"Prompts of each task of few-shot [default: {PROMPTS}].")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Maximum number of documents per lm-eval task [default: all].")
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            help="Read the text as one sequence, in windows of --length tokens (default: 2048, or the model's maximum) "
            "that begin so many tokens apart, and count of each what is new in it; beside --task, as well as the tasks."
        ),
    ] = None,
    as_published: Annotated[
        bool,
        typer.Option(
            "--as-published",
            help="With --stride: begin as a text of the model begins (<bos>) only where the text does, not in each "
            "window; so GPTQ, SparseGPT and Wanda do.",
        ),
    ] = False,
    no_special_tokens: Annotated[
        bool,
        typer.Option("--no-special-tokens", help="With --stride: read the text without <bos> or the like."),
    ] = False,
    batch: Annotated[
        int | None,
        typer.Option(help="Prompts per forward pass [default: 4096 tokens; 8 prompts for lm-eval]."),
    ] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Let lm-eval download data that are not on this machine.")
    ] = False,
    chat_template: Annotated[
        bool,
        typer.Option("--chat-template", help="Ask lm-eval's tasks in conversations, by the chat template."),
    ] = False,
    system: Annotated[
        str | None,
        typer.Option(help="Text of the system's turn, or before every prompt, in lm-eval's tasks."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="JSON file of results; those already in it are not measured again."),
    ] = None,
    as_json: AsJson = False,
    opening: Opening,
) -> None:
    """Measure perplexity on a text, few-shot accuracy and lm-eval tasks, of one model or of several compared.

    Without --task and --tasks: perplexity and bits per byte, by default on topics of Python's
    documentation that the embedded model was not trained on; with them, only if --corpus or --stride
    asks for a text as well. With --stride, as published perplexities of WikiText-2 are
    (--corpus wikitext-2, a name for the hub's test part).

    Example: theodolite evaluate dense pruned --task few-shot --shots 0-5
    """
    with stoppable(saves=out is not None) as stopped, ExitStack() as held:
        from theodolite.corpus.spec import HELD_OUT

        names: list[Any] = list(models or []) or [None]  # None: the embedded model
        opening.check(*names)
        check_target(out)
        reads = text.corpus is not None or stride is not None or not (task or tasks)
        read = text if text.corpus is not None else replace(text, corpus=HELD_OUT)
        if as_published and no_special_tokens:
            raise UsageError(
                "published perplexities have special tokens: give --as-published or --no-special-tokens"
            )
        if stride is None:
            beginnings = {"--as-published": as_published, "--no-special-tokens": no_special_tokens}
            refuse_unread("without --stride the text is read in contexts, which begin as it does", beginnings)
        if stride is not None:
            read.check_stream()
        elif reads:
            read.check()
        else:
            refuse_unread("tasks read no text without --corpus or --stride", text.given())
        few_shot = FEW_SHOT_TASK in (task or ())
        of_lm_eval = tasks is not None or any(name != FEW_SHOT_TASK for name in task or ())
        if not of_lm_eval:
            of_tasks: dict[str, object] = {"--limit": limit, "--download": download}
            of_tasks |= {"--chat-template": chat_template, "--system": system}
            refuse_unread("without a --task of lm-eval, or --tasks, nothing has such an option", of_tasks)
        if not (few_shot or of_lm_eval):
            refuse_unread("without --task or --tasks there are no examples", {"--shots": shots})
        if not few_shot:
            refuse_unread(
                f"without --task {FEW_SHOT_TASK} nothing has such an option", {"--prompts": prompts}
            )
        if out is not None:
            held.enter_context(locked(out))

        from theodolite.evaluate.command import Questions, evaluate, parse_shots
        from theodolite.evaluate.scores import Evaluation
        from theodolite.passes.run import describe_model, versions

        asked = Questions(
            tuple(task or ()),
            tasks,
            parse_shots(SHOTS if shots is None else shots),
            PROMPTS if prompts is None else prompts,
            text.seed,
            limit,
            batch,
            download,
            stride,
            text.length,
            "none" if no_special_tokens else "text" if as_published else "windows",
            chat_template,
            system,
        )
        asked.check()
        evaluation = Evaluation(out)
        scores: list[Score] = []
        described: list[Any] = []
        how: dict[str, Any] = {"stride": stride, "special_tokens": not no_special_tokens}
        for name in names:
            corpus = opening.read_first(
                name, read if reads else None, stopped, check=asked.check_model, **how
            )
            model = opening.open(name)
            described.append(describe_model(model)["model"])
            if reads and corpus is None:
                corpus = read.read(model, stopped, **how)
            scores += evaluate(model, corpus, asked, evaluation, partial(bars, stopped))
            del model  # before the next one is opened
        _finish(scores, {"versions": versions(), "models": described}, as_json)


def _finish(scores: list[Score], provenance: dict[str, Any], as_json: bool) -> None:
    """Show the scores, or print them as JSON."""
    from theodolite.evaluate.command import lm_eval_version, tables
    from theodolite.evaluate.scores import table

    frame = table(scores)
    if not as_json:
        console = Console(soft_wrap=True)
        for shown in tables(frame):
            console.print(shown)
        return
    provenance["versions"]["lm_eval"] = lm_eval_version()
    print_json(provenance | {"scores": frame.to_dict(orient="records")})
