"""LocAteR's share of a training step, for heads of GPT-2's size: d = 768, 12 heads.

`python -m benchmarks.locater` takes steps (forward, backward, AdamW) of a random GPT-2 with and without the
penalty, in turns, and prints the ratio of their times, and the time of the penalty alone (value and gradient) over
that of a step. The share does not depend on the number of layers as long as the vocabulary is small: a small one
is used, so that the shares printed are upper bounds of those of a GPT-2 with its output layer. Processor time of
this process is printed beside wall time, since other processes disturb it less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.ratios import Ratio, finish, where
from theodolite.train import Locater

WIDTH, HEADS, VOCABULARY = 768, 12, 1024
BATCHES = ((1, 512), (2, 512), (8, 512))
"""Contexts and tokens of each; the penalty costs the same, the rest grows with their product."""

BUDGETS = {1: 0.015, 2: 0.0125, 8: 0.01}
"""Of a step, by its contexts."""

Times = list[tuple[float, float]]


def main(layers: int = 4, rounds: int = 7, device: str = "cpu") -> list[Ratio]:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers,
        n_embd=WIDTH,
        n_head=HEADS,
        vocab_size=VOCABULARY,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
    locater = Locater(model, scale=1e-3, mean=1e-2)
    print(f"GPT-2 of {layers} layers, d = {WIDTH}, {HEADS} heads, {where(device)}, {rounds} rounds")
    print("contexts × tokens | steps with / without: median (range), processor time | penalty / step")
    measured = []
    for contexts, length in BATCHES:
        ids = torch.randint(VOCABULARY, (contexts, length), device=device)

        def step(penalised: bool, ids: torch.Tensor = ids) -> None:
            logits = model(input_ids=ids, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            if penalised:
                locater.add_gradient()
            optimizer.step()
            optimizer.zero_grad()

        def alone() -> None:
            locater.add_gradient()

        times: dict[str, Times] = {"without": [], "with": [], "alone": []}
        for turn in range(rounds + 1):
            for name, work in (
                ("without", lambda: step(False)),
                ("with", lambda: step(True)),
                ("alone", alone),
            ):
                if name == "alone":
                    locater.add_gradient()  # so that there are gradients, as there are after a backward pass
                taken = seconds(work, device)
                if turn:
                    times[name].append(taken)
        wall, processor = (ratios(times["with"], times["without"], clock) for clock in (0, 1))
        share = [ratios(times["alone"], times["without"], clock) for clock in (0, 1)]
        print(
            f"{contexts} × {length:<4} | {statistics.median(wall):.3f} ({min(wall):.3f} to {max(wall):.3f}), "
            f"{statistics.median(processor):.3f} ({min(processor):.3f} to {max(processor):.3f}) | "
            f"{statistics.median(share[0]):.2%}, processor time {statistics.median(share[1]):.2%} "
            f"(budget {BUDGETS[contexts]:.1%})"
        )
        batch = f"a step of {contexts} × {length}"
        measured.append(Ratio.of(f"LocAteR: {batch} with / without", wall))
        measured.append(Ratio.of(f"LocAteR: penalty alone / {batch}", share[0], BUDGETS[contexts]))
    return measured


def ratios(these: Times, those: Times, clock: int) -> list[float]:
    return [a[clock] / b[clock] for a, b in zip(these, those, strict=True)]


def seconds(work: Callable[[], None], device: str) -> tuple[float, float]:
    """Wall and processor seconds."""
    finish(device)
    wall, processor = time.perf_counter(), time.process_time()
    work()
    finish(device)
    return time.perf_counter() - wall, time.process_time() - processor


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, …")
    arguments = parser.parse_args()
    main(arguments.layers, arguments.rounds, arguments.device)
