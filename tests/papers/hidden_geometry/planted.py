"""Studies whose text was read by group, as laid down: no model is run."""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.corpus.groups import GROUPS
from theodolite.passes.run import Run
from theodolite_papers import Study


def grouped(basis: Tensor, noise: Tensor | None = None) -> list[Tensor]:
    """Eight groups of each layer with a basis (layers, positions, d), and `noise` (layers, groups, positions, d)."""
    groups = basis.double()[:, None].expand(-1, GROUPS, -1, -1) + (0 if noise is None else noise)
    return list(groups - groups.mean(dim=2, keepdim=True))


def study_of(run: Run, noise: Tensor | None = None) -> Study:
    """A study of the run, each group of whose contexts has the run's own basis, but for `noise`."""
    study = Study(run)
    basis = run.arrays["positional_basis"][:, 1:]
    study.cached(f"basis by group of {run.provenance['corpus'].get('sha256')}", lambda: grouped(basis, noise))
    return study


def drawn(seed: int, *size: int) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).double()
