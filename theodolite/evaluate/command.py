"""The measurements of `theodolite evaluate` on each model, and its tables."""

from __future__ import annotations

import hashlib
import math
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.markup import escape
from rich.table import Table

from theodolite.corpus.corpus import Corpus
from theodolite.corpus.special_tokens import frame_of
from theodolite.errors import UsageError
from theodolite.evaluate import perplexity
from theodolite.evaluate.few_shot import MOST_SHOTS, NAME, by_task, few_shot_scores, prompts_for
from theodolite.evaluate.harness import BATCH, check_asked, harness, task_manager
from theodolite.evaluate.scores import Evaluation, Score
from theodolite.jobs.job import Notes, Steps, Tensors
from theodolite.models import OpenModel
from theodolite.models.guard import measures
from theodolite.passes.corpus_pass import fingerprint_of
from theodolite.system.progress import ENDING, ShowStage, handling
from theodolite.system.wording import model_name, visible, with_error

Bars = Callable[..., AbstractContextManager[ShowStage]]  # progress bars of a `unit`
# What begins as the tokenizer begins a text, and how that is said where it puts special tokens there.
BEGINNINGS = {"windows": ", each after {}", "text": ", {} before the text alone", "none": ", without {}"}


@dataclass(frozen=True)
class Questions:
    """What every model is asked: the tasks, and how a text is read."""

    tasks: tuple[str, ...]  # `few-shot` are the word tasks of this package, all others are lm-eval tasks
    folder: Path | None  # this, `limit`, `download`, `chat_template` and `system` are as of `harness`
    shots: tuple[int, ...]
    prompts: int  # of each word task
    seed: int
    limit: int | None
    batch: int | None  # of a forward pass; None: the default of each task
    download: bool
    stride: int | None = None  # of the windows that a text is read in; None: it is read in contexts
    length: int | None = None
    beginnings: str = "windows"  # what begins as the tokenizer begins a text, of `BEGINNINGS`
    chat_template: bool = False
    system: str | None = None

    @property
    def of_lm_eval(self) -> list[str]:
        """The tasks of lm-eval; none of them: all of the folder, if there is one."""
        return [task for task in self.tasks if task != NAME]

    @property
    def asks_lm_eval(self) -> bool:
        """True if lm-eval is asked anything."""
        return bool(self.of_lm_eval or self.folder)

    def check(self) -> None:
        """Raise `UsageError` where a task of this package cannot be asked so."""
        if NAME in self.tasks and max(self.shots) > MOST_SHOTS:
            raise UsageError(f"{NAME} takes up to {MOST_SHOTS} examples: use --shots 0-{MOST_SHOTS}")
        if self.asks_lm_eval:
            task_manager(self.of_lm_eval, self.folder)

    def check_model(self, model: OpenModel, corpus: Corpus | None) -> None:
        """Raise `UsageError` where a model cannot be asked; it does not run."""
        perplexity.check_predicts(model)
        if self.asks_lm_eval:
            check_asked(model, BATCH if self.batch is None else self.batch, self.limit, self.chat_template)
        if corpus is not None:
            perplexity.loss_rows(model, corpus, **_windows(model, self)[0], batch=self.batch)
        if NAME in self.tasks:
            prompts_for(model, self.prompts, self.seed, max(self.shots)).asked_of(model, self.batch)


@measures("model")
def evaluate(
    model: OpenModel, corpus: Corpus | None, questions: Questions, evaluation: Evaluation, bars: Bars
) -> list[Score]:
    """Measure all scores of one model but those already in the file; errors are those of each measurement."""
    seed, batch, folder = questions.seed, questions.batch, questions.folder
    of_model = {**fingerprint_of(model), "batch": batch}
    scores: list[Score] = []
    if corpus is not None:
        windows, said = _windows(model, questions)
        with bars(unit="windows" if said else "contexts") as show:
            scores += evaluation.scores(
                {**of_model, "corpus": corpus.sha256, **windows},
                "predicting",
                lambda: perplexity.loss_rows(model, corpus, **windows, batch=batch),
                lambda *rows: perplexity.perplexity_scores(
                    model.id, corpus, perplexity.perplexity_in(*rows), said
                ),
                show,
            )
    if NAME in questions.tasks:
        most = max(questions.shots)
        asked = {"prompts": questions.prompts, "seed": seed, "shots": most}

        def scores_in(state: Tensors, _: Notes) -> list[Score]:
            answers = by_task(state["right"].numpy(), questions.prompts)
            return few_shot_scores(model.id, answers, range(most + 1), seed, batch)

        def ask() -> Steps:
            return prompts_for(model, **asked).asked_of(model, batch)

        with bars(unit="prompts") as show:
            answered = evaluation.scores(of_model | asked, "answering", ask, scores_in, show)
        scores += [score for score in answered if score.shots in questions.shots]
    if questions.asks_lm_eval:
        key = of_model | {"tasks": sorted(questions.of_lm_eval), "folder": folder and _folder_hash(folder)}
        key |= {"limit": questions.limit, "lm_eval": lm_eval_version()}
        if questions.system is not None:
            key["system"] = questions.system
        if questions.chat_template:
            key["chat_template"] = model.required_tokenizer().chat_template
        for shots in questions.shots:  # each kept as soon as it is measured
            scores += evaluation.kept(key | {"shots": shots}, partial(_by_lm_eval, model, questions, shots))
    return [replace(score, model=model.id) for score in scores]


def _windows(model: OpenModel, questions: Questions) -> tuple[dict[str, Any], str]:
    """Return the arguments of `loss_rows` for a text's windows, and how the text is read in words; contexts: none."""
    if questions.stride is None:
        return {"stride": None, "length": None}, ""
    length = perplexity.window_length(model, questions.length)
    windows: dict[str, Any] = {"stride": questions.stride, "length": length}
    said = ", windows of {length:,} tokens by {stride:,}".format(**windows)
    tokenizer: Any = model.tokenizer
    if begin := tokenizer and frame_of(tokenizer).before:
        said += BEGINNINGS[questions.beginnings].format(" ".join(tokenizer.convert_ids_to_tokens(begin)))
        windows["as_published"] = questions.beginnings != "windows"
    return windows, said


def _by_lm_eval(model: OpenModel, questions: Questions, shots: int) -> list[Score]:
    """Ask lm-eval, which draws its own bars, and of which nothing is saved before its end: Ctrl-C stops it at once."""
    handled = [number for number in ENDING if callable(signal.getsignal(number))]
    with handling(handled, signal.default_int_handler):
        return harness(
            model,
            questions.of_lm_eval,
            [shots],
            folder=questions.folder,
            batch=BATCH if questions.batch is None else questions.batch,
            limit=questions.limit,
            download=questions.download,
            chat_template=questions.chat_template,
            system=questions.system,
        )


def _folder_hash(folder: Path) -> str:
    """Hash of all files in a folder of tasks."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(folder)}\n{path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def lm_eval_version() -> str | None:
    """Return the version of the installed lm-eval; None if it is not installed."""
    try:
        return version("lm-eval")
    except PackageNotFoundError:
        return None


def tables(scores: pd.DataFrame) -> list[Table]:
    """Tabulate each task and metric for the terminal, with a row for each number of shots and model."""
    made = []
    for (task, metric), rows in scores.groupby(["task", "metric"], sort=False):
        last_parts = {model: model_name(model) for model in rows["model"].unique()}
        several = Counter(last_parts.values())  # models may share the last part of their path
        compared = bool(rows["difference"].notna().any())
        caption = "± one standard error" + ("; difference: to the first model, paired" if compared else "")
        if rows["chat_template"].any():
            caption += "; in conversations, by each model's chat template"
        if rows["system"].any():
            caption += f"; system: {escape(visible(rows['system'].max(), 60))}"
        title = escape(visible(f"{task}: {metric}"))
        shown = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        shown.add_column("shots", justify="right")
        shown.add_column("model", overflow="fold")
        for name in ("value", "difference") if compared else ("value",):
            shown.add_column(name, justify="right", no_wrap=True)
        for shots, block in rows.groupby("shots", sort=False):
            for place, row in enumerate(block.itertuples()):
                name = last_parts[row.model] if several[last_parts[row.model]] == 1 else row.model
                values = [with_error(row.value, row.value_se)]
                if compared and math.isfinite(row.difference):
                    values.append(with_error(row.difference, row.difference_se))
                shown.add_row("" if place else str(shots), escape(visible(name)), *values)
            if len(last_parts) > 1:
                shown.add_section()
        made.append(shown)
    return made
