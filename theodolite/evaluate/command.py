"""The measurements of `theodolite evaluate` on each model, and its tables. No command-line parsing here."""

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
from theodolite.evaluate.few_shot import MOST_SHOTS, NAME, by_task, few_shot_scores, prompts_for
from theodolite.evaluate.harness import BATCH, check_asked, harness, task_manager
from theodolite.evaluate.perplexity import (
    check_predicts,
    loss_rows,
    perplexity_in,
    perplexity_scores,
    window_length,
)
from theodolite.evaluate.scores import Evaluation, Score, score_as_json, score_of_json
from theodolite.jobs.job import Rows, Steps
from theodolite.jobs.unfinished import Notes, Tensors
from theodolite.models import OpenModel
from theodolite.models.guard import measures
from theodolite.passes.corpus_pass import fingerprint_of
from theodolite.system.progress import ENDING, ShowStage, handling
from theodolite.system.wording import counted, model_name, visible, with_error

Bars = Callable[..., AbstractContextManager[ShowStage]]
"""Progress bars of a `unit`."""

Make = Callable[[], Steps]
ScoresIn = Callable[[Tensors, Notes], list[Score]]


@dataclass(frozen=True)
class Questions:
    """The tasks that every model is evaluated on, besides the loss on a text.

    Attributes:
        tasks: names; `few-shot` are the word tasks of this package, all others are lm-eval tasks.
        folder, limit, download, chat_template, system: of lm-eval, as of `harness`.
        prompts, seed: of each word task.
        batch: of a forward pass; None: the default of each task.
        stride, length: of the windows that a text is read in as one stream; None: it is read in contexts.
        beginnings: what begins as the tokenizer begins a text, of `BEGINNINGS`.
    """

    tasks: tuple[str, ...]
    folder: Path | None
    shots: tuple[int, ...]
    prompts: int
    seed: int
    limit: int | None
    batch: int | None
    download: bool
    stride: int | None = None
    length: int | None = None
    beginnings: str = "windows"
    chat_template: bool = False
    system: str | None = None

    @property
    def of_lm_eval(self) -> list[str]:
        """The tasks of lm-eval; none of them: all of the folder, if there is one."""
        return [task for task in self.tasks if task != NAME]

    @property
    def lm_eval_batch(self) -> int:
        """Requests per forward pass of lm-eval."""
        return BATCH if self.batch is None else self.batch

    def check(self) -> None:
        """Raise `UsageError` where a task of this package cannot be asked so."""
        if NAME in self.tasks and max(self.shots) > MOST_SHOTS:
            raise UsageError(f"{NAME} takes up to {MOST_SHOTS} examples: use --shots 0-{MOST_SHOTS}")
        if self.of_lm_eval or self.folder:
            task_manager(self.of_lm_eval, self.folder)

    def check_model(self, model: OpenModel, corpus: Corpus | None) -> None:
        """Raise `UsageError` where a model cannot be asked; it does not run."""
        check_predicts(model)
        if self.of_lm_eval or self.folder:
            check_asked(model, self.lm_eval_batch, self.limit, self.chat_template)
        if corpus is not None:
            length = None if self.stride is None else window_length(model, self.length)
            how: dict[str, Any] = {"stride": self.stride, "length": length, "batch": self.batch}
            loss_rows(model, corpus, **how, as_published=self.beginnings != "windows")
        if NAME in self.tasks:
            prompts_for(model, self.prompts, self.seed, max(self.shots)).asked_of(model, self.batch)


BEGINNINGS = {
    "windows": ", each after {}",
    "text": ", {} before the text alone",
    "none": ", without {}",
}
"""What begins as the tokenizer begins a text, and how that is said of a tokenizer that puts special tokens there."""


@measures("model")
def evaluate(
    model: OpenModel, corpus: Corpus | None, questions: Questions, evaluation: Evaluation, bars: Bars
) -> list[Score]:
    """Measure all scores of one model but those already in the file. A bar may raise to stop.

    Raises:
        UsageError, WorkError: as `perplexity`, `few_shot_answers` and `harness`.
    """
    batch = questions.batch
    scores: list[Score] = []
    of_model = {**fingerprint_of(model), "batch": batch}

    def measured(title: str, unit: str, make: Make, scores_in: ScoresIn, **key: Any) -> list[Score]:
        with bars(unit=unit) as show:
            return evaluation.scores(of_model | key, title, make, scores_in, show)

    if corpus is not None:
        windows: dict[str, Any] = {"stride": None, "length": None}
        window_text = ""
        if questions.stride is not None:
            windows = {"stride": questions.stride, "length": window_length(model, questions.length)}
            window_text = ", windows of {length:,} tokens by {stride:,}".format(**windows)
            tokenizer: Any = model.tokenizer
            if begin := tokenizer and frame_of(tokenizer).before:
                tokens = " ".join(tokenizer.convert_ids_to_tokens(begin))
                window_text += BEGINNINGS[questions.beginnings].format(tokens)
                windows["as_published"] = questions.beginnings != "windows"
        scores += measured(
            "predicting",
            "windows" if window_text else "contexts",
            lambda: loss_rows(model, corpus, **windows, batch=batch),
            lambda *rows: perplexity_scores(model.id, corpus, perplexity_in(*rows), window_text),
            corpus=corpus.sha256,
            **windows,
        )
    if NAME in questions.tasks:
        asked: dict[str, Any] = {"prompts": questions.prompts, "seed": questions.seed}
        asked["shots"] = max(questions.shots)
        answers = measured(
            "answering",
            "prompts",
            lambda: prompts_for(model, **asked).asked_of(model, batch),
            lambda state, _: few_shot_scores(
                model.id,
                by_task(state["right"].numpy(), questions.prompts),
                range(asked["shots"] + 1),
                seed=questions.seed,
                batch=batch,
            ),
            **asked,
        )
        scores += [score for score in answers if score.shots in questions.shots]
    folder = questions.folder
    if questions.of_lm_eval or folder:
        key: dict[str, Any] = {
            "tasks": sorted(questions.of_lm_eval),
            "folder": folder and _folder_hash(folder),
            "limit": questions.limit,
            "lm_eval": lm_eval_version(),
            **({"system": questions.system} if questions.system is not None else {}),
        }
        if questions.chat_template:
            key["chat_template"] = model.required_tokenizer().chat_template
        ask = partial(
            harness,
            model,
            questions.of_lm_eval,
            folder=folder,
            batch=questions.lm_eval_batch,
            limit=questions.limit,
            download=questions.download,
            chat_template=questions.chat_template,
            system=questions.system,
        )
        for shots in questions.shots:  # each saved as soon as it is measured
            scores += evaluation.scores(
                of_model | key | {"shots": shots},
                f"lm-eval, {counted(shots, 'example')}",
                lambda: _asked_of_lm_eval(partial(ask, shots=[shots])),  # noqa: B023 (called at once)
                lambda _, notes: [score_of_json(score) for score in notes["scores"]],
            )
    return [replace(score, model=model.id) for score in scores]


def _asked_of_lm_eval(ask: Callable[[], list[Score]]) -> Steps:
    """Return all requests of lm-eval as one step, whose notes are the scores.

    lm-eval draws its own bars. Nothing of it is saved before its end, so Ctrl-C stops it at once.
    """

    def read(_: int) -> Tensors:
        handled = [number for number in ENDING if callable(signal.getsignal(number))]
        with handling(handled, signal.default_int_handler):
            steps.notes["scores"] = [score_as_json(score) for score in ask()]
        return {}

    steps = Rows([0], read)
    return steps


def _folder_hash(folder: Path) -> str:
    """Hash of all files in a folder of tasks."""
    digest = hashlib.sha256()
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    for path in sorted(files):
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
    apart = scores.groupby(["task", "metric"], sort=False)
    return [_table(str(task), metric, rows) for (task, metric), rows in apart]


def _table(task: str, metric: str, rows: pd.DataFrame) -> Table:
    last_parts = {model: model_name(model) for model in dict.fromkeys(rows["model"])}
    several = Counter(last_parts.values())  # models may share the last part of their path
    compared = bool(rows["difference"].notna().any())
    caption = "± one standard error" + ("; difference: to the first model, paired" if compared else "")
    if rows["cut"].any():
        caption += f"; prompts truncated at the start: {rows['cut'].max()}"
    if rows["chat_template"].any():
        caption += "; in conversations, by each model's chat template"
    if rows["system"].any():
        caption += f"; system: {escape(visible(rows['system'].max(), 60))}"
    title = escape(visible(f"{task}: {metric}"))
    shown = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown.add_column("shots", justify="right")
    shown.add_column("model", overflow="fold")
    for name in ("value", *(["difference"] if compared else [])):
        shown.add_column(name, justify="right", no_wrap=True)
    for shots, block in rows.groupby("shots", sort=False):
        before = str(shots)
        for row in block.to_dict(orient="records"):
            values = [with_error(row["value"], row["value_se"])]
            if compared:
                known = math.isfinite(row["difference"])
                values.append(with_error(row["difference"], row["difference_se"]) if known else "")
            name = last_parts[row["model"]]
            name = name if several[name] == 1 else row["model"]
            shown.add_row(before, escape(visible(name)), *values)
            before = ""  # only in the first row
        if len(last_parts) > 1:
            shown.add_section()
    return shown
