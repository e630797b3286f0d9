"""Zhang, Khan & Papyan 2025, Attention sinks and outlier features: a catch, tag, and release mechanism."""

from __future__ import annotations

from theodolite.papers.catch_tag_release import (
    averaging_construction,
    averaging_models,
    few_shot,
    no_op_option,
    outliers,
    prompt_sinks,
    pruned_sinks,
    pruning_sweep,
    tag_ablation,
    traced_sinks,
)

MODULES = (
    prompt_sinks,
    few_shot,
    pruned_sinks,
    averaging_construction,
    averaging_models,
    traced_sinks,
    tag_ablation,
    outliers,
    no_op_option,
    pruning_sweep,
)
"""Those with experiments, in the order of the paper; then what goes past it."""
