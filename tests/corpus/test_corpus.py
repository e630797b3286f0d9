"""Oracles: direct calls of the tokenizer, contexts cut by hand, `scipy.stats` for what is drawn at random."""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from tests.checkpoints import byte_tokenizer
from theodolite.corpus import corpus as module
from theodolite.corpus.corpus import Corpus
from theodolite.corpus.named import make_corpus
from theodolite.errors import UsageError

WORDS = [chr(ord("a") + index) for index in range(26)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture
def plain() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that adds nothing around a text, as GPT-2's; its end of text is the last id."""
    return byte_tokenizer()


def framed(before: list[str], after: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of letters that puts special tokens before and after."""
    tokens = [*SPECIAL, "<s>", "</s>", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({token: id for id, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    around = [(token, tokens.index(token)) for token in before + after]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join([*before, "$A", *after]), special_tokens=around
    )
    tokenizer.add_special_tokens([*SPECIAL, "<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", bos_token="<s>"
    )


def slow_bert(folder: Path) -> BertTokenizerLegacy:
    path = folder / "vocab.txt"
    path.write_text("\n".join(SPECIAL + WORDS))
    return BertTokenizerLegacy(str(path))


def ids(tokenizer: Callable, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_documents_are_cut_without_overlap_and_remainders_dropped(plain: PreTrainedTokenizerFast) -> None:
    texts = ["abcdefghijk", "0123456789"]
    corpus = Corpus.from_texts(texts, plain, 4, labels=["letters", "digits"])
    expected = [ids(plain, piece) for piece in ("abcd", "efgh", "0123", "4567")]
    assert corpus.contexts.tolist() == expected
    assert corpus.labels.tolist() == [0, 0, 1, 1]
    assert corpus.label_names == ["letters", "digits"]
    assert corpus.contexts.dtype == corpus.labels.dtype == torch.int64


def test_short_documents_are_packed_by_label_with_the_end_of_text_between(
    plain: PreTrainedTokenizerFast,
) -> None:
    texts = ["ab", "xy", "cd", "longer", "zw"]
    corpus = Corpus.from_texts(texts, plain, 5, labels=["one", "two", "one", "one", "two"])
    end = [plain.eos_token_id]
    assert corpus.contexts.tolist() == [
        ids(plain, "ab") + end + ids(plain, "cd"),
        ids(plain, "longe"),  # fills a context by itself: not packed
        ids(plain, "xy") + end + ids(plain, "zw"),
    ]
    assert [corpus.label_names[label] for label in corpus.labels] == ["one", "one", "two"]


def test_texts_without_labels_have_none(plain: PreTrainedTokenizerFast) -> None:
    corpus = Corpus.from_texts(["abcdef", "gh", "ij"], plain, 5)
    assert corpus.labels.tolist() == [-1, -1]
    assert corpus.label_names == []
    assert corpus.contexts[1].tolist() == [*ids(plain, "gh"), plain.eos_token_id, *ids(plain, "ij")]


@pytest.mark.parametrize(
    ("before", "after"), [(["[CLS]"], ["[SEP]"]), (["<s>"], []), ([], ["</s>"]), (["<s>", "[CLS]"], ["</s>"])]
)
def test_every_context_has_what_the_tokenizer_puts_around(before: list[str], after: list[str]) -> None:
    tokenizer = framed(before, after)
    letters = list("abcdefghijklmnop")
    body = 6 - len(before) - len(after)
    corpus = Corpus.from_texts([" ".join(letters)], tokenizer, 6)
    pieces = [" ".join(letters[i : i + body]) for i in range(0, len(letters) - body + 1, body)]
    assert corpus.contexts.tolist() == [tokenizer(piece)["input_ids"] for piece in pieces]


def test_slow_tokenizers_are_framed_too_and_short_texts_joined_by_the_separator(tmp_path: Path) -> None:
    tokenizer = slow_bert(tmp_path)
    corpus = Corpus.from_texts(["a b", "c d"], tokenizer, 7)
    pair = tokenizer("a b")["input_ids"] + tokenizer("c d")["input_ids"][1:]  # [CLS] a b [SEP] c d [SEP]
    assert corpus.contexts.tolist() == [pair]


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_pieces_give_the_tokens_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, plain: PreTrainedTokenizerFast, kind: str
) -> None:
    monkeypatch.setattr(module, "CHUNK", 40)
    monkeypatch.setattr(module, "BREAK_WINDOW", 20)
    random = np.random.default_rng(0)
    text = "".join(random.choice(["a", "b", " ", "\n", "  "], size=400, p=[0.4, 0.3, 0.1, 0.1, 0.1]))
    tokenizer = plain if kind == "bytes" else words_with_merges()
    corpus = Corpus.from_texts([text], tokenizer, 2)
    whole = ids(tokenizer, text)
    assert corpus.contexts.flatten().tolist() == whole[: len(whole) // 2 * 2]


def words_with_merges() -> PreTrainedTokenizerFast:
    """A byte-level BPE with merges over spaces and letters, whose words must not be cut."""
    from theodolite.corpus.documents import Document
    from theodolite.papers.training.embedded_text import Source, train_tokenizer

    text = "aab bba  ab\n ba\n\n abab bbbb aaaa  b a " * 20
    return PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer([Source("x", 1.0, (Document(text),))], 264, 0)
    )


def test_a_line_without_end_is_read_in_bounded_pieces(plain: PreTrainedTokenizerFast) -> None:
    longest = 0

    class Counting:
        all_special_ids, added_tokens_decoder, eos_token_id, sep_token_id = [0], {}, 0, None

        def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
            nonlocal longest
            longest = max(longest, len(text))
            return {"input_ids": [ord(letter) for letter in text]}

        def get_vocab(self) -> dict[str, int]:
            return {}

    text = "x" * 200_001
    corpus = Corpus.from_texts([text], Counting(), 100)
    assert corpus.contexts.shape == (2000, 100)
    assert (corpus.contexts == ord("x")).all()
    assert longest == module.CHUNK


def test_no_warning_about_long_sequences(
    plain: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    import transformers

    plain.model_max_length = 8
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        Corpus.from_texts(["a" * 100], plain, 10)
    finally:
        logger.removeHandler(caplog.handler)
        transformers.logging.set_verbosity(verbosity)
    assert not caplog.records


def test_a_smaller_number_of_contexts_is_a_seeded_sample_in_reading_order(
    plain: PreTrainedTokenizerFast,
) -> None:
    text = "".join(f"{number:03d}" for number in range(200))
    every = Corpus.from_texts([text], plain, 3).contexts.tolist()
    some = [Corpus.from_texts([text], plain, 3, contexts=20, seed=seed) for seed in (0, 0, 1)]
    places = [[every.index(row) for row in corpus.contexts.tolist()] for corpus in some]
    assert all(sorted(set(chosen)) == chosen and len(chosen) == 20 for chosen in places)
    assert places[0] == places[1] != places[2]
    assert Corpus.from_texts([text], plain, 3, contexts=10_000).contexts.tolist() == every


def test_the_sample_is_uniform() -> None:
    found = [(None, [number]) for number in range(12)]
    chosen = [int(row[0]) for seed in range(2000) for _, row in module._sample(found, 4, seed)]
    counts = np.bincount(chosen, minlength=12)
    assert scipy.stats.chisquare(counts).pvalue > 0.001


def test_the_hash_is_stable_and_sees_tokens_labels_and_length(plain: PreTrainedTokenizerFast) -> None:
    def of(text: str, label: str, length: int) -> str:
        return Corpus.from_texts([text], plain, length, labels=[label]).sha256

    tokens = ids(plain, "abcdefgh")
    written = b"length 4\n" + (1).to_bytes(8, "little") + b"x" + struct.pack("<10q", *tokens, 0, 0)
    assert of("abcdefgh", "x", 4) == hashlib.sha256(written).hexdigest()
    others = {of("abcdefgi", "x", 4), of("abcdefgh", "y", 4), of("abcdefgh", "x", 2)}
    assert len(others | {of("abcdefgh", "x", 4)}) == 4


def test_from_path_reads_files_as_labels(tmp_path: Path, plain: PreTrainedTokenizerFast) -> None:
    (tmp_path / "a.txt").write_text("abcdef")
    (tmp_path / "b.md").write_text("ghijkl")
    corpus = Corpus.from_path(tmp_path, plain, 6)
    assert corpus.contexts.tolist() == [ids(plain, "abcdef"), ids(plain, "ghijkl")]
    assert corpus.label_names == ["a.txt", "b.md"]
    assert corpus.name == str(tmp_path)


def test_half_a_surrogate_pair_becomes_a_question_mark(
    tmp_path: Path, plain: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ab\\ud800cd", "label": "\\udc00"}')
    corpus = Corpus.from_path(path, plain, 5)
    assert corpus.contexts.tolist() == [ids(plain, "ab?cd")]
    assert corpus.label_names == ["?"]


def test_a_dataset_of_wikitext_lines_has_articles_as_labels(
    tmp_path: Path, plain: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the articles' bytes cut by hand; no context holds two of them."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lines = ["", " = One = \n", "", "aaaaaaaa\n", "", " = Two = \n", "", "bbbb\n"]
    (tmp_path / "data").mkdir()
    pd.DataFrame({"text": lines}).to_parquet(tmp_path / "data" / "train.parquet")
    corpus = Corpus.from_dataset(str(tmp_path / "data"), plain, 9, 10)
    expected = [" = One = ", "\n\naaaaaaa", " = Two = "]
    assert [plain.decode(row) for row in corpus.contexts] == expected
    assert [corpus.label_names[label] for label in corpus.labels] == ["One", "One", "Two"]


def test_from_dataset_streams_a_local_folder_and_stops_early(
    tmp_path: Path, plain: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"text": f"{number:04d}", "topic": f"t{number % 2}"} for number in range(500)]
    (tmp_path / "data").mkdir()
    pd.DataFrame(rows).to_parquet(tmp_path / "data" / "train.parquet")
    read: list[str] = []
    document_of_row = module.document_of_row

    def counted(row: dict, *rest: str) -> object:
        read.append(row["text"])
        return document_of_row(row, *rest)

    monkeypatch.setattr(module, "document_of_row", counted)
    corpora = [Corpus.from_dataset(str(tmp_path / "data"), plain, 4, 5, seed=seed) for seed in (0, 1)]
    texts = [[plain.decode(row) for row in corpus.contexts] for corpus in corpora]
    assert all(set(chosen) <= {f"{number:04d}" for number in range(20)} for chosen in texts)
    assert texts[0] == sorted(texts[0]) != texts[1]
    assert [f"t{int(text) % 2}" for text in texts[0]] == [
        corpora[0].label_names[i] for i in corpora[0].labels
    ]
    assert len(read) == 40  # READ_AHEAD × 5, twice
    with pytest.raises(UsageError, match=r"no column 'body' \(it has: text, topic\)"):
        Corpus.from_dataset(str(tmp_path / "data"), plain, 4, 5, text_column="body")
    with pytest.raises(UsageError, match=r"cannot be read .*; check its name, config and split"):
        Corpus.from_dataset(str(tmp_path / "data"), plain, 4, 5, split="nowhere")


def test_a_dataset_out_of_reach_is_one_line(plain: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UsageError, match="without a network, give a folder") as error:
        make_corpus("hf:nobody/nothing", plain, 8)
    assert "\n" not in str(error.value)


def test_python_docs_are_the_topics(plain: PreTrainedTokenizerFast) -> None:
    from pydoc_data.topics import topics

    corpus = Corpus.python_docs(plain, 64, contexts=50)
    for row, label in zip(corpus.contexts, corpus.labels, strict=True):
        assert plain.decode(row).strip("\ufffd") in topics[corpus.label_names[label]]


def test_stdlib_code_is_source(plain: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    from theodolite.corpus.documents import stdlib_sources

    first = next(document for document in stdlib_sources() if len(document.text) > 2000)
    monkeypatch.setattr(module, "stdlib_sources", lambda: [first])
    corpus = make_corpus("code", plain, 32, contexts=4)
    assert corpus.label_names == [first.label]
    assert plain.decode(corpus.contexts[0]) in first.text


def test_random_tokens_are_uniform_and_never_special() -> None:
    tokenizer = framed(["[CLS]"], ["[SEP]"])
    corpus = make_corpus("random", tokenizer, 34, contexts=200, seed=3)
    body = corpus.contexts[:, 1:-1]
    letters = ids(tokenizer, " ".join(WORDS))
    counts = np.array([(body == letter).sum() for letter in letters])
    assert counts.sum() == 200 * 32
    assert scipy.stats.chisquare(counts).pvalue > 0.001
    assert set(corpus.contexts[:, 0].tolist()) == {tokenizer.cls_token_id}
    assert set(corpus.contexts[:, -1].tolist()) == {tokenizer.sep_token_id}
    again = Corpus.random_tokens(tokenizer, 34, 200, seed=3)
    assert torch.equal(again.contexts, corpus.contexts)
    assert again.sha256 == corpus.sha256
    bare = Corpus.random_tokens(7, 5, 1000)
    assert bare.contexts.unique().tolist() == list(range(7))
    assert set(bare.labels.tolist()) == {-1}


def test_make_corpus_dispatches(
    tmp_path: Path, plain: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple] = []
    monkeypatch.setattr(Corpus, "python_docs", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(Corpus, "from_dataset", lambda *arguments: asked.append(arguments))
    make_corpus(None, plain, 8)
    make_corpus("docs", plain, 8, 5, 1)
    make_corpus("hf:wikitext:wikitext-2-raw-v1:test", plain, 8, 5, 1, "body")
    make_corpus("hf:user/set", plain, 8)
    assert asked == [
        (plain, 8, None, 0),
        (plain, 8, 5, 1),
        ("wikitext", plain, 8, 5, "wikitext-2-raw-v1", "test", "body", 1),
        ("user/set", plain, 8, module.STREAMED_CONTEXTS, None, "train", "text", 0),
    ]
    (tmp_path / "docs").write_text("x")
    with pytest.raises(UsageError, match="There is no file or folder nowhere; give a path, or docs, code"):
        make_corpus("nowhere", plain, 8)
    with pytest.raises(UsageError, match="does not name a dataset"):
        make_corpus("hf:", plain, 8)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda t: Corpus.from_texts(["abc"], t, 8), "its longest text has 3; use a smaller --length"),
        (lambda t: Corpus.from_texts(["ab", "c"], t, 8), "its longest text has 4; use a smaller --length"),
        (lambda t: Corpus.from_texts(["", ""], t, 8), "holds no text"),
        (lambda t: Corpus.from_texts(["abc"], t, 1), r"\(--length\) of at least 4"),
        (lambda t: Corpus.from_texts(["abc"], t, 2, contexts=0), r"use a number \(--contexts\) above 0"),
        (lambda t: Corpus.from_texts("abc", t, 2), "give a list of texts"),
        (lambda t: Corpus.from_texts(["abc"], t, 2, labels=["x", "y"]), "1 texts and 2 labels"),
        (lambda t: Corpus.random_tokens(0, 2, 1), "vocabulary of 0"),
        (lambda t: Corpus.random_tokens(5, 2, 0), r"use a number \(--contexts\) above 0"),
        (lambda t: Corpus.from_texts(["a b c"], framed(["<s>"], ["</s>"]), 2), "use a larger --length"),
        (lambda t: Corpus.from_texts(["a b"], framed(["<s>"], []), 8), "longest text has 3;"),
    ],
)
def test_impossible_calls_are_one_line(plain: PreTrainedTokenizerFast, call: Callable, says: str) -> None:
    with pytest.raises(UsageError, match=says) as error:
        call(plain)
    assert "\n" not in str(error.value)
