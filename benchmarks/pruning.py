"""Whole-model pruning against the same algorithm as its authors' released program runs it.

`python -m benchmarks pruning` prunes SmolLM2-135M, where the real models lie (else a random model of its shape), by
half on 32 × 256 tokens: by `theodolite prune`, and in a process that does as the released programs of Wanda, SparseGPT
and OATS. It loads the model, collects each block's inputs context by context, prunes its matrices one after the other,
runs the block again, context by context, and saves. Both processes are timed from their start to their end. OATS with
full SVDs takes an hour: of it, the time of the first blocks stands for that of the others.

`python -m benchmarks.pruning METHOD MODEL IDS OUT` is the released way by itself.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pandas as pd
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.models import of_smollm2
from benchmarks.timing import Ratio, Seconds, over
from theodolite.corpus.named import make_corpus
from theodolite.corpus.sampling import Choice
from theodolite.models import open_model
from theodolite.prune.checkpoint import TABLE
from theodolite.system.checkpoint_folders import SETTINGS
from tools.real_models import real_model

CONTEXTS, LENGTH = 32, 256
SPARSITY, DAMPING, RANK_RATIO, ITERATIONS = 0.5, 0.1, 0.25, 80
OATS_BLOCKS = 2
BLOCKS = 30
"""Of SmolLM2-135M."""

BUDGETS = {"wanda": 0.67, "sparsegpt": 0.5, "oats": 0.1}
ROUNDS = 1


class Statistics:
    """What a released program keeps of one matrix's inputs: their mean squares, or for SparseGPT all products."""

    def __init__(self, weight: Tensor, full: bool) -> None:
        width = weight.shape[1]
        self.count, self.full = 0, full
        self.sums = torch.zeros(width, width) if full else torch.zeros(width)

    def add(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        """Add the inputs of one call, as a forward hook."""
        inputs = args[0].reshape(-1, args[0].shape[-1]).t().float()
        self.sums *= self.count / (self.count + 1)
        self.count += 1
        if self.full:
            inputs = (2 / self.count) ** 0.5 * inputs
            self.sums += inputs.matmul(inputs.t())
        else:
            self.sums += torch.norm(inputs, p=2, dim=1) ** 2 / self.count


def wanda(weight: Tensor, sums: Tensor) -> None:
    """Zero the smallest |W| ‖x‖ of each row, by a stable sort."""
    metric = weight.abs() * sums.sqrt().reshape(1, -1)
    removed = torch.zeros_like(metric, dtype=torch.bool)
    removed.scatter_(
        1, torch.sort(metric, dim=-1, stable=True)[1][:, : int(metric.shape[1] * SPARSITY)], True
    )
    weight[removed] = 0


def sparsegpt(weight: Tensor, hessian: Tensor, blocksize: int = 128) -> None:
    """Remove column by column, with the Cholesky factor of the inverse Hessian."""
    dead = torch.diag(hessian) == 0
    hessian[dead, dead] = 1
    weight[:, dead] = 0
    columns = torch.arange(len(hessian))
    hessian[columns, columns] += DAMPING * torch.diag(hessian).mean()
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    for first in range(0, len(hessian), blocksize):
        last = min(first + blocksize, len(hessian))
        block, own = weight[:, first:last].clone(), inverse[first:last, first:last]
        pruned, errors = torch.zeros_like(block), torch.zeros_like(block)
        saliency = block**2 / torch.diag(own).reshape(1, -1) ** 2
        mask = saliency <= torch.sort(saliency.flatten())[0][int(saliency.numel() * SPARSITY)]
        for i in range(last - first):
            column = block[:, i].clone()
            column[mask[:, i]] = 0
            pruned[:, i] = column
            error = (block[:, i] - column) / own[i, i]
            block[:, i:] -= error.unsqueeze(1).matmul(own[i, i:].unsqueeze(0))
            errors[:, i] = error
        weight[:, first:last] = pruned
        weight[:, last:] -= errors.matmul(inverse[first:last, last:])


def oats(weight: Tensor, sums: Tensor, iterations: int = ITERATIONS) -> None:
    """Alternate a full SVD with keeping each row's largest entries."""
    scale = sums.sqrt()
    scaled = weight * scale
    outputs, inputs = weight.shape
    rank = int(RANK_RATIO * (1 - SPARSITY) * outputs * inputs / (outputs + inputs))
    zeros = int(inputs * (1 - (1 - RANK_RATIO) * (1 - SPARSITY)))
    sparse = torch.zeros_like(scaled)
    for _ in range(iterations):
        left, values, right = torch.linalg.svd(scaled - sparse, full_matrices=False)
        low_rank = left[:, :rank] @ torch.diag(values[:rank]) @ right[:rank]
        sparse = scaled - low_rank
        sparse.scatter_(1, torch.topk(sparse.abs(), zeros, dim=1, largest=False)[1], 0)
    weight.copy_((sparse + low_rank) / scale)


PRUNE = {"wanda": wanda, "sparsegpt": sparsegpt, "oats": oats}


@torch.no_grad()
def released(method: str, folder: Path, ids: Path, out: Path) -> None:
    """Prune a Llama as the released programs do: load, block by block, save."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    began = time.perf_counter()
    errors: list[float] = []
    hidden: list[Tensor] = []
    arguments: dict[str, object] = {}

    def catch(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, object]) -> None:
        hidden.append(args[0])
        arguments.update(kwargs)
        raise StopIteration

    blocks = model.model.layers
    hook = blocks[0].register_forward_pre_hook(catch, with_kwargs=True)
    for context in torch.load(ids):
        with suppress(StopIteration):
            model(context.unsqueeze(0), use_cache=False)
    hook.remove()
    for block in blocks:
        linear = [module for module in block.modules() if isinstance(module, nn.Linear)]
        statistics = [Statistics(module.weight, method == "sparsegpt") for module in linear]
        hooks = [module.register_forward_hook(of.add) for module, of in zip(linear, statistics, strict=True)]
        for context in hidden:
            block(context, **arguments)
        for hook in hooks:
            hook.remove()
        for module, of in zip(linear, statistics, strict=True):
            dense, scale = module.weight.data.clone(), (of.sums.diagonal() if of.full else of.sums).sqrt()
            PRUNE[method](module.weight.data, of.sums)
            errors.append(float(((module.weight - dense) * scale).norm() / (dense * scale).norm()))
        for number, context in enumerate(hidden):
            hidden[number] = block(context, **arguments)
    wall = time.perf_counter() - began
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)
    (out / SETTINGS).write_text(json.dumps({"wall_seconds": wall, "error": sum(errors) / len(errors)}))


def measure(device: str) -> Iterator[Ratio]:
    if device.startswith("cuda"):
        return  # the released way is written here as it runs on a CPU
    with tempfile.TemporaryDirectory() as name:
        for method, budget in BUDGETS.items():
            yield from compared(method, Path(name), budget)


def compared(method: str, folder: Path, budget: float) -> Iterator[Ratio]:
    """Prune both ways in turns: the ratios of their times, and how their results differ."""
    model, ids = folder / method, folder / "ids.pt"
    blocks = write_model(model, ids, OATS_BLOCKS if method == "oats" else None)
    options = f"--method {method} --sparsity {SPARSITY} --contexts {CONTEXTS} --length {LENGTH} --device cpu"
    prune = ["theodolite", "prune", str(model), *options.split(), "--out"]
    ways = {"theodolite": prune, "theodolite --exact": [*prune[:-1], "--exact", "--out"]}
    if method == "oats":  # --exact is the released way
        del ways["theodolite --exact"]
    ways["released"] = ["benchmarks.pruning", method, str(model), str(ids)]
    times: dict[str, list[Seconds]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, words in ways.items():
            shutil.rmtree(folder / way, ignore_errors=True)
            times[way].append(seconds_of([*words, str(folder / way)], folder / way, blocks))
    theirs = weights(folder / "released")
    for way in list(ways)[:-1]:
        what = f"{method}, {way} / released way"
        yield Ratio.of(f"{what}: processor time", over(times[way], times["released"], 1), budget)
        yield Ratio.of(f"{what}: time", over(times[way], times["released"]))
        ours = weights(folder / way)
        mean = pd.read_parquet(folder / way / TABLE)["error_scaled"].mean()
        error = json.loads((folder / "released" / SETTINGS).read_text())["error"]
        yield Ratio.of(f"{what}: mean error of the matrices", [mean / error])
        if method != "oats":  # whose sum of two parts has no zeros
            differ = sum(int(((ours[name] != 0) != (theirs[name] != 0)).sum()) for name in ours)
            share = differ / sum(tensor.numel() for tensor in ours.values())
            yield Ratio.of(f"{what}: share of the entries that one keeps alone", [share])


def write_model(folder: Path, ids: Path, blocks: int | None) -> int:
    """Write a model, or its first blocks, with its tokenizer and the contexts that are read; how many blocks it has."""
    path = real_model("smollm2")
    if path is not None:
        opened = open_model(path)
        hf, tokenizer = opened.hf, opened.tokenizer
    else:
        tokenizer, hf = open_model().tokenizer, of_smollm2()
    if blocks is not None:
        hf.model.layers = hf.model.layers[:blocks]
        hf.config.num_hidden_layers = blocks
    hf.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    torch.save(make_corpus(None, tokenizer, LENGTH, Choice(CONTEXTS)).contexts, ids)
    return hf.config.num_hidden_layers


def seconds_of(words: list[str], out: Path, blocks: int) -> Seconds:
    """Run a module of Python in a process of its own; the time of the pruning of absent blocks is added."""

    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-m", *words], check=True, capture_output=True)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    pruning = json.loads((out / SETTINGS).read_text())["wall_seconds"] / wall
    longer = 1 + pruning * (BLOCKS / blocks - 1)
    return Seconds(wall * longer, processor * longer)


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: of for name, of in load_file(folder / "model.safetensors").items() if "proj" in name}


if __name__ == "__main__":
    released(sys.argv[1], *map(Path, sys.argv[2:]))
