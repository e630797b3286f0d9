"""Make commands that Typer alone cannot: options in dataclasses, commands of other packages.

Commands of other packages are named by an installed distribution in the group `theodolite.commands`. An entry point's
name is the command's; its object is a `typer.Typer`, which becomes a group of commands, or a function. One that cannot
be loaded says so where it is called and in the list of commands, and leaves the others alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from importlib.metadata import entry_points
from typing import Any, get_type_hints

import typer

from theodolite.cli.screen import one_line_errors
from theodolite.errors import UsageError, first_line


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for Typer in which the fields of a dataclass parameter are options."""
    signature, types = inspect.signature(command), get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in types.items() if is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=types[name]))
            continue
        options = get_type_hints(groups[name], include_extras=True)
        parameters += [
            inspect.Parameter(
                option.name,
                parameter.KEYWORD_ONLY,
                default=parameter.empty if option.default is MISSING else option.default,
                annotation=options[option.name],
            )
            for option in fields(groups[name])
        ]

    @functools.wraps(command)
    def flat(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{option.name: given.pop(option.name) for option in fields(group)})
        command(**given)

    flat.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return flat


GROUP = "theodolite.commands"


def add_commands(app: typer.Typer) -> None:
    """Add every command of other packages to `app`, in the order of their names; names that it has stay its own."""
    names = {command.name for command in app.registered_commands}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        if entry.name in names:
            continue
        try:
            added = entry.load()
        except Exception as error:
            package = entry.dist.name if entry.dist else entry.value
            problem = f"{package}: the command {entry.name!r} cannot be loaded"
            added = _refusing(f"{problem} ({type(error).__name__}: {first_line(error)})")
        if isinstance(added, typer.Typer):
            app.add_typer(added, name=entry.name)
        else:
            app.command(entry.name)(with_option_groups(added))


def _refusing(problem: str) -> Callable[[], None]:
    def refuse() -> None:
        with one_line_errors():
            raise UsageError(problem)

    refuse.__doc__ = problem
    return refuse
