"""A survey's cost beyond the forward pass that it rides on: time and memory, as ratios measured in one run.

On the same batches of a random model of GPT-2's size: the bare `sdpa` forward pass of its backbone, and the same pass
under all accumulators of a survey. Once as the `theodolite` command runs, whose process keeps the memory that it has
got from the system, and once as a library is called, with the C library's own settings. And each part of a survey of a
real model (a random one of its shape where `make real-models` has fetched none) over the bare pass of its text.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.models import gpt2, of_smollm2
from benchmarks.timing import Ratio, in_process, in_turns, over, peak_memory, seconds
from theodolite.corpus.corpus import Corpus
from theodolite.models import OpenModel, open_model
from theodolite.passes.corpus_pass import batch_of
from theodolite.passes.survey import survey
from theodolite.passes.survey_pass import SurveyPass
from theodolite.system.processor import keep_pages
from theodolite.system.progress import Progress
from tools.real_models import REPOSITORY, real_model

TEXT = REPOSITORY / "docs"
VOCABULARY, LENGTH, BATCH, CONTEXTS, ROUNDS = 50257, 512, 8, 16, 3


WHOLE = {(16, 256): 3.0, (64, 256): 1.8, (8, 2048): 2.0}
"""Contexts and their length → the bound of the whole command over the bare pass of the same text."""


def measure(device: str) -> Iterator[Ratio]:
    for contexts, length in WHOLE:
        yield from (Ratio(**row) for row in in_process("survey", f"{contexts}x{length}", device))
    for how in ("command", "library"):
        yield from (Ratio(**row) for row in in_process("survey", how, device))
    small, large = (in_process("survey", contexts, device) for contexts in (8, 80))
    yield Ratio.of("survey: peak memory, text 10× longer", [large / small], 1.05)


def opened(layers: int, device: str) -> OpenModel:
    """Open a random GPT-2 from disk like any other model."""
    with tempfile.TemporaryDirectory() as folder:
        gpt2(layers).save_pretrained(folder)
        return open_model(folder, device=device)


def bare_seconds(model: OpenModel, corpus: Corpus, rounds: int, device: str = "cpu") -> list[float]:
    """Time the bare pass of a text, some rounds."""

    def bare() -> None:
        with torch.inference_mode():
            for ids in corpus.contexts.split(batch_of(corpus, None)):
                model.hf.base_model(input_ids=ids.to(device), use_cache=False)

    return [taken.wall for taken in in_turns({"bare": bare}, rounds, device)["bare"]]


def stage_seconds(model: OpenModel, corpus: Corpus) -> dict[str, float]:
    """Survey, and time each stage."""
    began: dict[str, float] = {}

    def show(what: str, done: int, total: int) -> None:
        began.setdefault(what, time.perf_counter())

    survey(model, corpus, show_progress=show)
    began["end"] = time.perf_counter()
    return {what: then - first for (what, first), (_, then) in pairwise(began.items())}


def parts(contexts: int, length: int, device: str) -> list[Ratio]:
    """Time the stages of a survey of a real model, and the whole command on a CPU, over the bare pass."""
    keep_pages()
    path = real_model("smollm2")
    with tempfile.TemporaryDirectory() as folder:
        if path is None:
            of_smollm2().save_pretrained(folder)
            path = Path(folder)
            corpus = Corpus.random_tokens(49152, length, contexts)
        model = open_model(path, device=device)
        if path != Path(folder):
            corpus = Corpus.from_path(TEXT, model.tokenizer, contexts=contexts, length=length)
        bare = statistics.median(bare_seconds(model, corpus, ROUNDS, device))
        memory = peak_memory(device)
        size = f"{contexts} × {length:,}"
        ratios = [
            Ratio.of(f"survey of SmolLM2, {size}: {what} / bare pass", [taken / bare])
            for what, taken in stage_seconds(model, corpus).items()
        ]
        more = (peak_memory(device) - memory) / 2**30
        ratios.append(Ratio.of(f"survey of SmolLM2, {size}: GiB beyond the model and a pass", [more]))
        if not device.startswith("cuda") and path != Path(folder):
            command = [sys.executable, "-m", "theodolite", "survey", str(path), "--corpus", str(TEXT)]
            command += f"--contexts {contexts} --length {length} --out {folder}/run".split()
            whole = seconds(lambda: subprocess.run(command, capture_output=True, check=True)).wall
            bound = WHOLE[contexts, length]
            what = f"theodolite survey of SmolLM2, {size}: whole command / bare pass"
            ratios.append(Ratio.of(what, [whole / bare], bound))
    return ratios


def time_ratios(how: str, device: str) -> list[Ratio]:
    if how == "command":
        keep_pages()
    model, corpus = opened(12, device), Corpus.random_tokens(VOCABULARY, LENGTH, CONTEXTS)

    def bare(module: torch.nn.Module) -> None:
        with torch.inference_mode():
            for ids in corpus.contexts.split(BATCH):
                module(input_ids=ids.to(device), use_cache=False)

    works = {
        "bare": lambda: bare(model.hf.base_model),
        "head": lambda: bare(model.hf),
        "survey": lambda: SurveyPass(model, corpus, 0, BATCH).run(Progress(CONTEXTS)),
    }
    times = in_turns(works, ROUNDS, device)
    few = Corpus.random_tokens(VOCABULARY, LENGTH, BATCH)
    whole = seconds(lambda: survey(model, few, batch=BATCH), device).wall
    part, forward = (statistics.median(time.wall for time in times[name]) for name in ("survey", "bare"))
    fixed, tokens = whole - part * BATCH / CONTEXTS, CONTEXTS * LENGTH
    ratios = {name: over(times["survey"], times[name]) for name in ("bare", "head")}
    as_a = f"survey as a {how}: "
    return [
        Ratio.of(f"{as_a}pass with statistics / forward pass of the backbone", ratios["bare"], 1.2),
        Ratio.of(f"{as_a}pass with statistics / forward pass with logits", ratios["head"]),
        Ratio.of(f"{as_a}fixed cost / forward pass of {tokens:,} tokens", [fixed / forward]),
    ]


def memory(contexts: int, device: str) -> int:
    """Survey, and give the peak memory of this process."""
    keep_pages()
    survey(opened(4, device), Corpus.random_tokens(VOCABULARY, LENGTH, contexts), batch=2)
    return peak_memory(device)


if __name__ == "__main__":
    what, on = sys.argv[1:]
    if "x" in what:
        print(json.dumps([asdict(ratio) for ratio in parts(*map(int, what.split("x")), on)]))
    elif what.isdigit():
        print(memory(int(what), on))
    else:
        print(json.dumps([asdict(ratio) for ratio in time_ratios(what, on)]))
