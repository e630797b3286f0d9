"""Oracles: definitions token by token, a bigram model by dictionaries, shares that are binomial."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.papers.training.test_embedded_training import some_text
from theodolite.corpus.documents import Document
from theodolite_papers.training.embedded_text import (
    Source,
    Streams,
    bigram_loss,
    mixed_with_tasks,
    split_sources,
)
from theodolite_papers.training.models import EmbeddedConfig


def test_documents_that_share_text_or_a_label_stay_together() -> None:
    shared = (
        "This paragraph of more than one hundred and twenty characters occurs in two documents, " + "x" * 40
    )
    texts = [some_text(seed) for seed in range(60)]
    texts[3] += "\n\n" + shared + "\n\nend"
    texts[50] = "start\n\n" + shared.replace(" ", "\n  ")
    first = Source("first", 1.0, tuple(Document(text, f"a{i}") for i, text in enumerate(texts[:30])))
    second = Source("second", 1.0, tuple(Document(text, f"b{i}") for i, text in enumerate(texts[30:])))
    third = Source("third", 1.0, tuple(Document(some_text(200 + i), f"a{i}") for i in range(30)))
    pairs = [({"a3"}, {"b20"}), *(({f"a{i}"}, {f"a{i}"}) for i in range(30))]
    for seed in range(20):
        training, held = split_sources([first, second, third], seed)
        for train_side, out, source in zip(training, held, (first, second, third), strict=True):
            assert {*train_side.documents, *out.documents} == set(source.documents)
            sizes = [sum(len(document.text) for document in side.documents) for side in (out, source)]
            assert 0.0 < sizes[0] / sizes[1] < 0.15
        labels = {document.label for source in held for document in source.documents}
        assert all((left <= labels) == (right <= labels) for left, right in pairs)
        inside = [{document.label for document in source.documents} for source in held]
        assert inside[0] == inside[2]


def test_bigram_loss_is_that_of_counts_by_hand() -> None:
    random = np.random.default_rng(1)
    train = tuple(random.integers(0, 5, size=size).astype(np.int32) for size in (80, 200))
    contexts = torch.from_numpy(random.integers(0, 5, size=(3, 7)))
    streams = Streams(("a", "b"), np.array([0.7, 0.3]), train, (contexts, contexts))
    counts: Counter = Counter()
    for ids, share in zip(train, streams.shares, strict=True):
        for pair in pairwise(ids.tolist()):
            counts[pair] += share * 280 / len(ids)
    total = sum(counts.values())

    def loss(k: float) -> float:
        losses = []
        for row in contexts.tolist():
            for a, b in pairwise(row):
                single = (sum(n for (_, y), n in counts.items() if y == b) + 1) / (total + 5)
                after = sum(n for (x, _), n in counts.items() if x == a)
                losses.append(-math.log((counts[a, b] + k * single) / (after + k)))
        return sum(losses) / len(losses)

    assert bigram_loss(streams, contexts, 5) == pytest.approx(
        min(loss(2.0**n) for n in range(-4, 16)), rel=1e-12
    )


def test_batches_follow_from_seed_and_step_and_keep_the_shares() -> None:
    train = (np.arange(0, 100, dtype=np.int32), np.arange(100, 400, dtype=np.int32))
    streams = Streams(("a", "b"), np.array([0.25, 0.75]), train, ())
    batches = [streams.batch(step, size=16, length=9, seed=0) for step in range(200)]
    assert torch.equal(batches[7], streams.batch(7, size=16, length=9, seed=0))
    assert not torch.equal(batches[7], batches[8])
    assert not torch.equal(batches[7], streams.batch(7, size=16, length=9, seed=1))
    rows = torch.cat(batches)
    assert ((rows.diff(dim=1)) == 1).all()
    share = (rows[:, 0] < 100).double().mean()
    assert abs(share - 0.25) < 4 * math.sqrt(0.25 * 0.75 / len(rows))
    starts = rows[rows[:, 0] < 100][:, 0]
    assert (starts.min(), starts.max()) == (0, 90)


def test_tasks_are_mixed_in_as_often_as_they_should_and_as_they_are_said_to_be() -> None:
    """Oracle: the definitions, token by token; binomial shares."""
    config = EmbeddedConfig(repeats=0.25, backcopies=0.25, vocabulary=500)
    text = torch.arange(1000, 1065).repeat(4000, 1)
    tokens, predictable = mixed_with_tasks(text.clone(), 7, config, [0, 5])
    again, _ = mixed_with_tasks(text.clone(), 7, config, [0, 5])
    other, _ = mixed_with_tasks(text.clone(), 7, config, [0, 6])
    assert torch.equal(tokens, again)
    assert not torch.equal(tokens, other)
    kinds, periods, triggers = Counter(), list[int](), 0
    for row, known in zip(tokens.tolist(), predictable.tolist(), strict=True):
        if max(row[1:]) < 500:
            kinds["random repeat"] += 1
            period = known.index(True, 1) - 1
            periods.append(period)
            assert min(row[1:]) >= 1
            assert known == [True] + [False] * period + [True] * (64 - period)
            assert row[1 + period :] == row[1:-period]
        elif all(known) and row.count(1001) > 1:
            kinds["repeat of text"] += 1
            period = row.index(1001, 2) - 1
            assert 8 <= period <= 32
            assert row[1:] == [1001 + place % period for place in range(64)]
        elif 7 in row:
            kinds["backcopy"] += 1
            places = [place for place, token in enumerate(row) if token == 7]
            triggers += len(places)
            expected = list(range(1000, 1065))
            for place in places:
                expected[place : place + 2] = [7, row[place - 1]]
                assert row[place - 1] == 1000 + place - 1
            assert row == expected
            assert [place for place, is_known in enumerate(known) if not is_known] == places
        else:
            assert row == list(range(1000, 1065))
            assert all(known)
    for kind, share in {"random repeat": 1 / 6, "repeat of text": 1 / 12, "backcopy": 1 / 4}.items():
        assert abs(kinds[kind] / 4000 - share) < 4 * math.sqrt(share * (1 - share) / 4000)
    assert (min(periods), max(periods)) == (8, 32)
    # Half of the way from 8 to 33, of logarithms.
    short = sum(period < 16 for period in periods) / len(periods)
    expected = math.log(2) / math.log(33 / 8)
    assert abs(short - expected) < 4 * math.sqrt(expected * (1 - expected) / len(periods))
    assert triggers / kinds["backcopy"] == pytest.approx(0.2 * 21, rel=0.05)
