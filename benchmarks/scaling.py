"""What a survey holds in memory, from formulas in the shape of the model and of the text: those of docs/scaling.md.

`python -m benchmarks.scaling` prints them for 400 billion parameters, and for the embedded model beside what its
accumulators really hold and what a shard really sends. `tests/test_benchmarks.py` holds the formulas against the code.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from theodolite.passes.ray_survey import shards
from theodolite.passes.ray_workers import packed, unpacked

from theodolite import open_model
from theodolite.accumulate.second_moments import SKETCH
from theodolite.corpus.corpus import Corpus
from theodolite.corpus.groups import GROUPS
from theodolite.passes.survey_pass import (
    EXAMPLES,
    SAMPLED_BYTES,
    SAMPLED_CONTEXTS,
    SAMPLED_TOKENS,
    SurveyPass,
)

FLOAT = 8
"""Bytes of a number in a state: float64."""


@dataclass(frozen=True)
class Shape:
    """A model and a text: L, H, d; T and C."""

    layers: int
    heads: int
    width: int
    length: int
    contexts: int

    @property
    def sampled(self) -> int:
        """S, contexts whose means are kept."""
        vector = (self.layers + 1) * self.width * FLOAT
        return max(1, min(self.contexts, SAMPLED_CONTEXTS, SAMPLED_BYTES // vector))

    @property
    def tokens_kept(self) -> int:
        """Q, single tokens that are kept."""
        return min(SAMPLED_TOKENS, self.contexts * (self.length - 1))


LARGE = Shape(126, 128, 16384, 8192, 10**12 // 8192)
"""400 billion parameters, and a trillion tokens."""


def state_bytes(s: Shape) -> dict[str, int]:
    """Bytes of each part of a state, but for the rows of sink tokens, 48 bytes each."""
    residual, g, d, t = s.layers + 1, GROUPS, s.width, s.length
    r, examples = min(SKETCH, d), min(EXAMPLES, s.contexts)
    numbers = {
        "sums by position": residual * g * t * d,
        "second moments": (residual + s.layers) * (1 + d + d * d),
        "sketches": residual * (g * (1 + d + d * r) + d * r),
        "sample": residual * (d * (s.sampled + s.tokens_kept) + s.sampled),
        "outliers": residual * d * (4 * g + 2),
        "attention": s.layers * (s.heads * (5 * t + 16) + 2 * examples * t + 2 * t + 3),
        "scalars": residual * (5 + t) * g,
    }
    return {name: count * FLOAT for name, count in numbers.items()}


def main() -> None:
    torch.set_num_threads(1)
    show("400 billion parameters, a trillion tokens, one state", state_bytes(LARGE))
    model = open_model(device="cpu")
    shape = Shape(model.layers, model.heads, model.width, 128, 256)
    corpus = Corpus.random_tokens(model.required_vocabulary(), shape.length, shape.contexts)
    first, last = list(shards(shape.contexts, 32))[1]  # one batch, in the second of eight groups
    part = SurveyPass(model, corpus, 0, 32)
    started = time.perf_counter()
    part.read(first, last)
    reading = time.perf_counter() - started
    show("embedded model, one state", state_bytes(shape))
    state = part.state()
    print(f"  in fact {sum(tensor.nbytes for tensor in state.values()) / 1e6:.2f} MB")
    started = time.perf_counter()
    sent_state = packed(state)
    bytes_sent = sum(values.nbytes for values, _, _ in sent_state.values())
    whole = SurveyPass(model, corpus, 0, 32)
    whole.merge(unpacked(sent_state))
    merging = time.perf_counter() - started
    print(f"  contexts {first} to {last - 1} send {bytes_sent / 1e6:.2f} MB")
    print(f"  reading them {reading:.2f} s, packing, unpacking and merging {merging:.3f} s")


def show(title: str, parts: dict[str, int]) -> None:
    """A table of bytes."""
    print(f"{title}: {sum(parts.values()) / 1e9:.4g} GB")
    for name, count in parts.items():
        print(f"  {name}: {count / 1e9:.4g} GB")


if __name__ == "__main__":
    main()
