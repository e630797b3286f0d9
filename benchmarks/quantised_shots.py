"""Accuracy by the number of examples of models that were quantised with and without a low-rank part, at equal bytes.

`python -m benchmarks.quantised_shots FOLDER` takes the models of `theodolite train few-shot` in the folders of FOLDER,
in bfloat16, quantises each as `benchmarks.quantised` does, and writes docs/results/quantised-shots.json. All answer the
same prompts; errors are over models, of differences paired by model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quantised import MODELS
from benchmarks.results import made_by
from theodolite import open_model
from theodolite.corpus.few_shot_task import RULES
from theodolite.evaluate.few_shot import PROMPTS, few_shot_answers
from theodolite.evaluate.scores import mean_and_error
from theodolite.prune import prune_model
from theodolite_papers.catch_tag_release.few_shot import PROMPT_SEED, calibration_prompts, models_in

RESULT = Path(__file__).parents[1] / "docs" / "results" / "quantised-shots.json"

WIDENS = (("3 bits + low rank", "GPTQ, 4 bits"), ("4 bits + low rank", "GPTQ, 4 bits, groups of 16"))
"""Of equal bytes: does the lead of the first grow with examples?"""


def main(folder: Path, prompts: int = PROMPTS) -> dict[str, Any]:
    calibration = calibration_prompts()
    accuracy: dict[str, list[np.ndarray]] = {name: [] for name in ("dense", *MODELS)}
    for place in models_in(folder):
        for name in accuracy:
            model = open_model(place, dtype="bfloat16", device="cpu")
            if name != "dense":
                method, options = MODELS[name]
                prune_model(model, calibration, method, **options)
            accuracy[name].append(few_shot_answers(model, prompts=prompts, seed=PROMPT_SEED).mean(axis=0))
            print(place.name, name, accuracy[name][-1].round(3), flush=True)
    curves = {name: np.array(each) for name, each in accuracy.items()}
    values: dict[str, Any] = {"models": len(curves["dense"]), "prompts": prompts}
    for name, curve in curves.items():
        values |= {f"{name}: {shots} examples": float(each) for shots, each in enumerate(curve.mean(axis=0))}
        values |= _of(f"{name}: lost after five examples", curves["dense"][:, -1] - curve[:, -1])
    for first, second in WIDENS:
        lead = curves[first] - curves[second]
        values |= _of(f"{first} − {second}: lead without examples", lead[:, 0])
        values |= _of(f"{first} − {second}: lead after five less that without", lead[:, -1] - lead[:, 0])
    return values


def table(values: dict[str, Any]) -> str:
    """What docs/quantising.md shows of them: percent by number of examples, and what five lose."""
    shots = range(len(RULES.best_accuracy()))
    lines = [f"| model | {' | '.join(f'k = {k}' for k in shots)} | lost after five, points |"]
    lines.append("| --- " * (len(shots) + 2) + "|")
    for name in ("dense", *MODELS):
        lost, error = (100 * values[f"{name}: lost after five examples{what}"] for what in ("", ", error"))
        by_shots = " | ".join(f"{100 * values[f'{name}: {k} examples']:.1f}" for k in shots)
        lines.append(
            f"| {name} | {by_shots} | "
            + ("" if name == "dense" else f"{lost:.2f} ± {error:.2f}".replace("-", "−"))
            + " |"
        )
    return "\n".join(lines)


def _of(what: str, differences: np.ndarray) -> dict[str, float]:
    mean, error = mean_and_error(differences)
    return {what: mean, f"{what}, error": error}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    measured = main(arguments.folder)
    print(table(measured))
    told = made_by("python -m benchmarks.quantised_shots half") | {"seed": PROMPT_SEED, "measured": measured}
    arguments.out.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
