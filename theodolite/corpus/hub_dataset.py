"""Data sets of the Hugging Face hub, or of a folder of data files, as documents, streamed by `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from theodolite.corpus.documents import Columns, Document, document_of_row, joined_articles
from theodolite.errors import UsageError, first_line


def streamed_documents(name: str, config: str | None, split: str, columns: Columns) -> Iterator[Document]:
    """Documents of a dataset as they arrive: its rows, or the articles whose lines they are."""
    return joined_articles(streamed_rows(name, config, split, columns))


def streamed_rows(name: str, config: str | None, split: str, columns: Columns) -> Iterator[Document]:
    """Rows of a dataset as they arrive, class numbers replaced by their names."""
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
    """A dataset to be read while open; `UsageError` where it cannot be."""
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
