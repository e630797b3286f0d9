"""What a survey says of positions alone: one pass over hidden states."""

from __future__ import annotations

import pandas as pd

from theodolite.accumulate.sums import State
from theodolite.corpus.corpus import Corpus
from theodolite.jobs.job import Stage, run_stages
from theodolite.measure.column import WITHOUT
from theodolite.measure.geometry import position_arrays
from theodolite.measure.heads import with_errors
from theodolite.measure.position import DIRECTIONS, positional_shape
from theodolite.models import OpenModel
from theodolite.passes.corpus_pass import batch_of, check_fit
from theodolite.passes.run import Run, describe_model, describe_pass
from theodolite.passes.survey_pass import MeansPass
from theodolite.passes.tabulate import means_of_text
from theodolite.system.progress import ShowStage


def survey_positions(
    model: OpenModel, corpus: Corpus, *, seed: int = 0, show_progress: ShowStage = lambda *_: None
) -> tuple[Run, State]:
    """Survey the positional basis alone, in memory: ranks, smoothness and principal components of every layer.

    The numbers are those of `survey` on the same contexts; all other columns, tables and arrays are absent. Returned
    with the state of `Means` that they are of, without special tokens behind the text; errors are those of `survey`.
    """
    check_fit(model, corpus)
    reading = MeansPass(model, corpus, seed, batch_of(corpus, None))
    stage = Stage("corpus", "reading contexts by group", lambda _: reading)
    means = means_of_text(run_stages([stage], show_progress), reading.trailing)
    columns, directions = positional_shape(means)
    arrays = {f"layers.{name}{WITHOUT}": numbers.without.float() for name, numbers in columns.items()}
    arrays |= position_arrays(means, means, 0, 1, reading.sample)
    run = Run(
        layers=pd.DataFrame({"layer": range(model.layers + 1), **with_errors(columns)}),
        arrays=arrays | {DIRECTIONS: directions},
        provenance=describe_model(model) | describe_pass(model, corpus, seed, {}),
    )
    return run, means
