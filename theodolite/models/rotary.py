"""Rotary positions of `transformers` beyond the original length: how far they go, and what a pass leaves for the next.

Dynamic scaling turns by the length of the longest pass so far, so that a long pass changes the next shorter one. (The
other kinds depend on no length, or LongRoPE on that of the pass alone.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from theodolite.models.structure import removed_on_leaving

LENGTH, FREQUENCIES, ORIGINAL = "max_seq_len_cached", "inv_freq", "original_"
"""How the names of what such a module keeps end, perhaps one for each kind of layer; and what it began with."""


@contextmanager
def frequencies_of_each_pass(model: nn.Module) -> Iterator[None]:
    """Let each pass turn queries and keys by its own length while open; on leaving the modules are as before."""
    dynamic = [module for module in model.modules() if "dynamic" in str(getattr(module, "rope_type", ""))]
    before = [
        {name: kept for name, kept in (vars(m) | m._buffers).items() if name.endswith((LENGTH, FREQUENCIES))}
        for m in dynamic
    ]
    hooks = [module.register_forward_pre_hook(_begin) for module in dynamic]
    try:
        with removed_on_leaving(hooks):
            yield
    finally:
        for module, values in zip(dynamic, before, strict=True):
            _begin(module)
            for name, kept in values.items():
                setattr(module, name, kept)


def _begin(module: Any, _args: Any = None) -> None:
    """Reset a module to its state before the first pass."""
    for name in [name for name in vars(module) if name.endswith(LENGTH)]:
        setattr(module, name, module.original_max_seq_len)
    for name, original in [*module._buffers.items()]:
        if name.endswith(ORIGINAL + FREQUENCIES):
            setattr(module, name.replace(ORIGINAL, ""), original.clone())


def positions_by(config: Any) -> int | None:
    """Return for how many tokens a config has positions; None where it sets no limit."""
    names = ("max_target_positions", "max_position_embeddings")  # Whisper's decoder has its own
    limits = (getattr(config, name, None) for name in names)
    longest = next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)
    rope = getattr(config, "rope_parameters", None) or {}
    if longest is None or rope.get("rope_type") not in ("linear", "dynamic", "yarn"):
        return longest  # which those of the other kinds give in full
    # The length that is scaled: most configs that name none give the original one for the longest.
    original = rope.get("original_max_position_embeddings") or longest
    return max(longest, int(rope.get("factor", 1.0) * original))


def turned_alike_up_to(config: Any) -> int | None:
    """Return the longest pass that rotates positions as every shorter one does; None: any length."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [of_kind for of_kind in rope.values() if isinstance(of_kind, dict)] or [rope]
    limits = [
        of_kind.get("original_max_position_embeddings")
        for of_kind in kinds
        if of_kind.get("rope_type") == "longrope"
    ]
    if any("dynamic" in of_kind.get("rope_type", "") for of_kind in kinds):
        limits.append(config.max_position_embeddings)
    return min((limit for limit in limits if limit), default=None)
