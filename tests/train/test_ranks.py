"""A training run monitored by three processes (gloo) together, against one process that reads the whole batch."""

from __future__ import annotations

import json
import os
import socket
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import distributed
from transformers import GPT2LMHeadModel

from tests import checkpoints
from tests.processes import together
from theodolite.errors import UsageError
from theodolite.train.geometry import Geometry
from theodolite.train.monitor import GeometryMonitor, GeometryWarning
from theodolite.train.ranks import Ranks

pytestmark = pytest.mark.slow
PROCESSES = 3
IDS = torch.randint(1, checkpoints.VOCABULARY, (5, 24), generator=torch.Generator().manual_seed(1))
FEW = IDS[:2]  # fewer contexts than processes


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


def as_data(look: Geometry) -> dict[str, Any]:
    return {"heads": look.heads.to_dict("list"), "layers": look.layers.to_dict("list")}


def work(rank: int, port: int, folder: str) -> None:
    """One of the processes. What it was given as batch differs; that of the first one counts."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(PROCESSES),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    results: dict[str, Any] = {}
    for name, ids in (("whole", IDS), ("few", FEW)):
        mine = ids if rank == 0 else ids[:1].flip(1)
        monitor, lines = watched_training(mine, Path(folder, name), over_ranks=True)
        assert monitor.last is not None
        results[name] = as_data(monitor.last) | {
            "alarms": [alarm.as_dict() for alarm in monitor.alarms],
            "lines": lines,
        }
    results["broken"] = broken_training(over_ranks=True)

    def refuse() -> None:
        raise UsageError("no batch")

    with pytest.raises(UsageError, match="no batch"):  # though only the first one looks for it
        Ranks.current().from_first(refuse)
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together(work, (port, str(folder)), PROCESSES)
    return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(PROCESSES)]


@pytest.mark.parametrize(("name", "ids"), [("whole", IDS), ("few", FEW)])
def test_looks_are_those_of_one_process_at_the_whole_batch(name, ids, ranks, tmp_path):
    """Two contexts among three processes leave one without any."""
    alone, lines = watched_training(ids, tmp_path / "alone", over_ranks=False)
    assert alone.last is not None
    assert lines
    for rank, results in enumerate(ranks[1]):
        ours = results[name]
        for table in ("heads", "layers"):
            expected = getattr(alone.last, table)
            pd.testing.assert_frame_equal(
                pd.DataFrame(ours[table])[list(expected.columns)],
                expected,
                rtol=1e-9,
                atol=1e-12,
                check_dtype=False,
            )
        assert [(a["step"], a["kind"], a["layer"], a["head"]) for a in ours["alarms"]] == [
            (a.step, a.kind, a.layer, a.head) for a in alone.alarms
        ]
        assert ours["lines"] == (lines if rank == 0 else [])


def test_all_processes_see_the_very_same(ranks):
    first, *others = ranks[1]
    for other in others:
        for name in ("whole", "few"):
            for table in ("heads", "layers", "alarms"):
                assert json.dumps(other[name][table]) == json.dumps(first[name][table])


def test_only_the_first_process_writes(ranks, tmp_path):
    """Oracle: the record of one process has as many lines, each look once."""
    watched_training(IDS, tmp_path / "alone", over_ranks=False)
    for name in ("heads", "layers", "alarms"):
        ours = (ranks[0] / "whole" / f"{name}.jsonl").read_text().splitlines()
        assert len(ours) == len((tmp_path / "alone" / f"{name}.jsonl").read_text().splitlines())


def test_bad_numbers_on_one_process_end_the_looks_on_all(ranks):
    """Oracle: the warning of one process that reads all contexts. Without agreement the others would wait for ever."""
    numbers, lines = broken_training(over_ranks=False)
    assert numbers == {}
    assert len(lines) == 1
    for rank, results in enumerate(ranks[1]):
        assert results["broken"] == [{}, lines if rank == 0 else []]


def test_one_process_needs_no_group():
    alone = Ranks.current()
    assert alone == Ranks(0, 1)
    assert torch.equal(alone.share(IDS), IDS)
    sums = alone.totals({"a": torch.ones(2, dtype=torch.float32)})
    assert sums["a"].dtype == torch.float64
