"""What a model loses when its cache keeps few tokens, by which tokens it keeps.

Every policy reads the same contexts, so that policies are compared by paired differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError, WorkError
from theodolite.evaluate.perplexity import Perplexity, check_predicts
from theodolite.evaluate.scores import mean_and_error
from theodolite.models import OpenModel, TracedCache
from theodolite.models.guard import measures
from theodolite.passes.corpus_pass import batch_of, check_fit, next_token_losses
from theodolite.sinks.exclusions import Exclusions
from theodolite.system.choices import wider_than
from theodolite.system.progress import ShowProgress

SIZES = (8, 16, 32, 64, 128)
FULL, WINDOW, FIRST, FIRST_FOUR, TRACED = (
    "full",
    "window",
    "window + first token",
    "window + first four",
    "window + traced sinks",
)
"""`FIRST_FOUR` keeps what Xiao et al. 2024 (StreamingLLM) keep, and is what the others are compared with."""

_Pair = tuple[Perplexity, Float[np.ndarray, " contexts"]]
Making = Callable[[OpenModel], TracedCache]


@measures
def cache_policies(
    model: OpenModel,
    corpus: Corpus,
    exclusions: Exclusions,
    sizes: Sequence[int] = SIZES,
    *,
    places: int | None = None,
    batch: int | None = None,
    show_progress: ShowProgress = lambda done, total: None,
) -> pd.DataFrame:
    """Perplexity and next-token accuracy by policy and number of kept tokens.

    Each context is read in one pass in which a token attends to what the cache would keep then (`TracedCache`):
    the same logits as token by token. Positions are the true ones.

    Args:
        model: a causal model with an output head that `TracedCache` serves.
        corpus: the text, with the model's own tokenizer. Not the one that the exclusions are from, nor the one that
            `places` were chosen on.
        exclusions: whose rules of sinks name tokens.
        sizes: tokens that a layer keeps at most, 5 or more.
        places: of the traced sinks, as of `TracedCache`.
        batch: contexts a forward pass; None: 4096 tokens' worth.
        show_progress: told (done, total) passes over the corpus; it may raise to stop.

    Returns:
        A row for each policy and size: `policy size loss loss_se perplexity perplexity_se accuracy accuracy_se
        difference difference_se accuracy_difference accuracy_difference_se beyond_first beyond_first_se`. Losses in
        nats per token, accuracy the share of tokens that were the most likely one; `difference` is of the loss, less
        that of `window + first four` of the same size (NaN for `full`), `beyond_first`, of traced sinks alone, less
        that of `window + first token`. Errors are standard errors over contexts, of differences paired ones.

    Raises:
        UsageError: the model predicts no tokens or cannot have such a cache, the corpus does not fit, or a size is
            below 5.
        WorkError: a loss is not finite.
    """
    check_predicts(model)
    check_fit(model, corpus)
    if not sizes or min(sizes) < 5:
        raise UsageError(
            f"caches of {tuple(sizes)} tokens: give sizes of 5 or more, for four first tokens and one"
        )
    asked = [
        (size, policy) for size in dict.fromkeys(sizes) for policy in (WINDOW, FIRST, FIRST_FOUR, TRACED)
    ]
    batch, length = batch_of(corpus, batch), corpus.contexts.shape[1]
    passes = [(length, FULL), *asked]
    measured = {}
    for done, (size, policy) in enumerate(passes):
        show_progress(done, len(passes))
        measured[size, policy] = losses_with(
            model, corpus, _cache_of(policy, size, exclusions, places), batch
        )
    show_progress(len(passes), len(passes))
    return pd.DataFrame([_row(size, policy, measured) for size, policy in passes])


def _cache_of(policy: str, size: int, exclusions: Exclusions, places: int | None) -> Making:
    first = {FIRST: 1, FIRST_FOUR: 4}.get(policy, 0)
    if policy == TRACED:
        return lambda model: TracedCache(model, exclusions.tokens, size, places=places)
    return lambda model: TracedCache(model, None, size, places=first, first=first)


@measures
def losses_with(
    model: OpenModel, corpus: Corpus, making: Making, batch: int
) -> tuple[Perplexity, Float[np.ndarray, " contexts"]]:
    """Losses where a token attends to what a cache keeps, and what the share of tokens hit is the mean of, by context.

    Args:
        model, corpus: as of `cache_policies`.
        making: makes the cache of a forward pass. batch: contexts of one.

    Raises:
        WorkError: a loss is not finite.
    """
    losses, hits, tokens = [], [], []
    for part in corpus.batches(batch):
        ids = corpus.ids(part)
        with torch.no_grad():
            logits: Tensor = model.hf(input_ids=ids.to(model.device), past_key_values=making(model)).logits
        losses.append(next_token_losses(logits, ids).mean(dim=1))
        hits.append((logits[:, :-1].argmax(dim=-1).cpu() == ids[:, 1:]).double().mean(dim=1))
        tokens += [ids.shape[1] - 1] * len(ids)
    found = torch.cat(losses).numpy()
    if not np.isfinite(found).all():
        raise WorkError(f"the loss of {model.id} is NaN or infinite: {wider_than(model.source.dtype)}")
    counts = np.array(tokens)
    return Perplexity(found, counts, batch), Perplexity(torch.cat(hits).numpy(), counts, batch).each


def _row(size: int, policy: str, measured: dict[tuple[int, str], _Pair]) -> dict[str, object]:
    losses, hits = measured[size, policy]
    accuracy, accuracy_se = mean_and_error(hits)
    row: dict[str, object] = {
        "policy": policy,
        "size": size,
        "loss": losses.loss,
        "loss_se": losses.loss_se,
        "perplexity": losses.perplexity,
        "perplexity_se": losses.perplexity_se,
        "accuracy": accuracy,
        "accuracy_se": accuracy_se,
    }
    rest = ("difference", "difference_se", "accuracy_difference", "accuracy_difference_se")
    row |= dict.fromkeys((*rest, "beyond_first", "beyond_first_se"), math.nan)
    if policy not in (FULL, FIRST_FOUR):
        other, other_hits = measured[size, FIRST_FOUR]
        row["difference"], row["difference_se"] = mean_and_error(losses.each - other.each)
        row["accuracy_difference"], row["accuracy_difference_se"] = mean_and_error(hits - other_hits)
    if policy == TRACED:
        first = measured[size, FIRST][0].each
        row["beyond_first"], row["beyond_first_se"] = mean_and_error(losses.each - first)
    return row
