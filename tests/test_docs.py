"""README and docs: what they show runs, what they name exists, and nothing of this machine is in them."""

from __future__ import annotations

import multiprocessing
import os
import re
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


# Each block has a process of its own, forked from one that has imported what takes long.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["theodolite.tracer", "theodolite.prune", "theodolite.train", "transformers"])
ERRORS = ".stderr"


def _run(block: str, folder: Path) -> None:
    os.chdir(folder)
    with open(ERRORS, "w") as errors, open(os.devnull, "w") as nothing:
        os.dup2(errors.fileno(), 2)
        os.dup2(nothing.fileno(), 1)
        exec(compile(block, "<block>", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", PYTHON)
def test_python_blocks_run(block, tmp_path):
    child = SERVER.Process(target=_run, args=(block, tmp_path))
    child.start()
    child.join()
    assert child.exitcode == 0, (tmp_path / ERRORS).read_text()


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
