"""Files of tensors with a checksum: a changed byte is seen, wherever it is. Oracle: the bytes, one after another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from theodolite.passes.run import Workspace
from theodolite.system.checksums import CorruptFile, read_checked, read_notes, write_checked

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
    assert notes == read_notes(tmp_path / "a") == {"step": 3, "of": [1, None]}
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
    notes_at = whole.index(b"notes"), whole.index(b"sha256") - 4
    for place in range(0, len(whole)):
        if notes_at[0] <= place < notes_at[1]:
            continue  # notes are not under the checksum; their readers check them
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            tensors, _ = read_checked(path)
        except CorruptFile:
            continue
        assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items()), place
    for cut in (0, 7, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(CorruptFile):
            read_checked(path)


def test_files_without_a_seal_are_taken_as_they_are(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a", {"step": "5"})
    assert read_checked(tmp_path / "a")[1] == read_notes(tmp_path / "a") == {"step": "5"}
    save_file({"a": torch.ones(2)}, tmp_path / "b")
    assert read_checked(tmp_path / "b")[1] == {}


def test_changed_progress_is_not_gone_on_with(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "run", {"of": "this"})
    workspace.save_progress({"contexts": 3}, {"sums": torch.arange(100.0)})
    assert workspace.load_progress() is not None
    path = tmp_path / "run.partial" / "progress.safetensors"
    data = bytearray(path.read_bytes())
    data[-30] ^= 4
    path.write_bytes(data)
    with pytest.raises(Exception, match=r"damaged: remove .*run\.partial to start afresh"):
        workspace.load_progress()


def test_what_is_read_lies_where_torch_would_put_it(tmp_path: Path) -> None:
    """Sums over misaligned numbers differ in their last bits: a run gone on with would not have the bytes of one."""
    tensors = {"some": torch.randn(3), "more": torch.randn(40, 7)}
    for length in range(0, 64, 8):  # of the header, which moves what follows it
        write_checked(tmp_path / "file", tensors, {"note": "x" * length})
        read, _ = read_checked(tmp_path / "file")
        assert all(torch.equal(read[name], tensors[name]) for name in tensors)
        assert [tensor.data_ptr() % 64 for tensor in read.values()] == [0, 0]
