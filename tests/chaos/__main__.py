"""The chaos suite, `python -m tests.chaos`: commands are killed, and what they read is tampered with.

`commands` has the rule. The exit status is 1 where a trial broke it. Counts go to docs/results/chaos.json, for the page
on trust.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from datetime import date
from pathlib import Path

from tests.chaos import files, kills
from tests.chaos.commands import BAD, REFUSED, RIGHT

RESULT = Path(__file__).parents[2] / "docs" / "results" / "chaos.json"

# Kills come first: they fork, which is sound only while nothing has been computed.
KINDS = {"kills": kills.trials, "files": files.trials}


def main(seed: int) -> int:
    """Print each bad trial when it happens, a dot for every other, and counts of all: kind → answer → number."""
    counts: dict[str, dict[str, int]] = {}
    for kind, trials in KINDS.items():
        found: Counter[str] = Counter()
        for trial in trials(seed):
            found[trial.answer] += 1
            bad = f"\n{trial.answer}: {kind}, {trial.command}, {trial.what}: {trial.said}\n"
            print(bad if trial.answer in BAD else ".", end="", file=sys.stderr, flush=True)
        counts[kind] = {answer: found[answer] for answer in (RIGHT, REFUSED, *BAD)}
        print(f"{kind:8} " + "  ".join(f"{number:5} {answer}" for answer, number in counts[kind].items()))
    words = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    result = {"date": date.today().isoformat(), "commit": commit, "seed": seed, "counts": counts}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(any(found[answer] for found in counts.values() for answer in BAD))


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
