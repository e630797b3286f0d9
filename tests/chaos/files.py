"""Every kind of file that theodolite writes and reads again, tampered with, and the command that reads it.

Checkpoints and texts of others are in tests/inputs, every changed byte and entry in tests/system/test_files.py and
tests/passes/test_run.py.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.chaos.commands import (
    COMMANDS,
    LOST,
    REFUSED,
    RIGHT,
    UNFORESEEN,
    WRONG,
    Command,
    Files,
    Trial,
    called,
    contents,
    is_refusal,
    other_bytes,
)

Tampering = Callable[[Path, random.Random], object]
"""Takes a file and a generator, and leaves the file in some other form."""


def _bytes(change: Callable[[bytes], bytes]) -> Tampering:
    return lambda path, _: path.write_bytes(change(path.read_bytes()))


def _flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


GONE: dict[str, Tampering] = {
    "emptied": _bytes(lambda _: b""),
    "cut in half": _bytes(lambda data: data[: len(data) // 2]),
    "rubbish": lambda path, draw: path.write_bytes(draw.randbytes(500)),
    "a folder": lambda path, _: (path.unlink(), path.mkdir()),
    "a dangling link": lambda path, _: (path.unlink(), path.symlink_to("nowhere")),
}
"""Whatever it was, it is no longer there."""

SEALED = GONE | {"cut near its end": _bytes(lambda data: data[:-3]), "a bit flipped": _flip}
"""Of a file that carries a checksum: it is there, and says something else."""

SEALED_JSON = SEALED | {
    "null": _bytes(lambda _: b"null"),
    "a list": _bytes(lambda _: b"[]"),
    "{}": _bytes(lambda _: b"{}"),
    "not UTF-8": _bytes(lambda _: b'{"a": "\xff"}'),
    "nested deeply": _bytes(lambda _: b'{"a":' * 100_000),
}

# Pattern of the files, command, tampering.
SUBJECTS: list[tuple[str, str, dict[str, Tampering]]] = [
    ("run/run.json", "exclude", SEALED_JSON),
    ("run/*.parquet", "exclude", SEALED),
    ("run/arrays.safetensors", "exclude", SEALED),
    ("trace/traces.parquet", "exclude by a trace", SEALED),
    ("trace/run.json", "exclude by a trace", SEALED_JSON),
    ("half.partial/corpus.safetensors", "survey, resumed", SEALED),
    ("half.partial/job.json", "survey, resumed", SEALED_JSON),
    ("pruned/pruning.json", "prune, again", SEALED_JSON),
    ("pruned/pruning.parquet", "prune, again", SEALED),
    ("pruned/low_rank/block-000.safetensors", "prune, again", SEALED),
    ("factored/block-001.safetensors", "spectra of factors", SEALED),
    ("factored/dense.safetensors", "spectra of factors", GONE),
    ("factored/pruning.json", "prune to factors, again", SEALED_JSON),
    ("factored/block-002.safetensors", "prune to factors, again", SEALED),
    ("answers.json", "answers", SEALED_JSON),
    ("trained/job.json", "train, trained", SEALED_JSON),
    ("trained/config.json", "train, trained", GONE),
    ("trained/model.safetensors", "train, trained", GONE),
    ("begun.partial/job.json", "train, begun", SEALED_JSON),
    ("begun.partial/checkpoint.safetensors", "train, begun", SEALED),
]

Way = tuple[str, str, str, Tampering]
"""Pattern of the file, the command, what is done to it, and how."""


def all_ways() -> list[Way]:
    """Every way to tamper with every file."""
    return [(*subject[:2], what, change) for subject in SUBJECTS for what, change in subject[2].items()]


def trials(seed: int) -> Iterator[Trial]:
    """Every file, tampered with in every way."""
    yield from tried(all_ways(), seed)


def tried(chosen: Sequence[Way], seed: int) -> Iterator[Trial]:
    """Those that are chosen, one after the other, each on files of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        files, right = Files(Path(scratch)), {}
        named = " ".join(pattern for pattern, *_ in chosen)
        files.prepare([COMMANDS[way[1]] for way in chosen], named)
        for pattern, name, what, change in chosen:
            command = COMMANDS[name]
            if name not in right:
                files.restore()
                status, stdout, stderr = called(command, files.root)
                assert status == 0, (name, stderr)
                right[name] = _numbers(command, files.root, stdout)
            files.restore()
            path = random.Random(f"{seed} {pattern}").choice(sorted(files.root.glob(pattern)))
            change(path, random.Random(f"{seed} {pattern} {what}"))
            answer, said = _answer(command, files.root, right[name])
            yield Trial(f"{path.relative_to(files.root)}: {what}", name, answer, said)


def _numbers(command: Command, root: Path, stdout: str) -> dict[str, bytes]:
    found = {
        name: data
        for name, data in contents(root).items()
        if any(Path(name).match(pattern) for pattern in command.numbers)
    }
    return found or {"printed": stdout.encode()}


def _answer(command: Command, root: Path, right: dict[str, bytes]) -> tuple[str, str]:
    before = contents(root)
    try:
        status, stdout, stderr = called(command, root)
    except BaseException as error:
        return UNFORESEEN, f"{type(error).__name__}: {error}"
    if not status:
        wrong = other_bytes(_numbers(command, root, stdout), right)
        return (WRONG, f"other numbers: {wrong}") if wrong else (RIGHT, "")
    if not is_refusal(status, stderr) or "--debug" in stderr:  # nobody has written that line for the case
        return UNFORESEEN, stderr[-500:]
    after = contents(root)
    lost = [name for name in before if after.get(name) != before[name]]
    lost += [name for name in {*after} - {*before} if name.endswith((".writing", ".lock", ".old"))]
    return (LOST, ", ".join(sorted(lost))) if lost else (REFUSED, stderr.partition("error: ")[2])
