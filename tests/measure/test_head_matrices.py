"""Oracles: the model's own eager attention, sums written out over the 25 finest constituents, numpy on matrices."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests import checkpoints
from theodolite.attention.inputs import AttentionInputs
from theodolite.corpus.corpus import Corpus
from theodolite.logits.constituents import constituents
from theodolite.measure.constituents import Constituents
from theodolite.measure.head_matrices import HeadMatrix, head_matrices
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


@pytest.mark.parametrize("family", ["bert", "bloom", "mistral"])
def test_panels_are_the_models_own_attention_and_logits(opened, family):
    """Oracle: eager attention of the model; its logarithm, less the row's mean, is what the softmax saw."""
    model = opened(family)
    eager = checkpoints.build(family)
    eager.set_attn_implementation("eager")
    ids = Corpus.random_tokens(model.tokenizer, LENGTH, CONTEXTS, 3).contexts
    with torch.inference_mode():
        attention = eager(ids, output_attentions=True).attentions[1][2, 3].double().numpy()[1:, 1:]
    panels = by_name(head_matrices(_split(model), 3, context=2))
    seen = attention > 0
    np.testing.assert_allclose(panels["attention"].values[seen], attention[seen], rtol=2e-4, atol=1e-7)
    assert np.isnan(panels["QK"].values[~seen]).all()
    logits = np.log(attention, where=seen, out=np.full_like(attention, math.nan))
    centred = logits - np.nanmean(logits, axis=1, keepdims=True)
    np.testing.assert_allclose(panels["QK"].values, centred, rtol=0, atol=1e-3)
    assert ("additive" in panels) == (family == "bloom")


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


def test_mean_and_bias_go_with_what_is_on_the_other_side(opened):
    """Oracle: the 25 matrices added up by hand, rows less their means over the keys seen."""
    split = _split(opened("gpt2"))
    logits = split.logits_of(2)[0].numpy()[:, :, 1:, 1:]
    later = np.triu(np.ones((LENGTH - 1, LENGTH - 1), dtype=bool), 1)
    panels = by_name(head_matrices(split, 2))
    pos, cvec, none = [1], [2, 3], [0, 4]
    sides = {"position": [(pos, pos), (pos, none), (none, pos)], "constant": [(none, none)]}
    sides["context"] = [(cvec, cvec), (cvec, none), (none, cvec)]
    for name, pairs in sides.items():
        whole = sum(logits[a, b] for left, right in pairs for a in left for b in right)
        seen = np.where(later, np.nan, whole)
        expected = seen - np.nanmean(seen, axis=1, keepdims=True)
        np.testing.assert_allclose(panels[name].values, expected, atol=1e-10)


def test_raw_panels_are_sums_of_the_finest_constituents(opened):
    """Oracle: the 25 matrices added up by hand, the mean apart and within pos."""
    split = _split(opened("gpt2"))
    logits = split.logits_of(2)[0].numpy()
    mean, pos, ctx, resid, bias = range(5)
    apart = by_name(head_matrices(split, 2, first=0, raw=True))
    within = split.coarse({"constant": ("bias",), "pos": ("mean", "pos"), "cvec": ("ctx", "resid")})
    within = by_name(head_matrices(within, 2, first=0, raw=True))
    hidden = np.triu(np.ones((LENGTH, LENGTH), dtype=bool), 1)

    def added(queries: list[int], keys: list[int]) -> np.ndarray:
        return np.where(hidden, np.nan, sum(logits[a, b] for a in queries for b in keys))

    np.testing.assert_allclose(apart["pos-cvec"].values, added([pos], [ctx, resid]), atol=1e-12)
    np.testing.assert_allclose(within["pos-pos"].values, added([mean, pos], [mean, pos]), atol=1e-12)
    np.testing.assert_allclose(within["cvec-pos"].values, added([ctx, resid], [mean, pos]), atol=1e-12)
    every = list(range(5))
    with_bias = added([bias], every) + added([mean, pos, ctx, resid], [bias])
    np.testing.assert_allclose(within["constant"].values, with_bias, atol=1e-12)


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
