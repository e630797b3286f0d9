"""Padded and packed rows, wherever token ids are taken. Oracle: each document by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from theodolite import constituents, view_head
from theodolite.errors import UsageError
from theodolite.models import OpenModel
from theodolite.sinks.exclusions import Exclusions, Rule
from theodolite.train.geometry import GeometryReader

LENGTHS = [12, 9, 20]
DOCUMENTS = [
    torch.randint(3, 40, (length,), generator=torch.Generator().manual_seed(length)) for length in LENGTHS
]
WAYS = ["left", "right", "packed"]


def laid(way: str, documents: list[Tensor] = DOCUMENTS) -> tuple[Tensor, dict[str, Any], list[Any]]:
    """Ids, what says where their documents are, and the place of each."""
    if way == "packed":  # two rows, the second padded
        longest = sum(map(len, documents[:2]))
        ids, mask, positions = (torch.zeros(2, longest, dtype=torch.int64) for _ in range(3))
        places, start = [], 0
        for number, own in enumerate(documents):
            row = 0 if number < 2 else 1
            start = 0 if number == 2 else start
            places.append((row, slice(start, start + len(own))))
            ids[places[-1]], mask[places[-1]], positions[places[-1]] = own, 1, torch.arange(len(own))
            start += len(own)
        return ids, {"attention_mask": mask, "position_ids": positions}, places
    ids, mask = (torch.zeros(len(documents), max(map(len, documents)) + 2, dtype=torch.int64) for _ in "ab")
    places = [
        (row, slice(-len(d), None) if way == "left" else slice(len(d))) for row, d in enumerate(documents)
    ]
    for place, own in zip(places, documents, strict=True):
        ids[place], mask[place] = own, 1
    return ids, {"attention_mask": mask}, places


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(opened) -> Iterator[OpenModel]:
    return opened("llama3")


def test_exclusions_name_first_tokens_and_no_padding(way):
    token = int(DOCUMENTS[2][5])
    rules = (
        Rule("sink", 0, 0, first=True),
        Rule("sink", 0, 1, token_id=token, first=False),
        Rule("sink", 1, token_id=0),
    )
    exclusions, (ids, rows, places) = Exclusions(rules), laid(way)
    flagged = exclusions.tokens(ids, **rows)
    for place, own in zip(places, DOCUMENTS, strict=True):
        assert torch.equal(flagged[place], exclusions.tokens(own))
        flagged[place] = False
    assert not flagged.any()


def test_a_monitor_batch_is_of_its_contexts_alone(model, way):
    """Means over queries weigh contexts by their tokens, those over contexts do not."""
    ids, rows, _ = laid(way)
    look = GeometryReader(model.hf, ids, **rows).look()
    alone = [GeometryReader(model.hf, own[None]).look() for own in DOCUMENTS]
    weights = {"entropy": LENGTHS, "log_sum_exp": LENGTHS, "sink_first": None}
    for name, weight in weights.items():
        expected = np.average([of.heads[name] for of in alone], axis=0, weights=weight)
        np.testing.assert_allclose(look.heads[name], expected, rtol=1e-6, atol=1e-9, err_msg=name)
    most = [np.log(np.arange(1, length + 1)).sum() for length in LENGTHS]
    share = look.heads["entropy"] * sum(LENGTHS) / sum(most)
    np.testing.assert_allclose(look.heads["entropy_share"], share, rtol=1e-6)
    largest = np.max([of.heads["largest_logit"] for of in alone], axis=0)
    np.testing.assert_allclose(look.heads["largest_logit"], largest, rtol=1e-6)
    for name, weight in {"norm": [length - 1 for length in LENGTHS], "norm_first": None}.items():
        expected = np.average([of.layers[name] for of in alone], axis=0, weights=weight)
        np.testing.assert_allclose(look.layers[name], expected, rtol=1e-6)


def test_contexts_of_one_length_are_the_batch_that_they_make(model, way):
    documents = [own[:9] for own in DOCUMENTS]
    ids, rows, _ = laid(way, documents)
    look, expected = (
        GeometryReader(model.hf, ids, **rows).look(),
        GeometryReader(model.hf, torch.stack(documents)).look(),
    )
    for table in ("heads", "layers"):
        a, b = (getattr(of, table).select_dtypes("number") for of in (look, expected))
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)
    split = constituents(model, ids, 1, **rows)
    torch.testing.assert_close(split.total, constituents(model, torch.stack(documents), 1).total)
    uneven, rows, _ = laid(way)
    with pytest.raises(UsageError, match="the contexts have 9 to 20 tokens: give those of one length"):
        constituents(model, uneven, 1, **rows)


def test_a_head_is_drawn_without_the_padding(model, way):
    ids, rows, _ = laid("right" if way == "packed" else way, DOCUMENTS[:1])
    drawn = view_head(model, ids, 1, 2, **rows).view.attention
    np.testing.assert_array_equal(drawn, view_head(model, DOCUMENTS[0], 1, 2).view.attention)
