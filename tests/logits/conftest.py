"""Random contexts, and surveys of them."""

from __future__ import annotations

import pytest

from tests import checkpoints
from theodolite.corpus.corpus import Corpus
from theodolite.passes.survey import survey

LENGTH = 24


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.random_tokens(checkpoints.VOCABULARY, LENGTH, 12)


@pytest.fixture(scope="module")
def surveyed(opened, corpus):
    cache = {}

    def run(family):
        if family not in cache:
            cache[family] = survey(opened(family), corpus)
        return cache[family]

    return run
