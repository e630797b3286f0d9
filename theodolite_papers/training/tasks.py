"""Train toy models on tasks: the characters of a text, additions (Song & Zhong 2024, A.2, D.3).

`training.json` next to the weights has every setting, the losses and the accuracies.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from rich.console import Console
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from theodolite import Corpus
from theodolite.errors import UsageError
from theodolite.system.files import json_text
from theodolite_papers.training.models import TaskModelConfig, task_model
from theodolite_papers.training.trainer import ModelTraining, check_training, train_into

IGNORED = -100
"""Target of a position that has no part in the loss."""

HELD_OUT = 0.1
"""Last share of a text that is kept for validation."""

TESTED = 1000
"""Additions of each kind whose answers are checked, as published."""

QUICK_TEST = 200

ADDITION = "addition"
CHARACTERS = "\n+=0123456789"

DIGITS = (5, 10)
"""Fewest and most digits of a, b and c in training, as published."""

MOST_DIGITS = 18
"""Sums stay below 2⁶³."""

SHORT_OPERANDS = (1, 2, 3, 4)
"""Numbers of digits that training never saw."""

Batch = tuple[Int[Tensor, "batch length"], Int[Tensor, "batch length"]]
"""Inputs, and the token that should follow each (`IGNORED` where nothing is asked)."""

PUBLISHED = {
    "characters": TaskModelConfig(6, 6, 384, 64, 5000, 1e-3, "cosine", dropout=0.1),
    "addition": TaskModelConfig(4, 4, 256, 64, 10000, 1e-4, "linear"),
}
"""Appendix A.2. Where it is silent (AdamW's β, gradient clipping), as in `trainer.py`."""

END_OF_TEXT = "<|endoftext|>"


def read_text(path: str | Path, what: str) -> str:
    """Read a UTF-8 file; `what` names the option or thing to replace in the error."""
    path = Path(path)
    if not path.is_file():  # a pipe or a device may have no end
        raise UsageError(f"{path} cannot be read as UTF-8 text (there is no such file); give another {what}.")
    try:
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
        digest = hashlib.sha256(f"{self.characters!r} {self.length}".encode())
        digest.update(self.train.tobytes())
        digest.update(self.validation.tobytes())
        return digest.hexdigest()

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Draw windows at random starts."""
        starts = np.random.default_rng([seed, step]).integers(0, len(self.train) - self.length, size=size)
        rows = torch.from_numpy(np.stack([self.train[s : s + self.length + 1] for s in starts]))
        return rows[:, :-1], rows[:, 1:]

    def quick_score(self, model: PreTrainedModel) -> str:
        """Compute the loss on a few held-out windows."""
        return f"held out {self._loss(model, self.validation, 64):.4f}"

    def measure(self, model: PreTrainedModel) -> dict[str, Any]:
        """Compute losses in nats per character, float32: all held-out windows, and as many of the training text."""
        windows = len(self.validation) // (self.length + 1)
        return {
            "training_tokens": len(self.train),
            "validation_tokens": windows * self.length,
            "validation_loss": self._loss(model, self.validation, windows),
            "training_loss": self._loss(model, self.train, windows),
        }

    def summary(self, result: dict[str, Any]) -> list[str]:
        """Summarise a finished model in a line."""
        return [
            f"loss {result['validation_loss']:.3f} nats per character held out, "
            f"{result['training_loss']:.3f} on the training text"
        ]

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

    The answer is written in reverse, as in the published code (not stated in the paper), so that carries propagate
    forwards.
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
        return most + 1 if fewest == most else most

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

        At the full length of 33 all three numbers of 5 to 10 digits have ten, so that `+` and `=` stand at the same
        positions in every context. `UsageError` for a length that no example has.
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
        accuracy = self.accuracy(model, count=TESTED)
        shorter = {str(n): self.accuracy(model, (n, n), TESTED) for n in SHORT_OPERANDS}
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


Task = Characters | Additions
"""What a training run reads, and how it is judged."""


def train_task_model(
    out: str | Path, task: Task, config: TaskModelConfig, *, threads: int = 2, console: Console | None = None
) -> dict[str, Any]:
    """Train on `task` and write the folder `out`; returns what `training.json` there says.

    A killed training run resumes, with the same bytes on the same machine, threads and package versions.
    """
    out = Path(out)
    check_training(out, config, threads)

    def loss(model: PreTrainedModel, step: int) -> Tensor:
        inputs, targets = task.batch(step, config.batch, config.seed)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.bfloat16):
            logits = model(input_ids=inputs, use_cache=False).logits
        return cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def measure(model: PreTrainedModel) -> dict[str, Any]:
        return {
            "task": task.name,
            "length": task.length,
            "characters": task.characters,
            "text_sha256": task.sha256,
            **asdict(config),
            "threads": threads,
            "parameters": model.num_parameters(),
            **task.measure(model),
        }

    run = ModelTraining(
        config=config,
        build=lambda: task_model(config, len(task.characters), task.length),
        tokenizer=character_tokenizer(task.characters, task.length),
        data={"task": task.name, "data": task.sha256},
        loss=loss,
        progress=lambda model, loss: f"training loss {loss:.4f}; {task.quick_score(model)}",
        measure=measure,
        page=lambda result: ("training.json", json_text(result, 2) + "\n"),
    )
    return train_into(out, run, threads, console)


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
