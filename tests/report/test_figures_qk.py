"""Oracles: the model's own eager attention, sums written out over the 25 finest constituents, numpy on the panels."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests import checkpoints
from tests.report.synthetic import HOSTILE
from theodolite.attention.inputs import AttentionInputs
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.logits.constituents import constituents
from theodolite.measure.constituents import Constituents
from theodolite.report.drawing import qk as figures_qk
from theodolite.report.drawing.qk import (
    constituent_panels,
    positional_tiles,
    qk_panels,
    shares_by_layer,
)
from theodolite.report.payload import figure_json
from theodolite.theory.decomposition import PARTS

CONTEXTS, LENGTH = 4, 20
SUMMED = {
    False: {"position", "pos-cvec", "cvec-pos", "context", "constant", "additive"},
    True: {"pos-pos", "pos-cvec", "cvec-pos", "cvec-cvec", "constant", "additive"},
}


def _split(model, layer: int = 1) -> Constituents:
    ids = Corpus.random_tokens(model.tokenizer, LENGTH, CONTEXTS, 3).contexts
    return constituents(model, ids, layer)


def _random(length: int, *, heads: int = 1, bias: bool = False) -> Constituents:
    """Parts and inputs that fit together, without a model."""
    generator = torch.Generator().manual_seed(0)
    query, key = (
        torch.randn(5, 1, heads, length, 3, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    more = torch.randn(1, heads, length, length, generator=generator) if bias else None
    inputs = AttentionInputs(query.sum(0), key.sum(0), key.sum(0), 0.5, causal=True, bias=more)
    return Constituents(PARTS, query, key, inputs, 0.0)


def _by_name(panels: list[figures_qk.Panel]) -> dict[str, figures_qk.Panel]:
    return {panel.name: panel for panel in panels}


@pytest.mark.parametrize("family", ["gpt2", "bert", "bloom", "llama3", "qwen3", "mistral"])
def test_panels_are_the_models_own_attention_and_logits(opened, family):
    """Oracle: eager attention of the model; its logarithm, less the row's mean, is what the softmax saw."""
    model = opened(family)
    eager = checkpoints.build(family)
    eager.set_attn_implementation("eager")
    ids = Corpus.random_tokens(model.tokenizer, LENGTH, CONTEXTS, 3).contexts
    with torch.inference_mode():
        attention = eager(ids, output_attentions=True).attentions[1][2, 3].double().numpy()[1:, 1:]
    panels = _by_name(constituent_panels(_split(model), 3, context=2))
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
    panels = _by_name(constituent_panels(split, 0, context=1, raw=raw))
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
    panels = _by_name(constituent_panels(split, 2))
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
    apart = _by_name(constituent_panels(split, 2, first=0, raw=True))
    within = split.coarse({"constant": ("bias",), "pos": ("mean", "pos"), "cvec": ("ctx", "resid")})
    within = _by_name(constituent_panels(within, 2, first=0, raw=True))
    hidden = np.triu(np.ones((LENGTH, LENGTH), dtype=bool), 1)

    def added(queries: list[int], keys: list[int]) -> np.ndarray:
        return np.where(hidden, np.nan, sum(logits[a, b] for a in queries for b in keys))

    np.testing.assert_allclose(apart["pos-cvec"].values, added([pos], [ctx, resid]), atol=1e-12)
    np.testing.assert_allclose(within["pos-pos"].values, added([mean, pos], [mean, pos]), atol=1e-12)
    np.testing.assert_allclose(within["cvec-pos"].values, added([ctx, resid], [mean, pos]), atol=1e-12)
    every = list(range(5))
    with_bias = added([bias], every) + added([mean, pos, ctx, resid], [bias])
    np.testing.assert_allclose(within["constant"].values, with_bias, atol=1e-12)


def test_at_most_128_positions_from_the_first_one_are_drawn_and_the_page_stays_small():
    """Oracle: the logits by einsum; two floats in three bytes each (base64) as the bound of the page."""
    split = _random(512, bias=True)
    panels = _by_name(constituent_panels(split, 0, first=380, raw=True))
    total = split.logits_of(0).sum((0, 1)) + split.additive[0]
    assert panels["QK"].values.shape == (128, 128)
    np.testing.assert_allclose(panels["QK"].values[100, :101], total[480, 380:481], rtol=1e-6)
    end = constituent_panels(split, 0, first=500)
    assert end[0].values.shape == (12, 12)
    figure = qk_panels(split, 0, [f"token {i}" for i in range(512)], first=380)
    assert len(figure.data) == 8
    assert figure.data[0].x[0] == "380 token 380"
    assert len(figure.layout.xaxis.ticktext) <= figures_qk.MOST_LABELS
    assert len(figure_json(figure, {})) < 8 * 128**2 * 4 * 4 / 3 + 60_000


def test_each_context_has_its_own_bias_and_mask():
    """Oracle: the sum of q·k and the context's own bias; keys hidden in one context only."""
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(5, 2, 1, 8, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    bias = torch.randn(2, 1, 8, 8, generator=generator)
    mask = torch.ones(2, 1, 8, 8, dtype=torch.bool)
    mask[1, ..., 5] = False
    inputs = AttentionInputs(query.sum(0), key.sum(0), key.sum(0), 0.5, causal=False, mask=mask, bias=bias)
    panels = _by_name(
        constituent_panels(Constituents(PARTS, query, key, inputs, 0.0), 0, context=1, first=0, raw=True)
    )
    whole = 0.5 * query.sum(0)[1, 0] @ key.sum(0)[1, 0].T + bias[1, 0]
    np.testing.assert_allclose(panels["additive"].values[:, :5], bias[1, 0, :, :5], rtol=1e-6)
    np.testing.assert_allclose(panels["QK"].values[:, :5], whole[:, :5], rtol=1e-6)
    assert np.isnan(panels["QK"].values[:, 5]).all()


def test_centred_panels_share_one_scale_and_raw_ones_have_their_own():
    """Oracle: numpy percentiles and extremes of the panels."""
    split = _random(16)
    panels = [panel.values for panel in constituent_panels(split, 0) if panel.name != "attention"]
    every = np.concatenate([values[np.isfinite(values)] for values in panels])
    figure = qk_panels(split, 0, ["a"] * 16)
    limit = np.percentile(np.abs(every), 99.5)
    assert figure.layout.coloraxis.cmax == pytest.approx(limit)
    assert figure.layout.coloraxis.cmin == pytest.approx(-limit)
    assert {trace.coloraxis for trace in figure.data} == {"coloraxis", "coloraxis2"}
    raw = qk_panels(split, 0, ["a"] * 16, raw=True)
    first = _by_name(constituent_panels(split, 0, raw=True))["pos-pos"].values
    assert raw.data[0].zmin == pytest.approx(np.nanmin(first))
    assert raw.data[0].zmax == pytest.approx(np.nanmax(first))


def test_rows_are_centred_over_what_they_see_and_constant_rows_vanish():
    """Oracle: a constant added to every key's logit of a query leaves the centred panel as it was."""
    split = _random(12)
    before = _by_name(constituent_panels(split, 0))
    query, key = split.query.clone(), split.key.clone()
    key[:, ..., 0] = 0.0
    key[0, ..., 0] = 7.0  # of the mean: the same for every key
    inputs = replace(split.inputs, query=query.sum(0), key=key.sum(0))
    shifted = _by_name(constituent_panels(Constituents(PARTS, query, key, inputs, 0.0), 0))
    plain = replace(split.inputs, query=query.sum(0), key=key.sum(0) - torch.tensor([7.0, 0, 0]))
    key[0, ..., 0] = 0.0
    without = _by_name(constituent_panels(Constituents(PARTS, query, key, plain, 0.0), 0))
    np.testing.assert_allclose(shifted["QK"].values, without["QK"].values, atol=1e-9)
    np.testing.assert_allclose(shifted["attention"].values, without["attention"].values, atol=1e-12)
    sums = np.nansum(before["QK"].values, axis=1)
    np.testing.assert_allclose(sums, 0, atol=1e-9)


def test_tokens_of_any_text_are_shown_and_do_nothing():
    """Oracle: no tag and no control character is left in what Plotly is given."""
    tokens = [*HOSTILE, "an ordinary token of many letters"]
    figure = qk_panels(_random(len(tokens)), 0, tokens, first=0)
    labels = [*figure.data[0].x, *figure.layout.xaxis.ticktext]
    assert "&lt;script&gt;" in labels[0]
    for label in labels:
        assert "<" not in label
        assert all(ord(character) >= 32 for character in label)
        assert "\u202e" not in label
    assert figure.layout.xaxis.ticktext[-1] == "an ordin…"
    assert len(set(figure.data[0].x)) == len(tokens)


def test_what_does_not_exist_is_said():
    split = _random(9)
    for changed, words in (
        ({"head": 1}, "head 1 does not exist"),
        ({"context": 2}, "context 2 does not exist"),
        ({"first": 9}, "position 9 does not exist"),
        ({"tokens": ["a"]}, "1 tokens for a context of 9"),
    ):
        with pytest.raises(UsageError, match=words):
            qk_panels(**{"split": split, "head": 0, "tokens": ["a"] * 9} | changed)
    with pytest.raises(UsageError, match="pos, cvec and constant"):
        constituent_panels(split.coarse({"all": PARTS}), 0)


def test_tiles_are_centred_heads_beside_each_other():
    """Oracle: numpy; a row's constant is gone, the largest magnitude of each head is 1, between tiles is nothing."""
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(7, 5, 5)) * np.arange(1, 8)[:, None, None]
    picture = positional_tiles(logits)
    np.testing.assert_allclose(positional_tiles(logits + np.arange(5)[:, None]), picture, atol=1e-12)
    assert np.isfinite(picture).sum() == 7 * 25
    top = figures_qk.TILE_HEADROOM
    tile = picture[top : top + 5, :5]
    centred = logits[0] - logits[0].mean(1, keepdims=True)
    inside = np.abs(tile) < 1
    scale = np.percentile(np.abs(centred), 99.5)
    np.testing.assert_allclose(tile[inside], (centred / scale)[inside])
    assert np.nanmax(np.abs(picture)) == 1


def test_lines_hold_the_numbers_given():
    """Oracle: the arrays themselves."""
    bars = shares_by_layer(np.arange(2.0), {"pos-pos": np.array([0.4, math.nan])})
    assert bars.data[0].y[0] == pytest.approx(0.4)
    assert math.isnan(bars.data[0].y[1])
