"""Folders that are whole or not there, and folders that remember what they are for."""

import errno
import json
import math

import pytest
from safetensors import SafetensorError

from theodolite.errors import WorkError
from theodolite.system.files import disk_errors, folder_written_atomically, json_text


def _write(folder, text, *, replace=False, fail=False):
    with folder_written_atomically(folder, replace=replace) as temporary:
        (temporary / "file").write_text(text)
        if fail:
            raise RuntimeError("killed")


@pytest.mark.parametrize("replace", [False, True])
def test_a_folder_is_written_whole_or_not_at_all(tmp_path, replace):
    folder = tmp_path / "new" / "folder"
    with pytest.raises(RuntimeError, match="killed"):
        _write(folder, "half", replace=replace, fail=True)
    assert list(folder.parent.iterdir()) == []
    (folder.parent / "folder.writing").mkdir()
    (folder.parent / "folder.writing" / "stale").touch()  # of a process that was killed
    _write(folder, "whole", replace=replace)
    assert [path.name for path in folder.rglob("*")] == ["file"]
    assert [path.name for path in folder.parent.iterdir()] == ["folder"]


def test_a_folder_is_replaced_only_when_asked_and_only_by_a_whole_one(tmp_path):
    folder = tmp_path / "folder"
    _write(folder, "first")
    with pytest.raises(WorkError, match="cannot write"):
        _write(folder, "second")
    with pytest.raises(RuntimeError, match="killed"):
        _write(folder, "second", replace=True, fail=True)
    assert (folder / "file").read_text() == "first"
    _write(folder, "second", replace=True)
    assert (folder / "file").read_text() == "second"
    assert list(tmp_path.iterdir()) == [folder]


def test_another_folder_called_old_is_left_alone(tmp_path):
    """`NAME.old` belongs to the user unless the folder is replaced."""
    (tmp_path / "folder.old").mkdir()
    _write(tmp_path / "folder", "first")
    assert (tmp_path / "folder.old").is_dir()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("I/O error: No space left on device (28)"),
    ],
)
def test_a_full_disk_is_said_with_what_to_do(error, tmp_path):
    remedy = "free space there and rerun to go on from what is saved, or choose another --out"
    with (
        pytest.raises(WorkError, match=f"^cannot write .*: No space left on device: {remedy}$"),
        disk_errors(tmp_path),
    ):
        raise error


def test_json_has_no_numbers_that_are_none():
    """Oracle: Python's own reader, told to refuse the words that are no JSON."""

    def refuse(word: str) -> float:
        raise AssertionError(word)

    text = json_text({"a": [1.5, math.nan, (math.inf, {"b": -math.inf})], "n": True, "ä": None})
    assert json.loads(text, parse_constant=refuse) == {
        "a": [1.5, None, [None, {"b": None}]],
        "n": True,
        "ä": None,
    }
