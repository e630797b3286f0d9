"""What a benchmark records, the page that it writes, and its refusal without a GPU. No test is timed."""

from __future__ import annotations

import importlib
import json
import pkgutil

import pytest

import benchmarks
import tools
from benchmarks import __main__ as runner
from benchmarks.timing import Ratio, Seconds, in_turns, over
from tools import site_pages


def test_without_a_gpu_it_refuses_in_one_line(tmp_path):
    """Nothing is written. Oracle: the line; conftest hides GPUs."""
    with pytest.raises(
        SystemExit, match=r"needs a CUDA device, and PyTorch sees none; `make bench` measures"
    ):
        runner.main([], "cuda", tmp_path / "results")
    assert not list(tmp_path.iterdir())


def test_a_benchmark_that_fails_leaves_the_others(capsys):
    """Oracle: three benchmarks by hand; after their minutes nothing begins."""

    def broken(device: str) -> list[Ratio]:
        raise RuntimeError("no such kernel\nand more lines")

    def fine(device: str) -> list[Ratio]:
        return [Ratio.of(f"fine on {device}", [3.0, 1.0, 2.5], 4)]

    benchmarks = {"fine": fine, "broken": broken, "again": fine}
    first, second, third = runner.measured(benchmarks, "cuda", 1)
    expected = [{"what": "fine on cuda", "median": 2.5, "low": 1.0, "high": 3.0, "budget": 4}]
    assert first["ratios"] == third["ratios"] == expected
    assert (second["ratios"], second["error"]) == ([], "RuntimeError: no such kernel")
    late = list(runner.measured(benchmarks, "cuda", -1))
    assert [result["error"] for result in late] == ["left out after -1 minutes"] * 3


def test_the_page_shows_what_was_measured(tmp_path):
    """Oracle: a result by hand."""
    ratios = [
        {"what": "dense / ours", "median": 307.4, "low": 290.0, "high": 1310.2, "budget": None},
        {"what": "survey / forward", "median": 1.1234, "low": 1.0, "high": 1.25, "budget": 1.2},
    ]
    result = {
        "device": "NVIDIA X100",
        "memory_gib": 80,
        "date": "2027-01-02",
        "versions": {"CUDA": "13.0", "torch": "2.9"},
        "benchmarks": [
            {"name": "spectra", "ratios": ratios, "error": ""},
            {"name": "oats", "ratios": [], "error": "RuntimeError: out of luck"},
        ],
    }
    (tmp_path / "nvidia-x100.json").write_text(json.dumps(result))
    page = site_pages.gpu(None, tmp_path)
    assert "NVIDIA X100, 80 GiB, 2027-01-02; CUDA 13.0, torch 2.9:" in page
    assert (
        "| dense / ours | 307 | 290 to 1.31e+03 |  |\n| survey / forward | 1.12 | 1 to 1.25 | 1.2 |" in page
    )
    assert "| `oats` was not measured | RuntimeError: out of luck |" in page
    assert "No GPU has been measured" not in page


def test_work_in_turns_and_the_ratios_of_its_times():
    """Oracle: the order of the calls, the first round of which is not counted; quotients by hand."""
    calls: list[str] = []
    times = in_turns({name: lambda name=name: calls.append(name) for name in "ab"}, rounds=2)
    assert calls == ["a", "b"] * 3
    assert {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2}
    these, those = [Seconds(6.0, 1.0), Seconds(8.0, 2.0)], [Seconds(3.0, 2.0), Seconds(2.0, 8.0)]
    assert over(these, those) == [2.0, 4.0]
    assert over(these, those, 1) == [0.5, 0.25]


MODULES = [
    f"{package.__name__}.{module.name}"
    for package in (tools, benchmarks)
    for module in pkgutil.iter_modules(package.__path__)
]


@pytest.mark.parametrize("name", MODULES)
def test_it_can_be_imported(name):
    importlib.import_module(name)
