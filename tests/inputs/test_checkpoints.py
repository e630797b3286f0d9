"""Checkpoints that are broken or mean harm: one line, status 1 or 2, little memory, and nothing of theirs runs.

Oracle: the operating system, for memory; a file that the code in the checkpoints would make, for what runs.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.timing import peak_memory
from tests.calls import call, one_error
from tests.inputs import hostile
from tests.slow import chaos_but

MOST_MEGABYTES = 450
"""By which a process may grow: a config.json of 100 MB is read whole, as bytes and as text."""

MOST_SECONDS = 60


OF_EACH_KIND = """
a missing tensor; NaN; a width of −1; a billion positions; an unknown architecture; an architecture that is a function;
a pickle in disguise; remote code; 2 GB of header claimed; a header of rubbish; overlapping tensors;
a config nested deeply; an index that leads outside; a loop of links for the weights; a remote tokenizer;
a tokenizer of rubbish"""
OF_EACH_KIND = [name.strip() for name in OF_EACH_KIND.split(";")]


@pytest.mark.parametrize("name", chaos_but(OF_EACH_KIND, [*hostile.HOSTILE, *hostile.HARMLESS]))
def test_hostile_checkpoints(name: str, checkpoint, tmp_path: Path) -> None:
    folder = hostile.write(name, checkpoint("gpt2"), tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("so it is read " * 40)
    survey = ["survey", folder, "--corpus", text, "--length", 16, "--contexts", 2, "--out", tmp_path / "run"]
    for words in (["spectra", folder, "--json"], survey):
        before, began = peak_memory(), time.monotonic()
        status, _, stderr = call(*words)
        assert peak_memory() - before < MOST_MEGABYTES * 2**20
        assert time.monotonic() - began < MOST_SECONDS
        assert not list(tmp_path.rglob(hostile.MARK))
        assert status in (1, 2) or (name in hostile.HARMLESS and status == 0), stderr
        if status:
            one_error(stderr)
    if name in hostile.HOSTILE:
        assert not (tmp_path / "run").exists()


def test_the_code_in_them_would_leave_a_mark(checkpoint, tmp_path: Path) -> None:
    """What the test above looks for does appear when a pickle is read, or a module is imported."""
    import pickle
    import runpy

    folder = hostile.write("a pickle beside", checkpoint("gpt2"), tmp_path / "pickle")
    pickle.loads((folder / "pytorch_model.bin").read_bytes()).close()
    assert (folder / hostile.MARK).exists()
    folder = hostile.write("remote code", checkpoint("gpt2"), tmp_path / "code")
    runpy.run_path(str(folder / "modeling_evil.py"))
    assert (folder / hostile.MARK).exists()
