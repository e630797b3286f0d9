"""`theodolite evaluate` and `compare`: parsing, and which functions do the work. Nothing heavy is imported."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from theodolite.cli.options import AsJson, Batch, Opening, Text, numbers_of, option, say_where
from theodolite.cli.screen import bars, print_json, screen, stoppable
from theodolite.corpus.spec import HELD_OUT
from theodolite.errors import UsageError
from theodolite.system import embedded
from theodolite.system.choices import refuse_unread
from theodolite.system.files import check_target, locked
from theodolite.system.run_folders import is_run
from theodolite.system.wording import model_name, names_of

if TYPE_CHECKING:
    from theodolite.corpus.corpus import Corpus
    from theodolite.evaluate.command import Questions
    from theodolite.evaluate.scores import Score
    from theodolite.models import OpenModel

FEW_SHOT_TASK, SHOTS, PROMPTS = "few-shot", "0-5", 100  # of this package's task, unless others are given


@dataclass(frozen=True)
class _Asked:
    task: list[str] | None = option("few-shot (word tasks), or a task or group of lm-eval; repeatable.")
    tasks: Path | None = option("Folder of custom lm-eval tasks (may run Python code in it).")
    shots: str | None = option(f"Examples in the prompt, as 3, 0,2,5 or 0-5 [default: {SHOTS}].")
    prompts: int | None = option(f"Prompts of each task of few-shot [default: {PROMPTS}].")
    limit: int | None = option("Maximum number of documents per lm-eval task [default: all].")
    stride: int | None = option(
        "Read the text as one sequence, in windows of --length tokens (default: 2048, or the model's maximum) "
        "that begin so many tokens apart, and count of each what is new in it; beside --task, as well as the tasks."
    )
    as_published: bool = option(
        "With --stride: <bos> at the text's beginning alone, as GPTQ does.", False, "--as-published"
    )
    no_special_tokens: bool = option(
        "With --stride: read the text without <bos>.", False, "--no-special-tokens"
    )
    batch: int | None = option("Prompts per forward pass [default: 4096 tokens; of lm-eval 8].")
    download: bool = option("Let lm-eval download data that are not on this machine.", False, "--download")
    chat_template: bool = option("Ask lm-eval's tasks in conversations.", False, "--chat-template")
    system: str | None = option("Text of the system's turn, or before every prompt, of lm-eval's tasks.")

    def checked(self, text: Text) -> Text | None:
        """Check all options, and return the text to read; None where tasks alone are asked."""
        few_shot = FEW_SHOT_TASK in (self.task or ())
        of_lm_eval = self.tasks is not None or any(name != FEW_SHOT_TASK for name in self.task or ())
        if self.as_published and self.no_special_tokens:
            raise UsageError("give --as-published or --no-special-tokens: published ones have special tokens")
        beginnings = {"--as-published": self.as_published, "--no-special-tokens": self.no_special_tokens}
        if self.stride is None:
            refuse_unread("without --stride the text is read in contexts, which begin as it does", beginnings)
        if not of_lm_eval:
            of_tasks: dict[str, object] = {"--limit": self.limit, "--download": self.download}
            of_tasks |= {"--chat-template": self.chat_template, "--system": self.system}
            refuse_unread("without a --task of lm-eval, or --tasks, nothing has such an option", of_tasks)
        if not (few_shot or of_lm_eval):
            refuse_unread("without --task or --tasks there are no examples", {"--shots": self.shots})
        if not few_shot:
            refuse_unread(
                f"without --task {FEW_SHOT_TASK} nothing has such an option", {"--prompts": self.prompts}
            )
        numbers_of(self.shots, "--shots")
        read = text if text.corpus is not None else replace(text, corpus=HELD_OUT)
        if self.stride is not None:
            read.check_stream()
        elif text.corpus is not None or not (self.task or self.tasks):
            read.check()
        else:
            refuse_unread("tasks read no text without --corpus or --stride", text.given())
            return None
        return read

    def questions(self, text: Text) -> Questions:
        """Return what every model is asked."""
        from theodolite.evaluate.command import Questions

        begin = "none" if self.no_special_tokens else "text" if self.as_published else "windows"
        names = ("limit", "batch", "download", "stride", "chat_template", "system")
        return Questions(
            tasks=tuple(self.task or ()),
            folder=self.tasks,
            shots=tuple(numbers_of(SHOTS if self.shots is None else self.shots, "--shots") or ()),
            prompts=PROMPTS if self.prompts is None else self.prompts,
            seed=text.seed,
            length=text.length,
            beginnings=begin,
            **{name: getattr(self, name) for name in names},
        )


def evaluate_command(
    *,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Folders, GGUF files or hub names of checkpoints [default: {embedded.NAME}, in the package]."
        ),
    ] = None,
    text: Text,
    asked: _Asked,
    out: Path | None = option("JSON file of results, which are not measured again.", None, "--out", "-o"),
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
        names: list[Any] = list(models or []) or [None]  # None: the embedded model
        opening.check(*names)
        check_target(out)
        read = asked.checked(text)
        if out is not None:
            held.enter_context(locked(out))

        from theodolite.evaluate.command import evaluate, lm_eval_version, tables
        from theodolite.evaluate.scores import Evaluation, table
        from theodolite.passes.run import describe_model, versions

        questions = asked.questions(text)
        questions.check()
        evaluation = Evaluation(out)
        scores: list[Score] = []
        described: list[Any] = []
        how: dict[str, Any] = {"stride": asked.stride, "special_tokens": not asked.no_special_tokens}
        for name in names:
            corpus = opening.read_first(name, read, stopped, check=questions.check_model, **how)
            model = opening.open(name)
            described.append(describe_model(model)["model"])
            if read is not None and corpus is None:
                corpus = read.read(model, stopped, **how)
            scores += evaluate(model, corpus, questions, evaluation, functools.partial(bars, stopped))
            del model  # before the next one is opened
        frame = table(scores)
        if as_json:
            known = versions() | {"lm_eval": lm_eval_version()}
            print_json({"versions": known, "models": described, "scores": frame.to_dict(orient="records")})
        else:
            for shown in tables(frame):
                Console(soft_wrap=True).print(shown)


def compare_command(
    *,
    models: Annotated[
        list[str],
        typer.Argument(
            help="Two or more run folders, or folders, GGUF files or hub names of checkpoints "
            f"(`{embedded.NAME}`: the model inside the package); all are compared with the first."
        ),
    ],
    text: Text,
    out: Path | None = option("Folder to write [default: runs/FIRST-against-SECOND].", None, "--out", "-o"),
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
            what = (
                "is no run folder but others are"
                if Path(other).exists()
                else "does not exist, and others are run folders"
            )
            raise UsageError(f"{other} {what}: give either runs or models")
        if all(runs):
            refuse_unread("run folders are compared without a model or a text", text.given())
            folders = models
        else:
            opening.check(*models)
            text.check()
            folders = _measured(models, folder, text, batch, opening, stopped)

        from theodolite.comparison import page
        from theodolite.comparison.audit import compare_folders

        audits = compare_folders(folders)
        with screen.status("writing the page"):
            content = page.outcome(audits)
            written, told = page.write(audits, content, folder)
        if as_json:
            print_json(told)
        else:
            page.show(audits, content, Console(soft_wrap=True))
        say_where(written, as_json)


def _measured(
    models: list[str], out: Path, text: Text, batch: int | None, opening: Opening, stopped: Callable[[], bool]
) -> list[str]:
    """Survey and trace each model and read what its heads write, in folders of `out` that can be resumed."""
    from theodolite.comparison.audit import refuse_unlike, shape_of
    from theodolite.comparison.outputs import read_outputs
    from theodolite.passes.survey import survey
    from theodolite.sinks.trace import trace_sinks

    described: dict[str, dict[str, object]] = {}

    def check(name: str, model: OpenModel, corpus: Corpus | None) -> None:
        if corpus is not None:
            described[name] = {**shape_of(model), "tokens": corpus.sha256}
            first = next(iter(described))
            refuse_unlike((first, name), described[first], described[name])

    sources = dict(zip(names_of(models), models, strict=True))
    corpora = {
        name: opening.read_first(source, text, stopped, batch, functools.partial(check, name))
        for name, source in sources.items()
    }
    parts: dict[str, Callable[..., object]] = {
        "": functools.partial(survey, seed=text.seed),
        "-sinks": trace_sinks,
        "-outputs": read_outputs,
    }
    for name, source in sources.items():
        model = opening.open(source, text)
        corpus = corpora[name] or text.read(model, stopped)
        check(name, model, corpus)
        for ending, read in parts.items():
            with bars(stopped, of=name) as show:
                read(model, corpus, out / f"{name}{ending}", batch=batch, show_progress=show)
        del model  # before the next one is opened
    return [str(out / name) for name in sources]
