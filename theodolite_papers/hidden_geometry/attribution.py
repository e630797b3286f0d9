"""Split logits by constituent: what makes a head's pattern (section 5.2), what is largest (eq. 10), and on a prompt.

Figs. 6, 19 and 30 to 34 of Song & Zhong 2024, and what the global mean does to them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float64, Int
from torch import Tensor

from theodolite import Run, constituents
from theodolite.errors import UsageError, WorkError
from theodolite.estimates import Floats
from theodolite.judging import untestable
from theodolite.logits.attribution import repeated_patterns, repeated_sequences
from theodolite.measure.attribution import ATTRIBUTED, attribute
from theodolite.measure.constituents import (
    ADDITIVE,
    DISJOINT,
    MOST_POSITIONS,
    Constituents,
    HeadMatrix,
    head_matrices,
    paired_groups,
)
from theodolite.measure.head_roles import ATTENTION_PATTERNS, STRONG
from theodolite.measure.position import CUTOFFS
from theodolite.models.texts import REPEATED, prompt_ids, token_texts
from theodolite.models.weights.head_weights import HeadWeights, no_head_matrix
from theodolite.report import style
from theodolite.report.data import attributed, blocks, evenly, heads_per_block, provenance
from theodolite.report.drawing.constituents import GROUP_COLOURS, qk_panels
from theodolite.report.drawing.grammar import Panel, bars, panels
from theodolite.system.wording import counted, head_name, listed, number, percent
from theodolite.theory.decomposition import PARTS
from theodolite_papers import drawing
from theodolite_papers.experiment import Outcome, Study, by_name, criterion, declared
from theodolite_papers.hidden_geometry import layer_columns
from theodolite_papers.hidden_geometry.layer_columns import Basis, bases_by_group, unless_hidden
from theodolite_papers.hidden_geometry.smoothness import of_an_adder

TIMES_UNIFORM = 2.0  # a head follows what gets `STRONG` of its attention, so many times uniform (ours)
RETAINS = criterion("geometry/retains")
REFUSALS_SHOWN = 2


@dataclass(frozen=True)
class PatternClaim:
    """The paper's claim on one of `ATTENTION_PATTERNS`, and where in Fig. 6.

    `strict`: the paper's constituent; `group`: the same with the pairs of a mean or bias.
    """

    name: str
    title: str
    tokens: str
    side: str
    strict: str
    group: str


CLAIMS = [
    PatternClaim("same", "identical tokens", "identical tokens", "left", "cvec-cvec", "context"),
    PatternClaim("previous", "the previous token", "neighbouring tokens", "middle", "pos-pos", "position"),
    PatternClaim("induction", "shifted tokens", "shifted tokens", "right", "cvec-cvec", "context"),
]


@dataclass(frozen=True)
class Head:
    """One attributed head and pattern. `groups`: index group; columns share, kept, left.

    kept, left: what is left of the score's excess over uniform attention with this group only, and without it.
    """

    layer: int
    head: int
    score: float
    uniform: float
    groups: pd.DataFrame

    @property
    def follows(self) -> bool:
        """True if the head has the pattern at all."""
        return self.score >= STRONG and self.score >= TIMES_UNIFORM * self.uniform

    @property
    def strongest(self) -> str:
        """The group that keeps most of the pattern by itself, of those that share nothing."""
        return str(self.groups.loc[[*DISJOINT, "additive"], "kept"].idxmax())

    def summary(self, group: str) -> str:
        """Summarise the head's numbers in a line."""
        scores = f"(score {number(self.score)}, uniform attention {number(self.uniform)})"
        evidence = f"{head_name(self.layer, self.head)} {scores}"
        if not self.follows:
            return evidence
        kept, left, share = map(percent, self.groups.loc[group, ["kept", "left", "share"]])
        evidence += f": {group} alone retains {kept}, ablating it leaves {left}, "
        evidence += f"its share of the logits' variance is {share}"
        if self.strongest != group:
            evidence += f"; {self.strongest} alone retains {percent(self.groups.loc[self.strongest, 'kept'])}"
        return evidence


def retained(attributed: pd.DataFrame) -> pd.DataFrame:
    """Add `kept` and `left`, as of `Head`, to the table; NaN where the score is no more than uniform attention."""
    uniform = attributed["uniform"]
    excess = (attributed["score"] - uniform).where(attributed["score"] > uniform)
    return attributed.assign(
        kept=(attributed["only"] - uniform) / excess, left=(attributed["without"] - uniform) / excess
    )


def attributed_heads(run: Run, pattern: str) -> list[Head]:
    """List the attributed heads of a pattern, those that follow it most first."""
    heads = []
    for rows in attributed(run, pattern):
        groups = retained(rows).set_index("group")[["share", "kept", "left"]].astype(np.float64)
        layer, head, score, uniform = rows.iloc[0][["layer", "head", "score", "uniform"]]
        heads.append(Head(int(layer), int(head), float(score), float(uniform), groups))
    return heads


def judge_pattern(outcome: Outcome, pattern: PatternClaim, heads: list[Head]) -> None:
    """Judge a pattern's claims, the paper's and ours, on all heads that follow it: one head alone decides nothing."""
    followers = [head for head in heads if head.follows]
    words: dict[str, Any] = {"tokens": pattern.tokens, "side": pattern.side}
    if not followers:
        highest = f"the highest score is that of {heads[0].summary(pattern.strict)}" if heads else ""
        best = highest or "0 heads attributed"
        asked = f"at least {STRONG:g} and {TIMES_UNIFORM:g} times uniform attention is required of such a head (ours)"
        outcome.cannot_judge("pattern.strict", f"{best}; {asked}", group=pattern.strict, **words)
        return
    for claim, group in (("pattern.strict", pattern.strict), ("pattern.group", pattern.group)):
        kept = np.array([head.groups.loc[group, "kept"] for head in followers])
        strongest = np.array([head.strongest == pattern.group for head in followers])
        enough = (strongest & RETAINS.met(kept)).tolist()  # and no other group keeps more
        words |= {"group": group, "kept": percent(float(kept.mean())), "best": followers[0].summary(group)}
        words |= {"found": len(followers), "attributed": len(heads), "strong": STRONG, "times": TIMES_UNIFORM}
        outcome.judge(claim, enough, **words)


PANELS = 6  # heads of one pattern that are drawn; the table has them all
PANEL, TITLE = 128, 22  # pixels of one panel with its title, and of its title
STANDS_OUT = 2.0  # times what uniform attention pays: a head follows the pattern, if weakly


def pattern_panels(run: Run, pattern: str) -> go.Figure:
    """Draw attention along a pattern by its strongest heads: from one group of constituents alone, and with it ablated.

    One panel per head that stands out, the strongest first; where none does, the strongest, and none for none. Lines:
    the score as it is (solid) and of uniform attention (dotted).
    """
    every = attributed(run, pattern)
    stands_out = [rows["score"].iloc[0] >= STANDS_OUT * rows["uniform"].iloc[0] for rows in every]
    heads = [*itertools.compress(every, stands_out)][:PANELS] or every[:1]
    rows = pd.concat(heads)
    if not (rows.loc[rows["group"] == ADDITIVE, "share"].abs() > 0).any():
        heads = [of_head[of_head["group"] != ADDITIVE] for of_head in heads]
    end = 1.06 * float(rows[["score", "only", "without"]].to_numpy().max())
    last = len(heads) - 1
    drawn = [_attribution_panel(of_head, end, n == 0, n == last) for n, of_head in enumerate(heads)]
    gap = TITLE / (PANEL * len(heads))
    layout = {"barmode": "group", "bargap": 0.28, "margin": {"l": 84, "r": 12, "b": 44}}
    return panels(drawn, 1, height=PANEL, gaps=(0, gap), layout=layout | {"legend": {"traceorder": "normal"}})


def _attribution_panel(rows: pd.DataFrame, end: float, first: bool, last: bool) -> Panel:
    """Draw one head's bars, its score and that of uniform attention; `end` of the axis of scores, named in the last."""
    drawn = [
        bars(
            rows[name],
            rows["group"].tolist(),
            label,
            colour,
            f"%{{y}}<br>{label}: %{{x:.3f}}<br>%{{customdata:.1%}} of the logits' variance<extra></extra>",
            customdata=rows["share"].to_numpy(dtype=np.float32),
            orientation="h",
            legendgroup=name,
            showlegend=first,
        )
        for name, label, colour in (("only", "alone", style.MEASURED), ("without", "ablated", style.SKY))
    ]
    layer, head, score, uniform = rows.iloc[0][["layer", "head", "score", "uniform"]]
    return Panel(
        head_name(int(layer), int(head)),
        drawn,
        "mean attention along the pattern" if last else "",
        xaxis={"range": [0, end], "showticklabels": last, "ticks": "outside" if last else ""},
        yaxis={"autorange": "reversed", "ticks": "", "showgrid": False, "dtick": 1, "tickfont": {"size": 11}},
        # Short, since a panel may be as narrow as a phone and Plotly cuts what is longer.
        note=f"{number(score, 2)}, uniform {number(uniform, 2)}",
        marks=[
            (float(score), {"width": 1.6, "color": style.GREY}),
            (float(uniform), {"width": 1.2, "dash": "dot", "color": style.GREY}),
        ],
    )


@declared("geometry/attribution")
def attribution(study: Study, outcome: Outcome) -> None:
    run = study.run
    for pattern in CLAIMS:
        heads = attributed_heads(run, pattern.name)
        followers = [head for head in heads if head.follows]
        top = f"; highest score {number(heads[0].score)}" if heads else ""
        outcome.read(f"heads that attend to {pattern.title}", f"{len(followers)}{top}")
        judge_pattern(outcome, pattern, heads)
        if heads:
            drawn = pattern_panels(run, pattern.name)
            target = ATTENTION_PATTERNS[pattern.name].target
            values = {"title": pattern.title, "target": target, "group": pattern.group}
            outcome.draw(pattern.name, drawn, "pattern", **values)
    read_refusals(outcome, run)
    outcome.tables["attribution"] = retained(run.attribution)


def read_refusals(outcome: Outcome, run: Run) -> None:
    """Report layers that could not be split, with the reason."""
    if refused := provenance(run, "constituents_refused"):
        reasons = "; ".join([*refused.values()][:REFUSALS_SHOWN])
        outcome.read("layers whose logits cannot be split", f"{len(refused)}: {reasons}")


def share_grids(run: Run) -> dict[str, Floats]:
    """Group → share of logit variance of every head, (L, H); NaN where a layer could not be split."""
    table = run.constituents
    sides = list(zip(table["query"], table["key"], strict=True))
    grids = {}
    for group in ATTRIBUTED:
        members = {(PARTS[a], PARTS[b]) for a, b in paired_groups().get(group, [])} or {("additive", "")}
        inside = table[[side in members for side in sides]]
        shares = inside.groupby(["layer", "head"])["share"].sum(min_count=1).unstack()
        every = shares.reindex(index=range(blocks(run)), columns=range(heads_per_block(run)))
        grids[group] = every.to_numpy(dtype=np.float64, copy=True)
    return grids


def _largest(grids: dict[str, Floats]) -> dict[str, list[bool]]:
    """Group → whether it is the largest, of every head that could be split."""
    stacked = np.stack(list(grids.values())).reshape(len(grids), -1)
    stacked = stacked[:, np.isfinite(stacked).all(axis=0)]
    winners = stacked.argmax(axis=0)
    return {group: (winners == place).tolist() for place, group in enumerate(grids)}


@declared("geometry/constituents")
def constituent_shares(study: Study, outcome: Outcome) -> None:
    run = study.run
    grids = share_grids(run)
    if not np.nan_to_num(grids["additive"]).any():
        del grids["additive"]
    apart = {group: grid for group, grid in grids.items() if group in (*DISJOINT, "additive")}
    # The paper's own constituents, and all pairs with a mean or a bias as one group of their own.
    of_the_paper = ("pos-pos", "cvec-cvec", "cross", "additive")
    strict = {name: grid for name, grid in grids.items() if name in of_the_paper}
    strict["mean or bias"] = np.sum(list(apart.values()), axis=0) - np.sum(list(strict.values()), axis=0)
    largest, largest_strict = _largest(apart), _largest(strict)
    heads = int(np.isfinite(grids["position"]).sum())
    means = {group: float(np.nanmean(grid)) for group, grid in grids.items()}
    for group in grids:
        named, shown = f"{group}: mean share of logit variance", percent(means[group])
        if group in apart:
            named += "; largest in"
            shown += f"; {percent(float(np.mean(largest[group])))} of the heads"
        outcome.read(named, shown, "“important, often dominant”" if group == "pos-pos" else "")
    read_refusals(outcome, run)
    for claim, group, wins in (("dominant", "pos-pos", largest_strict), ("ours", "position", largest)):
        words = {"heads": counted(heads, "head"), "group": group, "share": percent(means[group])}
        outcome.judge(claim, wins[group], limit=1 / len(wins), groups=len(wins), **words)
    places = product(range(blocks(run)), range(heads_per_block(run)))
    by_head = pd.DataFrame(places, columns=["layer", "head"])
    outcome.tables["shares"] = by_head.assign(**{group: grid.ravel() for group, grid in grids.items()})

    def draw(place: int) -> go.Figure:
        return drawing.head_values(list(grids.values())[place], "share of logit variance")

    outcome.draw("shares", by_name("group", list(grids), draw, grid=True), groups=listed([*apart]))
    bars_shown = [
        bars(
            np.arange(blocks(run)),
            pd.DataFrame(grid).mean(axis=1).to_numpy(),
            group,
            GROUP_COLOURS[group],
            f"layer %{{x}}<br>{group}: %{{y:.3f}}<extra></extra>",
        )
        for group, grid in apart.items()
    ]
    axis = {"zeroline": False} | style.every_tick(blocks(run))
    layout = {"barmode": "relative", "bargap": 0.25, "xaxis": axis}
    drawn = style.figure(bars_shown, "layer", "mean share of logit variance", height=340, layout=layout)
    outcome.draw("by-layer", drawn)


SHOWN_HEADS, SHOWN_LAYERS, SHOWN_POSITIONS = 12, 13, 64  # evenly chosen where there are more


def positional_logits(
    p: Basis, weights: HeadWeights, heads: list[int], shown: list[int]
) -> Float64[Tensor, "heads shown shown"]:
    """Average P_g W P_hᵀ over pairs of different groups, W = W_q W_kᵀ · scaling; of one group alone, P W Pᵀ."""
    w_q, w_k = (each[heads].double().cpu() for each in (weights.w_q, weights.w_k))
    query, key = (torch.einsum("gtd,hde->hgte", p[:, shown], each) for each in (w_q, w_k))
    whole = query.sum(dim=1) @ key.sum(dim=1).mT
    if len(p) > 1:
        whole = (whole - (query @ key.mT).sum(dim=1)) / (len(p) * (len(p) - 1))
    return whole * weights.scaling


@declared("geometry/figure19")
def figure_19(study: Study, outcome: Outcome) -> None:
    run, model = study.run, study.require_model()
    basis = run.arrays["positional_basis"][:, 1:].double()
    positions, heads = basis.shape[1], evenly(model.heads, SHOWN_HEADS)
    shown, bases = evenly(positions, SHOWN_POSITIONS), bases_by_group(study) or list(basis[:, None])
    tiles, refused = {}, {}
    for block in evenly(model.layers, SHOWN_LAYERS):
        try:
            logits = positional_logits(bases[block], model.head_weights(block), heads, shown)
        except WorkError as error:
            refused[block] = str(error)
            continue
        tiles[f"block {block}"] = drawing.positional_tiles(logits.numpy())
    if not tiles:
        raise no_head_matrix(model.id)
    with_weights = run.heads[run.heads["frobenius_squared"].notna()]
    shares = with_weights["pwp_low_frequency_10"].to_numpy(np.float64)
    what = "share of energy at K = 10 of PWPᵀ, median over heads"
    outcome.read(what, number(float(pd.Series(shares).median())), "“visibly discontinuous”")
    if refused:
        outcome.read("blocks without a query-key matrix", f"{len(refused)}: {next(iter(refused.values()))}")
    judge_rough(outcome, study, shares, positions)
    columns = [f"pwp_low_frequency_{k}" for k in CUTOFFS]
    outcome.tables["smoothness"] = run.heads[["layer", "head", *columns]]
    names, pictures = [f"head {head}" for head in heads], list(tiles.values())
    drawn = by_name("block", [*tiles], lambda place: drawing.weight_maps(pictures[place], names, len(shown)))
    outcome.draw("positional-logits", drawn)


def judge_rough(outcome: Outcome, study: Study, shares: Floats, positions: int) -> None:
    """Judge the shares of low frequencies of heads, where the model was trained on addition: of most of the heads."""
    hidden = np.isnan(shares)
    known = shares[~hidden]
    median = f"share of energy at K = 10 of PWPᵀ, median of {counted(len(known), 'head')}"
    median += f": {number(float(pd.Series(known).median()))}"
    rough, words = criterion("geometry/unlike-language"), {"median": median, "chance": (10 / positions) ** 2}
    verdict = outcome.verdict("rough", rough.met(known).tolist(), most=number(rough.limit), **words)
    verdict = unless_hidden(verdict, hidden, "head")
    if positions < layer_columns.LEAST_UNSMOOTH_POSITIONS:
        verdict = untestable(verdict.claim, f"{positions} positions have only {positions} frequencies")
    outcome.verdicts.append(of_an_adder(study.model, study.run, verdict, median))


MEAN_WITH_POSITION: Mapping[str, tuple[str, ...]] = {
    "constant": ("bias",),
    "pos": ("mean", "pos"),
    "cvec": ("ctx", "resid"),
}
"""The split with P̃ = pos + μ in place of pos (appendix D.2)."""

ChosenHeads = dict[tuple[int, int], list[PatternClaim]]
"""(layer, head) → the patterns that it follows most of all heads; none for a head that was named."""


def _top_heads(run: Run) -> dict[str, list[Head]]:
    return {pattern.name: attributed_heads(run, pattern.name) for pattern in CLAIMS}


def _chosen(study: Study, top: dict[str, list[Head]]) -> ChosenHeads:
    """Choose the head that is asked for, or the ones that follow the patterns most."""
    focus = study.focus
    if focus.layer is not None and focus.head is not None:
        return {(focus.layer, focus.head): []}
    chosen: ChosenHeads = {}
    for pattern in CLAIMS:
        for head in top[pattern.name][:1]:
            chosen.setdefault((head.layer, head.head), []).append(pattern)
    if not chosen:
        raise UsageError("this run has no attributed heads to choose from: name one with --layer and --head")
    return chosen


def _split(study: Study, ids: Tensor, layer: int, head: int) -> Constituents:
    model = study.require_model()
    model.check_place(layer, head)
    try:
        return constituents(model, ids, layer, decomposition=study.run)
    except WorkError as error:
        raise UsageError(f"{error}; choose another --layer") from error


def _prompt_tokens(study: Study) -> tuple[Int[Tensor, " positions"], list[str]]:
    model = study.require_model()
    longest = study.run.arrays["positional_basis"].shape[1]
    ids = prompt_ids(model, study.focus.prompt, longest, study.provenance["seed"])
    return ids, token_texts(model, ids)


def _panel_caption(study: Study, length: int) -> str:
    """Describe what the panels show, for their captions."""
    kind = "of random tokens, twice" if study.focus.prompt is None else "of the prompt"
    shown = f"; the first {MOST_POSITIONS} of them" if length - 1 > MOST_POSITIONS else ""
    caption = f"Logits {kind}, {length} tokens, position 0 left out{shown}. "
    if study.provenance["model"].get("positions") == "rotary":
        caption += (
            "This family rotates queries and keys, so relative position is within every panel, constant too: "
        )
        caption += "there the rotated mean and biases differ by distance. "
    return caption


def _tables(ids: Tensor, tokens: list[str], panels: dict[str, list[HeadMatrix]]) -> dict[str, pd.DataFrame]:
    shares = [
        {"panels": name} | {panel.name: panel.share for panel in of_head if np.isfinite(panel.share)}
        for name, of_head in panels.items()
    ]
    prompt = {"position": range(len(tokens)), "token_id": ids.tolist(), "token": tokens}
    return {"shares": pd.DataFrame(shares), "prompt": pd.DataFrame(prompt)}


@declared("geometry/figure6")
def figure_6(study: Study, outcome: Outcome) -> None:
    ids, tokens = _prompt_tokens(study)
    top = _top_heads(study.run)
    panels = {}
    for (layer, head), followed in _chosen(study, top).items():
        split = _split(study, ids, layer, head)
        name = head_name(layer, head)
        panels[name] = head_matrices(split, head)
        largest = sorted(panels[name][:-2], key=lambda panel: -panel.share)[:2]
        named = ", ".join(f"{panel.name} {percent(panel.share)}" for panel in largest)
        outcome.read(f"{name}: largest shares of the logits' variance on this prompt", named)
        most = [f"{pattern.title} ({number(top[pattern.name][0].score)})" for pattern in followed]
        title = f"{name}: attends most to {listed(most)}" if most else name
        drawn, prompt = qk_panels(split, head, tokens), _panel_caption(study, len(tokens))
        outcome.draw(name, drawn, "head", title=title, prompt=prompt)
    read_refusals(outcome, study.run)
    for pattern in CLAIMS:
        judge_pattern(outcome, pattern, top[pattern.name])
    outcome.tables |= _tables(ids, tokens, panels)


def _judge_mean(outcome: Outcome, run: Run) -> None:
    """Judge whether the largest of the four constituents stays the largest when μ is counted as positional."""
    table = run.constituents
    if not len(table):
        outcome.cannot_judge("unchanged", "this run has no constituent shares: survey the model again")
        return
    winners = []
    for pos in (("pos",), ("mean", "pos")):
        sides = dict.fromkeys(pos, "pos") | {"ctx": "cvec", "resid": "cvec"}
        grouped = table.assign(q=table["query"].map(sides), k=table["key"].map(sides))
        grouped = grouped.dropna(subset=["q", "k"])
        sums = grouped.groupby(["layer", "head", "q", "k"])["share"].sum(min_count=1).unstack(["q", "k"])
        winners.append(sums.dropna().idxmax(axis=1))
    same = winners[0] == winners[1]
    with_mean = (table["query"] == "mean") | (table["key"] == "mean")
    carried = table[with_mean].groupby(["layer", "head"])["share"].sum().mean()
    words = {"heads": counted(len(same), "head"), "carried": percent(float(carried))}
    outcome.judge("unchanged", same.tolist(), **words)


def _retained_rows(study: Study, layer: int, head: int) -> list[dict[str, Any]]:
    """Measure what each group alone keeps of each pattern on short repeated sequences, with μ apart, and within pos."""
    longest = min(REPEATED, study.run.arrays["positional_basis"].shape[1])
    ids, patterns = repeated_patterns(
        study.require_model(), longest, repeated_sequences(longest), study.provenance["seed"]
    )
    if not patterns:
        return []
    split = _split(study, ids, layer, head)
    inputs = split.inputs.of_heads([head])
    inputs = replace(inputs, query=inputs.query.double(), key=inputs.key.double())
    mean, pos = PARTS.index("mean"), PARTS.index("pos")
    rows: list[dict[str, Any]] = []
    for within_pos in (False, True):
        query, key = split.query[:, :, [head]].clone(), split.key[:, :, [head]].clone()
        for side in (query, key) if within_pos else ():
            side[pos] += side[mean]
            side[mean] = 0
        attributed = attribute(query, key, inputs, patterns)
        for place, pattern in enumerate(patterns):
            score, uniform = float(attributed.score[place, 0]), float(attributed.uniform[place, 0])
            excess = score - uniform if score > uniform else math.nan
            rows += [
                {"layer": layer, "head": head, "pattern": pattern.name, "score": score, "uniform": uniform}
                | {"mean": "within pos" if within_pos else "apart", "group": group}
                | {"kept": (float(attributed.only[index, place, 0]) - uniform) / excess}
                for index, group in enumerate(ATTRIBUTED)
            ]
    return rows


@declared("geometry/figure30")
def figure_30(study: Study, outcome: Outcome) -> None:
    ids, tokens = _prompt_tokens(study)
    panels, rows = {}, []
    chosen = _chosen(study, _top_heads(study.run))
    for layer, head in chosen:
        split = _split(study, ids, layer, head)
        rows += _retained_rows(study, layer, head)
        for key, shown in (("with", split.coarse(MEAN_WITH_POSITION)), ("without", split)):
            name = f"{head_name(layer, head)} {key} the global mean"
            panels[name] = head_matrices(shown, head, raw=True)
            largest = max(panels[name][:-2], key=lambda panel: panel.share)
            outcome.read(f"{name}: largest share", largest.name)
            drawn = qk_panels(shown, head, tokens, raw=True)
            values = {"head": head_name(layer, head), "prompt": _panel_caption(study, len(tokens))}
            outcome.draw(f"L{layer}H{head}-{key}", drawn, key, **values)
    _judge_mean(outcome, study.run)
    outcome.tables |= _tables(ids, tokens, panels)
    if rows:
        retained = outcome.tables["kept"] = pd.DataFrame(rows)
        for (layer, head), followed in chosen.items():
            for pattern in followed:
                kept = retained.query("layer == @layer and head == @head and pattern == @pattern.name")
                if (kept["score"] < TIMES_UNIFORM * kept["uniform"]).any():
                    continue  # the head has no such pattern
                shares = kept[kept["group"] == pattern.strict].set_index("mean")["kept"]
                outcome.read(
                    f"{head_name(layer, head)}, attention to {pattern.title}: retained by {pattern.strict} alone",
                    f"{percent(shares['within pos'])} with μ within pos, {percent(shares['apart'])} with it apart",
                )
