"""Oracles: files made by hand, `read_text`, `inspect.getdoc` of the running interpreter."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from theodolite.corpus import documents as texts
from theodolite.corpus.documents import READERS, Columns, Document, joined_articles, read_path
from theodolite.corpus.spec import python_topics, stdlib_sources
from theodolite.errors import UsageError


def test_topics_are_those_of_pydoc() -> None:
    from pydoc_data.topics import topics

    assert {document.label: document.text for document in python_topics()} == topics


def test_stdlib_sources_are_the_interpreter_s_own_files_without_tests() -> None:
    sources = {document.label: document.text for document in stdlib_sources()}
    assert sources["textwrap.py"] == Path(textwrap.__file__).read_text(encoding="utf-8")
    assert list(sources) == sorted(sources)
    assert not [label for label in sources if {"test", "site-packages", "pydoc_data"} & set(label.split("/"))]


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffOne\r\ntwo\rthree é\n".encode())
    assert list(read_path(path)) == [Document("One\ntwo\nthree é\n")]


def test_a_folder_is_read_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b.md", "a.txt", "sub/c.TXT", ".hidden/d.txt", "e.csv", "f.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "f.txt" else name)
    names = ["a.txt", "b.md", "sub/c.TXT"]
    for by, labels in ((None, [None] * 3), ("file", names), ("folder", [None, None, "sub"])):
        columns = Columns(label_by=by)
        assert list(read_path(tmp_path, columns)) == list(map(Document, names, labels))
    assert columns.described() == {
        "label_by": "folder",
        "labels_are": "folders",
        "rows_without_label": 2,
        "files_passed_over": {
            f"none of {' '.join(READERS)}": {"count": 1, "names": ["e.csv"]},
            "empty": {"count": 1, "names": ["f.txt"]},
        },
    }


ROWS = [{"text": "one", "label": "x"}, {"text": None, "label": "x"}, {"text": "two", "label": None}]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_tables_give_a_document_a_row(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t.{suffix}"
    if suffix == "jsonl":
        path.write_text("\n\n".join(json.dumps(row) for row in ROWS))
    else:
        pd.DataFrame(ROWS).to_parquet(path)
    columns = Columns()
    assert list(read_path(path, columns)) == [Document("one", "x"), Document("two")]
    met = {"labels_are": "column label", "rows_without_text": 1, "rows_without_label": 1}
    assert columns.described() == met
    assert [document.text for document in read_path(path, Columns("label"))] == ["x", "x"]


COMPRESSORS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_compressed_files_are_what_is_in_them(tmp_path: Path, suffix: str) -> None:
    """Oracle: the standard library's compressors, and the same files as they are."""
    pd.DataFrame(ROWS).to_parquet(tmp_path / "c.parquet")
    (tmp_path / "a.txt").write_text("one text")
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    for path in sorted(tmp_path.glob("*.*")):
        compressed = path.with_name(path.name + suffix)
        compressed.write_bytes(COMPRESSORS[suffix](path.read_bytes()))
        assert [d.text for d in read_path(compressed)] == [d.text for d in read_path(path)]
        compressed.write_bytes(compressed.read_bytes()[:-9])
        with pytest.raises(UsageError, match=r"cannot be decompressed .*: compress it anew"):
            list(read_path(compressed))
    (tmp_path / "d.txt.zst").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"pip install backports\.zstd|cannot be decompressed"):
        list(read_path(tmp_path / "d.txt.zst"))


def test_a_reader_of_another_kind_is_a_function_and_a_line(tmp_path: Path, monkeypatch) -> None:
    """As a newcomer adds subtitles: folders, labels and errors are as of the others. Oracle: the lines by hand."""

    def subtitles(path: Path, columns: Columns) -> Iterator[Document]:
        blocks = "".join(texts.pieces_of(path, columns)).strip().split("\n\n")
        yield Document("\n".join(line for block in blocks for line in block.split("\n")[2:]))

    monkeypatch.setitem(texts.READERS, ".srt", subtitles)
    spoken = "1\n00:00:01,000 --> 00:00:02,000\nGood\nmorning.\n\n2\n00:00:03,000 --> 00:00:04,000\nAngles!\n"
    (tmp_path / "a.srt").write_text(spoken)
    assert list(read_path(tmp_path)) == [Document("Good\nmorning.\nAngles!")]
    with pytest.raises(UsageError, match="holds no table"):
        list(read_path(tmp_path / "a.srt", Columns("body")))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.pdf", b"x", re.escape(f"a.pdf is not one of {' '.join(READERS)}")),
        ("a.txt", b"", "is empty"),
        ("a.txt", b" \n\t", "is empty"),
        ("a.txt", b"abc\0def", r"binary \(it holds NUL\)"),
        ("a.md", b"abcd\xff", r"not UTF-8 \(.*\); say what it is by --encoding"),
        ("a.jsonl", b"\n\n", "is empty"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n[1]\n', "line 2 is not a JSON object"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"not UTF-8 \(invalid start byte\)"),
        ("a.jsonl", b'{"body": "a", "id": 1}\n', r"no column 'text' \(it has: body, id\)"),
        ("a.jsonl", b'{"text": 7}\n', "holds no text"),
        ("a.parquet", b"", "is empty"),
        ("a.parquet", b"PAR1 not really", "not a Parquet file"),
        ("missing.txt", None, "no file or folder"),
    ],
)
def test_bad_files_are_named_in_one_line(tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=says) as error:
        list(read_path(path))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
@pytest.mark.parametrize(
    ("written", "encoding"),
    [
        ("utf-16", None),
        ("utf-32", None),
        ("utf-8-sig", None),
        ("utf-16-le", "utf-16-le"),
        ("latin-1", "latin-1"),
    ],
)
def test_encodings_are_known_by_their_mark_or_by_name(
    tmp_path, monkeypatch, suffix, written, encoding
) -> None:
    """Oracle: the text that the standard library encoded, with lines of Windows, cut within a character."""
    monkeypatch.setattr(texts, "PIECE", 7)
    text = "Größe\r\nund Maß" if suffix == "txt" else '{"text": "Größe"}\r\n{"text": "und Maß"}\r\n'
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(text.encode(written))
    found = [document.text for document in read_path(path, Columns(encoding=encoding))]
    assert "\n".join(found) == "Größe\nund Maß"


def test_a_long_text_is_several_documents_and_a_long_line_is_refused(tmp_path, monkeypatch) -> None:
    """Oracle: the text itself."""
    for name, size in (("PIECE", 10), ("PART", 40), ("LONGEST_LINE", 40)):
        monkeypatch.setattr(texts, name, size)
    text = "".join(f"line {number}\n" for number in range(20)) + "x" * 100
    (tmp_path / "a.txt").write_text(text)
    parts = [document.text for document in read_path(tmp_path / "a.txt")]
    assert "".join(parts) == text
    assert len(parts) > 4
    assert all(part.endswith("\n") for part in parts[:3])
    (tmp_path / "wiki.txt").write_text(WIKITEXT)
    assert [document.label for document in read_path(tmp_path / "wiki.txt")] == [
        None
    ] * 4  # no two titles in a part
    monkeypatch.setattr(texts, "PART", WIKITEXT.index("One .") + 15)
    assert [document.label for document in read_path(tmp_path / "wiki.txt")] == [
        "Du Fu",
        "<unk>",
        "<unk> (2)",
    ]
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    with pytest.raises(UsageError, match="has a line of more than 40 characters"):
        list(read_path(tmp_path / "a.jsonl"))


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(UsageError, match=re.escape(f"holds no file of {' '.join(READERS)}")):
        list(read_path(tmp_path))
    for name in ("b.txt", "c.jsonl", "d.parquet"):
        (tmp_path / name).write_bytes(b"" if name == "d.parquet" else b" \n")
    assert list(read_path(tmp_path)) == []


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.txt").write_text("x")
    monkeypatch.setitem(texts.READERS, ".txt", denied)
    with pytest.raises(UsageError, match=r"a\.txt cannot be read \(Permission denied\)"):
        list(read_path(tmp_path))


WIKITEXT = """ 
 = Du Fu = 
 
 A poet .
 = 1 and a nominal k = 
 more of him .
 
 = = Life = = 
 
 He lived .
 
 = <unk> = 
 
 One .
 
 = <unk> = 
 
 Another .
"""


def test_wikitext_gives_its_articles(tmp_path: Path) -> None:
    """Oracle: the text cut by hand. Sections and formulas open nothing; two of the same title are told apart."""
    (tmp_path / "wiki.txt").write_text(WIKITEXT)
    found = list(read_path(tmp_path / "wiki.txt"))
    assert [document.label for document in found] == ["Du Fu", "<unk>", "<unk> (2)"]
    cuts = [WIKITEXT.index(" = Du"), WIKITEXT.index(" = <unk>"), WIKITEXT.rindex(" = <unk>"), None]
    assert [document.text for document in found] == [WIKITEXT[a:b] for a, b in itertools.pairwise(cuts)]
    (tmp_path / "wiki.txt").write_text("before\n\n" + WIKITEXT)
    assert [document.label for document in read_path(tmp_path)] == [None, "Du Fu", "<unk>", "<unk> (2)"]


def test_one_title_does_not_make_a_text_wikitext(tmp_path: Path) -> None:
    text = " = Alone = \n\nand its text\n"
    (tmp_path / "a.txt").write_text(text)
    assert list(read_path(tmp_path)) == [Document(text)]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("ends", ["\n", ""])
def test_rows_that_are_lines_of_wikitext_are_joined(tmp_path: Path, suffix: str, ends: str) -> None:
    """Oracle: the same text as a file. On the hub its rows are lines, and empty where the line is."""
    (tmp_path / "wiki.txt").write_text(WIKITEXT)
    rows = pd.DataFrame({"text": [line + ends if line.strip() else "" for line in WIKITEXT.split("\n")[:-1]]})
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text("\n".join(json.dumps({"text": text}) for text in rows.text))
    else:
        rows.to_parquet(path)
    expected = [
        Document(document.text.replace("\n \n", "\n\n"), document.label)
        for document in read_path(tmp_path / "wiki.txt")
    ]
    assert list(read_path(path)) == expected


def test_rows_with_labels_or_without_a_leading_title_stay_rows() -> None:
    """Oracle: the rows themselves, read no further than they are asked for."""
    labelled = [Document(" = A = \n", "x"), Document("", "x"), Document("b", "y")]
    assert list(joined_articles(labelled, Columns())) == labelled
    plain = [Document(""), Document("a"), Document(""), Document(" = A = \n"), Document("")]
    assert list(joined_articles(plain, Columns())) == plain
    assert list(joined_articles([], Columns())) == []
    endless = joined_articles((Document(str(number)) for number in itertools.count()), Columns())
    assert [next(iter(endless)).text for _ in range(3)] == ["0", "1", "2"]


@pytest.mark.parametrize("damage", ["pages", "half"])
def test_a_damaged_parquet_file_is_said_to_be_none(tmp_path: Path, damage: str) -> None:
    """Not that its permissions are wrong, whichever of its errors pyarrow raises."""
    path = tmp_path / "t.parquet"
    pd.DataFrame({"text": ["some words"] * 200}).to_parquet(path)
    data = bytearray(path.read_bytes())
    if damage == "pages":
        data[10:40] = bytes(byte ^ 0xFF for byte in data[10:40])
    else:
        del data[len(data) // 2 :]
    path.write_bytes(data)
    with pytest.raises(
        UsageError, match=r"t\.parquet is not a Parquet file that can be read \(.*\); write it anew"
    ):
        list(read_path(path))
