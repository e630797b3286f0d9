"""Checkpoints too large to be opened: memory and time of their spectra, of their pruning and of their survey.

`python -m benchmarks.large_checkpoints spectra` writes the layout of a Llama with seven billion parameters (bfloat16, a
file a layer) to a temporary folder. Weights of attention are random; all others are holes in the files. Then
`theodolite spectra` runs on it, and another process which only reads the attention's tensors, one after another.

`… wanda` (or another method) fills all weights, and prunes the checkpoint to half on random tokens, a block at a time.
SparseGPT needs at least 22 contexts of 512 tokens, for matrices of 11,008 inputs. `… survey` fills all weights, and
surveys 8 contexts of 256 random tokens; it is held against reading the blocks from the disk (their files are dropped
from memory before) and the bare products of the tokens that its passes read, each measured on four blocks in the same
process. `--layers 2` takes the first layers only, all of which cost the same. The operating system counts the memory of
each process (the largest resident set) and its processor time, which other processes disturb less than wall time.
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

PRUNE = """
import sys
import time
import torch
from theodolite import Corpus
from theodolite.models import open_streamed
from theodolite.prune import prune_model
folder, out, method, contexts, form, iterations, dtype, batch = sys.argv[1:]
model = open_streamed(folder, dtype=dtype, device="cpu")
options = {"iterations": int(iterations), "form": form}
ids = torch.randint(3, 31000, (int(contexts), 512), generator=torch.Generator().manual_seed(0))
ends = []
def show(done, total):
    if done % 7 == 0 and len(ends) == done // 7:
        ends.append(time.monotonic())
prune_model(model, Corpus.from_ids(ids), method, 0.5, out=out, batch=int(batch), show_progress=show, **options)
print(" ".join(f"{after - before:.0f}" for before, after in zip(ends, ends[1:])))
"""

SURVEY = """
import json
import os
import sys
import time
from pathlib import Path
import torch
from theodolite import Corpus, survey
from theodolite.models import open_streamed
from theodolite.models.sweep import Sweep
def spent():
    return torch.tensor([time.process_time(), time.perf_counter()])
def forget():
    for path in Path(folder).glob("*.safetensors"):
        with path.open() as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
folder, out, contexts, length, dtype, batch = sys.argv[1:]
began = spent()
model = open_streamed(folder, dtype=dtype, device="cpu")
opened = spent() - began
ids = torch.randint(3, 31000, (int(contexts), int(length)), generator=torch.Generator().manual_seed(0))
sweep, reading, products, tried = Sweep(model.structure.blocks), torch.zeros(2), torch.zeros(2), min(4, model.layers)
forget()
for layer in range(tried):
    before = spent()
    with model.block_present(layer):
        there = spent()
        with sweep.block(layer):
            model.forward(ids)
        reading += (there - before) / tried
        products += (spent() - there) / tried
    model.streamed.readings[layer] = 0
forget()
tokens = 0
def count(module, args, kwargs):
    global tokens
    tokens += kwargs["input_ids"].numel()
model.source.trunk.register_forward_pre_hook(count, with_kwargs=True)
def show(what, done, total):
    print(f"    {what} {done}/{total}: {(spent() - began)[1]:.0f} s", file=sys.stderr, flush=True)
began = spent()
survey(model, Corpus.from_ids(ids), out, batch=int(batch), show_progress=show)
took = spent() - began
passes = tokens / model.layers / ids.numel()
readings = model.streamed.readings
own = sum(readings) * reading + model.layers * passes * products
print(json.dumps({
    "opening": opened.tolist(), "reading": reading.tolist(), "products": products.tolist(), "passes": passes,
    "readings": [min(readings), max(readings)], "survey": took.tolist(), "own": own.tolist(),
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["spectra", "survey", "magnitude", "wanda", "sparsegpt", "oats"])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--contexts", type=int, default=4, help="of a pruning; a survey reads 8")
    parser.add_argument("--form", default="merged", choices=["merged", "factored", "adapter"])
    parser.add_argument("--iterations", type=int, default=80, help="of OATS")
    parser.add_argument("--dtype", default="auto", help="float32 where the processor is slow in bfloat16")
    parser.add_argument("--batch", type=int, default=4, help="contexts that are read at once")
    parser.add_argument("--folder", type=Path, help="where to write [default: a temporary folder]")
    options = parser.parse_args()
    config = LlamaConfig(num_hidden_layers=options.layers)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        dense = Path(folder) / "dense"
        dense.mkdir()
        if options.what == "spectra":
            parameters = write_layout(config, dense)
            of_spectra(parameters, dense)
        elif options.what == "survey":
            parameters = write_layout(config, dense, part="")
            of_survey(parameters, dense, Path(folder) / "run", options.dtype, options.batch)
        else:
            parameters = write_layout(config, dense, part="")
            how = [options.what, options.contexts, options.form, options.iterations, options.dtype]
            command = [sys.executable, "-c", PRUNE, dense, Path(folder) / "pruned", *how, options.batch]
            out = report(f"{options.what}, {options.contexts} × 512 tokens", parameters, command)[1]
            print(f"  a block: {out.strip()} s")


def of_spectra(parameters: int, folder: Path) -> None:
    """Hold the spectra of a checkpoint against a bare read of the same tensors."""
    bare, _ = report("bare read", parameters, [sys.executable, "-c", BARE, folder])
    spectra, out = report(
        "spectra", parameters, [sys.executable, "-m", "theodolite", "spectra", folder, "--json"]
    )
    heads = sum(bool(row["frobenius_squared"]) for row in json.loads(out)["heads"])
    memory, cpu = (mine / theirs for mine, theirs in zip(spectra, bare, strict=True))
    print(f"  {heads} heads; {memory:.1f} times the memory of the read, {cpu:.0f} times its processor time")


def of_survey(parameters: int, folder: Path, out: Path, dtype: str, batch: int) -> None:
    """Hold a survey block by block against reading the blocks and the bare products of its passes."""
    command: list[object] = [sys.executable, "-c", SURVEY, folder, out, 8, 256, dtype, batch]
    told = json.loads(report("survey, 8 × 256 tokens", parameters, command)[1])
    cpu, wall = zip(
        *(told[name] for name in ("opening", "reading", "products", "survey", "own")), strict=True
    )
    for what, (opening, reading, products, survey, own) in (("processor", cpu), ("wall", wall)):
        print(
            f"  {what}: opening and hashing {opening:.0f} s; a block: reading {reading:.2f} s, products "
            f"{products:.2f} s; survey {survey:.0f} s, {survey / own:.2f} times reading and products"
        )
    least, most = told["readings"]
    print(f"  each block read {least} to {most} times; {told['passes']:.2f} passes over the text's tokens")


def report(what: str, parameters: int, command: list[object]) -> tuple[tuple[int, float], str]:
    """Run a command, print what it took, and give its memory and processor time, and what it printed."""
    memory, cpu, seconds, out = measured([str(word) for word in command])
    size = f"{memory / (2 * parameters):.2f} times the weights of {parameters / 1e9:.2f} · 10⁹ parameters"
    print(
        f"{what}: {memory / 2**30:.2f} GiB ({size}), {cpu:.0f} s of processor time, {seconds:.0f} s",
        flush=True,
    )
    return (memory, cpu), out


def write_layout(config: LlamaConfig, folder: Path, part: str = "self_attn") -> int:
    """Write a checkpoint, random where a name has `part` in it, else holes; how many parameters it has."""
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: list(t.shape) for name, t in LlamaForCausalLM(config).state_dict().items()}
    files: dict[str, dict[str, list[int]]] = {}
    for name, shape in shapes.items():
        parts = name.split(".")
        key = f"model-{int(parts[2]):05d}" if parts[1] == "layers" else "model-rest"
        files.setdefault(f"{key}.safetensors", {})[name] = shape
    generator = torch.Generator().manual_seed(0)
    for file, tensors in files.items():
        write_sparse(folder / file, tensors, generator, part)
    index = {"metadata": {}, "weight_map": {name: file for file, names in files.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(math.prod(shape) for shape in shapes.values())


def write_sparse(path: Path, tensors: dict[str, list[int]], generator: torch.Generator, part: str) -> None:
    """Write a safetensors file of bfloat16, random where a name has `part` in it."""
    header, end = {}, 0
    for name, shape in tensors.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % HEADER_STEP)
    begin = 8 + len(text)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in tensors.items():
            if part in name:
                file.seek(begin + header[name]["data_offsets"][0])
                weights = torch.randn(shape, generator=generator) * (
                    shape[-1] ** -0.5 if len(shape) > 1 else 1.0
                )
                file.write(weights.bfloat16().view(torch.uint8).numpy())
        file.truncate(begin + end)


def measured(command: list[str]) -> tuple[int, float, float, str]:
    """Run a command: its largest resident set in bytes, processor and wall seconds, and what it printed."""
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
