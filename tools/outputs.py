"""What the Python blocks of docs/ print, written below them: `python -m tools.outputs`.

A block whose output is shown is followed by a `text` block. All of them read the two run folders that
docs/start.md and docs/measurements/catch-tag-release.md tell the reader to make.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
SHOWN = re.compile(r"```python\n(?P<code>[^`]*?)```\n\n```text\n(?P<output>[^`]*?)```", re.DOTALL)
FIRST, SINKS = "runs/first", "runs/first-sinks"
LENGTH, CONTEXTS = 128, 64


def make_runs(place: Path) -> None:
    """The two run folders, below `place`."""
    from theodolite import Corpus, open_model, survey, trace_sinks

    model = open_model()
    corpus = Corpus.python_docs(model.tokenizer, LENGTH, CONTEXTS)
    survey(model, corpus, place / FIRST)
    trace_sinks(model, corpus, place / SINKS)


def shown_blocks() -> Iterator[tuple[Path, str, str]]:
    """(page, code, what the page says that it prints) of every such block."""
    for page in sorted(DOCS.rglob("*.md")):
        for block in SHOWN.finditer(page.read_text(encoding="utf-8")):
            yield page, block["code"], block["output"]


def printed(code: str) -> str:
    """What a block prints, run where the run folders are."""
    caught = io.StringIO()
    with contextlib.redirect_stdout(caught):
        exec(compile(code, "<block>", "exec"), {"__name__": "__main__"})
    return "\n".join(line.rstrip() for line in caught.getvalue().splitlines()) + "\n"


def _anew(block: re.Match[str]) -> str:
    return f"```python\n{block['code']}```\n\n```text\n{printed(block['code'])}```"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        make_runs(Path(scratch))
        os.chdir(scratch)
        for page in sorted({page for page, _, _ in shown_blocks()}):
            page.write_text(SHOWN.sub(_anew, page.read_text(encoding="utf-8")), encoding="utf-8")
