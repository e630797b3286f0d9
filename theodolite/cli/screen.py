"""A command's lines on standard error: progress, one-line errors, Ctrl-C; and `theodolite explain`."""

from __future__ import annotations

import codecs
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from theodolite.errors import TheodoliteError, UsageError, first_line
from theodolite.system.files import json_text
from theodolite.system.progress import STOPPING, ended_as_by_ctrl_c, interruptible

screen = Console(stderr=True)
_tracebacks = False


def escape_unwritable() -> None:
    """Write characters that the terminal's encoding lacks as JSON escapes (`\\u03c1`) instead of failing."""
    codecs.register_error("as_json", _as_json)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            with suppress(OSError):  # opened as a file, and a terminal or nothing by now
                stream.reconfigure(errors="as_json")


def _as_json(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def show_tracebacks(wanted: bool) -> None:
    """Show errors with their traceback instead of in one line."""
    global _tracebacks
    _tracebacks = wanted


@contextmanager
def one_line_errors(*, saves: bool = True) -> Iterator[None]:
    """Turn any exception into one line and an exit status; `saves`: the command can be resumed."""
    try:
        with ended_as_by_ctrl_c():
            yield
            print(end="", flush=True)  # here, where a reader that has left is no error; to nobody, nothing
    except KeyboardInterrupt:
        _say_error("interrupted; rerun the command to resume" if saves else "interrupted")
        raise typer.Exit(130) from None
    except BrokenPipeError:  # the reader of standard output has left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains at the end
        raise typer.Exit(141) from None  # as a shell says of a program that SIGPIPE ended
    except Exception as error:
        if _tracebacks:
            raise
        _say_error(str(error) if isinstance(error, TheodoliteError) else _line_of(error))
        raise typer.Exit(getattr(error, "exit_status", 1)) from None


def _line_of(error: Exception) -> str:
    first = first_line(error)
    smaller = "out of memory: use a smaller --batch or --length, or --dtype bfloat16"
    if "out of memory" in first:  # torch's message on a GPU
        return f"{smaller}, or spread the model over devices with --device-map auto"
    if isinstance(error, MemoryError) or "can't allocate memory" in first:  # torch's message on a CPU
        return smaller
    return f"{type(error).__name__}: {first} (run theodolite --debug … for the traceback)"


def _say_error(message: str) -> None:
    line = " ".join(message.split())
    more = section_of(line)
    with suppress(OSError):  # of a terminal that was closed; the exit status tells
        print(f"error: {line}", file=sys.stderr)
        if more:
            print(f"more:  theodolite explain {more.name}", file=sys.stderr)


@contextmanager
def stoppable(*, saves: bool = True) -> Iterator[Callable[[], bool]]:
    """Report errors as `one_line_errors`; yield a function that is true after one Ctrl-C; a second stops at once."""
    with one_line_errors(saves=saves), interruptible(say_stopping) as stopped:
        yield stopped


def print_json(values: object) -> None:
    """Print a result on standard output."""
    print(json_text(values))


def say_dimly(line: str) -> None:
    """Print a remark."""
    screen.print(line, style="dim", markup=False, highlight=False)


def say_stopping() -> None:
    """Answer the first Ctrl-C."""
    screen.print(STOPPING)


@contextmanager
def bars(
    stopped: Callable[[], bool], *, of: str = "", unit: str = "", kept: bool = True
) -> Iterator[Callable[[str, int, int], None]]:
    """Show progress bars, called with (task, done, total), titled `of`: task; a call raises once `stopped()`."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit)
    display = Progress(*columns, TimeRemainingColumn(), console=screen, transient=not kept)
    tasks: dict[str, TaskID] = {}

    def show(what: str, done: int, total: int) -> None:
        if stopped():
            raise KeyboardInterrupt
        if not tasks:
            display.start()  # not before, so that usage errors appear without a bar
        if what not in tasks:
            tasks[what] = display.add_task(f"{of}: {what}" if of else what)
        display.update(tasks[what], completed=done, total=total)

    try:
        yield show
    finally:
        if tasks:
            display.stop()


PAGE = Path(__file__).parent.parent / "assets" / "errors.md"


@dataclass(frozen=True)
class Section:
    """A section of the page of errors; `quoted` are the fragments of messages that its rows begin with."""

    name: str  # its anchor: the title in lower case with hyphens
    title: str
    text: str  # in Markdown, without links
    quoted: tuple[str, ...]


@functools.cache
def sections() -> dict[str, Section]:
    """Return all sections by name, in the order of the page."""
    _, *chunks = re.split(r"^#{2,3} ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    by_name = {}
    for section in chunks:
        title, _, text = section.partition("\n")
        rows = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
        if not rows:
            continue
        quoted = tuple(quote for row in rows for quote in re.findall(r"`([^`]+)`", row))
        name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
        by_name[name] = Section(name, title, re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).strip(), quoted)
    return by_name


def section_of(message: str) -> Section | None:
    """Find the section that explains this message, if there is one."""
    return next((s for s in sections().values() if any(quote in message for quote in s.quoted)), None)


def explain_command(
    what: Annotated[
        str | None,
        typer.Argument(
            help="A section, part of its name, or an error message. Without it: list the sections."
        ),
    ] = None,
) -> None:
    """Explain what an error means and what to do about it.

    Example: theodolite explain run-folders
    """
    with one_line_errors(saves=False):
        from rich.markdown import Markdown

        known = sections()
        if what is None:
            print("\n".join(known))
            return
        word = what.strip().lower()
        named = next((known[name] for name in known if word and word in name), None)
        section = section_of(what) or named
        if section is None:
            raise UsageError(f"nothing explains {what!r}: give one of {', '.join(known)}")
        Console().print(Markdown(f"## {section.title}\n{section.text}"))
