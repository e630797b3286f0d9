"""What tokens are called. Oracle: the text that was typed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests import checkpoints
from tests.passes.test_end_tokens import word_piece
from theodolite import open_model
from theodolite.errors import UsageError
from theodolite.models.texts import prompt_ids, prompt_or_shipped, shipped_prompt, token_texts


def test_parts_of_a_character_are_shown_as_the_vocabulary_has_them():
    model = open_model()
    ids = torch.tensor(model.tokenizer("is 😀")["input_ids"])
    parts = model.tokenizer.convert_ids_to_tokens(ids.tolist())
    assert token_texts(model, ids) == ["<|endoftext|>", "is", " ", *parts[3:]]


def sentence_piece() -> PreTrainedTokenizerFast:
    """As Llama 2's: ▁ where a word begins, bytes for what is unknown."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*["▁", "a", "▁a", "s", "▁as", "▁ga", "me"]]
    numbers = {piece: number for number, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁a", "s")]
    tokenizer = Tokenizer(models.BPE(numbers, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


PIECES = {
    word_piece: "[CLS] as express ##ed through gael ##ic game ##s [SEP]",
    sentence_piece: "<s> ▁as ▁ga me s ▁a <0xC3> <0xA9>",
}
SHOWN = {
    word_piece: ["[CLS]", " as", " express", "ed", " through", " gael", "ic", " game", "s", "[SEP]"],
    sentence_piece: ["<s>", " as", " ga", "me", "s", " a", "<0xC3>", "<0xA9>"],
}


@pytest.mark.parametrize("kind", PIECES)
def test_words_stand_apart_and_their_pieces_together(opened, kind):
    """Oracle: the words that the marks of both kinds of vocabularies stand for, by hand."""
    model = replace(opened("gpt2"), tokenizer=kind())
    ids = torch.tensor(model.tokenizer.convert_tokens_to_ids(PIECES[kind].split()))
    assert token_texts(model, ids) == SHOWN[kind]


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
