"""Continue contexts by what a model writes, greedily and with its cache; what comes out is read like any other text."""

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
    """Continue every context by `count` tokens that the model writes: the most probable each time, with its cache.

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
    check_writes(model, corpus.contexts.shape[1], count)
    if corpus.lengths is not None:
        raise UsageError("contexts of several lengths are not continued: leave out --no-pack")
    model.check_tokens(corpus.contexts)
    length = corpus.contexts.shape[1]
    batch = batch or max(1, 4096 // (length + count))
    rows: list[Tensor] = []
    show_progress(0, len(corpus.contexts))
    for part in corpus.contexts.split(batch):
        rows += _written(model, part, count, verify=not rows)
        show_progress(len(rows), len(corpus.contexts))
    selection = corpus.selection | {"written_from": length}
    return replace(corpus, contexts=torch.stack(rows), selection=selection, text_bytes=None)


def check_writes(model: OpenModel, length: int, count: int) -> None:
    """Raise `UsageError` where a model cannot continue contexts of a length by so many tokens."""
    if count < 1:
        raise UsageError(f"{count} tokens to write: give 1 or more")
    if model.source.predict is None or not model.causal:
        raise UsageError(
            f"{model.id} predicts no next token, so it writes none: only decoders with a language-model head do"
        )
    if not model.has_positions(length + count):
        raise UsageError(
            f"{length} tokens and {count} that are written are more than the {model.longest} that {model.id} has "
            "positions for: give a shorter --length, or write fewer"
        )


def _written(
    model: OpenModel, ids: Int[Tensor, "contexts positions"], count: int, verify: bool
) -> Int[Tensor, "contexts more_positions"]:
    root = model.root
    if not (isinstance(root, PreTrainedModel) and root.can_generate()):
        for _ in range(count):  # a module of its own has no cache that is known
            ids = torch.cat([ids, model.logits(ids)[:, -1:].argmax(dim=-1).to(ids)], dim=1)
        return ids
    own: Any = root
    steps: list[Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        steps.append(output.logits[0, -1])

    # A checkpoint may ask for sampling, for penalties of what was said, and for an end.
    plain = GenerationConfig(cache_implementation=own.generation_config.cache_implementation)
    with ExitStack() as undo:
        undo.callback(setattr, own, "generation_config", own.generation_config)
        own.generation_config = plain
        undo.enter_context(removed_on_leaving([own.register_forward_hook(keep)] if verify else []))
        given = ids.to(model.device)
        written: Tensor = own.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=count,
            do_sample=False,
            use_cache=True,
        ).cpu()
    if verify:
        _check_same(model, torch.stack(steps), model.logits(written[:1])[0, ids.shape[1] - 1 : -1])
    return written


def _check_same(model: OpenModel, as_written: Tensor, at_once: Tensor) -> None:
    error = float((as_written - at_once).abs().max() / at_once.abs().max())
    if not error <= max(ROUNDED, 16 * torch.finfo(model.source.dtype).eps):
        raise WorkError(
            f"{model.id} writes by logits that differ by {error:.1e} from those of the finished text read at once "
            "(its positions depend on the length, say): give a shorter text, or fewer tokens to write"
        )
