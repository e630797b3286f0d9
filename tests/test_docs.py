"""README and docs: what they show runs, what they name exists, and nothing of this machine is in them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from theodolite import open_model, survey
from theodolite.corpus import Corpus

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
PYTHON = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", PYTHON)
def test_python_blocks_run(block, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_there_are_blocks_to_run():
    assert PYTHON


def test_every_column_and_array_is_explained():
    model = open_model()
    run = survey(model, Corpus.python_docs(model.tokenizer, 32, 4))
    text = (ROOT / "docs" / "run-folder.md").read_text()
    named = set(re.findall(r"`([a-z_]+[a-zK0-9_]*)`", text))
    named |= {name[:-1] + str(k) for name in named if name.endswith("_K") for k in (1, 3, 5, 10)}
    tables = (run.layers, run.heads, run.constituents, run.attribution)
    for column in [*(column for table in tables for column in table.columns), *run.arrays]:
        column = column.removesuffix("_se") if "`…_se`" in text else column
        known = column.removesuffix("_data") in named or column in named | {"layer", "head"}
        parts = column.rsplit("_", 1)
        assert known or (f"_{parts[-1]}" in named and any(n.startswith(parts[0]) for n in named)), column


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
