"""What depends on the machine: halves only where the processor has them, freed memory that is kept, threads."""

from __future__ import annotations

import platform
import subprocess
import sys
import threading
import time

import pytest
import torch

from tests import checkpoints
from theodolite.models import open_model, open_streamed
from theodolite.system.processor import multiplies_halves, once, parallel_map
from theodolite_papers.localization.locater_training import Recipe


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


def test_threads_compute_a_property_of_their_own_objects_at_once():
    both = threading.Barrier(2, timeout=10)

    class Layer:
        @once
        def products(self) -> int:
            return both.wait()

    layers = [Layer(), Layer()]
    threads = [threading.Thread(target=lambda layer: layer.products, args=(layer,)) for layer in layers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(layer.products for layer in layers) == [0, 1]  # kept: a third one would wait in vain


FAULTS = """
import resource, sys
from theodolite.system.processor import keep_pages

if sys.argv[1] == "kept":
    keep_pages()
import numpy as np

for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(8 << 20)  # 64 MB, which glibc asks the system for each time
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_freed_memory_is_used_again():
    def faults(how: str) -> int:
        command = [sys.executable, "-c", FAULTS, how]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    given_back, kept = faults("given back"), faults("kept")
    assert given_back > 20  # 32 if pages are huge
    assert kept <= given_back / 5


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_results_keep_the_order_of_the_items(threads):
    def late_if_early(item: int) -> int:
        time.sleep(0.01 * (item < 2))
        return item * item

    assert parallel_map(late_if_early, range(8)) == [item * item for item in range(8)]


def test_an_exception_of_the_work_comes_out_and_the_thread_count_is_as_before(threads):
    def fail_at_two(item: int) -> int:
        if item == 2:
            raise ValueError("two")
        return item

    with pytest.raises(ValueError, match="two"):
        parallel_map(fail_at_two, range(4))
    assert torch.get_num_threads() == threads
    assert parallel_map(fail_at_two, [0, 1]) == [0, 1]
    assert torch.get_num_threads() == threads


def test_every_worker_has_one_of_torchs_threads_and_the_callers_modes():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    both_at_work = threading.Barrier(2, timeout=60)

    def modes(_: int) -> tuple[bool, int, bool, bool]:
        both_at_work.wait()
        elsewhere = threading.current_thread() is not threading.main_thread()
        return elsewhere, torch.get_num_threads(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    try:
        with torch.no_grad():
            assert parallel_map(modes, [0, 1]) == [(True, 1, False, False)] * 2
        with torch.inference_mode():
            assert parallel_map(modes, [0, 1]) == [(True, 1, False, True)] * 2
        assert parallel_map(modes, [0, 1]) == [(True, 1, True, False)] * 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
