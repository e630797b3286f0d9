"""Every panel of the explorer's page, one value per model, on shared scales: a Plotly figure, or words as HTML."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Int
from torch import Tensor

from theodolite.attention.summary import SINK_THRESHOLD
from theodolite.corpus.corpus import Corpus
from theodolite.corpus.cutting import contexts_of_one_length
from theodolite.errors import TheodoliteError, UsageError, WorkError
from theodolite.estimates import Floats
from theodolite.explore.subject import MOST_TOKENS, Subject, Tags, ids_of_text
from theodolite.measure import head_roles
from theodolite.measure.constituents import MOST_POSITIONS
from theodolite.models import OpenModel, continued
from theodolite.models.guard import measures
from theodolite.passes.corpus_pass import check_fit
from theodolite.passes.run import Run
from theodolite.report import style
from theodolite.report.content import flowing
from theodolite.report.data import entropy_share, evenly
from theodolite.report.drawing import grammar, heads
from theodolite.report.drawing.constituents import qk_panels
from theodolite.report.page import environment, write_page
from theodolite.sinks.prompt import LEFT_OUT, UNCAUGHT, HeadView, head_view, read_prompt
from theodolite.system.choices import wider_than
from theodolite.system.wording import counted, head_name, number, percent, shown_token, visible

_T = TypeVar("_T")
Figures = list[go.Figure | None]

PROMPT, TEXT = "prompt", "text"
MEASURE = f"{PROMPT}:entropy"
"""What the map is coloured by where nothing else is chosen: `prompt:` or `text:`, and a column of heads."""

_ROLES = (head_roles.PREVIOUS_TOKEN, head_roles.SAME_TOKEN, *head_roles.SINK_ROLES)
ON_PROMPT = ("entropy", *(role.column for role in _ROLES))
"""Measures that one prompt gives; the others need a text, random tokens, or the weights."""

# Of tokens: in a column of half a laptop's screen they do not touch.
LABELS: dict[str, Any] = {"labels": 24, "letters": 10}
TILE, TILES_ACROSS, TILE_HEIGHT = 48, 6, 150  # cells of a side of a small map; maps in a row; pixels
ABOVE = {"xanchor": "left", "yanchor": "bottom"}  # a small map's name
LIGHT = 0.179  # relative luminance of a colour on which black and white have the same contrast, 4.6 (WCAG 2)
WHITE, PLUM = np.array([255, 255, 255]), np.array([197, 133, 179])


class Selection(NamedTuple):
    """A head of every model on a prompt, and how it is shown; `measure`: of the map, as `MEASURE`."""

    subjects: Sequence[Subject]
    ids: tuple[int, ...]
    layer: int
    head: int
    measure: str = MEASURE
    log: bool = False

    @property
    def views(self) -> list[HeadView]:
        """The head of every model."""
        return [each.view(self.ids, self.layer, self.head) for each in self.subjects]


def parse_head(name: str) -> tuple[int, int]:
    """Parse `L3H5` as (3, 5); `UsageError` where it is written in another way."""
    if (written := re.fullmatch(r"L?(\d+)H(\d+)", name.strip().upper(), re.ASCII)) is None:
        needed = "write L3H5 for head 5 of block 3, both counted from 0"
        raise UsageError(f"{visible(name, 20)} is not a head: {needed}")
    return int(written[1]), int(written[2])


def measures_of(subjects: Sequence[Subject]) -> list[tuple[str, str]]:
    """List what the map can be coloured by, (label, `prompt:entropy`): without surveys, the prompt's entropy."""
    if not all(subject.is_surveyed for subject in subjects):
        return [("this prompt · entropy", MEASURE)]
    first, *others = ({one.name: one.title for one in heads.head_measures(each.run)} for each in subjects)
    on_text = [name for name in first if all(name in other for other in others)]
    on_prompt = [name for name in ON_PROMPT if name in on_text]
    offered = [(f"this prompt · {first[name]}", f"{PROMPT}:{name}") for name in on_prompt]
    return offered + [(f"the text · {first[name]}", f"{TEXT}:{name}") for name in on_text]


def head_map(at: Selection) -> Figures:
    """Draw the map of all heads by the measure, with the head framed; none where no head has the measure."""
    where, _, column = at.measure.partition(":")
    runs = [each.run if where == TEXT else each.measured(at.ids) for each in at.subjects]
    x, y = at.head, at.layer
    frame = {"type": "rect", "x0": x - 0.5, "x1": x + 0.5, "y0": y - 0.5, "y1": y + 0.5, "layer": "above"}
    try:
        drawn = [heads.head_map(run, column) for run in runs]
    except UsageError:
        return [None] * len(runs)
    for figure in drawn:
        for colour, width in ((style.NEUTRAL, 7), (style.INK, 3)):  # paper around ink is seen on any colour
            figure.add_shape(frame, line={"color": colour, "width": width})
    return share_scales(drawn)


def head(at: Selection) -> list[str]:
    """Show the head's name, roles and evidence."""
    return [head_html(each.run, each.measured(at.ids), at.layer, at.head) for each in at.subjects]


def attention_map(view: HeadView, *, log: bool = False) -> go.Figure:
    """Draw the head's attention, queries down and keys across; colours run to the largest weight that is shown."""
    highest = float(np.nanmax(view.attention, initial=0.0)) or 1.0
    drawn = grammar.attention(
        view.attention, view.tokens, view.sink_positions, highest=highest, log=log, **LABELS
    )
    place = {"constrain": "domain", "automargin": False}  # the map stays where it is when a switch is turned
    drawn.update_xaxes(place, constraintoward="left")
    drawn.update_yaxes(place, constraintoward="top", scaleanchor="x")
    return drawn.update_layout(height=560, margin={"l": 84, "r": 8, "t": 8, "b": 84})


def attention(at: Selection) -> Figures:
    """Draw the head's attention map."""
    return share_scales([attention_map(view, log=at.log) for view in at.views])


def next_tokens(at: Selection) -> list[str]:
    """Show what the model says next, and what it would say without the head."""

    def shown(each: Subject) -> str:
        table = each.next_tokens(*at[1:4])
        rows = [(shown_token(token), map(percent, shares)) for token, *shares in table.itertuples()]
        return html("next_tokens", list(table), rows)

    return _shown_or_why(shown, at)


def block_heads(at: Selection) -> Figures:
    """Draw the attention of all heads of the block side by side, each named; click one to show it."""
    return share_scales([_tiles(each.attention(at.ids, at.layer).numpy(), at) for each in at.subjects])


def _tiles(weights: Floats, at: Selection) -> go.Figure:
    """Draw the maps of the heads (H, T, T) on one pair of axes, each cell the largest weight that falls into it."""
    starts = evenly(weights.shape[-1], TILE)
    small = np.maximum.reduceat(np.maximum.reduceat(weights, starts, axis=1), starts, axis=2)
    small = np.where(np.tri(len(starts), dtype=bool) | (small > 0), small, np.nan)
    across, pitch = min(TILES_ACROSS, len(small)), len(starts) * 1.18
    traces, names = [], []
    for head, of_head in enumerate(small):
        left, top = pitch * (head % across), pitch * (head // across) * 1.12
        name, place = head_name(at.layer, head), np.arange(len(starts))
        hover = f"{name}: %{{z:.2f}}<extra></extra>"
        traces.append(grammar.heat(of_head, 0, 1, hover, x=left + place, y=top + place, name=name))
        look = {"size": 12, "color": style.PREDICTED if head == at.head else style.INK}
        words = f"<b>{name}</b>" if head == at.head else name
        names.append({"x": left, "y": top - 1, "text": words, "font": look, "showarrow": False} | ABOVE)
    rows = -(-len(small) // across)
    bare = {"showticklabels": False, "ticks": "", "showgrid": False, "zeroline": False, "showline": False}
    layout = {
        "xaxis": bare | {"constrain": "domain"},
        "yaxis": bare | {"autorange": "reversed", "scaleanchor": "x", "constrain": "domain"},
        "annotations": names,
        "margin": {"l": 8, "r": 8, "t": 24, "b": 8},
    }
    return style.figure(traces, height=40 + TILE_HEIGHT * rows, layout=layout)


def sinks(at: Selection) -> list[str]:
    """Show the tokens with their sinks."""
    views = at.views
    most = max((float(value) for view in views for value in view.received if value > 0), default=1.0)
    return [sinks_html(view, most) for view in views]


def tags(at: Selection) -> list[str]:
    """Show the tokens in the colours of what the head writes."""
    return _shown_or_why(lambda each: tags_html(each.view(*at[1:4]), each.tags(*at[1:4])), at)


def _shown_or_why(show: Callable[[Subject], str], at: Selection) -> list[str]:
    """Show something of each model, or say why it cannot be shown."""
    return [
        html("line", f"Cannot be shown: {visible(each)}.") if isinstance(each, TheodoliteError) else each
        for each in _tried(show, at)
    ]


def constituents(at: Selection) -> Figures:
    """Draw the head's constituents, their sum and its attention: of a long prompt the last positions."""
    first = max(1, len(at.ids) - MOST_POSITIONS)

    def draw(each: Subject) -> go.Figure:
        split = each.constituents(at.ids, at.layer)
        return qk_panels(split, at.head, each.read(at.ids).tokens, first=first)

    drawn = [figure if isinstance(figure, go.Figure) else None for figure in _tried(draw, at)]
    share_scales([figure for figure in drawn if figure])
    return drawn


def not_split(at: Selection) -> list[str]:
    """Say why there are no constituents; empty where there are."""
    split = _tried(lambda each: each.constituents(at.ids, at.layer), at)
    reasons = [visible(each) if isinstance(each, TheodoliteError) else "" for each in split]
    return [html("line", reason and f"The logits cannot be decomposed: {reason}") for reason in reasons]


def _tried(work: Callable[[Subject], _T], at: Selection) -> list[_T | TheodoliteError]:
    """Do `work` for each model: the results, or why there is none."""
    results: list[_T | TheodoliteError] = []
    for each in at.subjects:
        try:
            results.append(work(each))
        except TheodoliteError as error:
            results.append(error)
    return results


def share_scales(drawn: list[go.Figure]) -> list[go.Figure]:
    """Give figures of several models, alike but for their numbers, the same ends of colours."""
    for figure in drawn:  # on a dark page, too, colours are those of light paper
        figure.update_layout(paper_bgcolor=style.NEUTRAL)
    if len(drawn) < 2:
        return drawn
    for name in ("coloraxis", "coloraxis2"):
        _share([figure.layout[name] for figure in drawn if name in figure.layout], "c")
    _share([trace for figure in drawn for trace in figure.select_traces({"type": "heatmap"})], "z")
    return drawn


def _share(scales: Sequence[Any], letter: str) -> None:
    """Give colour scales the same ends, with the ticks of the one that goes farthest."""
    low, high = f"{letter}min", f"{letter}max"
    scales = [scale for scale in scales if scale[high] is not None]
    if not scales:
        return
    lowest, widest = min(scale[low] for scale in scales), max(scales, key=lambda scale: scale[high])
    for scale in scales:
        scale.update({low: lowest, high: widest[high], "colorbar": widest.colorbar})


def html(macro: str, *values: object) -> str:
    """Fill one macro of the explorer's template; its values are escaped."""
    return str(getattr(environment().get_template("explore.html.j2").module, macro)(*values)).strip()


def evidence(
    run: Run, measured: Run, layer: int, head: int
) -> list[tuple[head_roles.HeadRole, float, float, bool]]:
    """List role, score on the text, on the prompt (NaN: none), and whether the head has it; first those that it has."""

    def scores(of: Run) -> pd.Series:
        heads = of.heads.assign(entropy_share=entropy_share(of)).set_index(["layer", "head"])
        return heads.loc[(layer, head)].reindex([role.column for role in head_roles.ROLES]).astype(float)

    rows = []
    for role, text, prompted in zip(head_roles.ROLES, scores(run), scores(measured), strict=True):
        score = prompted if math.isnan(text) else text
        if not math.isnan(score) and (role is not head_roles.LEARNED_SINK or text or prompted):
            rows.append((role, text, prompted, score >= role.threshold))
    return sorted(rows, key=lambda row: not row[-1])


def head_html(run: Run, measured: Run, layer: int, head: int) -> str:
    """Show the head's name, and its roles with the evidence."""
    rows = evidence(run, measured, layer, head)
    names = ", ".join(role.title for role, _, _, has_it in rows if has_it) or "no named role"
    return html("head", head_name(layer, head), names, rows, functools.partial(number, digits=2))


def sinks_html(view: HeadView, most: float) -> str:
    """Show the prompt's tokens, shaded by the attention that they receive up to `most`; and each sink in a sentence."""
    shades, learned = np.nan_to_num(view.received)[:, None] / most, view.learned.mean()
    lines = [
        f"White to plum: mean attention from the tokens that see it, 0 to {number(most, 2)}. ▼1: a sink. "
        "Small number: the sink that caught the token."
    ]
    lines += [sink_sentence(view, index) for index in range(len(view.sinks))]
    uncaught = f"{(view.group == UNCAUGHT).sum()} of the other tokens are caught by no sink"
    none = f"No sink: no token receives more than {SINK_THRESHOLD}, or dominates a contiguous span"
    lines.append(uncaught if view.sinks else none)
    if learned > 0:
        lines.append(f"{learned:.2f} of the attention goes to a learned sink column, which is no token's")
    return html("tokens", _tokens(view, WHITE + shades * (PLUM - WHITE)), lines)


def tags_html(view: HeadView, tags: Tags) -> str:
    """Show the tokens in the colours of what the head writes; and how far the sinks explain it."""
    shares = [percent(share) for share in (tags.explained, tags.before, tags.chance)]
    key = "Similar colours mean similar outputs: three principal components as red, green and blue."
    explained = (
        "The grouping by sink explains {} of the variance of the head's output (η²) and {} of that of the stream that "
        "enters the block; a random grouping would explain {}."
    ).format(*shares)
    if math.isnan(tags.explained):
        explained = "No sink groups these tokens, so there is no tag to measure."
    return html("tokens", _tokens(view, tags.colours), [key, explained])


def sink_sentence(view: HeadView, index: int) -> str:
    """Word a sink: its mark, and what it receives and catches."""
    sink = view.sinks[index]
    token = f"token {sink.position} “{shown_token(view.tokens[sink.position])}”"
    local = " (a local sink: it dominates a contiguous span)" if sink.local else ""
    return (
        f"▼{index + 1} {'the learned column' if sink.position < 0 else token} receives {sink.received:.2f} of the "
        f"attention on average and catches {counted(sink.caught, 'token')}{local}"
    )


def _tokens(view: HeadView, colours: Floats) -> list[dict[str, Any]]:
    """Return the tokens as the template shows them, each on its colour (T, 3)."""
    number_of = {sink.position: index for index, sink in enumerate(view.sinks, 1)}
    share = np.asarray(colours) / 255  # the luminance of a colour, relative to white's, is WCAG 2's
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    inks = np.where(linear @ (0.2126, 0.7152, 0.0722) >= LIGHT, "#000", "#fff")
    tokens = []
    for place, (colour, group, received) in enumerate(zip(colours, view.group, view.received, strict=True)):
        is_seen = "seen by too few tokens" if math.isnan(received) else f"receives {received:.3f}"
        look: dict[str, Any] = {
            "sink": number_of.get(place),
            "caught": 0 if group in (UNCAUGHT, LEFT_OUT) else int(group) + 1,
            "colour": [round(float(channel)) for channel in colour],
            "ink": inks[place],
            "hint": f"{place}: {shown_token(view.tokens[place])} · {is_seen}",
        }
        tokens.append(flowing(view.tokens[place]) | look)
    return tokens


@dataclass(frozen=True, eq=False)
class HeadFigure:
    """One head on one prompt; a notebook shows it as it is.

    `view` has the numbers: tokens, attention (T, T), sinks, what each token receives. `written`: how many of the last
    tokens the model wrote.
    """

    model: str
    view: HeadView
    written: int = 0

    def __repr__(self) -> str:
        name = head_name(self.view.layer, self.view.head)
        return f"HeadFigure of {name} of {self.model} on {len(self.view.tokens)} tokens"

    @property
    def figure(self) -> go.Figure:
        """The head's attention as a Plotly figure, its sinks in the note."""
        view, title = self.view, f"{head_name(self.view.layer, self.view.head)} of {visible(self.model, 80)}"
        sinks = "; ".join(sink_sentence(view, index) for index in range(len(view.sinks))) or "No sink"
        written = f" The last {counted(self.written, 'token')} the model wrote." if self.written else ""
        return style.standalone(attention_map(view), title, f"{sinks}.{written}").update_layout(width=760)

    def _repr_mimebundle_(self, *args: Any, **more: Any) -> Any:
        return self.figure._repr_mimebundle_(*args, **more)

    def save(self, path: str | Path) -> Path:
        """Write the figure as a page that opens offline, and return its path; `WorkError`: it cannot be written."""
        return write_page(Path(path), self.figure.to_html(include_plotlyjs=True))


@measures("model")
def view_head(
    model: OpenModel,
    text: str | Sequence[int] | Int[Tensor, " positions"],
    layer: int,
    head: int,
    *,
    generate: int = 0,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> HeadFigure:
    """Draw one head's attention on a prompt, as a figure for a notebook.

    Args:
        model: from `open_model`.
        text: the prompt, from 4 to 512 tokens, read with the tokenizer's special tokens; or token ids, as they are.
        generate: tokens that the model writes behind the prompt, the most probable each time, which are read with it.
        attention_mask, position_ids: of padded ids, as `Corpus.from_ids` takes them.

    Raises:
        UsageError: no such layer or head, or a prompt that the model cannot read, or continue.
        WorkError: attention became NaN or infinite.
    """
    ids = torch.as_tensor(ids_of_text({model.id: model}, text) if isinstance(text, str) else text)
    if attention_mask is not None or position_ids is not None:
        ids = contexts_of_one_length(ids, attention_mask, position_ids).squeeze(0)
    prompt_alone = Corpus.from_ids(ids)
    check_fit(model, prompt_alone, least_contexts=1)
    if ids.ndim != 1 or len(ids) + generate > MOST_TOKENS:
        raise UsageError(
            f"token ids of shape {tuple(ids.shape)}: give those of one prompt, {MOST_TOKENS} at most"
            + (f" with the {generate} that are written" if generate else "")
        )
    model.check_place(layer, head)
    if generate:
        ids = continued(model, prompt_alone, generate).contexts[0]
    view = head_view(read_prompt(model, ids), layer, head)
    if not np.isfinite(view.attention).any(axis=1).all():
        wider = wider_than(model.source.dtype)
        raise WorkError(f"attention holds NaN or infinite values on this prompt: {wider}")
    return HeadFigure(model.id, view, generate)
