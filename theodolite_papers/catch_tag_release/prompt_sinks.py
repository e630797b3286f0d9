"""Catch, tag and release on a prompt (Zhang et al. 2025, Fig. 2 and Figs. 7 to 11), for any head of any model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from theodolite.attention.summary import SINK_THRESHOLD
from theodolite.estimates import Estimate, Floats
from theodolite.judging import FAILS, HOLDS, Verdict, unless_explained, untestable
from theodolite.models.texts import prompt_or_shipped, token_texts
from theodolite.report import style
from theodolite.report.data import evenly
from theodolite.report.drawing import grammar
from theodolite.sinks.prompt import LEFT_OUT, UNCAUGHT
from theodolite.system.wording import counted, for_plotly, head_name, number, percent, shown_token
from theodolite.theory import grouping
from theodolite.theory.grouping import principal_scores, rgb, turned
from theodolite_papers.catch_tag_release.prompt_trace import PromptTrace, trace_prompt
from theodolite_papers.drawing import by_dimension
from theodolite_papers.experiment import Experiment, Outcome, Study, by_name, criterion, declared

DEEPER = 4  # residual layers behind the head's block shown at most, the last one among them
STRIP = 34  # pixels: one row of coloured tokens

TAIL = criterion("sinks/rare").limit
"""Of the places that the same runs could have, as many give a gain as large (or as small), where that decides."""

MOST_SHIFTS = 999
LEAST_SHIFTS = math.ceil(1 / TAIL) - 1  # with fewer, no place is rare enough
TIE = 1e-12  # of two η²: a grouping and its complement explain the same, but for rounding
CLUSTER = 2  # tokens that a group needs: one alone is no cluster
DETRENDED = "less a quadratic in position"


def show_prompt(outcome: Outcome, trace: PromptTrace, tokens: list[str], *, chosen: bool = False) -> None:
    """Show the figures of one head on one prompt, η² by place, and whether the clusters are there and remain."""
    sinks = [int(position) for position in trace.sinks if position >= 0]
    grouped = trace.group != LEFT_OUT
    vectors_at = _places(trace)
    reference = principal_scores(trace.output, grouped)
    scores = {
        name: reference
        if vectors is trace.output
        else turned(principal_scores(vectors, grouped), reference, grouped)
        for name, vectors in vectors_at.items()
    }
    names = {LEFT_OUT: "position 0, or a sink", UNCAUGHT: "not caught"}
    names |= {place: f"caught by {_sink(int(sink), tokens)}" for place, sink in enumerate(trace.sinks)}
    groups = [names[group] for group in trace.group.tolist()]
    places = outcome.tables["places"] = explained_by_place(vectors_at, trace.group, grouped)
    outcome.tables["tokens"] = pd.DataFrame(
        {
            "position": range(len(tokens)),
            "token_id": trace.ids.tolist(),
            "token": tokens,
            "sink": [place in sinks for place in range(len(tokens))],
            "caught_by": groups,
        }
    )
    head = head_name(trace.layer, trace.head)
    if chosen:
        why = "chosen because its sinks divide the prompt most evenly, by its attention alone"
        outcome.read("head", f"{head}, {why}")
    outcome.read(f"sinks of {head}", _listed_sinks(trace, tokens))
    for row in places.itertuples():
        judged = f"{DETRENDED} {number(row.beyond_position)}, shifted {number(row.shifted)}"
        explained = f"{number(row.variance_explained)} (at random {number(row.by_chance)}; {judged})"
        outcome.read(f"η² of the grouping by sink: {row.place}", explained)
    judge_places(outcome, trace, places)
    colours = np.stack([rgb(values, grouped).numpy() for values in scores.values()])
    shown, of_shown = (list(itertools.compress(values, grouped)) for values in (tokens, groups))

    def plane(place: int) -> go.Figure:
        return clusters(list(scores.values())[place][grouped].numpy(), of_shown, shown)

    weights = grammar.attention(trace.attention.numpy(), tokens, sinks)
    outcome.draw("attention", weights, head=head, threshold=SINK_THRESHOLD)
    outcome.draw("output", by_dimension(trace.output.numpy(), tokens, sinks), head=head)
    outcome.draw("values", by_dimension(trace.value.numpy(), tokens, sinks), head=head)
    outcome.draw("colours", coloured(colours, list(scores), tokens, sinks))
    outcome.draw("clusters", by_name("place", list(scores), plane, grid=True))
    outcome.draw("received", received(trace.received.numpy(), tokens, sinks))


def coloured(colours: Floats, names: Sequence[str], tokens: Sequence[str], sinks: Sequence[int]) -> go.Figure:
    """Draw one row of tokens per residual layer or head output, coloured (rows, tokens, 3) from 0 to 255."""
    texts = [grammar.token_names(tokens)] * len(names)
    image = {"type": "image", "z": colours, "text": texts, "hovertemplate": "%{text}<extra></extra>"}
    rows = {"tickvals": list(range(len(names))), "ticktext": list(map(for_plotly, names))}
    bare = {"showgrid": False, "zeroline": False}
    layout = {
        "xaxis": grammar.token_axis(tokens, sinks) | bare | {"type": "linear"},
        "yaxis": rows | bare | {"scaleanchor": False},
        "margin": {"l": 150, "b": 100},
    }
    return style.figure([image], height=160 + STRIP * len(names), layout=layout)


def clusters(scores: Floats, groups: Sequence[str], tokens: Sequence[str]) -> go.Figure:
    """Draw tokens on two principal components, (tokens, 2), coloured by their group: the sink that caught them."""
    hover_texts, group_of = np.array(grammar.token_names(tokens)), np.array(groups)
    traces = []
    for name, colour in zip(sorted(set(groups)), itertools.cycle(style.CATEGORIES), strict=False):
        chosen, label = group_of == name, for_plotly(name)
        x, y = scores[chosen, :2].T
        hover = f"%{{text}}<extra>{label}</extra>"
        traces.append(grammar.dots(x, y, hover_texts[chosen], label, colour, hover, marker={"opacity": 0.8}))
    return style.figure(traces, "first component", "second component", height=380)


def received(values: Floats, tokens: Sequence[str], sinks: Sequence[int]) -> go.Figure:
    """Draw the mean attention that each token receives from the strongest head of each block, (blocks, tokens)."""
    hover = "block %{y}, %{x}<br>%{z:.3f}<extra></extra>"
    trace = grammar.heat(values, 0, 1, hover, bar="attention", x=grammar.token_names(tokens))
    across, down = grammar.token_axis(tokens, sinks), grammar.rows_down(len(values))
    layout = {"xaxis": across, "yaxis": down, "margin": {"b": 100}}
    return style.figure([trace], "", "block", height=grammar.map_height(len(values)), layout=layout)


def _places(trace: PromptTrace) -> dict[str, Tensor]:
    """Return the vectors that are coloured, in computing order: before the head, its output, deeper layers."""
    layer = trace.layer
    deeper = [layer + 1 + step for step in evenly(len(trace.streams) - 1 - layer, DEEPER)]
    return {
        f"stream into block {layer}": trace.streams[layer],
        "output of the head": trace.output,
        **{f"stream, layer {later}": trace.streams[later] for later in deeper},
    }


def _sink(position: int, tokens: list[str]) -> str:
    return "the learned column" if position < 0 else f"{position} “{shown_token(tokens[position])}”"


def _listed_sinks(trace: PromptTrace, tokens: list[str]) -> str:
    if not len(trace.sinks):
        return (
            f"none: no key receives more than {SINK_THRESHOLD} of the attention of the queries that see it, "
            "or enough of a span's"
        )
    return "; ".join(
        f"{_sink(int(position), tokens)} catches {counted(int((trace.group == place).sum()), 'token')}"
        for place, position in enumerate(trace.sinks)
    )


def explained_by_place(vectors_at: dict[str, Tensor], group: Tensor, grouped: Tensor) -> pd.DataFrame:
    """Tabulate each place: η², and what a random grouping explains on average.

    beyond_position: η² of the vectors less a quadratic in position, as are the columns after it. shifted: what the same
    grouping, shifted along the prompt, explains on average. gain: beyond_position less that before the head. as_large,
    as_small: of so many shifts of the grouping, those whose gain is.
    """
    of_tokens, position = group[grouped], grouped.nonzero().flatten()
    shifts = [1 + shift for shift in evenly(len(of_tokens) - 1, MOST_SHIFTS)]
    chance, rows = grouping.chance_explained(of_tokens), []
    before: tuple[float, Tensor] | None = None
    for name, vectors in vectors_at.items():
        left = without_trend(vectors[grouped], position)
        beyond = grouping.variance_explained(left, of_tokens)
        shifted = grouping.explained_elsewhere(left, of_tokens, shifts)
        before = before or (beyond, shifted)
        gain, gains = beyond - before[0], shifted - before[1]
        larger, smaller = int((gains >= gain - TIE).sum()), int((gains <= gain + TIE).sum())
        explained = grouping.variance_explained(vectors[grouped], of_tokens)
        elsewhere = float(shifted.mean())
        rows.append((name, explained, chance, beyond, elsewhere, gain, len(shifts), larger, smaller))
    columns = ["place", "variance_explained", "by_chance", "beyond_position", "shifted"]
    return pd.DataFrame(rows, columns=[*columns, "gain", "shifts", "as_large", "as_small"])


def without_trend(
    x: Float[Tensor, "tokens width"], position: Int[Tensor, " tokens"]
) -> Float64[Tensor, "tokens width"]:
    """Subtract the least-squares quadratic in position (1, t, t²); zeros where only rounding is left.

    Runs of tokens and vectors that drift along the prompt go together for no other reason than position, and most where
    the first run begins with the prompt and the last one ends with it, as no shifted grouping does.
    """
    exact, t = x.double(), position.double() / max(1, len(x))
    trend, _ = torch.linalg.qr(torch.stack([t**power for power in range(3)], dim=1))
    left = exact - trend @ (trend.T @ exact)
    rounding = torch.finfo(torch.float64).eps * len(x) * exact.norm()
    return left if left.norm() > rounding else torch.zeros_like(left)


def judge_places(outcome: Outcome, trace: PromptTrace, places: pd.DataFrame) -> None:
    """Judge whether the grouping gains more, from before the head on, than the same runs do elsewhere in the prompt."""
    _, sizes = trace.group[trace.group != LEFT_OUT].unique(return_counts=True)
    shifts, why = int(places["shifts"].iloc[0]), ""
    if not len(trace.sinks):
        why = "the head has no sink on this prompt (name another with --layer and --head)"
    elif int((sizes >= CLUSTER).sum()) < 2 or shifts < LEAST_SHIFTS:
        why = (
            f"{counted(int(sizes.sum()), 'token')} in groups of {', '.join(map(str, sizes.tolist()))}: two groups "
            f"need {CLUSTER} each, and all together {LEAST_SHIFTS + 1}, or chance alone would explain as much; give "
            "a longer prompt"
        )
    tagged = _judged(outcome, "tagged", places, 1, why)
    if not why and tagged.answer != HOLDS:
        why = f"no tags to remain (clusters in the output of the head: {tagged.answer})"
    outcome.verdicts += [tagged, _judged(outcome, "released", places, len(places) - 1, why)]


def _judged(outcome: Outcome, claim: str, places: pd.DataFrame, at: int, why: str) -> Verdict:
    """Judge by a permutation test: all shifts are equally likely where the grouping means nothing, without drift."""
    before, place = places.iloc[0], places.iloc[at]
    if why or not math.isfinite(place["gain"]):
        why = why or "the vectors are all the same, or follow their position alone"
        return untestable(outcome.sentence(claim), why)
    larger, smaller = ((1 + place[name]) / (1 + place["shifts"]) for name in ("as_large", "as_small"))
    levels = {"there": number(place["beyond_position"]), "before": number(before["beyond_position"])}
    values = {"place": place["place"], "gain": number(place["gain"]), "detrended": DETRENDED}
    verdict = outcome.verdict(claim, Estimate.exact(larger), **levels, **values)
    explanation = f"it is as small in {percent(smaller)} of them, so that neither is rare"
    return unless_explained(verdict, FAILS, "" if smaller <= TAIL else explanation)


def _on_prompt(figure: int, prompt: str) -> Experiment:
    @declared(f"sinks/figure{figure}")
    def on_prompt(study: Study, outcome: Outcome) -> None:
        model, focus = study.require_model(), study.focus
        ids = prompt_or_shipped(model, focus.prompt, prompt)
        trace = trace_prompt(model, ids, focus.layer, focus.head)
        show_prompt(outcome, trace, token_texts(model, ids), chosen=focus.layer is None)

    return on_prompt


SHOWN_PROMPTS = {
    2: "few-shot",
    7: "passage",
    8: "step-by-step",
    9: "chain-of-thought",
    10: "step-by-step-2",
    11: "chain-of-thought-2",
}
"""Number of the published figure → prompt."""

PROMPT_SINKS = [_on_prompt(figure, prompt) for figure, prompt in SHOWN_PROMPTS.items()]
