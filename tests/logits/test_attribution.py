"""Planted heads: what carries a pattern is known, and attribution must find it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from theodolite import constituents
from theodolite.errors import UsageError
from theodolite.logits.attribution import PATTERNS, PatternPass
from theodolite.measure.attribution import ATTRIBUTED, COLUMNS, attribution_table
from theodolite.measure.constituents import DISJOINT
from theodolite.models import open_model
from theodolite.passes.survey import spectra
from theodolite.system.progress import Progress
from theodolite.theory.decomposition import PARTS, decompose, decompose_apart

TOKENS = POSITIONS = 40

WHOLE = (*DISJOINT, "additive")


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A GPT-2 of one layer: head 0 attends to the position before, head 1 to equal tokens.

    Position t is e_t and token v is e_{40+v}, so that what a head reads of either is known from its weights.
    """
    width = TOKENS + POSITIONS
    config = GPT2Config(
        vocab_size=TOKENS,
        n_positions=POSITIONS,
        n_embd=width,
        n_layer=1,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)
    half, strength = width // 2, 8.0
    weight = torch.zeros(width, 3 * width)
    for t in range(POSITIONS):
        if t:
            weight[t, t - 1] = strength  # the query of position t asks for t − 1
        weight[t, width + t] = 1.0  # the key of position t says t
        weight[POSITIONS + t, half + t] = strength  # the query of a token asks for it
        weight[POSITIONS + t, width + half + t] = 1.0
    with torch.no_grad():
        model.transformer.wpe.weight.copy_(torch.eye(POSITIONS, width))
        model.transformer.wte.weight.copy_(torch.eye(TOKENS, width).roll(POSITIONS, dims=1))
        model.transformer.h[0].attn.c_attn.weight.copy_(weight)
        model.transformer.h[0].attn.c_attn.bias.zero_()
    folder = tmp_path_factory.mktemp("planted")
    model.save_pretrained(folder)
    return open_model(folder)


def attributed(model, length, mean, pos):
    """The state of a `PatternPass`, its table, and why layers were refused."""
    patterns = PatternPass(model, length, 0, lambda layer: (mean[:, layer], pos[:, layer]))
    patterns.run(Progress(patterns.total))
    return patterns.state(), attribution_table(patterns.state()), patterns.notes["refused"]


@pytest.fixture(scope="module")
def table(planted):
    """With the exact mean and pos of what enters the block: those of all token sequences."""
    positions, tokens = torch.eye(80, dtype=torch.float64).split(40)
    middle = positions[1:].mean(0)
    mean, pos = middle + tokens.mean(0), positions - middle
    _, table, refused = attributed(planted, POSITIONS, mean.expand(2, 2, -1), pos.expand(2, 2, -1, -1))
    assert not refused
    return table


def _row(table, head: int, pattern: str, group: str):
    chosen = table[(table["head"] == head) & (table["pattern"] == pattern) & (table["group"] == group)]
    assert len(chosen) == 1
    return chosen.iloc[0]


@pytest.mark.parametrize(
    ("head", "pattern", "carrier", "other", "least"),
    [(0, "previous", "pos-pos", "cvec-cvec", 0.9), (1, "same", "cvec-cvec", "pos-pos", 0.3)],
)
def test_a_head_is_carried_by_what_it_reads(table, head, pattern, carrier, other, least):
    """Known from the weights. Head 1 sees the token itself, too, so that half is the most."""
    row, not_read = (_row(table, head, pattern, group) for group in (carrier, other))
    assert row["score"] > least
    assert row["only"] > 0.95 * row["score"]
    assert row["without"] == pytest.approx(row["uniform"], abs=0.01)
    assert row["share"] > 0.95
    assert not_read["without"] == pytest.approx(row["score"], abs=0.02)
    assert not_read["only"] == pytest.approx(row["uniform"], abs=0.01)


def test_every_head_has_a_row_for_each_group(table):
    assert list(table.columns) == COLUMNS
    for _, rows in table.groupby(["layer", "head", "pattern"]):
        assert tuple(rows["group"]) == ATTRIBUTED
        assert rows["share"][rows["group"].isin(WHOLE)].sum() == pytest.approx(1)
    bias = table[table["group"] == "additive"]
    assert (bias["share"] == 0).all()  # GPT-2 has none, so that it carries nothing
    assert bias["without"].to_numpy() == pytest.approx(bias["score"].to_numpy())
    assert bias["only"].to_numpy() == pytest.approx(bias["uniform"].to_numpy())


@pytest.mark.parametrize("family", ["gpt2", "bert", "gpt_oss", "qwen3"])
def test_every_family_is_attributed(family, opened):
    """Seven groups of at least three heads for each of three patterns, or all heads; shares sum to 1."""
    model = opened(family)
    mean = torch.zeros(2, 4, 32)
    pos = 0.1 * torch.randn(2, 4, 32, 32, generator=torch.Generator().manual_seed(0))
    state, table, refused = attributed(model, 32, mean, pos)
    assert state["scores"].shape == (3, 3, 4)
    assert not refused
    assert set(table["pattern"]) == set(PATTERNS)
    grouped = table[table["group"].isin(WHOLE)].groupby(["layer", "head", "pattern"])["share"].sum()
    assert len(grouped) >= 9
    assert grouped.to_numpy() == pytest.approx(1, abs=1e-4)


def test_where_nothing_can_be_repeated_there_are_no_rows(opened):
    model = opened("gpt2")
    state, table, refused = attributed(model, 3, torch.zeros(2, 4, 32), torch.zeros(2, 4, 3, 32))
    assert state["scores"].isnan().all()
    assert table.empty
    assert list(table.columns) == COLUMNS
    assert not refused


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
        ([["a"]], 0, None, "token ids are list: give whole numbers"),
        (torch.ones(2, 4, dtype=torch.int64), "0", None, "layer is '0': give a whole number"),
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
