"""LocAteR's share of a training step, for heads of GPT-2's size: d = 768, 12 heads.

Steps (forward, backward, AdamW) of a random GPT-2 with and without the penalty, and the penalty alone (value and
gradient). The share does not depend on the number of layers as long as the vocabulary is small: a small one is used, so
that the shares are upper bounds of those of a GPT-2 with its output layer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.models import gpt2
from benchmarks.timing import Ratio, in_turns, over
from theodolite.train import Locater

LAYERS, VOCABULARY, ROUNDS = 4, 1024, 7
BATCHES = ((1, 512), (2, 512), (8, 512))
"""Contexts and tokens of each; the penalty costs the same, the rest grows with their product."""

BUDGETS = {1: 0.015, 2: 0.0125, 8: 0.01}
"""Of a step, by its contexts."""


def measure(device: str) -> Iterator[Ratio]:
    model = gpt2(LAYERS, VOCABULARY).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
    locater = Locater(model, scale=1e-3, mean=1e-2)
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

        works = {
            "without": lambda: step(False),
            "with": lambda: step(True),
            "gradients": locater.add_gradient,  # so that there are some, as there are after a backward pass
            "alone": locater.add_gradient,
        }
        times = in_turns(works, ROUNDS, device)
        batch = f"a step of {contexts} × {length}"
        for clock, how in enumerate(("", ", processor time")):
            ratios = over(times["with"], times["without"], clock)
            yield Ratio.of(f"LocAteR: {batch} with / without{how}", ratios)
            alone = over(times["alone"], times["without"], clock)
            yield Ratio.of(f"LocAteR: penalty alone / {batch}{how}", alone, BUDGETS[contexts])
