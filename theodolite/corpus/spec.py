"""The texts that have a name, and checks of a name before any library of models is imported."""

from __future__ import annotations

import os
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from theodolite.corpus.documents import Columns, Document, Notes, check_path, dataset_of, holds_images
from theodolite.errors import UsageError

HELD_OUT_TOPICS = ("bltin-type-objects", "continue", "objects", "return", "string-methods")
"""Topics that the embedded model was not trained on, nor on text that shares a paragraph with them."""

# Not prose and not hand-written code: tests, other packages, generated tables (`encodings` holds one of 256
# lines for each code page), and `pydoc_data`, whose one module is the text of `python_topics` itself.
STDLIB_LEFT_OUT = {"__pycache__", "dist-packages", "encodings", "idle_test", "idlelib", "pydoc_data"}
STDLIB_LEFT_OUT |= {"site-packages", "test", "tests"}


def python_topics() -> list[Document]:
    """Read the language reference that every CPython carries (`pydoc_data.topics`), one document a topic."""
    from pydoc_data.topics import topics

    return [Document(topics[name], name) for name in sorted(topics)]


def held_out_topics() -> list[Document]:
    """Read the topics that the embedded model was not trained on, without labels."""
    return [Document(topic.text) for topic in python_topics() if topic.label in HELD_OUT_TOPICS]


def stdlib_sources() -> Iterator[Document]:
    """Read the source files of the standard library in order, each labelled with its path (`json/decoder.py`)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: dict[str, Path] = {}
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [n for n in subfolders if n not in STDLIB_LEFT_OUT and not n.startswith("config-")]
        sources = (n for n in names if n.endswith(".py") and not n.startswith("_sysconfigdata"))
        files |= {Path(folder, name).relative_to(root).as_posix(): Path(folder, name) for name in sources}
    for name, path in sorted(files.items()):
        with tokenize.open(path) as file:  # honours the file's own coding line
            text = file.read()
        if text.strip():
            yield Document(text, name)


DOCS, HELD_OUT, CODE, RANDOM = "docs", "held-out", "code", "random"

PRESETS = {"wikitext-2": "hf:Salesforce/wikitext:wikitext-2-raw-v1:test"}
"""Short names of data sets that the literature reads."""

PYTHON_TEXTS = {DOCS: python_topics, HELD_OUT: held_out_topics, CODE: stdlib_sources}
"""Texts that every Python has, and what reads their documents."""

PYTHON_LABELS = {DOCS: {"labels_are": "topics of the manual"}, CODE: {"labels_are": "files of the library"}}
"""What the provenance says of their labels."""

KEYWORDS = (*PYTHON_TEXTS, RANDOM, *PRESETS)


def check_spec(spec: str | Path | None, columns: Columns, per_label: int | None = None) -> None:
    """Raise `UsageError` for a corpus whose beginning cannot be read, or options that do not go with it."""
    columns.check()
    name = DOCS if spec is None else str(spec)
    if dataset_of(PRESETS.get(name, name)) is not None:
        if columns.of_files:
            raise UsageError(f"{name} has rows and no files: leave out {columns.of_files}")
    elif name in KEYWORDS:
        documents_of = PYTHON_TEXTS.get(name)
        if per_label is not None and not (documents_of and any(one.label for one in documents_of())):
            raise UsageError(f"{name} has no labels: leave out --per-label")
        if option := columns.option or columns.of_files:
            raise UsageError(f"{name} is no {'table' if columns.option else 'file'}: leave out {option}")
    elif not Path(name).exists():
        raise UsageError(f"There is no file or folder {name}; give a path, {', '.join(KEYWORDS)} or hf:NAME.")
    elif not holds_images(Path(name)):  # whether images or texts are read is the model's to say
        check_path(Path(name), replace(columns, notes=Notes()))
