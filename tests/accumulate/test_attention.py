"""Attention statistics against dense softmax matrices in float64, for every kind of attention."""

from __future__ import annotations

import pytest
import torch

from tests.attention.kinds import BATCH, HEADS, KINDS, LENGTH, dense, make
from tests.attention.test_summary import dense_summary
from theodolite.accumulate.attention import AttentionStatistics, Tokens
from theodolite.accumulate.sums import part_of
from theodolite.attention.inputs import AttentionInputs, attend
from theodolite.attention.summary import least_queries


def tokens() -> torch.Tensor:
    return torch.randint(12, (BATCH, LENGTH), generator=torch.Generator().manual_seed(4))


def measured(inputs: AttentionInputs) -> tuple[AttentionStatistics, torch.Tensor]:
    contexts = len(inputs.query)
    statistics = AttentionStatistics(1, HEADS, LENGTH, contexts, examples=min(2, contexts))
    output = statistics.update(0, inputs, Tokens.of(tokens()[:contexts], torch.device("cpu")), 0)
    return statistics, output


def grouped(by_context):
    """Sums by group of contexts, eight ranges of them, written out."""
    sums = torch.zeros(8, *by_context.shape[1:], dtype=torch.float64)
    for context, values in enumerate(by_context.double()):
        sums[context * 8 // len(by_context)] += values
    return sums


def sink_tokens(state):
    """Key → contexts, sinks and the sum of their positions."""
    keys, contexts, *counts = part_of(state, "sink_tokens").values()
    counts = [contexts.sum(dim=1), *counts]
    return dict(zip(map(tuple, keys.tolist()), torch.stack(counts, dim=1).tolist(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_output_and_statistics_equal_the_dense_ones(kind):
    inputs = make(kind)
    (weights, _, learned), expected = dense(inputs), dense_summary(inputs)
    statistics, ours = measured(inputs)
    state = {name: value[0] for name, value in statistics.state().items() if len(value)}
    ids = tokens()
    equal = (ids[:, :, None] == ids[:, None, :]) & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-1)
    previous = weights.diagonal(offset=-1, dim1=-2, dim2=-1).sum(2)
    same = (weights * equal[:, None]).sum((2, 3))
    lse = expected["log_sum_exp"]
    eligible = (weights > 0).sum(-2) - 1 >= 16
    sums = {
        "entropy": expected["entropy"].sum(0),
        "total_entropy": grouped(expected["entropy"].sum(-1)),
        "learned": grouped(learned.sum(2)),
        "contexts": grouped(torch.ones(len(ids[: len(weights)]))),
        "largest_logit": expected["largest"].amax((0, 2)),
        "log_sum_exp": lse.where(lse.isfinite(), 0).sum((0, 2)),
        "previous": grouped(previous),
        "previous_queries": grouped(torch.full((len(weights),), LENGTH - 1)),
        "same": grouped(same),
        "same_queries": grouped(equal.any(-1).sum(-1)),
        "sink": expected["sinks"].sum(0).double(),
        "sink_first": grouped(expected["sinks"][..., 0]),
        "sink_later": grouped(expected["sinks"][..., 1:].any(-1)),
        "visible_keys": (weights[0, 0] > 0).sum(-1).double(),
        "example_received": (expected["received"][:2] * eligible[:2]).max(dim=1).values,
    }
    for output in (ours, attend(inputs)):
        torch.testing.assert_close(output, expected["output"], rtol=1e-10, atol=1e-10)
    for name, value in sums.items():
        torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-10, msg=name)


def test_some_of_these_heads_have_sinks():
    """The planted ones and no other; without any, the comparison of sinks above would compare zeros."""
    statistics, _ = measured(make("causal"))
    state = statistics.state()
    assert state["sink"][0].nonzero().tolist() == [[0, 0], [1, 40]]
    assert state["sink"][0, [0, 1], [0, 40]].tolist() == [3.0, 2.0]
    weights, _, _ = dense(make("causal"))
    expected: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    received = weights.sum(-2) / (LENGTH - torch.arange(LENGTH))
    ids = tokens()
    for context, head, position in (
        ((received > 0.3) & (torch.arange(LENGTH) < LENGTH - 16)).nonzero().tolist()
    ):
        key = (0, head, int(ids[context, position]), int(position == 0))
        expected.setdefault(key, []).append((context, position))
    assert sink_tokens(state) == {
        key: [len({context for context, _ in places}), len(places), sum(position for _, position in places)]
        for key, places in expected.items()
    }


def test_a_token_that_is_a_sink_twice_is_in_one_context():
    """And what is counted twice in one context is counted once, in whichever parts it came."""
    sink = torch.zeros(2, 1, 6, dtype=torch.bool)
    sink[0, 0, [0, 2, 4]] = sink[1, 0, 2] = True
    ids = torch.tensor([[7, 1, 7, 1, 7, 1], [1, 1, 7, 1, 1, 1]])
    whole, first, second = (AttentionStatistics(1, 1, 6, 2, 0) for _ in range(3))
    whole._sinks(0, sink, ids, 0)
    first._sinks(0, sink[:1], ids[:1], 0)
    second._sinks(0, sink[1:], ids[1:], 1)
    first.merge(second.state())
    for one in (whole, first):
        assert sink_tokens(one.state()) == {(0, 0, 7, 0): [2, 3, 8], (0, 0, 7, 1): [1, 1, 0]}


@pytest.mark.parametrize(("length", "least"), [(6, 2), (8, 2), (63, 16), (500, 16)])
def test_keys_need_a_quarter_of_the_context_after_them(length, least):
    assert least_queries(length) == least
