"""A survey of what the page needs and no more: means by position, covariances, attention. A third of a whole one.

Its numbers are those of `theodolite survey` on the same contexts; tables of layers, sinks and shares are left out.
"""

from __future__ import annotations

import functools
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from theodolite.accumulate.means import Means, Sample, decomposed_means
from theodolite.accumulate.sums import LayerSums
from theodolite.corpus.corpus import Corpus
from theodolite.logits.attribution import PATTERNS, pattern_scores_of
from theodolite.measure.heads import head_arrays, head_columns
from theodolite.models import OpenModel
from theodolite.passes.corpus_pass import (
    ShowProgress,
    batch_of,
    check_fit,
    fingerprint_of,
    read_into_run,
    refuse_bad_numbers,
)
from theodolite.passes.provenance import describe_model, describe_pass
from theodolite.passes.run import Run
from theodolite.passes.survey_pass import AttentionPass
from theodolite.passes.tabulate import heads_table, localize


class _BriefPass(AttentionPass):
    """The accumulators of a survey that heads need."""

    def __init__(self, model: OpenModel, corpus: Corpus, seed: int) -> None:
        super().__init__(model, corpus, seed, examples=0)
        contexts, length = corpus.contexts.shape
        none = torch.empty(0, dtype=torch.int64)
        keeps_no_vectors = Sample(torch.full((contexts,), -1), none, none)
        self.means = Means(model.layers + 1, length, model.width, keeps_no_vectors)

    @property
    def accumulators(self) -> dict[str, LayerSums]:
        """The accumulators by name."""
        return {"means": self.means, "inputs": self.inputs, "attention": self.attention_statistics}

    def stream(self, layer: int, hidden: Tensor) -> None:
        """Take in the residual stream of one layer."""
        refuse_bad_numbers(layer, hidden)
        self.means.update(layer, hidden, self._first)


def brief_survey(
    model: OpenModel,
    corpus: Corpus,
    *,
    seed: int = 0,
    show_progress: ShowProgress = lambda done, total: None,
    show_layers: ShowProgress = lambda done, total: None,
) -> Run:
    """Survey a model's heads on a corpus, in memory.

    Args:
        model: from `open_model`.
        corpus: with the model's own tokenizer.
        seed: of the random sequences for induction.
        show_progress: told (done, total) contexts; it may raise to stop.
        show_layers: likewise told of layers whose weights were read, after the text.

    Raises:
        UsageError: the corpus does not fit the model.
        WorkError: hidden states became NaN or infinite.
    """
    check_fit(model, corpus)
    return read_into_run(
        functools.partial(_BriefPass, model, corpus, seed),
        functools.partial(_result, show_layers),
        None,
        batch=batch_of(corpus, None),
        fingerprint={**fingerprint_of(model), "corpus": corpus.sha256, "brief": True},
        checkpoint_seconds=0,
        show_progress=show_progress,
    )


def _result(show_layers: ShowProgress, done: _BriefPass, fingerprint: dict[str, Any], seconds: float) -> Run:
    model, corpus, length = done.model, done.corpus, done.corpus.contexts.shape[1]
    mean, pos, _ = decomposed_means(done.means.state())
    attention = done.attention_statistics.state()
    localization, projections = localize(model, done.inputs.state(), length, show_layers)
    scores = pattern_scores_of(model, length, done.seed)
    columns = head_columns(attention)
    columns["induction"] = scores[:, PATTERNS.index("induction")].flatten().tolist()
    arrays = {"mean": mean, "positional_basis": pos.float()}
    empty = pd.DataFrame()
    return Run(
        layers=empty,
        heads=heads_table(model, localization, projections, columns),
        sinks=empty,
        outliers=empty,
        examples=empty,
        arrays=arrays | localization.stacked() | head_arrays(attention),
        provenance=describe_model(model) | describe_pass(model, corpus, done.seed, fingerprint, seconds),
    )
