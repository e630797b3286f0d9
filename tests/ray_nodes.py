"""A Ray cluster for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from theodolite.passes.ray_cluster import imported_ray


@contextmanager
def two_nodes() -> Iterator[Any]:
    """Two nodes, with room for one worker each."""
    ray = imported_ray()
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "num_gpus": 0, "include_dashboard": False},
    )
    cluster.add_node(num_cpus=1, num_gpus=0)
    cluster.connect()
    yield cluster
    ray.shutdown()
    cluster.shutdown()
