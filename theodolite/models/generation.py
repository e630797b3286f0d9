"""Continue a corpus by greedy decoding; the result is read like any other corpus."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.models.guard import measures
from theodolite.models.opened import OpenModel
from theodolite.models.source import decode_greedily
from theodolite.system.progress import ShowProgress


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
    tokens are the model's (`written_from`). Attention as the model wrote is that which a pass over the corpus reads:
    the first context's logits are compared.

    Args:
        batch: contexts at a time; None: 4096 tokens' worth.
        show_progress: told (contexts done, contexts in all).

    Raises:
        UsageError: the model predicts no next token, has no positions for so many, or contexts have several lengths.
        WorkError: it writes the first context by other logits than it has of the finished text.
    """
    model.check_writes(corpus.contexts.shape[1], count)
    if not corpus.text_alone:
        raise UsageError("texts with images, or sources beside them, are not continued: give a text alone")
    if corpus.lengths is not None:
        raise UsageError("contexts of several lengths are not continued: give those of one length")
    model.check_tokens(corpus.contexts)
    length = corpus.contexts.shape[1]
    batch = batch or max(1, 4096 // (length + count))
    rows: list[Tensor] = []
    show_progress(0, len(corpus.contexts))
    for part in corpus.contexts.split(batch):
        rows += decode_greedily(model.source, part, count, verify=not rows)
        show_progress(len(rows), len(corpus.contexts))
    selection = corpus.selection | {"written_from": length}
    return replace(corpus, contexts=torch.stack(rows), selection=selection, text_bytes=None)
