"""Workers on a Ray cluster: how they are started, and started anew when they die.

Where there is no room for a new one, the others do its work.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from theodolite.errors import WorkError
from theodolite.passes.ray_cluster import WorkerLost, answered, fetched, imported_ray
from theodolite.passes.ray_workers import Job, Worker

DEATHS = 3
"""Workers that one call may lose before it is given up: a node may be lost twice by chance."""

NOTICE, LIMIT = 30.0, 600.0
"""Seconds without any worker after which it is said what is waited for, and after which nothing is waited for."""


class Workers:
    """Handles of workers that are started with the first call, and anew when they die; they end with the handles.

    Ray itself restarts none: it would not say how often it did, and a call to one that it restarts fails all the same.

    Args:
        say: told in one line what is waited for, and of every worker that was lost.
    """

    def __init__(self, kind: type[Worker], job: Job, count: int, say: Callable[[str], None]) -> None:
        self.job = job
        self._kind = kind
        self.count = count
        self._say = say
        self._places: dict[int, str] = {}  # where each worker was when it last answered
        self._job: Any = None  # for as long as a worker may be started with it
        self._handles: dict[int, Any] = {}
        self._asked: dict[int, Any] = {}  # by worker that has not answered yet: where it is
        # In a row before they answered; the last of `DEATHS` are not replaced.
        self._died: Counter[int] = Counter()
        self._why = ""  # the last of them did
        self._since: float | None = None  # when there began to be none
        self._told = False

    def __getitem__(self, number: int) -> Any:
        return self._handles[number]

    def alive(self) -> list[int]:
        """Workers that have answered where they are.

        Raises:
            WorkError: for long there was none, or all died before they answered.
        """
        if not self._handles:
            self._job = imported_ray().put(self.job)
            for number in range(self.count):
                self._start(number)
        for number, place in list(self._asked.items()):
            if not answered(place):
                continue
            try:
                self._places[number] = fetched(place, "was started")
                self._died[number] = 0
                del self._asked[number]
            except WorkerLost as lost:
                self._why = str(lost)
                self._died[number] += 1
                if self._died[number] < DEATHS:
                    self._start(number)
                else:
                    del self._asked[number]
        gone = [number for number in range(self.count) if self._died[number] >= DEATHS]
        if len(gone) == self.count:
            raise WorkError(
                f"workers died before they did anything, {DEATHS} in a row ({self._why}): try `python -c 'import "
                "theodolite.passes.ray_workers'` on the nodes of the Ray cluster, and read their logs "
                "(/tmp/ray/session_latest/logs)"
            )
        alive = [number for number in range(self.count) if number not in (*self._asked, *gone)]
        self._wait(bool(alive))
        return alive

    def lose(self, number: int, doing: str) -> None:
        """A call to this worker was lost when it was doing something: another is started in its place."""
        if number not in self._asked:  # else this was told, and is being done
            self._say(f"the worker on {self._places[number]} was lost when it {doing}; another takes over")
            self._start(number)

    def _start(self, number: int) -> None:
        """It gets no call until it answers; the one before ends with its handle, where it was only out of reach."""
        actor = imported_ray().remote(self._kind).options(scheduling_strategy="SPREAD", **self._needs)
        self._handles[number] = actor.remote(self._job)
        self._asked[number] = self[number].place.remote()

    @property
    def _needs(self) -> dict[str, int]:
        job = self.job
        return {"num_cpus": 1, "num_gpus": 1} if job.device == "cuda" else {"num_cpus": job.threads}

    def _wait(self, any_alive: bool) -> None:
        """Say what is waited for, after a while, and end it after a long while."""
        now = time.monotonic()
        self._since = None if any_alive else self._since or now
        waited = now - self._since if self._since else 0.0
        if waited > LIMIT:
            raise WorkError(
                f"waited {LIMIT / 60:g} minutes for a worker, {self._lacking()}: end what else runs there, give "
                "another address, or rerun when there is room to go on from what is saved"
            )
        if waited > NOTICE and not self._told:
            self._told = True
            self._say(f"waiting for a worker, {self._lacking()}")

    def _lacking(self) -> str:
        """What a worker needs, and what there is."""
        ray = imported_ray()
        free, there = ray.available_resources(), ray.cluster_resources()
        needs = {name.removeprefix("num_").upper()[:-1]: count for name, count in self._needs.items()}
        asked = " and ".join(f"{count} {name}" for name, count in needs.items())
        has = " and ".join(f"{free.get(name, 0):g} of {there.get(name, 0):g} {name}" for name in needs)
        return f"which needs {asked} of one node; the Ray cluster has {has} free"
