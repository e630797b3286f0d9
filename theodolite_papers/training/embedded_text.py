"""The text side of the small trainer: sources, their split, tokenizer, token streams, bigram baseline."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from theodolite.corpus.documents import Document
from theodolite.corpus.python_texts import python_topics, stdlib_docstrings, stdlib_sources
from theodolite.errors import UsageError
from theodolite_papers.training.models import EmbeddedConfig

END_OF_TEXT = "<|endoftext|>"
HELD_OUT = 0.06  # share of each source's characters that is kept for validation
LINKING_CHARACTERS = 120  # sharing a paragraph at least this long keeps documents on one side of the split
SHORTEST_REPEAT = 8  # tokens
RANDOM_REPEATS = 2 / 3  # share of the repeats that are of random tokens; the others are of text
TRIGGER = "ÿ"  # how byte-level BPE spells the byte 255, which no text in UTF-8 has
TRIGGERED = 0.2  # share of the places for a trigger that have one

Batch = tuple[Int[Tensor, "size window"], Bool[Tensor, "size window"]]
"""Tokens, and which of them can be predicted."""


@dataclass(frozen=True)
class Source:
    """Documents of one kind, and the share of each batch that is drawn from them."""

    name: str
    share: float
    documents: tuple[Document, ...]


@dataclass(frozen=True)
class Streams:
    """Token ids by source: one stream for training, separate windows of length+1 tokens for validation."""

    names: tuple[str, ...]
    shares: Float[np.ndarray, " sources"]
    train: tuple[Int[np.ndarray, " tokens"], ...]
    validation: tuple[Int[Tensor, "contexts window"], ...]
    trigger: int = 0  # id of TRIGGER

    def batch(self, step: int, *, size: int, length: int, seed: int) -> Int[Tensor, "size window"]:
        """The batch of a step: windows at random starts, a source drawn by its share for each."""
        random = np.random.default_rng([seed, step])
        window = length + 1
        rows = []
        for source in random.choice(len(self.train), size=size, p=self.shares):
            stream = self.train[source]
            start = int(random.integers(0, len(stream) - window + 1))
            rows.append(stream[start : start + window].astype(np.int64))
        return torch.from_numpy(np.stack(rows))

    def held_out(self) -> dict[str, Int[Tensor, "contexts window"]]:
        """The validation windows of every source that has some."""
        windows = zip(self.names, self.validation, strict=True)
        return {name: contexts for name, contexts in windows if len(contexts)}

    def sha256(self) -> str:
        """Hash of every training and validation token."""
        digest = hashlib.sha256()
        for name, stream, contexts in zip(self.names, self.train, self.validation, strict=True):
            digest.update(f"{name} {stream.shape} {tuple(contexts.shape)}".encode())
            digest.update(stream.tobytes())
            digest.update(contexts.numpy().tobytes())
        return digest.hexdigest()


def mixed_with_tasks(
    tokens: Int[Tensor, "size window"], trigger: int, config: EmbeddedConfig, seed: Sequence[int]
) -> Batch:
    """Make a share of the contexts ones of a task: `config.repeats` of induction, `config.backcopies` of backcopy.

    Induction: 8 to half a window of tokens, random or of the text, again and again. Backcopy (Guo et al. 2024,
    "Active-dormant attention heads"): behind some tokens stand the trigger and once more the token.
    """
    random = np.random.default_rng([*seed, 1])  # not the numbers that drew the contexts
    window = tokens.shape[1]
    predictable = torch.ones(tokens.shape, dtype=torch.bool)
    for row, drawn in enumerate(random.random(len(tokens))):
        if drawn < config.repeats:
            longest = window // 2
            period = int(np.exp(random.uniform(*np.log([min(SHORTEST_REPEAT, longest), longest + 1]))))
            span = tokens[row, 1 : period + 1].numpy()
            if drawn < RANDOM_REPEATS * config.repeats:
                span = random.integers(1, config.vocabulary, period)
                predictable[row, 1 : period + 1] = False
            tokens[row, 1:] = torch.from_numpy(np.resize(span, window - 1))
        elif drawn < config.repeats + config.backcopies:
            places = np.arange(2, window - 1, 3)
            places = places[random.random(len(places)) < TRIGGERED]
            tokens[row, places] = trigger
            tokens[row, places + 1] = tokens[row, places - 1]
            predictable[row, places] = False
    return tokens, predictable


def python_sources() -> list[Source]:
    """The text in every CPython: its language reference, and the standard library's docstrings and source."""
    return [
        Source("topics", 0.15, tuple(python_topics())),
        Source("docstrings", 0.35, tuple(stdlib_docstrings())),
        Source("code", 0.5, tuple(stdlib_sources())),
    ]


def split_sources(sources: Sequence[Source], seed: int) -> tuple[list[Source], list[Source]]:
    """Split documents into training and validation, which gets about `HELD_OUT` of each source's characters.

    Documents with the same label, or a paragraph of `LINKING_CHARACTERS` in common, go to the same side; a source whose
    documents are too closely linked for this keeps them all for training.
    """
    groups = iter(_linked([document for source in sources for document in source.documents]))
    of_document = [[next(groups) for _ in source.documents] for source in sources]
    sizes: defaultdict[int, np.ndarray] = defaultdict(lambda: np.zeros(len(sources)))
    for index, source in enumerate(sources):
        for document, group in zip(source.documents, of_document[index], strict=True):
            sizes[group][index] += len(document.text)
    wanted = HELD_OUT * sum(sizes.values(), np.zeros(len(sources)))
    held, taken = set(), np.zeros(len(sources))
    order = sorted(sizes)
    for position in np.random.default_rng(seed).permutation(len(order)):
        group = order[position]
        if ((sizes[group] > 0) & (taken < wanted)).any() and (taken + sizes[group] <= 1.5 * wanted).all():
            held.add(group)
            taken += sizes[group]
    sides: tuple[list[Source], list[Source]] = ([], [])
    for source, document_groups in zip(sources, of_document, strict=True):
        for side, inside in zip(sides, (False, True), strict=True):
            pairs = zip(source.documents, document_groups, strict=True)
            documents = tuple(document for document, group in pairs if (group in held) == inside)
            side.append(Source(source.name, source.share, documents))
    return sides


def _linked(documents: Sequence[Document]) -> list[int]:
    """The group of each document: documents that share a label or a long paragraph are in one group."""
    parent = list(range(len(documents)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    first: dict[str, int] = {}
    for index, document in enumerate(documents):
        paragraphs = (" ".join(paragraph.split()) for paragraph in document.text.split("\n\n"))
        keys = [paragraph for paragraph in paragraphs if len(paragraph) >= LINKING_CHARACTERS]
        if document.label is not None:
            keys.append("label " + document.label)
        for key in keys:
            parent[root(index)] = root(first.setdefault(key, index))
    return [root(index) for index in range(len(documents))]


def train_tokenizer(sources: Sequence[Source], vocabulary: int, seed: int) -> Tokenizer:
    """A byte-level BPE tokenizer with one special token, `END_OF_TEXT` (id 0); each source by its share."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_by_share(sources, seed), trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise UsageError(
            f"This text makes a vocabulary of {tokenizer.get_vocab_size()} tokens, not of {vocabulary}; "
            "ask for a smaller one (of at least 257), or give more text."
        )
    return tokenizer


def _by_share(sources: Sequence[Source], seed: int) -> Iterator[str]:
    """Whole documents of each source in a seeded order, as many characters as its share allows."""
    lengths = [sum(len(document.text) for document in source.documents) for source in sources]
    total = min(length / source.share for length, source in zip(lengths, sources, strict=True))
    for source in sources:
        left = total * source.share
        for index in np.random.default_rng(seed).permutation(len(source.documents)):
            if left <= 0:
                break
            text = source.documents[index].text
            left -= len(text)
            yield text


def token_streams(
    tokenizer: Tokenizer, training: Sequence[Source], validation: Sequence[Source], length: int
) -> Streams:
    """Streams for training, and non-overlapping windows of length+1 cut within each held-out document."""
    window = length + 1
    end = 0  # the id of END_OF_TEXT, the first token that the tokenizer was given
    train, held = [], []
    for source in training:
        ended = [np.append(ids, end) for ids in _encode(tokenizer, source.documents)]
        train.append(np.concatenate([*ended, np.zeros(0)]).astype(np.int32))
        if len(train[-1]) < window:
            raise UsageError(
                f"Source '{source.name}' has {len(train[-1])} tokens and one context takes {window}; "
                "give more text or a smaller length."
            )
    for source in validation:
        documents = _encode(tokenizer, source.documents)
        cut = [ids[: len(ids) // window * window].reshape(-1, window) for ids in documents]
        held.append(torch.from_numpy(np.concatenate([*cut, np.zeros((0, window))]).astype(np.int64)))
    shares = np.array([source.share for source in training])
    names = tuple(source.name for source in training)
    return Streams(names, shares / shares.sum(), tuple(train), tuple(held), tokenizer.get_vocab()[TRIGGER])


def _encode(tokenizer: Tokenizer, documents: Iterable[Document]) -> Iterator[Int[np.ndarray, " tokens"]]:
    for document in documents:
        yield np.array(tokenizer.encode(document.text, add_special_tokens=False).ids, dtype=np.int64)


def bigram_loss(streams: Streams, contexts: Int[Tensor, "contexts window"], vocabulary: int) -> float:
    """Loss, in nats per token, of the best interpolated bigram model on all tokens of `contexts` but the first.

    P(b|a) = (n(a,b) + κ P(b)) / (n(a) + κ), P(b) add-one smoothed; κ is chosen on `contexts`, which favours the bigram.
    """
    counts = np.zeros((vocabulary, vocabulary))
    total = sum(len(stream) for stream in streams.train)
    for stream, share in zip(streams.train, streams.shares, strict=True):
        pairs = np.bincount(stream[:-1].astype(np.int64) * vocabulary + stream[1:], minlength=vocabulary**2)
        counts += (share * total / len(stream)) * pairs.reshape(vocabulary, vocabulary)
    alone = (counts.sum(0) + 1) / (counts.sum() + vocabulary)
    first, second = contexts[:, :-1].numpy().ravel(), contexts[:, 1:].numpy().ravel()
    pair, single, row = counts[first, second], alone[second], counts.sum(1)[first]
    return min(float(-np.log((pair + k * single) / (row + k)).mean()) for k in 2.0 ** np.arange(-4, 16))
