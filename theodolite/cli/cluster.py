"""The options of commands whose work a Ray cluster can do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from theodolite.cli.options import Opening
from theodolite.system.choices import refuse_unread


@dataclass(frozen=True)
class Cluster:
    """Options of the Ray cluster whose workers run the model, if one does."""

    ray: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS]",
            help="Run on a Ray cluster at ADDRESS (auto for the one on this machine, or HOST:PORT); without an "
            "address, start a local one (needs theodolite[ray]).",
        ),
    ] = None
    actors: Annotated[
        int | None, typer.Option(help="Maximum number of --ray workers [default: all that fit].")
    ] = None

    def opening(self, given: Opening) -> Opening:
        """How the model is opened here: with workers, which have devices of their own, on the CPU.

        Raises:
            UsageError: an option that would be ignored.
        """
        if self.ray is None:
            refuse_unread("without --ray there are no workers", {"--actors": self.actors})
            return given
        devices = {"--device": given.device, "--device-map": given.device_map}
        refuse_unread("--ray: each worker has one device", devices)
        return replace(given, device="cpu")
