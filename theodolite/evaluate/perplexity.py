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

LITERATURE = 2048  # tokens of a window in published perplexities of WikiText-2


@dataclass(eq=False)
class Perplexity:
    """A model's loss on a corpus; its contexts may be windows of a stream.

    Attributes:
        losses: (contexts,) mean loss in nats per token of each context's predicted tokens: all but the first, or those
            that no earlier window had.
        tokens: (contexts,) how many these are.
        batch: contexts per forward pass.
        text_bytes: (contexts,) bytes of text that each context's predicted tokens stand for; None without a text.
        each: (contexts,) what the loss is the mean of: `losses`, or where contexts are of unlike lengths each one's
            part in the mean over all tokens, to first order.
        loss, loss_se: in nats per token, with its standard error over contexts, NaN for one.
        perplexity, perplexity_se: exp(loss), infinite on overflow, and its standard error to first order.
        bits_per_byte, bits_per_byte_se: all nats over all bytes, in bits, by which models with different tokenizers
            compare, and its standard error to first order; NaN where bytes are unknown.
    """

    losses: Float[np.ndarray, " contexts"]
    tokens: Int[np.ndarray, " contexts"]
    batch: int
    text_bytes: Float[np.ndarray, " contexts"] | None = None

    def __post_init__(self) -> None:
        nats, alike = self.losses * self.tokens, (self.tokens == self.tokens[0]).all()
        self.each = self.losses if alike else _parts(nats, self.tokens)
        self.loss, self.loss_se = mean_and_error(self.each)
        self.perplexity = perplexity_of(self.loss)
        self.perplexity_se = self.perplexity * self.loss_se
        self.bits_per_byte = self.bits_per_byte_se = math.nan
        if self.text_bytes is not None and self.text_bytes.any():
            bits = _parts(nats / math.log(2), self.text_bytes)
            self.bits_per_byte, self.bits_per_byte_se = mean_and_error(bits)


def _parts(sums: Any, sizes: Any) -> Float[np.ndarray, " contexts"]:
    """Return each context's part in a ratio of sums, to first order: their mean is the ratio."""
    ratio = sums.sum() / sizes.sum()
    return ratio + (sums - ratio * sizes) / sizes.mean()


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
    """Compute loss and perplexity on a corpus; tokens have equal weight.

    The first token of a context is not predicted, nor are special tokens that the tokenizer puts around every context.

    With a stride, the corpus is one stream of tokens (`make_stream`), read in windows of `length` tokens that begin
    `stride` tokens apart; of each window only the tokens count that no earlier one had. Each window begins as the
    tokenizer begins a text: where that is with a special token, it takes the place of the window's first one. The
    perplexities of GPTQ, SparseGPT and Wanda are at stride = length of windows as they stand in the stream
    (`as_published`), without the shorter one at the end.

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
        ids = torch.cat([part.begin.expand(len(part.ids), -1), part.ids[:, len(part.begin) :]], dim=1)
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
    model: OpenModel, corpus: Corpus, stride: int, length: int | None, as_published: bool, batch: int | None
) -> tuple[list[_Batch], int]:
    """Cut a stream into batches of windows; return these, and how many windows a forward pass reads."""
    window = window_length(model, length)
    check_whole(stride=stride, length=window)
    check_length(window)
    if len(corpus.contexts) != 1 or corpus.images is not None:
        raise UsageError("strided windows are of one stream: give a corpus of one context (make_stream)")
    stream = corpus.contexts[0]
    if not 1 <= stride <= window:
        raise UsageError(f"a stride of {stride} leaves tokens out: give 1 to {window}, a window's length")
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
        return [of[None, :window], *whole.split(batch)[: len(whole)], *([left[None]] if more else [])]

    windows = cut(stream)
    sizes = [None] * len(windows) if corpus.text_bytes is None else cut(corpus.text_bytes[0])
    parts = [_Batch(of, size, known, of.shape[1], begin) for of, size in zip(windows, sizes, strict=True)]
    return [replace(parts[0], known=max(len(begin), before, 1)), *parts[1:]], batch


def perplexity_scores(name: str, corpus: Corpus, measured: Perplexity, windows: str = "") -> list[Score]:
    """Score loss, perplexity and bits per byte of the model `name`; `windows` says how a stream was read."""
    task, count = f"{corpus.name}{windows}", len(measured.losses)
    shared = (count, measured.batch, corpus.sha256 + windows)
    scores = [
        Score(name, task, 0, "loss", measured.loss, measured.loss_se, *shared, measured.each),
        Score(name, task, 0, "perplexity", measured.perplexity, measured.perplexity_se, *shared),
    ]
    if not math.isnan(bits := measured.bits_per_byte):
        scores.append(Score(name, task, 0, "bits per byte", bits, measured.bits_per_byte_se, *shared))
    return scores


def check_predicts(model: OpenModel) -> None:
    """Raise `UsageError` where a model does not predict each token from those before it."""
    if model.source.predict is None:
        raise UsageError(
            f"{model.id} predicts no tokens: evaluate a decoder with a language-model head (encoder-decoders are not)"
        )
    if not model.causal:
        raise UsageError(f"{model.id} sees later tokens too: only causal models are evaluated")
