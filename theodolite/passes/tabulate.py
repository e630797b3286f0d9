"""Make a `Run` of the states of a survey's passes: all tables and arrays. No model is seen here, no column known.

The declared functions of `measure` are run as soon as there is something by the name of each of their parameters. What
a state is missing (a survey of heads alone, spectra from weights alone) leaves its columns and tables out.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from theodolite.accumulate.means import Sample
from theodolite.accumulate.sums import State
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError, WorkError
from theodolite.jobs.job import States
from theodolite.measure.column import EXTRA_COLUMNS, OPEN_TABLES, WITHOUT, declared, measurements
from theodolite.measure.extra import Extra
from theodolite.measure.heads import head_rows, heads_that_are
from theodolite.passes.run import Run
from theodolite.system.mapped import forget
from theodolite.theory.unbiased import Jackknifed


def tabulate(
    states: States,
    provenance: dict[str, Any],
    corpus: Corpus | None = None,
    extra: Sequence[Extra] = (),
    **facts: Any,
) -> Run:
    """Make all tables and arrays of a survey from what its stages have left; without a corpus nothing was read.

    `extra`: its added accumulators. Of a whole survey `facts` are `text` of a token id, `sample`, what vectors were
    kept, and `examples`, the ids of the contexts that are shown.
    """
    inputs = facts | _inputs(states, provenance, corpus, **facts)
    columns: dict[str, dict[str, Any]] = {"layers": {}, "heads": {}}
    tables: dict[str, pd.DataFrame] = {}
    arrays: dict[str, Tensor] = {}
    rows = head_rows(inputs["heads_of"])
    for measurement in measurements():
        parameters = inspect.signature(measurement.function).parameters.values()
        if any(need.name not in inputs and need.default is need.empty for need in parameters):
            continue
        forget()
        given = {need.name: inputs[need.name] for need in parameters if need.name in inputs}
        results = measurement.function(**given)
        if isinstance(results, tuple):
            results, of_rows = results
            arrays |= of_rows
        if isinstance(results, pd.DataFrame):
            tables[measurement.columns[0].table] = results
            continue
        table_of = {name: column.table for column in measurement.columns for name in column.columns}
        for name, values in results.items():
            if isinstance(values, Jackknifed):
                columns[table_of[name]][name] = values.value.tolist()
                if f"{name}_se" in table_of:
                    columns[table_of[name]][f"{name}_se"] = values.error.tolist()
                    arrays[f"{table_of[name]}.{name}{WITHOUT}"] = values.without.float()
            elif name in table_of:
                columns[table_of[name]][name] = values
            else:
                arrays[name] = values
    for table, values in added_columns(states, extra).items():
        columns[table] |= values
    tables["layers"] = pd.DataFrame(_in_order("layers", columns))
    tables["heads"] = heads_that_are(_in_order("heads", columns), inputs["heads_of"])
    arrays |= {name: of[:, rows] for name, of in arrays.items() if name.startswith("heads.")}
    added: dict[str, Any] = {}
    if corpus is not None:
        added["wall_seconds"] = states.seconds
    if "refused" in inputs:
        refused = states.notes["patterns"]["refused"] | inputs["refused"]
        added["constituents_refused"] = {layer: refused[layer] for layer in sorted(refused, key=int)}
    if extra:
        added[EXTRA_COLUMNS] = [column.to_json() for one in extra for column in one.declared]
    return Run(**tables, arrays=arrays, provenance=provenance | added)


def _in_order(table: str, columns: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the columns of a table in the order of their declarations."""
    order = [name for column in declared(table).values() for name in column.columns]
    return {name: columns[table][name] for name in order if name in columns[table]} | columns[table]


def _inputs(
    states: States,
    provenance: dict[str, Any],
    corpus: Corpus | None,
    sample: Sample | None = None,
    examples: Tensor | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Return what declared functions find by the names of their parameters."""
    notes = states.notes["weights"]
    inputs: dict[str, Any] = {
        "weights": states.of("weights"),
        "spectrum_of": notes["spectrum_of"],
        "scalings": notes["scaling"],
        "heads_of": notes["heads"],
    }
    if patterns := states.of("patterns"):
        inputs |= {"patterns": patterns} | ({"attribution": patterns} if "numbers" in patterns else {})
    if corpus is None:
        return inputs
    trailing = provenance["corpus"]["trailing_special_tokens"]
    inputs |= {
        "attention": states.of("corpus.attention"),
        "means": means_of_text(states, trailing),
        "whole_means": states.of("corpus.means"),
        "length": corpus.contexts.shape[1],
        "trailing": trailing,
        "leading": corpus.leading,
        "grid": None if corpus.grid is None else corpus.grid.shape,
    }
    if sample is None:
        return inputs
    for moments in ("residual", "inputs"):
        for layer, moment in enumerate(states.of(f"corpus.{moments}").get("moment", ())):
            refuse_overflow(layer, moment)
    labels = corpus.labels
    if len(labels[labels >= 0].unique()) < 2:  # the name of the only file, say: it tells nothing apart
        labels = torch.full_like(labels, -1)
    if corpus.images is not None and examples is not None:
        pixels = corpus.images.pixels(slice(0, len(examples)))
        inputs["pictures"] = corpus.images.reader.shown(pixels)
    of_text = "residual", "sketches", "outliers", "massive", "query_keys"
    return inputs | {
        **{name: states.of(f"corpus.{name}") for name in of_text},
        "gram_norm": inputs["attention"]["gram_norm"],
        "labels": labels[sample.kept],
        "shares": states.of("shares"),
        "refused": states.notes["shares"]["refused"],
    }


def added_columns(states: States, extra: Sequence[Extra]) -> dict[str, dict[str, Sequence[float]]]:
    """Compute the columns of the caller's accumulators, once the text is read: table → column → values.

    Raises:
        UsageError: a column is not declared, or does not have a value for each row.
    """
    tables: dict[str, dict[str, Sequence[float]]] = {table: {} for table in OPEN_TABLES}
    if not extra or not states.of("corpus.residual"):
        return tables
    layers, heads = states.of("corpus.attention")["entropy"].shape[:2]
    rows = {"layers": layers + 1, "heads": layers * heads}
    for one in extra:
        table_of = {name: column.table for column in one.declared for name in column.columns}
        for name, values in one.columns(states.of(f"corpus.extra.{one.name}")).items():
            if name not in table_of:
                raise UsageError(f"{one.name} gives {name!r}, which it does not declare")
            table = table_of[name]
            if len(values) != rows[table]:
                raise UsageError(f"{one.name}: {len(values)} values of {name!r} for {rows[table]} {table}")
            tables[table][name] = values
    return tables


def means_of_text(states: States, trailing: int) -> State:
    """Return the state of `Means` of the text that was read, without the special tokens behind it."""
    means = states.of("corpus.means")
    text = slice(means["readers"].shape[2] - trailing)
    return means | {name: means[name][:, :, text] for name in ("position_sum", "readers")}


def refuse_overflow(layer: int, moment: Tensor) -> None:
    """Raise `WorkError` where a layer's second moments are no numbers."""
    if not moment.isfinite().all():
        raise WorkError(f"the squares of layer {layer}'s vectors overflow: try --dtype float64")
