"""What sinks catch, against dense attention matrices for every kind of attention; sums of squares by definition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.accumulate.test_attention import KINDS, LENGTH, dense, make
from theodolite.accumulate.tags import Tags, measured, released
from theodolite.attention.catches import LEARNED, Catches, attend_and_catch, between_and_total
from theodolite.attention.inputs import AttentionInputs


def random_catches(generator: np.random.Generator, length: int, heads: int = 2) -> Catches:
    """Some sinks of some heads that catch disjoint tokens, others none."""
    head, position, caught, kept = [], [], [], []
    for h in range(heads):
        sinks = sorted(generator.choice(length, generator.integers(1, 4), replace=False).tolist())
        counts = np.array([t > 0 and t not in sinks for t in range(length)])
        by = generator.integers(-1, len(sinks), length)
        kept.append(counts)
        for number, sink in enumerate(sinks):
            head.append(h)
            position.append(sink)
            caught.append((by == number) & counts)
    of = torch.tensor(head)
    kept_, caught_ = torch.from_numpy(np.array(kept)), torch.from_numpy(np.array(caught))
    received = torch.full((len(of),), 0.5, dtype=torch.float64)
    local = torch.zeros(len(of), dtype=torch.bool)
    return Catches(of, torch.tensor(position), received, local, caught_, of, kept_)


def sums_of_squares(x: np.ndarray, group: np.ndarray) -> tuple[float, float]:
    """Between groups and in total, by definition."""
    mean = x.mean(0)
    own = [x[group == g] for g in np.unique(group)]
    between = sum(len(rows) * np.square(rows.mean(0) - mean).sum() for rows in own)
    return float(between), float(np.square(x - mean).sum())


def test_keys_and_learned_columns_are_sinks_by_the_one_rule(monkeypatch):
    """Oracle: nothing gets more than all of the attention, so that none is left where the rule asks for it."""
    inputs = make("sink")
    inputs = replace(inputs, sink=torch.full_like(inputs.sink, 9.0))
    assert all(LEARNED in catches.position for catches in attend_and_catch(inputs)[1])
    monkeypatch.setattr("theodolite.attention.summary.SINK_THRESHOLD", 1.0)
    assert not any(len(catches.position) for catches in attend_and_catch(inputs)[1])


@pytest.mark.parametrize("local_sinks", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_catches_are_those_of_dense_attention(kind, local_sinks):
    """Oracle: softmax matrices in float64, a loop over heads and queries."""
    inputs = make(kind, strength=4.0)
    weights, output, learned = dense(inputs)
    found = local = 0
    ours, contexts = attend_and_catch(inputs, local_sinks=local_sinks)
    torch.testing.assert_close(ours, output, rtol=1e-10, atol=1e-10)
    for context, catches in enumerate(contexts):
        expected = []
        for head, p in enumerate(weights[context].numpy()):
            seen = np.tri(LENGTH, dtype=bool) if kind != "bidirectional" else np.ones_like(p, dtype=bool)
            if inputs.mask is not None:
                seen = inputs.mask[0, 0].numpy()
            received = p.sum(0) / np.maximum(seen.sum(0), 1)
            whole = (received > 0.3) & (seen.sum(0) > 16)
            most = [q for q in range(LENGTH) if p[q].max() > 0.3 and p[q].argmax() != q]
            paid_most = np.bincount(p[most].argmax(1), minlength=LENGTH) if most else np.zeros(LENGTH)
            sinks = [int(k) for k in np.flatnonzero(whole | (local_sinks & (paid_most >= 16)))]
            local += sum(not whole[k] for k in sinks)
            paid = {k: p[:, k] for k in sinks}
            if kind == "sink" and learned[context, head].mean() > 0.3:
                paid[LEARNED] = learned[context, head].numpy()
            for k in paid:
                counts = np.array([t > 0 and t not in paid for t in range(LENGTH)])
                best = np.array([max(paid, key=lambda s, t=t: paid[s][t]) for t in range(LENGTH)])
                caught = counts & (best == k) & (paid[k] > 0.3)
                mean = received[k] if k != LEARNED else paid[k].mean()
                expected.append((head, k, mean, caught, counts, k != LEARNED and not whole[k]))
        assert catches.head.tolist() == [e[0] for e in expected]
        assert catches.position.tolist() == [e[1] for e in expected]
        assert catches.local.tolist() == [e[5] for e in expected]
        for row, (_, _, mean, caught, counts, _) in enumerate(expected):
            assert float(catches.received[row]) == pytest.approx(mean, rel=1e-10)
            np.testing.assert_array_equal(catches.caught[row], caught)
            np.testing.assert_array_equal(catches.counted[catches.of[row]], counts)
        found += len(expected)
    # A window's keys are seen by too few queries, and a cap leaves no key so much attention.
    assert found or kind in ("window", "padded", "capped")
    assert bool(local) == (local_sinks and kind not in ("window", "capped", "grouped", "alibi"))


def test_of_sinks_that_are_paid_alike_the_first_catches():
    query = torch.ones(1, 1, 20, 1, dtype=torch.float64)
    key = torch.zeros(1, 1, 20, 1, dtype=torch.float64)
    key[0, 0, [2, 4]] = 40.0
    _, (catches,) = attend_and_catch(AttentionInputs(query, key, key.clone(), 1.0, causal=True))
    assert catches.position.tolist() == [2, 4]
    assert catches.caught.sum(dim=1).tolist() == [16, 0]  # but 0, the sinks, and 1, which sees none


def test_a_short_context_whose_tokens_are_all_sinks_adds_nothing_bad():
    """A window of three keys, all paid alike: every token is a sink, and none is left to be caught."""
    x = torch.zeros(1, 1, 8, 2)
    position = torch.arange(8)
    mask = ((position - position[:, None]) % 8 < 3)[None, None]
    _, (catches,) = attend_and_catch(AttentionInputs(x, x, x + 1.0, 1.0, causal=False, mask=mask))
    assert catches.position.tolist() == list(range(8))
    assert not catches.counted.any()
    tags = Tags(1, 2, 1)
    sums, place = measured(catches, x[0], x[0] + 1.0, torch.eye(2).double()[None])
    rows = tags.update(0, catches, position, sums, 0)
    tags.add_place(rows, 0, place, 0)
    stream = released(catches, torch.randn(8, 5))
    tags.add_place(rows, 1, stream, 0)
    assert all(torch.isfinite(tensor).all() for tensor in tags.state().values())


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.integers(5, 30), st.sampled_from([0.0, 1.0, 1e4]))
def test_sums_of_squares_are_those_by_definition_whatever_is_added_to_all(seed, length, common):
    """Oracle: a loop over groups. What all tokens share, and a massive activation that is left out, change nothing."""
    generator = np.random.default_rng(seed)
    catches = random_catches(generator, length)
    x = generator.standard_normal((length, 6)) + common * generator.standard_normal(6)
    x[catches.position[0]] *= 1e4
    x[0] *= 1e4
    got = between_and_total(torch.from_numpy(x), catches)
    for head in range(2):
        counts = catches.counted[head].numpy()
        if not counts.any():
            continue
        scale = np.square(x[counts]).sum()  # a sink of the other head is kept by this one
        rows = np.flatnonzero(catches.head == head)
        group = np.full(length, -1)
        for row in rows:
            group[catches.caught[row].numpy()] = row
            own = sums_of_squares(x[counts], catches.caught[row].numpy()[counts])
            np.testing.assert_allclose([got[0][row], got[1][row]], own, rtol=1e-9, atol=1e-12 * scale)
        whole = sums_of_squares(x[counts], group[counts])
        np.testing.assert_allclose([got[2][head], got[3][head]], whole, rtol=1e-9, atol=1e-12 * scale)
