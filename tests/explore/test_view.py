"""The numbers of a view; oracles: transformers' own eager attention, numpy on parameters taken by name."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import transformers

from tests.explore.conftest import PROMPT, SINKS_PROMPT, SURVEYED
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError, WorkError
from theodolite.explore.subject import prompt_ids
from theodolite.models import open_model
from theodolite.models.open import sharing_weights
from theodolite.passes.survey import survey, survey_heads
from theodolite.sinks.prompt import LEFT_OUT, read_prompt
from theodolite_papers.catch_tag_release.prompt_trace import trace_prompt

FAMILIES = ["gpt2", "llama3", "gpt_oss", "bloom", "gemma2", "bert", "qwen3"]


def eager_attention(folder, ids) -> list[np.ndarray]:
    """Of every layer (H, T, T), by transformers' own eager implementation."""
    loaded = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        out = loaded(input_ids=torch.tensor([ids]), output_attentions=True)
    return [layer[0].double().numpy() for layer in out.attentions]


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_the_models_own_and_constituents_sum_to_its_logits(family, subject, checkpoint):
    own = subject(family)
    ids = prompt_ids([own], PROMPT)
    for layer, expected in enumerate(eager_attention(checkpoint(family), ids)):
        split = own.constituents(ids, layer)
        logits = (split.logits.sum(dim=(1, 2)) + split.additive).numpy()
        cap = split.inputs.softcap
        logits = logits if cap is None else cap * np.tanh(logits / cap)
        for head, weights in enumerate(expected):
            view = own.view(ids, layer, head)
            np.testing.assert_allclose(np.nan_to_num(view.attention), weights, atol=2e-5)
            assert not (weights[np.isnan(view.attention)] > 0).any()
            if own.model.causal:
                assert np.isnan(view.attention[np.triu_indices(len(ids), 1)]).all()
            np.testing.assert_allclose(view.learned, np.clip(1 - weights.sum(1), 0, None), atol=2e-5)
            assert (view.learned > 1e-3).any() == (family == "gpt_oss")
            # A row's log-weights are its logits but for a constant.
            for row, seen in enumerate(weights > 1e-5):
                own_row, expected_row = logits[head, row, seen], np.log(weights[row, seen])
                np.testing.assert_allclose(
                    own_row - own_row.mean(), expected_row - expected_row.mean(), atol=3e-3
                )


def test_the_next_tokens_without_a_head_are_those_of_the_model_whose_head_writes_nothing(subject, checkpoint):
    """Oracle: transformers' own model, its output projection fed zeros in the head's place."""
    own, head = subject("llama3"), 1
    ids = prompt_ids([own], PROMPT)
    told = own.next_tokens(ids, 0, head)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(checkpoint("llama3")).eval()
    width = loaded.config.hidden_size // loaded.config.num_attention_heads

    def silence(module, args):
        given = args[0].clone()
        given[..., head * width : (head + 1) * width] = 0
        return (given,)

    def expected() -> torch.Tensor:
        with torch.no_grad():
            return loaded(input_ids=torch.tensor([ids])).logits[0, -1].double().softmax(-1)

    whole = expected()
    loaded.model.layers[0].self_attn.o_proj.register_forward_pre_hook(silence)
    silent = expected()
    assert list(told)[:2] == ["as it is", "without the head"]
    for column, of in (("as it is", whole), ("without the head", silent)):
        np.testing.assert_allclose(told[column].nlargest(5), of.topk(5).values, atol=1e-7)
    assert not np.allclose(told["as it is"], told["without the head"])
    assert own.model.interventions == ()


def test_a_survey_beside_the_page_is_that_of_the_model_and_shares_its_weights(opened):
    """Oracle: the survey of the model itself, while other threads read prompts with it."""
    model = opened("llama3")
    corpus = Corpus.random_tokens(model.tokenizer, SURVEYED, 6, 0)
    expected = survey_heads(model, corpus).heads
    second = sharing_weights(model)
    assert {p.data_ptr() for p in second.root.parameters()} == {p.data_ptr() for p in model.root.parameters()}
    with ThreadPoolExecutor() as threads:
        made = threads.submit(survey_heads, second, corpus)
        for _ in range(5):
            read_prompt(model, corpus.contexts[0])
        pd.testing.assert_frame_equal(made.result().heads, expected)


def test_what_a_prompt_measures(subject, checkpoint):
    own = subject("llama3")
    ids = prompt_ids([own], PROMPT)
    heads = own.measured(ids).heads
    for layer, expected in enumerate(eager_attention(checkpoint("llama3"), ids)):
        rows = heads[heads["layer"] == layer]
        for head, weights in enumerate(expected):
            entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(1).mean()
            copies = [[j for j in range(i) if ids[j] == ids[i]] for i in range(len(ids))]
            same = np.mean([weights[i, earlier].sum() for i, earlier in enumerate(copies) if earlier])
            row = rows.iloc[head]
            assert row["entropy"] == pytest.approx(entropy, abs=1e-4)
            assert row["previous_token"] == pytest.approx(np.diagonal(weights, -1).mean(), abs=1e-5)
            assert row["same_token"] == pytest.approx(same, abs=1e-5)


def test_sinks_tags_and_their_colours(sharp):
    """Oracle: numpy on the head's attention and on what it writes; groups are held by hand in tests/sinks."""
    ids = prompt_ids([sharp], SINKS_PROMPT)
    found, tested = 0, 0
    for layer, head in np.ndindex(2, 2):
        trace = trace_prompt(sharp.model, torch.tensor(ids), layer, head)
        view, tags = sharp.view(ids, layer, head), sharp.tags(ids, layer, head)
        later = len(ids) - 1 - np.arange(len(ids))
        enough = later >= min(16, len(ids) / 4)
        received = trace.attention.numpy().sum(0) / (later + 1)
        np.testing.assert_allclose(view.received[enough], received[enough], atol=1e-5)
        assert np.isnan(view.received[~enough]).all()
        for number, sink in enumerate(view.sinks):
            assert sink.caught == (view.group == number).sum()
            assert sink.received == pytest.approx(received[sink.position], abs=1e-5)
            assert sink.local == (not (enough & (received > 0.3))[sink.position])
            found += 1
        kept = view.group != LEFT_OUT
        x, names = trace.output.double().numpy()[kept], view.group[kept]
        groups = [x[names == name] for name in np.unique(names)]
        if len(groups) < 2:
            assert np.isnan(tags.explained)
            continue
        between = sum(len(g) * np.square(g.mean(0) - x.mean(0)).sum() for g in groups)
        assert tags.explained == pytest.approx(between / np.square(x - x.mean(0)).sum(), abs=1e-4)
        assert tags.chance == pytest.approx((len(groups) - 1) / (len(x) - 1))
        # A channel is a component, stretched to 0 … 255.
        scores = np.linalg.svd(x - x.mean(0), full_matrices=False)[0]
        colours = tags.colours[kept].astype(float)
        for channel in range(3):
            assert abs(np.corrcoef(colours[:, channel], scores[:, channel])[0, 1]) > 0.999
        assert (colours.min(0) == 0).all()
        assert (colours.max(0) == 255).all()
        tested += 1
    assert found
    assert tested


def test_the_survey_of_heads_is_part_of_the_whole_one(opened):
    model = opened("gpt_oss")
    corpus = Corpus.random_tokens(model.tokenizer, SURVEYED, 6, 0)
    brief, whole = survey_heads(model, corpus), survey(model, corpus)
    for column in brief.heads.columns:
        assert brief.heads[column].equals(whole.heads[column]), column
    for name, array in brief.arrays.items():
        torch.testing.assert_close(array, whole.arrays[name], rtol=0, atol=0, equal_nan=True)


def test_a_prompt_that_breaks_the_model_is_said_to(subject, checkpoint):
    broken = open_model(checkpoint("gpt2"))
    with torch.no_grad():
        broken.hf.transformer.wpe.weight[3] = torch.inf
    with pytest.raises(WorkError, match="NaN or infinite"):
        read_prompt(broken, torch.tensor(prompt_ids([subject("gpt2")], PROMPT)))


def test_tags_need_tokens_that_are_no_sinks(sharp, monkeypatch):
    ids = prompt_ids([sharp], "abcd")
    view = replace(sharp.view(ids, 0, 0), group=np.full(len(ids), LEFT_OUT))
    monkeypatch.setattr(sharp, "view", lambda *place: view)
    with pytest.raises(UsageError, match="too few tokens besides the sinks"):
        sharp.tags(ids, 0, 0)
