"""Tests of pruning, and the text that they prune on."""

from theodolite.corpus.corpus import Corpus


def corpus_of(contexts: int = 10, length: int = 24, seed: int = 0) -> Corpus:
    """Random tokens."""
    return Corpus.random_tokens(300, length, contexts, seed)
