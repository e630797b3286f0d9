"""Check the name of a corpus before it is read, and before any library of models is imported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from theodolite.corpus.documents import Columns, Notes, check_path
from theodolite.corpus.pictures import holds_images
from theodolite.corpus.python_texts import held_out_topics, python_topics, stdlib_sources
from theodolite.errors import UsageError

DOCS, HELD_OUT, CODE, RANDOM = "docs", "held-out", "code", "random"
DATASET = "hf:"

WIKITEXT_2 = "wikitext-2"
PRESETS = {WIKITEXT_2: "hf:Salesforce/wikitext:wikitext-2-raw-v1:test"}
"""Short names of data sets that the literature reads."""

PYTHON_TEXTS = {DOCS: python_topics, HELD_OUT: held_out_topics, CODE: stdlib_sources}
"""Texts that every Python has, and what reads their documents."""

PYTHON_LABELS = {DOCS: {"labels_are": "topics of the manual"}, CODE: {"labels_are": "files of the library"}}
"""What the provenance says of their labels."""

KEYWORDS = (*PYTHON_TEXTS, RANDOM, *PRESETS)


def dataset_of(name: str) -> tuple[str, str | None, str] | None:
    """Read name, config and split of `hf:NAME[:CONFIG[:SPLIT]]`; None for another name, or `UsageError`."""
    if not name.startswith(DATASET):
        return None
    dataset, config, split, *more = [*name.removeprefix(DATASET).split(":"), "", ""]
    if not dataset or any(more):
        raise UsageError(
            f"'{name}' does not name a dataset; write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT."
        )
    return dataset, config or None, split or "train"


def check_spec(spec: str | Path | None, columns: Columns, per_label: int | None = None) -> None:
    """Raise `UsageError` for a corpus whose beginning cannot be read, or options that do not go with it."""
    columns.check()
    name = DOCS if spec is None else str(spec)
    if dataset_of(PRESETS.get(name, name)) is not None:
        if columns.of_files:
            raise UsageError(f"{name} has rows and no files: leave out {columns.of_files}")
        return
    if name in KEYWORDS:
        documents_of = PYTHON_TEXTS.get(name)
        if per_label is not None and not (documents_of and any(one.label for one in documents_of())):
            raise UsageError(f"{name} has no labels: leave out --per-label")
        if option := columns.option or columns.of_files:
            raise UsageError(f"{name} is no {'table' if columns.option else 'file'}: leave out {option}")
        return
    if holds_images(Path(name)):
        return  # whether images or texts are read is the model's to say
    if not Path(name).exists():
        raise UsageError(
            f"There is no file or folder {name}; give a path, or {', '.join(KEYWORDS)} or hf:NAME."
        )
    check_path(Path(name), replace(columns, notes=Notes()))
