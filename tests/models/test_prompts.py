"""Prompts as a model reads them; oracle: the bytes of the text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenizers import processors

from tests import checkpoints
from theodolite.errors import UsageError
from theodolite.models.prompts import prompt_ids, prompt_or_shipped, shipped_prompt


def test_a_prompt_is_read_as_the_model_reads_it(opened):
    """Oracle: bytes, and the special token that this tokenizer puts in front."""
    tokenizer = checkpoints.byte_tokenizer()
    end = tokenizer.eos_token_id
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", end)]
    )
    model = replace(opened("gpt2"), tokenizer=tokenizer)
    ids = prompt_ids(model, "angle \udcff", 40, 0).tolist()
    assert ids[0] == end
    assert tokenizer.decode(ids[1:]) == "angle ?"
    assert len(prompt_ids(model, None, 30, 0)) <= 30
    with pytest.raises(UsageError, match="the prompt is 3 tokens long: give one of at least 4"):
        prompt_ids(model, "ab", 40, 0)
    with pytest.raises(UsageError, match="leave --prompt out"):
        prompt_ids(replace(model, tokenizer=None), "angle", 40, 0)


def test_the_shipped_prompt_stands_in_for_none_only(opened):
    """Its last tokens, as many as there are positions; a prompt that is asked for is never replaced or cut."""
    model = opened("gpt2")
    shipped = model.tokenizer(shipped_prompt("passage"))["input_ids"]
    assert len(shipped) > model.longest
    assert prompt_or_shipped(model, None, "passage").tolist() == shipped[-model.longest :]
    with pytest.raises(UsageError, match="the prompt is 0 tokens long: give one of at least 4"):
        prompt_or_shipped(model, "", "passage")
    with pytest.raises(UsageError, match=r"the prompt is 129 tokens long: .* has positions for 128"):
        prompt_or_shipped(model, "a" * 129, "passage")
