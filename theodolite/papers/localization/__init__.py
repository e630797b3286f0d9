"""Bao et al. 2024, Self-attention networks localize when QK-eigenspectrum concentrates."""

from __future__ import annotations

from theodolite.papers.localization import (
    head_behaviour,
    limits,
    locater_figures,
    monitor_warnings,
    propagation_theory,
    simulated_walks,
    text_as_walk,
)

MODULES = (
    propagation_theory,
    limits,
    simulated_walks,
    locater_figures,
    monitor_warnings,
    head_behaviour,
    text_as_walk,
)
"""Those with experiments, in the order of the paper; then what goes past it."""
