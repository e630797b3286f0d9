"""Read documents: from files and folders, from data sets of the hub, and from conversations.

To add a kind of file, write a reader that yields a `Document` of each text, and name it in `TEXTS`, or in `TABLES`
where rows have columns. Files are read in sorted order, so that the same place gives the same documents everywhere.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, Any

from theodolite.errors import UsageError, first_line

LABEL_COLUMNS = ("label", "topic")  # of tables, the first one present counts, where none is named

ROLES = {"human": "user", "gpt": "assistant"}
"""Of ShareGPT's rows, `{"from": "human", "value": …}`: what templates call them."""

ARTICLE_TITLE = re.compile(r" = (?!= )(\S.*) = ?\n?")
"""A line of WikiText that opens an article, ` = Title = `; ` = = Section = = ` opens a section of one."""


class EmptyFileError(UsageError):
    """A file without any text: an error by itself, passed over in a folder."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is empty; give a file with text in it.")


@dataclass(frozen=True)
class Columns:
    """The columns of a table that are read.

    Attributes:
        text: the column of the text.
        label: the column of the label; None: `label` or `topic`, if there is one.
        rows: each row is a document with a label of its own instead, `row 1`, `row 2`, ….
        tokenizer: whose chat template makes a text of a conversation; None: it is refused.
        source: the column of what an encoder reads, beside the `text` of its decoder; None: there is none.
    """

    text: str = "text"
    label: str | None = None
    rows: bool = False
    tokenizer: Any = None
    source: str | None = None

    @property
    def option(self) -> str:
        """The command line's option that was used to choose columns; "" for none."""
        if self.label is not None or self.source is not None:
            return "--source-column" if self.label is None else "--label-column"
        return "--label-rows" if self.rows else "--text-column" if self.text != Columns.text else ""

    def described(self) -> dict[str, object]:
        """Describe for the provenance where labels come from; `UsageError` where a row would have two."""
        if self.label is not None and self.rows:
            raise UsageError("give --label-column or --label-rows, not both: a row has one label")
        column = {} if self.label is None else {"label_column": self.label}
        return column | ({"label_rows": True} if self.rows else {})

    @property
    def of_labels(self) -> list[str]:
        """The columns in which a label is looked for."""
        if self.label is not None:
            return [self.label]
        return [] if self.rows else [name for name in LABEL_COLUMNS if name != self.text]


TEXT_COLUMN = Columns()


@dataclass(frozen=True)
class Document:
    """One text and the label it belongs to (a topic, a file, a column's value; None: no label); its source, if any."""

    text: str
    label: str | None = None
    source: str | None = None


def printable(path: str | Path) -> str:
    """Make a path writable as text: the names of files may be any bytes."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def read_path(path: str | Path, columns: Columns = TEXT_COLUMN) -> Iterator[Document]:
    """Read the documents of a file, or of every readable file of a folder and its subfolders in sorted order.

    A document's label is its row's where the table has labels, or its WikiText article's title, otherwise its file's
    path relative to the folder. In a folder, hidden files, empty files and other suffixes are passed over. `UsageError`
    where a path, a column or the text itself is missing or unreadable.
    """
    path = Path(path)
    for file in files_at(path, columns):
        label = printable(file.relative_to(path).as_posix() if path.is_dir() else file.name)
        row_of = f"{label} " if path.is_dir() and columns.rows else ""
        try:
            for document in joined_articles(documents_of(file, columns)):
                yield replace(document, label=row_of + document.label if document.label else label)
        except EmptyFileError:
            if not path.is_dir():
                raise
        except OSError as error:
            raise UsageError(
                f"{file} cannot be read ({error.strerror or error}); check its permissions."
            ) from error


def files_at(path: str | Path, columns: Columns = TEXT_COLUMN) -> list[Path]:
    """List the files that `read_path` reads, without opening any; `UsageError` where there is none."""
    path = Path(path)
    if path.is_dir():
        files = [file for file in files_of_folder(path) if kind_of(file) in READERS]
        if not files:
            raise UsageError(f"{path} holds no file of {' '.join(READERS)}; give another folder.")
    elif path.is_file():
        files = [path]
        if kind_of(path) not in READERS:
            raise UsageError(
                f"{path} is not one of {' '.join(READERS)}; convert it, or rename it if it is plain text."
            )
    else:
        raise UsageError(f"There is no file or folder {path}; check the path.")
    if columns.option and not any(kind_of(file) in TABLES for file in files):
        raise UsageError(f"{path} holds no table ({' '.join(TABLES)}): leave out {columns.option}")
    return files


def files_of_folder(folder: Path) -> list[Path]:
    """List the files of a folder and its subfolders, sorted by path, without hidden ones."""
    files = [(file.relative_to(folder), file) for file in folder.rglob("*") if file.is_file()]
    visible = [
        (below.as_posix(), file)
        for below, file in files
        if not any(part.startswith(".") for part in below.parts)
    ]
    return [file for _, file in sorted(visible)]


def documents_of(file: Path, columns: Columns) -> Iterator[Document]:
    """Read the documents of a file by the reader of its kind."""
    return READERS[kind_of(file)](file, columns)


def kind_of(file: Path) -> str:
    """Give the suffix that says how a file is read: `.jsonl` of `a.jsonl` and of `a.jsonl.gz`."""
    suffix = file.suffix.lower()
    return Path(file.stem).suffix.lower() if suffix in COMPRESSED else suffix


# Files: a reader of each kind.

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressed where its name says that it is compressed."""
    if path.suffix.lower() not in COMPRESSED:
        with path.open("rb") as file:
            yield file
        return
    import fsspec

    compression = fsspec.utils.infer_compression(str(path))
    if compression is None:
        raise UsageError(f"{path} is compressed by what is not installed: pip install zstandard")
    try:
        with fsspec.open(str(path), "rb", compression=compression) as file:
            yield file
    except UsageError:
        raise
    except Exception as error:  # each kind of compression has its own
        if isinstance(error, OSError) and error.errno:
            raise
        raise UsageError(
            f"{path} cannot be decompressed ({first_line(error)}); compress it anew, or give it as it is"
        ) from error


def text_of(path: Path) -> str:
    """Read a whole text file; `UsageError` where it is not UTF-8."""
    with opened(path) as file:
        return _decode(file.read(), path)


def text_and_articles(path: Path) -> tuple[str, list[Document]]:
    """Read a text file, and its articles where it has two or more titles in WikiText's format."""
    text = text_of(path)
    if not text.strip():
        raise EmptyFileError(path)
    articles = list(_articles(io.StringIO(text)))
    titled = sum(article.label is not None for article in articles)
    return text, articles if titled >= 2 else []


def _read_text(path: Path, columns: Columns) -> Iterator[Document]:
    text, articles = text_and_articles(path)
    yield from articles or [Document(text)]


def _read_jsonl(path: Path, columns: Columns) -> Iterator[Document]:
    offset = rows = 0
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            text = _decode(line, path, offset).strip()
            offset += len(line)
            if not text:
                continue
            rows += 1
            source = f"{path} line {number}"
            if document := document_of_row(_json_object(text, source), columns, source, rows):
                yield document
    if not rows:
        raise EmptyFileError(path)


def _json_object(text: str, source: str) -> dict[str, object]:
    try:
        row = json.loads(text)
    except RecursionError:
        raise UsageError(f"{source} is not JSON (nested too deeply); give one object a line.") from None
    except ValueError as error:  # of numbers with thousands of digits, too
        why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise UsageError(f"{source} is not JSON ({why}); give one object a line.") from None
    if not isinstance(row, dict):
        raise UsageError(f"{source} is not a JSON object; give one object a line.")
    return row


def _read_parquet(path: Path, columns: Columns) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    if not path.stat().st_size:
        raise EmptyFileError(path)
    try:
        with opened(path) as raw, pyarrow.parquet.ParquetFile(raw) as file:
            names = file.schema_arrow.names
            if not file.metadata.num_rows:
                raise EmptyFileError(path)
            document_of_row(dict.fromkeys(names), columns, str(path), 0)  # refuses columns that are not there
            wanted = [name for name in (columns.text, columns.source, *columns.of_labels) if name in names]
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


def _decode(data: bytes, path: Path, offset: int = 0) -> str:
    """Decode UTF-8 bytes to text with `\n` line ends; `offset` is where `data` begins in the file."""
    if (nul := data.find(b"\0")) >= 0:
        raise UsageError(f"{path} is binary (byte {offset + nul} is NUL); give a UTF-8 text file.")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 (at byte {offset + error.start}); convert it to UTF-8."
        ) from None
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


Reader = Callable[[Path, Columns], Iterator[Document]]

TEXTS: dict[str, Reader] = {".txt": _read_text, ".md": _read_text}
"""Kinds of files that are text, and what reads them: one document each, or several with labels."""

TABLES: dict[str, Reader] = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
"""Kinds of files with rows and columns, and what reads them: `document_of_row` makes a document of each row."""

READERS = TEXTS | TABLES


# Rows of tables, and conversations in them.


def document_of_row(row: Mapping[str, object], columns: Columns, source: str, number: int) -> Document | None:
    """Make a document of a table's row, with its text (or conversation) and its label; None when the text is null.

    `source` names the row in errors, `number` counts it from 1. `UsageError` where it has no such column, or no text
    there.
    """
    named = (
        (columns.text, "--text-column"),
        (columns.label, "--label-column"),
        (columns.source, "--source-column"),
    )
    for wanted, option in named:
        if wanted is not None and wanted not in row:
            raise UsageError(
                f"{source} has no column '{wanted}' (it has: {', '.join(row)}); choose with {option}."
            )
    text, source_text = row[columns.text], None if columns.source is None else row[columns.source]
    if text is None or (columns.source is not None and source_text is None):
        return None
    if isinstance(text, list):
        text = as_text(text, columns.tokenizer, f"{source}: column '{columns.text}'")
    if not isinstance(text, str):
        kind = type(text).__name__
        raise UsageError(
            f"{source}: column '{columns.text}' holds {kind}, not text; choose with --text-column."
        )
    if not (source_text is None or isinstance(source_text, str)):
        raise UsageError(f"{source}: column '{columns.source}' holds no text; choose with --source-column.")
    if columns.rows:
        return Document(text, f"row {number}", source_text)
    label = next((row[name] for name in columns.of_labels if row.get(name) is not None), None)
    name = None if label is None else str(label).encode("utf-8", "replace").decode()
    return Document(text, name, source_text)


def as_text(turns: Sequence[Any], tokenizer: Any, source: str) -> str:
    """Format a conversation by the tokenizer's chat template, without the token that it puts before every sequence.

    Turns are `{"role": …, "content": …}`, or ShareGPT's `{"from": …, "value": …}`; `source` says where they stand, for
    the `UsageError` of what is no conversation or has no template.
    """
    messages = [_message(turn) for turn in turns]
    if not messages or None in messages:
        raise UsageError(
            f'{source} is neither text nor a conversation: give a text, or a list of {{"role": …, "content": …}}'
        )
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(
            f"{source} is a conversation, and the tokenizer has no chat template: give that of a model that chats, "
            "or a column of text"
        )
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:  # whatever a template raises
        raise UsageError(f"{source}: the chat template refuses it ({first_line(error)})") from error
    before = next(iter(tokenizer("a", add_special_tokens=True, verbose=False)["input_ids"]))
    first = tokenizer.bos_token
    return text.removeprefix(first) if first and before == tokenizer.bos_token_id else text


def _message(turn: Any) -> dict[str, Any] | None:
    if not isinstance(turn, dict):
        return None
    if "role" in turn and "content" in turn:  # tables fill what is left out with None
        return {name: value for name, value in turn.items() if value is not None}
    if "from" in turn and "value" in turn:
        return {"role": ROLES.get(turn["from"], turn["from"]), "content": turn["value"]}
    return None


# Data sets of the Hugging Face hub, or of a folder of data files, streamed by `datasets`.


def streamed_rows(name: str, config: str | None, split: str, columns: Columns) -> Iterator[Document]:
    """Yield the rows of a data set as they arrive, class numbers replaced by their names."""
    import datasets

    with streamed_dataset(name, config, split) as dataset:
        features = dataset.features or {}
        for number, row in enumerate(dataset, start=1):
            for column, feature in features.items():
                if isinstance(feature, datasets.ClassLabel) and row[column] is not None:
                    row[column] = feature.int2str(row[column])
            if document := document_of_row(row, columns, f"Dataset {name}", number):
                yield document


@contextmanager
def streamed_dataset(name: str, config: str | None, split: str) -> Iterator[Any]:
    """Open a data set; `UsageError` where it cannot be read."""
    import datasets

    try:
        yield datasets.load_dataset(name, config, split=split, streaming=True)
    except UsageError:
        raise
    except Exception as error:  # `datasets` lets through whatever its network and file libraries raise
        why = first_line(error) or type(error).__name__
        raise UsageError(
            f"The dataset {name} cannot be read ({why}); check its name, config and split, or, without a "
            "network, give a folder that holds its files."
        ) from error


# Articles of WikiText.


def joined_articles(rows: Iterable[Document]) -> Iterator[Document]:
    """Join rows to articles when they are the lines of WikiText, as the hub's data set has them; else leave them.

    They are when the first one with any text is a title and has no label. A title stands between empty lines, opens an
    article, and is its label; the n-th article of the same title is labelled `Title (n)`. What stands before the first
    title has no label. One article at a time is in memory.
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
