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

from theodolite.system.files import read_json_checked, write_json_checked

Tampering = Callable[[Path, random.Random], object]


def _bytes(change: Callable[[bytes], bytes]) -> Tampering:
    return lambda path, _: path.write_bytes(change(path.read_bytes()))


def _flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def _zeros(data: bytes) -> bytes:
    numbers = [place for place, byte in enumerate(data) if byte]
    begin = numbers[len(numbers) // 2]
    return data[:begin] + bytes(len(data[begin : begin + 16])) + data[begin + 16 :]


GONE: dict[str, Tampering] = {
    "emptied": _bytes(lambda _: b""),
    "cut in half": _bytes(lambda data: data[: len(data) // 2]),
    "rubbish": lambda path, draw: path.write_bytes(draw.randbytes(500)),
    "a folder": lambda path, _: (path.unlink(), path.mkdir()),
    "a dangling link": lambda path, _: (path.unlink(), path.symlink_to("nowhere")),
}
"""Whatever it was, it is no longer there."""

CHANGED: dict[str, Tampering] = {
    "cut near its end": _bytes(lambda data: data[:-3]),
    "a bit flipped": _flip,
    "another bit flipped": _flip,
    "zeros in the middle": _bytes(_zeros),
}
"""Of a file that carries a checksum: it is there, and says something else."""

OTHER_JSON: dict[str, Tampering] = {
    "null": _bytes(lambda _: b"null"),
    "a list": _bytes(lambda _: b"[]"),
    "{}": _bytes(lambda _: b"{}"),
    "not UTF-8": _bytes(lambda _: b'{"a": "\xff"}'),
    "nested deeply": _bytes(lambda _: b'{"a":' * 100_000),
    "a number of 5,000 digits": _bytes(lambda _: b'{"schema_version": ' + b"9" * 5000 + b"}"),
}


def swap(other: str) -> dict[str, Tampering]:
    """By a file of the same kind, `other` from the root of all files."""

    def change(path: Path, draw: random.Random) -> None:
        root = next(folder for folder in path.parents if (folder / "text.txt").exists())
        shutil.copyfile(root / other, path)

    return {f"replaced by {other}": change}


VALUES = {"NaN": float("nan"), "Infinity": float("inf"), "-1": -1, "1e9": 10**9, "a text": "three"}
VALUES |= {"null": None, "a list": [], "nothing": ...}


def entries(*names: str, sealed: bool = False) -> dict[str, Tampering]:
    """Entries, such as `corpus.contexts`, gone or of other values, `sealed` by a checksum of the new content."""

    def put(path: Path, draw: random.Random, name: str, value: Any) -> None:
        values = read_json_checked(path) if sealed else json.loads(path.read_text(encoding="utf-8"))
        *outer, last = name.split(".")
        place = values
        for key in outer:
            place = place[key]
        place.pop(last) if value is ... else place.update({last: value})
        write_json_checked(path, values) if sealed else path.write_text(json.dumps(values), encoding="utf-8")

    return {
        f"{name} = {said}{', sealed anew' if sealed else ''}": partial(put, name=name, value=value)
        for name in names
        for said, value in VALUES.items()
    }


EXTRA: dict[str, Tampering] = {
    "an entry more": lambda path, _: path.write_text(
        json.dumps(json.loads(path.read_text("utf-8")) | {"nobody": {"knows": 1}}), encoding="utf-8"
    )
}


def header(change: Callable[[dict[str, Any], int], object]) -> Tampering:
    """A safetensors header that says something else; `change` is told the header and how many bytes follow."""

    def edit(data: bytes) -> bytes:
        size = struct.unpack("<Q", data[:8])[0]
        told = json.loads(data[8 : 8 + size])
        change(told, len(data) - 8 - size)
        text = json.dumps(told).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + size :]

    return _bytes(edit)


def _first(**entry: Any) -> Tampering:
    def change(told: dict[str, Any], size: int) -> None:
        told[min(name for name in told if name != "__metadata__")].update(entry)

    return header(change)


def _one_place(told: dict[str, Any], size: int) -> None:
    for name in told.keys() - {"__metadata__"}:
        told[name].update(data_offsets=[0, 4])


def _long_header(path: Path, draw: random.Random) -> None:
    with path.open("wb") as file:  # sparse: the disk holds eight bytes of it
        file.write(struct.pack("<Q", 90 << 20))
        file.truncate(91 << 20)


TENSORS: dict[str, Tampering] = {
    "a header of 2⁶⁰ bytes": _bytes(lambda data: struct.pack("<Q", 2**60) + data[8:]),
    "a header of 90 MB": _long_header,
    "a tensor beyond the end": header(
        lambda told, size: told[min(told.keys() - {"__metadata__"})].update(data_offsets=[size, size + 4])
    ),
    "a shape of another size": _first(shape=[3, 10**6]),
    "a type that is none": _first(dtype="F31"),
    "all tensors in one place": header(_one_place),
    "no tensors": header(lambda told, size: told.clear()),
}


def _table(path: Path, draw: random.Random, change: Callable[[pd.DataFrame], pd.DataFrame]) -> None:
    change(pd.read_parquet(path)).to_parquet(path, index=False)
    run = path.with_name("run.json")
    told = read_json_checked(run)
    told["checksums"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    write_json_checked(run, told)


def tables(*columns: str) -> dict[str, Tampering]:
    """Tables of a run whose checksums are those of the new ones, as another program would write them."""
    values = {"texts": "x", "lists": [1, 2], "empty": None, "10⁹": 10**9}
    changes: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {"no rows": lambda table: table.iloc[:0]}
    for name in columns:
        changes[f"{name}: gone"] = lambda table, name=name: table.drop(columns=name)
        for said, value in values.items():
            changes[f"{name}: {said}"] = lambda table, name=name, value=value: table.assign(
                **{name: [value] * len(table)}
            )
    return {f"{what}, sealed anew": partial(_table, change=change) for what, change in changes.items()}
