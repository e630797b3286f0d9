"""Oracles: `apply_chat_template` of transformers with token ids, and texts made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from tests.checkpoints import byte_tokenizer
from theodolite.corpus.corpus import Corpus
from theodolite.corpus.documents import Columns
from theodolite.corpus.named import make_corpus, make_stream
from theodolite.errors import UsageError

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
)
TURNS = [
    {"role": "user", "content": "What is the sum of one and two, please?"},
    {"role": "assistant", "content": "Three."},
]


@pytest.fixture
def chats() -> PreTrainedTokenizerFast:
    """A tokenizer with a template whose marks are tokens of their own, and that begins every sequence with <s>."""
    tokenizer = byte_tokenizer()
    marks = ["<|user|>", "<|assistant|>", "<|end|>"]
    tokenizer.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": marks})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def written(folder: Path, rows: list[Any], suffix: str = ".jsonl") -> Path:
    path = folder / f"chats{suffix}"
    if suffix == ".parquet":
        pd.DataFrame({"messages": rows}).to_parquet(path)
    else:
        path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_context_of_a_conversation_is_what_the_template_makes_of_it(tmp_path, chats, suffix):
    whole = chats.apply_chat_template(TURNS, tokenize=True, return_dict=True)["input_ids"]
    path = written(tmp_path, [TURNS], suffix)
    corpus = Corpus.from_path(path, chats, len(whole), text_column="messages")
    assert corpus.contexts.tolist() == [whole]
    assert whole.count(chats.bos_token_id) == 1
    assert make_corpus(path, chats, len(whole), columns=Columns("messages")).sha256 == corpus.sha256
    assert make_stream(path, chats, Columns("messages")).contexts.tolist() == [whole]


def test_a_tokenizer_that_puts_nothing_before_a_text_keeps_the_template_s_first_token(tmp_path, chats):
    chats.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    whole = chats.apply_chat_template(TURNS, tokenize=True, return_dict=True)["input_ids"]
    corpus = Corpus.from_path(written(tmp_path, [TURNS]), chats, len(whole), text_column="messages")
    assert corpus.contexts.tolist() == [whole]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ([{"role": "critic", "content": "No."}], "the chat template refuses it .*unknown role critic"),
        (["Hello"], "neither text nor a list of"),
        ([{"speaker": "me", "says": "Hello"}], "neither text nor a list of"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_place(tmp_path, chats, row, says):
    with pytest.raises(UsageError, match=f"line 2: column 'messages'.*{says}"):
        Corpus.from_path(written(tmp_path, [TURNS, row]), chats, 16, text_column="messages")


def test_an_empty_conversation_is_counted_and_not_the_end(tmp_path, chats):
    """Oracle: the same file without it."""
    corpora = [
        Corpus.from_path(written(tmp_path, rows), chats, 16, text_column="messages")
        for rows in ([TURNS, TURNS], [TURNS, [], None, TURNS])
    ]
    assert corpora[0].contexts.tolist() == corpora[1].contexts.tolist()
    assert [corpus.selection for corpus in corpora] == [{}, {"rows_without_text": 2}]


def test_a_tokenizer_without_a_template_is_named_as_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the tokenizer has no chat template"):
        Corpus.from_path(written(tmp_path, [TURNS]), byte_tokenizer(), 16, text_column="messages")
