"""Attention recomputed with some constituents only, and without them, against dense softmax matrices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.attention.kinds import HEADS, KINDS, LENGTH, dense, dense_logits, dense_weights, make
from tests.measure.test_constituents import _split
from theodolite.attention.inputs import softmax
from theodolite.measure.attribution import ATTRIBUTED, Pattern, attribute, scores_by_context

HALF = LENGTH // 2
PATTERNS = [
    Pattern("induction", HALF - 1, range(HALF, LENGTH)),
    Pattern("previous", 1, range(1, LENGTH)),
    Pattern("other", 66, range(70, 90)),
]


def _scores(weights: torch.Tensor) -> torch.Tensor:
    """Scores of whole attention matrices, by definition."""
    rows = []
    for pattern in PATTERNS:
        i = torch.tensor(list(pattern.queries))
        rows.append(weights[:, :, i, i - pattern.distance].mean((0, 2)))
    return torch.stack(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_pattern_scores(kind):
    """Oracle: diagonals of dense softmax matrices."""
    inputs = make(kind)
    weights, _, _ = dense(inputs)
    torch.testing.assert_close(
        scores_by_context(inputs, PATTERNS).mean(0), _scores(weights), rtol=1e-10, atol=1e-12
    )
    torch.testing.assert_close(softmax(inputs.logits(), inputs.sink), weights, rtol=1e-10, atol=1e-12)


SIDES = {"mean": "constant", "pos": "pos", "ctx": "cvec", "resid": "cvec", "bias": "constant"}


def _groups_of(query: str, key: str) -> set[str]:
    """By what the two sides need to know: the position, the context, both or neither; and the paper's names."""
    sides = {SIDES[query], SIDES[key]}
    strict = {f"{SIDES[query]}-{SIDES[key]}"}
    if {"pos", "cvec"} <= sides:
        return strict | {"cross"}
    return strict | {"position" if "pos" in sides else "context" if "cvec" in sides else "constant"}


def _dense_of(inputs, products: torch.Tensor, bias: bool) -> torch.Tensor:
    """Attention of whole products of queries with keys under the masks, cap and sink of `inputs`."""
    inputs = inputs if bias else replace(inputs, bias=None)
    return dense_weights(inputs, dense_logits(inputs, products))[0]


@pytest.mark.parametrize("kind", ["causal", "window", "capped", "alibi", "sink"])
def test_only_and_without_equal_the_dense_computation(kind):
    """Oracle: all 25 matrices whole, added up by group, softmax by torch."""
    query, key, inputs = _split(kind)
    found = attribute(query, key, inputs, PATTERNS)
    every = torch.einsum("acnid,bcnjd->abcnij", query, key) * inputs.scaling
    names = ("mean", "pos", "ctx", "resid", "bias")
    for number, group in enumerate(ATTRIBUTED):
        chosen = torch.zeros_like(every[0, 0])
        for a, left in enumerate(names):
            for b, right in enumerate(names):
                if group in _groups_of(left, right):
                    chosen = chosen + every[a, b]
        only = _scores(_dense_of(inputs, chosen, group == "additive"))
        without = _scores(_dense_of(inputs, every.sum((0, 1)) - chosen, group != "additive"))
        torch.testing.assert_close(found.only[number], only, rtol=1e-8, atol=1e-11)
        torch.testing.assert_close(found.without[number], without, rtol=1e-8, atol=1e-11)
    even = _scores(_dense_of(replace(inputs, sink=None), torch.zeros_like(every[0, 0]), bias=False))
    torch.testing.assert_close(found.uniform, even)
    torch.testing.assert_close(found.score, scores_by_context(inputs, PATTERNS).mean(0))
    disjoint = [ATTRIBUTED.index(name) for name in ("position", "context", "cross", "constant", "additive")]
    torch.testing.assert_close(found.share[disjoint].sum(0), torch.ones(HEADS, dtype=torch.float64))
