"""The monitor's cost: a look as a share of the training steps between looks.

An AdamW step of a random model of GPT-2's width, a look at it, and a look that also reads every head's weights. The
monitor batch has its default size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.models import gpt2
from benchmarks.timing import Ratio, in_turns, over
from theodolite.train.geometry import GeometryReader
from theodolite.train.monitor import CONTEXTS, LENGTH

LAYERS, VOCABULARY, BATCH, TOKENS, ROUNDS = 4, 8192, 8, 128, 5

EVERY, SPECTRA_EVERY = 100, 5
"""Defaults of the monitor."""


def measure(device: str) -> Iterator[Ratio]:
    model = gpt2(LAYERS, VOCABULARY).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randint(VOCABULARY, (BATCH, TOKENS), device=device)
    reader = GeometryReader(model, torch.randint(VOCABULARY, (CONTEXTS, LENGTH)))

    def step() -> None:
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    works = {
        "step": step,
        "look": lambda: reader.look(spectra=False),
        "look with spectra": lambda: reader.look(spectra=True),
    }
    times = in_turns(works, ROUNDS, device)
    ratios = {name: over(values, times["step"]) for name, values in times.items()}
    yield Ratio.of("monitor: a look / a training step", ratios["look"])
    yield Ratio.of("monitor: a look with spectra / a training step", ratios["look with spectra"])
    shares = [
        ((SPECTRA_EVERY - 1) * look + full) / SPECTRA_EVERY / EVERY
        for look, full in zip(ratios["look"], ratios["look with spectra"], strict=True)
    ]
    yield Ratio.of(f"monitor: share of time at every = {EVERY}", shares)
