"""How far the rotary positions of a model of `transformers` go, and which passes turn them alike."""

from __future__ import annotations

from typing import Any


def positions_by(config: Any) -> int | None:
    """Return for how many tokens a config has positions; None where it sets no limit."""
    names = ("max_target_positions", "max_position_embeddings")  # Whisper's decoder has its own
    limits = (getattr(config, name, None) for name in names)
    longest = next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)
    rope = getattr(config, "rope_parameters", None) or {}
    if longest is None or rope.get("rope_type") not in ("linear", "yarn"):
        # Those of the other kinds give it in full. Beyond it, "dynamic" turns by the longest pass so far.
        return longest
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
    return min((limit for limit in limits if limit), default=None)
