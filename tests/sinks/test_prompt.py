"""One head on one prompt; oracle: the model's own eager attention, hidden states and parameters by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from tests.report.drawn import drawn, finite
from theodolite.errors import UsageError
from theodolite.models import open_model
from theodolite.models.prompts import shipped_prompt
from theodolite.papers.catch_tag_release.prompt_sinks import show_prompt
from theodolite.report.drawing import prompt as figures_prompt
from theodolite.report.outcome import Outcome
from theodolite.sinks.prompt import LEFT_OUT, trace_prompt

LENGTH = 24
IDS = torch.randint(0, 50, (LENGTH,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A GPT-2 whose queries look far more sharply than random ones, so that it has sinks."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight.mul_(40)
    path = tmp_path_factory.mktemp("prompt") / "model"
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return open_model(folder)


@pytest.fixture(scope="module")
def eager(folder):
    loaded = transformers.GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return loaded, loaded(IDS[None], output_attentions=True, output_hidden_states=True)


@torch.no_grad()
def test_it_is_the_models_own(model, eager):
    reference, out = eager
    for layer in range(2):
        for head in range(2):
            trace = trace_prompt(model, IDS, layer, head)
            weights = out.attentions[layer][0, head].double()
            torch.testing.assert_close(trace.attention, weights, atol=1e-5, rtol=0)
            attention = reference.transformer.h[layer].attn
            normed = reference.transformer.h[layer].ln_1(out.hidden_states[layer])[0]
            value = attention.c_attn(normed)[:, 32:].double()[:, head * 8 : head * 8 + 8]
            w_o = attention.c_proj.weight[head * 8 : head * 8 + 8].double()
            torch.testing.assert_close(trace.value, value @ w_o, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(trace.output, weights @ value @ w_o, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(
                trace.streams[layer], out.hidden_states[layer][0].double(), atol=1e-4, rtol=1e-4
            )
            received = out.attentions[layer][0].double().sum(dim=1) / (LENGTH - torch.arange(LENGTH))
            most = received.amax(dim=0)
            most[LENGTH - LENGTH // 4 :] = 0  # too few queries see them
            torch.testing.assert_close(trace.received[layer], most, atol=1e-5, rtol=0)


def test_groups_by_hand(model, eager):
    _, out = eager
    found = 0
    for layer in range(2):
        for head in range(2):
            trace = trace_prompt(model, IDS, layer, head)
            weights = out.attentions[layer][0, head]
            mean = weights.sum(dim=0) / (LENGTH - torch.arange(LENGTH))
            least = LENGTH // 4
            catching = [q for q in range(LENGTH) if weights[q].max() > 0.3 and int(weights[q].argmax()) != q]
            of_a_stretch = torch.bincount(weights[catching].argmax(dim=1), minlength=LENGTH) >= least
            whole = [mean[k] > 0.3 and LENGTH - 1 - k >= least for k in range(LENGTH)]
            sinks = [k for k in range(LENGTH) if whole[k] or of_a_stretch[k]]
            assert trace.sinks.tolist() == sinks
            found += len(sinks)
            for query in range(LENGTH):
                if query == 0 or query in sinks:
                    assert trace.group[query] == LEFT_OUT
                    continue
                best = max(sinks, key=lambda k: float(weights[query, k]), default=None)
                caught = best is not None and weights[query, best] > 0.3
                assert trace.group[query] == (sinks.index(best) if caught else -1)
    assert found


def shown(trace, tokens, **options):
    outcome = Outcome()
    show_prompt(outcome, trace, tokens, **options)
    return outcome


def test_without_a_head_named_the_one_that_tags_most(model):
    trace = trace_prompt(model, IDS)
    assert len(trace.sinks)
    outcome = shown(trace, [str(token) for token in IDS.tolist()], chosen=True)
    # That it has a sink is why it was chosen, and no verdict.
    assert [verdict.claim.partition(" ")[0] for verdict in outcome.verdicts] == ["Tokens", "The"]
    assert "chosen because" in outcome.readings[0].here
    named = shown(trace, [str(token) for token in IDS.tolist()])
    assert named.verdicts[0].answer == "holds"
    assert len(named.readings) == len(outcome.readings) - 1
    assert list(outcome.tables["places"]["place"])[1] == "output of the head"
    assert len(outcome.exhibits) == 6


def test_the_figures_of_a_head_show_its_trace(model):
    """Oracle: the trace itself; a heat map has every number of it, or those of the largest dimensions."""
    trace = trace_prompt(model, IDS)
    outcome = shown(trace, [str(token) for token in IDS.tolist()], chosen=True)
    figures = {exhibit.key: exhibit.figure for exhibit in outcome.exhibits}
    visible = np.tri(len(IDS), dtype=bool)
    np.testing.assert_allclose(drawn(figures["attention"], "z"), finite(trace.attention[visible]), rtol=1e-6)
    np.testing.assert_allclose(drawn(figures["received"], "z"), finite(trace.received), rtol=1e-6)
    for key, vectors in (("output", trace.output), ("values", trace.value)):
        largest = vectors.abs().amax(0).topk(min(figures_prompt.DIMENSIONS, vectors.shape[1])).indices
        np.testing.assert_allclose(drawn(figures[key], "z"), finite(vectors[:, largest]), rtol=1e-6)
    places = outcome.tables["places"]["place"]
    assert np.asarray(figures["colours"].data[0].z).shape == (len(places), len(IDS), 3)
    assert len(drawn(figures["clusters"])) == int((trace.group != LEFT_OUT).sum())


def test_a_head_without_sinks_is_drawn_and_judged(model, folder):
    flat = open_model(folder)
    with torch.no_grad():
        for block in flat.hf.transformer.h:
            block.attn.c_attn.weight.zero_()
    with pytest.raises(UsageError, match="no head has a sink on this prompt"):
        trace_prompt(flat, IDS)
    outcome = shown(trace_prompt(flat, IDS, 0, 0), [str(token) for token in IDS.tolist()])
    assert [verdict.answer for verdict in outcome.verdicts] == [
        "fails",
        "not testable here",
        "not testable here",
    ]


def test_refusals(model):
    with pytest.raises(UsageError, match="layer 9 does not exist"):
        trace_prompt(model, IDS, 9, 0)
    with pytest.raises(UsageError, match="head 7 does not exist"):
        trace_prompt(model, IDS, 0, 7)
    with pytest.raises(UsageError, match="longer than the 32"):
        trace_prompt(model, torch.zeros(40, dtype=torch.int64), 0, 0)


@pytest.mark.parametrize("name", ["few-shot", "chain-of-thought", "step-by-step", "passage", "inference"])
def test_prompts_are_shipped(name):
    assert len(shipped_prompt(name)) > 100
