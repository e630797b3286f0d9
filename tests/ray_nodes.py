"""A Ray cluster for tests, and a worker that dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from theodolite.passes.on_ray import ENVIRONMENT


@contextmanager
def two_nodes() -> Iterator[Any]:
    """Two nodes, with room for one worker each."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=1, num_gpus=0)
    cluster.connect()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def kill_a_reader(killed: list[int]) -> None:
    """SIGKILL the first worker that is found while it reads; workers are called `Slow`."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for process in psutil.Process().children(recursive=True):
            try:
                title = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if title.startswith("ray::Slow.read"):
                os.kill(process.pid, signal.SIGKILL)
                killed.append(process.pid)
                return
        time.sleep(0.02)
