"""Texts without an end, of one line, or of the wrong kind: one clear line, and bounded memory."""

from __future__ import annotations

import gzip
import itertools
import os
from pathlib import Path

import pytest

from benchmarks.timing import peak_memory
from tests.calls import call
from tests.checkpoints import byte_tokenizer
from tests.processes import Started
from theodolite.corpus import documents as texts
from theodolite.corpus.corpus import Corpus
from theodolite.corpus.cutting import encode
from theodolite.errors import UsageError
from theodolite.passes.run import Run

MEGABYTES = 100
LONG = 20_000_000


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _link(to: str):
    return lambda path: path.symlink_to(to)


REFUSED = {
    "a pipe": (_fifo, "no file or folder"),
    "a device without an end": (_link("/dev/zero"), "no file or folder"),
    "a link to itself": (lambda path: path.symlink_to(path), "no file or folder"),
    "one token": (lambda path: path.write_text("a"), "shorter than one context"),
    "gzip": (lambda path: path.write_bytes(gzip.compress(b"so it is " * 999)), "not UTF-8|binary"),
    "100 MB of NUL": (lambda path: path.open("wb").truncate(MEGABYTES << 20), "binary"),
    "a lone surrogate": (lambda path: path.write_bytes(b"so \xed\xa0\x80 is" * 99), "not UTF-8"),
}


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_texts_that_are_none(name: str, tmp_path: Path) -> None:
    make, words = REFUSED[name]
    path = tmp_path / "text.txt"
    make(path)
    with pytest.raises(UsageError, match=words) as error:
        Corpus.from_path(path, byte_tokenizer(), 16, 4)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["a pipe", "a device without an end"])
@pytest.mark.parametrize("kind", ["characters", "locater"])
def test_trainers_do_not_wait_for_what_has_no_end(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    REFUSED[name][0](path)
    held_out = ("--held-out", path) if kind == "locater" else ()
    status, _, stderr = call("train", kind, "--text", path, "--out", tmp_path / "out", *held_out)
    assert (status, "there is no such file" in stderr) == (2, True)


def test_a_folder_of_many_files_is_read_once_each(tmp_path: Path) -> None:
    """Oracle: their number. Pipes and devices among them are passed over."""
    for number in range(400):
        (tmp_path / f"{number:04}.txt").write_text(f"text {number:04} and more")
    _fifo(tmp_path / "pipe.txt")
    _link("/dev/zero")(tmp_path / "zero.txt")
    corpus = Corpus.from_path(tmp_path, byte_tokenizer(), 16, label_by="file")
    assert corpus.contexts.shape == (400, 16)
    assert corpus.label_names == [f"{number:04}.txt" for number in range(400)]


def test_a_file_that_goes_away_in_between_is_named(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("some text")
    documents = texts.read_path(tmp_path)
    next(documents)
    (tmp_path / "b.txt").unlink()
    with pytest.raises(UsageError, match=r"b\.txt cannot be read \(No such file"):
        next(documents)


def _peaks(*paths: Path) -> None:
    """Print the most memory of this process after each text, in MB: of a few contexts, since all cost the same."""
    tokenizer = byte_tokenizer()
    for path in paths:
        for document in texts.read_path(path):
            list(itertools.islice(encode(tokenizer, document.text), 50))
        print(peak_memory() >> 20)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["x y", "x"], ids=["spaces", "no spaces"])
def test_a_line_of_megabytes_takes_a_few_times_its_size(words: str, tmp_path: Path) -> None:
    """Oracle: the system's own count of memory, of a process that reads 20 MB, over what it had after little."""
    short, long = tmp_path / "short.txt", tmp_path / "long.txt"
    short.write_text("x y" * 1000)
    long.write_text(words * (LONG // len(words)))
    status, stdout, stderr = Started(_peaks, short, long, folder=tmp_path).end()
    assert status == 0, stderr
    before, after = map(int, stdout.split())
    assert after - before < 8 * LONG / 1e6


def test_names_of_files_may_be_any_bytes(checkpoint, tmp_path: Path) -> None:
    """Oracle: the run, in which the byte that is no UTF-8 is written out."""
    folder = tmp_path / "texts"
    folder.mkdir()
    file = folder / os.fsdecode(b"one-\xff.txt")
    for path in (file, folder / "two.txt"):
        path.write_text("The theodolite stands on its tripod; one reads the angle. " * 20)
    for number, corpus in enumerate((folder, file)):
        out = tmp_path / str(number)
        reading = ("--corpus", corpus, "--length", 32, "--contexts", 4, "--label-by", "file")
        status, _, stderr = call("survey", checkpoint("gpt2"), *reading, "--out", out)
        assert status == 0, stderr
        told = Run.load(out).provenance["corpus"]
        assert "one-\\udcff.txt" in [*told["labels"], told["name"].rpartition("/")[2]]
