"""Prune single matrices, and whole models block by block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from theodolite.system.lazy_names import lazy_names

if TYPE_CHECKING:
    from theodolite.prune.checkpoint import Pruned as Pruned
    from theodolite.prune.methods import magnitude as magnitude
    from theodolite.prune.methods import sparsegpt as sparsegpt
    from theodolite.prune.methods import wanda as wanda
    from theodolite.prune.model import prune_model as prune_model
    from theodolite.prune.options import METHODS as METHODS
    from theodolite.prune.sparse_low_rank import SparseLowRank as SparseLowRank
    from theodolite.prune.sparse_low_rank import oats as oats

__all__, __getattr__, __dir__ = lazy_names(__name__)
