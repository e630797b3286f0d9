"""Where text comes from: the Python documentation, the standard library's source, files and folders.

Readers turn a place into `Document`s: whole texts with the label they belong to. They know nothing of tokens,
models or contexts (`corpus.py` cuts those), and read each file once, in sorted order, so that the same place
gives the same documents in the same order on every machine.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import os
import re
import sysconfig
import tokenize
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from theodolite.corpus.conversations import as_text
from theodolite.errors import UsageError, first_line

LABEL_COLUMNS = ("label", "topic")  # of tables, the first one present counts, where none is named

# Not prose and not hand-written code: tests, other packages, generated tables (`encodings` holds one of 256
# lines for each code page), and `pydoc_data`, whose one module is the text of `python_topics` itself.
STDLIB_LEFT_OUT = frozenset(
    [
        "__pycache__",
        "dist-packages",
        "encodings",
        "idle_test",
        "idlelib",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
    ]
)


ARTICLE_TITLE = re.compile(r" = (?!= )(\S.*) = ?\n?")
"""A line of WikiText that opens an article, ` = Title = `; ` = = Section = = ` opens a section of one."""


class EmptyFileError(UsageError):
    """A file without any text: an error by itself, passed over in a folder."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is empty; give a file with text in it.")


@dataclass(frozen=True)
class Columns:
    """What is read of a table.

    Attributes:
        text: the column of the text.
        label: the column of the label; None: `label` or `topic`, if there is one.
        rows: each row is a document with a label of its own instead, `row 1`, `row 2`, ….
        tokenizer: whose chat template makes a text of a conversation; None: it is refused.
    """

    text: str = "text"
    label: str | None = None
    rows: bool = False
    tokenizer: Any = None

    @property
    def option(self) -> str:
        """The option that names something of a table; "" for none."""
        if self.label is not None:
            return "--label-column"
        return "--label-rows" if self.rows else "--text-column" if self.text != Columns.text else ""

    def described(self) -> dict[str, object]:
        """What provenance says of where labels came from; `UsageError` where a row would have two."""
        if self.label is not None and self.rows:
            raise UsageError("give --label-column or --label-rows, not both: a row has one label")
        column = {} if self.label is None else {"label_column": self.label}
        return column | ({"label_rows": True} if self.rows else {})


TEXT_COLUMN = Columns()


def printable(path: str | Path) -> str:
    """A path as a text that can be written: the names of files may be any bytes."""
    return str(path).encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True)
class Document:
    """One text and the label it belongs to (a topic, a file, a column's value; None: no label)."""

    text: str
    label: str | None = None


def python_topics() -> list[Document]:
    """The language reference that every CPython carries (`pydoc_data.topics`), one document a topic."""
    from pydoc_data.topics import topics

    return [Document(topics[name], name) for name in sorted(topics)]


HELD_OUT_TOPICS = ("bltin-type-objects", "continue", "objects", "return", "string-methods")
"""Topics that the embedded model was not trained on, nor on text that shares a paragraph with them."""


def stdlib_files() -> list[Path]:
    """Python files of the running interpreter's standard library, sorted by path relative to it.

    Tests, installed packages, generated tables (`STDLIB_LEFT_OUT`) and the build settings of this machine
    (`config-*`, `_sysconfigdata*`) are left out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name for name in subfolders if name not in STDLIB_LEFT_OUT and not name.startswith("config-")
        ]
        files += [
            Path(folder, name)
            for name in names
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def stdlib_sources() -> Iterator[Document]:
    """Source files of the standard library, each a document labelled with its path (`json/decoder.py`)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in stdlib_files():
        with tokenize.open(path) as file:  # honours the file's own coding line
            text = file.read()
        if text.strip():
            yield Document(text, path.relative_to(root).as_posix())


def docstrings(source: str) -> str:
    """The docstrings of a module, its classes and functions in reading order, with blank lines between.

    Source that this interpreter cannot parse has none.
    """
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the files read are not ours to report
            nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    except SyntaxError:
        return ""
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    texts = (ast.get_docstring(node, clean=False) for node in nodes)
    return "\n\n".join(inspect.cleandoc(text) for text in texts if text)


def stdlib_docstrings() -> Iterator[Document]:
    """The docstrings of each file of `stdlib_sources`, as one document of prose with the same label."""
    for document in stdlib_sources():
        if text := docstrings(document.text):
            yield Document(text + "\n", document.label)


def read_path(path: str | Path, columns: Columns = TEXT_COLUMN) -> Iterator[Document]:
    """Documents of a file, or of every readable file of a folder and its subfolders in sorted order.

    `.txt` and `.md` files are one document each; `.jsonl` and `.parquet` files give one a row (`Columns`). A text in
    WikiText's format (at least two lines of title), and rows that are its lines, give one an article
    (`joined_articles`). A document's label is its row's where the table has labels, or its article's title, otherwise
    its file's path relative to the folder. In a folder, hidden files, empty files and other suffixes are passed over.

    Raises `UsageError` for a path that is missing or of another suffix, for a file that is empty or not UTF-8
    text, and for rows without the text column or the label column asked for.
    """
    path = Path(path)
    for file in files_at(path, columns):
        label = printable(file.relative_to(path).as_posix() if path.is_dir() else file.name)
        row_of = f"{label} " if path.is_dir() and columns.rows else ""
        try:
            for document in joined_articles(READERS[file.suffix.lower()](file, columns)):
                yield Document(document.text, row_of + document.label if document.label else label)
        except EmptyFileError:
            if not path.is_dir():
                raise
        except OSError as error:
            raise UsageError(
                f"{file} cannot be read ({error.strerror or error}); check its permissions."
            ) from error


def files_at(path: str | Path, columns: Columns = TEXT_COLUMN) -> list[Path]:
    """The files that `read_path` reads, in order, none of them opened; `UsageError` where there is none."""
    path = Path(path)
    if path.is_dir():
        files = sorted(
            (file for file in path.rglob("*") if file.suffix.lower() in READERS and file.is_file()),
            key=lambda file: file.relative_to(path).as_posix(),
        )
        readable = [f for f in files if not any(part.startswith(".") for part in f.relative_to(path).parts)]
        if not readable:
            raise UsageError(f"{path} holds no file of {SUFFIXES}; give another folder.")
    elif path.is_file():
        if path.suffix.lower() not in READERS:
            raise UsageError(
                f"{path} is not one of {SUFFIXES}; convert it, or rename it if it is plain text."
            )
        readable = [path]
    else:
        raise UsageError(f"There is no file or folder {path}; check the path.")
    if columns.option and not any(file.suffix.lower() in TABLES for file in readable):
        raise UsageError(f"{path} holds no table ({' '.join(TABLES)}): leave out {columns.option}")
    return readable


def document_of_row(row: Mapping[str, object], columns: Columns, source: str, number: int) -> Document | None:
    """The document of a row of a table: its text and its label; None when the text is null.

    A conversation becomes the text of the tokenizer's chat template. `source` names the row in errors, `number` counts
    it from 1. Raises `UsageError` when there is no such column or it holds neither.
    """
    for wanted, advice in (
        (columns.text, "choose with --text-column"),
        (columns.label, "choose with --label-column"),
    ):
        if wanted is not None and wanted not in row:
            raise UsageError(f"{source} has no column '{wanted}' (it has: {', '.join(row)}); {advice}.")
    text = row[columns.text]
    if text is None:
        return None
    if isinstance(text, list):
        text = as_text(text, columns.tokenizer, f"{source}: column '{columns.text}'")
    if not isinstance(text, str):
        kind = type(text).__name__
        raise UsageError(
            f"{source}: column '{columns.text}' holds {kind}, not text; choose with --text-column."
        )
    if columns.rows:
        return Document(text, f"row {number}")
    labels = (row[name] for name in _label_columns(columns) if row.get(name) is not None)
    label = next(labels, None)
    return Document(text, None if label is None else str(label).encode("utf-8", "replace").decode())


def _label_columns(columns: Columns) -> list[str]:
    if columns.label is not None:
        return [columns.label]
    return [] if columns.rows else [name for name in LABEL_COLUMNS if name != columns.text]


def _decode(data: bytes, path: Path, offset: int = 0) -> str:
    """UTF-8 bytes as text with `\n` line ends; `offset` is where `data` begins in the file."""
    if (nul := data.find(b"\0")) >= 0:
        raise UsageError(f"{path} is binary (byte {offset + nul} is NUL); give a UTF-8 text file.")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 (at byte {offset + error.start}); convert it to UTF-8."
        ) from None
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _read_text(path: Path, columns: Columns) -> Iterator[Document]:
    text = _decode(path.read_bytes(), path)
    if not text.strip():
        raise EmptyFileError(path)
    articles = list(_articles(io.StringIO(text)))
    titled = sum(article.label is not None for article in articles)
    yield from articles if titled >= 2 else [Document(text)]


def joined_articles(rows: Iterable[Document]) -> Iterator[Document]:
    """The articles of WikiText when `rows` are its lines, as the hub's data set has them; else the rows as they are.

    Rows are its lines when the first one with any text is a title and has no label. A title opens an article, and is
    its label; it stands between empty lines, as a formula with two equals signs does not. The n-th article of the
    same title is labelled `Title (n)`: where rare words are `<unk>`, different articles share titles. What stands
    before the first title has no label. One article at a time is in memory.
    """
    rows = iter(rows)
    opening: list[Document] = []
    for row in rows:
        opening.append(row)
        if row.text.strip():
            break
    every = chain(opening, rows)
    if opening and opening[-1].label is None and ARTICLE_TITLE.fullmatch(opening[-1].text):
        return _articles(row.text for row in every)
    return every


def _articles(lines: Iterable[str]) -> Iterator[Document]:
    title: str | None = None
    body: list[str] = []
    occurrences: Counter[str] = Counter()
    before = ""
    for line, after in pairwise(chain(lines, [""])):
        opens = None if before.strip() or after.strip() else ARTICLE_TITLE.fullmatch(line)
        if opens:
            if any(map(str.strip, body)):
                yield Document("".join(body), title)
            body = []
            title = opens[1]
            occurrences[title] += 1
            title = title if occurrences[title] == 1 else f"{title} ({occurrences[title]})"
        body.append(line if line.endswith("\n") else line + "\n")
        before = line
    if any(map(str.strip, body)):
        yield Document("".join(body), title)


def _read_jsonl(path: Path, columns: Columns) -> Iterator[Document]:
    offset = rows = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = _decode(line, path, offset).strip()
            offset += len(line)
            if not text:
                continue
            source = f"{path} line {number}"
            try:
                row = json.loads(text)
            except RecursionError:
                raise UsageError(
                    f"{source} is not JSON (nested too deeply); give one object a line."
                ) from None
            except ValueError as error:  # of numbers with thousands of digits, too
                why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
                raise UsageError(f"{source} is not JSON ({why}); give one object a line.") from None
            if not isinstance(row, dict):
                raise UsageError(f"{source} is not a JSON object; give one object a line.")
            rows += 1
            if document := document_of_row(row, columns, source, rows):
                yield document
    if not rows:
        raise EmptyFileError(path)


def _read_parquet(path: Path, columns: Columns) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    if not path.stat().st_size:
        raise EmptyFileError(path)
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if not file.metadata.num_rows:
                raise EmptyFileError(path)
            document_of_row(dict.fromkeys(names), columns, str(path), 0)  # refuses columns that are not there
            wanted = [name for name in (columns.text, *_label_columns(columns)) if name in names]
            batches = file.iter_batches(batch_size=1024, columns=list(dict.fromkeys(wanted)))
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows, start=1):
                if document := document_of_row(row, columns, str(path), number):
                    yield document
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno:
            raise  # of the disk; those of the decoder have no number
        why = first_line(error)
        raise UsageError(f"{path} is not a Parquet file that can be read ({why}); write it anew.") from None


READERS: dict[str, Callable[[Path, Columns], Iterator[Document]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
TABLES = (".jsonl", ".parquet")
SUFFIXES = " ".join(READERS)
