"""Every kind of file that is read, tampered with, and the command that reads it. The rule is that of `trials`.

What nobody can know is not tried: a number of a plain checkpoint or a word of a text that is another number or word.
"""

from __future__ import annotations

import hashlib
import io
import os
import random
import re
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from tests import checkpoints
from tests.chaos.tampering import (
    CHANGED,
    EXTRA,
    GONE,
    OTHER_JSON,
    TENSORS,
    WEIGHTS,
    Tampering,
    entries,
    swap,
    tables,
)
from tests.chaos.trials import LOST, REFUSED, RIGHT, UNFORESEEN, WRONG, Trial
from theodolite.cli.app import app
from theodolite.cli.screen import one_line_errors
from theodolite.passes.run import Workspace
from theodolite.passes.survey import survey
from theodolite_papers.training import training_loop
from theodolite_papers.training.task_models import PUBLISHED, train_task_model
from theodolite_papers.training.tasks import Characters

SECONDS, GROWTH = 20, 2 << 30
"""The most that a command may take, and by how many bytes its addresses may grow."""

TEXT = "The theodolite stands on its tripod; one reads the angle twice, and then a third time. " * 40
CUT = ("--length", "32", "--contexts", "4")
TINY = replace(PUBLISHED["characters"], layers=1, heads=2, width=16, batch=8, steps=6, checkpoint_every=2)


@dataclass(frozen=True)
class Reader:
    """A command, and what it answers.

    Attributes:
        words: of the command, "@" the folder of all files; or a function of that folder.
        numbers: patterns of the files that hold its numbers; without any, standard output holds them.
    """

    name: str
    words: tuple[str, ...] | Callable[[Path], object]
    numbers: tuple[str, ...] = ()


def _train(root: Path, out: str) -> object:
    task = Characters.of_text(TEXT, length=32)
    return train_task_model(root / out, task, TINY, threads=1, console=Console(file=io.StringIO()))


SURVEYED = ("out/*.parquet", "out/*.safetensors")
SPECTRA = Reader("spectra", ("spectra", "@/model", "--out", "@/out"), SURVEYED)
SURVEY = Reader("survey", ("survey", "@/model", "--corpus", "@/text.txt", *CUT, "--out", "@/out"), SURVEYED)
EXCLUDE = Reader("exclude", ("exclude", "@/run", "--out", "@/out.json"), ("out.json",))
REPORT = Reader("report", ("report", "@/run"), ("run/report/index.html",))
LIST = Reader("runs", ("runs", "@", "--json"))
TRACED = Reader("exclude", ("exclude", "@/trace", "--out", "@/out.json"), ("out.json",))
RESUME = replace(
    SURVEY, words=(*SURVEY.words[:-1], "@/half"), numbers=("half/*.parquet", "half/*.safetensors")
)
PRUNING = ("--corpus", "@/text.txt", *CUT, "--method", "oats", "--json")
PRUNED = Reader("prune", ("prune", "@/model", *PRUNING, "--out", "@/pruned"))
FACTORED = replace(SPECTRA, words=("spectra", "@/factored", "--out", "@/out"))
AGAIN = Reader("prune", ("prune", "@/model", *PRUNING, "--format", "factored", "--out", "@/factored"))
ASKED = ("--task", "few-shot", "--prompts", "20", "--shots", "0,2", "--json")
EVALUATE = Reader("evaluate", ("evaluate", "@/model", *ASKED))
ANSWERS = replace(EVALUATE, words=(*EVALUATE.words, "--out", "@/answers.json"))
TRAINED = Reader("train", partial(_train, out="trained"), ("trained/training.json", "trained/*.safetensors"))
UNTRAINED = Reader("train", partial(_train, out="begun"), ("begun/training.json", "begun/*.safetensors"))
INDEX = Reader("reproduce", ("reproduce", "localization/figure3", "--out", "@/pages"), ("pages/index.html",))


def _of(table: str) -> Reader:
    """A survey of a table of texts."""
    return replace(SURVEY, words=tuple(word.replace("text.txt", table) for word in SURVEY.words))


SIZES = ("n_embd", "n_layer", "n_head", "n_positions", "vocab_size")
RUN_ENTRIES = (
    "counts.tokens",
    "model.layers",
    "seed",
    "fingerprint",
    "schema_version",
    "checksums",
    "corpus.contexts",
)
SEALED = GONE | CHANGED
SEALED_JSON = SEALED | OTHER_JSON | EXTRA
# A folder without the file is not one of those that are listed.
LISTED_JSON = {name: change for name, change in SEALED_JSON.items() if name != "a dangling link"}

# Pattern of the files, command, tampering.
SUBJECTS: list[tuple[str, Reader, dict[str, Tampering]]] = [
    ("model/config.json", SPECTRA, GONE | OTHER_JSON | EXTRA | entries(*SIZES)),
    ("model/config.json", SURVEY, GONE | entries("n_positions", "model_type", "architectures")),
    ("model/model.safetensors", SPECTRA, GONE | TENSORS | WEIGHTS),
    ("model/model.safetensors", SURVEY, GONE | TENSORS | WEIGHTS),
    ("model/tokenizer.json", SURVEY, GONE | OTHER_JSON),
    ("model/tokenizer_config.json", SURVEY, GONE | OTHER_JSON),
    (
        "sharded/*.index.json",
        replace(SPECTRA, words=("spectra", "@/sharded", "--out", "@/out")),
        GONE | OTHER_JSON,
    ),
    (
        "sharded/model-00002*",
        replace(SPECTRA, words=("spectra", "@/sharded", "--out", "@/out")),
        GONE | TENSORS,
    ),
    ("run/run.json", EXCLUDE, SEALED_JSON | entries(*RUN_ENTRIES) | swap("trace/run.json")),
    ("run/run.json", REPORT, entries("counts", "corpus", "model.heads", "versions", sealed=True)),
    ("run/run.json", EXCLUDE, entries("corpus.contexts", "checksums", "fingerprint", sealed=True)),
    ("run/run.json", LIST, LISTED_JSON),
    ("run/*.parquet", EXCLUDE, SEALED | swap("trace/heads.parquet")),
    ("run/arrays.safetensors", EXCLUDE, SEALED | TENSORS | swap("trace/arrays.safetensors")),
    ("run/layers.parquet", REPORT, tables("layer", "rank", "norm")),
    ("run/heads.parquet", REPORT, tables("layer", "head", "entropy", "regime", "spectrum_of")),
    ("run/constituents.parquet", REPORT, tables("query", "share")),
    ("run/attribution.parquet", REPORT, tables("pattern", "group", "share", "only")),
    ("run/sinks.parquet", EXCLUDE, tables("layer", "head", "token_id", "share", "first")),
    ("run/outliers.parquet", EXCLUDE, tables("dimension", "share", "massive_contexts")),
    ("run/examples.parquet", REPORT, tables("token", "context")),
    ("trace/traces.parquet", TRACED, SEALED | tables("kind", "share", "layer")),
    ("trace/run.json", TRACED, SEALED_JSON),
    ("half.partial/progress.safetensors", RESUME, SEALED | TENSORS),
    ("pruned/pruning.json", PRUNED, SEALED_JSON | entries("pruning.sparsity", "model.layers")),
    ("pruned/pruning.parquet", PRUNED, SEALED),
    ("pruned/low_rank/block-000.safetensors", PRUNED, SEALED | TENSORS),
    ("factored/block-001.safetensors", FACTORED, SEALED | TENSORS | swap("factored/block-000.safetensors")),
    ("factored/dense.safetensors", FACTORED, GONE | TENSORS),
    ("factored/pruning.json", AGAIN, SEALED_JSON),
    ("factored/block-002.safetensors", AGAIN, SEALED | TENSORS),
    ("answers.json", ANSWERS, SEALED_JSON | entries("measured", "schema_version")),
    ("trained/identity.json", TRAINED, GONE | OTHER_JSON | EXTRA | entries("config")),
    ("trained/config.json", TRAINED, GONE | OTHER_JSON),
    ("trained/model.safetensors", TRAINED, GONE | TENSORS | WEIGHTS),
    ("begun.partial/identity.json", UNTRAINED, GONE | OTHER_JSON | EXTRA | entries("config")),
    ("begun.partial/checkpoint.safetensors", UNTRAINED, SEALED | TENSORS),
    (
        "pages/localization-figure2/result.json",
        INDEX,
        LISTED_JSON | entries("verdicts", "provenance", "title"),
    ),
    (
        "text.txt",
        SURVEY,
        {name: GONE[name] for name in ("emptied", "rubbish", "a folder", "a dangling link")},
    ),
    (
        "rows.jsonl",
        _of("rows.jsonl"),
        GONE | {n: OTHER_JSON[n] for n in ("null", "a list", "{}", "not UTF-8")},
    ),
    ("rows.jsonl", _of("rows.jsonl"), {"nested deeply": OTHER_JSON["nested deeply"]}),
    ("rows.parquet", _of("rows.parquet"), GONE | {"cut near its end": CHANGED["cut near its end"]}),
]


def _prepare(root: Path, names: set[str]) -> None:
    """The files of these names, written by the commands that write them; `root` is empty."""
    _with_sinks(checkpoints.build("gpt2")).save_pretrained(root / "model")
    checkpoints.byte_tokenizer().save_pretrained(root / "model")
    (root / "text.txt").write_text(TEXT)
    for name in sorted(names & MAKERS.keys()):
        MAKERS[name](root)
    for page in root.rglob("plotly.min.js"):
        page.unlink()  # four megabytes, which are written anew


def _by(reader: Reader) -> Callable[[Path], None]:
    """What the reader itself writes where nothing is there to be read."""

    def make(root: Path) -> None:
        status, _, stderr = _call(reader, root)
        assert status == 0, (reader, stderr)

    return make


def _interrupted(reader: Reader, module: Any, name: str) -> Callable[[Path], None]:
    """What a reader leaves that is interrupted when it has saved its progress for the first time."""
    save = getattr(module, name)

    def then_interrupt(*args: Any, **kwargs: Any) -> None:
        save(*args, **kwargs)
        raise KeyboardInterrupt

    def make(root: Path) -> None:
        often = mock.patch.dict(survey.__wrapped__.__kwdefaults__, checkpoint_seconds=0.0)  # type: ignore[attr-defined]
        with often, mock.patch.object(module, name, then_interrupt):
            assert _call(reader, root)[0] == 130

    return make


ROWS = pd.DataFrame({"text": [TEXT] * 3, "label": ["a", "b", "c"]})

MAKERS: dict[str, Callable[[Path], object]] = {
    "sharded": lambda root: checkpoints.build("gpt2").save_pretrained(
        root / "sharded", max_shard_size="60KB"
    ),
    "rows": lambda root: (
        ROWS.to_json(root / "rows.jsonl", orient="records", lines=True),
        ROWS.to_parquet(root / "rows.parquet"),
    ),
    "run": _by(replace(SURVEY, words=(*SURVEY.words[:-1], "@/run"))),
    "trace": _by(replace(SURVEY, words=("trace", *SURVEY.words[1:-1], "@/trace"))),
    "pruned": _by(PRUNED),
    "factored": _by(AGAIN),
    "answers": _by(ANSWERS),
    "pages": _by(replace(INDEX, words=("reproduce", "localization/figure2", *INDEX.words[2:]))),
    "trained": _by(TRAINED),
    "half": _interrupted(RESUME, Workspace, "save_progress"),
    "begun": _interrupted(UNTRAINED, training_loop, "save_checkpoint"),
}
"""What writes each kind of file, by the name that it begins with; the model and the text are always there."""


def _names(pattern: str, reader: Reader, what: str) -> set[str]:
    """The files that a trial reads, by the names of `MAKERS`, and those that its way of tampering takes."""
    words = reader.words if isinstance(reader.words, tuple) else ()
    every = ("run", "trace") if reader is LIST else ()
    return {*every, *(name for word in (pattern, *words, what) for name in re.split("[^a-z]+", word))}


def _with_sinks(model: Any) -> Any:
    """With sinks and massive activations, so that no table is without rows."""
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight.mul_(3)
        model.transformer.wpe.weight[0, 5] = 300.0
    return model


class _TookTooLongError(BaseException):
    """Past `SECONDS`."""


@contextmanager
def _limits() -> Iterator[None]:
    def end(*_: object) -> None:
        raise _TookTooLongError

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, end)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + GROWTH, before[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def _call(reader: Reader, root: Path) -> tuple[int, str, str]:
    """Status, standard output and standard error."""
    if isinstance(reader.words, tuple):
        words = [word.replace("@", str(root)) for word in reader.words]
        result = CliRunner().invoke(app, words, catch_exceptions=False)
        return result.exit_code, result.stdout, result.stderr
    stderr, status = io.StringIO(), 0
    with redirect_stderr(stderr):
        try:
            with one_line_errors():
                reader.words(root)
        except typer.Exit as end:
            status = end.exit_code
    return status, "", stderr.getvalue()


def _numbers(reader: Reader, root: Path, stdout: str) -> dict[str, str]:
    files = {path for pattern in reader.numbers for path in root.glob(pattern)}
    found = {str(path.relative_to(root)): path.read_bytes() for path in files if path.is_file()}
    return {name: hashlib.sha256(data).hexdigest() for name, data in found.items()} or {"printed": stdout}


def _there(root: Path) -> dict[str, bytes | None]:
    """All files and links, by name."""
    return {
        str(path.relative_to(root)): os.readlink(path).encode()
        if path.is_symlink()
        else hashlib.sha256(path.read_bytes()).digest()
        for path in root.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def _answer(reader: Reader, root: Path, tampered: Path, right: dict[str, str] | None) -> tuple[str, str]:
    """The trial's answer, and the line or what is wrong; `right` None: other numbers are as right."""
    before = _there(root)
    try:
        with _limits():
            status, stdout, stderr = _call(reader, root)
    except _TookTooLongError:
        return UNFORESEEN, f"no end within {SECONDS} s"
    except BaseException as error:
        return UNFORESEEN, f"{type(error).__name__}: {error}"
    if not status:
        numbers = _numbers(reader, root, stdout)
        wrong = sorted(
            name for name in {*numbers, *(right or {})} if numbers.get(name) != (right or {}).get(name)
        )
        if right is not None and wrong and not _is_left_out(tampered, stderr, root):
            return WRONG, f"other numbers: {', '.join(wrong)}"
        return RIGHT, ""
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    if len(errors) != 1 or "Traceback" in stderr or "--debug" in stderr:
        return UNFORESEEN, stderr[-500:]
    after = _there(root)
    lost = sorted(name for name in before if after.get(name) != before[name])
    left = sorted(
        name for name in after.keys() - before.keys() if name.endswith((".writing", ".lock", ".old"))
    )
    return (LOST, ", ".join(lost + left)) if lost or left else (REFUSED, errors[0])


def _is_left_out(tampered: Path, stderr: str, root: Path) -> bool:
    """A list of many (runs, results) says which one of them it lacks, on the screen or on its page."""
    page = root / "pages" / "index.html"
    named = f"is damaged there: {tampered.parent.name}."
    folder = str(tampered.parent.relative_to(root.parent))
    return folder in "".join(stderr.split()) or (
        page.parent in tampered.parents and named in page.read_text()
    )


Way = tuple[str, Reader, str, Tampering]
"""Pattern of the file, its reader, what is done to it, and how."""


def all_trials() -> list[Way]:
    """Every way to tamper with every file."""
    return [
        (pattern, reader, name, change)
        for pattern, reader, changes in SUBJECTS
        for name, change in changes.items()
    ]


def trials(seed: int, share: float) -> Iterator[Trial]:
    """A `share` of all files and ways to tamper with them, drawn by the seed."""
    every = all_trials()
    yield from tried(random.Random(seed).sample(every, max(1, round(share * len(every)))), seed)


def tried(chosen: Sequence[Way], seed: int) -> Iterator[Trial]:
    """Those that are chosen, one after the other, each on files of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        # All files are written and read at one place: a model's name is a part of what is written.
        root, whole = Path(scratch) / "files", Path(scratch) / "whole"
        root.mkdir()
        _prepare(root, set().union(*(_names(*way[:3]) for way in chosen)))
        root.rename(whole)
        right: dict[Reader, dict[str, str]] = {}
        for pattern, reader, name, change in chosen:
            if reader not in right:
                shutil.copytree(whole, root, symlinks=True)
                status, stdout, stderr = _call(reader, root)
                assert status == 0, (reader.name, stderr)
                right[reader] = _numbers(reader, root, stdout)
                shutil.rmtree(root)
            shutil.copytree(whole, root, symlinks=True)
            path = random.Random(f"{seed} {pattern}").choice(sorted(root.glob(pattern)))
            change(path, random.Random(f"{seed} {pattern} {name}"))
            sealed = name.endswith("sealed anew")
            answer, said = _answer(reader, root, path, None if sealed else right[reader])
            shutil.rmtree(root)
            yield Trial("files", f"{path.relative_to(root)}: {name}", reader.name, answer, said)
