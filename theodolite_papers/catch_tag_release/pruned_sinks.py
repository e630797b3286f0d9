"""Which sinks pruning keeps, and the role of the low-rank term (Figs. 4 and 5 of Zhang et al. 2025).

A model is pruned in memory: even contexts calibrate it, losses and sinks are measured on odd ones and on one prompt.
"""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from theodolite import Corpus, OpenModel
from theodolite.attention.catches import attend_and_catch
from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import UsageError
from theodolite.evaluate.scores import mean_and_error
from theodolite.measure.ratios import ratio_by_context
from theodolite.models.hooks import Hooks, hooked
from theodolite.passes.corpus_pass import batch_of
from theodolite.prune.model import prune_model
from theodolite.report import style
from theodolite.report.data import evenly
from theodolite.sinks.interventions import without_low_rank
from theodolite.sinks.prompt import PromptTrace, trace_prompt

if TYPE_CHECKING:
    from theodolite_papers.experiment import Study
from collections.abc import Iterator

import pandas as pd

from theodolite.estimates import Estimate
from theodolite.judging import FAILS, Criterion, Verdict, all_of, judge, mix_of
from theodolite.models.prompts import prompt_or_shipped
from theodolite.models.token_texts import token_texts
from theodolite.report.drawing import compare as figures_compare
from theodolite.report.drawing import prompt as figures_prompt
from theodolite.system.wording import for_plotly, head_name, shown_token, with_error
from theodolite_papers.catch_tag_release.averaging import error_of_ratio
from theodolite_papers.experiment import Outcome, Study, declared

METHODS = {"oats": "OATS", "wanda": "Wanda", "sparsegpt": "SparseGPT", "magnitude": "magnitude"}

SPARSITY = 0.5
"""As in the paper's figures."""

ITERATIONS, RANK_RATIO = 80, 0.25
"""Of OATS, as published."""

MOST_CONTEXTS = 128
"""That are measured, evenly chosen, and as many that calibrate."""


@dataclass(frozen=True)
class ModelSinks:
    """A model's next-token losses in nats per token, the sinks of each context, and one head on one prompt."""

    loss: Float[Tensor, " contexts"]
    sinks: Bool[Tensor, "contexts layers heads positions"]
    prompt: PromptTrace | None = None


@dataclass(frozen=True)
class Prompt:
    """The head that is shown, and on which prompt."""

    ids: Tensor
    layer: int
    head: int


class _SinkHooks(Hooks):
    """Notes the sinks of one batch."""

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
    """Measure a model as it is now."""
    losses, sinks = [], []
    for ids in corpus.contexts.split(batch_of(corpus, None)):
        batch_sinks = _SinkHooks(len(ids), model.layers, model.heads, ids.shape[1])
        ids = ids.to(model.device)
        with hooked(model, batch_sinks):
            logits = model.logits(ids)
        pairs = zip(logits, ids, strict=True)
        by_context = [cross_entropy(row[:-1].double(), tokens[1:]) for row, tokens in pairs]
        losses.append(torch.stack(by_context).cpu())
        sinks.append(batch_sinks.sinks)
    traced = None if prompt is None else trace_prompt(model, prompt.ids, prompt.layer, prompt.head)
    return ModelSinks(torch.cat(losses), torch.cat(sinks), traced)


def kept_sinks(dense: ModelSinks, other: ModelSinks, layer: int | None = None) -> tuple[float, float]:
    """Share of a model's sinks, by context and key, that another has; its standard error over contexts."""
    return _ratio(dense.sinks & other.sinks, dense.sinks, layer)


def new_sinks(dense: ModelSinks, other: ModelSinks) -> tuple[float, float]:
    """Sinks of another model that the first lacks, over the first one's; its standard error over contexts."""
    return _ratio(other.sinks & ~dense.sinks, dense.sinks, None)


def _ratio(part: Tensor, reference: Tensor, layer: int | None) -> tuple[float, float]:
    b, t = ((s if layer is None else s[:, layer]).flatten(1).sum(1).double() for s in (part, reference))
    value, error = ratio_by_context(b, t)
    return float(value), float(error)


def loss_difference(dense: ModelSinks, other: ModelSinks) -> tuple[float, float]:
    """Mean loss of another model less that of the first, and its standard error: paired by context."""
    return mean_and_error((other.loss - dense.loss).numpy())


def halves(study: Study) -> tuple[Corpus, Corpus]:
    """Split the text in two: contexts that calibrate the pruning, and contexts on which it is measured."""
    model = study.require_model()
    corpus = study.require_corpus("pruned models are calibrated and measured on a text: pass it with the run")
    if len(corpus.contexts) < 4:
        raise UsageError(
            f"{len(corpus.contexts)} contexts are too few to calibrate and to measure: give 4 or more"
        )
    if not model.causal or model.source.predict is None:
        raise UsageError(f"{model.id} does not predict next tokens: pruned models are judged by that loss")
    return part_of(corpus, 0), part_of(corpus, 1)


def part_of(corpus: Corpus, first: int) -> Corpus:
    """Every second context of a corpus from the `first` on, `MOST_CONTEXTS` at most, evenly chosen."""
    rows = range(first, len(corpus.contexts), 2)
    return corpus.subset(torch.tensor([rows[place] for place in evenly(len(rows), MOST_CONTEXTS)]))


def dense_measures(study: Study, prompt: Prompt) -> ModelSinks:
    """The model itself; measured once, since a study has one prompt."""
    _, measured = halves(study)
    return study.cached("dense sinks", lambda: measure_sinks(study.require_model(), measured, prompt))


def pruned_measures(
    study: Study, method: str, prompt: Prompt, ablations: Mapping[str, int | None] | None = None
) -> dict[str, ModelSinks]:
    """A copy of the model, pruned by `SPARSITY`: as it is, by the method's name, and without low-rank terms.

    ablations: name → control of `without_low_rank` in the prompt's layer.
    """
    calibration, measured = halves(study)
    model = copy.deepcopy(study.require_model())
    pruned = prune_model(
        model,
        calibration,
        method,
        SPARSITY,
        rank_ratio=RANK_RATIO,
        iterations=ITERATIONS,
        show_progress=partial(study.show, f"pruning by {METHODS[method]}, {SPARSITY:.0%}"),
    )
    measures, layer = {METHODS[method]: measure_sinks(model, measured, prompt)}, prompt.layer
    for name, control in (ablations or {}).items():
        with without_low_rank(model, layer, factors=pruned.factors(layer), control=control):
            measures[name] = measure_sinks(model, measured, prompt)
    return measures


DENSE = "dense"
CONTROL_SEED = 0

KEEPS = Criterion("at least", 0.9, "“retains” read as: nine tenths of the sinks (ours)")
MORE = Criterion("more than", 0.0, "the other method keeps fewer")
REMOVED = Criterion("at most", 0.1, "“fully removes” read as: a tenth of the layer's sinks is left (ours)")
SPARED = Criterion("at least", 0.9, "an untargeted control leaves nine tenths (ours)")


def _prompt(study: Study) -> Prompt:
    """The prompt and head asked for, or the shipped prompt and the dense model's strongest head on it."""
    model, focus = study.require_model(), study.focus
    ids = prompt_or_shipped(model, focus.prompt, "inference")
    if focus.layer is not None and focus.head is not None:
        return Prompt(ids, focus.layer, focus.head)
    strongest = study.cached("strongest head", lambda: trace_prompt(model, ids))
    return Prompt(ids, strongest.layer, strongest.head)


def _table(dense: ModelSinks, measured: Mapping[str, ModelSinks], layer: int | None = None) -> pd.DataFrame:
    """One row per model: sinks kept (of a layer, if named) and new over the dense model's, and the loss difference."""
    columns = ("sinks_kept", "sinks_kept_se", "sinks_new", "sinks_new_se", "loss_more", "loss_more_se")
    rows = []
    for name, model in measured.items():
        kept, new = kept_sinks(dense, model, layer), new_sinks(dense, model)
        numbers = *kept, *new, *loss_difference(dense, model)
        rows.append({"model": name} | dict(zip(columns, numbers, strict=True)))
    return pd.DataFrame(rows)


def _read(outcome: Outcome, table: pd.DataFrame, whose: str) -> None:
    """Levels of `_table`; `whose`: the sinks of which a share is kept. New sinks and the loss are the whole model's."""
    for row in table.itertuples():
        outcome.read(
            row.model,
            f"keeps {with_error(row.sinks_kept, row.sinks_kept_se)} of {whose}; the whole model has "
            f"{with_error(row.sinks_new, row.sinks_new_se)} times as many new sinks, and its loss is "
            f"{with_error(row.loss_more, row.loss_more_se)} nats more",
        )


def _maps(outcome: Outcome, study: Study, measured: Mapping[str, ModelSinks], prompt: Prompt) -> None:
    figures = {
        name: figures_prompt.attention(trace.attention.numpy(), tokens, sinks)
        for name, trace, tokens, sinks in _on_prompt(study, measured, prompt)
    }
    drawn = figures_compare.parallel_map(figures, square=True)
    outcome.draw("maps", drawn, head=head_name(prompt.layer, prompt.head))


def _on_prompt(
    study: Study, measured: Mapping[str, ModelSinks], prompt: Prompt
) -> Iterator[tuple[str, PromptTrace, list[str], list[int]]]:
    """Name, trace, shown tokens and sinks of each model."""
    tokens = [shown_token(text) for text in token_texts(study.require_model(), prompt.ids)]
    for name, model in measured.items():
        assert model.prompt is not None
        yield name, model.prompt, tokens, [int(place) for place in model.prompt.sinks if place >= 0]


def _outputs(outcome: Outcome, study: Study, measured: Mapping[str, ModelSinks], prompt: Prompt) -> None:
    """Draw the head's output and the residual stream behind its block, by dimension: the lower row of Figure 4."""
    traces = list(_on_prompt(study, measured, prompt))
    for key, vectors in (
        ("outputs", [trace.output for _, trace, _, _ in traces]),
        ("outliers", [trace.streams[prompt.layer + 1] for _, trace, _, _ in traces]),
    ):
        dense = vectors[0].numpy()
        figures = {
            name: figures_prompt.by_dimension(of_model.numpy(), tokens, sinks, scale_of=dense)
            for (name, _, tokens, sinks), of_model in zip(traces, vectors, strict=True)
        }
        head, drawn = head_name(prompt.layer, prompt.head), figures_compare.parallel_map(figures)
        outcome.draw(key, drawn, head=head, layer=prompt.layer)


@declared("sinks/figure5")
def figure_5(study: Study, outcome: Outcome) -> None:
    prompt = _prompt(study)
    dense = dense_measures(study, prompt)
    measured: dict[str, ModelSinks] = {}
    for method in METHODS:
        measured |= pruned_measures(study, method, prompt)
    outcome.tables["methods"] = table = _table(dense, measured)
    _read(outcome, table, "the dense model's sinks")
    if not dense.sinks.any():
        why = "the dense model has no sink in this text"
        outcome.cannot_test("Only OATS retains the sinks (Fig. 5)", why)
    else:
        _judge_oats(outcome, dense, measured["OATS"])
        for name in ("Wanda", "SparseGPT", "magnitude"):
            _judge_method(outcome, dense, measured["OATS"], measured[name], name)
    _maps(outcome, study, {DENSE: dense, **measured}, prompt)


def _judge_oats(outcome: Outcome, dense: ModelSinks, oats: ModelSinks) -> None:
    claim = "OATS retains the attention sinks of the dense model (section 3.3, Fig. 5)"
    what = f"share of the dense model's sinks that OATS at {SPARSITY:.0%} has"
    outcome.claim(claim, what, _kept(dense, oats), KEEPS)


def _kept(dense: ModelSinks, other: ModelSinks, layer: int | None = None) -> Estimate:
    return Estimate(*kept_sinks(dense, other, layer), len(dense.sinks), "contexts").floored()


def _judge_method(
    outcome: Outcome, dense: ModelSinks, oats: ModelSinks, other: ModelSinks, name: str
) -> None:
    """Judge whether OATS keeps more sinks than another method: difference of the shares, paired by context."""
    count = dense.sinks.flatten(1).sum(1).double()
    common = [(dense.sinks & model.sinks).flatten(1).sum(1).double() for model in (oats, other)]
    gain = common[0] - common[1]
    mean, error = float(gain.sum() / count.sum()), float(error_of_ratio(gain[None], count[None]))
    claim = f"{name} loses sinks that OATS retains (section 3.3, Fig. 5)"
    what = f"share kept by OATS less that kept by {name} (paired by context)"
    outcome.claim(claim, what, Estimate(mean, error, len(gain), "contexts").floored(), MORE)


def _ablations(layer: int) -> dict[str, int | None]:
    return {
        f"OATS without the low-rank term of layer {layer}": None,
        f"OATS without a norm-matched random part of layer {layer}": CONTROL_SEED,
    }


def judge_low_rank(claim: str, left: Mapping[str, Estimate]) -> Verdict:
    """Judge whether the sinks go with the low-rank term; in part where they go with a random part as large, too."""
    removed, spared = (
        judge(claim, f"share of the layer's sinks that is left: {name}", share, criterion)
        for (name, share), criterion in zip(left.items(), (REMOVED, SPARED), strict=True)
    )
    return (all_of if removed.answer == FAILS else mix_of)(claim, [removed, spared])


def _left(outcome: Outcome, left: Mapping[str, Estimate]) -> None:
    """Draw one dot per ablation with its 95 % interval, and a dotted line at each limit of the claim."""
    names = ["<br>".join(map(for_plotly, textwrap.wrap(name, 44))) for name in left]
    dots = go.Scatter(
        x=np.array([share.value for share in left.values()], dtype=np.float32),
        y=names,
        mode="markers",
        marker={"size": 11, "color": style.BLUE},
        error_x=style.error_bars([share.margin for share in left.values()]),
        hovertemplate="%{y}: %{x:.3f}<extra></extra>",
    )
    layout = {"xaxis": {"range": [-0.03, 1.03]}, "yaxis": {"autorange": "reversed", "automargin": True}}
    drawn = style.figure([dots], "share left", height=150 + 60 * len(names), layout=layout)
    for limit in (REMOVED.limit, SPARED.limit):
        drawn.add_vline(x=limit, line={"dash": "dot", "width": 1, "color": style.REFERENCE})
    outcome.draw("left", drawn)


@declared("sinks/figure4")
def figure_4(study: Study, outcome: Outcome) -> None:
    prompt = _prompt(study)
    layer, dense = prompt.layer, dense_measures(study, prompt)
    measured = pruned_measures(study, "oats", prompt, _ablations(layer))
    outcome.tables["models"] = table = _table(dense, measured, layer)
    _read(outcome, table, f"the dense model's sinks in layer {layer}")
    claim = f"The low-rank term is responsible for the sinks of layer {layer}: ablating it removes them (section 3.2)"
    oats = measured["OATS"]
    if not (dense.sinks[:, layer] & oats.sinks[:, layer]).any():
        outcome.cannot_test(claim, "the pruned model has none of the layer's sinks in this text")
    else:
        left = {name: _kept(oats, measured[name], layer) for name in _ablations(layer)}
        outcome.verdicts.append(judge_low_rank(claim, left))
        _left(outcome, left)
    _maps(outcome, study, {DENSE: dense, **measured}, prompt)
    _outputs(outcome, study, {DENSE: dense, **measured}, prompt)
