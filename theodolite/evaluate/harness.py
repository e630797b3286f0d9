"""The tasks of lm-eval (Gao et al. 2024) on an opened model, with k examples in the prompt, offline by default.

Prompts, metrics and seeds are those of lm-eval, and so are the scores. lm-eval is an optional dependency, imported
only here and only when used.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import logging
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from theodolite.errors import UsageError, first_line
from theodolite.evaluate.perplexity import check_predicts
from theodolite.evaluate.scores import Score
from theodolite.models import OpenModel
from theodolite.models.guard import measures
from theodolite.models.rotary import turned_alike_up_to
from theodolite.system.progress import ShowProgress
from theodolite.system.wording import nearest, with_extra

BATCH = 8
"""Requests per forward pass."""

SEED, OTHER_SEED = 0, 1234
"""Seed of Python's generator, and of all others, as in lm-eval's own command."""

BOOTSTRAPS = 1000
"""Resamples for metrics whose standard error has no closed form."""


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
    show_progress: ShowProgress = lambda done, total: None,
) -> list[Score]:
    """Evaluate a model on lm-eval tasks with 0, 1, … examples in the prompt.

    Args:
        model: causal, with its tokenizer.
        tasks: names of tasks, groups or tags; if empty, all tasks of `folder`.
        shots: numbers of examples, drawn by the task's own few-shot sampler.
        folder: custom tasks as YAML; paths of their data files are relative to it. It must be trusted: lm-eval runs
            Python functions that a YAML names.
        batch: requests per forward pass.
        limit: use only the first documents of each task; None: all.
        download: whether missing data may be downloaded; otherwise no connection is attempted.
        chat_template: ask in a conversation, as the tokenizer's chat template writes it: examples are earlier turns.
        system: text for the system's turn; without `chat_template`, before every prompt.
        show_progress: told (done, total) requests of a number of shots, before each forward pass and at the end; it may
            raise to stop.

    Returns:
        A score for each number of shots, task (a tag: its tasks; a group: its aggregate) and metric, with lm-eval's
        value and standard error. `each` is set where the value is a mean over documents.

    Raises:
        UsageError: lm-eval is not installed, a task is unknown, fixes its own number of examples or lacks its data, or
            the model cannot be evaluated, or its tokenizer has no chat template, or none that takes the `system` text.
    """
    check_predicts(model)
    tokenizer = copy.deepcopy(model.required_tokenizer())  # lm-eval may add a padding token
    if chat_template:
        check_chat_template(model.id, tokenizer, system)
    check_tasks(tasks, shots, folder, batch, limit)
    import lm_eval

    scores: list[Score] = []
    with _quiet_and_offline(download) as cut:
        manager, names = _task_manager(tasks, folder)
        lm = _reporting(
            show_progress,
            pretrained=model.hf,
            tokenizer=tokenizer,
            batch_size=batch,
            max_length=model.longest,
        )
        for count in shots:
            cut.clear()
            with _seeded(), lm.reporting():
                loaded = _loaded(manager, names, count, folder, download)
                results = lm_eval.evaluate(
                    lm,
                    loaded,
                    limit=limit,
                    bootstrap_iters=BOOTSTRAPS,
                    log_samples=True,
                    system_instruction=system,
                    apply_chat_template=chat_template,
                    fewshot_as_multiturn=chat_template,
                )
            shared = {"model": model.id, "shots": count, "batch": batch, "cut": len(cut)}
            shared |= {
                "chat_template": template_sha256(tokenizer) if chat_template else "",
                "system": system or "",
            }
            scores += _scores(names, loaded, results, shared)
    return scores


def check_tasks(
    tasks: Sequence[str],
    shots: Sequence[int],
    folder: str | Path | None,
    batch: int | None,
    limit: int | None,
) -> None:
    """Raise `UsageError` for numbers out of range and unknown tasks, and where lm-eval is not installed."""
    numbers = (("batch", batch, 1), ("shots", min(shots, default=-1), 0), ("limit", limit, 1))
    for what, number, least in numbers:
        if number is not None and number < least:
            raise UsageError(f"{what} is {number}: use {least} or more")
    try:
        import lm_eval.models.huggingface  # noqa: F401
    except ImportError as error:
        raise UsageError(f"lm-eval cannot be used ({error}): {with_extra('evaluate')}") from error
    with _quiet_and_offline(download=False):
        _task_manager(tasks, folder)


def check_chat_template(name: str, tokenizer: Any, system: str | None) -> None:
    """Raise `UsageError` where a tokenizer has no chat template, or one that leaves out the system's text.

    lm-eval would leave it out, too, and ask without it.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(f"the tokenizer of {name} has no chat template: leave out --chat-template")
    turns = [{"role": "system", "content": system}] if system else []
    turns.append({"role": "user", "content": "?"})
    try:
        written = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # whatever the template raises
        raise UsageError(
            f"the chat template of {name} takes no such conversation: {first_line(error)}"
        ) from error
    if system and system.strip() not in written:
        raise UsageError(f"the chat template of {name} leaves out the system's text: leave out --system")


def template_sha256(tokenizer: Any) -> str:
    """Hash a tokenizer's chat template, or all of its templates by name."""
    return hashlib.sha256(repr(tokenizer.chat_template).encode()).hexdigest()


def _task_manager(tasks: Sequence[str], folder: str | Path | None) -> tuple[Any, list[str]]:
    """Return a task manager that has the tasks, and their names."""
    from lm_eval.tasks import TaskManager

    if folder is None and not tasks:
        raise UsageError("no task given: name one, or give a folder of tasks")
    names, include_path = list(tasks), None
    if folder is not None:
        include_path = str(Path(folder).resolve())
        if not Path(folder).is_dir():
            raise UsageError(f"there is no folder {folder}: give one with tasks as YAML")
        manager = TaskManager(include_path=include_path, include_defaults=False)
        names = names or manager.all_subtasks
        if not names:
            raise UsageError(f"{folder} holds no task of lm-eval: give a folder with one as YAML")
        if set(names) <= set(manager.all_tasks):
            return manager, names
    manager = _all_tasks(include_path)
    for name in names:
        if name not in manager.all_tasks:
            hint = nearest(name, manager.all_tasks, "`lm-eval ls tasks` lists what there is")
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
    import datasets
    import yaml

    # What lm-eval, `datasets` and YAML raise for a malformed task, or one whose data are missing.
    foreseen = (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, RuntimeError)
    try:
        with contextlib.chdir(folder) if folder is not None else contextlib.nullcontext():
            loaded = manager.load(list(names))
    except (*foreseen, yaml.YAMLError, datasets.exceptions.DatasetsError) as error:
        first = first_line(error) or type(error).__name__
        hint = "" if download else "; missing data are only downloaded with --download"
        raise UsageError(f"cannot load {', '.join(names)}: {first}{hint}") from error
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
        for key, value in row.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            error = row.get(f"{metric}_stderr,{filter_name}")
            filtered = [sample for sample in samples if sample["filter"] == filter_name]
            scores.append(
                Score(
                    task=name,
                    metric=metric if filter_name == "none" else f"{metric} ({filter_name})",
                    value=float(value),
                    error=float(error) if isinstance(error, int | float) else math.nan,
                    count=len(filtered),
                    questions=hashlib.sha256(hashes.encode()).hexdigest(),
                    each=_each(filtered, metric, float(value)),
                    version=str(results["versions"].get(name) or ""),
                    **shared,
                )
            )
    return scores


def _each(samples: list[dict[str, Any]], metric: str, value: float) -> np.ndarray | None:
    """Return the metric of each document, where the task's value is their mean."""
    try:
        each = np.array([float(sample[metric]) for sample in samples])
    except (KeyError, TypeError, ValueError):  # a metric over all documents, such as a perplexity
        return None
    return each if len(each) and abs(each.mean() - value) <= 1e-9 * max(1.0, abs(value)) else None


def _reporting(show_progress: ShowProgress, **options: Any) -> Any:
    """Make lm-eval's model of transformers, with progress shown before each forward pass."""
    from lm_eval.models.huggingface import HFLM

    def counted(kind: str) -> Any:
        def call(self: Any, requests: list[Any], **rest: Any) -> Any:
            self.total += len(requests)
            return getattr(HFLM, kind)(self, requests, **rest)

        return call

    class Reporting(HFLM):
        """Counts the requests that lm-eval sends it: those begun, and all."""

        begun = total = 0
        loglikelihood = counted("loglikelihood")
        loglikelihood_rolling = counted("loglikelihood_rolling")
        generate_until = counted("generate_until")

        @contextlib.contextmanager
        def reporting(self) -> Iterator[None]:
            self.begun = self.total = 0
            hook = self.model.register_forward_pre_hook(self._enter, with_kwargs=True)
            try:
                yield
                show_progress(self.total, self.total)
            finally:
                hook.remove()

        def _enter(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            show_progress(min(self.begun, self.total), self.total)
            ids = args[0] if args else kwargs["input_ids"]
            alike = turned_alike_up_to(self.model.config.get_text_config())
            if len(ids) > 1 and alike is not None and ids.shape[1] > alike:  # padded: the longest come first
                raise UsageError(
                    f"this model turns positions by the length of a pass beyond {alike} tokens, and a batch is padded "
                    "to its longest prompt: use --batch 1"
                )
            self.begun += len(ids) if ids.shape[1] > 1 else 0  # one token: a further step of a generation

    return Reporting(**options)


@contextlib.contextmanager
def _quiet_and_offline(download: bool) -> Iterator[list[str]]:
    """Silence warnings, bars and, unless `download`, connections; collect warnings about truncated prompts.

    lm-eval 0.4.13 takes `disable_tqdm` for requests only, and neither where it builds them (`Task.build_all_requests`
    in lm_eval/api/task.py) nor for bootstraps (`bootstrap_stderr` in lm_eval/api/metrics.py); tqdm 4.70 reads
    TQDM_DISABLE as it is imported, and never again (https://github.com/tqdm/tqdm/issues/1526). So its class is changed
    for the while. datasets 5.2 and huggingface_hub 2.4 likewise read the environment variable HF_HUB_OFFLINE as they
    are imported (datasets/config.py, huggingface_hub/constants.py), and what they read then at every call.
    """
    import datasets
    import huggingface_hub
    from tqdm.std import tqdm  # lm-eval's own dependency

    cut: list[str] = []
    original = tqdm.__init__

    def disabled(bar: Any, *args: Any, **options: Any) -> None:
        original(bar, *args, **options | {"disable": True})

    def collect(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "exceeds model's maximum length" in message:
            cut.append(message)
        return record.levelno >= logging.ERROR

    changes: list[tuple[Any, str, object]] = [(tqdm, "__init__", disabled)]
    if not download:
        changes += [(owner, "HF_HUB_OFFLINE", True) for owner in (datasets.config, huggingface_hub.constants)]
    names = [name for name in logging.root.manager.loggerDict if name.startswith("lm_eval.")]
    with contextlib.ExitStack() as undo:
        for owner, name, value in changes:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        for logger in map(logging.getLogger, ("lm_eval", *names)):
            logger.addFilter(collect)
            undo.callback(logger.removeFilter, collect)
        yield cut


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """Seed the generators as lm-eval's command does, and restore the caller's states afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(SEED)
        np.random.seed(OTHER_SEED)
        torch.manual_seed(OTHER_SEED)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
