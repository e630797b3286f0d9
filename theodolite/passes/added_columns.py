"""Accumulators that the caller adds to a survey: what is wrong with them, said as soon as it can be known.

Before the first pass what they are, right after the text what their columns are; the tables take those as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from theodolite.accumulate.extra import Columns, Extra
from theodolite.errors import UsageError
from theodolite.jobs.job import States
from theodolite.measure.geometry import CUTOFFS
from theodolite.measure.head_roles import PATTERN_ROLES
from theodolite.measure.localization import MOMENTS
from theodolite.measure.positional import COLUMNS as POSITIONAL

_LAYERS = (
    *("rank", "stable_rank", "relative_norm", "incoherence_mean", "incoherence_max", "incoherence_random"),
    *("incoherence_max_random", "similarity_within", "similarity_between", "norm", "norm_first"),
    *("cosine_previous", "rank_collapse", "massive_activations", "massive_activations_first"),
    *("outlier_dimensions", "silhouette", "cluster_ari"),
    *(f"{of}low_frequency_{cutoff}" for of in ("", "pp_") for cutoff in CUTOFFS),
)

SURVEY_COLUMNS = {
    "layers": ("layer", *(f"{name}{suffix}" for name in _LAYERS for suffix in ("", "_se"))),
    "heads": (
        *("layer", "head", "spectrum_of", "entropy", "entropy_se", "entropy_bound", "propagation"),
        *("sink_first", "sink_later", "sink_learned"),
        *(f"{role.column}{suffix}" for role in PATTERN_ROLES for suffix in ("", "_se")),
        *(f"{name}{suffix}" for name in (*MOMENTS, "regime", "regime_margin") for suffix in ("", "_data")),
        *(f"share_{part}" for part in ("position", "context", "cross", "constant", "additive")),
        *(f"qk_low_frequency_{cutoff}" for cutoff in CUTOFFS),
        *POSITIONAL,
    ),
}
"""The columns of a survey's own, by table. Some come of the last pass, but what takes their names is refused before."""

END_TOKEN_COLUMNS = {
    "layers": tuple(
        f"{name}{suffix}" for name in ("norm_last", "massive_activations_last") for suffix in ("", "_se")
    ),
    "heads": ("sink_last",),
}
"""And those that a survey has where the tokenizer puts special tokens behind every text."""


def check_extra(extra: Sequence[Extra]) -> None:
    """Raise `UsageError` where one cannot be summed, told apart by name, or tabulated."""
    for number, accumulator in enumerate(extra):
        kind = type(accumulator).__name__
        if not isinstance(accumulator, Extra):
            raise UsageError(
                f"extra: {kind} is no accumulator: derive its class from Extra, and give an instance"
            )
        if type(accumulator).columns is Extra.columns:
            raise UsageError(f"extra: {kind} has no columns: give its class the method `columns`")
        name = getattr(accumulator, "name", "")
        if not name:
            raise UsageError(f"extra: {kind} has no name: give its class one")
        if name in [other.name for other in extra[:number]]:
            raise UsageError(f"extra: two accumulators are called {name!r}: give each a name of its own")


def added_columns(states: States, extra: Sequence[Extra]) -> dict[str, Columns]:
    """Table → column → values, of all accumulators; from the states of the text, or of all passes.

    Raises:
        UsageError: a column is not one of the tables of layers and heads, has another length or a name that is taken.
    """
    return states.once("added_columns", lambda: _columns(states, extra))


def _columns(states: States, extra: Sequence[Extra]) -> dict[str, Columns]:
    tables: dict[str, Columns] = {"layers": {}, "heads": {}}
    if not extra:
        return tables
    layers, heads = states.of("corpus.attention")["entropy"].shape[:2]
    rows = {"layers": layers + 1, "heads": layers * heads}
    for accumulator in extra:
        columns = accumulator.columns(states.of(f"corpus.extra.{accumulator.name}"))
        for table, added in columns.items():
            if table not in tables:
                raise UsageError(
                    f"{accumulator.name} gives columns of {table!r}: give them of 'layers' or 'heads'"
                )
            for name, values in added.items():
                if name in SURVEY_COLUMNS[table] + END_TOKEN_COLUMNS[table] or name in tables[table]:
                    raise UsageError(
                        f"{accumulator.name}: the table of {table} has a column {name!r} already"
                    )
                if len(values) != rows[table]:
                    raise UsageError(
                        f"{accumulator.name}: {len(values)} values of {name!r} for {rows[table]} {table}"
                    )
                tables[table][name] = values
    return tables
