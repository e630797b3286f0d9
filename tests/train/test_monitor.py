"""Oracles: files read back, an uninterrupted monitor, tables by hand, the step at which weights were broken.

Of three processes together (gloo): one that reads the whole batch.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from tests import checkpoints
from tests.processes import ranks
from theodolite.errors import UsageError, WorkError
from theodolite.train import warm_up
from theodolite.train.geometry import Geometry, Ranks
from theodolite.train.monitor import GeometryMonitor, GeometryWarning, RecordWarning, monitor_batch, scalars

IDS = torch.randint(checkpoints.VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))


def collapsing(model: torch.nn.Module, step: int) -> None:
    """Double head 1's queries in layer 0."""
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight[:, 8:16] *= 2


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_looks_come_when_they_are_due(tmp_path):
    """Oracle: multiples of `every`; spectra at every second look, the first included."""
    folder = tmp_path / "of" / "it"
    monitor = GeometryMonitor(checkpoints.build("gpt2"), IDS, every=3, spectra_every=2, folder=folder)
    due = {step: numbers for step in range(8) if (numbers := monitor(step))}
    assert list(due) == [0, 3, 6]
    assert ["trace_mean" in numbers for numbers in due.values()] == [True, False, True]
    assert all(isinstance(value, float) for numbers in due.values() for value in numbers.values())
    assert 0 < due[6]["time_share"] <= 1
    assert not monitor(7)
    heads = pd.read_json(folder / "heads.jsonl", lines=True, precise_float=True)
    assert heads.groupby("step").size().to_dict() == {0: 12, 3: 12, 6: 12}
    assert heads.query("step == 6")["entropy"].tolist() == monitor.last.heads["entropy"].tolist()
    layers = pd.read_json(folder / "layers.jsonl", lines=True)
    assert layers["layer"].tolist() == [0, 1, 2, 3] * 3


def test_a_resumed_monitor_goes_on_as_if_never_stopped(tmp_path):
    """Oracle: one that was not stopped; the killed process had gone on for two looks and left half a line."""

    def run(folder: Path, steps: range, model: torch.nn.Module) -> list[object]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GeometryWarning)
            monitor = GeometryMonitor(model, IDS, every=1, spectra_every=2, folder=folder)
            for step in steps:
                monitor(step)
                collapsing(model, step)
        return monitor.alarms

    whole = run(tmp_path / "whole", range(12), checkpoints.build("gpt2"))
    model = checkpoints.build("gpt2")
    run(tmp_path / "cut", range(8), model)
    with (tmp_path / "cut" / "heads.jsonl").open("a") as file:
        file.write('{"step": 8, "lay')
    again = checkpoints.build("gpt2")
    for step in range(5):
        collapsing(again, step)
    resumed = run(tmp_path / "cut", range(5, 12), again)
    assert whole
    assert resumed == whole
    for file in ("heads.jsonl", "layers.jsonl", "alarms.jsonl"):
        assert (tmp_path / "cut" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


@pytest.mark.slow
def test_losses_are_recorded_between_looks_and_go_on_when_resumed(tmp_path):
    """Oracle: what was given, by hand; the killed process had gone on for two steps.

    A new training moves the old files aside, under the next free number; one that counts from 1 begins anew, too.
    """

    def run(folder: Path, steps: range) -> None:
        monitor = GeometryMonitor(checkpoints.build("gpt2"), IDS, every=3, folder=folder)
        for step in steps:
            monitor(step, torch.tensor(float(step), requires_grad=True) if step % 2 else math.nan)

    zero, one = tmp_path / "from 0", tmp_path / "from 1"
    run(zero, range(7))
    run(zero, range(4, 9))
    given = [{"step": step, "loss": float(step) if step % 2 else None} for step in (*range(5), *range(4, 9))]
    assert rows(zero / "losses.jsonl") == given
    run(one, range(1, 4))
    for folder, number, first in ((zero, 1, 0), (zero, 2, 0), (one, 1, 1)):
        old = {name: (folder / f"{name}.jsonl").read_bytes() for name in ("heads", "losses")}
        words = rf"earlier record: moved to heads\.{number}\.jsonl"
        with pytest.warns(RecordWarning, match=words) as caught:
            run(folder, range(first, first + 1))
        assert len(caught) == 1
        assert caught[0].filename == __file__
        for name, data in old.items():
            assert (folder / f"{name}.{number}.jsonl").read_bytes() == data
    assert [row["step"] for row in rows(zero / "heads.jsonl")] == [0] * 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change", "steps"),
    [
        ("heads", lambda lines: [*lines[:5], '{"step": 0, "la', *lines[6:]], [1, 2]),
        ("heads", lambda lines: lines[:-1], [0, 1]),
        ("layers", lambda lines: [line for line in lines if '"layer": 3' not in line], []),
        ("alarms", lambda lines: ["null", "\udcff"], [0, 1, 2]),
    ],
)
def test_a_damaged_or_foreign_record_does_not_end_a_training(tmp_path, name, change, steps):
    """Oracle: the steps whose rows were left whole, by hand; of one without any the old file is kept beside."""
    first, again = (GeometryMonitor(checkpoints.build("gpt2"), IDS, every=1, folder=tmp_path) for _ in "12")
    for step in range(3):
        first(step)
    path = tmp_path / f"{name}.jsonl"
    lines = change(path.read_text().splitlines())
    damaged = "".join(line + "\n" for line in lines).encode(errors="surrogateescape")
    path.write_bytes(damaged)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RecordWarning)
        again(3)
    assert len(caught) == (not steps)
    assert list(dict.fromkeys(row["step"] for row in rows(tmp_path / "heads.jsonl"))) == [*steps, 3]
    if not steps:
        assert (tmp_path / f"{name}.1.jsonl").read_bytes() == damaged


def test_a_record_that_cannot_be_written_any_more_does_not_end_a_training(tmp_path):
    """But one that cannot be written at the first call is refused."""
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkError, match="cannot write"):
        GeometryMonitor(checkpoints.build("gpt2"), IDS, folder=tmp_path / "file")(0)
    monitor = GeometryMonitor(checkpoints.build("gpt2"), IDS, every=1, folder=tmp_path)
    monitor(0)
    (tmp_path / "layers.jsonl").unlink()
    (tmp_path / "layers.jsonl").mkdir()
    with pytest.warns(RecordWarning, match="step 1: cannot write .*; the looks go on without a record"):
        assert monitor(1)
    assert monitor(2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "expected"), [(range(64, 500, 64), [128, 256, 384]), (range(150, 301), [200, 300])]
)
def test_looks_come_as_soon_as_enough_steps_have_passed(steps, expected):
    """Oracle: by hand; single steps have their looks at multiples of `every`, wherever they begin."""
    monitor = GeometryMonitor(checkpoints.build("gpt2"), IDS, every=100, spectra_every=2)
    numbers_at = {step: numbers for step in steps if (numbers := monitor(step))}
    assert list(numbers_at) == expected
    spectra = ["trace_mean" in numbers for numbers in numbers_at.values()]
    assert spectra in ([n % 2 == phase for n in range(len(spectra))] for phase in (0, 1))
    last = steps[-1]
    assert monitor(last) == {}
    with pytest.raises(UsageError, match=rf"^step went from {last} to 0: count steps over all epochs$"):
        monitor(0)


def test_warnings_name_head_and_trend():
    """Oracle: the head whose queries are doubled at every step."""
    model = checkpoints.build("gpt2")
    monitor = GeometryMonitor(model, IDS, every=1)

    def train() -> None:
        for step in range(14):
            monitor(step)
            collapsing(model, step)

    with pytest.warns(GeometryWarning) as caught:
        train()
    expected = (  # the entropy is below its limit at once, ρ falls first
        "entropy collapse in L0H1: entropy .*, collapsed",
        r"vanishing signal in L0H1: ρ .*, reaches 0 in about \d steps",
        "vanishing signal in L0H1: ρ .*, collapsed",
    )
    for words, warning in zip(expected, caught, strict=True):
        assert re.fullmatch(rf"step \d+: {words}; .*", str(warning.message))
    assert caught[0].filename == __file__


@pytest.mark.slow
def test_weights_that_are_no_numbers_are_said_once():
    """Oracle: the layer whose weights were broken, and silence afterwards."""
    model = checkpoints.build("gpt2")
    monitor = GeometryMonitor(model, IDS, every=1)
    monitor(0)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.bias[0] = math.nan
    with pytest.warns(GeometryWarning, match="step 1: hidden states after block 1 hold NaN"):
        assert monitor(1) == {}
    assert monitor(2) == {}


def test_scalars_by_hand():
    """Oracle: two layers of two heads, worked out on paper; a NaN is left out."""
    heads = {"layer": [0, 0, 1, 1], "head": [0, 1, 0, 1], "entropy": [1.0, 2.0, 3.0, 4.0]}
    heads |= {"entropy_share": [0.1, 0.2, 0.3, 0.4], "propagation": [0.5, 0.5, 1.0, 1.0]}
    heads |= {"sink_first": [0.0, 0.0, 1.0, 1.0], "sink_later": [0.0, 0.0, 0.0, 1.0]}
    heads |= {"largest_logit": [7.0, -1.0, 9.0, 2.0], "log_sum_exp": [-3.0, 1.0, 2.0, 4.0]}
    heads |= {"spectral_norm": [math.nan] * 4, "eta_symmetric": [1.0, 2.0, 3.0, 0.5]}
    heads |= {"trace": [1.0, 1.0, 1.0, 5.0], "regime": ["uniform", "vanishing", "vanishing", "uniform"]}
    layers = {"layer": [0, 1, 2], "norm": [1.0, 5.0, 2.0], "norm_growth": [math.nan, 5.0, 0.4]}
    layers |= {"rank_collapse": [0.9, 0.3, 0.4], "massive_activations": [0.0, 1.0, 2.0]}
    layers |= {"outlier_dimensions": [0.0, 3.0, 1.0]}
    heads, layers = pd.DataFrame(heads), pd.DataFrame(layers)
    assert scalars(Geometry(0, heads, layers, 0.1)) == {
        "entropy_mean": 2.5,
        "entropy_min": 1.0,
        "entropy_share_min": 0.1,
        "propagation_mean": 0.75,
        "propagation_min": 0.5,
        "sink_first_mean": 0.5,
        "sink_later_mean": 0.25,
        "largest_logit_max": 9.0,
        "log_sum_exp_mean": 1.0,
        "rank_collapse_min": 0.3,
        "norm_max": 5.0,
        "norm_growth_max": 5.0,
        "massive_activations": 3.0,
        "outlier_dimensions": 3.0,
        "eta_max": 3.0,
        "trace_mean": 2.0,
        "vanishing_heads": 2.0,
        **{f"entropy/layer_{n}": 1.5 + 2 * n for n in range(2)},
        **{f"propagation/layer_{n}": 0.5 + 0.5 * n for n in range(2)},
        **{f"rank_collapse/layer_{n}": value for n, value in enumerate((0.9, 0.3, 0.4))},
    }


class Stream(torch.utils.data.IterableDataset):
    """A stream, which has `__getitem__` all the same, by inheritance."""

    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    ("lengths", "expected"), [([20] * 5, (3, 16)), ([4, 20, 9, 12, 3], (3, 9)), ([4, 10], (1, 10))]
)
def test_the_monitor_batch_takes_the_first_long_enough_rows(lengths, expected):
    """Oracle: the rows by hand; token k of row n is 100 n + k."""
    data = [{"input_ids": [100 * n + k for k in range(length)]} for n, length in enumerate(lengths)]
    batch = monitor_batch(data, contexts=3, length=16)
    assert batch.shape == expected
    taken = [n for n, length in enumerate(lengths) if length >= expected[1]][: expected[0]]
    assert batch[:, 0].tolist() == [100 * n for n in taken]
    assert batch[:, -1].tolist() == [100 * n + expected[1] - 1 for n in taken]
    padded = {"input_ids": torch.arange(12), "attention_mask": torch.tensor([0] * 2 + [1] * 10)}
    assert monitor_batch([padded]).tolist() == [list(range(2, 12))]
    for data in (
        (n for n in range(3)),
        Stream(),
        None,
        [{"labels": [1]}],
        [],
        [{"input_ids": [1, 2]}],
    ):
        with pytest.raises(UsageError, match="is a stream, or no row of it has 8 input_ids or more"):
            monitor_batch(data)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every is 0 .* must be 1 or more"),
        ({"every": "a"}, "every is 'a': give a whole number"),
        ({"spectra_every": 1.5}, r"spectra_every is 1\.5"),
        ({"ids": "text"}, "token ids are str: give whole numbers"),
        ({"ids": IDS[:, :7]}, "contexts of 7 tokens: give 8 or more"),
        ({"ids": IDS.bool()}, r"token ids of shape \(2, 24\): give whole numbers"),
    ],
)
def test_a_monitor_refuses_at_once(options, words):
    with pytest.raises(UsageError, match=words):
        GeometryMonitor(checkpoints.build("gpt2"), **{"ids": IDS} | options)


def test_what_is_no_step_is_refused():
    model = checkpoints.build("gpt2")
    monitor = GeometryMonitor(model, IDS)
    for wrong in ("a", None, 1.5, math.nan):
        with pytest.raises(UsageError, match=r"^step is .*: give a whole number$"):
            monitor(wrong)
    for wrong in (0, -1, math.nan):
        with pytest.raises(UsageError, match=r"steps is .*: a warm-up needs a number of steps"):
            warm_up(1.0, wrong)


PROCESSES = 3
OF_RANKS = torch.randint(1, checkpoints.VOCABULARY, (5, 24), generator=torch.Generator().manual_seed(1))
CASES = {"whole": OF_RANKS, "few": OF_RANKS[:2]}
"""Two contexts among three processes leave one without any."""


def in_float64() -> torch.nn.Module:
    """In float64, where it makes no difference in how large batches the contexts are read."""
    return checkpoints.build("gpt2").double()


def watched_training(ids: torch.Tensor, folder: Path, over_ranks: bool) -> tuple[GeometryMonitor, list[str]]:
    """Seven looks while a head of layer 0 collapses, interrupted and resumed after four; what was warned of."""
    lines: list[str] = []
    trained = in_float64()
    for steps in (range(4), range(3, 7)):
        options = {"folder": folder, "over_ranks": over_ranks}
        monitor = GeometryMonitor(trained, ids, every=1, spectra_every=2, **options)
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
    ids = OF_RANKS.clone()
    ids[1, 3] = 0
    broken = in_float64()
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


@pytest.mark.slow
def test_looks_of_three_processes_are_those_of_one_at_the_whole_batch(tmp_path):
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
                close = {"rtol": 1e-9, "atol": 1e-12, "check_dtype": False}
                pd.testing.assert_frame_equal(ours[list(expected.columns)], expected, **close)
                pd.testing.assert_frame_equal(ours, getattr(results[0][name][0], table), check_exact=True)
            places, own = ([(a.step, a.kind, a.layer, a.head) for a in of] for of in (alarms, alone.alarms))
            assert places == own
            assert alarms == results[0][name][1]
            assert said == (lines if rank == 0 else [])
        for file in ("heads.jsonl", "layers.jsonl", "alarms.jsonl"):
            written = [(tmp_path / of / name / file).read_text().count("\n") for of in ("", "alone")]
            assert written[0] == written[1]
    numbers, lines = broken_training(over_ranks=False)
    assert (numbers, len(lines)) == ({}, 1)
    assert [got["broken"] for got in results] == [({}, lines), ({}, []), ({}, [])]
