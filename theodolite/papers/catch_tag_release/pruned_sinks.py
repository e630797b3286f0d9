"""Figures 4 and 5 of Zhang et al. 2025: which sinks pruning keeps, and the role of the low-rank term.

The model is pruned in memory. `theodolite compare` does the same for existing checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

import numpy as np
import pandas as pd

from theodolite.judging import UNTESTABLE, Criterion, Estimate, Verdict, judge
from theodolite.models import OpenModel
from theodolite.models.prompts import prompt_or_shipped
from theodolite.models.token_texts import token_texts
from theodolite.papers.catch_tag_release.pruned_models import (
    METHODS,
    SPARSITY,
    ModelSinks,
    Prompt,
    ablated_measures,
    dense_measures,
    kept_sinks,
    loss_difference,
    new_sinks,
    pruned_measures,
)
from theodolite.papers.experiment import Study, experiment
from theodolite.prune import Pruned
from theodolite.report.drawing import compare as figures_compare
from theodolite.report.drawing import prompt as figures_prompt
from theodolite.report.exhibit import Exhibit
from theodolite.report.measures import ZHANG
from theodolite.report.outcome import Outcome, Reading
from theodolite.sinks.interventions import without_low_rank
from theodolite.sinks.prompt import trace_prompt
from theodolite.system.wording import head_name, shown_token, with_error

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
    """One row per model: sinks kept and new over the dense model's, and the loss beyond its own."""
    rows = []
    for name, model in measured.items():
        share, new, loss = (
            kept_sinks(dense, model, layer),
            new_sinks(dense, model),
            loss_difference(dense, model),
        )
        rows.append(
            {
                "model": name,
                "sinks_kept": share[0],
                "sinks_kept_se": share[1],
                "sinks_new": new[0],
                "sinks_new_se": new[1],
                "loss_more": loss[0],
                "loss_more_se": loss[1],
            }
        )
    return pd.DataFrame(rows)


def _readings(table: pd.DataFrame) -> list[Reading]:
    return [
        Reading(
            row.model,
            f"keeps {with_error(row.sinks_kept, row.sinks_kept_se)} of the dense model's sinks, has "
            f"{with_error(row.sinks_new, row.sinks_new_se)} times as many new ones; loss "
            f"{with_error(row.loss_more, row.loss_more_se)} nats more",
        )
        for row in table.itertuples()
    ]


def _maps(study: Study, measured: Mapping[str, ModelSinks], prompt: Prompt, source: str) -> Exhibit:
    tokens = [shown_token(text) for text in token_texts(study.require_model(), prompt.ids)]
    figures = {}
    for name, model in measured.items():
        assert model.prompt is not None
        sinks = [int(place) for place in model.prompt.sinks if place >= 0]
        figures[name] = figures_prompt.attention(model.prompt.attention.numpy(), tokens, sinks)
    return Exhibit(
        "maps",
        f"Attention of {head_name(prompt.layer, prompt.head)} on one prompt",
        figures_compare.parallel_map(figures, square=True),
        "Queries down, keys across; only sinks are labelled, with ▼.",
        "strong columns of the dense model that are missing in another.",
        source,
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
    measured = {name: pruned_measures(study, method, prompt) for method, name in METHODS.items()}
    table = _table(dense, measured)
    if not dense.sinks.any():
        why = "the dense model has no sink in this text"
        verdicts = [Verdict("Only OATS retains the sinks (Fig. 5)", UNTESTABLE, why)]
    else:
        verdicts = [_oats_verdict(dense, measured["OATS"])]
        verdicts += [
            _method_verdict(dense, measured["OATS"], measured[name], name)
            for name in ("Wanda", "SparseGPT", "magnitude")
        ]
    outcome.readings += _readings(table)
    outcome.verdicts += verdicts
    outcome.tables |= {"methods": table}
    outcome.exhibits += [_maps(study, {DENSE: dense, **measured}, prompt, f"{ZHANG}, Fig. 5")]


def _oats_verdict(dense: ModelSinks, oats: ModelSinks) -> Verdict:
    value, error = kept_sinks(dense, oats)
    what = f"share of the dense model's sinks that OATS at {SPARSITY:.0%} has"
    return judge(
        "OATS retains the attention sinks of the dense model (section 3.3, Fig. 5)",
        what,
        Estimate(value, error),
        KEEPS,
    )


def _method_verdict(dense: ModelSinks, oats: ModelSinks, other: ModelSinks, name: str) -> Verdict:
    """Whether OATS keeps more sinks than another method: difference of the shares, paired by context."""
    count = dense.sinks.flatten(1).sum(1).double()
    common = [(dense.sinks & model.sinks).flatten(1).sum(1).double() for model in (oats, other)]
    gain = (common[0] - common[1]).numpy()
    mean = float(gain.sum() / count.sum())
    residual = gain - mean * count.numpy()
    error = float(np.sqrt((residual**2).sum() * len(gain) / (len(gain) - 1)) / float(count.sum()))
    what = f"share kept by OATS less that kept by {name} (paired by context)"
    return judge(
        f"{name} loses sinks that OATS retains (section 3.3, Fig. 5)", what, Estimate(mean, error), MORE
    )


def _ablations(layer: int) -> dict[str, int | None]:
    return {
        f"OATS without the low-rank term of layer {layer}": None,
        f"OATS without a norm-matched random part of layer {layer}": CONTROL_SEED,
    }


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

    def edits(model: OpenModel, pruned: Pruned) -> Iterator[tuple[str, AbstractContextManager[object]]]:
        for name, seed in _ablations(layer).items():
            yield name, without_low_rank(model, layer, factors=pruned.factors(layer), control=seed)

    measured = {name or "OATS": model for name, model in ablated_measures(study, edits, prompt).items()}
    table = _table(dense, measured, layer)
    claim = f"The low-rank term is responsible for the sinks of layer {layer}: ablating it removes them (section 3.2)"
    if not (dense.sinks[:, layer] & measured["OATS"].sinks[:, layer]).any():
        verdicts = [Verdict(claim, UNTESTABLE, "the pruned model has none of the layer's sinks in this text")]
    else:
        gone, spared = (
            (name, kept_sinks(measured["OATS"], measured[name], layer)) for name in _ablations(layer)
        )
        verdicts = [
            judge(
                claim,
                f"share of the layer's sinks that is left: {gone[0]}",
                Estimate(gone[1][0], gone[1][1]),
                REMOVED,
            ),
            judge(
                "The effect is specific to this term: a norm-matched random change does not have it (control, ours)",
                f"share of the layer's sinks that is left: {spared[0]}",
                Estimate(spared[1][0], spared[1][1]),
                SPARED,
            ),
        ]
    outcome.readings += _readings(table)
    outcome.verdicts += verdicts
    outcome.tables |= {"models": table}
    outcome.exhibits += [_maps(study, {DENSE: dense, **measured}, prompt, f"{ZHANG}, Fig. 4")]
