"""Sinks kept under pruning, and the role of the low-rank term (Figs. 4 and 5 of Zhang et al. 2025).

Even contexts calibrate the pruning, losses and sinks are measured on odd ones and on one prompt. A pruned model is kept
beside the pages, and read by whatever needs it again.
"""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from theodolite import Corpus, OpenModel
from theodolite.attention.catches import attend_and_catch
from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import UsageError
from theodolite.estimates import Estimate
from theodolite.judging import FAILS, all_of, mix_of
from theodolite.models.hooks import Hooks, hooked
from theodolite.models.texts import prompt_or_shipped, token_texts
from theodolite.passes.corpus_pass import batch_of, next_token_losses
from theodolite.prune.checkpoint import Pruned
from theodolite.prune.model import prune_model
from theodolite.report import style
from theodolite.report.data import evenly
from theodolite.report.drawing.grammar import MARK, Panel, attention, panels
from theodolite.sinks.interventions import without_low_rank
from theodolite.system.wording import head_name, shown_token, with_error
from theodolite.theory.unbiased import ratio
from theodolite_papers.catch_tag_release.prompt_trace import PromptTrace, trace_prompt
from theodolite_papers.drawing import by_dimension, intervals
from theodolite_papers.experiment import Outcome, Study, declared

METHODS = {"oats": "OATS", "wanda": "Wanda", "sparsegpt": "SparseGPT", "magnitude": "magnitude"}
SPARSITY = 0.5  # as in the paper's figures
ITERATIONS, RANK_RATIO = 80, 0.25  # of OATS, as published
MOST_CONTEXTS = 128  # that are measured, evenly chosen, and as many that calibrate
DENSE = "dense"
CONTROL_SEED = 0
COLUMNS = 4  # models side by side; more of them stand in several rows
GAP = 0.035  # between panels, of the figure's width
ROW_GAP = 120  # pixels between rows of panels: the sinks below, the title of the next one
PAGE, OUTPUT_HEIGHT = 900, 430  # pixels: the width that panels share, and the height of those of outputs
WRAP = 110  # letters that the titles in a row share in a line


@dataclass(frozen=True)
class ModelSinks:
    """A model's next-token losses in nats per token, the sinks of each context, and one head on one prompt."""

    loss: Float[Tensor, " contexts"]
    sinks: Bool[Tensor, "contexts layers heads positions"]
    prompt: PromptTrace | None = None


class Prompt(NamedTuple):
    """The head that is shown, and on which prompt."""

    ids: Tensor
    layer: int
    head: int


class _SinkHooks(Hooks):
    def __init__(self, contexts: int, layers: int, heads: int, length: int) -> None:
        self.sinks = torch.zeros(contexts, layers, heads, length, dtype=torch.bool)

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        output, contexts = attend_and_catch(inputs)
        for context, catches in enumerate(contexts):
            tokens = catches.position >= 0
            head, position = catches.head[tokens].cpu(), catches.position[tokens].cpu()
            self.sinks[context, layer, head, position] = True
        return output


def measure_sinks(model: OpenModel, corpus: Corpus, prompt: Prompt | None = None) -> ModelSinks:
    """Measure a model's losses and sinks on a text, and one head on the prompt."""
    losses, sinks = [], []
    for ids in corpus.contexts.split(batch_of(corpus, None)):
        batch_sinks = _SinkHooks(len(ids), model.layers, model.heads, ids.shape[1])
        ids = ids.to(model.device)
        with hooked(model, batch_sinks):
            losses.append(next_token_losses(model.logits(ids), ids).mean(dim=1))
        sinks.append(batch_sinks.sinks)
    traced = None if prompt is None else trace_prompt(model, *prompt)
    return ModelSinks(torch.cat(losses), torch.cat(sinks), traced)


def kept_sinks(dense: ModelSinks, other: ModelSinks, layer: int | None = None) -> Estimate:
    """Estimate the share of a model's sinks (of a layer's), by context and key, that another has."""
    of_layer = slice(None) if layer is None else layer
    return ratio_over_contexts((dense.sinks & other.sinks)[:, of_layer], dense.sinks[:, of_layer])


def new_sinks(dense: ModelSinks, other: ModelSinks) -> Estimate:
    """Estimate another model's sinks that the first lacks, over the first one's."""
    return ratio_over_contexts(other.sinks & ~dense.sinks, dense.sinks)


def ratio_over_contexts(
    parts: Shaped[Tensor, "contexts ..."], wholes: Shaped[Tensor, "contexts ..."]
) -> Estimate:
    """Estimate the sum of `parts` over that of `wholes`, with its error over contexts."""
    share = ratio(*(each.double().reshape(len(each), -1).sum(dim=1) for each in (parts, wholes)))
    return Estimate(float(share.value), float(share.error), len(parts), "contexts")


def loss_difference(dense: ModelSinks, other: ModelSinks) -> Estimate:
    """Estimate the mean loss of another model less that of the first: paired by context."""
    return Estimate.mean((other.loss - dense.loss).numpy(), "contexts")


def halves(study: Study) -> tuple[Corpus, Corpus]:
    """Split the text in two: every second context calibrates the pruning, and the others are measured.

    `MOST_CONTEXTS` of each at most, evenly chosen.
    """
    model = study.require_model()
    corpus = study.require_corpus("pruned models are calibrated and measured on a text: pass it with the run")
    count = len(corpus.contexts)
    if count < 4:
        raise UsageError(f"{count} contexts are too few to calibrate and to measure: give 4 or more")
    if not model.causal or model.source.predict is None:
        raise UsageError(f"{model.id} does not predict next tokens: pruned models are judged by that loss")
    first, second = (corpus.subset(torch.arange(start, count, 2)) for start in (0, 1))
    return few_of(first, MOST_CONTEXTS), few_of(second, MOST_CONTEXTS)


def few_of(corpus: Corpus, most: int) -> Corpus:
    """Keep so many contexts at most, evenly chosen."""
    return corpus.subset(torch.tensor(evenly(len(corpus.contexts), most)))


def measured_once(study: Study, name: str, model: OpenModel) -> ModelSinks:
    """Measure a model of the study, once by that name: a study has one prompt, too."""
    (_, measured), prompt = halves(study), prompt_of(study)
    return study.cached(f"{name} sinks", lambda: measure_sinks(model, measured, prompt))


def pruned_model(study: Study, method: str) -> tuple[OpenModel, Pruned]:
    """Prune a copy of the model by `SPARSITY`; in the study's folder, if it has one, a model is pruned only once."""
    calibration, _ = halves(study)
    model = copy.deepcopy(study.require_model())
    folder = study.folder and study.folder / f"pruned-by-{method}-{calibration.sha256[:8]}"
    show = partial(study.show, f"pruning by {METHODS[method]}, {SPARSITY:.0%}")
    how: dict[str, Any] = {"rank_ratio": RANK_RATIO, "iterations": ITERATIONS} if method == "oats" else {}
    how |= {"out": folder, "form": "factored"} if folder else {}
    return model, prune_model(model, calibration, method, SPARSITY, show_progress=show, **how)


def pruned_measures(
    study: Study, method: str, ablations: Mapping[str, int | None] | None = None
) -> dict[str, ModelSinks]:
    """Measure the pruned model as it is, by the method's name, and without low-rank terms.

    ablations: name → control of `without_low_rank` in the prompt's layer.
    """
    (_, measured), prompt = halves(study), prompt_of(study)
    model, pruned = pruned_model(study, method)
    measures = {METHODS[method]: measured_once(study, METHODS[method], model)}
    factors = pruned.factors(prompt.layer) if ablations else None
    for name, control in (ablations or {}).items():
        with without_low_rank(model, prompt.layer, factors=factors, control=control):
            measures[name] = measure_sinks(model, measured, prompt)
    return measures


def prompt_of(study: Study) -> Prompt:
    """Return the prompt and head asked for, or the shipped prompt and the dense model's strongest head on it."""
    model, focus = study.require_model(), study.focus
    ids = prompt_or_shipped(model, focus.prompt, "inference")
    if focus.layer is not None and focus.head is not None:
        return Prompt(ids, focus.layer, focus.head)
    strongest = study.cached("strongest head", lambda: trace_prompt(model, ids))
    return Prompt(ids, strongest.layer, strongest.head)


@declared("sinks/figure5")
def figure_5(study: Study, outcome: Outcome) -> None:
    prompt = prompt_of(study)
    dense = measured_once(study, DENSE, study.require_model())
    measured: dict[str, ModelSinks] = {}
    for method in METHODS:
        measured |= pruned_measures(study, method)
    _read(outcome, "methods", dense, measured)
    judge_methods(outcome, dense, measured)
    _draw(outcome, study, {DENSE: dense, **measured}, prompt)


def judge_methods(outcome: Outcome, dense: ModelSinks, measured: Mapping[str, ModelSinks]) -> None:
    """Judge whether OATS keeps the sinks, and more of them than each other method: paired by context."""
    others = [name for name in measured if name != "OATS"]
    if not dense.sinks.any():
        for claim, method in (("retains", "OATS"), *(("loses", name) for name in others)):
            outcome.cannot_judge(claim, "the dense model has no sink in this text", method=method)
        return
    kept = {name: (dense.sinks & of.sinks).int() for name, of in measured.items()}
    outcome.judge("retains", kept_sinks(dense, measured["OATS"]).floored(), sparsity=f"{SPARSITY:.0%}")
    for name in others:
        gain = ratio_over_contexts(kept["OATS"] - kept[name], dense.sinks)
        outcome.judge("loses", gain.floored(), method=name)


def ablations(layer: int) -> dict[str, int | None]:
    """Name the ablations of OATS in a layer: name → control of `without_low_rank`."""
    return {
        f"OATS without the low-rank term of layer {layer}": None,
        f"OATS without a norm-matched random part of layer {layer}": CONTROL_SEED,
    }


@declared("sinks/figure4")
def figure_4(study: Study, outcome: Outcome) -> None:
    prompt = prompt_of(study)
    layer, dense = prompt.layer, measured_once(study, DENSE, study.require_model())
    measured = pruned_measures(study, "oats", ablations(layer))
    _read(outcome, "models", dense, measured, layer)
    oats = measured["OATS"]
    if (dense.sinks[:, layer] & oats.sinks[:, layer]).any():
        left = {name: kept_sinks(oats, measured[name], layer).floored() for name in ablations(layer)}
        judge_low_rank(outcome, left, layer)
    else:
        why = "the pruned model has none of the layer's sinks in this text"
        outcome.cannot_judge("low-rank", why, layer=layer)
    _draw(outcome, study, {DENSE: dense, **measured}, prompt, vectors=True)


def judge_low_rank(outcome: Outcome, left: Mapping[str, Estimate], layer: int) -> None:
    """Judge whether the sinks go with the low-rank term; in part where they go with a random part as large, too.

    left: share of the layer's sinks, without the term, and without the control; drawn with the limits of the claim.
    """
    parts = ("low-rank.removed", "low-rank.spared")
    removed, spared = (
        outcome.verdict(part, share, layer=layer, name=name)
        for part, (name, share) in zip(parts, left.items(), strict=True)
    )
    joined = all_of if removed.answer == FAILS else mix_of
    outcome.verdicts.append(joined(outcome.sentence("low-rank", layer=layer), [removed, spared]))
    drawn = intervals(left, "share left", {"range": [-0.03, 1.03]})
    for part in parts:
        limit = outcome.criterion(part).limit
        drawn.add_vline(x=limit, line={"dash": "dot", "width": 1, "color": style.REFERENCE})
    outcome.draw("left", drawn)


def _read(
    outcome: Outcome,
    key: str,
    dense: ModelSinks,
    measured: Mapping[str, ModelSinks],
    layer: int | None = None,
) -> None:
    """Report each model's sinks kept (of a layer, if named) and new over the dense model's, and the loss difference."""
    whose = "the dense model's sinks" + ("" if layer is None else f" in layer {layer}")
    rows = []
    for name, model in measured.items():
        estimates = kept_sinks(dense, model, layer), new_sinks(dense, model), loss_difference(dense, model)
        rows.append((name, *(number for each in estimates for number in (each.value, each.error))))
        kept, new, more = (with_error(each.value, each.error) for each in estimates)
        words = f"keeps {kept} of {whose}; the whole model has {new} times as many new sinks"
        outcome.read(name, f"{words}, and its loss is {more} nats more")
    columns = ["sinks_kept", "sinks_kept_se", "sinks_new", "sinks_new_se", "loss_more", "loss_more_se"]
    outcome.tables[key] = pd.DataFrame(rows, columns=["model", *columns])


def _draw(
    outcome: Outcome,
    study: Study,
    measured: Mapping[str, ModelSinks],
    prompt: Prompt,
    *,
    vectors: bool = False,
) -> None:
    """Draw every model's attention on the prompt, side by side; and `vectors`: the lower row of Figure 4.

    That is the head's output, and the residual stream behind its block, by dimension.
    """
    tokens = [shown_token(text) for text in token_texts(study.require_model(), prompt.ids)]
    traces = {name: model.prompt for name, model in measured.items() if model.prompt is not None}
    sinks = {name: [int(at) for at in trace.sinks if at >= 0] for name, trace in traces.items()}
    head = head_name(prompt.layer, prompt.head)
    maps = {name: attention(of.attention.numpy(), tokens, sinks[name]) for name, of in traces.items()}
    outcome.draw("maps", parallel_map(maps, square=True), head=head)
    if not vectors:
        return
    for key, of_models in (
        ("outputs", {name: trace.output.numpy() for name, trace in traces.items()}),
        ("outliers", {name: trace.streams[prompt.layer + 1].numpy() for name, trace in traces.items()}),
    ):
        figures = {
            name: by_dimension(values, tokens, sinks[name], scale_of=of_models[DENSE])
            for name, values in of_models.items()
        }
        outcome.draw(key, parallel_map(figures), head=head, layer=prompt.layer)


def parallel_map(figures: Mapping[str, go.Figure], *, square: bool = False) -> go.Figure:
    """Put heat maps of tokens side by side, one a model, in the same colours; only sinks are named."""
    rows = -(-len(figures) // COLUMNS)
    columns = -(-len(figures) // rows)
    height = PAGE * (1 - GAP * (columns - 1)) / columns if square else OUTPUT_HEIGHT
    shown: list[Panel] = []
    for index, (name, figure) in enumerate(figures.items()):
        x, y = (_fewer_labels(figure.layout[axis].to_plotly_json()) for axis in ("xaxis", "yaxis"))
        title, left = (axis.pop("title", {}).get("text", "") for axis in (x, y))
        trace = figure.data[0].update(showscale=index == 0)
        shown.append(Panel(name, [trace], title, "" if index % columns else left, x, y, square=square))
    total = rows * height + (rows - 1) * ROW_GAP
    layout = {"margin": {"l": 80, "t": 40, "b": 70}, "height": round(total) + 110}
    drawn = panels(shown, columns, gaps=(GAP, ROW_GAP / total), layout=layout)
    for heading in drawn.layout.annotations:
        heading.text = "<br>".join(textwrap.wrap(heading.text, WRAP // columns, break_long_words=False))
    return drawn


def _fewer_labels(axis: dict[str, Any]) -> dict[str, Any]:
    """Make an axis with room beside others: of tokens only the sinks, of dimensions every fourth label."""
    values, texts = np.array(axis["tickvals"]), np.array(axis["ticktext"])
    kept: Any = [MARK in text for text in texts] if "tickangle" in axis else slice(None, None, 4)
    return axis | {"tickvals": values[kept], "ticktext": texts[kept]}
