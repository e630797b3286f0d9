"""Read the texts inside every Python: its language reference, and the standard library's source."""

from __future__ import annotations

import os
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from theodolite.corpus.documents import Document

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
    """Read the source files of the standard library, each a document labelled with its path (`json/decoder.py`).

    In the order of their paths, without tests and this machine's settings.
    """
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
