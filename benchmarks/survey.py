"""What a survey costs beyond the forward pass it rides on: time and memory, as ratios measured in one run.

`python -m benchmarks.survey` builds a random model of GPT-2's size and compares, on the same batches and in
turns, the bare `sdpa` forward pass of its backbone with the same pass under all accumulators of a survey.

Once as the `theodolite` command runs, whose process keeps the memory that it has got from the system, and once as a
library is called, with the C library's own settings.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers

from benchmarks.ratios import Ratio, seconds, where
from theodolite.corpus.corpus import Corpus
from theodolite.models import OpenModel, open_model
from theodolite.passes.survey import survey
from theodolite.passes.survey_pass import SurveyPass
from theodolite.system.allocator import keep_pages
from theodolite.system.progress import Progress

LENGTH = 512
BATCH = 8


def gpt2(layers: int = 12, width: int = 768, heads: int = 12, device: str = "cpu") -> OpenModel:
    """A random GPT-2 of the given size, opened from disk like any other."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=layers, n_embd=width, n_head=heads)
    with tempfile.TemporaryDirectory() as folder:
        transformers.GPT2LMHeadModel(config).save_pretrained(folder)
        return open_model(folder, device=device)


def time_ratios(rounds: int, contexts: int, device: str = "cpu") -> list[Ratio]:
    model = gpt2(device=device)
    corpus = Corpus.random_tokens(50257, LENGTH, contexts)

    def bare(module: torch.nn.Module) -> None:
        with torch.inference_mode():
            for ids in corpus.contexts.split(BATCH):
                module(input_ids=ids.to(device), use_cache=False)

    def with_statistics() -> None:
        SurveyPass(model, corpus, 0, BATCH).run(Progress(contexts))

    works = {
        "bare": lambda: bare(model.hf.base_model),
        "head": lambda: bare(model.hf),
        "survey": with_statistics,
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            times[name].append(seconds(work, device))
    pairs = list(zip(times["survey"][1:], times["bare"][1:], times["head"][1:], strict=True))
    ratios = [s / b for s, b, _ in pairs]
    tokens = contexts * LENGTH
    print(f"GPT-2 sizes, {contexts} contexts of {LENGTH}, {where(device)}, {rounds} rounds in turns")
    print(f"bare forward pass      {tokens / statistics.median(b for _, b, _ in pairs):8.0f} tokens/s")
    print(f"pass with statistics   {tokens / statistics.median(s for s, _, _ in pairs):8.0f} tokens/s")
    print(
        f"ratio to the backbone's forward pass   {statistics.median(ratios):.3f}  (budget 1.35; "
        f"{min(ratios):.3f} to {max(ratios):.3f})"
    )
    print(f"ratio to the forward pass with logits  {statistics.median(s / h for s, _, h in pairs):.3f}")
    few = Corpus.random_tokens(50257, LENGTH, BATCH)
    whole, part = (
        seconds(lambda: survey(model, few, batch=BATCH), device),
        statistics.median(s for s, _, _ in pairs),
    )
    fixed = whole - part * BATCH / contexts
    print(f"fixed cost of a survey (weights, induction, tables): {fixed:.1f} s")
    forward = statistics.median(b for _, b, _ in pairs)
    return [
        Ratio.of("survey: pass with statistics / forward pass of the backbone", ratios, 1.2),
        Ratio.of("survey: pass with statistics / forward pass with logits", [s / h for s, _, h in pairs]),
        Ratio.of(f"survey: fixed cost / forward pass of {tokens:,} tokens", [fixed / forward]),
    ]


def gpu_memory_ratio(device: str) -> list[Ratio]:
    """Peak memory of a GPU with a text ten times as long."""
    model, peaks = gpt2(layers=4, device=device), []
    for contexts in (8, 80):
        torch.cuda.reset_peak_memory_stats()
        survey(model, Corpus.random_tokens(50257, LENGTH, contexts), batch=2)
        peaks.append(torch.cuda.max_memory_allocated())
    print(f"peak memory of the GPU, corpus ten times larger: {peaks[1] / peaks[0]:.3f}×  (budget 1.05)")
    return [Ratio.of("survey: peak memory, text 10× longer", [peaks[1] / peaks[0]], 1.05)]


def peak_memory(contexts: int) -> None:
    """Print the peak memory of a survey; run in a process of its own."""
    keep_pages()
    model = gpt2(layers=4)
    survey(model, Corpus.random_tokens(50257, LENGTH, contexts), batch=2)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def memory_ratio() -> None:
    def measured(contexts: int) -> int:
        command = [sys.executable, "-m", "benchmarks.survey", "--memory", str(contexts)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    small, large = measured(8), measured(80)
    print(
        f"peak memory, corpus ten times larger: {large / small:.3f}×  (budget 1.05; {small >> 10} MB, {large >> 10} MB)"
    )


def start_up() -> None:
    command = [str(Path(sys.executable).with_name("theodolite")), "--help"]
    times = [seconds(lambda: subprocess.run(command, capture_output=True, check=True)) for _ in range(6)][1:]
    print(f"theodolite --help: {statistics.median(times):.2f} s  (budget 0.5)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contexts", type=int, default=16)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, …")
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ratios", choices=["command", "library"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        peak_memory(arguments.memory)
    elif arguments.ratios:
        if arguments.ratios == "command":
            keep_pages()
        time_ratios(arguments.rounds, arguments.contexts, arguments.device)
    else:
        for how in ("command", "library"):
            print(f"as a {how}:", flush=True)
            command = [sys.executable, "-m", "benchmarks.survey", "--ratios", how, *sys.argv[1:]]
            subprocess.run(command, check=True)
        if arguments.device.startswith("cuda"):
            gpu_memory_ratio(arguments.device)
        else:
            memory_ratio()
        start_up()
