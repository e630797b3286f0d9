"""The page of every command, docs' commands.md, from the command line itself; the documentation is built with it."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

import typer

from theodolite.cli.app import app

_INTRODUCTION = """# Commands

Every command with its arguments, options and defaults, written from the command line itself when these pages are
built. `theodolite COMMAND --help` prints the same. The how-to pages, such as [Survey a model](survey.md), say which
to use when.

An option that takes no value is a switch. Exit status is 0 when all went well, 2 where the call was wrong and 1 where
the work failed ([Errors](errors.md))."""
_DEFAULT = re.compile(r"\s*\[(?:default: (?P<value>[^\[\]]*)|required)\](?P<stop>\.?)\s*$")


def page() -> str:
    """The whole page, in Markdown."""
    root: Any = typer.main.get_command(app)
    context = root.make_context("theodolite", [], resilient_parsing=True)
    parts = [_INTRODUCTION, _table("option", _rows(root, context, "option"))]
    for command, own, level in commands():
        parts.append(_section(command, own, level))
    return "\n\n".join(parts) + "\n"


def commands() -> Iterator[tuple[Any, Any, int]]:
    """Every command with its context and the level of its heading, groups before what is in them."""
    root: Any = typer.main.get_command(app)

    def within(group: Any, parent: Any, level: int) -> Iterator[tuple[Any, Any, int]]:
        for name, command in group.commands.items():
            own = command.make_context(name, [], parent=parent, resilient_parsing=True)
            yield command, own, level
            if hasattr(command, "commands"):
                yield from within(command, own, level + 1)

    yield from within(root, root.make_context("theodolite", [], resilient_parsing=True), 2)


def example(command: Any) -> str | None:
    """The call that the command's help shows."""
    shown = re.search(r"^Example: (theodolite .*)$", command.help or "", re.MULTILINE)
    return shown[1] if shown else None


def _section(command: Any, context: Any, level: int) -> str:
    path = context.command_path
    prose = re.sub(r"^Example: .*$", "", command.help or "", flags=re.MULTILINE)
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    parts = [f"{'#' * level} {path}", *map(_escaped, re.split(r"\n\s*\n", prose.strip()))]
    parts.append(f"```text\n{usage}\n```")
    if shown := example(command):
        parts.append(f"For example:\n\n```bash\n{shown}\n```")
    parts += [
        _table(kind, rows) for kind in ("argument", "option") if (rows := _rows(command, context, kind))
    ]
    return "\n\n".join(parts)


def _rows(command: Any, context: Any, kind: str) -> list[tuple[str, str, str]]:
    """Names, meaning and default of a command's arguments or options, as its help has them."""
    rows = []
    for parameter in command.params:
        if parameter.param_type_name != kind or parameter.hidden:
            continue
        names, meaning = parameter.get_help_record(context)
        found = _DEFAULT.search(meaning)
        default = "" if found is None else found["value"] or "required"
        rows.append((f"`{names}`", _escaped(_DEFAULT.sub(r"\g<stop>", meaning)), _escaped(default)))
    return rows


def _table(kind: str, rows: list[tuple[str, str, str]]) -> str:
    lines = [f"| {kind} | what it does | default |", "| --- | --- | --- |"]
    return "\n".join([*lines, *("| " + " | ".join(row).replace("\n", " ") + " |" for row in rows)])


def _escaped(text: str) -> str:
    """Text of a terminal as Markdown shows it: only what stands between backticks stays as code."""
    parts = re.split(r"(`[^`\n]+`)", " ".join(text.split()))
    shown = (
        part
        if part.startswith("`")
        else re.sub(r"([\\`*_{}\[\]|$~])", r"\\\1", html.escape(part, quote=False))
        for part in parts
    )
    return "".join(shown)
