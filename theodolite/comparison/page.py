"""The page of a comparison: a verdict on each part, figures before and after, tables, one head in every model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go

import theodolite.comparison.outputs as outputs
from theodolite.comparison.audit import Audit
from theodolite.comparison.candidates import HeadOnPrompt, Measured
from theodolite.comparison.sinks import KEY
from theodolite.comparison.survival import HALF
from theodolite.judging import (
    HOLDS,
    UNDECIDED,
    UNTESTABLE,
    Criterion,
    Estimate,
    Verdict,
    error_of_share,
    judge,
)
from theodolite.report.drawing import compare as drawing
from theodolite.report.drawing import prompt as figures_prompt
from theodolite.report.exhibit import Exhibit, by_name
from theodolite.report.measures import BAO, SONG, ZHANG
from theodolite.report.outcome import Heading, Outcome
from theodolite.system.wording import counted, head_name, listed, number, percent, shown_token, visible

COMPARED = Heading(
    "sinks/compare",
    "What survives of the mechanism",
    "",
)
"""The heading of the page, which `theodolite compare` writes."""

PAPER_ON_LOW_RANK = "Without the low-rank term of a layer its sinks are gone (section 3.2, Fig. 4)"
LOW_RANK_CLAIM = "The low-rank term makes the sinks of its layer (section 3.2, Fig. 4)"
FEWEST_SINKS = 8
"""Sink occurrences in the layer (head × context pairs) below which nothing is tested."""
GONE = Criterion("less than", HALF, "ours")
STAY = Criterion("at least", HALF, "ours")
"""What is left of a layer's sinks without its low-rank term, and without a random part as large."""


def outcome(
    audits: Sequence[Audit], measured: Sequence[Measured] = (), on_prompt: HeadOnPrompt | None = None
) -> Outcome:
    """The page's content.

    Args:
        audits: at least one.
        measured: the models, where they were at hand.
        on_prompt: one head of each on a prompt.
    """
    several = len(audits) > 1
    verdicts = [
        verdict for place, audit in enumerate(audits) for verdict in _verdicts(audit, explain=place == 0)
    ]
    tables = {}
    for name in audits[0].tables:
        pairs = [(audit, audit.tables[name]) for audit in audits if name in audit.tables]
        named = [_with_model_names(audit, table) if several else table for audit, table in pairs]
        tables[name] = pd.concat([table for table in named if len(table)] or named[:1], ignore_index=True)
    ablated = [model for model in measured if model.candidate.layer is not None]
    if ablated:
        tables = {"sinks_of_the_layer": _of_the_layer(ablated, audits)} | tables
        verdicts.insert(0, _term_verdict(ablated, audits))
    exhibits = [*(_side_by_side(on_prompt) if on_prompt else []), *_exhibits(audits)]
    runs = {name: provenance for audit in audits for name, provenance in audit.runs.items()}
    runs.pop(audits[0].reference)
    return Outcome([], verdicts, tables, exhibits, dict(runs))


def experiment_of(audits: Sequence[Audit], content: Outcome) -> Heading:
    """The page's head: which models it is of, and what the paper says where a low-rank term was taken out."""
    first, *others = (visible(name, 60) for name in [audits[0].reference, *(audit.other for audit in audits)])
    is_ablation = any(verdict.claim == LOW_RANK_CLAIM for verdict in content.verdicts)
    title = f"What survives of {first} in {listed(others, 4)}"
    return replace(COMPARED, title=title, paper=PAPER_ON_LOW_RANK if is_ablation else "")


def _verdicts(audit: Audit, explain: bool) -> list[Verdict]:
    """On the whole mechanism, and on each part; `explain` what survives."""
    parts = [part for part in audit.parts if len(part.table)]
    overall = Verdict(
        f"The mechanism of {audit.reference} survives in {audit.other}", audit.answer, audit.summary
    )
    return [
        overall,
        *(
            Verdict(
                f"{audit.other}, {part.name}",
                part.answer,
                f"{part.sentence} {'Criterion: ' + part.criterion + '.' if explain else ''}".strip(),
            )
            for part in parts
        ),
    ]


def _with_model_names(audit: Audit, table: pd.DataFrame) -> pd.DataFrame:
    """With the names of the two models in front."""
    return table.assign(before_in=audit.reference, after_in=audit.other)[["before_in", "after_in", *table]]


def _audits_of(ablated: Sequence[Measured], audits: Sequence[Audit]) -> list[Audit]:
    return [next(audit for audit in audits if audit.other == model.candidate.name) for model in ablated]


def _of_the_layer(ablated: Sequence[Measured], audits: Sequence[Audit]) -> pd.DataFrame:
    """The sinks of the layer with its low-rank term, without it, and without a random part of the same size."""
    table: pd.DataFrame | None = None
    for audit, name in zip(_audits_of(ablated, audits), ("without_term", "without_random_part"), strict=True):
        sinks = audit.part("sinks").table
        of_layer = sinks[sinks["layer"] == ablated[0].candidate.layer]
        columns = {"before": "with_term", "after": name, "se": f"{name}_se"}
        of_layer = of_layer[[*KEY, "token", *columns]].rename(columns=columns)
        table = of_layer if table is None else table.merge(of_layer, "outer", [*KEY, "token", "with_term"])
    assert table is not None
    shares = ["with_term", "without_term", "without_random_part"]
    table[shares] = table[shares].fillna(0.0)
    return table.sort_values(["with_term", *KEY], ascending=[False] + [True] * 4, ignore_index=True)


def _term_verdict(ablated: Sequence[Measured], audits: Sequence[Audit]) -> Verdict:
    """Whether ablating a layer's low-rank term removes its sinks, and a random part of the same size does not."""
    layer, contexts = ablated[0].candidate.layer, ablated[0].run.provenance["corpus"]["contexts"]
    table = _of_the_layer(ablated, audits)
    before = float(table["with_term"].sum())
    if before * contexts < FEWEST_SINKS:
        return Verdict(
            LOW_RANK_CLAIM, UNTESTABLE, f"layer {layer} has too few sinks in this text, with the term"
        )
    without, at_random = (
        float(np.minimum(table["with_term"], table[name]).sum()) / before
        for name in ("without_term", "without_random_part")
    )
    shares = [f"{percent(share)} of ‖W_{name.upper()}‖²" for name, share in (ablated[0].taken or {}).items()]
    error = error_of_share(before * contexts)
    judged = judge(LOW_RANK_CLAIM, "left without it", Estimate(without, error), GONE)
    control = judge(LOW_RANK_CLAIM, "left without the random part", Estimate(at_random, error), STAY)
    evidence = (
        f"layer {layer} has {number(before)} sinks per context with the term; ablating it leaves {percent(without)} of "
        f"them ({listed(shares)}), ablating a random part with the same singular values {percent(at_random)}; "
        f"{judged.evidence}; {control.evidence}"
    )
    if judged.answer == HOLDS and control.answer != HOLDS:
        may = "ablating a random part of the same size may remove them, too"
        return Verdict(LOW_RANK_CLAIM, UNDECIDED, f"{evidence}; {may}")
    return Verdict(LOW_RANK_CLAIM, judged.answer, evidence)


def _side_by_side(on_prompt: HeadOnPrompt) -> list[Exhibit]:
    head = head_name(on_prompt.layer, on_prompt.head)
    sinks = {
        name: [int(position) for position in trace.sinks if position >= 0]
        for name, trace in on_prompt.traces.items()
    }
    attention = {
        name: figures_prompt.attention(trace.attention.numpy(), on_prompt.tokens, sinks[name])
        for name, trace in on_prompt.traces.items()
    }
    outputs = {name: trace.output.numpy() for name, trace in on_prompt.traces.items()}
    all_outputs = np.concatenate(list(outputs.values()))
    output = {
        name: figures_prompt.by_dimension(vectors, on_prompt.tokens, sinks[name], scale_of=all_outputs)
        for name, vectors in outputs.items()
    }
    listed_by_model = "; ".join(
        f"{name}: {_listed_sinks(positions, on_prompt.tokens)}" for name, positions in sinks.items()
    )
    return [
        Exhibit(
            "maps",
            f"Attention of {head}, model by model",
            drawing.parallel_map(attention, square=True),
            f"One prompt, queries down, keys across; ▼ marks the sinks of the head in each model. {listed_by_model}.",
            "a strong column in one model that is weak or missing in another."
            if any(sinks.values())
            else "columns that differ. The head has no sink on this prompt: try another --prompt, --layer or --head.",
            f"{ZHANG}, Figs. 4 and 5",
            wide=True,
        ),
        Exhibit(
            "outputs",
            f"Output of {head}, model by model",
            drawing.parallel_map(output),
            f"What the head adds to the residual stream (through W_O), tokens down, dimensions across: the "
            f"{figures_prompt.DIMENSIONS} largest at any token of any model, on one colour scale.",
            "columns of one colour below a sink: its tag. A model that lost the sink has none.",
            f"{ZHANG}, Fig. 4",
            wide=True,
        ),
    ]


def _listed_sinks(positions: Sequence[int], tokens: Sequence[str]) -> str:
    names = [f"{position} “{shown_token(tokens[position])}”" for position in positions]
    return f"{counted(len(names), 'sink')} ({listed(names)})" if names else "no sink"


@dataclass(frozen=True)
class _Drawing:
    """The figure of a part: how its table is drawn, with a picker of the comparisons."""

    part: str
    title: str
    draw: Callable[[pd.DataFrame], go.Figure]
    shows: str
    look_for: str
    source: str
    wide: bool = False

    def exhibit(self, audits: Sequence[Audit]) -> Exhibit | None:
        """With a picker, where there are several comparisons; None where none has a row."""
        key = self.part.replace(" ", "-")
        having = [audit for audit in audits if self.part in [part.name for part in audit.parts]]
        tables = [audit.part(self.part).table for audit in having]
        if not any(map(len, tables)):
            return None
        names = [audit.other for audit in having]
        choice = by_name("model", names, lambda index: self.draw(tables[index]))
        return Exhibit(
            key,
            self.title,
            self.draw(tables[0]),
            self.shows,
            self.look_for,
            self.source,
            choice=choice if len(names) > 1 else None,
            wide=self.wide,
        )


def _exhibits(audits: Sequence[Audit]) -> list[Exhibit]:
    """Figures of the parts that some comparison has."""
    outliers = [audit.part("outlier dimensions").table for audit in audits]
    dimensions = sorted({int(dimension) for table in outliers for dimension in table["dimension"]})
    layers = len(audits[0].part("positional basis").table)
    drawings = [
        _Drawing(
            "sinks",
            "Sinks before and after",
            lambda table: drawing.scatter(table, drawing.SINK_DOTS),
            "One dot per sink (layer, head, kind and token): the share of contexts in which it is one.",
            "dots at the lower edge (lost) and at the left edge (new). On the line nothing changed.",
            f"{ZHANG}, section 3.3",
        ),
        _Drawing(
            "tags",
            "Tags before and after",
            lambda table: drawing.scatter(table, drawing.TAG_DOTS),
            "One dot per sink: η², the share of the head output's variance that its grouping of tokens explains.",
            "dots at the lower edge. A lost dot near the line has rotated: it tags in another direction.",
            f"{ZHANG}, sections 2 and 3.4",
        ),
        _Drawing(
            outputs.NAME,
            "Head outputs before and after",
            lambda table: drawing.scatter(table, drawing.OUTPUT_DOTS),
            "One dot per head: root-mean-square norm over tokens of what it adds to the residual stream.",
            "dots at the lower edge: heads that write nothing any more. A lost head near the line writes other things.",
            "ours",
        ),
        _Drawing(
            "entropies",
            "Entropy of attention, head by head",
            drawing.entropies,
            "Mean entropy of each head's attention, as a share of the maximum, and its change in nats.",
            "strong colours on the right: heads that attend to fewer keys (blue) or more (orange) than before.",
            f"{BAO}, section 5",
            wide=True,
        ),
        _Drawing(
            "outlier dimensions",
            "Outlier dimensions, layer by layer",
            lambda table: drawing.outliers(table, dimensions, layers),
            "Share of tokens past the first with |x| ≥ 6, for the dimensions that are outliers in some layer.",
            "rows that are strong in only one of the two.",
            f"{ZHANG}, section 3.2; Dettmers et al. 2022",
            wide=True,
        ),
        _Drawing(
            "positional basis",
            "Positions, layer by layer",
            drawing.positions,
            "Rank and relative norm of the positional basis. Overlap: mean squared cosine between its leading "
            "directions before and after; curve: similarity of the positions' Gram matrices, invariant to rotation.",
            "an overlap near 1. A low overlap with a high curve: the same positions, rotated.",
            f"{SONG}, Tables 1, 2 and 4",
            wide=True,
        ),
        _Drawing(
            "spectra",
            "Norm of W_QK before and after",
            lambda table: drawing.scatter(table, drawing.SPECTRUM_DOTS),
            "One dot per head: the Frobenius norm of its query-key matrix.",
            "dots far below the line: heads whose logits hardly distinguish keys any more.",
            f"{BAO}, section 3",
        ),
    ]
    return [shown for figure in drawings if (shown := figure.exhibit(audits)) is not None]
