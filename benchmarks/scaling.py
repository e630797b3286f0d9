"""What a survey costs in memory, traffic and arithmetic, from formulas in the shape of the model and of the text.

`python -m benchmarks.scaling` prints the tables of docs/costs.md, and beside them what the embedded model's
accumulators really hold and what a shard really sends. `tests/test_scaling.py` holds the formulas against the code.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from theodolite import open_model
from theodolite.accumulate.second_moments import SKETCH, STRIPS
from theodolite.corpus.corpus import Corpus
from theodolite.corpus.groups import GROUPS
from theodolite.passes.packed_states import packed, unpacked
from theodolite.passes.ray_survey import SHARDS, shards
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
    """A model and a text: L, H, key heads, d_h, d, width of the gated MLP, vocabulary; T and C."""

    layers: int
    heads: int
    key_heads: int
    head_width: int
    width: int
    hidden: int
    vocabulary: int
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


LARGE = Shape(126, 128, 8, 128, 16384, 53248, 128_256, 8192, 10**12 // 8192)
"""400 billion parameters, and a trillion tokens."""

FORWARD_RATE = 4e14
"""Assumed flops a second of one GPU in the forward pass: 40 % of a nominal 989e12 in bfloat16."""

STATISTICS_RATE = 4e13
"""Assumed flops a second of one GPU in float32 products, which the moments are: 60 % of a nominal 67e12."""


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


def shard_bytes(s: Shape, groups: int, sampled: int, tokens: int) -> dict[str, int]:
    """Bytes that a shard sends at most, of contexts in so many groups, with so many of the sample and kept tokens."""
    residual, d, r = s.layers + 1, s.width, min(SKETCH, s.width)
    whole = state_bytes(s)
    return whole | {
        "sums by position": whole["sums by position"] * groups // GROUPS,
        "sketches": residual * (GROUPS + groups * d + groups * d * r + d * r) * FLOAT,
        "sample": residual * (d * (sampled + tokens) + s.sampled) * FLOAT,
        "outliers": residual * d * (4 * groups + 2) * FLOAT,
    }


def parameters(s: Shape) -> tuple[int, int]:
    """Of all blocks (W_Q, W_K, W_V, W_O, a gated MLP of three matrices), and of the two embeddings."""
    attention = 2 * s.width * s.head_width * (s.heads + s.key_heads)
    return s.layers * (attention + 3 * s.width * s.hidden), 2 * s.vocabulary * s.width


def flops_a_token(s: Shape) -> dict[str, float]:
    """Flops for each token: of the forward pass without the output head, and of statistics that grow with d²."""
    blocks, _ = parameters(s)
    # Of symmetric products in STRIPS strips, (STRIPS + 1) / (2 STRIPS) of the columns are computed.
    strips = (STRIPS + 1) / (2 * STRIPS)
    return {
        "weights": 2.0 * blocks,
        # Query times key and weight times value, over the T/2 keys that a query sees on average.
        "attention": 2.0 * s.layers * s.length * s.heads * s.head_width,
        "second moments": (2 * s.layers + 1) * 2 * s.width**2 * strips,
        "sketches": (s.layers + 1) * 4.0 * s.width * min(SKETCH, s.width),
    }


def contexts_needed(variation: float, precision: float) -> int:
    """Contexts until a mean's standard error is `precision` of it, if single contexts vary by `variation` of it."""
    return round((variation / precision) ** 2)


def embedded_shape(length: int, contexts: int) -> Shape:
    """Of the model in the package; its MLP is not asked for."""
    model = open_model(device="cpu")
    assert model.vocabulary is not None
    heads = model.heads
    return Shape(
        model.layers,
        heads,
        heads,
        model.head_width,
        model.width,
        4 * model.width,
        model.vocabulary,
        length,
        contexts,
    )


def main() -> None:
    torch.set_num_threads(1)
    print(f"400 billion parameters: {sum(parameters(LARGE)) / 1e9:.0f}e9, T = {LARGE.length}")
    show("one state", state_bytes(LARGE))
    show("one shard sends, in one group of contexts", shard_bytes(LARGE, 1, 0, 2))
    for name, flops in (costs := flops_a_token(LARGE)).items():
        print(f"  {name}: {flops:.3g} flops a token")
    forward = costs["weights"] + costs["attention"]
    moments = costs["second moments"] + costs["sketches"]
    for contexts in (LARGE.contexts, 20_000):
        tokens = contexts * LARGE.length
        hours = [
            tokens * f / rate / 3600 for f, rate in ((forward, FORWARD_RATE), (moments, STATISTICS_RATE))
        ]
        print(f"  {tokens:.3g} tokens: forward {hours[0]:,.0f} and moments {hours[1]:,.0f} GPU-hours")
    sent = (SHARDS + 1) * sum(shard_bytes(LARGE, 1, 0, 2).values())
    print(
        f"  {SHARDS + 1} shards: {sent / 1e12:.0f} TB to the driver, {sent / 12.5e9 / 3600:.1f} h at 100 Gbit/s"
    )

    shape = embedded_shape(128, 256)
    model = open_model(device="cpu")
    corpus = Corpus.random_tokens(shape.vocabulary, shape.length, shape.contexts)
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
