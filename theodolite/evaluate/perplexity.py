"""Perplexity of a model on a corpus: on the same contexts as a survey, or on a stream of tokens by strided windows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from theodolite.corpus.corpus import Corpus
from theodolite.corpus.sampling import check_length
from theodolite.corpus.special_tokens import frame_of, special_ends
from theodolite.errors import UsageError, WorkError
from theodolite.evaluate.scores import Score, mean_and_error
from theodolite.jobs.job import Rows
from theodolite.models import OpenModel
from theodolite.models.guard import measures
from theodolite.passes.corpus_pass import batch_of, check_fit, next_token_losses, perplexity_of
from theodolite.system.choices import check_whole, wider_than
from theodolite.system.progress import ShowProgress


@dataclass(frozen=True, eq=False)
class Perplexity:
    """A model's loss on a corpus; its contexts may be windows of a stream.

    Attributes:
        losses: (contexts,) mean loss in nats per token of each context's predicted tokens: all but the first, or those
            that no earlier window had.
        tokens: (contexts,) how many these are.
        each: (contexts,) what the loss is the mean of: `losses`, or where contexts are of unlike lengths each one's
            part in the mean over all tokens, to first order.
        loss, loss_se: that mean with its standard error over contexts.
        perplexity, perplexity_se: exp(loss), and its standard error to first order.
        batch: contexts per forward pass.
        text_bytes: (contexts,) bytes of text that each context's predicted tokens stand for; None of token ids that no
            text was read for.
    """

    losses: Float[np.ndarray, " contexts"]
    tokens: Int[np.ndarray, " contexts"]
    batch: int
    text_bytes: Float[np.ndarray, " contexts"] | None = None

    @property
    def each(self) -> Float[np.ndarray, " contexts"]:
        """The values, one per context, whose mean the loss is."""
        if (self.tokens == self.tokens[0]).all():
            return self.losses
        loss = float(self.losses @ self.tokens / self.tokens.sum())
        return loss + (self.losses - loss) * self.tokens / self.tokens.mean()

    @property
    def loss(self) -> float:
        """Mean loss in nats per token."""
        return mean_and_error(self.each)[0]

    @property
    def loss_se(self) -> float:
        """Standard error of the loss over contexts; NaN for a single one."""
        return mean_and_error(self.each)[1]

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite on overflow."""
        return perplexity_of(self.loss)

    @property
    def perplexity_se(self) -> float:
        """exp(loss) · loss_se."""
        return self.perplexity * self.loss_se

    @property
    def bits_per_byte(self) -> float:
        """All nats over all bytes, in bits: by it models with different tokenizers compare; NaN if unknown."""
        if self.text_bytes is None or not self.text_bytes.any():
            return math.nan
        return float((self.losses * self.tokens / math.log(2)).sum() / self.text_bytes.sum())

    @property
    def bits_per_byte_se(self) -> float:
        """The standard error of bits per byte over contexts, of a ratio of sums to first order; NaN for one."""
        ratio, count = self.bits_per_byte, len(self.losses)
        if self.text_bytes is None or math.isnan(ratio) or count == 1:
            return math.nan
        apart = self.losses * self.tokens / math.log(2) - ratio * self.text_bytes
        return float(np.sqrt(np.square(apart).sum() * count / (count - 1)) / self.text_bytes.sum())


LITERATURE = 2048
"""Tokens of a window in published perplexities of WikiText-2, where the model has positions for them."""


@measures("model")
def perplexity(
    model: OpenModel,
    corpus: Corpus,
    *,
    stride: int | None = None,
    length: int | None = None,
    as_published: bool = False,
    batch: int | None = None,
    show_progress: ShowProgress = lambda done, total: None,
) -> Perplexity:
    """Compute loss and perplexity on a corpus; tokens have equal weight, and the first of a context is not predicted.

    Nor are special tokens that the tokenizer puts around every context.

    With a stride, the corpus is one stream of tokens (`make_stream`), read in windows of `length` tokens that begin
    `stride` tokens apart; of each window only the tokens count that no earlier one had, so that a token is predicted
    from length − stride others at least, after the first window. At stride = length windows do not overlap, and the
    first token of each is not predicted. Each window begins as the tokenizer begins a text: where that is with a
    special token, it takes the place of the window's first one. The perplexities of GPTQ, SparseGPT and Wanda are at
    stride = length of windows as they stand in the stream (`as_published`), without the shorter one at the end.

    Args:
        model: a causal model with an output head.
        corpus: from a `Corpus` constructor, with the model's own tokenizer.
        stride: tokens from the beginning of a window to that of the next; None: the contexts are read as they are.
        length: tokens of a window; None: 2,048, or as many as the model has positions for.
        as_published: leave windows as they are, so that only the stream's own beginning is a text's.
        batch: contexts or windows per forward pass; None: 4096 tokens' worth.
        show_progress: told (done, total) contexts before each batch and at the end; it may raise to stop.

    Raises:
        UsageError: the corpus does not fit the model, the model does not predict next tokens, or there are no such
            windows.
        WorkError: a loss is not finite.
    """
    rows = loss_rows(model, corpus, stride=stride, length=length, as_published=as_published, batch=batch)
    return perplexity_in(rows.read_all(show_progress), rows.notes)


@dataclass(frozen=True)
class _Batch:
    """Contexts or windows that one pass reads, which `begin` alike; the tokens `known … end − 1` of each count."""

    ids: Int[Tensor, "contexts length"]
    sizes: Tensor | None
    known: int
    end: int
    begin: Int[Tensor, " special"]

    @property
    def read(self) -> Int[Tensor, "contexts length"]:
        """The tokens as the model reads them."""
        return torch.cat([self.begin.expand(len(self.ids), -1), self.ids[:, len(self.begin) :]], dim=1)


def loss_rows(
    model: OpenModel,
    corpus: Corpus,
    *,
    stride: int | None,
    length: int | None,
    as_published: bool = False,
    batch: int | None,
) -> Rows[_Batch]:
    """Return the steps of `perplexity`, a context or window each; arguments and errors are its own."""
    check_predicts(model)
    if stride is None:
        if length is not None or as_published:
            raise UsageError("length and as_published are of strided windows: give a stride, too")
        check_fit(model, corpus, least_contexts=1, text_alone="perplexity")
        batch = batch_of(corpus, batch)
        parts = list(_contexts(model, corpus, batch))
    else:
        parts, batch = _windows(model, corpus, stride, length, as_published, batch)

    def read(part: _Batch) -> dict[str, Tensor]:
        ids = part.read
        losses = next_token_losses(model.logits(ids), ids)[:, part.known - 1 : part.end - 1].mean(dim=1)
        if not losses.isfinite().all():
            raise WorkError(f"the loss of {model.id} is NaN or infinite: {wider_than(model.source.dtype)}")
        columns = {"losses": losses, "tokens": torch.full((len(ids),), part.end - part.known)}
        if part.sizes is not None:
            columns["text_bytes"] = part.sizes[:, part.known : part.end].sum(dim=1, dtype=torch.float64)
        return columns

    rows = Rows(parts, read, lambda part: len(part.ids))
    rows.notes["batch"] = batch
    return rows


def perplexity_in(state: dict[str, Tensor], notes: dict[str, Any]) -> Perplexity:
    """Return what finished `loss_rows` have measured."""
    return Perplexity(**{name: values.numpy() for name, values in state.items()}, batch=notes["batch"])


def window_length(model: OpenModel, length: int | None) -> int:
    """Return the tokens of a strided window: `length`, or if None 2,048, or as many as the model has positions for."""
    return min(LITERATURE, model.longest or LITERATURE) if length is None else length


def _contexts(model: OpenModel, corpus: Corpus, batch: int) -> Iterator[_Batch]:
    before, after = special_ends(model.tokenizer, corpus.contexts, corpus.lengths)
    for rows in corpus.batches(batch):
        ids = corpus.ids(rows)
        end = ids.shape[1]
        sizes = None if corpus.text_bytes is None else corpus.text_bytes[rows, :end]
        yield _Batch(ids, sizes, max(before, 1), end - after, ids[0, :0])


def _windows(
    model: OpenModel,
    corpus: Corpus,
    stride: int,
    length: int | None,
    as_published: bool,
    batch: int | None,
) -> tuple[list[_Batch], int]:
    """Cut a stream into batches of windows; return these, and how many windows a forward pass reads."""
    window = window_length(model, length)
    check_whole(stride=stride, length=window)
    check_length(window)
    if not isinstance(corpus, Corpus) or len(corpus.contexts) != 1 or corpus.images is not None:
        raise UsageError(
            "strided windows are of one stream of tokens: give a corpus of one context (make_stream)"
        )
    stream = corpus.contexts[0]
    if not 1 <= stride <= window:
        raise UsageError(
            f"a stride of {stride} leaves tokens out: give 1 to {window}, the length of a window"
        )
    first = stream[:window].unsqueeze(0)
    first_window = Corpus.from_ids(first)
    check_fit(model, first_window, least_contexts=1)
    model.check_tokens(stream)
    batch = batch_of(first_window, batch)
    tokenizer: Any = model.tokenizer
    special = [] if as_published or tokenizer is None else frame_of(tokenizer, window).before
    begin = torch.tensor(special, dtype=stream.dtype, device="cpu")
    before, _ = special_ends(tokenizer, first)
    known = max(window - stride, len(begin), 1)

    def cut(of: Int[Tensor, " tokens"]) -> list[Int[Tensor, "windows length"]]:
        """Cut the first window, all whole ones, and what is left: a window of its own, that ends with the text."""
        whole = of.unfold(0, window, stride)[1:] if len(of) > window else of.new_zeros(0, window)
        left = of[(len(whole) + 1) * stride :]
        more = len(whole) * stride + window < len(of) and len(left) > known
        return [
            of[:window].unsqueeze(0),
            *whole.split(batch)[: len(whole)],
            *([left.unsqueeze(0)] if more else []),
        ]

    windows = cut(stream)
    sizes = [None] * len(windows) if corpus.text_bytes is None else cut(corpus.text_bytes[0])
    opening, *later = (
        _Batch(of, size, known, of.shape[1], begin) for of, size in zip(windows, sizes, strict=True)
    )
    return [replace(opening, known=max(len(begin), before, 1)), *later], batch


def perplexity_scores(name: str, corpus: Corpus, measured: Perplexity, windows: str = "") -> list[Score]:
    """Score loss, perplexity and, where a text was read, bits per byte of the model `name`.

    `windows` says how a stream was read; scores are comparable where it is equal.
    """
    task, count = f"{corpus.name}{windows}", len(measured.losses)
    shared = (count, measured.batch, corpus.sha256 + windows)
    scores = [
        Score(name, task, 0, "loss", measured.loss, measured.loss_se, *shared, measured.each),
        Score(name, task, 0, "perplexity", measured.perplexity, measured.perplexity_se, *shared),
    ]
    bits, error = measured.bits_per_byte, measured.bits_per_byte_se
    return (
        scores if math.isnan(bits) else [*scores, Score(name, task, 0, "bits per byte", bits, error, *shared)]
    )


def check_predicts(model: OpenModel) -> None:
    """Raise `UsageError` where a model does not predict each token from those before it."""
    if model.source.predict is None:
        raise UsageError(
            f"{model.id} predicts no tokens: evaluate a decoder with a language-model head (encoder-decoders are not)"
        )
    if not model.causal:
        raise UsageError(f"{model.id} sees later tokens too: only causal models are evaluated")
