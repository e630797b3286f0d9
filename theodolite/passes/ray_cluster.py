"""A Ray cluster: how it is reached, and how the answers of its workers are taken. Ray is imported when it is used."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten
from types import ModuleType
from typing import Any

import torch

from theodolite.errors import TheodoliteError, UsageError, WorkError, first_line
from theodolite.system.interrupt import starting_others

LOCAL = "local"
"""The address of a cluster that is started on this machine, and stopped again."""

SECONDS = 0.2
"""How long a driver waits for workers before it hears of Ctrl-C."""

QUIET = {
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # else Ray prints pages of each worker that dies, at any level of logs
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # `uv run` would make Ray upload the working directory
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""As on those systems, a cluster of this machine alone listens at 127.0.0.1 only; read when Ray is imported.

Else anybody who reaches the machine could give the workers code to run.
"""


def answered(reference: Any) -> bool:
    """Whether a call has ended, well or not; nothing is fetched."""
    return bool(imported_ray().wait([reference], timeout=0, fetch_local=False)[0])


class WorkerLost(Exception):
    """The worker died, or its node was lost: there is no answer. Why, in a line, as far as Ray knows."""


def fetched(answer: Any, doing: str) -> Any:
    """What a worker answered; `doing`: what the call did, in words.

    Raises:
        TheodoliteError, MemoryError, OutOfMemoryError: what the worker raised.
        WorkError: it failed in another way.
        WorkerLost: there is no answer, or it went with its node.
    """
    ray = imported_ray()
    try:
        return ray.get(answer)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, TheodoliteError | MemoryError | torch.OutOfMemoryError):
            raise error.cause from error
        why = f"{type(error.cause).__name__}: {first_line(error.cause)}"
        raise WorkError(f"a worker failed when it {doing}: {why}") from error
    except ray.exceptions.RayError as error:
        raise WorkerLost(_why(error)) from error


def _why(error: Exception) -> str:
    """The line that says it, among those that say which worker it was."""
    lines = [type(error).__name__, *filter(None, map(str.strip, str(error).splitlines()))]
    dead = "The actor is dead because "
    said = next((line for line in lines if line.startswith(dead)), lines[-1])
    return shorten(said.removeprefix(dead).partition(" Some common causes")[0].rstrip("."), 200)


def node_here() -> str:
    """The address of the node that runs this process."""
    return str(imported_ray().util.get_node_ip_address())


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Be a driver of the cluster at an address, or of one that is started here; of neither, if this process is one.

    Raises:
        UsageError: Ray is not installed, or there is no cluster.
    """
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == LOCAL:
        quiet["include_dashboard"] = False
        if "ray" not in sys.modules:
            os.environ.update(LOOPBACK)
    ray = imported_ray()
    if ray.is_initialized():
        yield
        return
    try:
        _refuse_silence(address)
        # At Ray's own handler, SIGTERM would end the process in the middle of a step.
        with starting_others():
            ray.init(address=address, **quiet)
    except Exception as error:
        # Ray's own are of many kinds: a node that starts too slowly is a bare Exception.
        raise UsageError(
            f"no Ray cluster at {address} ({first_line(error)}): start one with `ray start --head`, or give no address"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _refuse_silence(address: str) -> None:
    """Find in seconds that nobody is at HOST:PORT; Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and "://" not in host:
        socket.create_connection((host, int(port)), timeout=5).close()


def offered(threads: int) -> tuple[str, int]:
    """The kind of device and the number of workers of the cluster: one a GPU, or one for so many cores of a node.

    Raises:
        UsageError: no node has so many.
    """
    nodes = [node["Resources"] for node in imported_ray().nodes() if node["Alive"]]
    gpus = sum(int(node.get("GPU", 0)) for node in nodes)
    if gpus:
        return "cuda", gpus
    workers = sum(int(node.get("CPU", 0)) // threads for node in nodes)
    if not workers:
        raise UsageError(
            f"no node of the Ray cluster has the {threads} CPUs that a worker is to use: set OMP_NUM_THREADS to fewer"
        )
    return "cpu", workers


def imported_ray() -> ModuleType:
    """Ray, made quiet; `UsageError` where it is not installed."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise UsageError("work on many machines needs `pip install theodolite[ray]`") from error
    return ray
