"""Latency of pruned models and of sparse products, as ratios to the dense ones, measured in turns in one run.

`python -m benchmarks.pruned_latency` prunes a random model of GPT-2's width by OATS and compares the forward passes
of the dense checkpoint, the merged one (same layers, so 1 is expected), the factored one (a dense product with the
zeros of S in it, and two thin ones), and the factored one packed in memory (S is put together for each product), with
the memory of its blocks and, on Linux, of a process that opens it and reads one token. Below that, one matrix of
GPT-2's size by itself: PyTorch's sparse products, by rows (CSR) at half of the entries, and on a CUDA device that has
them, the 2:4 ones.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.ratios import Ratio, seconds, where
from theodolite import Corpus, OpenModel, open_model
from theodolite.prune import magnitude, prune_model

SHAPES = ((1, 1), (1, 128), (8, 128))
"""Contexts × tokens of a forward pass; the first is a step of decoding, without its cache."""

WIDTH, INNER = 768, 3072


def main(layers: int = 4, rounds: int = 15, device: str = "cpu") -> list[Ratio]:
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", "Sparse CSR tensor support")
    print(f"{where(device)}, {rounds} rounds in turns; ratios to dense: median (range)")
    return models(layers, rounds, device) + products(rounds, device)


def models(layers: int, rounds: int, device: str) -> list[Ratio]:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, vocab_size=1024, bos_token_id=None, eos_token_id=None)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        GPT2LMHeadModel(config).save_pretrained(folder / "dense")
        corpus = Corpus.random_tokens(1024, 128, 32)
        for form in ("merged", "factored"):
            dense = open_model(folder / "dense", device=device)
            prune_model(dense, corpus, "oats", 0.5, iterations=5, out=folder / form, form=form)
        opened = {name: open_model(folder / name, device=device) for name in ("dense", "merged", "factored")}
        sizes = {
            name: sum(f.stat().st_size for f in (folder / name).glob("*.safetensors")) for name in opened
        }
        opened["packed"] = open_model(folder / "factored", device=device, packed=True)
        processes = "" if sys.platform != "linux" else resident(folder)
    held = {name: block_bytes(model) for name, model in opened.items()}
    print(
        f"GPT-2 of {layers} layers by OATS; factored files {sizes['factored'] / sizes['dense']:.3f} of the dense; "
        f"packed in memory {held['packed'] / held['dense']:.3f} of the dense blocks{processes}"
    )
    measured = [Ratio.of("pruned memory, blocks: packed / dense", [held["packed"] / held["dense"]])]
    for shape in SHAPES:
        ids = torch.randint(1024, shape, device=device)
        works = {name: forward(model.hf.base_model, ids) for name, model in opened.items()}
        measured += say(f"{shape[0]} × {shape[1]}", works, rounds, device)
    return measured


def products(rounds: int, device: str) -> list[Ratio]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(INNER, WIDTH, generator=generator)
    halved = magnitude(weight, 0.5)
    dtype = torch.float16 if device.startswith("cuda") else torch.float32
    print(f"one matrix of {INNER} × {WIDTH}, half of its entries 0, {dtype}")
    kinds = {"csr": halved.to(device, dtype).to_sparse_csr()}
    try:
        pairs = magnitude(weight, 0.5, "2:4").to(device, dtype)
        kinds["2:4"] = torch.sparse.to_sparse_semi_structured(pairs)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        print(f"2:4 products: not available here ({str(error).splitlines()[0]})")
    measured = []
    for contexts, tokens in SHAPES:
        rows = torch.randn(contexts * tokens, WIDTH, generator=generator).to(device, dtype)
        dense = weight.to(device, dtype)
        works: dict[str, Callable[[], object]] = {"dense": lambda x=rows, w=dense: functional.linear(x, w)}
        for name, sparse in kinds.items():
            if name == "csr":
                works[name] = lambda x=rows, w=sparse: (w @ x.T).T
            else:
                works[name] = lambda x=rows, w=sparse: functional.linear(x, w)
        measured += say(f"{len(rows)} rows", works, rounds, device)
    return measured


def block_bytes(model: OpenModel) -> int:
    """Of the tensors that its blocks hold."""
    held = [t for block in model.structure.blocks for t in (*block.parameters(), *block.buffers())]
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


def resident(folder: Path) -> str:
    """Memory of processes that open the dense and the packed model, beyond what imports take, told."""
    imports = peak("")
    dense, packed = (
        peak(f"model = open_model({str(folder / name)!r}, device='cpu', packed={name != 'dense'})")
        for name in ("dense", "factored")
    )
    return (
        f"; a process by {(packed - imports) / (dense - imports):.3f} of {(dense - imports) / 1024:.0f} MiB"
    )


def peak(opening: str) -> int:
    """Largest resident memory, in KiB, of a process that opens a model, if it does, and reads one token with it."""
    lines = ["import torch", "from theodolite import OpenModel, open_model", opening]
    if opening:
        lines.append("model.hf.base_model(torch.zeros(1, 1, dtype=torch.long))")
    lines.append("print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])")
    program = "\n".join(lines)
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


def forward(model: torch.nn.Module, ids: torch.Tensor) -> Callable[[], object]:
    return lambda: model(input_ids=ids, use_cache=False)


def say(what: str, works: dict[str, Callable[[], object]], rounds: int, device: str) -> list[Ratio]:
    times: dict[str, list[float]] = {name: [] for name in works}
    with torch.inference_mode():
        for turn in range(rounds + 2):
            for name, work in works.items():
                taken = seconds(work, device)
                if turn >= 2:
                    times[name].append(taken)
    dense = times.pop("dense")
    told = [f"{what:>9} | dense {statistics.median(dense) * 1e3:8.2f} ms"]
    measured = []
    for name, taken in times.items():
        ratios = [a / b for a, b in zip(taken, dense, strict=True)]
        told.append(f"{name} {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        measured.append(Ratio.of(f"pruned latency, {what}: {name} / dense", ratios))
    print(" | ".join(told))
    return measured


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    main(arguments.layers, arguments.rounds, arguments.device)
