"""Compute what a survey holds in memory from the shapes of model and text, by the formulas of docs/scaling.md.

`python -m benchmarks.scaling` prints them for 400 billion parameters; `tests/test_benchmarks.py` holds the formulas
against what the accumulators of the embedded model really hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from theodolite.accumulate.second_moments import SKETCH
from theodolite.corpus.groups import GROUPS
from theodolite.logits.shares import split_contexts
from theodolite.passes.survey_pass import EXAMPLES, SAMPLED_BYTES, SAMPLED_CONTEXTS, SAMPLED_TOKENS

FLOAT = 8
"""Bytes of a number in a state: float64."""

MODEL_FLOAT = 4
"""Bytes of a hidden state that is kept, in the model's dtype: float32."""


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
    """Count the bytes of each part of a state, but for the rows of sink tokens, and of massive ones."""
    residual, g, d, t = s.layers + 1, GROUPS, s.width, s.length
    r, examples = min(SKETCH, d), min(EXAMPLES, s.contexts)
    numbers = {
        "sums by position": residual * g * t * d,
        "second moments": (residual + s.layers) * (1 + d + d * d),
        "sketches": residual * (g * (2 + d + d * r) + d * r),
        "sample": residual * (d * (2 * s.sampled + s.tokens_kept) + 2 * s.sampled),
        "outliers": residual * (d * (5 * g + 2) + g),
        "attention": s.layers * (s.heads * (4 * t + 2 + 8 * g) + 2 * examples * t + 2 * t + 4 * g + 1),
        "queries and keys": s.layers * s.heads * (1 + 2 * (d // s.heads) ** 2),
        "scalars": residual * ((5 + t) * g + 1),
    }
    split = {"split contexts": s.layers * min(split_contexts(t), s.contexts) * t * d * MODEL_FLOAT}
    return {name: count * FLOAT for name, count in numbers.items()} | split


def main() -> None:
    """Print the parts of a state."""
    parts = state_bytes(LARGE)
    print(f"400 billion parameters, a trillion tokens, one state: {sum(parts.values()) / 1e9:.4g} GB")
    for name, count in parts.items():
        print(f"  {name}: {count / 1e9:.4g} GB")


if __name__ == "__main__":
    main()
