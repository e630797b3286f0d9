"""A map over threads. Oracle: the same map over a list, one after another."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from theodolite.system.threads import parallel_map


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
