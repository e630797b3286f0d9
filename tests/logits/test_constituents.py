"""Shares over a corpus and constituents with a run, against each other and by definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from theodolite import constituents
from theodolite.errors import UsageError
from theodolite.passes.survey import spectra
from theodolite.theory.decomposition import PARTS, decompose, decompose_apart

LENGTH = 24


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
