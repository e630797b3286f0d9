"""A pruning of a checkpoint too large for memory: what it holds at the most, and its time a block.

`python -m benchmarks.streamed --method wanda` writes the layout of a Llama with seven billion parameters (random
weights, bfloat16, a file a block), opens it with `open_streamed` and prunes it to half on random tokens. The operating
system counts the memory (the largest resident set). `--layers 2` takes the first blocks only, all of which cost the
same; SparseGPT needs at least 22 contexts of 512 tokens, for matrices of 11,008 inputs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from transformers import LlamaConfig

from benchmarks.shards import measured, write_layout

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="wanda", choices=["magnitude", "wanda", "sparsegpt", "oats"])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--contexts", type=int, default=4)
    parser.add_argument("--form", default="merged", choices=["merged", "factored", "adapter"])
    parser.add_argument("--iterations", type=int, default=80, help="of OATS")
    parser.add_argument("--dtype", default="auto", help="float32 where the processor is slow in bfloat16")
    parser.add_argument("--batch", type=int, default=4, help="contexts read at once")
    parser.add_argument("--folder", type=Path, help="where to write [default: a temporary folder]")
    options = vars(parser.parse_args())
    config = LlamaConfig(num_hidden_layers=options.pop("layers"))
    with tempfile.TemporaryDirectory(dir=options.pop("folder")) as folder:
        print(line_of(config, Path(folder), **options))


def line_of(
    config: LlamaConfig,
    folder: Path,
    method: str,
    contexts: int,
    form: str,
    iterations: int = 80,
    dtype: str = "auto",
    batch: int = 4,
) -> str:
    """Write the layout into the folder, prune it, and say what that took."""
    dense = folder / "dense"
    dense.mkdir()
    parameters, _ = write_layout(config, dense, part="")
    how = [method, str(contexts), form, str(iterations), dtype, str(batch)]
    memory, cpu, seconds, out = measured(
        [sys.executable, "-c", PRUNE, str(dense), str(folder / "pruned"), *how]
    )
    named = f"oats of {iterations} iterations" if method == "oats" else method
    return (
        f"{named}, {parameters / 1e9:.2f} · 10⁹ parameters, {config.num_hidden_layers} blocks, {contexts} × 512 "
        f"tokens: {memory / 2**30:.2f} GiB, {cpu:.0f} s of processor time, {seconds:.0f} s; a block: {out.strip()} s"
    )


if __name__ == "__main__":
    main()
