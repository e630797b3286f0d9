"""Shares over a corpus and constituents with a run, against each other and by definition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from tests import checkpoints
from theodolite import constituents
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.logits.shares import SPLIT_CONTEXTS, sample_of
from theodolite.models import open_model
from theodolite.passes.survey import spectra, survey
from theodolite.theory.decomposition import PARTS, decompose, decompose_apart

LENGTH = 24


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.random_tokens(checkpoints.VOCABULARY, LENGTH, 12)


@pytest.fixture(scope="module")
def surveyed(opened, corpus):
    cache = {}

    def run(family):
        if family not in cache:
            cache[family] = survey(opened(family), corpus)
        return cache[family]

    return run


@pytest.mark.parametrize("family", ["gpt2", "bert", "bloom", "llama3", "qwen3", "gemma2"])
def test_shares_of_a_survey_are_those_of_its_contexts(family, opened, corpus, surveyed):
    """Oracle: the public constituents of the sampled contexts, whole matrices, by definition in numpy."""
    model, run = opened(family), surveyed(family)
    sample = sample_of(corpus.contexts, 0)
    assert len(sample) == SPLIT_CONTEXTS == run.provenance["counts"]["split_contexts"]
    assert run.provenance["constituents_refused"] == {}
    layer = 1
    split = constituents(model, sample, layer, decomposition=run)
    logits = torch.cat([split.logits.flatten(2, 3), split.additive[:, :, None]], dim=2).numpy()
    visible = split.visible.numpy()
    for head in range(model.heads):
        shares, total = np.zeros(26), 0.0
        for context in range(len(sample)):
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


def test_a_prompt_is_split_around_the_runs_mean_and_positional_basis(opened, corpus, surveyed):
    """Oracle: h − μ − pos averaged over positions 1 …, sent through LayerNorm and projection by hand."""
    model, run = opened("gpt2"), surveyed("gpt2")
    prompt = corpus.contexts[3, :15]
    split = constituents(model, prompt, 2, decomposition=run)
    with torch.no_grad():
        hidden = model.hf(input_ids=prompt[None], output_hidden_states=True).hidden_states[2].double()
    mean, pos = run.arrays["mean"][2], run.arrays["positional_basis"][2, :15].double()
    ctx = (hidden - mean - pos)[:, 1:].mean(1, keepdim=True).expand_as(hidden)
    state = {name: value.double() for name, value in model.hf.state_dict().items()}
    scale = (hidden.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
    weight = state["transformer.h.2.attn.c_attn.weight"][:, 32:64]
    for name, part in (("mean", mean.expand_as(hidden)), ("pos", pos[None]), ("ctx", ctx)):
        image = state["transformer.h.2.ln_1.weight"] * (part - part.mean(-1, keepdim=True)) * scale @ weight
        got = split.key[PARTS.index(name)]
        torch.testing.assert_close(got, image.unflatten(-1, (4, 8)).transpose(1, 2), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(split.logits.sum((1, 2)) + split.additive, split.total, rtol=1e-9, atol=1e-9)


def test_one_token_has_no_context():
    """Closed form: with position 0 alone there is nothing to average, so ctx is zero and h still adds up."""
    h = torch.randn(3, 1, 4, generator=torch.Generator().manual_seed(0)).double()
    parts = decompose_apart(h)
    assert not parts.ctx.any()
    torch.testing.assert_close(parts.mean + parts.pos + parts.cvec, h)


@pytest.mark.parametrize(
    ("ids", "layer", "decomposition", "words"),
    [
        ([[1, 2]], 0, None, "ids are a list"),
        (torch.ones(2, 4, dtype=torch.int64), "0", None, "layer a str"),
        (torch.ones(2, 4, dtype=torch.int64), 0, torch.zeros(4), "decomposition is a Tensor"),
    ],
)
def test_what_is_of_another_type_is_refused(ids, layer, decomposition, words, opened):
    with pytest.raises(UsageError, match=words):
        constituents(opened("gpt2"), ids, layer, decomposition=decomposition)


def test_a_run_that_does_not_fit_is_refused(opened, corpus, surveyed):
    run, model = surveyed("gpt2"), opened("gpt2")
    with pytest.raises(UsageError, match="the run is of another model"):
        constituents(opened("llama2"), corpus.contexts[:2], 0, decomposition=run)
    with pytest.raises(UsageError, match=f"has {LENGTH} positions and the prompt 30"):
        constituents(model, torch.zeros(30, dtype=torch.int64), 0, decomposition=run)
    with pytest.raises(UsageError, match="spectra only"):
        constituents(model, corpus.contexts[:2], 0, decomposition=spectra(model))
    with pytest.raises(UsageError, match=r"of width 16, .* of 32"):
        constituents(model, corpus.contexts[:2], 0, decomposition=decompose(torch.zeros(2, LENGTH, 16)))
    other = replace(run, provenance=run.provenance | {"model": run.provenance["model"] | {"sha256": "0"}})
    with pytest.raises(UsageError, match="the run is of another model"):
        constituents(model, corpus.contexts[:2], 0, decomposition=other)
