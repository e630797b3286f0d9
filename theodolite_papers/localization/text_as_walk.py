"""Text as a random walk: second moments of hidden states against min(s, t) Σ, random tokens and a true walk."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite import Corpus
from theodolite.accumulate.sums import State
from theodolite.estimates import Estimates
from theodolite.judging import Criterion
from theodolite.report import style
from theodolite.report.data import OF_GROUPS
from theodolite.system.wording import number, with_error
from theodolite_papers import drawing
from theodolite_papers.drawing import Line
from theodolite_papers.experiment import Outcome, Study, by_layer, by_name, declared
from theodolite_papers.localization import walks
from theodolite_papers.localization.walk_pass import TextWalk, read_walk
from theodolite_papers.localization.walks import LAGS, WalkSums, simulated_walk

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

OF_A_WALK = {
    "r_squared": "1",
    "r_squared_centred": "1",
    "correlation": "near 1",
    "trace_ratio": "1",
    "autocorrelation": "0",
    "growth": "1",
    "frobenius": "0",
    "cosine": "1",
}
"""What a true walk has, of the measures that the page shows."""

BY_LAYER = {
    "r_squared": "R²",
    "autocorrelation": "autocorrelation",
    "growth": "growth",
    "frobenius": "Frobenius error",
    "cosine": "cosine",
}
"""The measures that are drawn by layer, and what the picker calls them."""

Sums = dict[str, tuple[WalkSums, State]]
"""Of what attention reads: by `TEXT`, `RANDOM`, `WALK`."""


def text_walk(study: Study) -> TextWalk:
    """The pass over the text of the run, made once for all experiments."""
    corpus = study.require_corpus()
    seed = int(study.provenance["seed"])
    return study.cached("text as a walk", lambda: read_walk(study.require_model(), corpus, seed))


@declared("localization/walk")
def walk(study: Study, outcome: Outcome) -> None:
    text, seed, model = text_walk(study), int(study.provenance["seed"]), study.require_model()
    contexts, length = text.corpus.contexts.shape
    tokens = Corpus.random_tokens(model.required_vocabulary(), length, contexts, seed, below=model.vocabulary)
    random_walk = read_walk(model, tokens, seed)
    sums: Sums = {
        TEXT: (text.inputs, text.input_state),
        RANDOM: (random_walk.inputs, random_walk.input_state),
        WALK: simulated_walk(text.inputs, text.input_state, seed),
    }
    tables = {name: walks.walk_table(*of) for name, of in sums.items()}
    residual = walks.walk_table(text.residual, text.residual_state)
    _read(outcome, tables | {f"{TEXT}, residual stream": residual})
    _judge(outcome, tables[TEXT], tables[RANDOM], residual)
    parts = [table.assign(tokens=name, vectors="attention input") for name, table in tables.items()]
    layers = pd.concat([*parts, residual.assign(tokens=TEXT, vectors="residual stream")], ignore_index=True)
    first = ["tokens", "vectors"]
    outcome.tables["layers"] = layers[[*first, *(name for name in layers if name not in first)]]
    outcome.tables["pairs"] = walks.pair_table(*sums[TEXT])
    _draw_moments(outcome, sums)
    _draw_growth(outcome, sums)
    _draw_increments(outcome, sums)
    _draw_layers(outcome, tables)


def _column(table: pd.DataFrame, name: str) -> Estimates:
    """A measure and its standard errors, layer by layer."""
    values, errors = (table[of].to_numpy(dtype=np.float64) for of in (name, f"{name}_se"))
    return Estimates(values, errors, *OF_GROUPS)


def _read(outcome: Outcome, tables: dict[str, pd.DataFrame]) -> None:
    for name, of_a_walk in OF_A_WALK.items():
        middles = {source: _column(table, name).at(len(table) // 2) for source, table in tables.items()}
        by_source = [f"{source} {with_error(of.value, of.error)}" for source, of in middles.items()]
        outcome.read(f"{walks.MEASURES[name]}, middle layer", "; ".join(by_source), f"a walk: {of_a_walk}")
    outcome.read(
        "lowest R² of the simulated walk over layers: what this test gives for a true walk",
        number(float(tables[WALK]["r_squared"].min())),
        "a walk: 1",
    )


def _judge(outcome: Outcome, text: pd.DataFrame, random: pd.DataFrame, residual: pd.DataFrame) -> None:
    def judge(claim: str, name: str, table: pd.DataFrame, criterion: Criterion) -> None:
        outcome.claim(claim, walks.MEASURES[name], _column(table, name), criterion)

    second_moments = "the second moments of a random walk"
    claim = f"What attention reads has {second_moments} (Assumption 1, Remark 3)"
    judge(claim, "r_squared", text, EXPLAINS)
    judge(f"The residual stream has {second_moments}", "r_squared", residual, EXPLAINS)
    what, of_text = walks.MEASURES["autocorrelation"], _column(text, "autocorrelation")
    claim = "The increments of what attention reads are uncorrelated (Assumption 1)"
    outcome.claim(claim, f"|{what}|", replace(of_text, values=np.abs(of_text.values)), UNCORRELATED)
    claim = "The norm of what attention reads grows with position (Assumption 1: E‖x_t‖² = t tr Σ)"
    judge(claim, "growth", text, GROWTH_EXPONENT)
    claim = "The full second moments of what attention reads are min(s, t) Σ (Assumption 1)"
    judge(claim, "frobenius", text, NEAR)
    less_random = of_text.values - _column(random, "autocorrelation").values
    error = np.hypot(*(table["autocorrelation_se"].to_numpy(np.float64) for table in (text, random)))
    claim, what = "Text drifts where random tokens do not (Remark 3)", f"{what}, text less random tokens"
    outcome.claim(claim, what, Estimates(less_random, error, *OF_GROUPS), DRIFTS)


def _draw_moments(outcome: Outcome, sums: Sums) -> None:
    text_sums, state = sums[TEXT]
    at = np.array(text_sums.shown, dtype=np.float64) + 1

    def draw(layer: int) -> go.Figure:
        grams = {name: walks.mean_gram(state, layer).numpy() for name, (_, state) in sums.items()}
        grams["min(s, t)"] = walks.steps_shared(text_sums).numpy()
        least = np.finfo(np.float64).tiny
        pictures = {name: gram / max(float(np.abs(gram).max()), least) for name, gram in grams.items()}
        titles = ("t", "s", "over the largest")
        return drawing.maps(pictures, (at, at), titles, (-1.0, 1.0), signed=tuple(pictures), square=True)

    count = len(state["contexts"])
    outcome.draw("moments", by_layer(count, draw))


def _draw_growth(outcome: Outcome, sums: Sums) -> None:
    text_sums, text_state = sums[TEXT]
    at = np.array(text_sums.shown, dtype=np.float64) + 1

    def draw(layer: int) -> go.Figure:
        norms = [walks.mean_gram(state, layer).diagonal().numpy() for _, state in sums.values()]
        log = {"type": "log", "dtick": 1}
        values, titles = [norm / norm[0] for norm in norms], ("t", "E‖x_t‖² over E‖x_1‖²")
        return drawing.curves(at, list(LINES.values()), values, titles, xaxis=log, yaxis=log)

    count = len(text_state["contexts"])
    outcome.draw("growth", by_layer(count, draw))


def _draw_increments(outcome: Outcome, sums: Sums) -> None:
    lags = np.arange(1, LAGS + 1, dtype=np.float64)

    def draw(layer: int) -> go.Figure:
        values = [walks.autocorrelations(*of, layer)[1:].numpy() for of in sums.values()]
        titles = ("lag", "E[ε_t·ε_{t+lag}] / E‖ε_t‖²")
        return drawing.curves(lags, list(LINES.values()), values, titles, yaxis={"range": [-0.6, 0.3]})

    count = len(sums[TEXT][1]["contexts"])
    outcome.draw("increments", by_layer(count, draw))


def _draw_layers(outcome: Outcome, tables: dict[str, pd.DataFrame]) -> None:
    def draw(place: int) -> go.Figure:
        values = [_column(table, list(BY_LAYER)[place]).values for table in tables.values()]
        layers = tables[TEXT]["layer"].to_numpy(dtype=np.float64)
        return drawing.curves(layers, list(LINES.values()), values, ("layer", ""))

    drawn = by_name("measure", list(BY_LAYER.values()), draw)
    measures = "; ".join(f"{label}: {walks.MEASURES[name]}" for name, label in BY_LAYER.items())
    outcome.draw("layers", drawn, measures=measures)
