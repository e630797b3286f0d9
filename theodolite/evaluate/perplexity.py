"""Perplexity of a model on a corpus, in one pass over the same contexts as a survey."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError, WorkError
from theodolite.evaluate.scores import Score, mean_and_error
from theodolite.models import OpenModel
from theodolite.models.guard import measures
from theodolite.models.token_texts import token_bytes
from theodolite.passes.corpus_pass import batch_of, check_fit, next_token_losses
from theodolite.system.progress import ShowProgress

LARGEST_LOSS = math.log(sys.float_info.max)
"""Largest loss whose exponential is finite."""


@dataclass(frozen=True, eq=False)
class Perplexity:
    """How well a model predicts a corpus.

    Attributes:
        losses: (contexts,) mean loss in nats per token of each context's predicted tokens, all but the first.
        tokens: (contexts,) how many these are.
        each: (contexts,) what the loss is the mean of: `losses`, or where contexts are of unlike lengths each one's
            part in the mean over all tokens, to first order.
        loss, loss_se: that mean with its standard error over contexts.
        perplexity, perplexity_se: exp(loss), and its standard error to first order.
        batch: contexts per forward pass.
        text_bytes: (contexts,) bytes of text that each context's predicted tokens stand for (`token_bytes`); None
            without a tokenizer.
    """

    losses: Float[np.ndarray, " contexts"]
    tokens: Int[np.ndarray, " contexts"]
    batch: int
    text_bytes: Float[np.ndarray, " contexts"] | None = None

    @property
    def each(self) -> Float[np.ndarray, " contexts"]:
        """What the loss is the mean of."""
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
        return math.exp(self.loss) if self.loss < LARGEST_LOSS else math.inf

    @property
    def perplexity_se(self) -> float:
        """exp(loss) · loss_se."""
        return self.perplexity * self.loss_se

    @property
    def bits_per_byte(self) -> float:
        """All nats over all bytes, in bits: by it models with different tokenizers compare; NaN if unknown."""
        return self._bits_per_byte()[0]

    @property
    def bits_per_byte_se(self) -> float:
        """Its standard error over contexts, of a ratio of sums to first order; NaN for a single one."""
        return self._bits_per_byte()[1]

    def _bits_per_byte(self) -> tuple[float, float]:
        if self.text_bytes is None or not self.text_bytes.any():
            return math.nan, math.nan
        count = len(self.losses)
        bits = self.losses * self.tokens / math.log(2)
        ratio = float(bits.sum() / self.text_bytes.sum())
        if count == 1:
            return ratio, math.nan
        spread = np.square(bits - ratio * self.text_bytes).sum() * count / (count - 1)
        return ratio, float(np.sqrt(spread) / self.text_bytes.sum())


@measures
def perplexity(
    model: OpenModel,
    corpus: Corpus,
    *,
    batch: int | None = None,
    show_progress: ShowProgress = lambda done, total: None,
) -> Perplexity:
    """Loss and perplexity on a corpus; tokens have equal weight, and the first of a context is not predicted.

    Args:
        model: a causal model with an output head.
        corpus: from a `Corpus` constructor, with the model's own tokenizer.
        batch: contexts per forward pass; None: 4096 tokens' worth.
        show_progress: told (done, total) contexts before each batch and at the end; it may raise to stop.

    Raises:
        UsageError: the corpus does not fit the model, or the model does not predict next tokens.
        WorkError: a loss is not finite.
    """
    check_predicts(model)
    check_fit(model, corpus, least_contexts=1)
    batch, total = batch_of(corpus, batch), len(corpus.contexts)
    losses, tokens, text_bytes = [], [], []
    for part in corpus.batches(batch):
        show_progress(part.start, total)
        ids = corpus.ids(part)
        losses.append(next_token_losses(model.logits(ids), ids).mean(dim=1))
        tokens += [ids.shape[1] - 1] * len(ids)
        text_bytes.append(_text_bytes(model, ids))
    show_progress(total, total)
    all_losses = torch.cat(losses).numpy()
    if not np.isfinite(all_losses).all():
        raise WorkError(f"the loss of {model.id} is NaN or infinite: try --dtype float32")
    known = None if model.tokenizer is None else torch.cat(text_bytes).numpy()
    return Perplexity(all_losses, np.array(tokens), batch, known)


def _text_bytes(model: OpenModel, ids: Int[Tensor, "contexts length"]) -> Float[Tensor, " contexts"]:
    if model.tokenizer is None:
        return torch.zeros(len(ids))
    tokens, places = ids[:, 1:].unique(return_inverse=True)
    size = token_bytes(model)
    sizes = torch.tensor([size(token) for token in tokens.tolist()], dtype=torch.float64)
    return sizes[places].sum(dim=1)


def perplexity_scores(name: str, corpus: Corpus, measured: Perplexity) -> list[Score]:
    """Loss, perplexity and, with a tokenizer, bits per byte of the model `name` as scores."""
    task, count = corpus.name, len(measured.losses)
    shared = (count, measured.batch, corpus.sha256)
    scores = [
        Score(name, task, 0, "loss", measured.loss, measured.loss_se, *shared, measured.each),
        Score(name, task, 0, "perplexity", measured.perplexity, measured.perplexity_se, *shared),
    ]
    bits, error = measured.bits_per_byte, measured.bits_per_byte_se
    return (
        scores if math.isnan(bits) else [*scores, Score(name, task, 0, "bits per byte", bits, error, *shared)]
    )


def check_predicts(model: OpenModel) -> None:
    """Refuse a model that does not predict each token from those before it.

    Raises:
        UsageError: why.
    """
    if model.source.predict is None:
        raise UsageError(
            f"{model.id} predicts no tokens: evaluate a decoder with a language-model head (encoder-decoders are not)"
        )
    if not model.causal:
        raise UsageError(f"{model.id} sees later tokens too: only causal models are evaluated")
