"""The chaos suite: `python -m tests.chaos`, or a part of it: `python -m tests.chaos kills files --seed 1`.

Commands are disturbed while they run, by what was set before, by kills and by damaged files; `commands` has the rule.
The exit status is 1 where a trial broke it. Whole, it writes docs/results/chaos.json, for the page on trust.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from datetime import date
from pathlib import Path

from tests.chaos import files, kills, states
from tests.chaos.commands import BAD, REFUSED, RIGHT

RESULT = Path(__file__).parents[2] / "docs" / "results" / "chaos.json"

KINDS = {
    # Kills come first: they fork, which is sound only while nothing has been computed.
    "kills": kills.trials,
    "states": states.trials,
    "threads": states.thread_trials,
    "files": files.trials,
}


def main(kinds: list[str], seed: int, share: float) -> int:
    """Print each bad trial when it happens, a dot for every other, and counts of all: kind → answer → number."""
    counts: dict[str, dict[str, int]] = {}
    for kind in [kind for kind in KINDS if kind in kinds]:
        found: Counter[str] = Counter()
        for trial in KINDS[kind](seed, share):
            found[trial.answer] += 1
            bad = f"\n{trial.answer}: {kind}, {trial.command}, {trial.what}: {trial.said}\n"
            print(bad if trial.answer in BAD else ".", end="", file=sys.stderr, flush=True)
        counts[kind] = {answer: found[answer] for answer in (RIGHT, REFUSED, *BAD)}
        print(f"{kind:8} " + "  ".join(f"{number:5} {answer}" for answer, number in counts[kind].items()))
    if share == 1.0 and set(kinds) == set(KINDS):
        words = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
        result = {"date": date.today().isoformat(), "commit": commit, "seed": seed, "counts": counts}
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(any(found[answer] for found in counts.values() for answer in BAD))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the trials, drawn by the seed")
    given = parser.parse_args()
    raise SystemExit(main(given.kinds or list(KINDS), given.seed, given.share))
