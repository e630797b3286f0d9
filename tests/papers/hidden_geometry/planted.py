"""Studies whose text was read by group, as laid down: no model is run."""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.corpus.groups import GROUPS
from theodolite.passes.run import Run
from theodolite_papers import Study
from theodolite_papers.hidden_geometry.layer_columns import GroupedBasis


def grouped(basis: Tensor, noise: Tensor | None = None) -> GroupedBasis:
    """Groups of 5 contexts each with a basis (layers, positions 1 …, d), and `noise` (layers, groups, positions, d)."""
    layers, positions, width = basis.shape
    text = torch.zeros(layers, GROUPS, positions + 1, width, dtype=torch.float64)
    text[:, :, 1:] = basis.double()[:, None] + (0 if noise is None else noise)
    return GroupedBasis(5 * text, torch.full((layers, GROUPS, positions + 1), 5.0).double(), positions + 1)


def study_of(run: Run, noise: Tensor | None = None) -> Study:
    """A study of the run, each group of whose contexts has the run's own basis, but for `noise`."""
    study = Study(run)
    basis = run.arrays["positional_basis"][:, 1:]
    study.cached(f"basis by group of {run.provenance['corpus'].get('sha256')}", lambda: grouped(basis, noise))
    return study
