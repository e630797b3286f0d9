"""Logits of a prompt by constituent (Figs. 6 and 30 to 34), and what the global mean does to them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from theodolite import Corpus, Run, constituents
from theodolite.errors import UsageError, WorkError
from theodolite.judging import Criterion, Verdict, judge, untestable
from theodolite.logits.attribution import CONTEXTS, repeated_patterns
from theodolite.logits.constituents import whole_positional_basis
from theodolite.logits.shares import SPLIT_CONTEXTS, TOKENS_A_PASS, sample_of, working_dtype
from theodolite.measure.attribution import ATTRIBUTED, attribute, chosen_heads
from theodolite.measure.constituents import Constituents
from theodolite.measure.geometry import CUTOFFS
from theodolite.measure.head_matrices import MOST_POSITIONS, HeadMatrix, head_matrices
from theodolite.measure.positional import qk_low_frequency
from theodolite.models.prompts import REPEATED, prompt_ids
from theodolite.models.query_key_parts import LayerPass, split_queries_and_keys, visit_layers
from theodolite.models.token_texts import token_texts
from theodolite.report.data import Floats, evenly
from theodolite.report.drawing.constituents import qk_panels
from theodolite.system.wording import counted, head_name, listed, number, percent
from theodolite.theory.decomposition import PARTS, decompose_around
from theodolite_papers import drawing
from theodolite_papers.experiment import Outcome, Study, by_name, declared, share_of_heads
from theodolite_papers.hidden_geometry import attribution, criteria
from theodolite_papers.hidden_geometry.addition_check import of_an_adder

SHOWN_HEADS, SHOWN_LAYERS, SHOWN_POSITIONS = 12, 13, 64
"""Drawn, evenly chosen where there are more: all heads of GPT-2 small."""


class _PositionalLogits:
    """Mean over contexts of every layer's logits between pos + μ and pos + μ, and how smooth those of pos are."""

    def __init__(self, run: Run, heads: list[int], shown: list[int]) -> None:
        self.mean, self.pos = run.arrays["mean"], whole_positional_basis(run)
        self.end = run.arrays["positional_basis"].shape[1]
        self.heads, self.shown = heads, shown
        self.logits: dict[int, Floats] = {}
        self.smooth: dict[int, Floats] = {}
        self.refused: dict[int, str] = {}

    def add(self, layer_pass: LayerPass) -> None:
        """Add the contexts of a pass."""
        parts = decompose_around(layer_pass.stream, self.mean[layer_pass.layer], self.pos[layer_pass.layer])
        try:
            dtype = working_dtype(layer_pass.stream)
            split = split_queries_and_keys(layer_pass, parts, dtype, check_all=False)
        except WorkError as error:
            self.refused[layer_pass.layer] = str(error)
            return
        mean, pos = PARTS.index("mean"), PARTS.index("pos")
        repeat = split.query.shape[2] // split.key.shape[2]
        query = (split.query[mean] + split.query[pos])[:, self.heads][:, :, self.shown]
        key = (split.key[mean] + split.key[pos])[:, [head // repeat for head in self.heads]][:, :, self.shown]
        logits = torch.einsum("chid,chjd->hij", query, key) * split.inputs.scaling
        text = slice(1, self.end)
        smooth = qk_low_frequency(split.query[pos][:, :, text], split.key[pos][:, :, text]).sum(0)
        for sums, value in ((self.logits, logits), (self.smooth, smooth)):
            added = value.double().cpu().numpy()
            sums[layer_pass.layer] = sums[layer_pass.layer] + added if layer_pass.layer in sums else added


def _sampled(study: Study) -> Tensor:
    """A sample of the run's contexts; random ones of their length, where the text is not at hand."""
    seed = study.provenance["seed"]
    if study.corpus is not None:
        return study.corpus.contexts[sample_of(study.corpus, seed)]
    length = whole_positional_basis(study.run).shape[1]
    vocabulary = study.require_model().required_vocabulary()
    return Corpus.random_tokens(vocabulary, length, SPLIT_CONTEXTS, seed).contexts


@declared("geometry/figure19")
def figure_19(study: Study, outcome: Outcome) -> None:
    run, model = study.run, study.require_model()
    positions = run.arrays["positional_basis"].shape[1] - 1
    heads = evenly(model.heads, SHOWN_HEADS)
    shown = [1 + place for place in evenly(positions, SHOWN_POSITIONS)]
    sums = _PositionalLogits(run, heads, shown)
    sample = _sampled(study)
    for batch in sample.split(max(1, TOKENS_A_PASS // sample.shape[1])):
        visit_layers(model, batch, range(model.layers), sums.add)
    if not sums.logits:
        raise UsageError(f"no layer of this model can be split: {next(iter(sums.refused.values()))}")
    layers = sorted(sums.logits)
    columns = [f"low_frequency_{k}" for k in CUTOFFS]
    of_layers = [pd.DataFrame(sums.smooth[layer] / len(sample), columns=columns) for layer in layers]
    table = pd.concat(of_layers, keys=layers, names=["layer", "head"]).reset_index()
    median = float(table["low_frequency_10"].median())
    what = "share of energy at K = 10 of pos-pos, median over heads"
    outcome.read(what, number(median), "“visibly discontinuous”")
    if sums.refused:
        reason = next(iter(sums.refused.values()))
        outcome.read("layers that cannot be split", f"{len(sums.refused)}: {reason}")
    outcome.verdicts.append(rough_verdict(study, table["low_frequency_10"].to_numpy(), positions))
    outcome.tables["smoothness"] = table
    chosen = [layers[place] for place in evenly(len(layers), SHOWN_LAYERS)]
    tiles = [drawing.positional_tiles(sums.logits[layer] / len(sample)) for layer in chosen]
    names, blocks = [f"head {head}" for head in heads], [f"block {layer}" for layer in chosen]
    drawn = by_name("block", blocks, lambda place: drawing.weight_maps(tiles[place], names, len(shown)))
    outcome.draw("positional-logits", drawn, contexts=counted(len(sample), "context"))


def rough_verdict(study: Study, shares: Floats, positions: int) -> Verdict:
    """Judge the shares of low frequencies of heads, where the model was trained on addition: of most of the heads."""
    claim = "The QK matrix of a model trained on addition is not smooth (section 4.3, Figs. 5, 19 and 22)"
    shares = shares[np.isfinite(shares)]
    median = f"share of energy at K = 10 of pos-pos, median of {counted(len(shares), 'head')}"
    median += f": {number(float(np.median(shares)))}"
    limit = criteria.UNLIKE_LANGUAGE
    if positions < criteria.LEAST_UNSMOOTH_POSITIONS:
        verdict = untestable(claim, f"{positions} positions have only {positions} frequencies")
    else:
        chance = f"positions in random order: {(10 / positions) ** 2:.2g}"
        what = f"share of heads with at most {number(limit.limit)} of pos-pos' energy at K = 10 ({median}; {chance})"
        most = Criterion("at least", 0.5, f"of the heads; {limit.source}")
        verdict = judge(claim, what, share_of_heads(limit.met(shares).tolist(), most), most)
    return of_an_adder(study.model, study.run, verdict, median)


MEAN_WITH_POSITION: Mapping[str, tuple[str, ...]] = {
    "constant": ("bias",),
    "pos": ("mean", "pos"),
    "cvec": ("ctx", "resid"),
}
"""The split with P̃ = pos + μ in place of pos (appendix D.2)."""

UNCHANGED = Criterion(
    "at least", 0.9, "“little effect on interpretations” read as: in nine of ten heads (ours)"
)

ChosenHeads = dict[tuple[int, int], list[attribution.PatternClaims]]
"""(layer, head) → the patterns that it follows most of all heads; none for a head that was named."""


def _top_heads(run: Run) -> dict[str, list[attribution.Head]]:
    return {pattern.name: attribution.attributed_heads(run, pattern.name) for pattern in attribution.CLAIMS}


def _chosen(study: Study, top: dict[str, list[attribution.Head]]) -> ChosenHeads:
    """The head that is asked for, or the ones that follow the patterns most."""
    focus = study.focus
    if focus.layer is not None and focus.head is not None:
        return {(focus.layer, focus.head): []}
    chosen: ChosenHeads = {}
    for pattern in attribution.CLAIMS:
        for head in top[pattern.name][:1]:
            chosen.setdefault((head.layer, head.head), []).append(pattern)
    if not chosen:
        raise UsageError("this run has no attributed heads to choose from: name one with --layer and --head")
    return chosen


def _split(study: Study, ids: Tensor, layer: int, head: int) -> Constituents:
    """The logits of a layer on the prompt."""
    model = study.require_model()
    model.check_place(layer, head)
    try:
        return constituents(model, ids, layer, decomposition=study.run)
    except WorkError as error:
        raise UsageError(f"{error}; choose another --layer") from error


def _prompt_tokens(study: Study) -> tuple[Int[Tensor, " positions"], list[str]]:
    """The prompt's ids and the text of each."""
    model = study.require_model()
    longest = study.run.arrays["positional_basis"].shape[1]
    ids = prompt_ids(model, study.focus.prompt, longest, study.provenance["seed"])
    return ids, token_texts(model, ids)


def _panel_caption(study: Study, length: int) -> str:
    """Word what the panels were made of, for their captions."""
    kind = "of random tokens, twice" if study.focus.prompt is None else "of the prompt"
    shown = f"; the first {MOST_POSITIONS} of them" if length - 1 > MOST_POSITIONS else ""
    rotated = (
        "This family rotates queries and keys, so relative position is within every panel, constant too: there the "
        "rotated mean and biases differ by distance. "
    )
    caption = f"Logits {kind}, {length} tokens, position 0 left out{shown}. "
    return caption + (rotated if study.provenance["model"].get("positions") == "rotary" else "")


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
    attribution.read_refusals(outcome, study.run)
    for pattern in attribution.CLAIMS:
        outcome.verdicts += attribution.pattern_verdicts(pattern, top[pattern.name])
    outcome.tables |= _tables(ids, tokens, panels)


def _judge_mean(outcome: Outcome, run: Run) -> None:
    """Judge whether the largest of the four constituents stays the largest when μ is counted as positional."""
    claim = "The global mean μ has little effect on interpretations (appendix E.2, Figs. 30 and 31)"
    table = run.constituents
    if not len(table):
        outcome.cannot_test(claim, "this run has no constituent shares: survey the model again")
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
    what = (
        f"share of {counted(len(same), 'head')} in which the largest of pos-pos, pos-cvec, cvec-pos and cvec-cvec is "
        f"the same with pos + μ in place of pos (pairs with μ carry {percent(float(carried))} of the logits' variance "
        "on average)"
    )
    outcome.claim(claim, what, share_of_heads(same.tolist(), UNCHANGED), UNCHANGED)


def _retained_rows(study: Study, layer: int, head: int) -> list[dict[str, Any]]:
    """Measure what each group alone keeps of each pattern on short repeated sequences, with μ apart, and within pos."""
    longest = min(REPEATED, study.run.arrays["positional_basis"].shape[1])
    ids, patterns = repeated_patterns(study.require_model(), longest, CONTEXTS, study.provenance["seed"])
    if not patterns:
        return []
    split = _split(study, ids, layer, head)
    inputs = chosen_heads(split.inputs, [head])
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
                if (kept["score"] < attribution.TIMES_UNIFORM * kept["uniform"]).any():
                    continue  # the head has no such pattern
                shares = kept[kept["group"] == pattern.strict].set_index("mean")["kept"]
                outcome.read(
                    f"{head_name(layer, head)}, attention to {pattern.title}: retained by {pattern.strict} alone",
                    f"{percent(shares['within pos'])} with μ within pos, {percent(shares['apart'])} with it apart",
                )
