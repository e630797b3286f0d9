"""Tests that need a GPU (`make test-gpu`): what they share. Each compares with the CPU, an independent computation.

THEODOLITE_GPU_TESTS_ON says where they run: `cuda`, or `cpu`, which shows without a GPU that the tests themselves work.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from tests.conftest import GPU_TESTS_ON
from theodolite.corpus.corpus import Corpus
from theodolite.passes.run import TABLES, Run

TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 5e-2}
"""Of the largest number of a column: ten times what rounding to that dtype costs on a CPU, or more."""

NOTHING = 1e-6
"""What float32 leaves of a number that is 0, such as a share of nothing."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if GPU_TESTS_ON not in ("cuda", "cpu"):
        pytest.skip("tests on a GPU have a run of their own: make test-gpu")
    if GPU_TESTS_ON == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here; THEODOLITE_GPU_TESTS_ON=cpu runs these tests on the CPU")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The first GPU, or the CPU where it stands in for one."""
    return torch.device("cuda", 0) if GPU_TESTS_ON == "cuda" else torch.device("cpu")


def random_corpus(vocabulary: int, length: int = 24, contexts: int = 12) -> Corpus:
    """Random tokens of three labels."""
    drawn = Corpus.random_tokens(vocabulary, length, contexts)
    return Corpus("drawn", drawn.contexts, torch.arange(contexts) % 3, ["a", "b", "c"], 0)


def bfloat16_copy(folder: Path, out: Path) -> Path:
    """A checkpoint with its weights rounded to bfloat16."""
    import transformers

    kind = getattr(transformers, transformers.AutoConfig.from_pretrained(folder).architectures[0])
    kind.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(out)
    return out


def assert_near(got: Run, expected: Run, tolerance: float, tables: tuple[str, ...] = TABLES) -> None:
    """The same rows; every number of the tables to `tolerance` of the largest of its column, whole numbers exactly."""
    for table in tables:
        assert_columns_near(getattr(got, table), getattr(expected, table), tolerance, table)


def assert_columns_near(got: pd.DataFrame, expected: pd.DataFrame, tolerance: float, table: str) -> None:
    assert list(got.columns) == list(expected.columns), table
    assert len(got) == len(expected), table
    for name in expected.columns:
        ours, theirs = got[name].to_numpy(), expected[name].to_numpy()
        if theirs.dtype.kind != "f":
            assert ours.tolist() == theirs.tolist(), f"{table}.{name}"
            continue
        scale = np.abs(theirs[np.isfinite(theirs)]).max(initial=0)
        np.testing.assert_allclose(
            ours, theirs, rtol=0, atol=max(tolerance * scale, NOTHING), err_msg=f"{table}.{name}"
        )
