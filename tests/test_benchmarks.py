"""What a benchmark records, the page that it writes, and its refusal without a GPU. No test is timed."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from pathlib import Path

import pytest

import benchmarks
import tools
from benchmarks import __main__ as runner
from benchmarks import qk_clip
from benchmarks.scaling import Shape, state_bytes
from benchmarks.timing import Ratio, Seconds, in_turns, over
from theodolite.corpus.corpus import Corpus
from theodolite.models import open_model
from theodolite.passes.survey_pass import SurveyPass
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


def test_the_page_of_training_shows_what_qk_clip_did():
    """Oracle: the committed runs; of one row the mean, the range and the interval by hand, scipy's t of 4.303."""
    root = Path(__file__).parent.parent
    runs = json.loads((root / "docs/results/qk-clip.json").read_text())["runs"]
    page, table = (root / "docs/training.md").read_text(), qk_clip.table(runs)
    for of, lower in (
        ("QK-Clip, τ = 20", "0.27 ± 0.17"),
        ("LocAteR, κ₁ = 0.001", "0.26 ± 0.07"),
        ("QK-norm", "0.30 ± 0.18"),
    ):
        assert lower in page
        assert re.search(rf"^\|  \| {of} \| .* \| −{lower} \|$", table, re.MULTILINE)
    values = [(0, 3.0, 1.0), (1, 3.5, 2.0), (2, 3.25, 1.5)]
    rows = [
        {
            "rate": "high",
            "remedy": remedy,
            "seed": seed,
            "loss": loss,
            "largest_logit": 1234.5,
            "entropy": 1.0,
        }
        for seed, nothing, ours in values
        for remedy, loss in (("nothing", nothing), ("ours", ours))
    ]
    # Differences −2, −1.5, −1.75: their standard deviation is 0.25.
    assert qk_clip.table(rows).splitlines()[-1] == (
        "|  | ours | 1.5 (1–2) | 1,230 (1,230–1,230) | 1 (1–1) | −1.75 ± 0.62 |"
    )


MODULES = [
    f"{package.__name__}.{module.name}"
    for package in (tools, benchmarks)
    for module in pkgutil.iter_modules(package.__path__)
]


@pytest.mark.parametrize("name", MODULES)
def test_it_can_be_imported(name):
    importlib.import_module(name)


EMBEDDED = Shape(6, 4, 128, 40, 20)
TINY = Shape(3, 4, 32, 24, 9)


@pytest.mark.parametrize("shape", [EMBEDDED, TINY], ids=["embedded", "llama3"])
def test_a_state_has_the_bytes_of_the_formula(shape, opened):
    """Oracle: the tensors of a fresh pass. Each part's by the accumulator that holds it."""
    model = open_model(device="cpu") if shape is EMBEDDED else opened("llama3")
    assert (model.layers, model.heads, model.width) == (shape.layers, shape.heads, shape.width)
    corpus = Corpus.random_tokens(model.required_vocabulary(), shape.length, shape.contexts)
    state = SurveyPass(model, corpus, 0, 1).state()
    parts = state_bytes(shape)
    assert sum(parts.values()) == sum(tensor.nbytes for tensor in state.values())
    held = {name: state[name].nbytes for name in state}
    assert parts["sums by position"] == held["means.position_sum"]
    sample = ("means.context_mean", "means.context_tokens", "means.token")
    assert parts["sample"] == sum(held[name] for name in sample)
    for name, prefixes in {
        "second moments": ("residual.", "inputs."),
        "sketches": ("sketches.",),
        "outliers": ("outliers.",),
        "attention": ("attention.",),
        "queries and keys": ("query_keys.",),
    }.items():
        assert parts[name] == sum(count for key, count in held.items() if key.startswith(prefixes)), name
