"""Tokenizers of a few words, with special tokens around every text."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPLIT = pre_tokenizers.WhitespaceSplit()


def framed(
    tokens: list[str], before: list[str], after: list[str], model: Any = models.WordLevel, split: Any = SPLIT
) -> PreTrainedTokenizerFast:
    """A tokenizer of these tokens, special ones first ([UNK], <s>), that puts some of those before and after a text."""
    tokenizer = Tokenizer(model({token: id for id, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = split
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join([*before, "$A", *after]),
        special_tokens=[(token, tokens.index(token)) for token in before + after],
    )
    tokenizer.add_special_tokens([token for token in tokens if token[0] in "[<"])
    named = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "bos_token": "<s>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{name: token for name, token in named.items() if token in tokens}
    )
