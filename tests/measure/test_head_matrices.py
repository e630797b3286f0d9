"""Oracles: sums written out over the 25 finest constituents, and numpy on matrices.

That the constituents are a model's own logits and attention is tested for every family in `tests/models`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from theodolite.attention.inputs import AttentionInputs
from theodolite.corpus.corpus import Corpus
from theodolite.logits.constituents import constituents
from theodolite.measure.constituents import Constituents, HeadMatrix, head_matrices
from theodolite.theory.decomposition import PARTS

CONTEXTS, LENGTH = 4, 20
SUMMED = {
    False: {"position", "pos-cvec", "cvec-pos", "context", "constant", "additive"},
    True: {"pos-pos", "pos-cvec", "cvec-pos", "cvec-cvec", "constant", "additive"},
}


def _split(model, layer: int = 1) -> Constituents:
    ids = Corpus.random_tokens(model.tokenizer, LENGTH, CONTEXTS, 3).contexts
    return constituents(model, ids, layer)


def random_split(length: int, *, heads: int = 1, bias: bool = False) -> Constituents:
    """Parts and inputs that fit together, without a model."""
    generator = torch.Generator().manual_seed(0)
    query, key = (
        torch.randn(5, 1, heads, length, 3, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    more = torch.randn(1, heads, length, length, generator=generator) if bias else None
    inputs = AttentionInputs(query.sum(0), key.sum(0), key.sum(0), 0.5, causal=True, bias=more)
    return Constituents(PARTS, query, key, inputs, 0.0)


def by_name(panels: list[HeadMatrix]) -> dict[str, HeadMatrix]:
    return {panel.name: panel for panel in panels}


@pytest.mark.parametrize("raw", [False, True])
def test_panels_add_up_and_so_do_their_shares(opened, raw):
    """Oracle: numpy on the centred panels: share = Σ panel · QK / Σ QK²."""
    split = _split(opened("bloom"))
    panels = by_name(head_matrices(split, 0, context=1, raw=raw))
    assert set(panels) == SUMMED[raw] | {"QK", "attention"}
    together = sum(panels[name].values for name in SUMMED[raw])
    np.testing.assert_allclose(together, panels["QK"].values, atol=1e-9)
    assert sum(panels[name].share for name in SUMMED[raw]) == pytest.approx(1)

    def centred(values: np.ndarray) -> np.ndarray:
        return np.nan_to_num(values - np.nanmean(values, axis=1, keepdims=True))

    whole = centred(panels["QK"].values)
    for name in SUMMED[raw]:
        share = (centred(panels[name].values) * whole).sum() / (whole**2).sum()
        assert panels[name].share == pytest.approx(share, abs=1e-5)


def test_panels_are_sums_of_the_finest_constituents(opened):
    """Oracle: the 25 matrices added up by hand: raw with the mean apart or within pos; else with mean and bias beside
    what is on the other side, rows less their means over the keys seen."""
    split = _split(opened("gpt2"))
    logits = split.logits_of(2)[0].numpy()
    within = split.coarse({"constant": ("bias",), "pos": ("mean", "pos"), "cvec": ("ctx", "resid")})
    hidden = np.triu(np.ones((LENGTH, LENGTH), dtype=bool), 1)
    mean_pos, pos, cvec, none, bias, rest, every = [0, 1], [1], [2, 3], [0, 4], [4], [0, 1, 2, 3], range(5)
    for of, first, raw, sides in (
        (split, 0, True, {"pos-cvec": [(pos, cvec)]}),
        (within, 0, True, {"pos-pos": [(mean_pos, mean_pos)], "cvec-pos": [(cvec, mean_pos)]}),
        (within, 0, True, {"constant": [(bias, every), (rest, bias)]}),
        (split, 1, False, {"position": [(pos, pos), (pos, none), (none, pos)], "constant": [(none, none)]}),
        (split, 1, False, {"context": [(cvec, cvec), (cvec, none), (none, cvec)]}),
    ):
        panels = by_name(head_matrices(of, 2, first=first, raw=raw))
        for name, pairs in sides.items():
            whole = sum(logits[a, b] for left, right in pairs for a in left for b in right)
            expected = np.where(hidden, np.nan, whole)[first:, first:]
            if not raw:
                expected -= np.nanmean(expected, axis=1, keepdims=True)
            np.testing.assert_allclose(panels[name].values, expected, atol=1e-10 if not raw else 1e-12)
        attention = np.where(hidden, np.nan, split.attention[0, 2].numpy())[first:, first:]
        np.testing.assert_allclose(panels["attention"].values, attention, atol=1e-12)


def test_at_most_128_positions_from_the_first_one_are_given():
    """Oracle: the logits by einsum."""
    split = random_split(512, bias=True)
    panels = by_name(head_matrices(split, 0, first=380, raw=True))
    total = split.logits_of(0).sum((0, 1)) + split.additive[0]
    assert panels["QK"].values.shape == (128, 128)
    np.testing.assert_allclose(panels["QK"].values[100, :101], total[480, 380:481], rtol=1e-6)
    end = head_matrices(split, 0, first=500)
    assert end[0].values.shape == (12, 12)


def test_each_context_has_its_own_bias_and_mask():
    """Oracle: the sum of q·k and the context's own bias; keys hidden in one context only."""
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(5, 2, 1, 8, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    bias = torch.randn(2, 1, 8, 8, generator=generator)
    mask = torch.ones(2, 1, 8, 8, dtype=torch.bool)
    mask[1, ..., 5] = False
    inputs = AttentionInputs(query.sum(0), key.sum(0), key.sum(0), 0.5, causal=False, mask=mask, bias=bias)
    panels = by_name(
        head_matrices(Constituents(PARTS, query, key, inputs, 0.0), 0, context=1, first=0, raw=True)
    )
    whole = 0.5 * query.sum(0)[1, 0] @ key.sum(0)[1, 0].T + bias[1, 0]
    np.testing.assert_allclose(panels["additive"].values[:, :5], bias[1, 0, :, :5], rtol=1e-6)
    np.testing.assert_allclose(panels["QK"].values[:, :5], whole[:, :5], rtol=1e-6)
    assert np.isnan(panels["QK"].values[:, 5]).all()
