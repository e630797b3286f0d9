"""The command line: parsing, and which function does the work. Nothing is measured here.

Heavy imports happen inside the commands, so that `theodolite --help` answers at once.
"""

from __future__ import annotations

import logging
import os
from typing import Annotated

import typer

from theodolite import __version__
from theodolite.cli.commands import add_commands, with_option_groups
from theodolite.cli.compare import compare_command
from theodolite.cli.evaluate import evaluate_command
from theodolite.cli.explain import explain_command
from theodolite.cli.explore import explore_command
from theodolite.cli.prune import prune_command
from theodolite.cli.runs import exclude_command, report_command, runs_command
from theodolite.cli.screen import escape_unwritable, show_tracebacks
from theodolite.cli.survey import merge_command, spectra_command, survey_command, trace_command

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
    _spin_briefly()
    # It writes to standard output, in front of JSON, and comes with accelerate wherever it is installed.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)


def _spin_briefly() -> None:
    """Let threads that wait for the next operation spin for some 20 µs, not for 10 ms: before torch is imported.

    Spinning takes a processor from whoever else would use it, this command's other threads too. 1,000 turns outlast the
    pause between two operations; without any, waking up makes small operations half as slow again.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


app.command("survey")(with_option_groups(survey_command))
app.command("merge")(merge_command)
app.command("spectra")(with_option_groups(spectra_command))
app.command("trace")(with_option_groups(trace_command))
app.command("exclude")(exclude_command)
app.command("report")(report_command)
app.command("runs")(runs_command)
app.command("prune")(with_option_groups(prune_command))
app.command("compare")(with_option_groups(compare_command))
app.command("evaluate")(with_option_groups(evaluate_command))
app.command("explore")(with_option_groups(explore_command))
app.command("explain")(explain_command)
add_commands(app)


def main() -> None:
    """Run the `theodolite` command."""
    escape_unwritable()
    app(prog_name="theodolite")
