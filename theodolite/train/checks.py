"""What is asked of a monitor and of steps, refused in one line where it cannot be: before a model is looked at."""

from __future__ import annotations

import operator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from theodolite.errors import UsageError
from theodolite.train.alarms import Limits
from theodolite.train.geometry import check_shape


def check_looks(ids: Any, inline: bool, every: int, spectra_every: int, limits: Limits | None) -> None:
    """Refuse what no monitor can do, whatever the model. `ids` may be None.

    Raises:
        UsageError: the ids are no batch of token ids, or are given with `inline`, a number is not whole or not
            positive, or `limits` no `Limits`.
    """
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in (every, spectra_every)):
        raise UsageError(
            f"every is {every!r} and spectra_every {spectra_every!r}: both must be 1 or more, and whole numbers"
        )
    if limits is not None and not isinstance(limits, Limits):
        raise UsageError(f"limits is a {type(limits).__name__}: give theodolite.train.alarms.Limits(...)")
    if inline and ids is not None:
        raise UsageError("give the token ids of a monitor batch, or inline=True, and not both")
    if ids is not None:
        check_shape(ids)


def checked_folder(folder: Any) -> Path | None:
    """A folder's path, or None.

    Raises:
        UsageError: it is no path.
    """
    if folder is None:
        return None
    try:
        return Path(folder)
    except TypeError:
        raise UsageError(f"folder is {folder!r:.60}: give a path, or None") from None


def whole_step(step: Any) -> int:
    """A step as Python's number.

    Raises:
        UsageError: it is not one of 0 or more.
    """
    with suppress(TypeError):
        if (number := operator.index(step)) >= 0:
            return number
    raise UsageError(f"step is {step!r:.60}: give the optimizer steps done, a whole number of 0 or more")


def one_number(loss: float | Tensor) -> float:
    """A loss as Python's number; NaN stays one.

    Raises:
        UsageError: it is not one number.
    """
    try:
        return float(loss.detach() if isinstance(loss, Tensor) else loss)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"loss is {loss!r:.60}: give one number, or a tensor of one") from None
