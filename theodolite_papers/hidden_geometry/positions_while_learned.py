"""The positional basis while it is learned (sections 2 and 7): every checkpoint of a training run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from theodolite import Corpus, OpenModel, Run, open_model
from theodolite.errors import UsageError
from theodolite.estimates import Estimate
from theodolite.judging import OPEN, Criterion, Verdict, all_of, opposite_of
from theodolite.passes.positions import read_means
from theodolite.report.data import OF_GROUPS, evenly, layer_estimates, need
from theodolite.system.wording import listed, number
from theodolite_papers import drawing
from theodolite_papers.experiment import Outcome, Study, declared
from theodolite_papers.hidden_geometry.addition import of_an_adder
from theodolite_papers.hidden_geometry.layer_columns import (
    LEAST_POSITIONS,
    bases_of,
    estimates_of,
    shown,
    unless_hidden,
)
from theodolite_papers.hidden_geometry.positional_basis import shape_of
from theodolite_papers.training.tasks import Additions

SERIES = "series"
SURVEYED_CONTEXTS = 64
"""Of the run's contexts, evenly chosen, for each checkpoint: a fixed cost, whatever the corpus."""

SHOWN_STEPS, SHOWN_LAYERS = 10, 7

MEASURES = {
    "rank": "rank (replicated directions)",
    "relative_norm": "relative norm",
    "low_frequency_10": "share of energy at K = 10",
    "roughness": "roughness (random order: 1)",
    "turns": "turns about the centre",
    "incoherence_mean": "incoherence (root mean square cosine)",
}


def series_of(model: OpenModel) -> dict[int, Path]:
    """List training steps with their checkpoints, of the folder the model was opened from, or next to it."""
    folder = Path(model.id)
    series_folder = folder.parent if folder.parent.name == SERIES else folder / SERIES
    paths = sorted(series_folder.iterdir()) if series_folder.is_dir() else []
    named = [path for path in paths if path.name.isdigit() and (path / "config.json").is_file()]
    steps = {int(path.name): path for path in named}
    if len(steps) < 2:
        raise UsageError(
            f"{model.id} has no series of checkpoints next to its weights: make one with "
            "`theodolite train characters --series` or `theodolite train addition --series`, and pass that folder"
        )
    return steps


def some_contexts(corpus: Corpus) -> Corpus:
    """Choose at most `SURVEYED_CONTEXTS` contexts of a corpus, evenly."""
    return corpus.subset(torch.tensor(evenly(len(corpus.contexts), SURVEYED_CONTEXTS)))


def _surveyed(study: Study) -> tuple[dict[int, Run], pd.DataFrame]:
    """Survey each step's checkpoint; and tabulate `MEASURES` with standard errors by step and layer."""
    why = "geometry/training surveys every checkpoint on the text of the run: pass the text as well"
    model, corpus = study.require_model(), study.require_corpus(why)
    contexts, runs, parts = some_contexts(corpus), {}, []
    for step, path in series_of(model).items():
        checkpoint = open_model(path, dtype=model.source.dtype, device=model.device)
        name = f"step-{step:06d}-{(checkpoint.sha256 or '')[:8]}-{contexts.sha256[:8]}"
        run_folder = None if study.folder is None else study.folder / name
        runs[step] = run = study.survey(checkpoint, contexts, run_folder)
        bases = bases_of(read_means(checkpoint, contexts, show_progress=study.show)[0])
        shape = {} if bases is None else shape_of(bases)
        columns = {
            name: estimates_of(shape[name]) if name in shape else layer_estimates(run, name)
            for name in MEASURES
        }
        values = {name: each.values for name, each in columns.items()}
        errors = {f"{name}_se": each.errors for name, each in columns.items()}
        parts.append(pd.DataFrame({"step": step, "layer": range(len(run.layers))} | values | errors))
    return runs, pd.concat(parts, ignore_index=True)


def needed_for(outcome: Outcome, key: str) -> dict[str, Criterion]:
    """Return what the positions of a layer must all meet for a claim: measure → criterion."""
    return {name: outcome.criterion(f"{key}.{name}") for name in outcome.parts(key)}


def met_at(rows: pd.DataFrame, needed: Mapping[str, Criterion]) -> list[bool]:
    """Return whether each row, one step of a layer, meets all criteria."""
    return np.all([rule.met(rows[name].to_numpy()) for name, rule in needed.items()], axis=0).tolist()


def _when(steps: list[int], met: list[bool]) -> str:
    """Word when it holds: `first at step 100, and stays to step 5000`."""
    if not any(met):
        return "at no step"
    start = met.index(True)
    gaps = [str(step) for step, yes in zip(steps[start:], met[start:], strict=True) if not yes]
    if start == len(steps) - 1:
        return f"at step {steps[-1]}, the last one, only"
    stays = f"but not at step {listed(gaps)}" if gaps else f"and stays to step {steps[-1]}"
    return f"first at step {steps[start]}, {stays}"


def appears(outcome: Outcome, key: str, table: pd.DataFrame, layer: int, *, expected: bool = True) -> Verdict:
    """Judge whether a layer comes to meet all parts of a claim in training: not at the first step, and at the last."""
    claim, needed = outcome.sentence(key, layer=layer), needed_for(outcome, key)
    rows = table[table["layer"] == layer].sort_values("step", ignore_index=True)
    met, steps = met_at(rows, needed), rows["step"].tolist()
    ends, numbers_at = [], []
    for _, row in rows.iloc[[0, -1]].iterrows():
        numbers = {name: Estimate(float(row[name]), float(row[f"{name}_se"]), *OF_GROUPS) for name in needed}
        numbers_at.append(", ".join(f"{MEASURES[name]} {shown(each)}" for name, each in numbers.items()))
        verdicts = [
            unless_hidden(outcome.verdict(f"{key}.{name}", each, layer=layer), np.isnan([each.value]))
            for name, each in numbers.items()
        ]
        ends.append(all_of(f"all criteria are met at step {row['step']:g}", verdicts))
    before, after = ends
    limits = ", ".join(f"{MEASURES[name]} {rule.side} {number(rule.limit)}" for name, rule in needed.items())
    evidence = (
        f"all criteria are met {_when(steps, met)}; step {steps[0]}: {numbers_at[0]}; step {steps[-1]}: "
        f"{numbers_at[1]}; "
        f"criteria, as in tables 2 and 6 and figure 1: {limits}"
    )
    for step, verdict in ((steps[0], before), (steps[-1], after)):
        if verdict.answer in OPEN:
            evidence += f"; at step {step} {verdict.answer}, with the standard errors"
    not_before = opposite_of(f"not {before.claim}", before)
    learned = replace(all_of(claim, [after, not_before]), evidence=evidence)
    return learned if expected else opposite_of(claim, learned)


def judge_layer(
    outcome: Outcome, table: pd.DataFrame, layer: int, run: Run, model: OpenModel | None = None
) -> None:
    """Judge one layer of the series whose last checkpoint, `model`, gave `run`."""
    positions = need(run, "positional_basis").shape[1] - 1
    if positions < LEAST_POSITIONS:
        why = f"{positions} positions; at least {LEAST_POSITIONS} can be judged"
        outcome.cannot_judge("learned", why, layer=layer)
    elif Additions.named(run.provenance["corpus"]["name"]):
        verdict = appears(outcome, "not-on-addition", table, layer, expected=False)
        outcome.verdicts.append(of_an_adder(model, run, verdict, verdict.evidence))
    else:
        outcome.verdicts += [appears(outcome, claim, table, layer) for claim in ("learned", "spiral")]


@declared("geometry/training")
def training(study: Study, outcome: Outcome) -> None:
    runs, table = _surveyed(study)
    steps, run = list(runs), runs[max(runs)]
    outcome.tables["steps"] = table
    by_step = table.pivot(index="step", columns="layer")  # of every column a table of steps and layers
    grids = {
        title: (by_step[name].to_numpy(), by_step[f"{name}_se"].to_numpy())
        for name, title in MEASURES.items()
    }
    for title, (means, _) in grids.items():
        pairs = zip(steps, means, strict=True)
        shown = [f"{step}: {number(float(np.nanmean(row)))}" for step, row in pairs if np.isfinite(row).any()]
        outcome.read(f"{title}, mean over layers, by step", ", ".join(shown))
    last = study.require_model()
    if Additions.named(run.provenance["corpus"]["name"]):  # the given model may be an earlier checkpoint
        last = open_model(series_of(last)[steps[-1]], dtype=last.source.dtype, device=last.device)
    for layer in sorted({1, int(table["layer"].max()) // 2} - {0}):
        judge_layer(outcome, table, layer, run, last)
    drawn_steps = [steps[place] for place in evenly(len(steps), SHOWN_STEPS)]
    layers = evenly(len(need(run, "positional_pca")), SHOWN_LAYERS)
    curves = np.stack([need(runs[step], "positional_pca")[layers, 1:, :2] for step in drawn_steps])
    outcome.draw("curves", drawing.curves_by_step(drawn_steps, layers, curves.astype(np.float64)))
    limits = {MEASURES[name]: rule.limit for name, rule in needed_for(outcome, "spiral").items()}
    outcome.draw("measures", drawing.measures_by_step(steps, grids, limits))
    outcome.runs |= {f"step {step}": each.provenance for step, each in runs.items()}
