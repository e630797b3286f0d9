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
from theodolite.measure.position import DIRECTIONS, positional_shape, positions_read
from theodolite.models import OpenModel
from theodolite.passes.corpus_pass import batch_of, check_fit
from theodolite.passes.run import Run, describe_model, describe_pass
from theodolite.passes.survey_pass import MeansPass
from theodolite.system.progress import ShowStage


def read_means(
    model: OpenModel, corpus: Corpus, *, seed: int = 0, show_progress: ShowStage = lambda *_: None
) -> tuple[State, Sample]:
    """Read a text for the state of `Means` of its hidden states, without the special tokens behind it.

    Returns:
        The state, and which tokens it kept. Errors are those of `survey`.
    """
    check_fit(model, corpus)
    reading = MeansPass(model, corpus, seed, batch_of(corpus, None))
    stage = Stage("text", "reading contexts by group", lambda _: reading)
    means = run_stages([stage], show_progress).of("text.means")
    text = slice(corpus.contexts.shape[1] - reading.trailing)
    return means | {name: means[name][:, :, text] for name in ("position_sum", "readers")}, reading.sample


def survey_positions(
    model: OpenModel, corpus: Corpus, *, seed: int = 0, show_progress: ShowStage = lambda *_: None
) -> tuple[Run, State]:
    """Survey the positional basis alone, in memory: ranks, smoothness and principal components of every layer.

    The numbers are those of `survey` on the same contexts; all other columns, tables and arrays are absent.

    Returns:
        The run, and the state of `read_means` that it is of. Errors are those of `survey`.
    """
    means, sample = read_means(model, corpus, seed=seed, show_progress=show_progress)
    columns, directions = positional_shape(means)
    table: dict[str, object] = {"layer": range(model.layers + 1)}
    for name, numbers in columns.items():
        table |= {name: numbers.value.numpy(), f"{name}_se": numbers.error.numpy()}
    mean, basis, _ = decomposed_means(means)
    tokens = means["token"] - mean[:, None] - basis[:, sample.token_position]
    basis = basis[:, : positions_read(means)]
    axes = torch.stack([principal_axes(of_layer[1:])[0] for of_layer in basis]).mT
    run = Run(
        layers=pd.DataFrame(table),
        arrays={f"layers.{name}{WITHOUT}": numbers.without.float() for name, numbers in columns.items()}
        | {
            DIRECTIONS: directions,
            "positional_basis": basis.float(),
            "positional_pca": (basis @ axes).float(),
            "cvec_pca": (tokens @ axes).float(),
        },
        provenance=describe_model(model) | describe_pass(model, corpus, seed, {}),
    )
    return run, means
