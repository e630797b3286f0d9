"""False alarms and delays of the monitor of collapse and of simpler signs, on training runs that no limit was set on.

`python -m benchmarks.monitor_delays --shakespeare FILE --wikitext FILE --runs FOLDER --out
docs/results/monitor-delays.json` trains small models and prints the table of docs/monitor-experiment.md. The monitor's
limits were set on Shakespeare, and so are its rivals'; judged are two other texts, two other sizes, other rates and
seeds. Stop it at any time: what is in the folder is not trained again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch

from benchmarks.results import made_by
from theodolite.corpus.documents import python_topics
from theodolite.papers.localization.monitor_rivals import Tables, Watched, judged_runs, limits, summary
from theodolite.papers.localization.monitor_runs import EVERY, LENGTH, SIZE, train_with_monitor
from theodolite.papers.training.tasks import Characters
from theodolite.papers.training.training_loop import LearningRate

STEPS = 300
CALIBRATION = {"1e-3": LearningRate(1e-3)}, (0, 1, 2), {"3 layers, d = 64": SIZE}
"""Rates, seeds and sizes; on Shakespeare, at the rate, size and seeds of `localization/monitor`."""

REFERENCE = "1e-3"
RATES = {
    REFERENCE: LearningRate(1e-3),
    "3e-4": LearningRate(3e-4),
    "2e-2 from the first step": LearningRate(2e-2),
    "rising to 1e-1 over 200 steps": LearningRate(1e-1, warm_up=200),
}
SIZES = {"2 layers, d = 32": (2, 4, 32), "4 layers, d = 64": (4, 4, 64)}
SEEDS = (10, 11)


def trained(
    folder: Path, name: str, task: Characters, rate: LearningRate, seed: int, size: tuple[int, int, int]
) -> Tables:
    """The tables of a training run: those in its folder, or new ones, which are put there."""
    place = folder / name.replace(" ", "-").replace(",", "").replace("=", "")
    names = ("losses", "looks", "alarms")
    if not (place / "alarms.json").exists():
        place.mkdir(parents=True, exist_ok=True)
        tables = train_with_monitor(task, rate, seed, STEPS, EVERY, size)
        for each in names:
            tables[each].to_json(place / f"{each}.json", orient="table", index=False, double_precision=12)
        print(name, file=sys.stderr, flush=True)
    return {each: pd.read_json(place / f"{each}.json", orient="table") for each in names}


def compared(
    folder: Path, calibration: Characters, texts: dict[str, Characters]
) -> tuple[dict[str, float], pd.DataFrame]:
    """The rivals' limits, and `judged_runs` of every text, size, rate and seed."""
    rates, seeds, sizes = CALIBRATION
    of = limits(
        [
            trained(folder, f"calibration {rate} {size} {seed}", calibration, rates[rate], seed, sizes[size])
            for rate in rates
            for size in sizes
            for seed in seeds
        ]
    )
    watched = []
    for seed in SEEDS:
        for text, task in texts.items():
            for size, shape in SIZES.items():
                runs = {
                    name: trained(folder, f"{text} {size} {name} {seed}", task, rate, seed, shape)
                    for name, rate in RATES.items()
                }
                watched += [
                    Watched(
                        text,
                        size,
                        name,
                        seed,
                        RATES[name].peak > RATES[REFERENCE].peak,
                        tables,
                        runs[REFERENCE],
                    )
                    for name, tables in runs.items()
                ]
    return of, judged_runs(watched, of)


def lines(table: pd.DataFrame) -> str:
    """The table of docs/monitor-experiment.md."""
    head = (
        "| detector | false alarms per 10,000 healthy steps | failing runs caught | before the loss is behind | "
        "steps after it, median (least to most) |"
    )
    rows = [
        f"| {row.detector} | {row.false_rate:.1f} ({row.false_low:.1f} to {row.false_high:.1f}) | {row.caught} of "
        f"{row.failing} | {row.before_loss} | {row.late_median:.0f} ({row.late_low:.0f} to {row.late_high:.0f}) |"
        for row in table.itertuples()
    ]
    return "\n".join([head, "| --- | --- | --- | --- | --- |", *rows]).replace("-", "−").replace("−−−", "---")


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shakespeare", type=Path, required=True, help="the text that limits are set on")
    parser.add_argument("--wikitext", type=Path, required=True, help="a text to judge on, besides Python's")
    parser.add_argument("--runs", type=Path, required=True, help="where training runs are kept")
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    python = "\n\n".join(document.text for document in python_topics())
    texts = {
        "Python's docs": Characters.of_text(python, LENGTH),
        "WikiText-2": Characters.of_file(options.wikitext, LENGTH),
    }
    of, rows = compared(options.runs, Characters.of_file(options.shakespeare, LENGTH), texts)
    table = summary(rows)
    if options.out:
        result = {
            **made_by(
                "python -m benchmarks.monitor_delays --shakespeare FILE --wikitext FILE --runs FOLDER --out "
                "docs/results/monitor-delays.json"
            ),
            "seed": list(SEEDS),
            "limits": of,
            "summary": json.loads(table.to_json(orient="records")),
            "runs": json.loads(rows.to_json(orient="records")),
        }
        options.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(lines(table))


if __name__ == "__main__":
    main()
