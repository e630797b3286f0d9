"""Disks that are full, folders that cannot be written, run folders that are not whole. Oracle: the disk itself."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.slow import slow_but
from theodolite.cli.app import app
from theodolite.passes.run import TABLES, Run

TEXT = "The theodolite stands on its tripod; one reads the angle twice, and then a third time. " * 40


def call(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stderr


def one_error(stderr: str) -> str:
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, stderr
    assert "Traceback" not in stderr
    assert "--debug" not in stderr, "was not foreseen"
    return errors[0]


@pytest.fixture
def words(checkpoint, tmp_path: Path) -> list[object]:
    (tmp_path / "text.txt").write_text(TEXT)
    return [checkpoint("gpt2"), "--corpus", tmp_path / "text.txt", "--length", 32, "--contexts", 4]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix in (".parquet", ".safetensors")
    }


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """The system itself refuses every byte of a file beyond `size`, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize(
    ("command", "size"),
    slow_but([("survey", 3000)], [("survey", 3000), ("trace", 3000), ("prune", 3000), ("trace", 0)]),
)
def test_a_disk_that_takes_no_more(command: str, size: int, words: list[object], tmp_path: Path) -> None:
    """Oracle: the run on a disk with space; the same command goes on once there is some."""
    more = ["--method", "wanda"] if command == "prune" else []
    assert call(command, *words, *more, "--out", tmp_path / "whole")[0] == 0
    with files_up_to(size):
        status, stderr = call(command, *words, *more, "--out", tmp_path / "run")
    assert status == 1
    assert "cannot write" in one_error(stderr)
    if (tmp_path / "run").exists():  # the run was small enough, and its page was not
        assert not (tmp_path / "run" / "report" / "index.html").exists()
    assert call(command, *words, *more, "--out", tmp_path / "run")[0] == 0
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt", "run", "whole"}


@contextmanager
def without_overriding() -> Iterator[None]:
    """Root may write anywhere by a capability of its own (CAP_DAC_OVERRIDE); this thread is without it for a while."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    own = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; low and high half
    assert libc.capget(header, own) == 0
    less = (ctypes.c_uint32 * 6)(*own)
    less[0] &= ~(1 << 1)
    assert libc.capset(header, less) == 0
    try:
        yield
    finally:
        assert libc.capset(header, own) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are of Linux")
@pytest.mark.parametrize("command", ["survey", "trace", "prune"])
def test_a_read_only_folder(command: str, words: list[object], tmp_path: Path) -> None:
    place = tmp_path / "locked"
    place.mkdir(mode=0o555)
    with without_overriding():
        with pytest.raises(PermissionError):
            (place / "file").touch()
        status, stderr = call(command, *words, "--out", place / "run")
    assert status == 1
    assert "cannot write" in one_error(stderr)
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("command", ["survey", "trace", "prune"])
def test_a_folder_below_a_file(command: str, words: list[object], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, stderr = call(command, *words, "--out", tmp_path / "file" / "run")
    assert status in (1, 2)
    assert "file" in one_error(stderr)


@pytest.fixture(scope="module")
def surveyed(checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("surveyed")
    (folder / "text.txt").write_text(TEXT)
    words = ["--corpus", folder / "text.txt", "--length", 32, "--contexts", 4, "--out", folder / "run"]
    assert call("survey", checkpoint("gpt2"), *words)[0] == 0
    return folder / "run"


DAMAGE = {
    "removed": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "rubbish": lambda path: path.write_bytes(os.urandom(500)),
    "its header inverted": lambda path: path.write_bytes(
        bytes(255 - byte for byte in path.read_bytes()[:64]) + path.read_bytes()[64:]
    ),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    "name", ["run.json", "arrays.safetensors", *(f"{table}.parquet" for table in TABLES)]
)
def test_a_run_that_is_not_whole(name: str, damage: str, surveyed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(surveyed, folder)
    if damage == "its header inverted" and not len(getattr(Run.load(folder), Path(name).stem, "some")):
        pytest.skip("a table without rows has nothing there")
    DAMAGE[damage](folder / name)
    commands = [("report", folder)]
    if name in ("run.json", "layers.parquet"):
        commands += [
            ("compare", surveyed, folder, "--out", tmp_path / "c"),
            ("exclude", folder, "--out", tmp_path / "m"),
        ]
    for words in commands:
        status, stderr = call(*words)
        assert status == 2
        assert str(folder) in one_error(stderr)


OTHER = {
    "null": b"null",
    "a list": b"[]",
    "a number": b"7",
    "no version": b"{}",
    "a version in words": b'{"schema_version": "three"}',
    "a version of null": b'{"schema_version": null}',
    "a version of 0": b'{"schema_version": 0}',
    "only a version": b'{"schema_version": 3}',
    "not UTF-8": b'{"schema_version": 3, "model": "\xff"}',
    "nested deeply": b'{"a":' * 100_000,
}


@pytest.mark.parametrize("what", OTHER)
def test_a_run_json_that_says_something_else(what: str, surveyed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(surveyed, folder)
    (folder / "run.json").write_bytes(OTHER[what])
    status, stderr = call("report", folder)
    assert status == 2
    assert str(folder) in one_error(stderr)


@pytest.mark.slow
def test_another_seed_text_or_model_is_not_gone_on_with(
    words: list[object], checkpoint, tmp_path: Path
) -> None:
    """Oracle: the progress that lies there is of one survey, and is left as it is when another one asks for it."""
    code = (
        "import sys, os, theodolite.passes.run as r; own = r.Workspace.save_progress\n"
        "def save(self, notes, tensors): own(self, notes, tensors); os._exit(7)\n"
        "r.Workspace.save_progress = save\n"
        "import theodolite.passes.survey as s; s.survey.__wrapped__.__kwdefaults__['checkpoint_seconds'] = 0.0\n"
        "from theodolite.cli.app import main; main()"
    )
    survey = ["survey", *words, "--batch", 1, "--out", tmp_path / "run"]
    done = subprocess.run([sys.executable, "-c", code, *map(str, survey)], capture_output=True, check=False)
    assert done.returncode == 7, done.stderr
    progress = tmp_path / "run.partial" / "progress.safetensors"
    before = progress.read_bytes()
    (tmp_path / "other.txt").write_text(TEXT.replace("angle", "angel"))
    others = (
        [*survey, "--seed", 1],
        [*survey, "--corpus", tmp_path / "other.txt"],
        [*survey, "--dtype", "float64"],
        ["survey", checkpoint("llama2"), *survey[2:]],
    )
    for other in others:
        status, stderr = call(*other)
        assert status == 2
        assert "holds an unfinished survey of another model, corpus or options" in one_error(stderr)
        assert progress.read_bytes() == before
    assert call(*survey)[0] == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["seed"] == 0
    assert Run.load(tmp_path / "run").provenance["corpus"]["name"].endswith("text.txt")
    assert not progress.parent.exists()
