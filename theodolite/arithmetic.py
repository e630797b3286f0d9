"""Additions as text: what the arithmetic models of Song & Zhong 2024 (section 4.3, appendix D.3) read.

An example is `a+b=c` and a line break, one character a token. The answer is written from its last digit to its
first, as their published code writes it (their text does not say so): carries then run with the reading.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CHARACTERS = "\n+=0123456789"

DIGITS = (5, 10)
"""Fewest and most digits of a, b and c in training, as published."""

FULL = 3 * DIGITS[1] + 3
"""Characters of the longest example: three numbers of ten digits, `+`, `=` and the line break."""


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
    """Examples whose operands have a uniformly drawn number of digits, and whose sum has at most as many.

    With one length alone (`digits = (n, n)`) the sum may have n + 1 digits.
    """
    fewest, most = digits
    longest = most + 1 if fewest == most else most
    examples: list[Addition] = []
    while len(examples) < count:
        first, second = (_number(int(size), random) for size in random.integers(fewest, most + 1, size=2))
        answer = str(first + second)
        if len(answer) <= longest:
            examples.append(Addition(f"{first}+{second}=", answer[::-1] + "\n"))
    return examples


def _number(digits: int, random: np.random.Generator) -> int:
    return int(random.integers(10 ** (digits - 1) if digits > 1 else 0, 10**digits))
