"""One head on one prompt; oracle: the model's own eager attention, hidden states and parameters by name."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests import checkpoints
from theodolite.errors import UsageError
from theodolite.models import open_model
from theodolite.sinks.prompt import LEFT_OUT
from theodolite_papers.catch_tag_release.prompt_trace import trace_prompt

LENGTH = 24
IDS = torch.randint(0, 50, (LENGTH,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {"vocab_size": 50, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
    return checkpoints.sharp_gpt2(tmp_path_factory.mktemp("prompt") / "model", **sizes)


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
            locally = torch.bincount(weights[catching].argmax(dim=1), minlength=LENGTH) >= least
            whole = [mean[k] > 0.3 and LENGTH - 1 - k >= least for k in range(LENGTH)]
            sinks = [k for k in range(LENGTH) if whole[k] or locally[k]]
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


def test_without_a_head_named_the_one_that_divides_most(model, eager):
    """Oracle: shares of queries caught, counted in the model's own eager attention; what heads write plays no part."""
    _, out = eager
    dividing = {}
    for layer in range(2):
        for head in range(2):
            trace = trace_prompt(model, IDS, layer, head)
            sinks, weights = trace.sinks.tolist(), out.attentions[layer][0, head]
            queries = [query for query in range(1, LENGTH) if query not in sinks]
            caught_by = [
                max(sinks, key=lambda key: float(weights[query, key]))
                for query in queries
                if sinks and weights[query, sinks].max() > 0.3
            ]
            pairs = sum(a != b for a in caught_by for b in caught_by) / len(queries) ** 2
            dividing[layer, head] = pairs, len(caught_by) * (len(queries) - len(caught_by))
    trace = trace_prompt(model, IDS)
    assert (trace.layer, trace.head) == max(dividing, key=lambda place: dividing[place])


def test_without_sinks_a_head_must_be_named(folder):
    flat = open_model(folder)
    with torch.no_grad():
        for block in flat.hf.transformer.h:
            block.attn.c_attn.weight.zero_()
    with pytest.raises(UsageError, match="no head has a sink on this prompt"):
        trace_prompt(flat, IDS)
    assert not len(trace_prompt(flat, IDS, 0, 0).sinks)
