"""Parts of unfinished work: kept, bound to their fingerprint, and refused where they are damaged."""

from __future__ import annotations

import pytest
import torch

from theodolite.errors import UsageError
from theodolite.jobs.job import JOB, Unfinished

TENSORS = {"x": torch.ones(2, dtype=torch.float64)}


def test_parts_are_kept_until_the_work_is_finished(tmp_path):
    work = Unfinished(tmp_path / "run", {"model": "a"})
    assert (work.load("text"), work.notes("text"), work.names()) == (None, {}, [])
    work.save("text", TENSORS, {"contexts": 3})
    work.save_once("text", lambda: pytest.fail("it is there"))
    work.save_once("more", lambda: ({}, {"made": True}))
    tensors, notes = work.load("text")
    assert torch.equal(tensors["x"], TENSORS["x"])
    assert notes == work.notes("text") == {"contexts": 3}
    assert work.names() == ["more", "text"]
    work.remove()
    assert work.load("text") is None
    assert not list(tmp_path.iterdir())


def test_parts_are_of_one_fingerprint(tmp_path):
    """Checked when it is asked, and when several processes write a part: another one may have been faster."""
    Unfinished(tmp_path / "run", {"model": "a", "seed": 0}).save("text", TENSORS, {})
    other = Unfinished(tmp_path / "run", {"model": "a", "seed": 1}, kind="pruning")
    said = r"unfinished pruning of another model, corpus or options \(--seed 0 there, 1 now\): choose another"
    with pytest.raises(UsageError, match=said):
        other.check()
    with pytest.raises(UsageError, match=said):
        other.save_once("more", lambda: ({}, {}))


@pytest.mark.parametrize("name", [JOB, "text.safetensors"])
@pytest.mark.parametrize("content", [b"rubbish", b"", b"{}"])
def test_a_damaged_file_is_named(name, content, tmp_path):
    work = Unfinished(tmp_path / "run", {"model": "a"})
    work.save("text", TENSORS, {})
    (tmp_path / "run.partial" / name).write_bytes(content)
    remedy = r"remove .*run\.partial to start afresh" if name == JOB else "remove it to redo what it held"
    with pytest.raises(UsageError, match=f"{name} is damaged: {remedy}"):
        work.check() if name == JOB else work.load("text")


def test_parts_that_do_not_say_what_they_are_of_are_refused(tmp_path):
    """As those of a version before that file was there."""
    work = Unfinished(tmp_path / "run", {"model": "a"})
    work.save("text", TENSORS, {})
    (work.folder / JOB).unlink()
    with pytest.raises(UsageError, match=r"run\.partial does not say what it holds: remove it"):
        work.check()


def test_two_processes_are_not_at_work_at_once(tmp_path):
    first, second = (Unfinished(tmp_path / "run", {"model": "a"}) for _ in range(2))
    with first.claimed(), pytest.raises(UsageError, match="another process is writing to"), second.claimed():
        pass
    with second.claimed():
        pass
