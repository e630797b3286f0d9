"""Every kind of file that is read, tampered with, and the command that reads it. The rule is that of `trials`.

What nobody can know is not tried: a number of a plain checkpoint or a word of a text that is another number or word.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator
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
from tests.chaos.trials import LOST, REFUSED, RIGHT, UNFORESEEN, WRONG, Trial
from tests.inputs import hostile
from theodolite.cli.app import app
from theodolite.cli.screen import one_line_errors
from theodolite.papers.training import training_loop
from theodolite.papers.training.task_models import PUBLISHED, train_task_model
from theodolite.papers.training.tasks import Characters
from theodolite.passes.run import Workspace
from theodolite.passes.survey import survey
from theodolite.system.checksums import read_json_checked, write_json_checked

SECONDS, GROWTH = 20, 2 << 30
"""The most that a command may take, and by how many bytes its addresses may grow."""

TEXT = "The theodolite stands on its tripod; one reads the angle twice, and then a third time. " * 40
CUT = ("--length", "32", "--contexts", "4")
TINY = replace(PUBLISHED["characters"], layers=1, heads=2, width=16, batch=8, steps=6, checkpoint_every=2)

Tampering = Callable[[Path, random.Random], object]


# How a file is tampered with.


def _cut(share: float) -> Tampering:
    return lambda path, _: path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def _flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def _zeros(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    begin = next(place for place in range(len(data) // 2, len(data)) if data[place])
    data[begin : begin + 16] = bytes(len(data[begin : begin + 16]))
    path.write_bytes(data)


def _folder(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _link(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.symlink_to("nowhere")


GONE: dict[str, Tampering] = {
    "emptied": lambda path, _: path.write_bytes(b""),
    "cut in half": _cut(0.5),
    "rubbish": lambda path, draw: path.write_bytes(draw.randbytes(500)),
    "a folder": _folder,
    "a dangling link": _link,
}
"""Whatever it was, it is no longer there."""

CHANGED: dict[str, Tampering] = {
    "cut near its end": lambda path, _: path.write_bytes(path.read_bytes()[:-3]),
    "a bit flipped": _flip,
    "another bit flipped": _flip,
    "zeros in the middle": _zeros,
}
"""Of a file that carries a checksum: it is there, and says something else."""


def _swap(other: str) -> dict[str, Tampering]:
    """By a file of the same kind, `other` in the same place or from its root."""

    def change(path: Path, draw: random.Random) -> None:
        root = next(folder for folder in path.parents if (folder / "text.txt").exists())
        shutil.copyfile(root / other, path)

    return {f"replaced by {other}": change}


def _document(change: Callable[[Any], Any], sealed: bool = False) -> Tampering:
    """A JSON file that says something else, `sealed` by a checksum of its new content."""

    def edit(path: Path, draw: random.Random) -> None:
        values = read_json_checked(path) if sealed else json.loads(path.read_text(encoding="utf-8"))
        values = change(values)
        write_json_checked(path, values) if sealed else path.write_text(json.dumps(values), encoding="utf-8")

    return edit


def _raw(data: bytes) -> Tampering:
    return lambda path, _: path.write_bytes(data)


OTHER_JSON: dict[str, Tampering] = {
    "null": _raw(b"null"),
    "a list": _raw(b"[]"),
    "{}": _raw(b"{}"),
    "not UTF-8": _raw(b'{"a": "\xff"}'),
    "nested deeply": _raw(b'{"a":' * 100_000),
    "a number of 5,000 digits": _raw(b'{"schema_version": ' + b"9" * 5000 + b"}"),
}

VALUES: dict[str, Any] = {
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-1": -1,
    "1e9": 10**9,
    "a text": "three",
    "null": None,
    "a list": [],
}


def _entries(*names: str, sealed: bool = False) -> dict[str, Tampering]:
    """Entries, such as `corpus.contexts`, that are gone or of other values and types."""

    def put(values: Any, name: str, value: Any) -> Any:
        *outer, last = name.split(".")
        place = values
        for key in outer:
            place = place[key]
        place.pop(last) if value is ... else place.update({last: value})
        return values

    wrong = VALUES | {"nothing": ...}
    return {
        f"{name} = {said}{', sealed anew' if sealed else ''}": _document(
            partial(put, name=name, value=value), sealed
        )
        for name in names
        for said, value in wrong.items()
    }


EXTRA: dict[str, Tampering] = {"an entry more": _document(lambda values: values | {"nobody": {"knows": 1}})}


def _header(change: Callable[[dict[str, Any], int], object]) -> Tampering:
    """Of safetensors."""

    def edit(path: Path, draw: random.Random) -> None:
        data = path.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        told = json.loads(data[8 : 8 + size])
        change(told, len(data) - 8 - size)
        text = json.dumps(told).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])

    return edit


def _first(told: dict[str, Any]) -> Any:
    return told[min(name for name in told if name != "__metadata__")]


TENSORS: dict[str, Tampering] = {
    "a header of 2⁶⁰ bytes": lambda path, _: path.write_bytes(
        struct.pack("<Q", 2**60) + path.read_bytes()[8:]
    ),
    "a header of 90 MB": lambda path, _: _long_header(path),
    "a tensor beyond the end": _header(lambda told, size: _first(told).update(data_offsets=[size, size + 4])),
    "a shape of another size": _header(lambda told, size: _first(told).update(shape=[3, 10**6])),
    "a type that is none": _header(lambda told, size: _first(told).update(dtype="F31")),
    "all tensors in one place": _header(
        lambda told, size: [t.update(data_offsets=[0, 4]) for n, t in told.items() if n != "__metadata__"]
    ),
    "no tensors": _header(lambda told, size: told.clear()),
}


def _long_header(path: Path) -> None:
    with path.open("wb") as file:  # sparse: the disk holds eight bytes of it
        file.write(struct.pack("<Q", 90 << 20))
        file.truncate(91 << 20)


WEIGHTS: dict[str, Tampering] = {
    name: (lambda change: lambda path, _: change(path.parent))(hostile.HOSTILE[name])
    for name in ("NaN", "a missing tensor")
}


def _table(change: Callable[[pd.DataFrame], pd.DataFrame]) -> Tampering:
    """A table of a run whose checksum is that of the new one, as another program would write it."""

    def edit(path: Path, draw: random.Random) -> None:
        change(pd.read_parquet(path)).to_parquet(path, index=False)
        run = path.with_name("run.json")
        told = read_json_checked(run)
        told["checksums"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        write_json_checked(run, told)

    return edit


def _tables(*columns: str) -> dict[str, Tampering]:
    changes: dict[str, Callable[[pd.DataFrame, str], pd.DataFrame]] = {
        "gone": lambda table, column: table.drop(columns=column),
        "texts": lambda table, column: table.assign(**{column: "x"}),
        "lists": lambda table, column: table.assign(**{column: [[1, 2]] * len(table)}),
        "empty": lambda table, column: table.assign(**{column: None}),
        "10⁹": lambda table, column: table.assign(**{column: 10**9}),
    }
    return {
        f"{column}: {what}, sealed anew": _table(partial(change, column=column))
        for column in columns
        for what, change in changes.items()
    } | {"no rows, sealed anew": _table(lambda table: table.iloc[:0])}


# What is tampered with, and by which command it is read.


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
EVALUATE = Reader("evaluate", ("evaluate", "@/model", "--prompts", "20", "--shots", "0,2", "--json"))
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
    ("model/config.json", SPECTRA, GONE | OTHER_JSON | EXTRA | _entries(*SIZES)),
    ("model/config.json", SURVEY, GONE | _entries("n_positions", "model_type", "architectures")),
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
    ("run/run.json", EXCLUDE, SEALED_JSON | _entries(*RUN_ENTRIES) | _swap("trace/run.json")),
    ("run/run.json", REPORT, _entries("counts", "corpus", "model.heads", "versions", sealed=True)),
    ("run/run.json", EXCLUDE, _entries("corpus.contexts", "checksums", "fingerprint", sealed=True)),
    ("run/run.json", LIST, LISTED_JSON),
    ("run/*.parquet", EXCLUDE, SEALED | _swap("trace/heads.parquet")),
    ("run/arrays.safetensors", EXCLUDE, SEALED | TENSORS | _swap("trace/arrays.safetensors")),
    ("run/layers.parquet", REPORT, _tables("layer", "rank", "norm")),
    ("run/heads.parquet", REPORT, _tables("layer", "head", "entropy", "regime", "spectrum_of")),
    ("run/constituents.parquet", REPORT, _tables("query", "share")),
    ("run/attribution.parquet", REPORT, _tables("pattern", "group", "share", "only")),
    ("run/sinks.parquet", EXCLUDE, _tables("layer", "head", "token_id", "share", "first")),
    ("run/outliers.parquet", EXCLUDE, _tables("dimension", "share", "massive_contexts")),
    ("run/examples.parquet", REPORT, _tables("token", "context")),
    ("trace/traces.parquet", TRACED, SEALED | _tables("kind", "share", "layer")),
    ("trace/run.json", TRACED, SEALED_JSON),
    ("half.partial/progress.safetensors", RESUME, SEALED | TENSORS),
    ("pruned/pruning.json", PRUNED, SEALED_JSON | _entries("pruning.sparsity", "model.layers")),
    ("pruned/pruning.parquet", PRUNED, SEALED),
    ("pruned/low_rank.safetensors", PRUNED, SEALED | TENSORS),
    ("factored/block-001.safetensors", FACTORED, SEALED | TENSORS | _swap("factored/block-000.safetensors")),
    ("factored/dense.safetensors", FACTORED, GONE | TENSORS),
    ("factored/pruning.json", AGAIN, SEALED_JSON),
    ("factored/block-002.safetensors", AGAIN, SEALED | TENSORS),
    ("answers.json", ANSWERS, SEALED_JSON | _entries("measured", "schema_version")),
    ("trained/identity.json", TRAINED, GONE | OTHER_JSON | EXTRA | _entries("config")),
    ("trained/config.json", TRAINED, GONE | OTHER_JSON),
    ("trained/model.safetensors", TRAINED, GONE | TENSORS | WEIGHTS),
    ("begun.partial/identity.json", UNTRAINED, GONE | OTHER_JSON | EXTRA | _entries("config")),
    ("begun.partial/checkpoint.safetensors", UNTRAINED, SEALED | TENSORS),
    (
        "pages/localization-figure2/result.json",
        INDEX,
        LISTED_JSON | _entries("verdicts", "provenance", "title"),
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


def _prepare(root: Path) -> None:
    """Every kind of file, written by the commands that write them; `root` is empty."""

    def call(*words: object) -> None:
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == 0, (words, result.stderr)

    _with_sinks(checkpoints.build("gpt2")).save_pretrained(root / "model")
    checkpoints.byte_tokenizer().save_pretrained(root / "model")
    checkpoints.build("gpt2").save_pretrained(root / "sharded", max_shard_size="60KB")
    (root / "text.txt").write_text(TEXT)
    rows = pd.DataFrame({"text": [TEXT] * 3, "label": ["a", "b", "c"]})
    rows.to_json(root / "rows.jsonl", orient="records", lines=True)
    rows.to_parquet(root / "rows.parquet")
    text = ("--corpus", root / "text.txt", *CUT)
    call("survey", root / "model", *text, "--out", root / "run")
    call("trace", root / "model", *text, "--out", root / "trace")
    for reader in (PRUNED, AGAIN, ANSWERS):
        call(*_words(reader, root))
    call("reproduce", "localization/figure2", "--out", root / "pages")
    _train(root, "trained")
    often = mock.patch.dict(survey.__wrapped__.__kwdefaults__, checkpoint_seconds=0.0)  # type: ignore[attr-defined]
    interrupted = ((RESUME, Workspace, "save_progress"), (UNTRAINED, training_loop, "save_checkpoint"))
    for reader, module, name in interrupted:
        with often, mock.patch.object(module, name, _then_interrupted(getattr(module, name))):
            assert _call(reader, root)[0] == 130
    for page in root.rglob("plotly.min.js"):
        page.unlink()  # four megabytes, which are written anew


def _with_sinks(model: Any) -> Any:
    """With sinks and massive activations, so that no table is without rows."""
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight.mul_(3)
        model.transformer.wpe.weight[0, 5] = 300.0
    return model


def _then_interrupted(function: Callable[..., Any]) -> Callable[..., None]:
    def call(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)
        raise KeyboardInterrupt

    return call


def _words(reader: Reader, root: Path) -> list[str]:
    assert isinstance(reader.words, tuple)
    return [word.replace("@", str(root)) for word in reader.words]


# A trial.


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
        result = CliRunner().invoke(app, _words(reader, root), catch_exceptions=False)
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


def all_trials() -> list[tuple[str, Reader, str, Tampering]]:
    """Pattern of the file, its reader, what is done to it, and how."""
    return [
        (pattern, reader, name, change)
        for pattern, reader, changes in SUBJECTS
        for name, change in changes.items()
    ]


def trials(seed: int, share: float) -> Iterator[Trial]:
    """A `share` of all files and ways to tamper with them, drawn by the seed."""
    chosen = all_trials()
    chosen = random.Random(seed).sample(chosen, max(1, round(share * len(chosen))))
    with tempfile.TemporaryDirectory() as scratch:
        # All files are written and read at one place: a model's name is a part of what is written.
        root, whole = Path(scratch) / "files", Path(scratch) / "whole"
        root.mkdir()
        _prepare(root)
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
