"""Values of a few options, and checks that import no library of models."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Literal, get_args

from theodolite.errors import UsageError

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")

Attention = Literal["decoder", "encoder", "cross"]
"""Of an encoder-decoder: the decoder's to itself, the encoder's, and the decoder's to the encoder."""

DECODER: Attention = "decoder"


def check_whole(**given: object) -> None:
    """Raise `UsageError` where one of the arguments is no whole number; a bool is none."""
    for name, number in given.items():
        if isinstance(number, bool) or not isinstance(number, numbers.Integral):
            raise UsageError(f"{name} is {number!r}: give a whole number")


def check_number(**given: object) -> None:
    """Raise `UsageError` where one of the arguments is no number; a bool is none."""
    for name, number in given.items():
        if isinstance(number, bool) or not isinstance(number, numbers.Real):
            raise UsageError(f"{name} is {number!r}: give a number")


def check_dtype(dtype: object) -> None:
    """Raise `UsageError` unless it is one of `DTYPES`, with or without `torch.` before it."""
    if str(dtype).removeprefix("torch.") not in DTYPES:
        raise UsageError(f"unknown dtype {dtype}: use one of {', '.join(DTYPES)}")


def wider_than(dtype: object) -> str:
    """Suggest what to try where numbers of this dtype are NaN or infinite."""
    name = str(dtype).removeprefix("torch.")
    if name == "float64":
        return "no dtype is wider, so look for NaN in the weights"
    return f"try --dtype {'float64' if name == 'float32' else 'float32'}"


def check_attention(attention: str | None) -> None:
    """Raise `UsageError` unless it is an `Attention`, or None."""
    if attention is not None and attention not in get_args(Attention):
        raise UsageError(f"unknown attention {attention}: use {', '.join(get_args(Attention))}")


def check_one_place(device: object, device_map: object) -> None:
    """Raise `UsageError` where both a device and a device map are given."""
    if device is not None and device_map is not None:
        raise UsageError("--device and --device-map both say where the model goes: give one")


def refuse_unread(who: str, given: Mapping[str, object]) -> None:
    """Raise `UsageError` where an option was given that would be ignored; a flag is given where it is True."""
    for what, value in given.items():
        if value is not None and value is not False:
            raise UsageError(f"{who}: leave out {what}")
