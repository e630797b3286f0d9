"""Folders that are whole or not there, files of which a changed byte is seen. Oracle: the bytes, one after another."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from theodolite.errors import WorkError
from theodolite.system.files import (
    CorruptFile,
    disk_errors,
    folder_written_atomically,
    json_text,
    read_checked,
    read_json_checked,
    write_checked,
    write_json_checked,
)


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


TENSORS = {
    "numbers": torch.arange(12.0).view(3, 4).T,
    "half": torch.ones(3, dtype=torch.bfloat16),
    "one": torch.tensor(7, dtype=torch.int64),
    "none": torch.empty(0, 5),
    "flags": torch.tensor([True, False]),
}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_checked(tmp_path / "a", TENSORS, {"step": 3, "of": [1, None]})
    tensors, notes = read_checked(tmp_path / "a")
    assert notes == {"step": 3, "of": [1, None]}
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
    write_checked(tmp_path / "b", dict(reversed(TENSORS.items())), {"step": 3, "of": [1, None]})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_every_changed_byte_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_checked(path, TENSORS, {"step": 3})
    whole = path.read_bytes()
    for place in range(0, len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            tensors, notes = read_checked(path)
        except CorruptFile:
            continue
        assert notes == {"step": 3}, place
        assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items()), place
    for cut in (0, 7, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(CorruptFile):
            read_checked(path)


def test_files_without_a_checksum_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a", {"step": "5"})
    with pytest.raises(CorruptFile, match="it has no checksum"):
        read_checked(tmp_path / "a")


def test_what_is_read_lies_where_torch_would_put_it(tmp_path: Path) -> None:
    """Sums over misaligned numbers differ in their last bits: a run gone on with would not have the bytes of one."""
    tensors = {"some": torch.randn(3), "more": torch.randn(40, 7)}
    for length in range(0, 64, 8):  # of the header, which moves what follows it
        write_checked(tmp_path / "file", tensors, {"note": "x" * length})
        read, _ = read_checked(tmp_path / "file")
        assert all(torch.equal(read[name], tensors[name]) for name in tensors)
        assert [tensor.data_ptr() % 64 for tensor in read.values()] == [0, 0]


def test_every_changed_character_of_a_json_file_is_seen(tmp_path: Path) -> None:
    """Oracle: what the file says, as JSON."""
    path = tmp_path / "a.json"
    write_json_checked(path, {"counts": {"of": 3, "nothing": float("nan")}, "name": "ä", "each": [1.5, None]})
    whole = path.read_bytes()
    values = read_json_checked(path)
    assert values == {"counts": {"of": 3, "nothing": None}, "name": "ä", "each": [1.5, None]}
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            read = read_json_checked(path)
        except CorruptFile:
            continue
        assert read == values, place
    for text in ("", '{"bare": 1}', "[]", "7", "{", '{"a":' * 100_000, '{"sha256": 7}'):
        path.write_text(text)
        with pytest.raises(CorruptFile):
            read_json_checked(path)


def test_the_checksum_of_json_does_not_depend_on_how_long_the_work_took(tmp_path: Path) -> None:
    texts = []
    for seconds in (1.5, 2.5):
        write_json_checked(tmp_path / "run.json", {"a": 1, "of": [{"wall_seconds": seconds}]})
        assert read_json_checked(tmp_path / "run.json")["of"] == [{"wall_seconds": seconds}]
        texts.append((tmp_path / "run.json").read_text().replace(str(seconds), ""))
    assert texts[0] == texts[1]
    (tmp_path / "run.json").write_text(texts[0].replace('"a": 1', '"a": 2').replace(": \n", ": 3\n"))
    with pytest.raises(CorruptFile, match="was changed"):
        read_json_checked(tmp_path / "run.json")
