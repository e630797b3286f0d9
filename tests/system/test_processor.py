"""Half precision is used, and recommended, only where the processor has it."""

from __future__ import annotations

import platform

import pytest
import torch

from tests import checkpoints
from theodolite.models import open_model, open_streamed
from theodolite.system.processor import multiplies_halves
from theodolite_papers.localization.locater_training import Recipe
from theodolite_papers.training.models import EmbeddedConfig


def processor(monkeypatch: pytest.MonkeyPatch, machine: str, capability: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)


@pytest.mark.parametrize(
    ("machine", "capability", "expected"),
    [
        ("x86_64", "AVX2", False),
        ("AMD64", "DEFAULT", False),
        ("x86_64", "AVX512", True),
        ("arm64", "DEFAULT", True),
        ("aarch64", "SVE256", True),
    ],
)
def test_by_processor(monkeypatch: pytest.MonkeyPatch, machine: str, capability: str, expected: bool) -> None:
    processor(monkeypatch, machine, capability)
    assert multiplies_halves() is expected
    assert multiplies_halves("cuda:1")
    assert EmbeddedConfig().bfloat16 is expected
    assert Recipe().bfloat16 is expected


@pytest.mark.parametrize("opened", [open_model, open_streamed])
def test_a_slow_dtype_is_told(opened, tmp_path, monkeypatch):
    checkpoints.write("gpt2", tmp_path, dtype=torch.bfloat16)
    processor(monkeypatch, "x86_64", "AVX2")
    lines: list[str] = []
    opened(tmp_path, device="cpu", say=lines.append)
    assert [line for line in lines if "no instructions for bfloat16" in line and "--dtype float32" in line]
    said = len(lines)
    opened(tmp_path, device="cpu", dtype="float32", say=lines.append)
    processor(monkeypatch, "x86_64", "AVX512")
    opened(tmp_path, device="cpu", say=lines.append)
    assert len(lines) == said == 1
