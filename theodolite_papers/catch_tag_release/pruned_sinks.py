"""Figures 4 and 5 of Zhang et al. 2025: which sinks pruning keeps, and the role of the low-rank term."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

from theodolite.estimates import Estimate
from theodolite.judging import FAILS, Criterion, Verdict, all_of, judge, mix_of
from theodolite.models.prompts import prompt_or_shipped
from theodolite.models.token_texts import token_texts
from theodolite.report.drawing import compare as figures_compare
from theodolite.report.drawing import prompt as figures_prompt
from theodolite.sinks.prompt import PromptTrace, trace_prompt
from theodolite.system.wording import head_name, shown_token, with_error
from theodolite_papers.catch_tag_release import tag_ablation as figures_ablations
from theodolite_papers.catch_tag_release.averaging_models import error_of_ratio
from theodolite_papers.catch_tag_release.pruned_models import (
    METHODS,
    SPARSITY,
    ModelSinks,
    Prompt,
    dense_measures,
    kept_sinks,
    loss_difference,
    new_sinks,
    pruned_measures,
)
from theodolite_papers.experiment import ZHANG, Outcome, Study, experiment

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


def _maps(
    outcome: Outcome, study: Study, measured: Mapping[str, ModelSinks], prompt: Prompt, source: str
) -> None:
    outcome.figure(
        "maps",
        f"Attention of {head_name(prompt.layer, prompt.head)} on one prompt",
        figures_compare.parallel_map(
            {
                name: figures_prompt.attention(trace.attention.numpy(), tokens, sinks)
                for name, trace, tokens, sinks in _on_prompt(study, measured, prompt)
            },
            square=True,
        ),
        "Queries down, keys across; only sinks are labelled, with ▼.",
        "strong columns of the dense model that are missing in another.",
        source,
        wide=True,
    )


def _on_prompt(
    study: Study, measured: Mapping[str, ModelSinks], prompt: Prompt
) -> Iterator[tuple[str, PromptTrace, list[str], list[int]]]:
    """Name, trace, shown tokens and sinks of each model."""
    tokens = [shown_token(text) for text in token_texts(study.require_model(), prompt.ids)]
    for name, model in measured.items():
        assert model.prompt is not None
        yield name, model.prompt, tokens, [int(place) for place in model.prompt.sinks if place >= 0]


def _outputs(outcome: Outcome, study: Study, measured: Mapping[str, ModelSinks], prompt: Prompt) -> None:
    """What the head writes and the residual stream behind its block, by dimension: Figure 4's lower row."""
    head, behind = head_name(prompt.layer, prompt.head), prompt.layer + 1
    traces = list(_on_prompt(study, measured, prompt))
    for key, what, vectors in (
        ("outputs", f"Output of {head}", [trace.output for _, trace, _, _ in traces]),
        (
            "outliers",
            f"Residual stream behind block {prompt.layer}",
            [trace.streams[behind] for _, trace, _, _ in traces],
        ),
    ):
        dense = vectors[0].numpy()
        figures = {
            name: figures_prompt.by_dimension(of_model.numpy(), tokens, sinks, scale_of=dense)
            for (name, _, tokens, sinks), of_model in zip(traces, vectors, strict=True)
        }
        outcome.figure(
            key,
            f"{what} on the prompt, by dimension",
            figures_compare.parallel_map(figures),
            f"Tokens down; the {figures_prompt.DIMENSIONS} largest dimensions of the dense model, in its colours.",
            "columns of one colour over caught tokens, which go with the low-rank term and stay under the control.",
            f"{ZHANG}, Fig. 4",
            wide=True,
        )


@experiment(
    "sinks/figure5",
    "One head of the dense model and pruned by four methods",
    "Wanda and SparseGPT at 50 % lose sinks that the dense model and OATS have (Fig. 5)",
    needs=("model",),
    options=("prompt", "layer", "head"),
)
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
    _maps(outcome, study, {DENSE: dense, **measured}, prompt, f"{ZHANG}, Fig. 5")


def _judge_oats(outcome: Outcome, dense: ModelSinks, oats: ModelSinks) -> None:
    claim = "OATS retains the attention sinks of the dense model (section 3.3, Fig. 5)"
    what = f"share of the dense model's sinks that OATS at {SPARSITY:.0%} has"
    outcome.claim(claim, what, _kept(dense, oats), KEEPS)


def _kept(dense: ModelSinks, other: ModelSinks, layer: int | None = None) -> Estimate:
    return Estimate(*kept_sinks(dense, other, layer), len(dense.sinks), "contexts").floored()


def _judge_method(
    outcome: Outcome, dense: ModelSinks, oats: ModelSinks, other: ModelSinks, name: str
) -> None:
    """Whether OATS keeps more sinks than another method: difference of the shares, paired by context."""
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
    """Whether the sinks go with the low-rank term; in part where they go with a random part as large, too."""
    removed, spared = (
        judge(claim, f"share of the layer's sinks that is left: {name}", share, criterion)
        for (name, share), criterion in zip(left.items(), (REMOVED, SPARED), strict=True)
    )
    return (all_of if removed.answer == FAILS else mix_of)(claim, [removed, spared])


def _left(outcome: Outcome, left: Mapping[str, Estimate]) -> None:
    outcome.figure(
        "left",
        "The layer's sinks that are left",
        figures_ablations.shares_left(left, (REMOVED.limit, SPARED.limit)),
        "Share of the pruned model's sinks that are left, with 95 % intervals. Dotted: the limits of the claim.",
        "the first one left of the left line, and the control right of the right one.",
        f"{ZHANG}, section 3.2; the control is ours",
    )


@experiment(
    "sinks/figure4",
    "One layer's sinks: dense, pruned by OATS, and without OATS's low-rank term",
    "Sinks are clear in both, and gone without the low-rank term of W_Q, W_K, W_V (Fig. 4)",
    needs=("model",),
    options=("prompt", "layer", "head"),
)
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
    _maps(outcome, study, {DENSE: dense, **measured}, prompt, f"{ZHANG}, Fig. 4")
    _outputs(outcome, study, {DENSE: dense, **measured}, prompt)
