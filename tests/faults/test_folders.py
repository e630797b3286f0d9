"""Full disks, folders that cannot be written, run folders that are not whole, other numbers of threads."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest
import torch

from tests.calls import call, one_error
from tests.slow import chaos_but
from theodolite.passes.run import TABLES, Run

TEXT = "The theodolite stands on its tripod; one reads the angle twice, and then a third time. " * 40


@pytest.fixture
def words(checkpoint, text: Path) -> list[object]:
    return [checkpoint("gpt2"), "--corpus", text, "--length", 32, "--contexts", 4]


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
    chaos_but([("survey", 3000)], [("survey", 3000), ("trace", 3000), ("prune", 3000), ("trace", 0)]),
)
def test_a_disk_that_takes_no_more(command: str, size: int, words: list[object], tmp_path: Path) -> None:
    """Oracle: the run on a disk with space; the same command goes on once there is some."""
    more = ["--method", "wanda"] if command == "prune" else []
    assert call(command, *words, *more, "--out", tmp_path / "whole")[0] == 0
    with files_up_to(size):
        status, _, stderr = call(command, *words, *more, "--out", tmp_path / "run")
    assert status == 1
    assert "cannot write" in one_error(stderr)
    if (tmp_path / "run").exists():  # the run was small enough, and its page was not
        assert not (tmp_path / "run" / "report" / "index.html").exists()
    assert call(command, *words, *more, "--out", tmp_path / "run")[0] == 0
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt", "run", "whole"}


def _measured(model: Path, text: Path, out: Path) -> dict[str, bytes]:
    reading = ["--corpus", text, "--length", 32, "--contexts", 4]
    assert call("survey", model, *reading, "--out", out / "survey")[0] == 0
    assert call("trace", model, *reading, "--out", out / "trace")[0] == 0
    assert call("spectra", model, "--out", out / "spectra")[0] == 0
    return contents(out)


@pytest.mark.slow
def test_four_threads_change_last_digits_only(checkpoint, tmp_path: Path) -> None:
    """Oracle: one thread. Spectra and traces keep their bytes; a survey, all its numbers to a millionth."""
    text, threads, found = tmp_path / "text.txt", torch.get_num_threads(), []
    text.write_text(TEXT)
    try:
        for number in (1, 4):
            torch.set_num_threads(number)
            found.append(_measured(checkpoint("gpt2"), text, tmp_path / str(number)))
    finally:
        torch.set_num_threads(threads)
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) > 20
    changed = {name.partition("/")[0] for name in found[0] if found[0][name] != found[1][name]}
    assert changed <= {"survey"}
    one, four = (Run.load(tmp_path / number / "survey") for number in "14")
    for name in TABLES:
        for column, values in getattr(one, name).select_dtypes("float").items():
            got = getattr(four, name)[column]
            pd.testing.assert_series_equal(got, values, rtol=0, atol=1e-6 * values.abs().max())
