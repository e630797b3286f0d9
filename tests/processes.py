"""Processes of their own for what a test runs, forked from one that has already imported what takes seconds."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

SERVER = multiprocessing.get_context("forkserver")
PRELOADED = [f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama")]
OF_OURS = ["cli.app", "comparison", "passes.survey", "prune.model", "report.page"]
OF_OURS += ["sinks.trace", "train"]
PRELOADED += ["theodolite_papers.experiment", *(f"theodolite.{name}" for name in OF_OURS)]
SERVER.set_forkserver_preload(PRELOADED)


def together(work: Callable[..., Any], args: tuple[Any, ...], processes: int, seconds: float = 240) -> None:
    """Run work(rank, *args) in several processes, until all have ended; what one raises is raised."""
    started = torch.multiprocessing.start_processes(
        work, args, processes, join=False, start_method="forkserver"
    )
    end = time.monotonic() + seconds
    while not started.join(1):
        if time.monotonic() > end:
            for process in started.processes:
                process.kill()
            raise TimeoutError(f"processes still ran after {seconds} s, and were ended")


def ranks(work: Callable[..., Any], *args: Any, processes: int = 2, backend: str = "gloo") -> list[Any]:
    """What work(rank, *args) returns in each of several processes of one group.

    They meet over a file: a free port that was looked up may be taken by the time it is used.
    """
    with tempfile.TemporaryDirectory() as folder:
        together(_rank, (Path(folder), processes, backend, work, args), processes)
        return [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(processes)]


def _rank(
    rank: int, folder: Path, processes: int, backend: str, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # accelerate asks for it
    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=120),
    )
    torch.save(work(rank, *args), folder / str(rank))
    gc.collect()  # DDP, which a Trainer's cycles keep, waits for ever for a group that is gone
    distributed.destroy_process_group()


class Started:
    """A running process: its pid, and what it says into files of `folder`."""

    def __init__(self, work: Callable[..., Any], *args: Any, folder: Path) -> None:
        self._files = [folder / ".stdout", folder / ".stderr"]
        self._process = SERVER.Process(target=_work, args=(self._files, torch.get_num_threads(), work, args))
        self._process.start()
        self.pid = self._process.pid

    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.is_alive()

    def end(self, seconds: float = 240) -> tuple[int | None, str, str]:
        """Wait for its end: its exit status (-9 where it was killed), what it printed, its errors."""
        self._process.join(seconds)
        return self._process.exitcode, *(file.read_text() if file.exists() else "" for file in self._files)


def _work(files: list[Path], threads: int, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    for descriptor, file in enumerate(files, start=1):
        with open(file, "w") as opened:
            os.dup2(opened.fileno(), descriptor)
    # Ignored, where the tests run in the background.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    torch.set_num_threads(threads)  # their number changes last bits
    work(*args)


def command(*words: Any) -> None:
    """Run a command line, as `theodolite` would."""
    from theodolite.cli.app import main

    sys.argv = ["theodolite", *map(str, words)]
    main()
