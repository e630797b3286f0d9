"""`theodolite explain`: what an error means."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from theodolite.cli.screen import one_line_errors, section_of, sections
from theodolite.errors import UsageError


def explain_command(
    what: Annotated[
        str | None,
        typer.Argument(
            help="A section, part of its name, or an error message. Without it: list the sections.",
            show_default=False,
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
