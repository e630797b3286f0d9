"""Read documents: from files (a reader of each kind in `TEXTS` or `TABLES`), data sets of the hub, conversations."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import IO, Any

from theodolite.errors import UsageError, first_line

LABEL_COLUMNS = ("label", "topic")  # of tables, the first one present counts, where none is named
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
IMAGE_COLUMN = "image"  # of tables of texts and images, where none is named
BY_FILE, BY_FOLDER, BY_ROW, BY_COLUMN = "file", "folder", "row", "column:"
LABELS_BY = (BY_FILE, BY_FOLDER, BY_ROW, f"{BY_COLUMN}NAME")

NAMED = 100  # files of a folder that the provenance names at most, of those passed over for one reason
ARTICLE_TITLE = re.compile(r" = (?!= )(\S.*) = ?\n?")  # of WikiText; ` = = Section = = ` opens a section


class EmptyFileError(UsageError):
    """A file without any text: an error by itself, passed over in a folder."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is empty; give a file with text in it.")


@dataclass
class Notes:
    """What was left out (`counts`: of rows; `passed_over`: files, by the reason), and what labels are."""

    labels: dict[str, None] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    passed_over: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Columns:
    """A table's columns of the text, of what an encoder reads beside it (`source`) and of pictures; how it is read.

    Of a conversation the tokenizer's chat template makes a text; without one its turns are joined by line breaks.
    """

    text: str = "text"
    label_by: str | None = None
    encoding: str | None = None
    tokenizer: Any = None
    source: str | None = None
    image: str | None = None
    notes: Notes = field(default_factory=Notes, compare=False, repr=False)

    @property
    def column(self) -> str | None:
        """The column of labels that was asked for."""
        by = self.label_by or ""
        return by.removeprefix(BY_COLUMN) if by.startswith(BY_COLUMN) else None

    @property
    def rows(self) -> bool:
        """Whether each row is a label of its own."""
        return self.label_by == BY_ROW

    @property
    def option(self) -> str:
        """The command line's option that only a table has; "" for none."""
        if self.rows or self.column:
            return f"--label-by {self.label_by}"
        named = {"--image-column": self.image, "--source-column": self.source}
        named["--text-column"] = None if self.text == Columns.text else self.text
        return next((option for option, column in named.items() if column is not None), "")

    @property
    def by_place(self) -> bool:
        """Whether a label is the place of a file."""
        return self.label_by in (BY_FILE, BY_FOLDER)

    @property
    def of_files(self) -> str:
        """The command line's option that only files have; "" for none."""
        return f"--label-by {self.label_by}" if self.by_place else "--encoding" if self.encoding else ""

    @cached_property
    def around(self) -> tuple[str, str]:
        """What the tokenizer puts before and after every text, as it is spelled."""
        from theodolite.corpus.special_tokens import frame_of

        frame = frame_of(self.tokenizer)
        before, after = (self.tokenizer.convert_ids_to_tokens(ids) for ids in (frame.before, frame.after))
        return "".join(before), "".join(after)

    @property
    def of_labels(self) -> list[str]:
        """The columns in which a label is looked for."""
        if self.label_by is None:
            return [name for name in LABEL_COLUMNS if name != self.text]
        return [self.column] if self.column else []

    def check(self) -> None:
        """Raise `UsageError` for an unknown kind of labels or an unknown encoding."""
        if not self.column and self.label_by not in (None, *LABELS_BY[:3]):
            raise UsageError(f"labels by {self.label_by!r}: give --label-by {', '.join(LABELS_BY)}")
        try:
            io.TextIOWrapper(io.BytesIO(), encoding=self.encoding)
        except (LookupError, ValueError):
            raise UsageError(f"no encoding {self.encoding!r}: give --encoding latin-1, say") from None

    def described(self) -> dict[str, Any]:
        """Describe for the provenance what was asked for, and what has been read and left out so far."""
        notes, passed_over = self.notes, self.notes.passed_over.items()
        entries = {
            "label_by": self.label_by,
            "encoding": self.encoding,
            "labels_are": " and ".join(notes.labels),
            **notes.counts,
            "rows_without_label": notes.counts["rows_without_label"] if notes.labels else 0,
            "files_passed_over": {why: {"count": len(f), "names": f[:NAMED]} for why, f in passed_over},
        }
        return {name: value for name, value in entries.items() if value}

    def pass_over(self, file: Path, folder: Path, why: str) -> None:
        """Note that a file of a folder is not read."""
        self.notes.passed_over.setdefault(why, []).append(printable(file.relative_to(folder).as_posix()))

    def labelled(self, kind: str, label: str) -> str:
        """Note what a label is, and return it."""
        self.notes.labels[kind] = None
        return label

    def label_of_file(self, file: Path, folder: Path) -> str | None:
        """Return the label of all that is in a file; None: it has none, or labels do not go by files."""
        inside = file.relative_to(folder) if file != folder else Path(file.name)
        if self.label_by == BY_FILE:
            return self.labelled("files", printable(inside.as_posix()))
        if self.label_by == BY_FOLDER and inside.parent != Path():
            return self.labelled("folders", printable(inside.parent.as_posix()))
        return None


@dataclass(frozen=True)
class Document:
    """One text, its label, an encoder's text beside it, its picture's place or bytes, and where it stands."""

    text: str
    label: str | None = None
    source: str | None = None
    picture: Path | bytes | None = None
    name: str = field(default="", compare=False)


def printable(path: str | Path) -> str:
    """Make a path writable as text: the names of files may be any bytes."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def read_path(path: str | Path, columns: Columns | None = None) -> Iterator[Document]:
    """Read the documents of a file, of every readable file of a folder in sorted order, or of a data set hf:NAME…."""
    columns = Columns() if columns is None else columns
    if (dataset := dataset_of(str(path))) is not None:
        documents = joined_articles(streamed_rows(*dataset, columns), columns)
    else:
        documents = _documents_in(files_at(path, columns), Path(path), columns)
    yield from with_text(documents, columns)


def _documents_in(files: Iterable[Path], path: Path, columns: Columns) -> Iterator[Document]:
    for file in files:
        label = columns.label_of_file(file, path)
        row_of = f"{printable(file.relative_to(path).as_posix())} " if path.is_dir() and columns.rows else ""
        with reading(file, path, columns):
            for document in joined_articles(READERS[kind_of(file)](file, columns), columns):
                if not columns.by_place:
                    label = None if document.label is None else row_of + document.label
                picture = document.picture
                picture = file.parent / picture if isinstance(picture, Path) else picture
                yield replace(document, label=label, picture=picture)


@contextmanager
def reading(file: Path, path: Path, columns: Columns) -> Iterator[None]:
    """Note a file of a folder that is empty, and raise `UsageError` of one that cannot be read."""
    try:
        yield
    except EmptyFileError:
        if not path.is_dir():
            raise
        columns.pass_over(file, path, "empty")
    except OSError as error:
        raise UsageError(f"{file} cannot be read ({error.strerror or error})") from error


def with_text(documents: Iterable[Document], columns: Columns) -> Iterator[Document]:
    """Leave out what has no text, and note how many have none, and how many no label."""
    for document in documents:
        if not document.text.strip():
            columns.notes.counts["rows_without_text"] += 1
            continue
        columns.notes.counts["rows_without_label"] += document.label is None
        yield document


def check_path(path: Path, columns: Columns) -> None:
    """Raise `UsageError` where a file, or a folder's first file of each kind, does not begin with a document."""
    for file in {kind_of(file): file for file in reversed(files_at(path, columns))}.values():
        documents = with_text(_documents_in([file], path, columns), columns)
        if next(documents, None) is None and file == path:
            raise UsageError(f"{path} holds no text: none of its rows has any")


def files_at(path: str | Path, columns: Columns) -> list[Path]:
    """List the files that `read_path` reads, without opening any; `UsageError` where there is none."""
    path, kinds = Path(path), " ".join(READERS)
    if path.is_dir():
        files = files_of_folder(path, lambda file: kind_of(file) in READERS, columns, f"none of {kinds}")
        if not files:
            raise UsageError(f"{path} holds no file of {kinds}; give another folder.")
    elif path.is_file():
        files = [path]
        if kind_of(path) not in READERS:
            raise UsageError(f"{path} is not one of {kinds}; convert it, or rename it.")
    else:
        raise UsageError(f"There is no file or folder {path}; check the path.")
    if columns.option and not any(kind_of(file) in TABLES for file in files):
        raise UsageError(f"{path} holds no table ({' '.join(TABLES)}): leave out {columns.option}")
    return files


def files_of_folder(folder: Path, wanted: Callable[[Path], bool], columns: Columns, why: str) -> list[Path]:
    """List the wanted files of a folder and its subfolders, sorted by path; note why others but hidden ones are not."""
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    visible = [folder / name for name in names if not re.search(r"(^|/)\.", name)]
    for file in visible:
        if not wanted(file):
            columns.pass_over(file, folder, why)
    return [file for file in visible if wanted(file)]


def is_image(path: Path) -> bool:
    """Tell whether a file's suffix is that of an image."""
    return path.suffix.lower() in IMAGES


def holds_images(path: Path) -> bool:
    """Tell whether a path is an image, or a folder with one in it; nothing is opened."""
    if path.is_dir():
        return any(is_image(file) for file in path.rglob("*"))
    return is_image(path) and path.is_file()


def kind_of(file: Path) -> str:
    """Give the suffix that says how a file is read: `.jsonl` of `a.jsonl` and of `a.jsonl.gz`."""
    suffix = file.suffix.lower()
    return Path(file.stem).suffix.lower() if suffix in COMPRESSED else suffix


# Files: a reader of each kind.


def _open_zstandard(path: Path, mode: str) -> Any:
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError:
        raise UsageError(f"{path} is compressed by Zstandard: pip install backports.zstd") from None
    return zstd.open(path, mode)


COMPRESSED: dict[str, Callable[[Path, str], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
COMPRESSED[".zst"] = _open_zstandard

PIECE = 1 << 20  # characters decoded at a time
PART = 1 << 24  # characters that a document of a text file has at most, so that memory is bounded
LONGEST_LINE = 1 << 26  # characters of a line of `.jsonl`, some 15 million tokens
MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}  # one begins as one of UTF-16 does
MARKS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16", codecs.BOM_UTF8: "utf-8-sig"}


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressed where its name says that it is compressed."""
    decompressed = COMPRESSED.get(path.suffix.lower())
    try:
        with path.open("rb") if decompressed is None else decompressed(path, "rb") as file:
            yield file
    except Exception as error:  # each kind of compression has its own
        if decompressed is None or isinstance(error, UsageError) or getattr(error, "errno", None):
            raise
        raise UsageError(f"{path} cannot be decompressed ({first_line(error)}): compress it anew") from error


def pieces_of(path: Path, columns: Columns) -> Iterator[str]:
    """Yield a file's text piece by piece, every line end a line feed; `UsageError` where the file is no text."""
    with opened(path) as raw:
        beginning = raw.read(max(map(len, MARKS)))
        marked = next((encoding for mark, encoding in MARKS.items() if beginning.startswith(mark)), None)
        encoding = marked or columns.encoding or "utf-8"
        raw.seek(0)
        file = io.TextIOWrapper(raw, encoding)
        while True:
            try:
                text = file.read(PIECE)
            except UnicodeError as error:
                why = error.reason if isinstance(error, UnicodeDecodeError) else error
                raise UsageError(
                    f"{path} is not {encoding.upper()} ({why}); say what it is by --encoding"
                ) from None
            if not text:
                return
            if "\0" in text:
                raise UsageError(f"{path} is binary (it holds NUL); give text, or its --encoding")
            yield text


def text_parts(path: Path, columns: Columns) -> tuple[Iterator[str], bool]:
    """Read a text file, in parts of `PART` characters, and tell whether the first has two titles of WikiText's form."""
    parts = _parts(path, columns)
    first = next(parts, "")
    if not first.strip():
        raise EmptyFileError(path)
    lines = io.StringIO(first if "\n = " in first else "")  # there is no second title otherwise
    titled = (article for article in _articles(lines, Columns()) if article.label is not None)
    return chain([first], parts), len(list(islice(titled, 2))) == 2


def _parts(path: Path, columns: Columns) -> Iterator[str]:
    pieces: list[str] = []
    for piece in pieces_of(path, columns):
        pieces.append(piece)
        if sum(map(len, pieces)) >= PART:
            text = "".join(pieces)
            end = text.rfind("\n") + 1 or text.rfind(" ") + 1 or len(text)
            yield text[:end]
            pieces = [text[end:]]
    if any(pieces):
        yield "".join(pieces)


def _read_text(path: Path, columns: Columns) -> Iterator[Document]:
    parts, titled = text_parts(path, columns)
    if titled:
        yield from _articles(chain.from_iterable(map(io.StringIO, parts)), columns)
    else:
        yield from map(Document, parts)


def _read_jsonl(path: Path, columns: Columns) -> Iterator[Document]:
    rows = 0
    for number, line in enumerate(_lines(path, columns), start=1):
        if not line.strip():
            continue
        rows += 1
        source = f"{path} line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:  # of numbers with thousands of digits, too
            raise UsageError(f"{source} is not JSON ({error}); give one object a line.") from None
        if not isinstance(row, dict):
            raise UsageError(f"{source} is not a JSON object; give one object a line.")
        if document := document_of_row(row, columns, source, rows):
            yield document
    if not rows:
        raise EmptyFileError(path)


def _lines(path: Path, columns: Columns) -> Iterator[str]:
    rest = ""
    for piece in pieces_of(path, columns):
        *lines, rest = (rest + piece).split("\n")
        yield from lines
        if len(rest) > LONGEST_LINE:
            raise UsageError(f"{path} has a line of more than {LONGEST_LINE:,} characters; give plain text")
    yield rest


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
            every = (columns.text, columns.source, columns.image, *columns.of_labels)
            wanted = [name for name in every if name in names]
            batches = file.iter_batches(batch_size=128, columns=list(dict.fromkeys(wanted)))
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows, start=1):
                if document := document_of_row(row, columns, str(path), number):
                    yield document
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno:
            raise  # of the disk; those of the decoder have no number
        why = first_line(error)
        raise UsageError(f"{path} is not a Parquet file that can be read ({why}); write it anew.") from None


Reader = Callable[[Path, Columns], Iterator[Document]]

TEXTS: dict[str, Reader] = {".txt": _read_text, ".md": _read_text}  # one document each, or articles
TABLES: dict[str, Reader] = {".jsonl": _read_jsonl, ".parquet": _read_parquet}

READERS = TEXTS | TABLES


# Rows of tables, and conversations in them.


def document_of_row(row: Mapping[str, Any], columns: Columns, source: str, number: int) -> Document | None:
    """Make a document of a table's row, which `source` names, the `number`-th (0: it has columns only); or None."""
    named = {
        "--text-column": columns.text,
        "--label-by column:NAME": columns.column,
        "--source-column": columns.source,
        "--image-column": columns.image,
    }
    for option, wanted in named.items():
        if wanted is not None and wanted not in row:
            raise UsageError(
                f"{source} has no column '{wanted}' (it has: {', '.join(row)}); choose with {option}."
            )
    text, source_text = row[columns.text], None if columns.source is None else row[columns.source]
    if text is None or text == [] or (columns.source is not None and source_text is None):
        columns.notes.counts["rows_without_text"] += number > 0
        return None
    columns.notes.counts["images_unread"] += columns.image is None and "image" in row
    picture = None if columns.image is None else _picture(row[columns.image], source)
    if columns.image is not None and picture is None:
        columns.notes.counts["rows_without_image"] += 1
        return None
    if isinstance(text, list):
        text = as_text(text, columns, f"{source}: column '{columns.text}'")
    for option, each in (("--text-column", text), ("--source-column", source_text or "")):
        if not isinstance(each, str):
            raise UsageError(f"{source}: column '{named[option]}' holds no text; choose with {option}.")
    document = Document(text, None, source_text, picture, f"row {number} of {source}")
    if columns.rows:
        return replace(document, label=columns.labelled("rows", f"row {number}"))
    column = next((name for name in columns.of_labels if row.get(name) not in (None, "")), None)
    if column is None:
        return document
    label = str(row[column]).encode("utf-8", "replace").decode()
    return replace(document, label=columns.labelled(f"column {column}", label))


def _picture(value: object, source: str) -> Path | bytes | None:
    """Find the picture of a row: its path, its bytes, or both as `datasets` stores them; None where there is none."""
    if isinstance(value, dict):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if value is None or isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise UsageError(f"{source} has no image where one should be: give its path, or its bytes")
    return Path(value)


def as_text(turns: Sequence[Any], columns: Columns, source: str) -> str:
    """Format a conversation by the tokenizer's chat template, without what it puts around every sequence anyway."""
    if not all(isinstance(turn, dict) and "role" in turn and "content" in turn for turn in turns):
        raise UsageError(f'{source} is neither text nor a list of {{"role": …, "content": …}}')
    tokenizer = columns.tokenizer
    # Tables fill gaps with None.
    messages = [{name: value for name, value in turn.items() if value is not None} for turn in turns]
    if tokenizer is None:
        return "\n".join(str(message.get("content")) for message in messages)
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(f"{source} is a conversation, and the tokenizer has no chat template: give text")
    try:
        messages = messages if columns.image is None else _with_picture(messages)
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:  # whatever a template raises
        raise UsageError(f"{source}: the chat template refuses it ({first_line(error)})") from error
    before, after = columns.around
    return text.removeprefix(before).removesuffix(after)


def _with_picture(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Say in a conversation where the picture stands: before the first turn of the user, where no turn says so."""
    turns = []
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        turns.append(message | {"content": [*parts]})
    if not any(part.get("type") == "image" for turn in turns for part in turn["content"]):
        turn = next((turn for turn in turns if turn.get("role") == "user"), turns[0])
        turn["content"].insert(0, {"type": "image"})
    return turns


# Data sets of the Hugging Face hub, or of a folder of data files, streamed by `datasets`.


DATASET = "hf:"


def dataset_of(name: str) -> tuple[str, str | None, str] | None:
    """Read name, config and split of `hf:NAME[:CONFIG[:SPLIT]]`; None for another name, or `UsageError`."""
    if not name.startswith(DATASET):
        return None
    dataset, config, split, *more = [*name.removeprefix(DATASET).split(":"), "", ""]
    if not dataset or any(more):
        raise UsageError(f"'{name}' does not name a dataset; write hf:NAME:CONFIG:SPLIT.")
    return dataset, config or None, split or "train"


def streamed_rows(name: str, config: str | None, split: str, columns: Columns) -> Iterator[Document]:
    """Yield the rows of a data set as they arrive; `UsageError` where it cannot be read."""
    import datasets

    try:
        dataset = datasets.load_dataset(name, config, split=split, streaming=True)
        for number, row in enumerate(rows_of_dataset(dataset, columns.image), start=1):
            if document := document_of_row(row, columns, f"Dataset {name}", number):
                yield document
    except UsageError:
        raise
    except Exception as error:  # `datasets` lets through whatever its network and file libraries raise
        why = first_line(error) or type(error).__name__
        raise UsageError(
            f"The dataset {name} cannot be read ({why}); without a network, give a folder"
        ) from error


def rows_of_dataset(dataset: Any, image: str | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data set, class numbers replaced by their names, the column `image` as it is stored."""
    import datasets

    features = dataset.features or {}
    if image in features:
        dataset = dataset.cast_column(image, datasets.Image(decode=False))
    for row in dataset:
        for column, feature in features.items():
            if isinstance(feature, datasets.ClassLabel) and row[column] is not None:
                row[column] = feature.int2str(row[column]) if row[column] >= 0 else None
        yield row


# Articles of WikiText.


def joined_articles(rows: Iterable[Document], columns: Columns) -> Iterator[Document]:
    """Join rows to articles where they are WikiText's lines: the first one with any text is a title without a label."""
    rows = iter(rows)
    opening: list[Document] = []
    for row in rows:
        opening.append(row)
        if row.text.strip():
            break
    every = chain(opening, rows)
    if opening and opening[-1].label is None and ARTICLE_TITLE.fullmatch(opening[-1].text):
        return _articles((row.text for row in every), columns)
    return every


def _articles(lines: Iterable[str], columns: Columns) -> Iterator[Document]:
    """Join lines from one title, between empty lines, to the next: it is the label (the n-th such: `Title (n)`)."""
    title: str | None = None
    body: list[str] = []
    occurrences: Counter[str] = Counter()
    before = ""
    for line, after in pairwise(chain(lines, [""])):
        opens = None if before.strip() or after.strip() else ARTICLE_TITLE.fullmatch(line)
        if opens:
            if any(map(str.strip, body)):
                yield Document("".join(body), title)
            body, title = [], opens[1]
            occurrences[title] += 1
            title += f" ({occurrences[title]})" if occurrences[title] > 1 else ""
            if not columns.by_place:
                columns.labelled("titles of articles", title)
        body.append(line if line.endswith("\n") else line + "\n")
        before = line
    if any(map(str.strip, body)):
        yield Document("".join(body), title)
