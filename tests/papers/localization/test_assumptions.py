"""Oracles: the released model's own weights and logits, with numpy; a survey's verdicts by their numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from scipy.stats import norm, spearmanr

from theodolite import Corpus, survey
from theodolite.models import open_model
from theodolite_papers import EXPERIMENTS, Study
from theodolite_papers.localization.head_behaviour import STEPS, last_logits, of_layer

LENGTH = 24


@pytest.fixture(scope="module")
def read(checkpoint, tmp_path_factory):
    """A model whose logits spread widely enough that heads differ."""
    folder = tmp_path_factory.mktemp("sharp")
    sharp = transformers.GPT2LMHeadModel.from_pretrained(checkpoint("gpt2"))
    with torch.no_grad():
        for block in sharp.transformer.h:
            block.attn.c_attn.weight.mul_(25)
    sharp.save_pretrained(folder)
    model = open_model(folder, device="cpu")
    return folder, model, torch.randint(5, 60, (8, LENGTH), generator=torch.Generator().manual_seed(0))


def test_each_step_is_its_definition(read):
    folder, model, ids = read
    released = transformers.GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager")
    block, heads = released.transformer.h[1], released.config.n_head
    seen = []
    block.attn.c_attn.register_forward_hook(lambda _m, args, out: seen.extend((args[0], out)))
    with torch.no_grad():
        released(ids)
    x, projected = (one.double().numpy() for one in seen)
    query, key, _ = (part.reshape(8, LENGTH, heads, -1) for part in np.split(projected, 3, axis=-1))
    scaling = query.shape[-1] ** -0.5
    logits = np.einsum("chx,cthx->cht", query[:, -1], key) * scaling

    def between(sd, keys=LENGTH, mean=0.0):
        return norm.cdf((keys - 1 - mean) / sd) - norm.cdf((-1 - mean) / sd)

    rows = x[:, 1:].reshape(-1, x.shape[-1])
    sigma = np.cov(rows.T, bias=True)
    weights, bias = (block.attn.c_attn.weight, block.attn.c_attn.bias)
    w_q, w_k, _ = np.split(weights.detach().double().numpy(), 3, axis=1)
    b_q = np.split(bias.detach().double().numpy(), 3)[0]
    expected = {name: np.empty(heads) for name in ("draws", "mean", "query", "later")}
    for head in range(heads):
        part = slice(head * query.shape[-1], (head + 1) * query.shape[-1])
        q, k = w_q[:, part], w_k[:, part]
        mean = rows.mean(axis=0) @ q + b_q[part]
        moment, keys = q.T @ sigma @ q, k.T @ sigma @ k
        expected["draws"][head] = between(np.sqrt((moment * keys).sum()) * scaling)
        expected["mean"][head] = between(np.sqrt(((moment + np.outer(mean, mean)) * keys).sum()) * scaling)
        expected["query"][head] = between(logits[:, head].std(axis=1)).mean()
        expected["later"][head] = between(logits[:, head, 1:].std(axis=1), LENGTH - 1).mean()
    found = of_layer(model, 1, last_logits(model, Corpus.from_ids(ids)))
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], np.tile(values[:, None], LENGTH), rtol=1e-4)
    centred = logits - logits.mean(axis=-1, keepdims=True)
    by_position = between(centred.std(axis=0), mean=centred.mean(axis=0))
    np.testing.assert_allclose(found["position"], by_position, rtol=1e-4, atol=1e-6)


def test_correlations_are_those_of_the_table(read):
    """Oracle: SciPy."""
    _, model, ids = read
    corpus = Corpus.from_ids(ids.repeat(2, 1)[:, :16])
    run = survey(model, corpus)
    outcome = Study(run, model, corpus).outcome(EXPERIMENTS["localization/assumptions"])
    table, steps = outcome.tables["heads"], outcome.tables["steps"].set_index("step")
    assert len(outcome.verdicts) == len(STEPS)
    for name, step in STEPS.items():
        assert steps.loc[step, "rank_correlation"] == pytest.approx(
            spearmanr(table[name], table["measured"]).statistic
        )
    np.testing.assert_array_equal(table["used"], run.heads["propagation_independent"])
