"""Ablate the head of a sink in a live model: does the model need the tag? (Zhang et al. 2025, sections 2, 3)

Each ablation has norm-matched random controls. All are compared on the same contexts, so a change has the standard
error of a mean of paired differences. The groups of tokens are those of the untouched model throughout.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from theodolite import Corpus, OpenModel, trace_sinks
from theodolite.attention.catches import attend_and_catch
from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import UsageError
from theodolite.estimates import Estimate
from theodolite.judging import Verdict, all_of, untestable
from theodolite.models.guard import measures
from theodolite.models.hooks import Hooks, hooked
from theodolite.passes.corpus_pass import batch_of, next_token_losses
from theodolite.report import style
from theodolite.report.drawing.grammar import bars
from theodolite.sinks.interventions import ablate_direction, attention_knockout, without_low_rank
from theodolite.sinks.prompt import LEFT_OUT, UNCAUGHT
from theodolite.system.progress import ShowStage
from theodolite.system.wording import counted, for_plotly, head_name, number, percent, with_error
from theodolite.theory.grouping import variance_explained
from theodolite_papers.experiment import Outcome, Study, chosen_and_judged, declared, shown

CONTEXTS = 64  # contexts at most: every ablation reads them again
CONTROLS = 3  # seeded controls of each ablation, of which the mean is taken
LOSS_CAUGHT, LOSS_OTHERS = "loss on caught tokens", "loss on other tokens"
LOSS_DIFFERENCE = "loss on caught tokens minus that on others"
HEAD_SINKS, LATER_SINKS = "sinks of the head", "later sinks behind the head"
TAG_ABLATED = "tag ablated"

Ablate = Callable[[slice, int | None], AbstractContextManager[object]]
"""An ablation, while open, of the contexts of a batch; of a seed its norm-matched random control."""


@dataclass(frozen=True)
class _Groups:
    """A head's sinks in a context, by position (below 0: a learned column), and the sink that caught each token.

    `of`: an index into `sinks`, `UNCAUGHT`, or `LEFT_OUT`.
    """

    sinks: Int[Tensor, " sinks"]
    of: Int[Tensor, " positions"]

    def explained(self, hidden: Float[Tensor, "positions width"]) -> float:
        """Compute η² of the grouping; NaN where there is nothing to compare."""
        known = self.of != LEFT_OUT
        return variance_explained(hidden.cpu()[known], self.of[known])


class _HeadTap(Hooks):
    """Record a head's groups in each context of a batch, later sinks behind it, and η² of given groups by layer."""

    def __init__(self, layer: int, head: int, given: Sequence[_Groups] = ()) -> None:
        self.layer, self.head = layer, head
        self.given = given
        self.groups: list[_Groups] = []
        self.later_sinks = torch.zeros(len(given), dtype=torch.float64)
        self.eta: list[Tensor] = []

    def stream(self, layer: int, hidden: Tensor) -> None:
        if self.given and layer > self.layer:
            etas = [groups.explained(h) for groups, h in zip(self.given, hidden, strict=True)]
            self.eta.append(torch.tensor(etas, dtype=torch.float64))

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        output, contexts = attend_and_catch(inputs)
        for catches in contexts if layer == self.layer else ():
            of_head = catches.head == self.head
            groups = torch.full((inputs.query.shape[2],), LEFT_OUT)
            groups[catches.counted[catches.of[of_head].unique()].any(dim=0).cpu()] = UNCAUGHT
            for place, caught in enumerate(catches.caught[of_head].cpu()):
                groups[caught] = place
            self.groups.append(_Groups(catches.position[of_head].cpu(), groups))
        if self.given and layer > self.layer:
            later = [float((catches.position > 0).sum()) for catches in contexts]
            self.later_sinks += torch.tensor(later, dtype=torch.float64)
        return output


@measures("model")
def ablation_test(
    model: OpenModel,
    corpus: Corpus,
    layer: int,
    head: int,
    direction: Float[Tensor, " width"],
    show_progress: ShowStage = lambda what, done, total: None,
) -> pd.DataFrame:
    """Ablate one head that has sinks, and measure what changes.

    Its tag, of this direction in the residual stream, is projected out of its output (control: as much along random
    directions of what the head can write); its attention to its sinks is hidden (control: to as many other keys); the
    leading part of W_Q, W_K, W_V of its layer is removed (control: random matrices with the same singular values).

    Measures, one value per context: next-token loss in nats on caught tokens and on others; sinks of the head; sinks at
    later positions in all heads of deeper layers; η² of the head's own grouping in each later residual layer.

    Returns:
        A row for each `ablation` and `measure`: `untouched`, `change`, `control` (the change under the controls),
        `beyond` (the change less that under the controls, paired by context; the spread of the controls is in its
        error), `beyond_most`, `beyond_least` (the same of the one control under which the measure rises most, or falls
        most), each with its `…_se`; `contexts` that have this measure, `CONTEXTS` at most.

    Raises:
        UsageError: a model without an output head, other contexts than of text and of one length, or none in which
            the head has a sink.
    """
    if corpus.lengths is not None or not corpus.text_alone:
        raise UsageError("an ablation test needs a text in contexts of one length")
    if model.source.predict is None:
        raise UsageError(f"{model.id} predicts no tokens: an ablation test needs the loss")
    ids, groups = _contexts_with_sinks(model, corpus, layer, head)
    batch = batch_of(corpus, None)

    def effects(ablate: Ablate, seed: int | None = None) -> dict[str, Float[Tensor, " contexts"]]:
        """Return each measure by name; NaN for a context that has none of it."""
        batches: list[dict[str, Tensor]] = []
        for start in range(0, len(ids), batch):
            part = slice(start, min(start + batch, len(ids)))
            tap = _HeadTap(layer, head, groups[part])
            with ablate(part, seed), hooked(model, tap):
                loss = next_token_losses(model.logits(ids[part]), ids[part])
            of = torch.stack([each.of[:-1] for each in groups[part]])  # the last token has no next one
            of_caught, of_others = (
                loss.masked_fill(~chosen, torch.nan).nanmean(dim=1) for chosen in (of >= 0, of == UNCAUGHT)
            )
            sinks = torch.tensor([len(each.sinks) for each in tap.groups], dtype=torch.float64)
            values = {LOSS_CAUGHT: of_caught, LOSS_OTHERS: of_others, LOSS_DIFFERENCE: of_caught - of_others}
            values |= {HEAD_SINKS: sinks, LATER_SINKS: tap.later_sinks}
            etas = enumerate(tap.eta, start=layer + 1)
            batches.append(values | {f"η² in layer {later}": eta for later, eta in etas})
        return {name: torch.cat([values[name] for values in batches]) for name in batches[0]}

    untouched = effects(lambda part, seed: nullcontext())
    rows = []
    ablations = [*_ablations(model, layer, head, direction, groups).items()]
    for ablation, ablate in shown(ablations, "ablations", show_progress):
        ablated, *controls = (effects(ablate, seed) for seed in (None, *range(CONTROLS)))
        for name, value in untouched.items():
            change, by_seed = ablated[name] - value, torch.stack([each[name] - value for each in controls])
            means = torch.tensor([_mean(values).value for values in by_seed])
            row: dict[str, Any] = {"ablation": ablation, "measure": name, "untouched": _mean(value).value}
            for column, values in (
                ("change", change),
                ("control", by_seed.mean(dim=0)),
                ("beyond", change - by_seed.mean(dim=0)),
                ("beyond_most", change - by_seed[int(means.argmax())]),
                ("beyond_least", change - by_seed[int(means.argmin())]),
            ):
                known = _mean(values)
                row |= {column: known.value, f"{column}_se": known.error}
            row["beyond_se"] = math.hypot(row["beyond_se"], float(means.std() / CONTROLS**0.5))
            rows.append(row | {"contexts": int(value.isfinite().sum())})
    return pd.DataFrame(rows)


def _contexts_with_sinks(
    model: OpenModel, corpus: Corpus, layer: int, head: int
) -> tuple[Int[Tensor, "contexts positions"], list[_Groups]]:
    chosen, groups = [], []
    for part in corpus.contexts.split(batch_of(corpus, None)):
        tap = _HeadTap(layer, head)
        with hooked(model, tap):
            model.forward(part)
        for ids, of_context in zip(part, tap.groups, strict=True):
            if bool((of_context.of >= 0).any()):
                chosen.append(ids)
                groups.append(of_context)
        if len(chosen) >= CONTEXTS:
            break
    if not chosen:
        raise UsageError(
            f"{head_name(layer, head)} has no sink in this text: choose another --layer and --head"
        )
    return torch.stack(chosen[:CONTEXTS]), groups[:CONTEXTS]


def _ablations(
    model: OpenModel, layer: int, head: int, direction: Tensor, groups: list[_Groups]
) -> dict[str, Ablate]:
    """Return the ablations of a head by name."""
    rank = max(1, model.head_width // 8)
    sinks = torch.zeros(len(groups), len(groups[0].of), dtype=torch.bool)
    for context, of_context in enumerate(groups):
        sinks[context, of_context.sinks[of_context.sinks >= 0]] = True
    column = torch.tensor([bool((of_context.sinks < 0).any()) for of_context in groups])
    count = (sinks.sum(dim=1) + column).unsqueeze(1)

    def others(seed: int) -> Bool[Tensor, "contexts positions"]:
        """Draw as many keys of each context that are no sinks, and not the first; one for a learned column, too."""
        noise = torch.rand(sinks.shape, generator=torch.Generator().manual_seed(seed))
        noise[sinks] = 2.0
        noise[:, 0] = 2.0
        return noise.argsort(dim=1).argsort(dim=1) < count

    def knocked_out(part: slice, seed: int | None) -> AbstractContextManager[object]:
        keys, with_column = (sinks, bool(column.any())) if seed is None else (others(seed), False)
        return attention_knockout(model, layer, head, keys[part], sink_column=with_column)

    return {
        TAG_ABLATED: lambda part, seed: ablate_direction(model, layer, head, direction, control=seed),
        "sinks knocked out": knocked_out,
        f"rank {rank} of Q, K, V removed": lambda part, seed: without_low_rank(
            model, layer, rank, control=seed
        ),
    }


def _mean(values: Tensor) -> Estimate:
    """Average over the contexts that have a value."""
    known = values[values.isfinite()]
    return Estimate.mean(known.numpy(), "contexts") if len(known) else Estimate(math.nan)


def changes(table: pd.DataFrame, measures: list[str]) -> go.Figure:
    """Draw bars with standard errors: one group per ablation and measure, ablation and control side by side."""
    shown = table[table["measure"].isin(measures)]
    labels = (f"{row.ablation}: {row.measure}" for row in shown.itertuples())
    names = ["<br>".join(map(for_plotly, textwrap.wrap(label, 28))) for label in labels]
    looks = ("control", "control", style.GREY), ("change", "ablation", style.VERMILLION)
    traces = []
    for column, name, colour in looks:
        hover = f"%{{y}}<br>{name}: %{{x:.4g}}<extra></extra>"
        errors = style.error_bars(shown[f"{column}_se"])
        own: dict[str, Any] = {"orientation": "h", "error_x": errors}
        traces.append(bars(shown[column], names, name, colour, hover, **own))
    down = {"autorange": "reversed", "automargin": True}
    layout = {"yaxis": down, "barmode": "group"}
    return style.figure(traces, "change", height=150 + 46 * len(names), layout=layout)


HALF = 0.5  # of a grouping's η²: what must go for the clusters to be the tag's (ours)


def _chosen_tag(study: Study, contexts: Corpus) -> tuple[int, int, torch.Tensor]:
    """Choose the head asked for, or whose sinks tag most tokens; and its strongest tag's direction."""
    run = trace_sinks(study.require_model(), contexts, show_progress=study.show)
    traces, focus = run.traces, study.focus
    if focus.layer is not None:
        traces = traces[(traces["layer"] == focus.layer) & (traces["head"] == focus.head)]
    traces = traces.dropna(subset="tag")
    if traces.empty:
        raise UsageError(
            "that head writes no tag in this text: choose another --layer and --head, or another text"
        )
    row = traces.index[0]
    direction = run.arrays["tag_direction"][row]
    return int(traces.loc[row, "layer"]), int(traces.loc[row, "head"]), direction


@declared("sinks/ablation")
def ablated(study: Study, outcome: Outcome) -> None:
    corpus = study.require_corpus("a head is ablated while it reads a text: pass it together with the run")
    chosen_on, judged_on = chosen_and_judged(corpus)
    layer, head, direction = _chosen_tag(study, chosen_on)
    table = ablation_test(study.require_model(), judged_on, layer, head, direction, study.show)
    last = f"η² in layer {study.require_model().layers}"
    measures = [LOSS_CAUGHT, LOSS_OTHERS, HEAD_SINKS, LATER_SINKS, last]
    name = head_name(layer, head)
    outcome.tables["changes"] = table
    outcome.read("ablated head", f"{name}, in {counted(int(table['contexts'].max()), 'context')}")
    for row in table[table["measure"].isin(measures)].itertuples():
        outcome.read(
            f"{row.ablation}: {row.measure}",
            f"{number(row.untouched)} untouched, change {with_error(row.change, row.change_se)}, control "
            f"{with_error(row.control, row.control_se)}",
        )
    low_rank = table["ablation"].iloc[-1]
    outcome.verdicts += [
        against_control(outcome, "retrieved", table, TAG_ABLATED, LOSS_CAUGHT, +1),
        against_others(outcome, table),
        against_control(outcome, "clusters", table, TAG_ABLATED, last, -1, HALF),
        against_control(outcome, "low-rank", table, low_rank, HEAD_SINKS, -1),
        against_control(outcome, "behind", table, TAG_ABLATED, LATER_SINKS, -1),
    ]
    outcome.draw("losses", changes(table, [LOSS_CAUGHT, LOSS_OTHERS]), name=name)
    outcome.draw("sinks", changes(table, [HEAD_SINKS, LATER_SINKS]), name=name)
    drawn = changes(table, [m for m in table["measure"].unique() if m.startswith("η²")])
    outcome.draw("clusters", drawn, name=name)


def _row(table: pd.DataFrame, ablation: str, measure: str) -> pd.Series:
    return table[(table["ablation"] == ablation) & (table["measure"] == measure)].iloc[0]


def against_control(
    outcome: Outcome,
    claim: str,
    table: pd.DataFrame,
    ablation: str,
    measure: str,
    sign: int,
    least: float = 0.0,
) -> Verdict:
    """Judge whether a measure changes more than under the control that is hardest to beat."""
    row = _row(table, ablation, measure)
    if row["untouched"] == 0 and row["change"] == 0:
        return untestable(outcome.sentence(claim), f"{measure}: there are none")
    hardest = "beyond_most" if sign > 0 else "beyond_least"
    gain = sign * row[hardest] - least * abs(row["untouched"])
    step = 1.0 if measure in (HEAD_SINKS, LATER_SINKS) else 0.0  # of sinks, which may change alike by chance
    known = Estimate(gain, row[f"{hardest}_se"], int(row["contexts"]), "contexts").floored(step)
    words = {name: with_error(row[name], row[f"{name}_se"]) for name in ("change", "control")}
    words |= {"ablation": ablation, "measure": measure, "moves": "falls" if sign < 0 else "rises"}
    words["part"] = f", less {percent(least)} of what it was" if least else ""
    return _paired(outcome, claim, known, **words)


def against_others(outcome: Outcome, table: pd.DataFrame) -> Verdict:
    """Judge whether caught tokens lose more than others, and by more than they do under any control."""
    losses = (LOSS_CAUGHT, LOSS_OTHERS, LOSS_DIFFERENCE)
    caught, uncaught, between = (_row(table, TAG_ABLATED, name) for name in losses)
    in_words = [with_error(of["change"], of["change_se"]) for of in (caught, uncaught)]
    change = Estimate(between["change"], between["change_se"], int(between["contexts"]), "contexts")
    more = _paired(outcome, "serves.others", change, caught=in_words[0], others=in_words[1])
    beyond = against_control(outcome, "serves.controls", table, TAG_ABLATED, LOSS_DIFFERENCE, +1)
    return all_of(outcome.sentence("serves"), [more, beyond])


def _paired(outcome: Outcome, claim: str, gain: Estimate, **values: str) -> Verdict:
    if not math.isfinite(gain.error):
        return untestable(outcome.sentence(claim), f"too few contexts; {outcome.criterion(claim)}")
    return outcome.verdict(claim, gain, **values)
