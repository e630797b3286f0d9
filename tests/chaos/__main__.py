"""The chaos suite: `python -m tests.chaos`, or a part of it: `python -m tests.chaos kills files --seed 1`.

Commands are disturbed while they run, by what was set before, by kills and by damaged files; see `trials` for the rule.
The exit status is 1 where a trial broke it. Whole, it writes docs/results/chaos.json, for the page on trust.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.chaos import files, kills, states
from tests.chaos.trials import BAD, Trial, counts, told, write_counts

RESULT = Path(__file__).parents[2] / "docs" / "results" / "chaos.json"

KINDS: dict[str, Callable[[int, float], Iterator[Trial]]] = {
    # Kills come first: they fork, which is sound only while nothing has been computed.
    "kills": kills.trials,
    "states": states.trials,
    "threads": states.thread_trials,
    "files": files.trials,
}


def main(kinds: list[str], seed: int, share: float) -> int:
    tried = [
        trial
        for kind, trials in KINDS.items()
        if kind in kinds
        for trial in told(trials(seed, share), sys.stderr)
    ]
    for kind, found in counts(tried).items():
        print(f"{kind:8} " + "  ".join(f"{number:5} {answer}" for answer, number in found.items()))
    if share == 1.0 and set(kinds) == set(KINDS):
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        )
        write_counts(tried, RESULT, seed, commit.stdout.strip())
    return int(any(trial.answer in BAD for trial in tried))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the trials, drawn by the seed")
    given = parser.parse_args()
    raise SystemExit(main(given.kinds or list(KINDS), given.seed, given.share))
