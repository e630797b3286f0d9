"""Draw addition problems as text, as in Song & Zhong 2024 (section 4.3, appendix D.3).

An example is `a+b=c` and a line break, one token per character. The answer is written in reverse, last
digit first, as in their published code (not stated in the paper), so that carries propagate forwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from theodolite.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

CHARACTERS = "\n+=0123456789"

DIGITS = (5, 10)
"""Fewest and most digits of a, b and c in training, as published."""

NAME = "addition"

MOST_DIGITS = 18
"""Sums stay below 2⁶³."""


def full_length(digits: tuple[int, int] = DIGITS) -> int:
    """Count the characters of the longest example: three numbers, `+`, `=` and the line break; 33 as published."""
    return 2 * digits[1] + _longest_sum(digits) + 3


def corpus_name(digits: tuple[int, int]) -> str:
    """Name the corpus: `addition`, or `addition:10`, `addition:3-6` where the digits are not the published ones."""
    fewest, most = digits
    return NAME if digits == DIGITS else f"{NAME}:{fewest if fewest == most else f'{fewest}-{most}'}"


def digits_of(name: str) -> tuple[int, int] | None:
    """Read the digits from the name of a corpus; None: it is none of addition problems."""
    kind, colon, given = name.partition(":")
    if kind != NAME:
        return None
    return parse_digits(given) if colon else DIGITS


def parse_digits(given: str) -> tuple[int, int]:
    """Read `10` or `5-10` as (fewest, most); `UsageError` where it is neither, or not within 1 to `MOST_DIGITS`."""
    parts = given.split("-")
    if len(parts) <= 2 and all(part.isascii() and part.isdigit() for part in parts):
        fewest, most = int(parts[0]), int(parts[-1])
        if 1 <= fewest <= most <= MOST_DIGITS:
            return fewest, most
    raise UsageError(
        f"'{given}' is not a number of digits: give one, or a range as 5-10, from 1 to {MOST_DIGITS}"
    )


@dataclass(frozen=True)
class Addition:
    """One example: `prompt` is `a+b=`, `answer` the digits of the sum, last first, and a line break."""

    prompt: str
    answer: str

    @property
    def text(self) -> str:
        """The whole example."""
        return self.prompt + self.answer


def additions(count: int, random: np.random.Generator, digits: tuple[int, int] = DIGITS) -> list[Addition]:
    """Draw examples whose operands have uniformly drawn numbers of digits, and whose sum has at most the largest one.

    With one length alone (`digits = (n, n)`) the sum may have n + 1 digits.
    """
    fewest, most = digits
    longest = _longest_sum(digits)
    examples: list[Addition] = []
    while len(examples) < count:
        first, second = (_number(int(size), random) for size in random.integers(fewest, most + 1, size=2))
        answer = str(first + second)
        if len(answer) <= longest:
            examples.append(Addition(f"{first}+{second}=", answer[::-1] + "\n"))
    return examples


def _longest_sum(digits: tuple[int, int]) -> int:
    fewest, most = digits
    return most + 1 if fewest == most else most


def _number(digits: int, random: np.random.Generator) -> int:
    return int(random.integers(10 ** (digits - 1) if digits > 1 else 0, 10**digits))
