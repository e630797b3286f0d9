"""Which constituent makes a head what it is (section 5.2), and which carries most logits (eq. 10, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from theodolite import Run
from theodolite.judging import Criterion, Verdict, judge, untestable
from theodolite.measure.attribution import ATTRIBUTED
from theodolite.measure.constituents import DISJOINT, paired_groups
from theodolite.measure.head_roles import ATTENTION_PATTERNS, RETAINED, STRONG
from theodolite.report.data import Floats, blocks, heads_per_block, provenance
from theodolite.report.drawing import constituents as figures_constituents
from theodolite.system.wording import counted, head_name, listed, number, percent
from theodolite.theory.decomposition import PARTS
from theodolite_papers import drawing
from theodolite_papers.experiment import Outcome, Study, by_name, declared, share_of_heads
from theodolite_papers.hidden_geometry import criteria

TIMES_UNIFORM = 2.0
"""A head follows a pattern that gets `STRONG` of its attention, and this multiple of uniform attention (ours)."""

RETAINS = Criterion(
    "at least", RETAINED, "of what the score has over uniform attention, and more than any other group (ours)"
)
MOST_HEADS = Criterion("at least", 0.5, "“determined by” read as: in half of the heads or more (ours)")
REFUSALS_SHOWN = 2


@dataclass(frozen=True)
class PatternClaims:
    """The claims about one of `ATTENTION_PATTERNS`, in the paper's words and in ours.

    `strict`: the paper's constituent; `group`: the same with the pairs of a mean or bias. `side`: of Fig. 6.
    """

    name: str
    title: str
    tokens: str
    side: str
    strict: str
    group: str

    @property
    def claim(self) -> str:
        """The paper's claim."""
        place = f"section 5.2, Fig. 6, {self.side}"
        return f"Attention to {self.tokens} is determined by the {self.strict} constituent ({place})"

    @property
    def ours(self) -> str:
        """The claim with the pairs of a mean or a bias included."""
        return f"Attention to {self.tokens} is determined by {self.group}, mean and bias included (ours)"


CLAIMS = [
    PatternClaims("same", "identical tokens", "identical tokens", "left", "cvec-cvec", "context"),
    PatternClaims("previous", "the previous token", "neighbouring tokens", "middle", "pos-pos", "position"),
    PatternClaims("induction", "shifted tokens", "shifted tokens", "right", "cvec-cvec", "context"),
]


@dataclass(frozen=True)
class Head:
    """One attributed head and pattern. `groups`: index group; columns share, only, without, kept, left.

    kept, left: what is left of the score's excess over uniform attention with this group only, and without it.
    """

    layer: int
    head: int
    score: float
    uniform: float
    groups: pd.DataFrame

    @property
    def name(self) -> str:
        """Name of the head, such as `L3H5`."""
        return head_name(self.layer, self.head)

    @property
    def follows(self) -> bool:
        """Whether the head has the pattern at all."""
        return self.score >= STRONG and self.score >= TIMES_UNIFORM * self.uniform

    @property
    def strongest(self) -> str:
        """The group that keeps most of the pattern by itself, of those that share nothing."""
        return str(self.groups.loc[[*DISJOINT, "additive"], "kept"].idxmax())

    def determined_by(self, pattern: PatternClaims, group: str) -> bool:
        """Whether `group`, the pattern's own or the strict one within it, keeps enough, and no other group more."""
        return self.strongest == pattern.group and bool(RETAINS.met(float(self.groups.loc[group, "kept"])))

    def summary(self, group: str) -> str:
        """The head's numbers in a line."""
        row = self.groups.loc[group]
        evidence = f"{self.name} (score {number(self.score)}, uniform attention {number(self.uniform)})"
        if not self.follows:
            return evidence
        evidence += (
            f": {group} alone retains {percent(float(row['kept']))}, ablating it leaves {percent(float(row['left']))}, "
            f"its share of the logits' variance is {percent(float(row['share']))}"
        )
        if self.strongest != group:
            most = percent(float(self.groups.loc[self.strongest, "kept"]))
            evidence += f"; {self.strongest} alone retains {most}"
        return evidence


def retained(attributed: pd.DataFrame) -> pd.DataFrame:
    """The table with `kept` and `left`, as of `Head`; NaN where the score is no more than uniform attention."""
    uniform = attributed["uniform"]
    excess = (attributed["score"] - uniform).where(attributed["score"] > uniform)
    return attributed.assign(
        kept=(attributed["only"] - uniform) / excess, left=(attributed["without"] - uniform) / excess
    )


def attributed_heads(run: Run, pattern: str) -> list[Head]:
    """The attributed heads of a pattern, those that follow it most first."""
    table = run.attribution
    if not len(table):
        return []
    heads = []
    of_pattern = retained(table[table["pattern"] == pattern])
    for (layer, head), rows in of_pattern.groupby(["layer", "head"], sort=False):
        groups = rows.set_index("group")[["share", "only", "without", "kept", "left"]].astype(np.float64)
        score, uniform = (float(rows[name].iloc[0]) for name in ("score", "uniform"))
        heads.append(Head(int(layer), int(head), score, uniform, groups))
    return sorted(heads, key=lambda head: -head.score)


def pattern_verdicts(pattern: PatternClaims, heads: list[Head]) -> list[Verdict]:
    """Judge a pattern's claims, the paper's and ours, on all heads that follow it: one head alone decides nothing."""
    followers = [head for head in heads if head.follows]
    if not followers:
        best = "0 heads attributed"
        if heads:
            best = f"the highest score is that of {heads[0].summary(pattern.strict)}"
        asked = f"at least {STRONG:g} and {TIMES_UNIFORM:g} times uniform attention is required of such a head (ours)"
        return [untestable(pattern.claim, f"{best}; {asked}")]
    verdicts = []
    for claim, group in ((pattern.claim, pattern.strict), (pattern.ours, pattern.group)):
        share = share_of_heads([head.determined_by(pattern, group) for head in followers], MOST_HEADS)
        kept = percent(float(np.mean([head.groups.loc[group, "kept"] for head in followers])))
        what = (
            f"share of the {len(followers)} found of {len(heads)} attributed heads (score of at least {STRONG:g} and "
            f"{TIMES_UNIFORM:g} times uniform attention) in which {group} alone retains at least half of the excess, "
            f"and no other group more (it retains {kept} on average; {followers[0].summary(group)})"
        )
        verdicts.append(judge(claim, what, share, MOST_HEADS))
    return verdicts


@declared("geometry/attribution")
def attribution(study: Study, outcome: Outcome) -> None:
    run = study.run
    for pattern in CLAIMS:
        heads = attributed_heads(run, pattern.name)
        followers = [head for head in heads if head.follows]
        top = f"; highest score {number(heads[0].score)}" if heads else ""
        outcome.read(f"heads that attend to {pattern.title}", f"{len(followers)}{top}")
        outcome.verdicts += pattern_verdicts(pattern, heads)
        if heads:
            drawn = figures_constituents.attribution(run, pattern.name)
            target = ATTENTION_PATTERNS[pattern.name].target
            values = {"title": pattern.title, "target": target, "group": pattern.group}
            outcome.draw(pattern.name, drawn, "pattern", **values)
    read_refusals(outcome, run)
    outcome.tables["attribution"] = retained(run.attribution)


def read_refusals(outcome: Outcome, run: Run) -> None:
    """Report layers that could not be split, with the reason."""
    if refused := provenance(run, "constituents_refused"):
        reasons = "; ".join(list(refused.values())[:REFUSALS_SHOWN])
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
def constituents(study: Study, outcome: Outcome) -> None:
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
    what = f"share of {counted(heads, 'head')} in which {{}} is the largest of {{}} groups (mean share {{}})"
    dominant = "PWPᵀ is an important, often dominant, constituent of the QK matrix (section 4.2)"
    ours = "Position is often dominant, mean and bias included (ours)"
    for claim, group, wins in ((dominant, "pos-pos", largest_strict), (ours, "position", largest)):
        often = criteria.above_chance(len(wins))
        shown = what.format(group, len(wins), percent(means[group]))
        outcome.claim(claim, shown, share_of_heads(wins[group], often), often)
    outcome.tables["shares"] = pd.DataFrame(
        {"layer": layer, "head": head} | {group: float(grid[layer, head]) for group, grid in grids.items()}
        for layer in range(blocks(run))
        for head in range(heads_per_block(run))
    )

    def draw(place: int) -> go.Figure:
        return drawing.head_values(list(grids.values())[place], "share of logit variance")

    drawn = by_name("group", list(grids), draw, grid=True)
    outcome.draw("shares", drawn, groups=listed([*apart]))
    drawn = figures_constituents.shares_by_layer(
        np.arange(blocks(run), dtype=np.float64),
        {group: pd.DataFrame(grid).mean(axis=1).to_numpy() for group, grid in apart.items()},
    )
    outcome.draw("by-layer", drawn)
