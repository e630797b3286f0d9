"""The errors that theodolite raises when it cannot continue: one line that names the thing at fault and what to do."""

from __future__ import annotations


class TheodoliteError(Exception):
    """Base of every error that theodolite raises on purpose."""

    exit_status = 1


class UsageError(TheodoliteError):
    """The call was wrong: a path, an option or an input that cannot be used."""

    exit_status = 2


class WorkError(TheodoliteError):
    """The call was right and the work failed: NaN weights, a full disk, a model that does not verify."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, "" where it has none."""
    return (str(error).strip().splitlines() or [""])[0]
