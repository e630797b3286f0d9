"""Reading the weights of all heads over a bare pass of 4,096 tokens, in a random model of SmolLM2's shape.

30 layers × 9 heads (3 key heads), d = 576.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.models import of_smollm2
from benchmarks.timing import Ratio, in_turns, over
from theodolite import open_model

TOKENS, ROUNDS, BUDGET = 4096, 3, 0.3


def measure(device: str) -> Iterator[Ratio]:
    model = open_model(of_smollm2().to(device))
    ids = torch.randint(49152, (TOKENS // 256, 256))
    works = {
        "pass": lambda: model.forward(ids),
        "weights": lambda: [model.head_weights(layer) for layer in range(model.layers)],
    }
    times = in_turns(works, ROUNDS, device)
    what = f"weights of {model.layers} × {model.heads} heads / a bare pass of 4,096 tokens"
    yield Ratio.of(what, over(times["weights"], times["pass"]), BUDGET)
