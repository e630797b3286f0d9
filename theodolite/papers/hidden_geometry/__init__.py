"""Song & Zhong 2024, Uncovering hidden geometry in Transformers via disentangling position and context."""

from __future__ import annotations

from theodolite.papers.hidden_geometry import (
    attribution,
    context_basis,
    depth,
    heads,
    positional_basis,
    positional_logits,
    positions_while_learned,
    prompt_logits,
    separation,
    smoothness,
    tables,
    theorems,
    weights,
)

MODULES = (
    tables,
    positional_basis,
    context_basis,
    separation,
    smoothness,
    depth,
    weights,
    heads,
    theorems,
    positions_while_learned,
    prompt_logits,
    positional_logits,
    attribution,
)
"""Those with experiments, in the order of the paper; then what goes past it."""
