"""What a shell offers as the value of an option or argument. Nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from theodolite.prune.options import FORMS, METHODS
from theodolite.system.choices import DTYPES

Completion = Callable[[str], list[str]]


def one_of(choices: Iterable[str]) -> Completion:
    """A completion of one word."""
    return lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]


def corpora(incomplete: str) -> list[str]:
    """Corpora by name."""
    from theodolite.corpus.spec import KEYWORDS

    return one_of(KEYWORDS)(incomplete)


dtypes = one_of(DTYPES)
methods = one_of(METHODS)
forms = one_of(FORMS)
