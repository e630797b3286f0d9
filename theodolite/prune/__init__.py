"""Prune single matrices, and whole models block by block.

The public names are imported when they are first used, so that the options can be checked before torch is there.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from theodolite.prune.checkpoint import Pruned as Pruned
    from theodolite.prune.checkpoint import load_factored as load_factored
    from theodolite.prune.methods import magnitude as magnitude
    from theodolite.prune.methods import sparsegpt as sparsegpt
    from theodolite.prune.methods import wanda as wanda
    from theodolite.prune.model import prune_model as prune_model
    from theodolite.prune.options import METHODS as METHODS
    from theodolite.prune.sparse_low_rank import SparseLowRank as SparseLowRank
    from theodolite.prune.sparse_low_rank import oats as oats

_HOMES = {
    "METHODS": "options",
    "Pruned": "checkpoint",
    "SparseLowRank": "sparse_low_rank",
    "load_factored": "checkpoint",
    "magnitude": "methods",
    "oats": "sparse_low_rank",
    "prune_model": "model",
    "sparsegpt": "methods",
    "wanda": "methods",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"theodolite.prune.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'theodolite.prune' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
