"""Oracles: direct calls of the tokenizer, contexts cut by hand, `scipy.stats` for what is drawn at random."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from tokenizers import Regex, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from tests import tokenizers
from tests.checkpoints import byte_tokenizer
from theodolite.corpus import corpus as module
from theodolite.corpus import cutting, documents
from theodolite.corpus.corpus import Corpus
from theodolite.corpus.documents import TABLES, Columns
from theodolite.corpus.named import make_corpus, make_stream
from theodolite.corpus.sampling import Choice, choose
from theodolite.errors import UsageError

WORDS = [chr(ord("a") + index) for index in range(26)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture
def plain() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that adds nothing around a text, as GPT-2's; its end of text is the last id."""
    return byte_tokenizer()


def framed(before: list[str], after: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of letters that puts special tokens before and after."""
    return tokenizers.framed([*SPECIAL, "<s>", "</s>", *WORDS], before, after)


def ids(tokenizer: Callable, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture
def data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[dict[str, Any]]], str]:
    """data_set(rows) → the name of a folder that `datasets` reads."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def write(rows: list[dict[str, Any]]) -> str:
        (tmp_path / "data").mkdir(exist_ok=True)
        pd.DataFrame(rows).to_parquet(tmp_path / "data" / "train.parquet")
        return f"hf:{tmp_path / 'data'}"

    return write


@pytest.fixture
def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the rows that are read of a data set, one after the other."""
    read: list[int] = []
    document_of_row = documents.document_of_row
    monkeypatch.setattr(
        documents, "document_of_row", lambda *of: (read.append(of[-1]), document_of_row(*of))[1]
    )
    return read


def test_documents_are_cut_without_overlap_and_remainders_dropped(plain: PreTrainedTokenizerFast) -> None:
    texts = ["abcdefghijk", "0123456789"]
    corpus = Corpus.from_texts(texts, plain, 4, labels=["letters", "digits"])
    expected = [ids(plain, piece) for piece in ("abcd", "efgh", "0123", "4567")]
    assert corpus.contexts.tolist() == expected
    assert corpus.labels.tolist() == [0, 0, 1, 1]
    assert corpus.label_names == ["letters", "digits"]
    assert corpus.contexts.dtype == corpus.labels.dtype == torch.int64


def test_short_documents_are_packed_by_label_with_the_end_of_text_between(plain):
    texts = ["ab", "xy", "cd", "longer", "zw"]
    corpus = Corpus.from_texts(texts, plain, 5, labels=["one", "two", "one", "one", "two"])
    end = [plain.eos_token_id]
    assert corpus.contexts.tolist() == [
        ids(plain, "ab") + end + ids(plain, "cd"),
        ids(plain, "longe"),  # fills a context by itself: not packed
        ids(plain, "xy") + end + ids(plain, "zw"),
    ]
    assert [corpus.label_names[label] for label in corpus.labels] == ["one", "one", "two"]
    without = Corpus.from_texts(["abcdef", "gh", "ij"], plain, 5)
    assert (without.labels.tolist(), without.label_names) == ([-1, -1], [])
    assert without.contexts[1].tolist() == ids(plain, "gh") + end + ids(plain, "ij")


TEMPLATE = {"before": ["[CLS]"], "after": ["[SEP]"]}
LOWER, BYTES = normalizers.Lowercase(), [f"0x{byte:02X}" for byte in range(256)]


@pytest.mark.parametrize(
    ("words", "normalizer", "text"),
    [
        (list("ACGT"), None, "ACGTTGCAACGT"),  # without a token for what it does not know
        (list("mkvl"), LOWER, "mkvlMKVLmkvl"),
        (BYTES, None, BYTES[65] * 12),
        ([str(number) for number in range(500, 600)], None, "501 577 502 599 503 555"),
    ],
    ids=["nucleotides", "lower case", "bytes", "ids"],
)
@pytest.mark.parametrize("unknown", [True, False], ids=["unknown", "dropped"])
@pytest.mark.parametrize(
    "frame", [TEMPLATE, TEMPLATE | {"before": []}, {"before": ["[CLS]"] * 2, "after": []}]
)
def test_vocabularies_without_letters_are_framed_by_their_own_template(
    words, normalizer, text, unknown, frame
):
    """Oracle: the template itself; a tokenizer that drops what it does not know, or refuses it, has no "a"."""
    special = ["[UNK]", "[CLS]", "[SEP]"]
    split = pre_tokenizers.Split(Regex("|".join(words)), "removed", invert=True)
    tokenizer = tokenizers.framed(special + words, **frame, split=split)
    if not unknown:
        vocabulary = {token: id for id, token in enumerate(special + words)}
        tokenizer.backend_tokenizer.model = models.WordLevel(vocabulary)
    if normalizer:
        tokenizer.backend_tokenizer.normalizer = normalizer
    body = 6 - len(frame["before"]) - len(frame["after"])
    corpus = Corpus.from_texts([text], tokenizer, 6)
    before, after = (tokenizer.convert_tokens_to_ids(frame[end]) for end in ("before", "after"))
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(plain) >= 6
    pieces = [plain[begin : begin + body] for begin in range(0, len(plain) - body + 1, body)]
    assert corpus.contexts.tolist() == [[*before, *piece, *after] for piece in pieces]


def test_slow_tokenizers_are_framed_too_and_short_texts_joined_by_the_separator(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(SPECIAL + WORDS))
    tokenizer = BertTokenizerLegacy(str(tmp_path / "vocab.txt"))
    corpus = Corpus.from_texts(["a b", "c d"], tokenizer, 7)
    pair = tokenizer("a b")["input_ids"] + tokenizer("c d")["input_ids"][1:]  # [CLS] a b [SEP] c d [SEP]
    assert corpus.contexts.tolist() == [pair]


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_pieces_give_the_tokens_of_the_whole(monkeypatch, plain, kind):
    monkeypatch.setattr(cutting, "CHUNK", 40)
    monkeypatch.setattr(cutting, "BREAK_WINDOW", 20)
    random = np.random.default_rng(0)
    text = "".join(random.choice(["a", "b", " ", "\n", "  "], size=400, p=[0.4, 0.3, 0.1, 0.1, 0.1]))
    tokenizer = plain if kind == "bytes" else words_with_merges()
    corpus = Corpus.from_texts([text], tokenizer, 4)
    whole = ids(tokenizer, text)
    assert corpus.contexts.flatten().tolist() == whole[: len(whole) // 4 * 4]


def words_with_merges() -> PreTrainedTokenizerFast:
    """A byte-level BPE with merges over spaces and letters, whose words must not be cut."""
    from theodolite_papers.training.tasks import byte_pair_tokenizer

    text = "aab bba  ab\n ba\n\n abab bbbb aaaa  b a " * 20
    return PreTrainedTokenizerFast(tokenizer_object=byte_pair_tokenizer([text], 264))


def test_a_smaller_number_of_contexts_is_a_seeded_sample_in_reading_order(plain):
    text = "".join(f"{number:04d}" for number in range(200))
    every = Corpus.from_texts([text], plain, 4).contexts.tolist()
    some = [Corpus.from_texts([text], plain, 4, contexts=20, seed=seed) for seed in (0, 0, 1)]
    places = [[every.index(row) for row in corpus.contexts.tolist()] for corpus in some]
    assert all(sorted(set(chosen)) == chosen and len(chosen) == 20 for chosen in places)
    assert places[0] == places[1] != places[2]
    assert Corpus.from_texts([text], plain, 4, contexts=10_000).contexts.tolist() == every


def test_the_hash_is_stable_and_sees_tokens_labels_and_length(plain: PreTrainedTokenizerFast) -> None:
    def of(text: str, label: str, length: int) -> str:
        return Corpus.from_texts([text], plain, length, labels=[label]).sha256

    tokens = ids(plain, "abcdefgh")
    written = b"length 4\n" + (1).to_bytes(8, "little") + b"x" + struct.pack("<10q", *tokens, 0, 0)
    assert of("abcdefgh", "x", 4) == hashlib.sha256(written).hexdigest()
    others = {of("abcdefgi", "x", 4), of("abcdefgh", "y", 4), of("abcdefgh", "x", 8)}
    assert len(others | {of("abcdefgh", "x", 4)}) == 4


def test_half_a_surrogate_pair_becomes_a_question_mark(tmp_path, plain):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ab\\ud800cd", "label": "\\udc00"}')
    corpus = Corpus.from_path(path, plain, 5)
    assert corpus.contexts.tolist() == [ids(plain, "ab?cd")]
    assert corpus.label_names == ["?"]


def test_a_dataset_of_wikitext_lines_has_articles_as_labels(plain, data_set) -> None:
    """Oracle: the articles' bytes cut by hand; no context holds two of them."""
    lines = ["", " = One = \n", "", "aaaaaaaa\n", "", " = Two = \n", "", "bbbb\n"]
    corpus = Corpus.from_path(data_set([{"text": line} for line in lines]), plain, 9, 10)
    expected = [" = One = ", "\n\naaaaaaa", " = Two = "]
    assert [plain.decode(row) for row in corpus.contexts] == expected
    assert [corpus.label_names[label] for label in corpus.labels] == ["One", "One", "Two"]


def test_a_local_folder_is_streamed_and_stops_early(plain, data_set, rows_read) -> None:
    data = data_set([{"text": f"{number:04d}", "topic": f"t{number % 2}"} for number in range(500)])
    corpora = [Corpus.from_path(data, plain, 4, 5, seed=seed) for seed in (0, 1)]
    texts = [[plain.decode(row) for row in corpus.contexts] for corpus in corpora]
    assert all(set(chosen) <= {f"{number:04d}" for number in range(20)} for chosen in texts)
    assert texts[0] == sorted(texts[0]) != texts[1]
    assert [f"t{int(text) % 2}" for text in texts[0]] == [
        corpora[0].label_names[i] for i in corpora[0].labels
    ]
    assert len(rows_read) == 40  # READ_AHEAD × 5, twice
    with pytest.raises(UsageError, match=r"no column 'body' \(it has: text, topic\)"):
        Corpus.from_path(data, plain, 4, 5, text_column="body")
    with pytest.raises(UsageError, match=r"cannot be read .*; without a network, give a folder"):
        Corpus.from_path(f"{data}::nowhere", plain, 4, 5)


def test_python_docs_are_the_topics(plain: PreTrainedTokenizerFast) -> None:
    from pydoc_data.topics import topics

    corpus = Corpus.python_docs(plain, 64, contexts=50)
    for row, label in zip(corpus.contexts, corpus.labels, strict=True):
        assert plain.decode(row).strip("\ufffd") in topics[corpus.label_names[label]]


def test_random_tokens_are_uniform_and_never_special() -> None:
    tokenizer = framed(["[CLS]"], ["[SEP]"])
    corpus = make_corpus("random", tokenizer, 34, Choice(200, 3))
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


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda t: Corpus.from_texts(["abc"], t, 8), "its longest text has 3; use a smaller --length"),
        (lambda t: Corpus.from_texts(["ab", "c"], t, 8), "its longest text has 4; use a smaller --length"),
        (lambda t: Corpus.from_texts(["", ""], t, 8), "holds no text"),
        (lambda t: Corpus.from_texts(["abc"], t, 4, contexts=0), r"use a number \(--contexts\) above 0"),
        (lambda t: Corpus.from_texts("abc", t, 4), "give a list of texts"),
        (lambda t: Corpus.from_texts(["abc"], t, 4, labels=["x", "y"]), "1 texts and 2 labels"),
        (lambda t: Corpus.random_tokens(5, 4, 0), r"use a number \(--contexts\) above 0"),
        (lambda t: Corpus.from_texts(["a b c"], framed(["<s>"] * 3, ["</s>"]), 4), "use a larger --length"),
        (lambda t: Corpus.from_texts(["a b"], framed(["<s>"], []), 8), "longest text has 3;"),
        (
            lambda t: Corpus.from_texts(["abcdefgh"], t, 4, per_label=1),
            "no labels: leave out --per-label, or",
        ),
        (lambda t: make_corpus("hf:nobody/nothing", t, 8), "without a network, give a folder"),
        (lambda t: make_corpus("hf:", t, 8), "does not name a dataset"),
        (lambda t: make_corpus("nowhere", t, 8), "no file or folder nowhere; give a path, docs, held-out"),
    ],
)
def test_impossible_calls_are_one_line(plain: PreTrainedTokenizerFast, call: Callable, says: str) -> None:
    with pytest.raises(UsageError, match=says) as error:
        call(plain)
    assert "\n" not in str(error.value)


# Contexts by label.


def labelled_rows(path: Path) -> Path:
    """Three labels in a row's `kind` and another in its `label`: 5, 3 and 1 contexts of four letters."""
    table = [("a", "abcdabcdabcdabcdabcd"), ("b", "bcdebcde"), ("c", "cdef"), ("b", "bcdexx")]
    path.write_text(
        "".join(f'{{"text": "{text}", "kind": "{kind}", "label": "z"}}\n' for kind, text in table)
    )
    return path


def test_as_many_contexts_of_each_label(tmp_path: Path, plain: PreTrainedTokenizerFast) -> None:
    """Oracle: counts by hand. A label with fewer is left out, and said to be."""
    path = labelled_rows(tmp_path / "t.jsonl")
    corpus = Corpus.from_path(path, plain, 4, label_by="column:kind", per_label=2)
    assert corpus.label_names == ["a", "b"]
    assert corpus.labels.tolist() == [0, 0, 1, 1]
    assert [plain.decode(row)[0] for row in corpus.contexts] == ["a", "a", "b", "b"]
    assert corpus.selection == {
        "label_by": "column:kind",
        "labels_are": "column kind",
        "per_label": 2,
        "labels_too_short": 1,
        "labels_not_drawn": 0,
    }
    one = Corpus.from_path(path, plain, 4, contexts=2, label_by="column:kind", per_label=1)
    assert sorted(one.labels.tolist()) == [0, 1]
    assert one.selection["labels_not_drawn"] == 1


def test_rows_are_documents_with_a_label_each(tmp_path: Path, plain: PreTrainedTokenizerFast) -> None:
    """Short rows are not packed: each would belong to two labels."""
    path = labelled_rows(tmp_path / "t.jsonl")
    corpus = Corpus.from_path(path, plain, 4, label_by="row")
    assert [corpus.label_names[label] for label in corpus.labels] == [
        *["row 1"] * 5,
        *["row 2"] * 2,
        "row 3",
        "row 4",
    ]
    balanced = Corpus.from_path(tmp_path, plain, 4, label_by="row", per_label=2)
    assert balanced.label_names == ["t.jsonl row 1", "t.jsonl row 2"]
    assert balanced.selection == {
        "label_by": "row",
        "labels_are": "rows",
        "per_label": 2,
        "labels_too_short": 2,
        "labels_not_drawn": 0,
    }
    assert Corpus.from_path(path, plain, 5, label_by="row").label_names == ["row 1", "row 2", "row 4"]


def test_a_sample_of_labels_and_of_their_contexts_is_uniform() -> None:
    """Oracle: each of 4 labels with 3 contexts is drawn with its contexts as often as the others."""
    found = [(label, 3 * number + index) for number, label in enumerate("abcd") for index in range(3)]
    for rows in (False, True):
        samples = (choose([*found, ("e", 99)], Choice(4, seed, 2, rows)) for seed in range(1500))
        counts = np.bincount([item for sample in samples for item in sample[1]], minlength=12)
        assert counts.sum() == 6000
        assert scipy.stats.chisquare(counts).pvalue > 0.001


def test_a_stream_is_read_until_enough_labels_are_complete(plain, data_set, rows_read) -> None:
    """Oracle: rows of two contexts, one label each: 4 labels a wanted one are complete after as many rows."""
    data = data_set([{"text": f"{number:08d}"} for number in range(500)])
    corpus = Corpus.from_path(data, plain, 4, 6, label_by="row", per_label=2)
    assert corpus.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert rows_read == list(range(1, 13))
    data_set([{"text": f"{number:04d}", "topic": "x" if number < 300 else "y"} for number in range(500)])
    corpus = Corpus.from_path(data, plain, 4, 10, per_label=5)
    assert corpus.label_names == ["x", "y"]  # the second only begins after 30 times the contexts asked for


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"per_label": 10},
            "no label has 10 contexts: 'z' has the most, 9; use a smaller --per",
        ),
        ({"per_label": 0}, r"use a number \(--per-label\) above 0"),
        ({"per_label": 3, "contexts": 2}, "--contexts 2 is fewer than --per-label 3"),
        (
            {"label_by": "column:nix"},
            r"no column 'nix' \(it has: text, kind, label\); choose with --label-by column:NAME",
        ),
        ({"label_by": "kind"}, "labels by 'kind': give --label-by file, folder, row, column:NAME"),
    ],
)
def test_labels_that_cannot_be_had_are_one_line(tmp_path, plain, options, says):
    path = labelled_rows(tmp_path / "t.jsonl")
    pd.read_json(path, lines=True).to_parquet(tmp_path / "t.parquet")
    for table in (path, tmp_path / "t.parquet"):
        with pytest.raises(UsageError, match=says):
            Corpus.from_path(table, plain, 4, **options)


@pytest.mark.parametrize("read", [lambda *args: make_corpus(*args[:2], 8, columns=args[2]), make_stream])
def test_a_text_column_of_what_is_no_table_is_refused(tmp_path: Path, plain, read) -> None:
    column = Columns("body")
    (tmp_path / "a.txt").write_text("some text that is long enough")
    says = re.escape(f"holds no table ({' '.join(TABLES)}): leave out --")
    with pytest.raises(UsageError, match=f"{says}text-column"):
        read(tmp_path / "a.txt", plain, column)
    (tmp_path / "rows.jsonl").write_text('{"body": "some text that is long enough"}')
    assert read(tmp_path, plain, column).contexts.shape[1] >= 8  # in a folder it is for the tables
    with pytest.raises(UsageError, match=f"{says}label-by column:x"):
        make_corpus(tmp_path / "a.txt", plain, 8, columns=Columns(label_by="column:x"))
    for name in ("docs", "held-out", "code"):
        with pytest.raises(UsageError, match=f"{name} is no table: leave out --text-column"):
            read(name, plain, column)


def test_a_long_text_is_read_until_there_is_enough(plain, monkeypatch):
    """Oracle: a text of just the rows that may be read gives the same contexts."""
    monkeypatch.setattr(cutting, "READ_TOKENS", 400)
    rows = [f"{number:06d} " * 4 for number in range(100)]
    read: list[int] = []

    def texts(count):
        for number, row in enumerate(rows[:count]):
            read.append(number)
            yield row

    def corpus(count, contexts, **more):
        monkeypatch.setattr(module, "read_path", lambda *_: (module.Document(t) for t in texts(count)))
        read.clear()
        return Corpus.from_path("t.jsonl", plain, 7, contexts, **more)

    stopped = corpus(100, 3)
    tokens = stopped.selection["tokens_read"]
    assert 400 <= tokens < 450
    assert len(read) < 30
    enough = corpus(len(read) - 1, 3)  # the last one is looked at, and left
    assert enough.selection == {}
    assert torch.equal(stopped.contexts, enough.contexts)
    # More contexts than that many tokens give, all of them, and a number of each label: read to the end.
    for contexts in (100, None):
        assert corpus(100, contexts).selection == {}
        assert len(read) == 100


def test_a_normaliser_that_multiplies_a_text_is_refused_before_it_does(plain):
    plain.backend_tokenizer.normalizer = normalizers.Replace(Regex("[a-z]"), "x" * 3000)
    with pytest.raises(UsageError, match="normaliser makes more than 32 characters of one"):
        Corpus.from_texts(["some text " * 10_000], plain, 8)
    # Oracle: Unicode; this ligature has the longest of its compatibility forms.
    plain.backend_tokenizer.normalizer = normalizers.NFKC()
    assert len(Corpus.from_texts(["\ufdfa" * 100], plain, 8).contexts)


def test_random_tokens_where_every_token_is_marked_special(plain):
    plain.add_special_tokens({"additional_special_tokens": list(plain.get_vocab())})
    drawn = Corpus.random_tokens(plain, 16, 8).contexts
    assert len(drawn.unique()) > 1
    assert set(drawn.unique().tolist()) <= set(plain.get_vocab().values())


def test_the_tokens_read_so_far_are_told_and_reading_may_be_stopped(tmp_path):
    """Oracle: the tokenizer's own count of the whole text."""
    tokenizer, text = byte_tokenizer(), "the theodolite stands on its tripod " * 4000
    (tmp_path / "text.txt").write_text(text)
    told: list[int] = []
    make_corpus(tmp_path / "text.txt", tokenizer, 16, Choice(None, show=told.append))
    assert told == sorted(told)
    assert len(told) > 1
    assert told[-1] == len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def stop(tokens: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_corpus(tmp_path / "text.txt", tokenizer, 16, Choice(None, show=stop))


def test_token_ids_are_a_corpus_as_they_are():
    """Oracle: the corpus that the same ids give as text, by its hash and labels."""
    tokenizer = byte_tokenizer()
    corpus = Corpus.from_texts(["abcdefgh", "12345678"], tokenizer, 8, labels=["letters", "digits"])
    same = Corpus.from_ids(corpus.contexts.int(), ["letters", "digits"])
    assert (same.sha256, same.label_names, same.labels.tolist()) == (
        corpus.sha256,
        corpus.label_names,
        [0, 1],
    )
    assert Corpus.from_ids(corpus.contexts[0]).contexts.tolist() == [corpus.contexts[0].tolist()]
    assert Corpus.from_ids(corpus.contexts).labels.tolist() == [-1, -1]
    with torch.device("meta"):
        assert Corpus.from_ids(corpus.contexts).labels.tolist() == [-1, -1]
    for wrong in (
        torch.rand(2, 8),
        torch.zeros(2, 0, dtype=torch.int64),
        torch.zeros(1, 2, 3, dtype=torch.int64),
    ):
        with pytest.raises(UsageError, match="give whole numbers"):
            Corpus.from_ids(wrong)
    with pytest.raises(UsageError, match="2 rows and 1 labels"):
        Corpus.from_ids(corpus.contexts, ["letters"])
