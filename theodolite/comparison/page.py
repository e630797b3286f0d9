"""The page of a comparison: one table of all parts, verdicts, figures before and after, one head in every model."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go

import theodolite.comparison.matched as matched
from theodolite.comparison.audit import Audit
from theodolite.comparison.candidates import HeadOnPrompt, Measured
from theodolite.comparison.parts import OUTPUTS, SINK, kept_places
from theodolite.comparison.survival import HALF, MORE_THAN_HARDLY_ANY, NEARLY_ALL, Survival
from theodolite.judging import HOLDS, Criterion, Estimate, Verdict, judge, mix_of
from theodolite.measure.publications import BAO, SONG, ZHANG
from theodolite.report.drawing import compare as drawing
from theodolite.report.drawing import prompt as figures_prompt
from theodolite.report.exhibit import by_name
from theodolite.report.outcome import Heading, Outcome
from theodolite.system.wording import counted, head_name, listed, number, percent, shown_token, visible

PAPER_ON_LOW_RANK = "Without the low-rank term of a layer its sinks are gone (section 3.2, Fig. 4)"
LOW_RANK_CLAIM = "The low-rank term makes the sinks of its layer (section 3.2, Fig. 4)"
PROMPT_SHOWN = 600  # characters of the prompt below the maps
FEWEST_SINKS = 8  # of a layer (head × context pairs): below it nothing is tested
GONE = Criterion("less than", HALF, "ours")  # what is left without the low-rank term
STAY = Criterion("at least", HALF, "ours")  # and without a random part as large


def outcome(
    audits: Sequence[Audit], measured: Sequence[Measured] = (), on_prompt: HeadOnPrompt | None = None
) -> Outcome:
    """Make the page's content; `measured`: the models, where they were at hand; `on_prompt`: one head of each."""
    page = Outcome()
    if ablated := [model for model in measured if model.candidate.layer is not None]:
        _judge_term(page, ablated, {model.candidate.name: model for model in measured}, audits)
    for place, audit in enumerate(audits):
        _judge_parts(page, audit, explain=place == 0)
    for name in audits[0].tables:
        tables = []
        for audit in audits:
            if (table := audit.tables.get(name)) is not None:
                pair = {"before_in": audit.reference, "after_in": audit.other} if len(audits) > 1 else {}
                tables.append(table.assign(**pair)[[*pair, *table]])
        filled = [table for table in tables if len(table)]
        page.tables[name] = pd.concat(filled or tables[:1], ignore_index=True)
    page.lead = _lead(audits)
    if on_prompt:
        _draw_side_by_side(page, on_prompt)
    _draw_parts(page, audits)
    for audit in audits:
        page.runs |= audit.runs
    del page.runs[audits[0].reference]
    return page


def _lead(audits: Sequence[Audit]) -> pd.DataFrame:
    """Make the table that the page begins with: every part in one number, in each model, and the verdicts."""
    columns: dict[str, pd.Series] = {}
    for place, audit in enumerate(audits):
        table = audit.overview.set_index("part")
        names = ("measure", visible(audit.reference, 60), visible(audit.other, 60), f"verdict{' ' * place}")
        for name, of in zip(names, ("measure", "before", "after", "verdict"), strict=True):
            columns[name] = columns[name].combine_first(table[of]) if name in columns else table[of]
    # Of models of another shape only the heads are compared, which is a part that the others do not have.
    parts = pd.Index(dict.fromkeys(part for audit in audits for part in audit.overview["part"]), name="part")
    return pd.DataFrame({name: values.reindex(parts) for name, values in columns.items()}).reset_index()


def experiment_of(audits: Sequence[Audit], content: Outcome) -> Heading:
    """Make the page's heading: which models, and the paper's finding where a low-rank term was ablated."""
    first, *others = (visible(name, 60) for name in [audits[0].reference, *(audit.other for audit in audits)])
    is_ablation = any(verdict.claim == LOW_RANK_CLAIM for verdict in content.verdicts)
    title = f"What survives of {first} in {listed(others, 4)}"
    return Heading("sinks/compare", title, PAPER_ON_LOW_RANK if is_ablation else "")


def _judge_parts(page: Outcome, audit: Audit, explain: bool) -> None:
    """Add the verdicts on the whole mechanism and on each part; `explain` adds each part's criterion."""
    whole = f"The mechanism of {audit.reference} survives in {audit.other}"
    evidence = {
        part.name: part.sentence + (f" Criterion: {part.criterion}." if explain else "")
        for part in audit.parts
        if len(part.table)
    }
    if matched.NAME in evidence:  # the only part
        words = f"{audit.summary} {evidence[matched.NAME]}"
        page.verdicts.append(_judged(audit.part(matched.NAME), whole, words))
        return
    parts = [_judged(audit.part(name), f"{audit.other}, {name}", words) for name, words in evidence.items()]
    page.verdicts += [replace(mix_of(whole, parts), evidence=audit.summary), *parts, *audit.further]


def _judged(part: Survival, claim: str, sentence: str) -> Verdict:
    """Judge what is left of a part, with its sentence and the limits as evidence."""
    left = number(part.family.value) if part.family.is_exact else part.family  # every unit is decided
    limits = f"{NEARLY_ALL.side} {NEARLY_ALL.limit:g} is kept, at most {MORE_THAN_HARDLY_ANY.limit:g} lost"
    return replace(part.verdict(claim), evidence=f"{sentence} Left: {left}; criterion: {limits} (ours)")


def _of_the_layer(ablated: Sequence[Measured], audits: Sequence[Audit]) -> pd.DataFrame:
    """The sinks of the layer with its low-rank term, without it, and without a random part of the same size."""
    audit_of = {audit.other: audit for audit in audits}
    tables = []
    for model, name in zip(ablated, ("without_term", "without_random_part"), strict=True):
        sinks = audit_of[model.candidate.name].part("sinks").table
        of_layer = sinks[sinks["layer"] == model.candidate.layer]
        columns = {"before": "with_term", "after": name, "se": f"{name}_se"}
        tables.append(of_layer[[*SINK, "token", *columns]].rename(columns=columns))
    table = tables[0].merge(tables[1], "outer", [*SINK, "token", "with_term"])
    table = table.fillna({"with_term": 0.0, "without_term": 0.0, "without_random_part": 0.0})
    return table.sort_values(["with_term", *SINK], ascending=[False] + [True] * 4, ignore_index=True)


def _judge_term(
    page: Outcome, ablated: Sequence[Measured], measured: Mapping[str, Measured], audits: Sequence[Audit]
) -> None:
    """Judge whether ablating a layer's low-rank term removes its sinks, and ablating a random part as large does not.

    By the share of them that are at the same place of the same context, paired by context.
    """
    layer, contexts = ablated[0].candidate.layer, ablated[0].run.provenance["corpus"]["contexts"]
    table = page.tables["sinks_of_the_layer"] = _of_the_layer(ablated, audits)
    before = float(table["with_term"].sum())
    if before * contexts < FEWEST_SINKS:
        page.cannot_test(LOW_RANK_CLAIM, f"layer {layer} has too few sinks in this text, with the term")
        return
    reference_of = {audit.other: measured[audit.reference] for audit in audits if audit.reference in measured}
    left = [
        kept_places(reference_of[model.candidate.name].outputs, model.outputs, layer) or Estimate(math.nan)
        for model in ablated
    ]
    shares = [f"{percent(share)} of ‖W_{name.upper()}‖²" for name, share in (ablated[0].taken or {}).items()]
    without = (("it", left[0], GONE), ("the random part", left[1], STAY))
    judged, control = (
        judge(LOW_RANK_CLAIM, f"left at their place without {what}", share, limit)
        for what, share, limit in without
    )
    evidence = (
        f"layer {layer} has {number(before)} sinks per context with the term; ablating it leaves "
        f"{percent(left[0].value)} of them at their place ({listed(shares)}), ablating a random part with the same "
        f"singular values {percent(left[1].value)}; {judged.evidence}; {control.evidence}"
    )
    # What stays without the term needs no control.
    verdict = mix_of(LOW_RANK_CLAIM, [judged, control]) if judged.answer == HOLDS else judged
    too = "" if control.answer == HOLDS else "; ablating a random part of the same size may remove them, too"
    page.verdicts.append(replace(verdict, evidence=evidence + (too if judged.answer == HOLDS else "")))


def _draw_side_by_side(page: Outcome, on_prompt: HeadOnPrompt) -> None:
    head, tokens = head_name(on_prompt.layer, on_prompt.head), on_prompt.tokens
    all_outputs = np.concatenate([trace.output.numpy() for trace in on_prompt.traces.values()])
    attention, output, listed_by_model = {}, {}, []
    for name, trace in on_prompt.traces.items():
        sinks = [int(position) for position in trace.sinks if position >= 0]
        names = [f"{position} “{shown_token(tokens[position])}”" for position in sinks]
        of_model = f"{counted(len(names), 'sink')} ({listed(names)})" if names else "no sink"
        listed_by_model.append(f"{name}: {of_model}")
        attention[name] = figures_prompt.attention(trace.attention.numpy(), tokens, sinks)
        output[name] = figures_prompt.by_dimension(trace.output.numpy(), tokens, sinks, scale_of=all_outputs)
    page.figure(
        "maps",
        f"Attention of {head}, model by model",
        drawing.parallel_map(attention, square=True),
        f"One prompt, queries down, keys across; ▼: sinks. {'; '.join(listed_by_model)}. The prompt: "
        f"“{visible(on_prompt.prompt, PROMPT_SHOWN)}”",
        "a strong column in one model that is weak or missing in another."
        if any((trace.sinks >= 0).any() for trace in on_prompt.traces.values())
        else "columns that differ. The head has no sink on this prompt: try another --prompt, --layer or --head.",
        f"{ZHANG}, Figs. 4 and 5",
        wide=True,
    )
    page.figure(
        "outputs",
        f"Output of {head}, model by model",
        drawing.parallel_map(output),
        f"What the head adds to the residual stream (o W_O): tokens down, the {figures_prompt.DIMENSIONS} largest "
        "dimensions across, on one colour scale.",
        "columns of one colour below a sink: its tag. A model that lost the sink has none.",
        f"{ZHANG}, Fig. 4",
        wide=True,
    )


@dataclass(frozen=True)
class PartFigure:
    """How the table of a part is drawn, and its caption: what is drawn, what to look for, whose figure it is."""

    part: str
    title: str
    draw: Callable[..., go.Figure]
    shows: str
    look_for: str
    source: str
    wide: bool = False


def _dots(shown: drawing.Dots) -> Callable[[pd.DataFrame], go.Figure]:
    return functools.partial(drawing.scatter, shown=shown)


FIGURES = (
    PartFigure(
        matched.NAME,
        "Heads matched by what they do",
        lambda table: drawing.scatter(table[table["match"] != ""], drawing.MATCH_DOTS),
        "One dot per head: its depth (0 first, 1 last) and that of the most similar head of the other model.",
        "dots along the line: the two models do the same things at the same depth.",
        "ours",
    ),
    PartFigure(
        "sinks",
        "Sinks before and after",
        _dots(drawing.SINK_DOTS),
        "One dot per sink (layer, head, kind and token): the share of contexts in which it is one.",
        "dots at the lower edge (lost) and at the left edge (new). On the line nothing changed.",
        f"{ZHANG}, section 3.3",
    ),
    PartFigure(
        "tags",
        "Tags before and after",
        _dots(drawing.TAG_DOTS),
        "One dot per sink: η², the share of the head output's variance that its grouping of tokens explains.",
        "dots at the lower edge. A lost dot near the line has rotated: it tags in another direction.",
        f"{ZHANG}, sections 2 and 3.4",
    ),
    PartFigure(
        OUTPUTS,
        "Head outputs before and after",
        _dots(drawing.OUTPUT_DOTS),
        "One dot per head: root-mean-square norm over tokens of what it adds to the residual stream.",
        "dots at the lower edge: heads that write nothing any more. A lost head near the line writes other things.",
        "ours",
    ),
    PartFigure(
        "entropies",
        "Entropy of attention, head by head",
        drawing.entropies,
        "Mean entropy of each head's attention, as a share of the maximum, and its change in nats.",
        "strong colours on the right: heads that attend to fewer keys (blue) or more (orange).",
        f"{BAO}, section 5",
        wide=True,
    ),
    PartFigure(
        "outlier dimensions",
        "Outlier dimensions, layer by layer",
        drawing.outliers,
        "Share of tokens past the first with |x| ≥ 6, for the dimensions that are outliers in some layer.",
        "rows that are strong in only one of the two.",
        f"{ZHANG}, section 3.2; Dettmers et al. 2022",
        wide=True,
    ),
    PartFigure(
        "positional basis",
        "Positions, layer by layer",
        drawing.positions,
        "Rank and relative norm of the positional basis; overlap: mean squared cosine of its leading directions; "
        "curve: similarity of the Gram matrices.",
        "an overlap near 1. A low overlap with a high curve: the same positions, rotated.",
        f"{SONG}, Tables 1, 2 and 4",
        wide=True,
    ),
    PartFigure(
        "spectra",
        "Norm of W_QK before and after",
        _dots(drawing.SPECTRUM_DOTS),
        "One dot per head: the Frobenius norm of its query-key matrix.",
        "dots far below the line: heads whose logits hardly distinguish keys any more.",
        f"{BAO}, section 3",
    ),
)


def _drawn(drawings: Sequence[Callable[[], go.Figure]], index: int) -> go.Figure:
    return drawings[index]()


def _draw_parts(page: Outcome, audits: Sequence[Audit]) -> None:
    """Draw the parts that some comparison has, with a picker where there are several comparisons."""
    for figure in FIGURES:
        tables = {
            audit.other: part.table for audit in audits for part in audit.parts if part.name == figure.part
        }
        if not any(map(len, tables.values())):
            continue
        draw = figure.draw
        if draw is drawing.outliers:  # all comparisons have the same rows and columns
            dimensions = sorted(
                {int(dimension) for table in tables.values() for dimension in table["dimension"]}
            )
            bases = [
                part.table for audit in audits for part in audit.parts if part.name == "positional basis"
            ]
            layers = len(bases[0])
            draw = functools.partial(drawing.outliers, dimensions=dimensions, layers=layers)
        drawings = [functools.partial(draw, table) for table in tables.values()]
        choice = by_name("model", list(tables), functools.partial(_drawn, drawings))
        drawn = choice if len(tables) > 1 else drawings[0]()
        key = figure.part.replace(" ", "-")
        page.figure(key, figure.title, drawn, figure.shows, figure.look_for, figure.source, wide=figure.wide)
