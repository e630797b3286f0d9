"""Attention as a model writes, by its own cached decoding, is what a corpus continued by it reads."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from tests.calls import call
from theodolite import Corpus, Run, open_model, trace_sinks, view_head
from theodolite.errors import UsageError, WorkError
from theodolite.models import continued
from theodolite.sinks.prompt import head_view, read_prompt

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 90, "max_position_embeddings": 64}
LENGTH, WRITTEN = 12, 16
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 16}


def writer(config: transformers.PreTrainedConfig, cache: str | None = None) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    for parameter in model.parameters():
        parameter.data *= 3  # else attention is uniform
    # What a checkpoint may ask for, and greedy decoding does not do.
    model.generation_config.update(cache_implementation=cache, do_sample=True, repetition_penalty=5.0)
    model.generation_config.update(eos_token_id=[*range(0, 90, 3)], pad_token_id=0)
    return model


@pytest.mark.parametrize(
    ("config", "cache"),
    [
        (transformers.LlamaConfig(**SIZES), None),
        (transformers.LlamaConfig(**SIZES), "static"),
        (transformers.MistralConfig(**SIZES, sliding_window=8), None),
        (transformers.Gemma2Config(**SIZES, head_dim=8, sliding_window=8), "static"),
    ],
    ids=["full", "static cache", "sliding window", "sliding and full windows in a static cache"],
)
def test_attention_while_it_writes_is_that_of_the_finished_text(config, cache):
    """Oracle: `output_attentions` of transformers, in every step of its own greedy decoding."""
    hf = writer(config, cache)
    model = open_model(hf)
    prompts = Corpus.random_tokens(90, LENGTH, 3)
    corpus = continued(model, prompts, WRITTEN, batch=2)
    assert corpus.selection["written_from"] == LENGTH
    assert torch.equal(corpus.contexts[:, :LENGTH], prompts.contexts)
    hf.generation_config = transformers.GenerationConfig(cache_implementation=cache)
    ids = prompts.contexts[2:]
    steps = hf.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=WRITTEN,
        output_attentions=True,
        return_dict_in_generate=True,
    )
    assert torch.equal(corpus.contexts[2], steps.sequences[0])
    read = read_prompt(model, corpus.contexts[2])
    for layer in range(2):
        window = (
            None
            if model.hf.config.model_type == "gemma2" and layer
            else getattr(config, "sliding_window", None)
        )
        weights = model.attention(ids, layer, [3, 0, 1, 2], generate=WRITTEN)[0].roll(-1, dims=0)
        for head in range(4):
            rows = torch.from_numpy(head_view(read, layer, head).attention).nan_to_num(0.0)
            torch.testing.assert_close(weights[head], rows.to(weights), rtol=0, atol=1e-12)
            for number, attentions in enumerate(steps.attentions[1:]):
                query = LENGTH + number
                seen = query + 1 if window is None else min(window, query + 1)
                row = attentions[layer][0, head, 0]
                own = row[row.nonzero().flatten()][-seen:]  # behind them a static cache is empty
                torch.testing.assert_close(rows[query, query + 1 - seen : query + 1], own, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "albert", "t5", "gpt_oss"])
def test_attention_of_padded_and_packed_rows_is_that_of_each_context(family, opened):
    """Oracle: eager attention of transformers, context by context; ALBERT runs one module in every layer."""
    model = opened(family)
    contexts = torch.randint(1, 60, (3, 9), generator=torch.Generator().manual_seed(0))
    rows = torch.zeros(2, 18, dtype=torch.int64)
    mask, positions = torch.zeros(2, 18), torch.zeros(2, 18, dtype=torch.int64)
    rows[0], mask[0], positions[0] = contexts[:2].flatten(), 1, torch.arange(18) % 9
    rows[1, 5:14], mask[1, 5:14], positions[1, 5:14] = contexts[2], 1, torch.arange(9)
    hf = copy.deepcopy(model.hf)
    hf.set_attn_implementation("eager")
    more = {"decoder_input_ids": contexts} if family == "t5" else {}
    with torch.no_grad():
        own = hf(input_ids=contexts, output_attentions=True, **more)
    expected = own.decoder_attentions if family == "t5" else own.attentions
    for layer in model.attending:
        weights = model.attention(rows, layer, attention_mask=mask, position_ids=positions)
        torch.testing.assert_close(weights, expected[layer].to(weights), rtol=0, atol=1e-5)
        assert torch.equal(model.attention(contexts, layer, 1), model.attention(contexts, layer)[:, [1]])


def test_attention_says_what_it_cannot_give(opened):
    model = opened("gpt2")
    ids = torch.ones(1, 8, dtype=torch.int64)
    for given, said in (
        ({"layer": 9}, "layer 9 does not exist"),
        ({"layer": 0, "heads": [99]}, "head 99 does not exist"),
        ({"layer": 0, "attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1, 1, 1]])}, "has a hole"),
        ({"layer": 0, "generate": -1}, "give 1 or more"),
        ({"layer": 0, "generate": 2.5}, "generate is 2.5"),
        ({"layer": "0"}, "layer is '0'"),
        ({"layer": 0, "ids": "a text"}, "token ids are str"),
        ({"layer": 0, "attention_mask": -1e9 * torch.ones(1, 8)}, "other numbers than 0"),
        ({"layer": 0, "attention_mask": [1, 1]}, "has shape"),
        ({"layer": 0, "ids": ids * 10**6}, "token id 1000000"),
        ({"layer": 0, "ids": ids.repeat(1, 900)}, "are longer than the"),
    ):
        with pytest.raises(UsageError, match=said):
            model.attention(**({"ids": ids} | given))


def test_a_head_is_shown_on_what_the_model_writes():
    model = open_model(writer(transformers.LlamaConfig(**SIZES)))
    prompt = Corpus.random_tokens(90, LENGTH, 1)
    figure = view_head(model, prompt.contexts[0], 0, 0, generate=4)
    whole = view_head(model, continued(model, prompt, 4).contexts[0], 0, 0)
    assert figure.written == 4
    assert "The last 4 tokens the model wrote." in str(figure.figure)
    assert (figure.view.attention[-1] == whole.view.attention[-1]).all()


def test_what_cannot_write_is_refused_by_name(opened):
    corpus = Corpus.random_tokens(90, LENGTH, 2)
    for family in ("bert", "t5"):
        with pytest.raises(UsageError, match=rf"{family} predicts no next token, so it writes none"):
            continued(opened(family), corpus, 4)
    model = open_model(writer(transformers.LlamaConfig(**SIZES)))
    with pytest.raises(UsageError, match=r"12 tokens and 60 .* the 64 .*: give a shorter --length"):
        continued(model, corpus, 60)
    ragged = Corpus.from_ids(corpus.contexts, attention_mask=torch.ones(2, LENGTH).tril(8))
    with pytest.raises(UsageError, match="give those of one length"):
        continued(model, ragged, 4)
    longrope = open_model(writer(transformers.LlamaConfig(**SIZES, rope_parameters=LONGROPE)))
    with pytest.raises(WorkError, match=r"differ by .* from those of the finished text read at once"):
        continued(longrope, corpus, WRITTEN)


def test_a_trace_reads_what_was_written_and_says_so(text, tmp_path):
    """Oracle: the trace of the same contexts, continued in Python."""
    options = ("--corpus", text, "--contexts", 3, "--length", 16, "--generate", 5, "--out", tmp_path / "run")
    _, printed, _ = call("trace", *options)
    run, model = Run.load(tmp_path / "run"), open_model()
    corpus = Corpus.from_path(text, model.tokenizer, 16, 3)
    expected = trace_sinks(model, continued(model, corpus, 5))
    described = run.provenance["corpus"]
    assert (described["length"], described["written_from"]) == (21, 16)
    assert described["sha256"] == expected.provenance["corpus"]["sha256"]
    assert run.traces.equals(expected.traces)
    assert "positions 16 to 20" in printed
