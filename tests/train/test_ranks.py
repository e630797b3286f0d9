"""A training run monitored by three processes (gloo) together, against one process that reads the whole batch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import GPT2LMHeadModel

from tests import checkpoints
from tests.processes import ranks
from theodolite.errors import UsageError
from theodolite.train.monitor import GeometryMonitor, GeometryWarning
from theodolite.train.ranks import Ranks

pytestmark = pytest.mark.slow
PROCESSES = 3
IDS = torch.randint(1, checkpoints.VOCABULARY, (5, 24), generator=torch.Generator().manual_seed(1))
CASES = {"whole": IDS, "few": IDS[:2]}
"""Two contexts among three processes leave one without any."""


def model() -> GPT2LMHeadModel:
    """In float64, where it makes no difference in how large batches the contexts are read."""
    return checkpoints.build("gpt2").double()


def watched_training(ids: torch.Tensor, folder: Path, over_ranks: bool) -> tuple[GeometryMonitor, list[str]]:
    """Seven looks while a head of layer 0 collapses, interrupted and resumed after four; what was warned of."""
    lines: list[str] = []
    trained = model()
    for steps in (range(4), range(3, 7)):
        monitor = GeometryMonitor(
            trained, ids, every=1, spectra_every=2, folder=folder, over_ranks=over_ranks
        )
        for step in steps:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", GeometryWarning)
                monitor(step)
            lines += [str(warning.message) for warning in caught]
            with torch.no_grad():
                trained.transformer.h[0].attn.c_attn.weight[:, 8:16] *= 8
    return monitor, lines


def broken_training(over_ranks: bool) -> tuple[dict[str, float], list[str]]:
    """A look at a model that overflows on the second context only; other processes read other contexts."""
    ids = IDS.clone()
    ids[1, 3] = 0
    broken = model()
    with torch.no_grad():
        broken.transformer.wte.weight[0] = torch.inf
    monitor = GeometryMonitor(broken, ids, every=1, over_ranks=over_ranks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", GeometryWarning)
        numbers = monitor(0) | monitor(1)
    return numbers, [str(warning.message) for warning in caught]


def work(rank: int, folder: Path) -> dict[str, Any]:
    """One of the processes. What it was given as batch differs; that of the first one counts."""
    results: dict[str, Any] = {}
    for name, ids in CASES.items():
        mine = ids if rank == 0 else ids[:1].flip(1)
        monitor, lines = watched_training(mine, folder / name, over_ranks=True)
        results[name] = (monitor.last, monitor.alarms, lines)

    def refuse() -> None:
        raise UsageError("no batch")

    with pytest.raises(UsageError, match="no batch"):  # though only the first one looks for it
        Ranks.current().from_first(refuse)
    return results | {"broken": broken_training(over_ranks=True)}


def test_looks_are_those_of_one_process_at_the_whole_batch(tmp_path):
    """All see the very same, and the first one alone warns and writes.

    Numbers that are none on one process end the looks on all: else the others would wait for ever.
    """
    results = ranks(work, tmp_path, processes=PROCESSES)
    for name, ids in CASES.items():
        alone, lines = watched_training(ids, tmp_path / "alone" / name, over_ranks=False)
        assert lines
        for rank, got in enumerate(results):
            look, alarms, said = got[name]
            for table in ("heads", "layers"):
                ours, expected = getattr(look, table), getattr(alone.last, table)
                pd.testing.assert_frame_equal(
                    ours[list(expected.columns)], expected, rtol=1e-9, atol=1e-12, check_dtype=False
                )
                pd.testing.assert_frame_equal(ours, getattr(results[0][name][0], table), check_exact=True)
            assert [(a.step, a.kind, a.layer, a.head) for a in alarms] == [
                (a.step, a.kind, a.layer, a.head) for a in alone.alarms
            ]
            assert alarms == results[0][name][1]
            assert said == (lines if rank == 0 else [])
        for file in ("heads.jsonl", "layers.jsonl", "alarms.jsonl"):
            written = [(tmp_path / of / name / file).read_text().count("\n") for of in ("", "alone")]
            assert written[0] == written[1]
    numbers, lines = broken_training(over_ranks=False)
    assert (numbers, len(lines)) == ({}, 1)
    assert [got["broken"] for got in results] == [({}, lines), ({}, []), ({}, [])]
