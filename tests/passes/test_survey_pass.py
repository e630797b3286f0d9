"""Shards merged in any order and any grouping sum to what one pass sums, within 1e-12.

Oracle: the pass that reads the same contexts one after another and merges nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import checkpoints
from tests.slow import slow_but
from theodolite.accumulate.second_moments import SKETCH
from theodolite.corpus.corpus import Corpus
from theodolite.corpus.groups import GROUPS
from theodolite.logits.shares import split_contexts
from theodolite.models import OpenModel, open_model
from theodolite.passes.corpus_pass import CorpusPass
from theodolite.passes.survey_pass import (
    EXAMPLES,
    SAMPLED_BYTES,
    SAMPLED_CONTEXTS,
    SAMPLED_TOKENS,
    SurveyPass,
)
from theodolite.sinks.trace import TracePass

CONTEXTS, LENGTH = 7, 24
Merge = Callable[[CorpusPass, dict[str, torch.Tensor]], None]


class Shards:
    """The state of every context by itself, and of all of them in one pass."""

    def __init__(self, make: Callable[[], CorpusPass], merge: Merge) -> None:
        self.make, self._merge = make, merge
        whole = make()
        whole.read(0, CONTEXTS)
        self.whole = whole.state()
        self.of_one = [self._read(context) for context in range(CONTEXTS)]

    def _read(self, context: int) -> dict[str, torch.Tensor]:
        one = self.make()
        if isinstance(one, SurveyPass):
            one.sketches.look_along(self.whole["sketches.directions"])
        one.read(context, context + 1)
        return one.state()

    def merged(self, states: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        total = self.make()
        for state in states:
            self._merge(total, state)
        return total.state()


def trace_pass(model: OpenModel, corpus: Corpus) -> TracePass:
    weights = [model.output_weights(layer) for layer in range(model.layers)]
    return TracePass(model, corpus, 1, torch.stack([w_o @ w_o.mT for w_o in weights]), local_sinks=True)


def merge_tags(total: CorpusPass, state: dict[str, torch.Tensor]) -> None:
    assert isinstance(total, TracePass)
    other = trace_pass(total.model, total.corpus)
    other.restore(state)
    total.tags.merge(other.tags.state())


@pytest.fixture(scope="module", params=slow_but(["survey"], ["survey", "trace"]))
def shards(opened, request: pytest.FixtureRequest) -> Shards:
    """A survey of a model with a learned sink column, a trace of a trained one, which has sinks among its tokens."""
    if request.param == "survey":
        model, corpus = opened("gpt_oss"), Corpus.random_tokens(checkpoints.VOCABULARY, LENGTH, CONTEXTS)
        return Shards(lambda: SurveyPass(model, corpus, 0, 1), SurveyPass.merge)
    model = open_model(device="cpu")
    corpus = Corpus.python_docs(model.tokenizer, LENGTH, CONTEXTS)
    return Shards(lambda: trace_pass(model, corpus), merge_tags)


@given(order=st.permutations(range(CONTEXTS)), cuts=st.sets(st.integers(1, CONTEXTS - 1)))
@settings(max_examples=8, deadline=None)
def test_order_and_grouping_change_nothing(shards: Shards, order: list[int], cuts: set[int]) -> None:
    borders = [0, *sorted(cuts), CONTEXTS]
    groups = [order[low:high] for low, high in pairwise(borders)]
    merged = shards.merged([shards.merged([shards.of_one[c] for c in group]) for group in groups])
    assert merged.keys() == shards.whole.keys()
    for name, expected in shards.whole.items():
        assert merged[name].shape == expected.shape, name
        if expected.is_floating_point():
            scale = float(expected.abs().max()) if expected.numel() else 0.0
            np.testing.assert_allclose(merged[name], expected, rtol=0, atol=1e-12 * scale, err_msg=name)
        else:
            assert torch.equal(merged[name], expected), name


def test_a_context_counted_twice_is_seen(shards: Shards) -> None:
    merged = shards.merged([*shards.of_one, shards.of_one[0]])
    counts = [name for name in shards.whole if name.endswith(("contexts", "count"))]
    assert counts
    assert any(not torch.equal(merged[name], shards.whole[name]) for name in counts)


def state_bytes(layers: int, heads: int, d: int, t: int, contexts: int) -> dict[str, int]:
    """The formulas of docs/scaling.md, in bytes, but for the rows of sink tokens, and of massive ones."""
    residual, g = layers + 1, GROUPS
    r, examples = min(SKETCH, d), min(EXAMPLES, contexts)
    sampled = min(contexts, SAMPLED_CONTEXTS, SAMPLED_BYTES // (8 * residual * d))
    tokens = min(SAMPLED_TOKENS, contexts * (t - 1))
    numbers = {
        "sums by position": residual * g * t * d,
        "second moments": (residual + layers) * (1 + d + d * d),
        "sketches": residual * (g * (2 + d + d * r) + d * r),
        "sample": residual * (d * (2 * sampled + tokens) + 2 * sampled),
        "outliers": residual * (d * (5 * g + 2) + g),
        "attention": layers * (heads * (4 * t + 2 + 8 * g) + 2 * examples * t + 2 * t + 4 * g + 1),
        "queries and keys": layers * heads * (1 + 2 * (d // heads) ** 2),
        "scalars": residual * ((5 + t) * g + 1),
    }
    split = {"split contexts": layers * min(split_contexts(t), contexts) * t * d * 4}  # float32, as the model
    return {name: 8 * count for name, count in numbers.items()} | split


@pytest.mark.parametrize(("family", "length", "contexts"), [("embedded", 40, 20), ("llama3", 24, 9)])
def test_a_state_has_the_bytes_of_the_formula(family, length, contexts, opened):
    """Oracle: the tensors of a fresh pass. Each part's by the accumulator that holds it."""
    model = open_model(device="cpu") if family == "embedded" else opened(family)
    corpus = Corpus.random_tokens(model.required_vocabulary(), length, contexts)
    state = SurveyPass(model, corpus, 0, 1).state()
    parts = state_bytes(model.layers, model.heads, model.width, length, contexts)
    assert sum(parts.values()) == sum(tensor.nbytes for tensor in state.values())
    held = {name: state[name].nbytes for name in state}
    assert parts["sums by position"] == held["means.position_sum"]
    sample = ("means.context_mean", "means.context_tokens", "means.token")
    assert parts["sample"] == sum(held[name] for name in sample)
    for name, prefixes in {
        "second moments": ("residual.", "inputs."),
        "sketches": ("sketches.",),
        "outliers": ("outliers.",),
        "attention": ("attention.",),
        "queries and keys": ("query_keys.",),
    }.items():
        assert parts[name] == sum(count for key, count in held.items() if key.startswith(prefixes)), name
