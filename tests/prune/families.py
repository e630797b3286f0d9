"""Checkpoints to prune: the families of `tests.checkpoints`, and two more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import checkpoints
from theodolite.models import OpenModel, open_model

_SIZES: dict[str, Any] = checkpoints._SIZES | checkpoints._NO_SPECIAL
MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_SIZES, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 9},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_SIZES, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
FAMILIES = (*checkpoints.TEXT_FAMILIES, *MORE)
DECODERS = tuple(family for family in FAMILIES if family != "bert")


def write(family: str, folder: Path, **options: Any) -> Path:
    """Write a checkpoint of the family to `folder`, which may be there already, and return it."""
    if not folder.exists():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoints, "FAMILIES", checkpoints.FAMILIES | MORE)
            checkpoints.write(family, folder, **options)
    return folder


def opened_anew(family: str, place: Path, **options: Any) -> OpenModel:
    """A model of the family that a test may change."""
    return open_model(write(family, place / family, **options))
