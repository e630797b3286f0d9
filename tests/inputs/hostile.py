"""Checkpoints that mean harm or are broken, each written to a folder of its own from a small sound one.

None may be opened, none may run what it brings, and none may cost more memory or time than its files are large.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import edited, with_tensors

MARK = "remote-code-ran"
"""The file that remote code and pickles write beside the checkpoint, if anything runs them."""

WEIGHTS = "model.safetensors"

Change = Callable[[Path], object]


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.mark), "w")


def config(**changes: Any) -> Change:
    """A config.json with other values."""
    return lambda folder: edited(folder, **changes)


def text_of(name: str, data: bytes) -> Change:
    """A file of the checkpoint with other bytes."""
    return lambda folder: (folder / name).write_bytes(data)


def _json(name: str, **changes: Any) -> Change:
    """A file of JSON with other values."""

    def write(folder: Path) -> None:
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))

    return write


def length(claim: int) -> Change:
    """A safetensors file that claims a header of so many bytes (as two's complement where negative)."""
    claimed = struct.pack("<q", claim)
    return lambda folder: (folder / WEIGHTS).write_bytes(claimed + (folder / WEIGHTS).read_bytes()[8:])


def _pickle_only(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(folder / MARK)))


def _remote(values: dict[str, Any]) -> Change:
    def write(folder: Path) -> None:
        for name in ("configuration_evil.py", "modeling_evil.py", "tokenization_evil.py"):
            (folder / name).write_text(
                f"open({str(folder / MARK)!r}, 'w').close()\n"
                "from transformers import GPT2Config as Config, GPT2LMHeadModel as Model\n"
            )
        config(**values)(folder)

    return write


AUTO_MAP = {
    "AutoConfig": "configuration_evil.Config",
    "AutoModelForCausalLM": "modeling_evil.Model",
    "AutoModel": "modeling_evil.Model",
}


def _remote_tokenizer(folder: Path) -> None:
    _remote({})(folder)
    auto_map = {"AutoTokenizer": ["tokenization_evil.Config", "tokenization_evil.Config"]}
    _json("tokenizer_config.json", auto_map=auto_map, tokenizer_class="EvilTokenizer")(folder)


def _index(shard: str) -> Change:
    def write(folder: Path) -> None:
        names = list(load_file(folder / WEIGHTS))
        (folder / WEIGHTS).rename(folder / "part-1.safetensors")
        index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, shard)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return write


def _index_to_pickle(folder: Path) -> None:
    """Named by the index, and sound: `from_pretrained` would read it, with torch's own unpickler."""
    weights = load_file(folder / WEIGHTS)
    _index("weights.bin")(folder)
    torch.save(weights, folder / "weights.bin")


def _moved(to: str) -> Change:
    """Sound weights, elsewhere: what lies there could change, and the hash of the checkpoint would be the same."""

    def write(folder: Path) -> None:
        _index(to)(folder)
        (folder / to).parent.mkdir(exist_ok=True)
        (folder / "part-1.safetensors").rename(folder / to)
        save_file({"other": torch.zeros(1)}, folder / "other.safetensors")

    return write


ENDLESS = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


def _loop(name: str) -> Change:
    def write(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(folder / name)

    return write


def _put(part: str, make: Callable[[torch.Tensor], torch.Tensor] | None) -> Change:
    """Another tensor in place of the first of that name; None: none."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        name = next(name for name in weights if part in name)
        before = weights.pop(name)
        if make is not None:
            weights[name] = make(before).contiguous()

    return lambda folder: with_tensors(folder, change)


def _overlap(folder: Path) -> None:
    """Two tensors in one place of the file."""
    data = (folder / WEIGHTS).read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    told = json.loads(data[8 : 8 + size])
    first, second = [name for name in told if name != "__metadata__"][:2]
    told[second]["data_offsets"] = told[first]["data_offsets"]
    text = json.dumps(told).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


HOSTILE: dict[str, Change] = {
    "a wrong shape": _put("c_attn.weight", lambda t: t[:-1]),
    "a missing tensor": _put("c_attn.weight", None),
    "NaN": _put("c_attn.weight", lambda t: t * torch.nan),
    "a tensor of size zero": _put("c_attn.weight", lambda t: t[:0]),
    "a width of −1": config(n_embd=-1),
    "3 heads of 32": config(n_head=3),
    "0 heads": config(n_head=0),
    "a billion positions": config(n_positions=10**12),
    "a vocabulary of 0": config(vocab_size=0),
    "an inner width of 1e12": config(n_inner=10**12),
    "a norm's epsilon in words": config(layer_norm_epsilon="small"),
    "an unknown activation": config(activation_function="evil"),
    "an unknown architecture": config(architectures=["EvilModel"]),
    "an architecture that is no model": config(architectures=["AutoTokenizer"]),
    "an architecture that is a function": config(architectures=["set_seed"]),
    "architectures in words": config(architectures="GPT2LMHeadModel"),
    "an unknown family": config(model_type="evil"),
    "a dtype of none": config(dtype="float1"),
    "quantised by a list": config(quantization_config=[1]),
    "a pickle only": _pickle_only,
    "a pickle in disguise": lambda folder: (folder / WEIGHTS).write_bytes(pickle.dumps(Bomb(folder / MARK))),
    "remote code": _remote({"auto_map": AUTO_MAP, "model_type": "evil", "architectures": ["Model"]}),
    "2 GB of header claimed": length(1 << 31),
    "a header of rubbish": text_of(WEIGHTS, struct.pack("<Q", 16) + b"\xff" * 32),
    "a header of brackets": text_of(WEIGHTS, struct.pack("<Q", 100_000) + b"[" * 100_000),
    "overlapping tensors": _overlap,
    "a config nested deeply": text_of("config.json", b'{"a":' * 100_000),
    "a config of 100 MB": lambda folder: text_of("config.json", b'{"a": "%b"' % (b"x" * 10**8))(folder),
    "an index that leads outside": _index("../../../../../../../etc/passwd"),
    "an index to a pickle": _index_to_pickle,
    "an index to sound weights in a folder of it": _moved("parts/part-1.safetensors"),
    "a pipe beside the weights": lambda folder: os.mkfifo(folder / "pipe.safetensors"),
    "a device beside the weights": lambda folder: (folder / "more.safetensors").symlink_to("/dev/zero"),
    "an index to nothing": _index("part-9.safetensors"),
    "an index that is a list": lambda folder: (
        _index("part-1.safetensors")(folder),
        (folder / "model.safetensors.index.json").write_text("[]"),
    ),
    "a loop of links for the config": _loop("config.json"),
    "a loop of links for the weights": _loop(WEIGHTS),
}
"""Name → what makes a sound checkpoint hostile. Opening each must fail."""

HARMLESS: dict[str, Change] = {
    "a pickle beside": lambda folder: (folder / "pytorch_model.bin").write_bytes(
        pickle.dumps(Bomb(folder / MARK))
    ),
    "remote code for a known family": _remote({"auto_map": AUTO_MAP}),
    "a remote tokenizer": _remote_tokenizer,
    "quantised by who knows": config(quantization_config={"quant_method": "evil"}),
    "integers as weights": _put("c_attn.weight", lambda t: t.round().to(torch.int64)),
    "attention from a hub": config(_attn_implementation="evil/kernel", attn_implementation="evil/kernel"),
    "a tokenizer whose pattern never ends": _json("tokenizer.json", pre_tokenizer=ENDLESS),
    "a tokenizer of rubbish": text_of("tokenizer.json", b"\x00rubbish"),
    "a tokenizer that is a list": text_of("tokenizer.json", b"[]"),
    "a tokenizer config that is a list": text_of("tokenizer_config.json", b"[]"),
    "a tokenizer config of rubbish": text_of("tokenizer_config.json", b"\xff"),
    "a generation config of rubbish": text_of("generation_config.json", b"{"),
}
"""The same, but what is wrong may not be needed: opening may succeed or fail, and nothing may run."""


def write(name: str, sound: Path, folder: Path) -> Path:
    """Copy the sound checkpoint and make it hostile."""
    shutil.copytree(sound, folder)
    (HOSTILE | HARMLESS)[name](folder)
    return folder
