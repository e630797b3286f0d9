"""The command line: heavy imports happen inside the commands, so that `theodolite --help` answers at once."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated

import typer

from theodolite import __version__
from theodolite.cli.explore import explore_command
from theodolite.cli.options import with_option_groups
from theodolite.cli.prune import prune_command
from theodolite.cli.runs import exclude_command, report_command, runs_command
from theodolite.cli.screen import escape_unwritable, explain_command, one_line_errors, show_tracebacks
from theodolite.cli.several import compare_command, evaluate_command
from theodolite.cli.survey import merge_command, spectra_command, survey_command, trace_command
from theodolite.errors import UsageError, first_line

app = typer.Typer(
    help="Survey the geometry of attention: where position and context live, which heads localize or collapse, "
    "which tokens are sinks.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # else "[default: …]" would be taken for markup, and vanish
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    show_tracebacks(debug)
    # No progress chatter, warnings or telemetry from the libraries underneath.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Threads that wait for the next operation spin for some 20 µs, not for 10 ms, from others' processors: 1,000 turns
    # outlast the pause between two operations; without any, waking up makes small operations half as slow again.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read when torch is imported
    # It writes to standard output, in front of JSON, and comes with accelerate wherever it is installed.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)


def _refusing(entry: EntryPoint, error: Exception) -> Callable[[], None]:
    """Make the command of another package that cannot be loaded: it says so, also in the list of commands."""
    package = entry.dist.name if entry.dist else entry.value
    why = f"{type(error).__name__}: {first_line(error)}"
    problem = f"{package}: the command {entry.name!r} cannot be loaded ({why})"

    def refuse() -> None:
        with one_line_errors():
            raise UsageError(problem)

    refuse.__doc__ = problem
    return refuse


for _command in (
    *(survey_command, merge_command, spectra_command, trace_command, exclude_command, report_command),
    *(runs_command, prune_command, compare_command, evaluate_command, explore_command, explain_command),
):
    app.command(_command.__name__.removesuffix("_command"))(with_option_groups(_command))

_names = {command.name for command in app.registered_commands}
for _entry in sorted(entry_points(group="theodolite.commands"), key=lambda entry: entry.name):
    if _entry.name in _names:
        continue
    try:
        _added = _entry.load()
    except Exception as error:
        _added = _refusing(_entry, error)
    if isinstance(_added, typer.Typer):
        app.add_typer(_added, name=_entry.name)
    else:
        app.command(_entry.name)(with_option_groups(_added))


def main() -> None:
    """Run the `theodolite` command."""
    escape_unwritable()
    app(prog_name="theodolite")
