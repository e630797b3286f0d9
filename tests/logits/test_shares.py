"""Shares of logits over a sample of a corpus, against whole matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tests.logits.conftest import LENGTH
from theodolite import Corpus, constituents
from theodolite.logits.shares import SPLIT_CONTEXTS, sample_of
from theodolite.measure.constituents import Constituents
from theodolite.models import open_model
from theodolite.passes.survey import survey
from theodolite.theory.decomposition import PARTS, Decomposition


@pytest.mark.parametrize("family", ["gpt2", "bloom", "gemma2", "qwen3"])
def test_shares_of_a_survey_are_those_of_its_contexts(family, opened, corpus, surveyed):
    """Oracle: the public constituents of the sampled contexts, whole matrices, by definition in numpy; their queries
    around the means of the next group of contexts, their keys around those of the one after.
    """
    model, run, layer = opened(family), surveyed(family), 1
    chosen = sample_of(corpus, 0)
    assert len(chosen) == SPLIT_CONTEXTS == run.provenance["counts"]["split_contexts"]
    assert run.provenance["constituents_refused"] == {}
    group = torch.arange(len(corpus.contexts)) * 8 // len(corpus.contexts)
    assert sorted(group[chosen].tolist()) == list(range(8))
    with torch.no_grad():
        hidden = model.hf(corpus.contexts, output_hidden_states=True).hidden_states[layer].double()

    def split_around(context: int, of: int) -> Constituents:
        position = hidden[group == of % 8].mean(0)
        mean = position[1:].mean(0)
        nothing = torch.zeros(2, *position.shape, dtype=torch.float64)
        around = Decomposition(mean, position - mean, nothing[:1, 0], nothing)
        return constituents(model, corpus.contexts[context], layer, decomposition=around)

    sides = [[split_around(c, int(group[c]) + step) for c in chosen.tolist()] for step in (1, 2)]
    query = torch.cat([split.query for split in sides[0]], dim=1)
    key = torch.cat([split.key for split in sides[1]], dim=1)
    first = sides[0][0]
    logits = torch.einsum("achid,bchjd->chabij", query, key) * first.inputs.scaling
    additive = torch.stack([split.additive for split in sides[0]])
    logits = torch.cat([logits.flatten(2, 3), additive[:, :, None]], dim=2).numpy()
    visible = torch.stack([split.visible for split in sides[0]]).numpy()
    for head in range(model.heads):
        shares, total = np.zeros(26), 0.0
        for context in range(len(chosen)):
            for i in range(1, LENGTH):
                seen = visible[context, head, i].copy()
                seen[0] = False
                row = logits[context, head, :, i][:, seen]
                if row.size:
                    row = row - row.mean(-1, keepdims=True)
                    shares += row @ row.sum(0)
                    total += float((row.sum(0) ** 2).sum())
        rows = run.constituents[(run.constituents["layer"] == layer) & (run.constituents["head"] == head)]
        assert list(zip(rows["query"], rows["key"], strict=True)) == [
            *((a, b) for a in PARTS for b in PARTS),
            ("additive", ""),
        ]
        np.testing.assert_allclose(rows["share"], shares / total, atol=2e-5)
        assert (rows["standard_error"] >= 0).all()
        row = run.heads[(run.heads["layer"] == layer) & (run.heads["head"] == head)].iloc[0]
        share = (shares / total)[:25].reshape(5, 5)
        none = [0, 4]  # mean and bias
        position = share[1, 1] + share[1, none].sum() + share[none, 1].sum()
        context = share[2:4, 2:4].sum() + share[2:4][:, none].sum() + share[none][:, 2:4].sum()
        assert row["share_position"] == pytest.approx(position, abs=2e-5)
        assert row["share_context"] == pytest.approx(context, abs=2e-5)
        assert row["share_cross"] == pytest.approx(share[1, 2:4].sum() + share[2:4, 1].sum(), abs=2e-5)
        assert row["share_additive"] == pytest.approx((shares / total)[25], abs=2e-5)
    columns = ["share_position", "share_context", "share_cross", "share_constant", "share_additive"]
    np.testing.assert_allclose(run.heads[columns].sum(axis=1), 1, atol=1e-5)


def test_a_layer_that_cannot_be_split_is_noted_and_the_survey_goes_on(checkpoint, corpus):
    model = open_model(checkpoint("gpt2"))
    model.hf.transformer.h[1].ln_1 = nn.Sequential(model.hf.transformer.h[1].ln_1, nn.Tanh())
    run = survey(model, corpus)
    refused = run.provenance["constituents_refused"]
    assert list(refused) == ["1"]
    assert "layer 1 (transformer.h.1.attn): its logits cannot be split" in refused["1"]
    assert set(run.constituents["layer"]) == {0, 2}
    assert 1 not in set(run.attribution["layer"])
    assert run.heads[run.heads["layer"] == 1]["share_position"].isna().all()
    assert run.heads[run.heads["layer"] != 1]["share_position"].notna().all()


def test_a_sample_is_drawn_by_its_seed_and_stays_in_order():
    ids = torch.arange(40)[:, None].repeat(1, LENGTH)
    contexts = Corpus.from_ids(ids)
    sample = sample_of(contexts, 3)
    assert len(sample) == SPLIT_CONTEXTS
    assert sample.diff().gt(0).all()
    assert torch.equal(sample, sample_of(contexts, 3))
    assert not torch.equal(sample, sample_of(contexts, 4))
    assert len(sample_of(Corpus.from_ids(ids[:3]), 0)) == 3
