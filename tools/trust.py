"""The counts of the chaos suite on docs/trust.md, from docs/results/chaos.json: `python -m tools.trust`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
PAGE, RESULT = DOCS / "trust.md", DOCS / "results" / "chaos.json"
MARK = "<!-- written by tools/trust.py -->\n"
DISTURBED = {
    "kills": "kills (SIGKILL at file events and at random moments; SIGINT, SIGTERM, SIGHUP)",
    "states": "what other code has set, one to four at once",
    "threads": "threads on one model and on several",
    "files": "damaged files",
}


def page(text: str, result: dict[str, Any]) -> str:
    """The page, with the table of the counts in the place of what is below the mark."""
    answers = list(next(iter(result["counts"].values())))
    rows = [
        f"| {title} | " + " | ".join(f"{result['counts'][kind][answer]:,}" for answer in answers) + " |"
        for kind, title in DISTURBED.items()
    ]
    lines = [
        f"On {result['date']} (commit {result['commit']}, seed {result['seed']}):",
        "",
        "| disturbed by | " + " | ".join(answers) + " |",
        "| --- |" + " ---: |" * len(answers),
        *rows,
    ]
    return text.split(MARK)[0] + MARK + "\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8"), json.loads(RESULT.read_text("utf-8"))), "utf-8")
