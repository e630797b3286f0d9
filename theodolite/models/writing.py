"""Greedy decoding by a model's own cached `generate`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from theodolite.errors import WorkError
from theodolite.models.source import Source
from theodolite.models.structure import removed_on_leaving

ROUNDED = 1e-3
"""Of the largest logit: cached decoding and a pass over the whole text round differently, in any dtype."""


@torch.no_grad()
def decode_greedily(
    source: Source, ids: Int[Tensor, "contexts positions"], count: int, verify: bool
) -> Int[Tensor, "contexts more_positions"]:
    """Append `count` tokens to contexts of one length by greedy decoding with the model's own cache.

    `verify`: the first context's logits while decoding are compared with those of one pass over the finished text.

    Raises:
        WorkError: they differ.
    """
    assert source.predict is not None
    root = source.root
    if not (isinstance(root, PreTrainedModel) and root.can_generate()):
        for _ in range(count):  # no cache is known of a module of one's own
            ids = torch.cat([ids, source.predict(ids)[:, -1:].argmax(dim=-1).to(ids)], dim=1)
        return ids
    model: Any = root
    steps: list[Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        steps.append(output.logits[0, -1])

    # A checkpoint may ask for sampling, for penalties of what was said, and for an end.
    plain = GenerationConfig(cache_implementation=model.generation_config.cache_implementation)
    with ExitStack() as undo:
        undo.callback(setattr, model, "generation_config", model.generation_config)
        model.generation_config = plain
        undo.enter_context(removed_on_leaving([model.register_forward_hook(keep)] if verify else []))
        placed = ids.to(source.device)
        finished: Tensor = model.generate(
            placed,
            attention_mask=torch.ones_like(placed),
            max_new_tokens=count,
            do_sample=False,
            use_cache=True,
        ).cpu()
    if verify:
        _check_same(source, torch.stack(steps), source.predict(finished[:1])[0, ids.shape[1] - 1 : -1])
    return finished


def _check_same(source: Source, as_written: Tensor, at_once: Tensor) -> None:
    error = float((as_written - at_once).abs().max() / at_once.abs().max())
    if not error <= max(ROUNDED, 16 * torch.finfo(source.dtype).eps):
        raise WorkError(
            f"{source.name} writes by logits that differ by {error:.1e} from those of the finished text read at once "
            "(its positions depend on the length, say): give a shorter text, or fewer tokens to write"
        )
