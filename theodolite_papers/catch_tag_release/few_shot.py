"""Fig. 3 of Zhang et al. 2025: accuracy against the number of examples, dense and pruned, on the offline task."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch

from theodolite import Corpus, open_model
from theodolite.corpus.few_shot_task import CORPUS_STREAM, NAME, RULES
from theodolite.estimates import Estimate
from theodolite.evaluate.few_shot import PROMPTS, few_shot_answers
from theodolite.evaluate.scores import mean_and_error, over_seeds
from theodolite.judging import Criterion
from theodolite.prune.model import prune_model
from theodolite.report import style
from theodolite.report.data import Floats
from theodolite.report.drawing.grammar import dots, line
from theodolite.system.progress import ShowStage, shown
from theodolite.system.wording import counted, for_plotly, percent, with_error
from theodolite_papers.catch_tag_release.pruned_models import METHODS
from theodolite_papers.drawing.localization import whiskers
from theodolite_papers.experiment import ZHANG, Outcome, Study, experiment, of_trainings

FIGURE_HEIGHT = 380
ASIDE = 0.05
"""Of an example, between the markers of neighbouring models: their intervals must not hide each other."""


def accuracy_by_shots(
    means: pd.DataFrame,
    by_seed: pd.DataFrame | None = None,
    *,
    chance: float = math.nan,
    best: Sequence[float] = (),
) -> go.Figure:
    """Accuracy of several models after k examples, with intervals.

    means: `model shots accuracy low high`. by_seed: `model seed shots accuracy accuracy_se`; None: no markers.
    """
    models = list(dict.fromkeys(means["model"]))
    lines: list[Any] = []
    for index, (model, colour) in enumerate(zip(models, style.CATEGORIES, strict=False)):
        shift = ASIDE * (index - (len(models) - 1) / 2)
        if by_seed is not None:
            lines.append(_marks(by_seed[by_seed["model"] == model], colour, shift))
        lines += _line(model, means[means["model"] == model], colour, shift)
    shots = sorted(set(means["shots"]))
    if len(best):
        lines += _bound("best possible", list(range(len(best))), best, "dash")
    if math.isfinite(chance):
        lines += _bound("chance", shots, [chance] * len(shots), "dot")
    layout = {
        "xaxis": {"tickmode": "array", "tickvals": shots, "zeroline": False},
        "yaxis": {"tickformat": ".0%", "zeroline": False},
    }
    return style.figure(lines, "examples in the prompt", "accuracy", height=FIGURE_HEIGHT, layout=layout)


def _line(model: str, rows: pd.DataFrame, colour: str, shift: float) -> list[Any]:
    accuracy, low, high = (rows[name].to_numpy(np.float64) for name in ("accuracy", "low", "high"))
    name = for_plotly(model)
    shares = zip(rows["shots"], accuracy, low, high, strict=True)
    own: dict[str, Any] = {"error_y": whiskers(accuracy, low, high), "legendgroup": name, "marker": 6}
    own["customdata"] = [[shots, *map(percent, values)] for shots, *values in shares]
    hover = (
        f"{name}, %{{customdata[0]}} examples: %{{customdata[1]}} (%{{customdata[2]}} to %{{customdata[3]}})"
    )
    at = rows["shots"].to_numpy(np.float64) + shift
    return line(at, accuracy, model, colour, hover=f"{hover}<extra></extra>", **own)


def _marks(rows: pd.DataFrame, colour: str, shift: float) -> dict[str, Any]:
    """One open circle a seed."""
    name = for_plotly(rows["model"].iloc[0]) if len(rows) else ""
    notes = [[row.shots, row.seed, with_error(row.accuracy, row.accuracy_se)] for row in rows.itertuples()]
    hover = f"{name}, seed %{{customdata[1]}}, %{{customdata[0]}} examples: %{{customdata[2]}}<extra></extra>"
    own = {"opacity": 0.6, "legendgroup": name, "showlegend": False, "customdata": notes}
    marker, at = {"size": 4, "symbol": "circle-open"}, rows["shots"].to_numpy(np.float64) + shift
    return dots(at, rows["accuracy"], None, None, colour, hover, marker=marker, **own)


def _bound(name: str, shots: Sequence[int], values: Sequence[float], dash: str) -> list[Any]:
    hover = f"{name}, %{{x}} examples: %{{y:.1%}}<extra></extra>"
    return line(shots, values, name, style.GREY, dash=dash, width=1.2, hover=hover)


COMMAND = "theodolite train few-shot"

DENSE = "dense"
SPARSITIES = (0.5, 0.7)
"""The paper's, and one at which small models lose more."""

CALIBRATION = 512
"""Prompts that pruning is calibrated on; no model was trained or is tested on them."""

PROMPT_SEED = 1
"""Seed of the prompts that all models answer."""

EXAMPLES_HELP = Criterion("more than", 0.0, "higher accuracy with five examples than with none")
WIDENS = Criterion("more than", 0.0, "a larger gap with five examples than with none")
SIMILAR = Criterion("within", 0.02, "“similarly” read as: two points of accuracy (ours)")


def calibration_prompts() -> Corpus:
    """The prompts that pruning is calibrated on."""
    prompts = RULES.draw(CALIBRATION, np.random.default_rng([PROMPT_SEED, CORPUS_STREAM]))
    return Corpus.from_ids(torch.from_numpy(prompts.ids))


def shots_table(folder: Path, show: ShowStage = lambda what, done, total: None) -> pd.DataFrame:
    """One row per model, sparsity, method and number of examples: accuracy with its binomial standard error."""
    calibration = calibration_prompts()
    rows: list[dict[str, Any]] = []
    for model_folder in models_in(folder):
        dense = open_model(model_folder, device="cpu")
        seed = json.loads((model_folder / "training.json").read_text(encoding="utf-8"))["seed"]
        answers = few_shot_answers(dense, prompts=PROMPTS, seed=PROMPT_SEED)
        for sparsity in SPARSITIES:
            of = {"folder": model_folder.name, "seed": seed, "sparsity": sparsity}
            rows += rows_by_shots(answers, model=DENSE, **of)
            what = f"{model_folder.name}: pruning {percent(sparsity)}"
            for method, name in shown([*METHODS.items()], what, show):
                model = copy.deepcopy(dense)
                prune_model(model, calibration, method, sparsity)
                pruned_answers = few_shot_answers(model, prompts=PROMPTS, seed=PROMPT_SEED)
                rows += rows_by_shots(pruned_answers, model=name, **of)
    return pd.DataFrame(rows)


def rows_by_shots(correct: np.ndarray, **of: Any) -> list[dict[str, Any]]:
    """A row for every number of examples, of right answers (prompts, numbers of examples); `of`: what they are of."""
    rows = []
    for shots, answers in enumerate(correct.astype(np.float64).T):
        accuracy, error = mean_and_error(answers)
        row = {"shots": shots, "accuracy": accuracy, "accuracy_se": error, "prompts": len(correct)}
        rows.append(of | row)
    return rows


def _by_shots(table: pd.DataFrame, name: str, sparsity: float) -> Floats:
    """Accuracy (models, numbers of examples)."""
    rows = table[(table["model"] == name) & (table["sparsity"] == sparsity)]
    return rows.pivot(index="folder", columns="shots", values="accuracy").to_numpy(np.float64)


@experiment(
    "sinks/figure3",
    "Accuracy against the number of examples: dense, and pruned by four methods",
    "Methods are similar at 0 shots; with more the gap between OATS and Wanda or SparseGPT widens (Fig. 3)",
    needs=(COMMAND,),
    scaled_down="small models trained here, on the offline task",
)
def figure_3(study: Study, outcome: Outcome) -> None:
    purpose = "sinks/figure3 is read from a folder of training runs"
    folder = study.training_folder("few_shot", purpose, COMMAND, outcome)
    show_accuracy(outcome, shots_table(folder, study.show))


def show_accuracy(outcome: Outcome, table: pd.DataFrame) -> None:
    """Verdicts, levels and charts of accuracies, as `shots_table` gives them."""
    outcome.tables["accuracy"] = table
    dense = _by_shots(table, DENSE, SPARSITIES[0])
    outcome.claim(
        "More examples help the dense model (section 3.5)",
        "accuracy with five examples less that with none",
        Estimate.mean(dense[:, -1] - dense[:, 0], "models"),
        EXAMPLES_HELP,
    )
    _read(outcome, DENSE, dense)
    for sparsity in SPARSITIES:
        removed = f"{percent(sparsity)} removed"
        by_method = {name: _by_shots(table, name, sparsity) for name in METHODS.values()}
        for name, accuracy in by_method.items():
            _read(outcome, f"{name}, {removed}", accuracy)
        for name in ("Wanda", "SparseGPT"):
            gap = by_method["OATS"] - by_method[name]
            claim = f"OATS and {name} perform similarly without examples, {removed} (section 3.5, Fig. 3)"
            what = f"accuracy with OATS less that with {name}, paired by model"
            outcome.claim(claim, what, Estimate.mean(gap[:, 0], "models"), SIMILAR)
            claim = f"OATS's lead over {name} widens with examples, {removed} (section 3.5, Fig. 3)"
            what = "lead with five examples less that with none"
            outcome.claim(claim, what, Estimate.mean(gap[:, -1] - gap[:, 0], "models"), WIDENS)
        rows = table[table["sparsity"] == sparsity].sort_values("model", key=_order, kind="stable")
        best = RULES.best_accuracy().tolist()
        title = f"Accuracy against the number of examples, {removed}"
        drawn = accuracy_by_shots(over_seeds(rows), rows, chance=1 / RULES.values, best=best)
        shows = "Means over models with 95 % intervals; small marks: each model. Dashed: the best achievable accuracy."
        look_for = "whether the methods diverge from left to right."
        source = f"{ZHANG}, Fig. 3, there MMLU and Phi-3 Medium"
        outcome.figure(f"accuracy-{round(100 * sparsity)}", title, drawn, shows, look_for, source, wide=True)


def _read(outcome: Outcome, what: str, accuracy: Floats) -> None:
    outcome.read(what, ", ".join(percent(value) for value in accuracy.mean(axis=0)) + " by k")


def _order(names: pd.Series) -> pd.Series:
    return names.map({name: place for place, name in enumerate((DENSE, *METHODS.values()))})


def models_in(folder: str | Path) -> list[Path]:
    """The models of the few-shot task in the folders of a folder, in the order of their names."""
    found = []
    for path in sorted(Path(folder).glob("*/training.json")):
        with suppress(OSError, ValueError, AttributeError):  # of another program's file
            if json.loads(path.read_text(encoding="utf-8")).get("task") == NAME:
                found.append(path.parent)
    return found


def is_few_shot(folder: str | Path) -> bool:
    """Whether a folder has folders of such models."""
    return Path(folder).is_dir() and bool(models_in(folder))


def few_shot_provenance(folder: str | Path) -> dict[str, Any]:
    """The provenance of `sinks/figure3`."""
    models = [place.name for place in models_in(folder)]
    entry = {"folder": str(folder), "models": models, "prompts": PROMPTS}
    return of_trainings(f"{counted(len(models), 'model')} in {Path(folder).name}", "GPT-NeoX", few_shot=entry)
