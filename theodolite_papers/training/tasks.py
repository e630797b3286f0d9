"""The tasks of the papers' toy models: the characters of a text, additions (Song & Zhong 2024, A.2, D.3)."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from theodolite import Corpus
from theodolite.errors import UsageError

IGNORED = -100  # target of a position that has no part in the loss
HELD_OUT = 0.1  # last share of a text that is kept for validation
TESTED = 1000  # additions of each kind whose answers are checked, as published
QUICK_TEST = 200
ADDITION = "addition"
CHARACTERS = "\n+=0123456789"
DIGITS = (5, 10)  # fewest and most digits of a, b and c in training, as published
MOST_DIGITS = 18  # sums stay below 2⁶³
SHORT_OPERANDS = (1, 2, 3, 4)  # numbers of digits that training never saw

Batch = tuple[Int[Tensor, "batch length"], Int[Tensor, "batch length"]]
"""Inputs, and the token that should follow each (`IGNORED` where nothing is asked)."""

END_OF_TEXT = "<|endoftext|>"


def read_text(path: str | Path, what: str) -> str:
    """Read a UTF-8 file; `what` names the option or thing to replace in the error."""
    path = Path(path)
    try:
        if not path.is_file():  # a pipe or a device may have no end
            raise OSError("there is no such file")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as UTF-8 text ({error}); give another {what}.") from error


@dataclass(frozen=True)
class Characters:
    """The next character of a text; its last tenth is held out."""

    characters: str
    train: Int[np.ndarray, " tokens"]
    validation: Int[np.ndarray, " tokens"]
    length: int
    name: str = "characters"

    @classmethod
    def of_file(cls, path: str | Path, length: int = 128) -> Characters:
        """Read the characters of a UTF-8 text."""
        text = read_text(path, "--text")
        if len(text) < 20 * (length + 1):
            raise UsageError(f"{path} has {len(text)} characters; give at least {20 * (length + 1)}.")
        return cls.of_text(text, length)

    @classmethod
    def of_text(cls, text: str, length: int = 128) -> Characters:
        """Take the characters of a text of at least 20 contexts."""
        characters = "".join(sorted(set(text)))
        index = {character: i for i, character in enumerate(characters)}
        ids = np.array([index[character] for character in text], dtype=np.int64)
        cut = round(len(ids) * (1 - HELD_OUT))
        return cls(characters, ids[:cut], ids[cut:], length)

    @property
    def sha256(self) -> str:
        """Hash of characters and ids."""
        of = f"{self.characters!r} {self.length}".encode(), self.train.tobytes(), self.validation.tobytes()
        return hashlib.sha256(b"".join(of)).hexdigest()

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Draw windows at random starts."""
        starts = np.random.default_rng([seed, step]).integers(0, len(self.train) - self.length, size=size)
        rows = torch.from_numpy(np.stack([self.train[s : s + self.length + 1] for s in starts]))
        return rows[:, :-1], rows[:, 1:]

    def quick_score(self, model: PreTrainedModel) -> str:
        """Compute the loss on a few held-out windows."""
        return f"held out {self._loss(model, self.validation, 64):.4f}"

    def measure(self, model: PreTrainedModel) -> dict[str, Any]:
        """Compute losses in nats per character of all held-out windows, and of as many of the training text."""
        windows = len(self.validation) // (self.length + 1)
        return {
            "training_tokens": len(self.train),
            "validation_tokens": windows * self.length,
            "validation_loss": self._loss(model, self.validation, windows),
            "training_loss": self._loss(model, self.train, windows),
        }

    def summary(self, result: dict[str, Any]) -> list[str]:
        """Summarise a finished model in a line."""
        held_out, training = result["validation_loss"], result["training_loss"]
        return [f"loss {held_out:.3f} nats per character held out, {training:.3f} on the training text"]

    @torch.no_grad()
    def _loss(self, model: PreTrainedModel, ids: np.ndarray, most: int) -> float:
        windows = min(most, len(ids) // (self.length + 1))
        rows = torch.from_numpy(ids[: windows * (self.length + 1)]).view(windows, -1)
        losses = []
        for part in rows.split(64):
            logits = model(input_ids=part[:, :-1], use_cache=False).logits
            losses.append(cross_entropy(logits.transpose(1, 2), part[:, 1:], reduction="none"))
        return float(torch.cat(losses).double().mean())


class Addition(NamedTuple):
    """One example: `prompt` is `a+b=`, `answer` the digits of the sum, last first, and a line break."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Additions:
    """The answer of `a+b=`: the loss is of the answer's characters and its line break, nothing else.

    The answer is written in reverse, as in the published code, so that carries propagate forwards.
    """

    digits: tuple[int, int] = DIGITS
    characters: str = CHARACTERS

    @classmethod
    def of_digits(cls, given: str) -> Additions:
        """Read `10` or `5-10` digits; `UsageError` where it is neither, or not within 1 to `MOST_DIGITS`."""
        parts = given.split("-")
        if len(parts) <= 2 and all(part.isascii() and part.isdigit() for part in parts):
            fewest, most = int(parts[0]), int(parts[-1])
            if 1 <= fewest <= most <= MOST_DIGITS:
                return cls((fewest, most))
        raise UsageError(
            f"'{given}' is not a number of digits: give one, or a range as 5-10, from 1 to {MOST_DIGITS}"
        )

    @classmethod
    def named(cls, name: str) -> Additions | None:
        """Read the digits from the `name` of a task or its text; None: it is none of additions."""
        kind, colon, given = name.partition(":")
        if kind != ADDITION:
            return None
        return cls.of_digits(given) if colon else cls()

    @property
    def name(self) -> str:
        """`addition`, or `addition:10`, `addition:3-6` where the digits are not the published ones."""
        fewest, most = self.digits
        given = f"{ADDITION}:{fewest if fewest == most else f'{fewest}-{most}'}"
        return ADDITION if self.digits == DIGITS else given

    @property
    def length(self) -> int:
        """Characters of the longest example: three numbers, `+`, `=` and the line break; 33 as published."""
        return 2 * self.digits[1] + self._longest_sum + 3

    @property
    def _longest_sum(self) -> int:
        """Digits of the longest sum; one more than the operands' where they are all of one length."""
        fewest, most = self.digits
        return most + (fewest == most)

    @property
    def sha256(self) -> str:
        """Hash of the characters and digits: everything else follows from the seed."""
        return hashlib.sha256(f"{self.characters!r} {self.length} {self.digits}".encode()).hexdigest()

    def draw(self, count: int, random: np.random.Generator) -> list[Addition]:
        """Draw examples; the operands' numbers of digits are uniform, and a sum that is too long is drawn again."""
        fewest, most = self.digits
        examples: list[Addition] = []
        while len(examples) < count:
            first, second = (_number(int(size), random) for size in random.integers(fewest, most + 1, size=2))
            answer = str(first + second)
            if len(answer) <= self._longest_sum:
                examples.append(Addition(f"{first}+{second}=", answer[::-1] + "\n"))
        return examples

    def corpus(self, length: int, contexts: int, seed: int = 0) -> Corpus:
        """Draw examples as a text, one per context, cut to `length` characters; shorter ones are drawn again.

        At the full length all three numbers have the most digits. `UsageError` for a length that no example has.
        """
        if not 4 <= length <= self.length:
            raise UsageError(
                f"these additions have up to {self.length} characters; use a --length from 4 to {self.length}"
            )
        random = np.random.default_rng(seed)
        texts: list[str] = []
        while len(texts) < contexts:
            texts += [text for text in map("".join, self.draw(contexts, random)) if len(text) >= length]
        ids = torch.stack([self._encode(text[:length]) for text in texts[:contexts]])
        return replace(Corpus.from_ids(ids, seed=seed), name=self.name)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Draw new examples at every step, each from position 0 on, padded after its end."""
        examples = self.draw(size, np.random.default_rng([seed, step]))
        rows = torch.zeros(size, self.length, dtype=torch.int64)
        targets = torch.full((size, self.length - 1), IGNORED)
        for row, target, example in zip(rows, targets, examples, strict=True):
            ids = self._encode("".join(example))
            row[: len(ids)] = ids
            target[len(example.prompt) - 1 : len(ids) - 1] = ids[len(example.prompt) :]
        return rows[:, :-1], targets

    def quick_score(self, model: PreTrainedModel) -> str:
        """Compute the accuracy on a few new examples."""
        return f"accuracy {self.accuracy(model):.3f}"

    def measure(self, model: PreTrainedModel) -> dict[str, Any]:
        """Compute exact-match accuracy: in distribution, and by number of digits."""
        shorter = {str(n): self.accuracy(model, (n, n), TESTED) for n in SHORT_OPERANDS}
        accuracy = self.accuracy(model, count=TESTED)
        return {"tested": TESTED, "accuracy": accuracy, "accuracy_by_digits": shorter}

    def summary(self, result: dict[str, Any]) -> list[str]:
        """Summarise a finished model in a line."""
        shares = result["accuracy_by_digits"].items()
        shorter = ", ".join(f"{n} digit{'' if n == '1' else 's'} {share:.1%}" for n, share in shares)
        return [f"accuracy {result['accuracy']:.1%} in distribution; {shorter}"]

    def _encode(self, text: str) -> Int[Tensor, " characters"]:
        return torch.tensor([self.characters.index(character) for character in text])

    @torch.no_grad()
    def accuracy(
        self, model: PreTrainedModel, digits: tuple[int, int] | None = None, count: int = QUICK_TEST
    ) -> float:
        """Compute the exact-match accuracy of greedy answers to `count` examples that no step drew."""
        asked = replace(self, digits=digits or self.digits)
        by_length: defaultdict[int, list[Addition]] = defaultdict(list)
        for example in asked.draw(count, np.random.default_rng([*asked.digits, 1 << 40])):
            by_length[len(example.prompt)].append(example)
        right = 0
        for prompt, examples in by_length.items():
            ids = torch.stack([self._encode(example.prompt) for example in examples])
            for _ in range(min(max(len(e.answer) for e in examples), self.length - prompt)):
                logits = model(input_ids=ids, use_cache=False).logits
                ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
            for row, example in zip(ids[:, prompt:], examples, strict=True):
                wanted = self._encode(example.answer)
                right += torch.equal(row[: len(wanted)], wanted)
        return right / count


def _number(digits: int, random: np.random.Generator) -> int:
    return int(random.integers(10 ** (digits - 1) if digits > 1 else 0, 10**digits))


Task = Characters | Additions  # what a training run reads, and how it is judged


def character_tokenizer(characters: str, length: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer of characters; a character that is not among `characters` is left out."""
    vocabulary = {character: index for index, character in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=length)


def byte_pair_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer with one special token, `END_OF_TEXT` (id 0)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise UsageError(
            f"This text makes a vocabulary of {tokenizer.get_vocab_size()} tokens, not of {vocabulary}; "
            "ask for a smaller one (of at least 257), or give more text."
        )
    return tokenizer
