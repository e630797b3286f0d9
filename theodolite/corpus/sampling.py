"""Choose which contexts of a text are kept: a seeded sample, or as many of each label."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

import numpy as np

from theodolite.corpus.documents import printable
from theodolite.errors import UsageError
from theodolite.system.progress import ShowTokens

LEAST_LENGTH = 4  # tokens that a context or a prompt must have to be measured
LARGEST_SEED = (1 << 63) - 1

READ_AHEAD = 4  # a stream is read until it gave this many times the contexts (or labels) asked for
LABELS_READ_AHEAD = 128  # and, where labels are few or rare, this many times the contexts

Item = TypeVar("Item")


@dataclass(frozen=True)
class Choice:
    """The contexts that are asked for: at most so many (None: all), or so many of each label that has them.

    `rows`: a label is complete once the next begins. `streamed`: the text may be endless. `show` may raise to stop.
    """

    contexts: int | None
    seed: int = 0
    per_label: int | None = None
    rows: bool = False
    streamed: bool = False
    show: ShowTokens = lambda tokens: None

    def check(self) -> None:
        """Raise `UsageError` for numbers below 1, fewer contexts than of one label, and a seed out of range."""
        check_seed(self.seed)
        for number, option in ((self.contexts, "--contexts"), (self.per_label, "--per-label")):
            if number is not None and number < 1:
                raise UsageError(f"{number} contexts were asked for: use a number ({option}) above 0")
        if self.contexts is not None and self.per_label is not None and self.contexts < self.per_label:
            raise UsageError(f"--contexts {self.contexts} is fewer than --per-label {self.per_label}")


ALL = Choice(None)


Sample = tuple[list[str | None], list[Item], dict[str, int]]
"""Labels and items in reading order; and for the provenance, what was asked of each label, how many have fewer, and for
how many there was no room."""


class Reservoir(Generic[Item]):
    """A uniform sample of `size` without replacement, in memory for `size` (algorithm R); None: everything."""

    def __init__(self, size: int | None, random: np.random.Generator) -> None:
        self.size, self.random = size, random
        self.items: list[Item] = []
        self.offered = 0

    def add(self, item: Item) -> None:
        """Offer one more item."""
        if self.size is None or self.offered < self.size:
            self.items.append(item)
        elif (index := int(self.random.integers(0, self.offered + 1))) < self.size:
            self.items[index] = item
        self.offered += 1


Entry = tuple[int, str | None, Item]  # position in reading order, label, what is chosen


def choose(items: Iterable[tuple[str | None, Item]], choice: Choice) -> Sample[Item]:
    """Choose contexts as they are read, each after its label; `UsageError` where no label has as many as asked for."""
    random = np.random.default_rng(choice.seed)
    entries = ((number, label, item) for number, (label, item) in enumerate(items))
    if choice.per_label is None:
        most = READ_AHEAD * choice.contexts if choice.streamed and choice.contexts else None
        reservoir: Reservoir[Entry[Item]] = Reservoir(choice.contexts, random)
        for entry in islice(entries, most):
            reservoir.add(entry)
        return *_in_order(reservoir.items), {}
    room = None if choice.contexts is None else choice.contexts // choice.per_label
    labels: Reservoir[list[Entry[Item]]] = Reservoir(room, random)
    too_short, longest = 0, (0, "")
    for label, contexts in _by_label(entries, choice, random):
        longest = max(longest, (contexts.offered, label), key=lambda count: count[0])
        if contexts.offered < choice.per_label:
            too_short += 1
        else:
            labels.add(contexts.items)
    if longest[0] and not labels.items:
        raise UsageError(
            f"no label has {choice.per_label} contexts: '{printable(longest[1])}' has the most, {longest[0]}; use a "
            "smaller --per-label, or of text --length"
        )
    chosen = _in_order([entry for of_label in labels.items for entry in of_label])
    left_out = {"labels_too_short": too_short, "labels_not_drawn": labels.offered - len(labels.items)}
    return *chosen, {"per_label": choice.per_label, **left_out}


def _in_order(entries: list[Entry[Item]]) -> tuple[list[str | None], list[Item]]:
    entries = sorted(entries, key=lambda entry: entry[0])
    return [label for _, label, _ in entries], [item for _, _, item in entries]


def _by_label(
    entries: Iterable[Entry[Item]], choice: Choice, random: np.random.Generator
) -> Iterator[tuple[str, Reservoir[Entry[Item]]]]:
    """Yield every label with a sample of its contexts; contexts without a label are passed over."""
    most = enough = None
    if choice.streamed and choice.contexts and choice.per_label:
        most = LABELS_READ_AHEAD * choice.contexts
        enough = READ_AHEAD * (choice.contexts // choice.per_label)
    reservoirs: dict[str, Reservoir[Entry[Item]]] = {}
    complete = 0
    before: str | None = None
    for entry in islice(entries, most):
        label = entry[1]
        if label is None:
            continue
        if choice.rows and before not in (None, label):
            yield before, reservoirs.pop(before)
        before = label
        reservoir = reservoirs.setdefault(label, Reservoir(choice.per_label, random))
        reservoir.add(entry)
        complete += reservoir.offered == choice.per_label
        if complete == enough:
            break
    yield from reservoirs.items()


def check_seed(seed: int) -> None:
    """Raise `UsageError` unless the seed is one that every generator takes."""
    if not 0 <= seed <= LARGEST_SEED:
        raise UsageError(f"there is no seed {seed}: use --seed 0 to {LARGEST_SEED}")


def check_length(length: int) -> None:
    """Raise `UsageError` where contexts of so many tokens cannot be measured."""
    if length < LEAST_LENGTH:
        raise UsageError(f"contexts of {length} tokens are too short: use --length {LEAST_LENGTH} or more")
