"""The tasks of lm-eval (Gao et al. 2024) on an opened model, with k examples in the prompt, offline by default."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from theodolite.errors import UsageError, first_line
from theodolite.evaluate.few_shot import NAME as FEW_SHOT
from theodolite.evaluate.perplexity import check_predicts
from theodolite.evaluate.scores import Score
from theodolite.models import OpenModel
from theodolite.models.guard import measures
from theodolite.models.source import turned_alike_up_to
from theodolite.system.wording import nearest, with_extra

BATCH = 8  # requests per forward pass
BOOTSTRAPS = 1000  # resamples for metrics whose standard error has no closed form
SEED = 0  # of Python's generator, as in lm-eval's own command
OTHER_SEED = 1234  # of all other generators


@measures("model")
def harness(
    model: OpenModel,
    tasks: Sequence[str],
    shots: Sequence[int],
    *,
    folder: str | Path | None = None,
    batch: int = BATCH,
    limit: int | None = None,
    download: bool = False,
    chat_template: bool = False,
    system: str | None = None,
) -> list[Score]:
    """Evaluate a model on lm-eval tasks with 0, 1, … examples in the prompt, seeded as by lm-eval's own command.

    Args:
        model: causal, with its tokenizer.
        tasks: names of tasks, groups or tags; if empty, all tasks of `folder`.
        shots: numbers of examples, drawn by the task's own few-shot sampler.
        folder: custom tasks as YAML; paths of their data files are relative to it. lm-eval runs code that a YAML names.
        batch: requests per forward pass.
        limit: use only the first documents of each task; None: all.
        download: whether missing data may be downloaded; otherwise no connection is attempted.
        chat_template: ask in a conversation, as the tokenizer's chat template writes it: examples are earlier turns.
        system: text for the system's turn; without `chat_template`, before every prompt.

    Returns: a score for each number of shots, task (a tag: its tasks; a group: its aggregate) and metric, with
    lm-eval's value and standard error. `each` is set where the value is a mean over documents.

    Raises:
        UsageError: lm-eval is not installed, a task is unknown, fixes its own number of examples or lacks its data, or
            the model cannot be evaluated, or its tokenizer has no chat template.
    """
    check_asked(model, batch, limit, chat_template)
    manager, names = task_manager(tasks, folder)
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    scores: list[Score] = []
    with _offline(download):
        tokenizer = copy.deepcopy(model.required_tokenizer())  # lm-eval may add a padding token
        lm = HFLM(model.hf, tokenizer=tokenizer, batch_size=batch, max_length=model.longest)
        for count in shots:
            random.seed(SEED)
            np.random.seed(OTHER_SEED)
            torch.manual_seed(OTHER_SEED)
            loaded = _loaded(manager, names, count, folder, download)
            results = lm_eval.evaluate(
                lm,
                loaded,
                limit=limit,
                bootstrap_iters=BOOTSTRAPS,
                system_instruction=system,
                apply_chat_template=chat_template,
                fewshot_as_multiturn=chat_template,
            )
            shared = {"model": model.id, "shots": count, "batch": batch}
            shared |= {"chat_template": chat_template, "system": system or ""}
            scores += _scores(names, loaded, results, shared)
    return scores


def check_asked(model: OpenModel, batch: int, limit: int | None, chat_template: bool) -> None:
    """Raise `UsageError` where lm-eval cannot ask a model so; it does not run."""
    check_predicts(model)
    for what, number in (("batch", batch), ("limit", limit)):
        if number is not None and number < 1:
            raise UsageError(f"{what} is {number}: use 1 or more")
    if chat_template and not getattr(model.required_tokenizer(), "chat_template", None):
        raise UsageError(f"the tokenizer of {model.id} has no chat template: leave out --chat-template")
    alike = turned_alike_up_to(model.hf.config.get_text_config())
    if batch > 1 and alike is not None and model.has_positions(alike + 1):
        raise UsageError(
            f"{model.id} turns positions by the length of a pass beyond {alike} tokens, and a batch is padded to its "
            "longest prompt: use --batch 1"
        )


def task_manager(tasks: Sequence[str], folder: str | Path | None) -> tuple[Any, list[str]]:
    """Return lm-eval's manager of tasks that has these, and their names; none: all of the folder."""
    try:
        import lm_eval.models.huggingface  # noqa: F401
    except ImportError as error:
        raise UsageError(f"lm-eval cannot be used ({error}): {with_extra('evaluate')}") from error
    from lm_eval.tasks import TaskManager

    if folder is None and not tasks:
        raise UsageError("no task given: name one, or give a folder of tasks")
    names, include_path = list(tasks), None
    if folder is not None:
        include_path = str(Path(folder).resolve())
        if not Path(folder).is_dir():
            raise UsageError(
                f"there is no folder {folder}: give one with tasks as YAML, or a task's name to --task"
            )
        manager = TaskManager(include_path=include_path, include_defaults=False)
        names = names or manager.all_subtasks
        if not names:
            raise UsageError(f"{folder} holds no task of lm-eval: give a folder with one as YAML")
        if set(names) <= set(manager.all_tasks):
            return manager, names
    manager = _all_tasks(include_path)
    for name in names:
        if name not in manager.all_tasks:
            hint = nearest(name, [FEW_SHOT, *manager.all_tasks], "`lm-eval ls tasks` lists what there is")
            raise UsageError(f"lm-eval knows no task {name}: {hint}")
    return manager, names


@functools.lru_cache(maxsize=1)
def _all_tasks(folder: str | None) -> Any:
    """Make a manager that also has lm-eval's own tasks: it parses over ten thousand files, so it is cached."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=folder)


def _loaded(
    manager: Any, names: list[str], shots: int, folder: str | Path | None, download: bool
) -> dict[str, Any]:
    """Load the tasks with their data, anew each time: 0 shots, once set, look like the task's own choice."""
    try:
        with contextlib.chdir(folder) if folder is not None else contextlib.nullcontext():
            loaded = manager.load(list(names))
    except OSError as error:  # of a network or files that are not there
        hint = "" if download else "; missing data are only downloaded with --download"
        raise UsageError(f"cannot load {', '.join(names)}: {first_line(error)}{hint}") from error
    for name, task in loaded["tasks"].items():
        fixed = task.get_config("num_fewshot")
        if fixed == 0 and shots:
            raise UsageError(f"{name} is a task without examples in its prompt: evaluate it with --shots 0")
        task.set_config(key="num_fewshot", value=shots)
        task.set_fewshot_seed(seed=OTHER_SEED)
    return loaded


def _scores(
    names: list[str], loaded: dict[str, Any], results: dict[str, Any], shared: dict[str, Any]
) -> list[Score]:
    """Make scores of lm-eval's results for every requested task and group; `shared`: fields that all have in common."""
    groups = loaded.get("groups", {})
    members = {name: [task.task_name for task in group.get_all_tasks()] for name, group in groups.items()}
    inside = {task for tasks in members.values() for task in tasks}
    scores = []
    for name, row in results["results"].items():
        if name not in names and (name in groups or name in inside):
            continue  # part of a requested group
        samples = [sample for task in members.get(name, [name]) for sample in results["samples"][task]]
        hashes = "".join(sample["prompt_hash"] + sample["target_hash"] for sample in samples)
        questions = hashlib.sha256(hashes.encode()).hexdigest()
        version = str(results["versions"].get(name) or "")
        for key, value in row.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            error = row.get(f"{metric}_stderr,{filter_name}")
            error = float(error) if isinstance(error, int | float) else math.nan
            filtered = [sample for sample in samples if sample["filter"] == filter_name]
            each = _each(filtered, metric, float(value))
            named = metric if filter_name == "none" else f"{metric} ({filter_name})"
            given: dict[str, Any] = {"value": float(value), "error": error, "each": each}
            given |= {"count": len(filtered), "questions": questions, "version": version}
            scores.append(Score(task=name, metric=named, **given, **shared))
    return scores


def _each(samples: list[dict[str, Any]], metric: str, value: float) -> np.ndarray | None:
    """Return the metric of each document, where the task's value is their mean."""
    try:
        each = np.array([float(sample[metric]) for sample in samples])
    except (KeyError, TypeError, ValueError):  # a metric over all documents, such as a perplexity
        return None
    return each if len(each) and abs(each.mean() - value) <= 1e-9 * max(1.0, abs(value)) else None


@contextlib.contextmanager
def _offline(download: bool) -> Iterator[None]:
    """Let no connection be attempted while open, unless `download`."""
    # Both have read HF_HUB_OFFLINE as they were imported, and look at what they read at every call.
    import datasets
    import huggingface_hub

    owners: tuple[Any, ...] = (datasets.config, huggingface_hub.constants)
    before = [owner.HF_HUB_OFFLINE for owner in owners]
    try:
        for owner in () if download else owners:
            owner.HF_HUB_OFFLINE = True
        yield
    finally:
        for owner, own in zip(owners, before, strict=True):
            owner.HF_HUB_OFFLINE = own
