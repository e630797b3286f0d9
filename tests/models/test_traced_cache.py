"""Oracle: the model itself without a cache, under a mask that a list of kept tokens, updated one at a time, gives."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from jaxtyping import TypeCheckError
from transformers import DynamicCache

from theodolite import open_model
from theodolite.errors import UsageError
from theodolite.models import TracedCache
from theodolite.sinks.exclusions import Exclusions, Rule
from tools import small_models

FAMILIES = ["gpt2", "llama3", "opt", "phi3", "qwen3", "gpt_neox", "cohere"]
SINK = 7
LENGTH = 40


def token_rule(ids):
    return ids == SINK


def text(rows=2, length=LENGTH, seed=0):
    """Random tokens, of which one in four is the sink."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, 300, (rows, length), generator=generator)
    return ids.masked_fill(torch.rand(rows, length, generator=generator) < 0.25, SINK)


def kept_lists(sinks, size, places, first):
    """For each token of one row, the tokens that are kept once it is read."""
    stay, later, held = [], [], []
    for token, is_sink in enumerate(sinks):
        held.append(token)
        if token < first or (token == 0 and is_sink and places):
            stay.append(token)
        elif is_sink:
            later.append(token)
        room = places - len(stay)
        old = stay + later[len(later) - min(room, len(later)) :]
        while len(held) > size:
            held.remove(next(other for other in held if other not in old))
        yield list(held)


def dense_mask(ids, size, places, first=0, padding=(0, 0, 0)):
    rows, length = ids.shape
    mask = torch.zeros(rows, 1, length, length, dtype=torch.bool)
    for row in range(rows):
        begin = padding[row]
        mask[row, 0, range(length), range(length)] = True
        for token, held in enumerate(kept_lists(token_rule(ids[row, begin:]).tolist(), size, places, first)):
            mask[row, 0, begin + token, [begin + other for other in held]] = True
    return mask


def read(model, cache, ids, chunks, **given):
    with torch.no_grad():
        return torch.cat(
            [
                model.hf(input_ids=part, past_key_values=cache, **given).logits
                for part in ids.split(chunks, dim=1)
            ],
            dim=1,
        )


def dense(model, ids, mask, **given):
    """Positions are given: OPT would count them by a mask of padding."""
    given = {"position_ids": torch.arange(ids.shape[1]).expand_as(ids)} | given
    with torch.no_grad():
        return model.hf(input_ids=ids, attention_mask=mask, use_cache=False, **given).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_dense_model_under_the_mask(family, opened):
    """In one pass, in chunks and token by token; of each layer no more than the size is held."""
    model, ids = opened(family), text()
    wanted = dense(model, ids, dense_mask(ids, 9, 4))
    plain = dense(model, ids, None)
    assert (wanted - plain).abs().max() > 1e-2  # the cache makes a difference at all
    for chunks in (LENGTH, [5, 1, 17, 3, 14], 1):
        cache = TracedCache(model, token_rule, 9, places=4)
        torch.testing.assert_close(read(model, cache, ids, chunks), wanted, atol=1e-5, rtol=1e-5)
        assert [layer.keys.shape[2] for layer in cache.layers] == model.layers * [9]
        assert cache.get_seq_length() == LENGTH
        held = [list(kept_lists(token_rule(row).tolist(), 9, 4, 0))[-1] for row in ids]
        assert cache.positions.tolist() == held


@pytest.mark.parametrize(
    ("size", "places", "first"), [(1, 0, 0), (2, 1, 1), (6, 5, 0), (8, 3, 2), (12, 4, 4), (64, 20, 1)]
)
def test_room_for_sinks_and_first_tokens(size, places, first, opened):
    model, ids = opened("llama3"), text(3, 30)
    cache = TracedCache(model, token_rule, size, places=places, first=first)
    wanted = dense(model, ids, dense_mask(ids, size, places, first))
    torch.testing.assert_close(read(model, cache, ids, [11, 1, 18]), wanted, atol=1e-5, rtol=1e-5)


def test_rules_of_a_trace_say_what_stays(opened):
    """Oracle: the rules, read by hand: token 20 at position 0 only, and the line break 7 only later."""
    model = opened("llama3")
    rules = Exclusions(
        (Rule("sink", 1, head=0, first=True), Rule("sink", 2, head=1, first=False, token_id=SINK))
    )
    ids = torch.tensor([[SINK, 20, SINK, 21, 22, 23, 24, 25, 26], [20, 20, 21, 22, SINK, 23, 24, 25, 26]])
    for chunks in (9, 1):
        cache = TracedCache(model, rules.tokens, 4, places=2)
        read(model, cache, ids, chunks)
        assert cache.positions.tolist() == [[0, 2, 7, 8], [0, 4, 7, 8]]


def test_padding_on_the_left_is_not_kept(opened):
    for family in ("gpt2", "llama3"):
        model, ids = opened(family), text()
        padding = (0, 13)
        mask = torch.ones_like(ids)
        mask[1, :13] = 0
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        wanted = dense(model, ids, dense_mask(ids, 9, 4, padding=padding), position_ids=positions)
        cache, found, begin = TracedCache(model, token_rule, 9, places=4), [], 0
        for width in (8, 9, 1, 22):
            part = ids[:, begin : begin + width]
            begin += width
            found.append(read(model, cache, part, width, attention_mask=mask[:, :begin]))
        seen = mask.bool()
        torch.testing.assert_close(torch.cat(found, dim=1)[seen], wanted[seen], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama3"])
def test_generate_goes_on_as_the_dense_model_would(family, opened):
    """Oracle: greedy decoding by hand, each token by a dense pass under the mask; one row is padded."""
    model, prompt = opened(family), text(2, 12)
    mask = torch.ones_like(prompt)
    mask[1, :5] = 0
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    cache = TracedCache(model, token_rule, 8, places=3)
    found = model.hf.generate(prompt, attention_mask=mask, past_key_values=cache, **options)
    ids = prompt
    for _ in range(20):
        seen = torch.cat([mask, torch.ones(2, ids.shape[1] - 12, dtype=mask.dtype)], dim=1)
        positions = (seen.cumsum(dim=1) - 1).clamp(min=0)
        logits = dense(model, ids, dense_mask(ids, 8, 3, padding=(0, 5)), position_ids=positions)
        ids = torch.cat([ids, logits[:, -1:].argmax(dim=-1)], dim=1)
    assert torch.equal(found, ids)
    assert {layer.keys.shape[2] for layer in cache.layers} == {8}


def test_with_room_for_all_nothing_changes(opened):
    """Oracle: the cache of transformers, greedy and with beams, whose rows change places."""
    model, prompt = opened("llama3"), text(2, 12)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for beams in (1, 3):
        asked = options | {"num_beams": beams, "attention_mask": torch.ones_like(prompt)}
        wanted = model.hf.generate(prompt, past_key_values=DynamicCache(), **asked)
        found = model.hf.generate(prompt, past_key_values=TracedCache(model, token_rule, 64), **asked)
        assert torch.equal(found, wanted)


def test_beams_keep_their_own_tokens(opened):
    """Oracle: each row read from its beginning again, after rows have changed places as beams do."""
    model, ids = opened("llama3"), text(3, 30)
    cache = TracedCache(model, token_rule, 6, places=3)
    read(model, cache, ids[:, :15], 15)
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    mixed = torch.cat([ids[order, :15], ids[:, 15:]], dim=1)
    found = read(model, cache, ids[:, 15:], 4)
    wanted = dense(model, mixed, dense_mask(mixed, 6, 3))[:, 15:]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    for change, rows in (
        (lambda cache: cache.batch_repeat_interleave(2), torch.tensor([0, 0, 1, 1, 2, 2])),
        (lambda cache: cache.batch_select_indices(torch.tensor([2, 1])), torch.tensor([2, 1])),
    ):
        cache = TracedCache(model, token_rule, 6, places=3)
        read(model, cache, ids[:, :15], 15)
        change(cache)
        found = read(model, cache, ids[rows, 15:], 15)
        wanted = dense(model, ids[rows], dense_mask(ids[rows], 6, 3, padding=[0] * len(rows)))[:, 15:]
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_copies_and_resets(opened):
    """Oracle: the same text read from the beginning; and the model is as it was once no cache is left."""
    model, ids = opened("llama3"), text(2, 30)
    gc.collect()
    hooks = len(model.hf._forward_pre_hooks)
    cache = TracedCache(model, token_rule, 6)
    whole = read(model, cache, ids, 30)
    cache.reset()
    read(model, cache, ids[:, :20], 20)
    other = copy.deepcopy(cache)
    for held in (cache, other):
        torch.testing.assert_close(read(model, held, ids[:, 20:], 5), whole[:, 20:], atol=1e-5, rtol=1e-5)
    del cache, other, held
    gc.collect()
    assert len(model.hf._forward_pre_hooks) == hooks


def test_eager_attention_takes_the_same_mask(opened, checkpoint):
    model, ids = open_model(checkpoint("llama3")), text()
    wanted = read(model, TracedCache(model, token_rule, 9), ids, 7)
    model.hf.set_attn_implementation("eager")
    torch.testing.assert_close(
        read(model, TracedCache(model, token_rule, 9), ids, 7), wanted, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("bert", "no causal decoder"),
        ("bloom", "bias by distance"),
        ("mistral", "do not attend to all earlier tokens"),
        ("gemma2", "do not attend to all earlier tokens"),
        ("gpt_oss", "do not attend to all earlier tokens"),
    ],
)
def test_models_that_it_cannot_serve_are_refused(family, message, opened):
    with pytest.raises(UsageError, match=message):
        TracedCache(opened(family), token_rule, 8)


def test_wrong_use_is_one_line(opened):
    model, ids = opened("llama3"), text(2, 8)
    for size, given in ((0, {}), (4, {"places": 4}), (4, {"places": 2, "first": 3}), (4, {"first": 4})):
        with pytest.raises(UsageError, match="places for sinks"):
            TracedCache(model, token_rule, size, **given)
    with pytest.raises(
        (UsageError, TypeError), match=r"open_model|OpenModel"
    ):  # where types are checked, by that
        TracedCache(model.hf, token_rule, 8)
    cache = TracedCache(model, token_rule, 4)
    with pytest.raises(UsageError, match="give the model input_ids"):
        model.hf(inputs_embeds=torch.zeros(1, 3, 32), past_key_values=cache)
    with pytest.raises(UsageError, match="pad on the left"):
        model.hf(
            input_ids=ids, attention_mask=(torch.arange(8) < 5).expand(2, 8).long(), past_key_values=cache
        )
    with pytest.raises(UsageError, match="makes its own"):
        model.hf(
            input_ids=ids, attention_mask=torch.ones(2, 1, 8, 8, dtype=torch.bool), past_key_values=cache
        )
    with pytest.raises(UsageError, match="was not told"):
        opened("qwen3").hf(input_ids=ids, past_key_values=TracedCache(model, token_rule, 4))
    cache = TracedCache(model, token_rule, 4)
    read(model, cache, ids, 8)
    with pytest.raises(UsageError, match="was not told"):
        model.hf.model(input_ids=ids, past_key_values=cache)  # as many tokens, but past what tells of them
    with pytest.raises(UsageError, match="holds 2 contexts"):
        read(model, cache, ids[:1], 8)
    with pytest.raises(UsageError, match="cannot go back"):
        cache.crop(-1)


@pytest.mark.parametrize("family", ["gpt2", "llama3"])
def test_no_more_tokens_are_read_than_there_are_positions(family, opened):
    """Oracle: the 128 positions of both; padding takes none of them, and a pass that is refused leaves no trace."""
    model, ids = opened(family), text(2, 132)
    mask = torch.ones_like(ids)
    mask[:, :4] = 0
    cache = TracedCache(model, token_rule, 9)
    for begin in range(0, 120, 40):
        part = ids[:, begin : begin + 40]
        read(model, cache, part, 40, attention_mask=mask[:, : begin + 40])
    with pytest.raises(UsageError, match=r"positions for 128 tokens, and a context would be 129 .*reset"):
        read(model, cache, torch.cat([ids[:, 120:], ids[:, :1]], dim=1), 13)
    read(model, cache, ids[:, 120:], 12, attention_mask=mask)
    assert cache.positions[:, -1].tolist() == [127, 127]
    with pytest.raises(UsageError, match="would be 129 long"):
        read(model, cache, ids[:, :1], 1)
    cache.reset()
    read(model, cache, ids[:, :128], 64)
    with pytest.raises(UsageError, match="would be 129 long"):
        model.hf.generate(ids[:, :120], past_key_values=TracedCache(model, token_rule, 9), max_new_tokens=10)


@pytest.mark.parametrize(
    "given",
    [{"sinks": [1, 2]}, {"size": 8.5}, {"size": "8"}, {"size": True}, {"places": 1.0}, {"first": None}],
)
def test_arguments_of_another_kind_are_one_line(given, opened):
    """Where types are checked, by that, but for a bool."""
    with pytest.raises((UsageError, TypeError), match=next(iter(given))) as refused:
        TracedCache(opened("llama3"), **{"sinks": token_rule, "size": 8} | given)
    assert type(refused.value) in (UsageError, TypeCheckError)


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (lambda ids: token_rule(ids).float(), r"float32 of shape \(16, 1\)"),
        (lambda ids: token_rule(ids).long(), "int64"),
        (lambda ids: token_rule(ids)[0], r"bool of shape \(1,\) for ids of shape \(16, 1\)"),
        (lambda ids: token_rule(ids).tolist(), "gave list"),
    ],
)
def test_a_function_that_gives_no_bools_is_one_line(sinks, message, opened):
    with pytest.raises(UsageError, match=message):
        read(opened("llama3"), TracedCache(opened("llama3"), sinks, 8), text(2, 8), 8)


def test_a_model_that_heeds_another_mask_is_refused(tmp_path):
    """Oracle: Doge's own pass without a cache, from which it departs with this one; GPT-Neo's windows by their name."""
    for name, message in (("doge", "heeds another mask"), ("gpt_neo", "do not attend to all earlier tokens")):
        case = next(case for case in small_models.cases() if case.name == name)
        small_models.build(case).save_pretrained(tmp_path / name)
        model = open_model(tmp_path / name)
        for _ in range(2):
            with pytest.raises(UsageError, match=message):
                TracedCache(model, token_rule, 8)
