"""Make commands that Typer alone cannot: options in dataclasses, an option with an optional value."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

from typer.core import TyperCommand


class RayCommand(TyperCommand):
    """A command whose `--ray` takes an optional address, which Typer does not support."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Turn a `--ray` without an address into `--ray=local`."""
        following = [*args, "--"][1:]
        bare = [
            word == "--ray" and after.startswith("-") for word, after in zip(args, following, strict=True)
        ]
        return super().parse_args(
            ctx, ["--ray=local" if alone else word for word, alone in zip(args, bare, strict=True)]
        )


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
