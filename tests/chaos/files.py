"""Every kind of file that is read, tampered with, and the command that reads it.

What nobody can know is not tried: a number of a plain checkpoint or a word of a text that is another number or word.
"""

from __future__ import annotations

import random
import resource
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from tests.chaos.tampering import CHANGED, EXTRA, GONE, OTHER_JSON, TENSORS, Tampering, entries, swap, tables
from tests.inputs import hostile

SECONDS, GROWTH = 20, 2 << 30
"""The most that a command may take, and by how many bytes its addresses may grow."""

WEIGHTS: dict[str, Tampering] = {
    name: (lambda change: lambda path, _: change(path.parent))(hostile.HOSTILE[name])
    for name in ("NaN", "a missing tensor")
}
SIZES = ("n_embd", "n_layer", "n_head", "n_positions", "vocab_size")
RUN_ENTRIES = ("counts.tokens", "model.layers", "seed", "fingerprint", "schema_version", "checksums")
SEALED = GONE | CHANGED
SEALED_JSON = SEALED | OTHER_JSON | EXTRA
# A folder without the file is not one of those that are listed.
LISTED_JSON = {name: change for name, change in SEALED_JSON.items() if name != "a dangling link"}
NO_TEXT = {name: GONE[name] for name in ("emptied", "rubbish", "a folder", "a dangling link")}
NO_LINES = GONE | {name: OTHER_JSON[name] for name in ("null", "a list", "{}", "not UTF-8", "nested deeply")}
CUT = {"cut near its end": CHANGED["cut near its end"]}

# Pattern of the files, command, tampering.
SUBJECTS: list[tuple[str, str, dict[str, Tampering]]] = [
    ("model/config.json", "spectra", GONE | OTHER_JSON | EXTRA | entries(*SIZES)),
    ("model/config.json", "survey", GONE | entries("n_positions", "model_type", "architectures")),
    ("model/model.safetensors", "spectra", GONE | TENSORS | WEIGHTS),
    ("model/model.safetensors", "survey", GONE | TENSORS | WEIGHTS),
    ("model/tokenizer.json", "survey", GONE | OTHER_JSON),
    ("model/tokenizer_config.json", "survey", GONE | OTHER_JSON),
    ("sharded/*.index.json", "spectra of shards", GONE | OTHER_JSON),
    ("sharded/model-00002*", "spectra of shards", GONE | TENSORS),
    ("run/run.json", "exclude", SEALED_JSON | entries(*RUN_ENTRIES, "corpus.contexts")),
    ("run/run.json", "exclude", swap("trace/run.json")),
    ("run/run.json", "exclude", entries("corpus.contexts", "checksums", "fingerprint", sealed=True)),
    ("run/run.json", "report", entries("counts", "corpus", "model.heads", "versions", sealed=True)),
    ("run/run.json", "runs", LISTED_JSON),
    ("run/*.parquet", "exclude", SEALED | swap("trace/heads.parquet")),
    ("run/arrays.safetensors", "exclude", SEALED | TENSORS | swap("trace/arrays.safetensors")),
    ("run/layers.parquet", "report", tables("layer", "rank", "norm")),
    ("run/heads.parquet", "report", tables("layer", "head", "entropy", "regime", "spectrum_of")),
    ("run/constituents.parquet", "report", tables("query", "share")),
    ("run/attribution.parquet", "report", tables("pattern", "group", "share", "only")),
    ("run/sinks.parquet", "exclude", tables("layer", "head", "token_id", "share", "first")),
    ("run/outliers.parquet", "exclude", tables("dimension", "share", "massive_contexts")),
    ("run/examples.parquet", "report", tables("token", "context")),
    ("trace/traces.parquet", "exclude by a trace", SEALED | tables("kind", "share", "layer")),
    ("trace/run.json", "exclude by a trace", SEALED_JSON),
    ("half.partial/corpus.safetensors", "survey, resumed", SEALED | TENSORS),
    ("half.partial/job.json", "survey, resumed", SEALED_JSON),
    ("pruned/pruning.json", "prune, again", SEALED_JSON | entries("pruning.sparsity", "model.layers")),
    ("pruned/pruning.parquet", "prune, again", SEALED),
    ("pruned/low_rank/block-000.safetensors", "prune, again", SEALED | TENSORS),
    ("factored/block-001.safetensors", "spectra of factors", SEALED | TENSORS),
    ("factored/block-001.safetensors", "spectra of factors", swap("factored/block-000.safetensors")),
    ("factored/dense.safetensors", "spectra of factors", GONE | TENSORS),
    ("factored/pruning.json", "prune to factors, again", SEALED_JSON),
    ("factored/block-002.safetensors", "prune to factors, again", SEALED | TENSORS),
    ("answers.json", "answers", SEALED_JSON | entries("measured", "schema_version")),
    ("trained/job.json", "train, trained", SEALED_JSON),
    ("trained/config.json", "train, trained", GONE | OTHER_JSON),
    ("trained/model.safetensors", "train, trained", GONE | TENSORS | WEIGHTS),
    ("begun.partial/job.json", "train, begun", SEALED_JSON),
    ("begun.partial/checkpoint.safetensors", "train, begun", SEALED | TENSORS),
    (
        "pages/localization-figure2/result.json",
        "reproduce one",
        LISTED_JSON | entries("verdicts", "provenance", "title"),
    ),
    ("text.txt", "survey", NO_TEXT),
    ("rows.jsonl", "survey of lines", NO_LINES),
    ("rows.parquet", "survey of a table", GONE | CUT),
]

Way = tuple[str, str, str, Tampering]
"""Pattern of the file, the command, what is done to it, and how."""


def all_trials() -> list[Way]:
    """Every way to tamper with every file."""
    return [(*subject[:2], what, change) for subject in SUBJECTS for what, change in subject[2].items()]


def trials(seed: int, share: float) -> Iterator[Trial]:
    """A `share` of all files and ways to tamper with them, drawn by the seed."""
    every = all_trials()
    yield from tried(random.Random(seed).sample(every, max(1, round(share * len(every)))), seed)


def tried(chosen: Sequence[Way], seed: int) -> Iterator[Trial]:
    """Those that are chosen, one after the other, each on files of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        files, right = Files(Path(scratch)), {}
        named = " ".join(f"{pattern} {what}" for pattern, _, what, _ in chosen)
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
            sealed = what.endswith("sealed anew")  # other numbers are as right
            answer, said = _answer(command, files.root, path, None if sealed else right[name])
            yield Trial("files", f"{path.relative_to(files.root)}: {what}", name, answer, said)


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


def _numbers(command: Command, root: Path, stdout: str) -> dict[str, bytes]:
    found = {
        name: data
        for name, data in contents(root).items()
        if any(Path(name).match(pattern) for pattern in command.numbers)
    }
    return found or {"printed": stdout.encode()}


def _answer(command: Command, root: Path, tampered: Path, right: dict[str, bytes] | None) -> tuple[str, str]:
    before = contents(root)
    try:
        with _limits():
            status, stdout, stderr = called(command, root)
    except BaseException as error:
        return UNFORESEEN, f"{type(error).__name__}: {error}"
    if not status:
        wrong = right is not None and other_bytes(_numbers(command, root, stdout), right)
        return (
            (WRONG, f"other numbers: {wrong}")
            if wrong and not _is_left_out(tampered, stderr, root)
            else (RIGHT, "")
        )
    if not is_refusal(status, stderr) or "--debug" in stderr:  # nobody has written that line for the case
        return UNFORESEEN, stderr[-500:]
    after = contents(root)
    lost = [name for name in before if after.get(name) != before[name]]
    lost += [name for name in {*after} - {*before} if name.endswith((".writing", ".lock", ".old"))]
    return (LOST, ", ".join(sorted(lost))) if lost else (REFUSED, stderr.partition("error: ")[2])


def _is_left_out(tampered: Path, stderr: str, root: Path) -> bool:
    """A list of many (runs, results) says which one of them it lacks, on the screen or on its page."""
    page = root / "pages" / "index.html"
    named = f"is damaged there: {tampered.parent.name}."
    folder = str(tampered.parent.relative_to(root.parent))
    return folder in "".join(stderr.split()) or (
        page.parent in tampered.parents and named in page.read_text()
    )
