"""Continue a corpus by greedy decoding; the result is read like any other corpus."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError, WorkError
from theodolite.models.guard import measures
from theodolite.models.opened import OpenModel
from theodolite.models.source import Source
from theodolite.models.structure import removed_on_leaving
from theodolite.system.progress import ShowProgress

ROUNDED = 1e-3
"""Of the largest logit: cached decoding and a pass over the whole text round differently, in any dtype."""


@measures("model")
def continued(
    model: OpenModel,
    corpus: Corpus,
    count: int,
    batch: int | None = None,
    show_progress: ShowProgress = lambda done, total: None,
) -> Corpus:
    """Continue every context by `count` tokens of greedy decoding with the model's own cache.

    A context is read as one text, not cut where it ends a sequence. `selection` then says from which position on the
    tokens are the model's (`written_from`). The first context's logits as it was written are compared with those of
    the finished text read at once: where they are the same, attention as the model wrote is that which a pass over the
    corpus reads.

    Args:
        model: from `open_model`; causal, with an output head.
        corpus: contexts of one length.
        count: tokens a context.
        batch: contexts at a time; None: 4096 tokens' worth.
        show_progress: told (contexts done, contexts in all).

    Raises:
        UsageError: the model predicts no next token, has no positions for so many, or contexts have several lengths.
        WorkError: it writes by other logits than it has of the finished text.
    """
    model.check_writes(corpus.contexts.shape[1], count)
    if not corpus.text_alone:
        raise UsageError("texts with images, or sources beside them, are not continued: give a text alone")
    if corpus.lengths is not None:
        raise UsageError("contexts of several lengths are not continued: leave out --no-pack")
    model.check_tokens(corpus.contexts)
    length = corpus.contexts.shape[1]
    batch = batch or max(1, 4096 // (length + count))
    rows: list[Tensor] = []
    show_progress(0, len(corpus.contexts))
    for part in corpus.contexts.split(batch):
        rows += _decode_greedily(model.source, part, count, verify=not rows)
        show_progress(len(rows), len(corpus.contexts))
    selection = corpus.selection | {"written_from": length}
    return replace(corpus, contexts=torch.stack(rows), selection=selection, text_bytes=None)


@torch.no_grad()
def _decode_greedily(
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
