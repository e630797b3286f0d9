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
from theodolite.corpus.corpus import Corpus
from theodolite.models import OpenModel, open_model
from theodolite.passes.corpus_pass import CorpusPass
from theodolite.passes.survey_pass import SurveyPass
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
