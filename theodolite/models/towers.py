"""Checkpoints of two encoders beside each other, one of text and one of images (CLIP, SigLIP): which one is opened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import transformers

from theodolite.errors import UsageError

Tower = Literal["text", "vision"]

TOWERS: tuple[Tower, ...] = ("text", "vision")


def tower_of(config: Any, tower: Tower | None, say: Callable[[str], None]) -> Any:
    """The config of one tower where a checkpoint has two, which `say` is told; any other config as it is.

    Args:
        tower: which one; None: that of text.

    Raises:
        UsageError: there is no such tower.
    """
    if tower is not None and tower not in TOWERS:
        raise UsageError(f"tower is {tower!r}: give 'text' or 'vision'")
    name = str((getattr(config, "architectures", None) or [""])[0])
    family, chosen = name.removesuffix("Model"), tower or "text"
    of_tower = f"{family}{chosen.capitalize()}Model"
    whole = getattr(transformers, name, None)
    both = all(hasattr(whole, method) for method in ("get_text_features", "get_image_features"))
    if not (both and hasattr(transformers, of_tower)):
        return config
    part = getattr(config, f"{chosen}_config")
    part.architectures = [of_tower]
    part._attn_implementation = None
    say(f"{name} has two towers: this is the one of {'text' if chosen == 'text' else 'images'} ({of_tower})")
    return part
