"""The same call gives the same bytes; with another number of threads, the same to the last digits that torch gives."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

from tests.faults.test_folders import TEXT, contents
from tests.processes import Started
from theodolite.cli.app import app
from theodolite.passes.run import TABLES, Run


def _run(threads: int, commands: list[str]) -> None:
    torch.set_num_threads(threads)
    assert torch.get_num_threads() == threads
    for words in commands:
        app(words.split(), standalone_mode=False)


def all_of_them(threads: int, model: Path, text: Path, out: Path) -> dict[str, bytes]:
    """Every command that measures, in one process with so many threads."""
    reading = f"--corpus {text} --length 32 --contexts 6"
    commands = [
        f"survey {model} {reading} --out {out}/survey",
        f"trace {model} {reading} --out {out}/trace",
        f"spectra {model} --out {out}/spectra",
        f"prune {model} {reading} --out {out}/prune",
    ]
    out.parent.mkdir(exist_ok=True)
    status, _, errors = Started(_run, threads, commands, folder=out.parent).end()
    assert status == 0, errors
    return contents(out)


@pytest.fixture(scope="module")
def first(checkpoint, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("first")
    (folder / "text.txt").write_text(TEXT)
    return folder, checkpoint("gpt2"), all_of_them(1, checkpoint("gpt2"), folder / "text.txt", folder / "out")


@pytest.mark.slow
def test_the_same_bytes_again(first, tmp_path: Path) -> None:
    """Oracle: the first time, in another process."""
    folder, model, expected = first
    assert all_of_them(1, model, folder / "text.txt", tmp_path / "out") == expected
    assert len(expected) > 20


@pytest.mark.slow
def test_four_threads_change_last_digits_only(first, tmp_path: Path) -> None:
    """Oracle: one thread. Spectra and traces keep their bytes; a survey, all its numbers to a millionth."""
    folder, model, expected = first
    again = all_of_them(4, model, folder / "text.txt", tmp_path / "out")
    assert again.keys() == expected.keys()
    changed = [name for name in expected if again[name] != expected[name]]
    assert [name for name in changed if name.startswith(("spectra", "trace"))] == []
    one, four = (Run.load(place / "out" / "survey") for place in (folder, tmp_path))
    for name in TABLES:
        table = getattr(one, name)
        for column in table.select_dtypes("float"):
            scale = table[column].abs().max()
            pd.testing.assert_series_equal(
                getattr(four, name)[column], table[column], rtol=0, atol=1e-6 * scale
            )
