"""Spectra of a checkpoint too large to be opened: memory and time, beside a bare read of the same tensors.

`python -m benchmarks.shards` writes the layout of a Llama with seven billion parameters (bfloat16, a file a layer) to
a temporary folder. Weights of attention are random; all others are holes in the files and take no disk. Then
`theodolite spectra` runs on it, and another process which only reads the attention's tensors, one after another. The
operating system counts the memory of each (the largest resident set) and its processor time, which other processes
disturb less than wall time. `--layers 2,4,8` runs the same with other numbers
of layers, to see what grows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HEADER_STEP = 8
BARE = """
import sys
from pathlib import Path
from safetensors import safe_open
for path in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    with safe_open(path, "pt") as file:
        for name in file.keys():
            if "self_attn" in name:
                file.get_tensor(name).sum()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default="32", help="how many, with commas for several checkpoints")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key-heads", type=int, default=32)
    parser.add_argument("--inner", type=int, default=11008)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--folder", type=Path, help="where to write [default: a temporary folder]")
    options = parser.parse_args()
    for layers in map(int, options.layers.split(",")):
        config = LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=options.width,
            num_attention_heads=options.heads,
            num_key_value_heads=options.key_heads,
            intermediate_size=options.inner,
            vocab_size=options.vocabulary,
        )
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            report(config, Path(folder))


def report(config: LlamaConfig, folder: Path) -> None:
    parameters, read = write_layout(config, folder)
    spectra = [sys.executable, "-m", "theodolite", "spectra", str(folder), "--json"]
    bare_memory, bare_cpu, bare_seconds, _ = measured([sys.executable, "-c", BARE, str(folder)])
    memory, cpu, seconds, out = measured(spectra)
    heads = json.loads(out)["heads"]
    measured_heads = sum(bool(row["frobenius_squared"]) for row in heads)
    print(
        f"{parameters / 1e9:.2f} · 10⁹ parameters, {config.num_hidden_layers} layers, "
        f"{2 * parameters / 1e9:.1f} GB in bfloat16, of them attention {read / 1e9:.2f} GB: {measured_heads} heads"
    )
    print(
        f"  bare read {bare_memory / 2**30:5.2f} GiB, {bare_cpu:6.1f} s of processor time, {bare_seconds:6.1f} s"
    )
    print(f"  spectra   {memory / 2**30:5.2f} GiB, {cpu:6.1f} s of processor time, {seconds:6.1f} s")
    print(
        f"  {memory / bare_memory:.1f} times the memory of the read and {cpu / bare_cpu:.0f} times its processor time; "
        f"{memory / (2 * parameters):.2f} times the weights",
        flush=True,
    )


def write_layout(config: LlamaConfig, folder: Path, part: str = "self_attn") -> tuple[int, int]:
    """Write a checkpoint, random where a name has `part` in it, else holes; its parameters, and the random bytes."""
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: list(t.shape) for name, t in LlamaForCausalLM(config).state_dict().items()}
    files: dict[str, dict[str, list[int]]] = {}
    for name, shape in shapes.items():
        parts = name.split(".")
        key = f"model-{int(parts[2]):05d}" if parts[1] == "layers" else "model-rest"
        files.setdefault(f"{key}.safetensors", {})[name] = shape
    generator, read = torch.Generator().manual_seed(0), 0
    for file, tensors in files.items():
        read += write_sparse(folder / file, tensors, generator, part)
    index = {"metadata": {}, "weight_map": {name: file for file, names in files.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(math.prod(shape) for shape in shapes.values()), read


def write_sparse(
    path: Path, tensors: dict[str, list[int]], generator: torch.Generator, part: str = "self_attn"
) -> int:
    """Write a safetensors file of bfloat16, random where a name has `part` in it; the bytes of those."""
    header, end = {}, 0
    for name, shape in tensors.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % HEADER_STEP)
    begin, written = 8 + len(text), 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in tensors.items():
            if part in name:
                file.seek(begin + header[name]["data_offsets"][0])
                weights = torch.randn(shape, generator=generator) * (
                    shape[-1] ** -0.5 if len(shape) > 1 else 1.0
                )
                written += file.write(weights.bfloat16().view(torch.uint8).numpy())
        file.truncate(begin + end)
    return written


def measured(command: list[str]) -> tuple[int, float, float, str]:
    """Largest resident set in bytes, seconds of processor and of wall time, and what a command printed."""
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} failed")
        out.seek(0)
        memory = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return memory, usage.ru_utime + usage.ru_stime, seconds, out.read()


if __name__ == "__main__":
    main()
