"""Text as a random walk: second moments of hidden states against min(s, t) Σ, random tokens and a true walk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.judging import Criterion, Estimates, Verdict, judge
from theodolite.papers.experiment import Study, experiment
from theodolite.papers.localization.walk_fit import (
    MEASURES,
    autocorrelations,
    mean_gram,
    pair_table,
    steps_shared,
    walk_table,
)
from theodolite.papers.localization.walk_increments import LAGS, TextWalk, WalkSums, read_walk, simulated_walk
from theodolite.report import style
from theodolite.report.data import Floats
from theodolite.report.drawing import localization as drawing
from theodolite.report.drawing.localization import Line
from theodolite.report.exhibit import Exhibit, by_layer, by_name
from theodolite.report.measures import BAO
from theodolite.report.outcome import Outcome, Reading
from theodolite.system.wording import number, with_error

if TYPE_CHECKING:
    from theodolite.accumulate.sums import State
    from theodolite.papers.experiment import Study

TEXT, RANDOM, WALK = "text", "random tokens", "simulated walk"
LINES = {
    TEXT: Line(TEXT, style.MEASURED, width=2.6),
    RANDOM: Line(RANDOM, style.BLUE),
    WALK: Line(WALK, style.GREEN),
}

EXPLAINS = Criterion(
    "at least", 0.5, "“semantically plausible” (Remark 3) read as: half of the variation is a walk's (ours)"
)
UNCORRELATED = Criterion(
    "at most", 0.1, "in size; Assumption 1 has 0, vectors independent of each other −½; the tenth is ours"
)
GROWTH_EXPONENT = Criterion(
    "at least", 0.5, "Assumption 1 has 1, vectors of one size 0; half of the way is ours"
)
NEAR = Criterion("at most", 0.5, "half of the size of what is measured (ours)")
DRIFTS = Criterion("more than", 0.0, "the drift of text, and not of its position alone (ours)")


@dataclass(frozen=True)
class WalkMoments:
    """The same sums of a text, of random tokens and of a simulated walk, of what attention reads; and the residual.

    Attributes:
        sums: by `TEXT`, `RANDOM`, `WALK`: what attention reads.
        text: the pass over the text, with its residual stream.
    """

    sums: dict[str, tuple[WalkSums, State]]
    text: TextWalk


def text_walk(study: Study) -> TextWalk:
    """The pass over the text of the run, made once for all experiments.

    Raises:
        UsageError: the text is not at hand, or its contexts are too short.
    """
    corpus = study.corpus
    if corpus is None:
        raise UsageError("this experiment reads the text of the run again: pass it as well")
    seed = int(study.provenance["seed"])
    return study.cached("text as a walk", lambda: read_walk(study.require_model(), corpus, seed))


def _walk_moments(study: Study) -> WalkMoments:
    text, seed = text_walk(study), int(study.provenance["seed"])
    contexts, length = text.corpus.contexts.shape
    random = Corpus.random_tokens(study.require_model().required_vocabulary(), length, contexts, seed)
    random_walk = read_walk(study.require_model(), random, seed)
    sums = {
        TEXT: (text.inputs, text.input_state),
        RANDOM: (random_walk.inputs, random_walk.input_state),
        WALK: simulated_walk(text.inputs, text.input_state, seed),
    }
    return WalkMoments(sums, text)


@experiment(
    "localization/walk",
    "Text as a random walk",
    "Tokens walk at random with Gaussian steps, which “may be semantically plausible” (Assumption 1, Remark 3)",
    needs=("model",),
)
def walk(study: Study, outcome: Outcome) -> None:
    moments = _walk_moments(study)
    tables = {name: walk_table(*sums) for name, sums in moments.sums.items()}
    residual = walk_table(moments.text.residual, moments.text.residual_state)
    layers = pd.concat(
        [
            *(table.assign(tokens=name, vectors="attention input") for name, table in tables.items()),
            residual.assign(tokens=TEXT, vectors="residual stream"),
        ],
        ignore_index=True,
    )
    layers = layers[["tokens", "vectors", *(name for name in layers if name not in ("tokens", "vectors"))]]
    figures = [_maps(moments), _growth(moments), _autocorrelation(moments), _by_layer(tables)]
    outcome.readings += _readings(tables, residual)
    outcome.verdicts += _verdicts(tables, residual)
    outcome.tables |= {"layers": layers, "pairs": pair_table(*moments.sums[TEXT])}
    outcome.exhibits += figures


def _relative(gram: Floats) -> Floats:
    """A matrix over its largest magnitude, −1 … 1."""
    shown: Floats = gram / max(float(np.abs(gram).max()), np.finfo(np.float64).tiny)
    return shown


def _maps(moments: WalkMoments) -> Exhibit:
    text_sums, state = moments.sums[TEXT]

    at = np.array(text_sums.shown, dtype=np.float64) + 1

    def drawn(layer: int) -> go.Figure:
        grams = {name: mean_gram(sums[1], layer).numpy() for name, sums in moments.sums.items()}
        grams["min(s, t)"] = steps_shared(text_sums).numpy()
        return drawing.maps(
            {name: _relative(gram) for name, gram in grams.items()},
            (at, at),
            ("t", "s", "over the largest"),
            (-1.0, 1.0),
            signed=tuple(grams),
            square=True,
        )

    count = len(state["contexts"])
    return Exhibit(
        "moments",
        "E[x_s·x_t] of what attention reads",
        drawn(count // 2),
        "Mean over contexts of the inner product of what the attention module reads at positions s and t, each "
        "picture over its own largest value: the text of the run, random tokens, Gaussian random walks with the "
        "covariance of the text's increments, and what Assumption 1 says.",
        "whether the text looks like the two pictures on the right: strong in the lower right corner only, with "
        "level sets that run along two sides of squares. A flat picture with a strong diagonal is no walk.",
        f"{BAO}, Assumption 1 and Remark 3; the comparison is ours",
        choice=by_layer(count, drawn),
        wide=True,
    )


def _growth(moments: WalkMoments) -> Exhibit:
    at = np.array(moments.text.inputs.shown, dtype=np.float64) + 1

    def drawn(layer: int) -> go.Figure:
        norms = [mean_gram(state, layer).diagonal().numpy() for _, state in moments.sums.values()]
        values, log = [norm / norm[0] for norm in norms], {"type": "log", "dtick": 1}
        titles = ("t", "E‖x_t‖² over E‖x_1‖²")
        return drawing.curves(at, list(LINES.values()), values, titles, xaxis=log, yaxis=log)

    count = len(moments.text.input_state["contexts"])
    return Exhibit(
        "growth",
        "E‖x_t‖² by position",
        drawn(count // 2),
        "Mean squared norm of what the attention module reads, over that at the first position that is not left out.",
        "a line of slope 1, as that of the simulated walk; after a norm layer the size cannot grow at all.",
        f"{BAO}, Assumption 1: E‖x_t‖² = t tr Σ",
        choice=by_layer(count, drawn),
    )


def _autocorrelation(moments: WalkMoments) -> Exhibit:
    lags = np.arange(1, LAGS + 1, dtype=np.float64)

    def drawn(layer: int) -> go.Figure:
        values = [autocorrelations(*sums, layer)[1:].numpy() for sums in moments.sums.values()]
        titles = ("lag", "E[ε_t·ε_{t+lag}] / E‖ε_t‖²")
        return drawing.curves(lags, list(LINES.values()), values, titles, yaxis={"range": [-0.6, 0.3]})

    count = len(moments.text.input_state["contexts"])
    return Exhibit(
        "increments",
        "Autocorrelation of the increments",
        drawn(count // 2),
        "ε_t = x_{t+1} − x_t of what the attention module reads. Tokens that are independent of their neighbours have "
        "−½ at lag 1 and 0 after it.",
        "0 at every lag, as for the simulated walk.",
        f"{BAO}, Assumption 1",
        choice=by_layer(count, drawn),
    )


def _by_layer(tables: dict[str, pd.DataFrame]) -> Exhibit:
    names = ("r_squared", "autocorrelation", "growth", "frobenius", "cosine")
    short = ["R²", "autocorrelation", "growth", "Frobenius error", "cosine"]

    def drawn(place: int) -> go.Figure:
        layers = tables[TEXT]["layer"].to_numpy(dtype=np.float64)
        values = [table[names[place]].to_numpy(dtype=np.float64) for table in tables.values()]
        return drawing.curves(layers, list(LINES.values()), values, ("layer", ""))

    return Exhibit(
        "layers",
        "How closely each layer follows a random walk",
        drawn(0),
        "One number per layer: "
        + "; ".join(f"{label}: {MEASURES[name]}" for label, name in zip(short, names, strict=True))
        + ".",
        "the text's line on that of the simulated walk.",
        f"{BAO}, Assumption 1; the measures are ours",
        choice=by_name("measure", short, drawn),
    )


def _column(table: pd.DataFrame, name: str) -> tuple[Floats, Floats]:
    """A measure and its standard errors, layer by layer."""
    return table[name].to_numpy(dtype=np.float64), table[f"{name}_se"].to_numpy(dtype=np.float64)


def _verdict(
    claim: str, table: pd.DataFrame, name: str, criterion: Criterion, *, size: bool = False
) -> Verdict:
    values, errors = _column(table, name)
    what = f"|{MEASURES[name]}|" if size else MEASURES[name]
    return judge(claim, what, Estimates(np.abs(values) if size else values, errors), criterion)


def _verdicts(tables: dict[str, pd.DataFrame], residual: pd.DataFrame) -> list[Verdict]:
    text, random = tables[TEXT], tables[RANDOM]
    of_text, error_of_text = _column(text, "autocorrelation")
    of_random, error_of_random = _column(random, "autocorrelation")
    return [
        _verdict(
            "What attention reads has the second moments of a random walk (Assumption 1, Remark 3)",
            text,
            "r_squared",
            EXPLAINS,
        ),
        _verdict(
            "The residual stream has the second moments of a random walk",
            residual,
            "r_squared",
            EXPLAINS,
        ),
        _verdict(
            "The increments of what attention reads are uncorrelated (Assumption 1)",
            text,
            "autocorrelation",
            UNCORRELATED,
            size=True,
        ),
        _verdict(
            "The norm of what attention reads grows with position (Assumption 1: E‖x_t‖² = t tr Σ)",
            text,
            "growth",
            GROWTH_EXPONENT,
        ),
        _verdict(
            "The full second moments of what attention reads are min(s, t) Σ (Assumption 1)",
            text,
            "frobenius",
            NEAR,
        ),
        judge(
            "Text drifts where random tokens do not (Remark 3)",
            f"{MEASURES['autocorrelation']}, text less random tokens",
            Estimates(of_text - of_random, np.hypot(error_of_text, error_of_random)),
            DRIFTS,
        ),
    ]


def _readings(tables: dict[str, pd.DataFrame], residual: pd.DataFrame) -> list[Reading]:
    expected = {
        "r_squared": "1",
        "r_squared_centred": "1",
        "correlation": "near 1",
        "trace_ratio": "1",
        "autocorrelation": "0",
        "growth": "1",
        "frobenius": "0",
        "cosine": "1",
    }
    rows = []
    for name, of_a_walk in expected.items():
        by_source = []
        for source, table in (*tables.items(), (f"{TEXT}, residual stream", residual)):
            values, errors = _column(table, name)
            middle = len(values) // 2
            by_source.append(f"{source} {with_error(float(values[middle]), float(errors[middle]))}")
        rows.append(Reading(f"{MEASURES[name]}, middle layer", "; ".join(by_source), f"a walk: {of_a_walk}"))
    simulated = tables[WALK]
    rows.append(
        Reading(
            "lowest R² of the simulated walk over layers: what this test gives for a true walk",
            number(float(simulated["r_squared"].min())),
            "a walk: 1",
        )
    )
    return rows
