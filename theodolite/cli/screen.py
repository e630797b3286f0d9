"""What a command shows while it works, on standard error: progress, one-line errors, what Ctrl-C is answered.

No command is here, and nothing heavy is imported.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from theodolite.cli.error_pages import section_of
from theodolite.errors import TheodoliteError

screen = Console(stderr=True)
_tracebacks = False


def show_tracebacks(wanted: bool) -> None:
    """Whether an error is shown with its traceback, in place of one line."""
    global _tracebacks
    _tracebacks = wanted


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn what is raised inside into one line and an exit status: the error's own, 130 for Ctrl-C, else 1."""
    try:
        yield
    except TheodoliteError as error:
        if _tracebacks:
            raise
        _say_error(str(error))
        raise typer.Exit(error.exit_status) from None
    except KeyboardInterrupt:
        _say_error("interrupted; rerun the command to resume")
        raise typer.Exit(130) from None
    except MemoryError:
        _say_error("out of memory: use a smaller --batch or --length")
        raise typer.Exit(1) from None
    except Exception as error:
        if _tracebacks:
            raise
        first = (str(error).strip().splitlines() or [""])[0]
        _say_error(f"{type(error).__name__}: {first} (run theodolite --debug … for the traceback)")
        raise typer.Exit(1) from None


def _say_error(message: str) -> None:
    line = " ".join(message.split())
    print(f"error: {line}", file=sys.stderr)
    more = section_of(line)
    if more:
        print(f"more:  theodolite explain {more.name}", file=sys.stderr)


def say_stopping() -> None:
    """What the first Ctrl-C is answered."""
    screen.print("stopping after this batch; press Ctrl-C again to stop at once")


@contextmanager
def progress(title: str, unit: str, stopped: Callable[[], bool]) -> Iterator[Callable[[int, int], None]]:
    """A bar that is told (done, total); it raises KeyboardInterrupt once `stopped` says so."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=screen)
    task = bar.add_task(title, rate="", total=None)
    begun: list[tuple[float, int]] = []  # when the work began, and how much was done before

    def show(done: int, total: int) -> None:
        if stopped():
            raise KeyboardInterrupt
        if not begun:
            bar.start()  # not before: what is wrong with the call is said without a bar
            begun.append((time.monotonic(), done))
        started, before = begun[0]
        seconds = time.monotonic() - started
        rate = f"{(done - before) / seconds:.1f} {unit}/s" if done > before and seconds > 0 else unit
        bar.update(task, completed=done, total=total, rate=rate)

    try:
        yield show
    finally:
        if begun:
            bar.stop()
