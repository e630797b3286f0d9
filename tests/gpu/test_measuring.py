"""Survey, trace, perplexity and the explorer's view on a GPU, against the same weights in float64 on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from tests import checkpoints, planted
from tests.gpu.conftest import TOLERANCE, assert_columns_near, assert_near, bfloat16_copy, random_corpus
from theodolite.evaluate.perplexity import perplexity
from theodolite.explore.subject import Subject, prompt_ids
from theodolite.models import OpenModel, open_model
from theodolite.passes.survey import survey, survey_heads
from theodolite.sinks.trace import trace_sinks

pytestmark = pytest.mark.gpu

FAMILIES = ("gpt2", "bert", "llama3", "mistral", "gemma2", "qwen3", "bloom")


@pytest.fixture(scope="module")
def opened_on(checkpoint, device):
    """opened_on(family) → the model on the device under test, in float32."""

    def model(family: str) -> OpenModel:
        there = open_model(checkpoint(family), device=device)
        assert there.device == device
        return there

    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_survey_in_float32_is_that_of_the_cpu(family, opened_on, checkpoint, device):
    """Oracle: float64 on the CPU."""
    corpus = random_corpus(checkpoints.VOCABULARY)
    run = survey(opened_on(family), corpus, batch=5)
    assert run.provenance["device"] == device.type
    expected = survey(open_model(checkpoint(family), device="cpu", dtype="float64"), corpus, batch=5)
    assert_near(run, expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("family", ["gpt2", "llama3"])
def test_a_survey_in_bfloat16_is_that_of_the_cpu(family, checkpoint, device, tmp_path):
    """Oracle: the rounded weights in float64 on the CPU; columns that a flip of one token's rank does not move."""
    folder = bfloat16_copy(checkpoint(family), tmp_path / "half")
    corpus = random_corpus(checkpoints.VOCABULARY)
    model = open_model(folder, device=device)
    assert model.hf.dtype == torch.bfloat16
    run = survey(model, corpus)
    expected = survey(open_model(folder, device="cpu", dtype="float64"), corpus)
    for table, columns in (
        ("heads", ["layer", "head", "entropy", "previous_token", "trace", "frobenius_squared"]),
        ("layers", ["layer", "norm", "cosine_previous", "rank_collapse"]),
    ):
        ours, theirs = getattr(run, table), getattr(expected, table)
        assert_columns_near(ours[columns], theirs[columns], TOLERANCE[torch.bfloat16], table)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_planted_sinks_are_traced_as_on_the_cpu(family, device, tmp_path):
    """Oracle: the sinks that are planted, and the float64 trace of the CPU."""
    folder, ids = planted.write(family, tmp_path / family), planted.contexts(8)
    run = trace_sinks(open_model(folder, device=device, dtype="float32"), ids)
    assert run.provenance["device"] == device.type
    expected = trace_sinks(open_model(folder, device="cpu", dtype="float64"), ids)
    assert {(row.layer, row.head) for row in run.traces.itertuples()} == {sink[:2] for sink in planted.SINKS}
    assert_near(run, expected, TOLERANCE[torch.float32], ("traces", "heads"))


@pytest.mark.parametrize("family", ["gpt2", "llama3", "gemma2"])
def test_perplexity_is_the_loss_of_transformers_on_the_cpu(family, opened_on, checkpoint):
    corpus = random_corpus(checkpoints.VOCABULARY)
    measured = perplexity(opened_on(family), corpus, batch=5)
    model = open_model(checkpoint(family), device="cpu", dtype="float64").hf
    with torch.no_grad():
        expected = [model(input_ids=ids[None], labels=ids[None]).loss.item() for ids in corpus.contexts]
    np.testing.assert_allclose(measured.losses, expected, rtol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "llama3", "gpt_oss"])
def test_the_explorers_view_is_the_eager_attention_of_the_cpu(family, opened_on, checkpoint):
    model = opened_on(family)
    subject = Subject(family, model, survey_heads(model, random_corpus(checkpoints.VOCABULARY, 32, 6)))
    ids = prompt_ids([subject], "the cat sat on the mat")
    eager = transformers.AutoModel.from_pretrained(checkpoint(family), attn_implementation="eager").eval()
    with torch.no_grad():
        attentions = eager(input_ids=torch.tensor([ids]), output_attentions=True).attentions
    for layer, weights in enumerate(attentions):
        split = subject.constituents(ids, layer)
        assert split is not None
        assert split.logits.isfinite().all()
        for head in range(model.heads):
            view = subject.view(ids, layer, head)
            np.testing.assert_allclose(np.nan_to_num(view.attention), weights[0, head].numpy(), atol=1e-4)
