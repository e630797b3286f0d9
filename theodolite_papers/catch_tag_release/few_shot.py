"""Fig. 3 of Zhang et al. 2025: accuracy against the number of examples, dense and pruned, on the offline task.

The models come from `theodolite train few-shot`, one per seed, in the folders of one folder. All that are pruned from
one model answer the same prompts; intervals are over models.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from theodolite import Corpus, open_model
from theodolite.corpus.few_shot_task import CORPUS_STREAM, NAME, RULES
from theodolite.estimates import Estimate
from theodolite.evaluate.few_shot import PROMPTS, few_shot_answers
from theodolite.evaluate.scores import mean_and_error, over_seeds
from theodolite.judging import Criterion
from theodolite.prune.model import prune_model
from theodolite.report.data import Floats
from theodolite.report.measures import ZHANG
from theodolite.report.outcome import Outcome
from theodolite.system.progress import ShowStage, shown
from theodolite.system.wording import counted, number, percent
from theodolite_papers.catch_tag_release.pruned_models import METHODS
from theodolite_papers.drawing import few_shot as drawing
from theodolite_papers.experiment import Study, experiment, of_models
from theodolite_papers.training.task_models import models_of

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
    """One row per model, sparsity, method and number of examples: accuracy with its binomial standard error.

    The dense model stands at every sparsity.
    """
    calibration = calibration_prompts()
    rows: list[dict[str, Any]] = []
    for model_folder in models_in(folder):
        dense = open_model(model_folder, device="cpu")
        seed = json.loads((model_folder / "training.json").read_text(encoding="utf-8"))["seed"]
        answers = few_shot_answers(dense, prompts=PROMPTS, seed=PROMPT_SEED)
        for sparsity in SPARSITIES:
            rows += _rows(DENSE, model_folder.name, seed, sparsity, answers)
            what = f"{model_folder.name}: pruning {percent(sparsity)}"
            for method, name in shown([*METHODS.items()], what, show):
                model = copy.deepcopy(dense)
                prune_model(model, calibration, method, sparsity)
                pruned_answers = few_shot_answers(model, prompts=PROMPTS, seed=PROMPT_SEED)
                rows += _rows(name, model_folder.name, seed, sparsity, pruned_answers)
    return pd.DataFrame(rows)


def _rows(name: str, folder: str, seed: int, sparsity: float, correct: np.ndarray) -> list[dict[str, Any]]:
    rows = []
    for shots, answers in enumerate(correct.astype(np.float64).T):
        accuracy, error = mean_and_error(answers)
        rows.append(
            {"model": name, "folder": folder, "seed": seed, "sparsity": sparsity, "shots": shots}
            | {"accuracy": accuracy, "accuracy_se": error, "prompts": len(correct)}
        )
    return rows


def _by_shots(table: pd.DataFrame, name: str, sparsity: float) -> Floats:
    """Accuracy (models, numbers of examples)."""
    rows = table[(table["model"] == name) & (table["sparsity"] == sparsity)]
    accuracies: Floats = rows.pivot(index="folder", columns="shots", values="accuracy").to_numpy(np.float64)
    return accuracies


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
            outcome.claim(
                f"OATS and {name} perform similarly without examples, {removed} (section 3.5, Fig. 3)",
                f"accuracy with OATS less that with {name}, paired by model",
                Estimate.mean(gap[:, 0], "models"),
                SIMILAR,
            )
            outcome.claim(
                f"OATS's lead over {name} widens with examples, {removed} (section 3.5, Fig. 3)",
                "lead with five examples less that with none",
                Estimate.mean(gap[:, -1] - gap[:, 0], "models"),
                WIDENS,
            )
        rows = table[table["sparsity"] == sparsity].sort_values("model", key=_order, kind="stable")
        best = RULES.best_accuracy().tolist()
        outcome.figure(
            f"accuracy-{round(100 * sparsity)}",
            f"Accuracy against the number of examples, {removed}",
            drawing.accuracy_by_shots(over_seeds(rows), rows, chance=1 / RULES.values, best=best),
            f"Means over {counted(rows['folder'].nunique(), 'model')} with 95 % intervals (Student's t), a small mark "
            f"for each model; {number(PROMPTS)} prompts, the same for all. Dashed: the best achievable accuracy, "
            "computed exactly.",
            "whether the methods diverge from left to right.",
            f"{ZHANG}, Fig. 3, there MMLU and Phi-3 Medium",
            wide=True,
        )


def _read(outcome: Outcome, what: str, accuracy: Floats) -> None:
    outcome.read(what, ", ".join(percent(value) for value in accuracy.mean(axis=0)) + " by k")


def _order(names: pd.Series) -> pd.Series:
    return names.map({name: place for place, name in enumerate((DENSE, *METHODS.values()))})


def models_in(folder: str | Path) -> Sequence[Path]:
    """The models of the few-shot task in the folders of a folder, in the order of their names."""
    return models_of(folder, NAME)


def is_few_shot(folder: str | Path) -> bool:
    """Whether a folder has folders of such models."""
    return Path(folder).is_dir() and bool(models_in(folder))


def few_shot_provenance(folder: str | Path) -> dict[str, Any]:
    """The provenance of `sinks/figure3`."""
    return of_models(folder, models_in(folder), "GPT-NeoX", "few_shot", prompts=PROMPTS)
