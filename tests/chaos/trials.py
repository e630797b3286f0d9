"""What a trial of the chaos suite ends in, and the counts of many.

The rule: the right bytes or numbers; or a refusal, one line and a status other than 0; and nothing lost.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

RIGHT = "right"
REFUSED = "refused"
WRONG = "wrong"
"""Other bytes or numbers than those of an undisturbed run, and no word of it."""
UNFORESEEN = "unforeseen"
"""It ended in an error that nobody had foreseen: a traceback, several lines, a signal, or no end at all."""
LOST = "lost"
"""What had been there, or had been computed and kept, is gone; or something is left that a rerun falls over."""

BAD = (WRONG, UNFORESEEN, LOST)


@dataclass(frozen=True)
class Trial:
    """One disturbance of one command.

    Attributes:
        kind: what was disturbed: "states", "threads", "kills", "files".
        what: the disturbance: the state, the moment, how the file was changed.
        command: of what.
        answer: `RIGHT`, `REFUSED`, or one of `BAD`.
        said: the line that was printed, or what is wrong.
    """

    kind: str
    what: str
    command: str
    answer: str
    said: str = ""


def told(trials: Iterable[Trial], progress: Any) -> Iterator[Trial]:
    """The trials, each bad one printed when it happens; a dot for every other."""
    for trial in trials:
        if trial.answer in BAD:
            print(
                f"\n{trial.answer}: {trial.kind}, {trial.command}, {trial.what}: {trial.said}", file=progress
            )
        else:
            print(".", end="", file=progress, flush=True)
        yield trial


def counts(trials: Iterable[Trial]) -> dict[str, dict[str, int]]:
    """Kind → answer → number; every answer is there, also with 0."""
    found: dict[str, Counter[str]] = {}
    for trial in trials:
        found.setdefault(trial.kind, Counter())[trial.answer] += 1
    return {kind: {answer: of[answer] for answer in (RIGHT, REFUSED, *BAD)} for kind, of in found.items()}


def write_counts(trials: Iterable[Trial], path: Path, seed: int, commit: str) -> None:
    """`{"date", "commit", "seed", "counts"}`, what the site's page on trust shows."""
    found = {
        "date": date.today().isoformat(),
        "commit": commit,
        "seed": seed,
        "counts": counts(trials),
    }
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
