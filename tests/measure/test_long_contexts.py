"""What stands for all positions of a long context: stretches of neighbours, and a choice of queries."""

from __future__ import annotations

import numpy as np
import torch

from theodolite.attention.inputs import AttentionInputs
from theodolite.corpus.groups import one_of_each_stretch
from theodolite.measure import constituents
from theodolite.measure.position import STRETCHES, Stretches
from theodolite.theory.unbiased import PairProducts


def test_stretches_keep_what_does_not_change_within_them():
    """Oracle: the products of all positions with all."""
    stretches = Stretches.among(600)
    assert len(stretches.sizes) == STRETCHES
    assert stretches.sizes.sum() == 600
    assert (stretches.sizes[: STRETCHES // 2] == 1).all()
    assert (stretches.of.diff() >= 0).all()
    rows = torch.randn(8, STRETCHES, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = rows[:, stretches.of]
    few, every = PairProducts.of(stretches.summed(p)), PairProducts.of(p)
    for name in ("energy", "largest_square"):
        torch.testing.assert_close(
            getattr(few, name)().without, getattr(every, name)().without, rtol=1e-8, atol=0
        )
    short = torch.randn(2, 40, 3)
    assert Stretches.among(40).summed(short) is short
    assert len(Stretches.among(600, (20, 30)).sizes) == 600


def test_of_each_stretch_one_is_chosen():
    chosen = one_of_each_stretch(1000, 64)
    assert len(chosen) == 64
    assert (chosen.diff() > 0).all()
    assert 0 <= chosen[0] < 1000 / 64
    assert chosen[-1] >= 1000 - 1000 / 64 - 1
    assert torch.equal(one_of_each_stretch(9, 64), torch.arange(9))


def test_shares_are_those_of_the_chosen_queries(monkeypatch):
    """Oracle: each chosen query's logits over the keys that it sees, written out."""
    monkeypatch.setattr(constituents, "MOST_QUERIES", 7)
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 3, 1, 20, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    whole_query, whole_key = query.sum(0), key.sum(0)
    inputs = AttentionInputs(whole_query, whole_key, whole_key, scaling=0.5, causal=True)
    sums = constituents.share_sums(query, key, inputs)
    for context in range(3):
        products, total = np.zeros((2, 2)), 0.0
        for t in (1 + one_of_each_stretch(19, 7, context)).tolist():
            parts = 0.5 * np.einsum("ad,bjd->abj", query[:, context, 0, t], key[:, context, 0, 1 : t + 1])
            logits = parts.sum((0, 1))
            centred = logits - logits.mean()
            products += parts @ centred
            total += centred @ centred
        np.testing.assert_allclose(sums["products"][context, 0], products, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(sums["total"][context, 0], total, rtol=1e-9)
