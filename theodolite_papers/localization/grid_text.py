"""The text of the LocAteR experiment: one file to train on, one to judge on, cut as fairseq cuts them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor

from theodolite.corpus.documents import Document
from theodolite.errors import UsageError, first_line
from theodolite.system.checksums import read_checked, write_checked
from theodolite.system.files import disk_errors, write_atomically
from theodolite_papers.training.embedded_text import Source, train_tokenizer
from theodolite_papers.training.tasks import read_text

END_OF_LINE, UNKNOWN = "</s>", "<unk>"


@dataclass(frozen=True)
class GridText:
    """Windows of length + 1 tokens, each sharing one token with the next, so that every token is predicted once.

    tokenizer: trained on the training text alone. train, held_out: ids, (windows, length + 1). tokens_per_word: of
    the held-out text; a line end is a word, as in the usual perplexity of WikiText. sha256: of both files' bytes
    and of how they were cut.
    """

    tokenizer: Tokenizer
    train: Int[Tensor, "windows window"]
    held_out: Int[Tensor, "windows window"]
    tokens_per_word: float
    sha256: str

    def batch(self, step: int, size: int, seed: int) -> Int[Tensor, "size window"]:
        """The windows of a step: every epoch in another order, its last incomplete batch left out."""
        epoch, place = divmod(step, len(self.train) // size)
        return self.train[_order(len(self.train), seed, epoch)[place * size : (place + 1) * size]]


@lru_cache(maxsize=4)
def _order(windows: int, seed: int, epoch: int) -> Int[Tensor, " windows"]:
    return torch.from_numpy(np.random.default_rng([seed, epoch]).permutation(windows))


@dataclass(frozen=True)
class TextFiles:
    """Which texts, and how they are cut.

    length: tokens of a context. batch: contexts per step. vocabulary: of a byte-level BPE; None: one token per word.
    """

    train: Path
    held_out: Path
    length: int = 64
    batch: int = 64
    vocabulary: int | None = 2048

    def read(self) -> GridText:
        """Tokenize and cut both."""
        texts = [read_text(path, "file") for path in (self.train, self.held_out)]
        tokenizer = (
            word_tokenizer(texts[0])
            if self.vocabulary is None
            else train_tokenizer([Source("text", 1.0, (Document(texts[0]),))], self.vocabulary, 0)
        )
        streams = [np.array(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]
        for path, stream, least in zip((self.train, self.held_out), streams, (self.batch, 1), strict=True):
            if len(stream) <= least * self.length:
                needed = least * self.length + 1
                raise UsageError(f"{path} has {len(stream)} tokens; give a text of {needed} or more.")
        words = len(texts[1].split()) + texts[1].count("\n")
        cut = [_windows(stream, self.length) for stream in streams]
        return GridText(tokenizer, cut[0], cut[1], len(streams[1]) / words, self.sha256())

    def sha256(self) -> str:
        """Of both files' text and of how they are cut."""
        digest = hashlib.sha256(f"{self.length} {self.vocabulary}".encode())
        for path in (self.train, self.held_out):
            digest.update(hashlib.sha256(read_text(path, "file").encode()).digest())
        return digest.hexdigest()


def kept_text(folder: Path, files: TextFiles) -> GridText:
    """The text of a grid: as its folder keeps it, or read from `files` and kept there."""
    place = folder / "text.safetensors"
    if not place.exists():
        text = files.read()
        facts = {"sha256": text.sha256, "tokens_per_word": text.tokens_per_word}
        facts |= {"tokenizer": text.tokenizer.to_str()}
        notes, tensors = {"text": json.dumps(facts)}, {"train": text.train, "held_out": text.held_out}
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(place, lambda path: write_checked(path, tensors, notes))
    text = load_text(folder)
    if text.sha256 != files.sha256():
        raise UsageError(f"{folder} holds a grid of another text or vocabulary; choose another folder.")
    return text


def load_text(folder: Path) -> GridText:
    """The text that a grid's folder keeps."""
    place = folder / "text.safetensors"
    try:
        tensors, notes = read_checked(place)
        facts = json.loads(notes["text"])
        facts["tokenizer"] = Tokenizer.from_str(facts["tokenizer"])
        return GridText(train=tensors["train"], held_out=tensors["held_out"], **facts)
    except Exception as error:  # of the tokenizer, which has no class of its own
        raise UsageError(
            f"{place} is damaged ({first_line(error)}); remove {folder} to start over."
        ) from error


def word_tokenizer(text: str) -> Tokenizer:
    """One token per word between white space, the frequent ones first, and one per line end; others become `<unk>`."""
    counts = Counter(text.split())
    words = sorted(counts.keys() - {END_OF_LINE, UNKNOWN}, key=lambda word: (-counts[word], word))
    vocabulary = {word: index for index, word in enumerate([END_OF_LINE, UNKNOWN, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Replace(Regex("\n"), f" {END_OF_LINE} ")
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def _windows(stream: np.ndarray, length: int) -> Int[Tensor, "windows window"]:
    starts = np.arange((len(stream) - 1) // length) * length
    return torch.from_numpy(stream[starts[:, None] + np.arange(length + 1)].astype(np.int64))
