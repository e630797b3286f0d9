"""Commands of other packages: those that an installed distribution names in the group `theodolite.commands`.

An entry point's name is the command's; its object is a `typer.Typer`, which becomes a group of commands, or a function.
One that cannot be loaded says so where it is called and in the list of commands, and leaves the others alone.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

import typer

from theodolite.cli.commands import with_option_groups
from theodolite.cli.screen import one_line_errors
from theodolite.errors import UsageError, first_line

GROUP = "theodolite.commands"


def add_commands(app: typer.Typer) -> None:
    """Add every command of other packages to `app`, in the order of their names; names that it has stay its own."""
    names = {command.name for command in app.registered_commands}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        if entry.name in names:
            continue
        names.add(entry.name)
        try:
            added = _loaded(entry)
        except Exception as error:
            package = entry.dist.name if entry.dist else entry.value
            problem = f"{package}: the command {entry.name!r} cannot be loaded"
            problem += f" ({type(error).__name__}: {first_line(error)})"
            app.command(entry.name, help=problem)(_refusing(problem))
            continue
        if isinstance(added, typer.Typer):
            app.add_typer(added, name=entry.name)
        else:
            app.command(entry.name)(added)


def _loaded(entry: EntryPoint) -> typer.Typer | Callable[..., None]:
    """Load an entry point's object, and let Typer read it: an option that it cannot read is an error here."""
    added = entry.load()
    if not isinstance(added, typer.Typer):
        if not callable(added):
            raise TypeError(f"{entry.value} is neither a function nor a typer.Typer")
        added = with_option_groups(added)
        alone = typer.Typer()
        alone.command(entry.name)(added)
    typer.main.get_command(added if isinstance(added, typer.Typer) else alone)
    return added


def _refusing(problem: str) -> Callable[[], None]:
    def refuse() -> None:
        with one_line_errors():
            raise UsageError(problem)

    return refuse
