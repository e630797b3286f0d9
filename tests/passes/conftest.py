"""A text that most passes read: 12 short contexts of three labels."""

from __future__ import annotations

import numpy as np
import pytest

from tests import checkpoints
from theodolite.corpus.corpus import Corpus

LENGTH = 40


@pytest.fixture(scope="module")
def texts() -> tuple[list[str], list[str]]:
    generator = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "of", "the", "to", "and"]
    labels = ["a", "b", "c"] * 4
    chosen = [" ".join(generator.choice(words[i % 3 :], 40)) for i in range(len(labels))]
    return chosen, labels


@pytest.fixture(scope="module")
def corpus(texts) -> Corpus:
    return Corpus.from_texts(texts[0], checkpoints.byte_tokenizer(), LENGTH, labels=texts[1], contexts=12)
