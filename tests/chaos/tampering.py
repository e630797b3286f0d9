"""How a file is tampered with: each way takes the file and a generator, and leaves it there in some other form."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from tests.inputs import hostile
from theodolite.system.checksums import read_json_checked, write_json_checked

Tampering = Callable[[Path, random.Random], object]


def _cut(share: float) -> Tampering:
    return lambda path, _: path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def _flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def _zeros(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    numbers = [place for place, byte in enumerate(data) if byte]
    begin = numbers[len(numbers) // 2]
    data[begin : begin + 16] = bytes(len(data[begin : begin + 16]))
    path.write_bytes(data)


def _folder(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _link(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.symlink_to("nowhere")


GONE: dict[str, Tampering] = {
    "emptied": lambda path, _: path.write_bytes(b""),
    "cut in half": _cut(0.5),
    "rubbish": lambda path, draw: path.write_bytes(draw.randbytes(500)),
    "a folder": _folder,
    "a dangling link": _link,
}
"""Whatever it was, it is no longer there."""

CHANGED: dict[str, Tampering] = {
    "cut near its end": lambda path, _: path.write_bytes(path.read_bytes()[:-3]),
    "a bit flipped": _flip,
    "another bit flipped": _flip,
    "zeros in the middle": _zeros,
}
"""Of a file that carries a checksum: it is there, and says something else."""


def swap(other: str) -> dict[str, Tampering]:
    """By a file of the same kind, `other` in the same place or from its root."""

    def change(path: Path, draw: random.Random) -> None:
        root = next(folder for folder in path.parents if (folder / "text.txt").exists())
        shutil.copyfile(root / other, path)

    return {f"replaced by {other}": change}


def _document(change: Callable[[Any], Any], sealed: bool = False) -> Tampering:
    """A JSON file that says something else, `sealed` by a checksum of its new content."""

    def edit(path: Path, draw: random.Random) -> None:
        values = read_json_checked(path) if sealed else json.loads(path.read_text(encoding="utf-8"))
        values = change(values)
        write_json_checked(path, values) if sealed else path.write_text(json.dumps(values), encoding="utf-8")

    return edit


def _raw(data: bytes) -> Tampering:
    return lambda path, _: path.write_bytes(data)


OTHER_JSON: dict[str, Tampering] = {
    "null": _raw(b"null"),
    "a list": _raw(b"[]"),
    "{}": _raw(b"{}"),
    "not UTF-8": _raw(b'{"a": "\xff"}'),
    "nested deeply": _raw(b'{"a":' * 100_000),
    "a number of 5,000 digits": _raw(b'{"schema_version": ' + b"9" * 5000 + b"}"),
}

VALUES: dict[str, Any] = {
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-1": -1,
    "1e9": 10**9,
    "a text": "three",
    "null": None,
    "a list": [],
}


def entries(*names: str, sealed: bool = False) -> dict[str, Tampering]:
    """Entries, such as `corpus.contexts`, that are gone or of other values and types."""

    def put(values: Any, name: str, value: Any) -> Any:
        *outer, last = name.split(".")
        place = values
        for key in outer:
            place = place[key]
        place.pop(last) if value is ... else place.update({last: value})
        return values

    wrong = VALUES | {"nothing": ...}
    return {
        f"{name} = {said}{', sealed anew' if sealed else ''}": _document(
            partial(put, name=name, value=value), sealed
        )
        for name in names
        for said, value in wrong.items()
    }


EXTRA: dict[str, Tampering] = {"an entry more": _document(lambda values: values | {"nobody": {"knows": 1}})}


def _header(change: Callable[[dict[str, Any], int], object]) -> Tampering:
    """Of safetensors."""

    def edit(path: Path, draw: random.Random) -> None:
        data = path.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        told = json.loads(data[8 : 8 + size])
        change(told, len(data) - 8 - size)
        text = json.dumps(told).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])

    return edit


def _first(told: dict[str, Any]) -> Any:
    return told[min(name for name in told if name != "__metadata__")]


TENSORS: dict[str, Tampering] = {
    "a header of 2⁶⁰ bytes": lambda path, _: path.write_bytes(
        struct.pack("<Q", 2**60) + path.read_bytes()[8:]
    ),
    "a header of 90 MB": lambda path, _: _long_header(path),
    "a tensor beyond the end": _header(lambda told, size: _first(told).update(data_offsets=[size, size + 4])),
    "a shape of another size": _header(lambda told, size: _first(told).update(shape=[3, 10**6])),
    "a type that is none": _header(lambda told, size: _first(told).update(dtype="F31")),
    "all tensors in one place": _header(
        lambda told, size: [t.update(data_offsets=[0, 4]) for n, t in told.items() if n != "__metadata__"]
    ),
    "no tensors": _header(lambda told, size: told.clear()),
}


def _long_header(path: Path) -> None:
    with path.open("wb") as file:  # sparse: the disk holds eight bytes of it
        file.write(struct.pack("<Q", 90 << 20))
        file.truncate(91 << 20)


WEIGHTS: dict[str, Tampering] = {
    name: (lambda change: lambda path, _: change(path.parent))(hostile.HOSTILE[name])
    for name in ("NaN", "a missing tensor")
}


def _table(change: Callable[[pd.DataFrame], pd.DataFrame]) -> Tampering:
    """A table of a run whose checksum is that of the new one, as another program would write it."""

    def edit(path: Path, draw: random.Random) -> None:
        change(pd.read_parquet(path)).to_parquet(path, index=False)
        run = path.with_name("run.json")
        told = read_json_checked(run)
        told["checksums"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        write_json_checked(run, told)

    return edit


def tables(*columns: str) -> dict[str, Tampering]:
    changes: dict[str, Callable[[pd.DataFrame, str], pd.DataFrame]] = {
        "gone": lambda table, column: table.drop(columns=column),
        "texts": lambda table, column: table.assign(**{column: "x"}),
        "lists": lambda table, column: table.assign(**{column: [[1, 2]] * len(table)}),
        "empty": lambda table, column: table.assign(**{column: None}),
        "10⁹": lambda table, column: table.assign(**{column: 10**9}),
    }
    return {
        f"{column}: {what}, sealed anew": _table(partial(change, column=column))
        for column in columns
        for what, change in changes.items()
    } | {"no rows, sealed anew": _table(lambda table: table.iloc[:0])}
