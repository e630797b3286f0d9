"""What a survey says of positions alone: one pass over hidden states."""

from __future__ import annotations

import pandas as pd
import torch

from theodolite.accumulate.means import Sample, decomposed_means
from theodolite.accumulate.sums import State
from theodolite.corpus.corpus import Corpus
from theodolite.jobs.job import Stage, run_stages
from theodolite.measure.column import WITHOUT
from theodolite.measure.geometry import principal_axes
from theodolite.measure.heads import with_errors
from theodolite.measure.position import DIRECTIONS, positional_shape, positions_read
from theodolite.models import OpenModel
from theodolite.passes.corpus_pass import batch_of, check_fit
from theodolite.passes.run import Run, describe_model, describe_pass
from theodolite.passes.survey_pass import MeansPass
from theodolite.passes.tabulate import means_of_text
from theodolite.system.progress import ShowStage


def read_means(
    model: OpenModel, corpus: Corpus, *, seed: int = 0, show_progress: ShowStage = lambda *_: None
) -> tuple[State, Sample]:
    """Read a text for the state of `Means` without the special tokens behind it, and which tokens it kept.

    Errors are those of `survey`.
    """
    check_fit(model, corpus)
    reading = MeansPass(model, corpus, seed, batch_of(corpus, None))
    stage = Stage("corpus", "reading contexts by group", lambda _: reading)
    return means_of_text(run_stages([stage], show_progress), reading.trailing), reading.sample


def survey_positions(
    model: OpenModel, corpus: Corpus, *, seed: int = 0, show_progress: ShowStage = lambda *_: None
) -> tuple[Run, State]:
    """Survey the positional basis alone, in memory: ranks, smoothness and principal components of every layer.

    The numbers are those of `survey` on the same contexts; all other columns, tables and arrays are absent. Returned
    with the state of `read_means` that they are of; errors are those of `survey`.
    """
    means, sample = read_means(model, corpus, seed=seed, show_progress=show_progress)
    columns, directions = positional_shape(means)
    mean, basis, _ = decomposed_means(means)
    tokens = means["token"] - mean[:, None] - basis[:, sample.token_position]
    basis = basis[:, : positions_read(means)]
    axes = torch.stack([principal_axes(of_layer[1:])[0] for of_layer in basis]).mT
    arrays = {f"layers.{name}{WITHOUT}": numbers.without.float() for name, numbers in columns.items()}
    pictures = {"positional_pca": (basis @ axes).float(), "cvec_pca": (tokens @ axes).float()}
    run = Run(
        layers=pd.DataFrame({"layer": range(model.layers + 1), **with_errors(columns)}),
        arrays=arrays | pictures | {DIRECTIONS: directions, "positional_basis": basis.float()},
        provenance=describe_model(model) | describe_pass(model, corpus, seed, {}),
    )
    return run, means
