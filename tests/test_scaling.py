"""The cost model of docs/costs.md against what the accumulators allocate and send, and the page against the model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from benchmarks import scaling
from benchmarks.scaling import LARGE, Shape, flops_a_token, parameters, shard_bytes, state_bytes
from tests import checkpoints
from theodolite.corpus.corpus import Corpus
from theodolite.passes.packed_states import packed
from theodolite.passes.ray_survey import SHARDS
from theodolite.passes.survey_pass import SurveyPass

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "costs.md").read_text() + (DOCS / "scaling.md").read_text()
EMBEDDED = Shape(6, 4, 4, 32, 128, 384, 2048, 40, 20)
TINY = Shape(3, 4, 2, 8, 32, 48, checkpoints.VOCABULARY, 24, 9)


def a_pass(opened, shape: Shape) -> SurveyPass:
    model = scaling.open_model(device="cpu") if shape is EMBEDDED else opened("llama3")
    assert (model.layers, model.heads, model.width) == (shape.layers, shape.heads, shape.width)
    return SurveyPass(model, Corpus.random_tokens(shape.vocabulary, shape.length, shape.contexts), 0, 1)


@pytest.mark.parametrize("shape", [EMBEDDED, TINY], ids=["embedded", "llama3"])
def test_a_state_has_the_bytes_of_the_formula(shape, opened):
    """Oracle: the tensors of a fresh pass. Each part's by the accumulator that holds it."""
    state = a_pass(opened, shape).state()
    parts = state_bytes(shape)
    assert sum(parts.values()) == sum(tensor.nbytes for tensor in state.values())
    held = {name: state[name].nbytes for name in state}
    assert parts["sums by position"] == held["means.position_sum"]
    sample = ("means.context_mean", "means.context_tokens", "means.token")
    assert parts["sample"] == sum(held[name] for name in sample)
    for name, prefixes in {
        "second moments": ("residual.", "inputs."),
        "sketches": ("sketches.",),
        "outliers": ("outliers.",),
        "attention": ("attention.",),
    }.items():
        assert parts[name] == sum(count for key, count in held.items() if key.startswith(prefixes)), name


@pytest.mark.parametrize("shape", [EMBEDDED, TINY], ids=["embedded", "llama3"])
def test_a_shard_sends_at_most_the_bytes_of_the_formula(shape, opened):
    """One context of one group. What falls short are heads and dimensions that happen to have nothing but zeros."""
    part = a_pass(opened, shape)
    context = 1
    part.read(context, context + 1)
    state = part.state()
    sent = packed(state)
    kept = int(part.sample.slot[context] >= 0), int((part.sample.token_context == context).sum())
    parts = shard_bytes(shape, 1, *kept)
    assert sent["means.position_sum"][0].nbytes == parts["sums by position"]
    sample = ("means.context_mean", "means.context_tokens", "means.token")
    assert parts["sample"] == sum(sent[name][0].nbytes for name in sample)
    sketches = sum(values.nbytes for name, (values, _, _) in sent.items() if name.startswith("sketches."))
    assert sketches <= parts["sketches"] <= 1.5 * sketches
    rows = state["attention.sink_tokens"].nbytes
    everything = sum(values.nbytes for values, _, _ in sent.values()) - rows
    assert 0.8 * sum(parts.values()) <= everything <= sum(parts.values())


def test_parameters_are_those_of_the_model(opened):
    """Oracle: the tensors of a llama with grouped keys; its norms and biases are left out of the formula."""
    blocks, embeddings = parameters(TINY)
    state = opened("llama3").hf.state_dict()
    weights = {name: t.numel() for name, t in state.items() if t.ndim == 2}
    assert blocks == sum(count for name, count in weights.items() if ".layers." in name)
    assert embeddings == sum(count for name, count in weights.items() if ".layers." not in name)


def test_flops_of_the_forward_pass_are_counted(opened):
    """Oracle: PyTorch's own count of a forward pass; it counts whole attention matrices, the formula half of them."""
    from torch.utils.flop_counter import FlopCounterMode

    ids = torch.randint(checkpoints.VOCABULARY, (2, TINY.length))
    model = opened("llama3").hf
    attention = model.config._attn_implementation
    model.set_attn_implementation("eager")  # products that the counter sees on a CPU
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.model(input_ids=ids, use_cache=False)
    finally:
        model.set_attn_implementation(attention)
    ours = flops_a_token(TINY)
    expected = ids.numel() * (ours["weights"] + 2 * ours["attention"])
    # Angles of rotary positions are a product, too: T · d_h/2 · 2 flops.
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.001)


def test_the_page_has_the_numbers_of_the_formulas():
    state, shard, flops = state_bytes(LARGE), shard_bytes(LARGE, 1, 0, 2), flops_a_token(LARGE)
    for name in ("sums by position", "second moments"):
        assert f"| {name} | {state[name] / 1e9:,.0f} GB | {shard[name] / 1e9:.0f} GB |" in PAGE
    for name in ("sketches", "attention"):
        assert f"| {name} | {state[name] / 1e9:.1f} GB | {shard[name] / 1e9:.1f} GB |" in PAGE
    assert f"| sample | {state['sample'] / 1e9:.1f} GB | {shard['sample'] / 1e9:.2f} GB |" in PAGE
    assert f"| outliers | {state['outliers'] / 1e9:.2f} GB | {shard['outliers'] / 1e9:.2f} GB |" in PAGE
    whole = sum(shard.values())
    assert f"| all | {sum(state.values()) / 1e9:,.0f} GB | {whole / 1e9:.0f} GB |" in PAGE
    assert f"{SHARDS + 1} shards send {(SHARDS + 1) * whole / 1e12:.0f} TB" in PAGE
    assert f"{(SHARDS + 1) * whole / 12.5e9 / 3600:.1f} hours at 100 Gbit/s" in PAGE
    assert f"{sum(parameters(LARGE)) / 1e9:.0f} · 10⁹ parameters" in PAGE
    assert f"{2 * sum(parameters(LARGE)) / 1e9:.0f} GB in bfloat16" in PAGE
    for count in flops.values():
        assert f"{count:.3g}" in PAGE
    forward, moments = flops["weights"] + flops["attention"], flops["second moments"] + flops["sketches"]
    assert f"the moments add {moments / forward:.0%}".replace("%", " %") in PAGE
    for contexts in (LARGE.contexts, 20_000):
        tokens = contexts * LARGE.length
        assert f"{tokens * forward / scaling.FORWARD_RATE / 3600:,.0f} GPU-hours to read" in PAGE
        assert f"{tokens * moments / scaling.STATISTICS_RATE / 3600:,.0f} " in PAGE
    for variation in (0.06, 0.2, 1.1, 0.9):
        assert f"| {variation} | {scaling.contexts_needed(variation, 0.01):,} |" in PAGE
    small = dataclasses.replace(EMBEDDED, length=128, contexts=256)
    assert f"{sum(state_bytes(small).values()) / 1e6:.2f} MB" in PAGE
