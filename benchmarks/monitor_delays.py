"""False alarms and delays of the monitor of collapse and of simpler signs, on training runs that no limit was set on.

`python -m benchmarks.monitor_delays --shakespeare FILE --wikitext FILE --runs FOLDER --out
docs/results/monitor-delays.json` trains small models and prints the table of docs/monitor-experiment.md. The monitor's
limits were set on Shakespeare, and so are its rivals': on all training runs there that end well, as a user would have
them; and for comparison on those at `CHOSEN` alone, and in hindsight on those that are judged. Judged are two other
texts, two other sizes and other seeds. Stop it at any time: what is in the folder is not trained again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
import torch

from benchmarks.results import made_by
from theodolite.corpus.documents import python_topics
from theodolite.papers.localization.monitor_rivals import (
    MONITOR,
    Tables,
    Watched,
    judged_runs,
    limits,
    run_table,
    summary,
)
from theodolite.papers.localization.monitor_runs import EVERY, LENGTH, SIZE, train_with_monitor
from theodolite.papers.training.tasks import Characters
from theodolite.papers.training.training_loop import LearningRate

STEPS = 300
CHOSEN = "1e-3"
"""The rate of `localization/monitor`."""

RATES = {
    "3e-4": LearningRate(3e-4),
    CHOSEN: LearningRate(1e-3),
    "3e-3": LearningRate(3e-3),
    "6e-3": LearningRate(6e-3),
    "1e-2": LearningRate(1e-2),
    "2e-2 from the first step": LearningRate(2e-2),
    "rising to 1e-1 over 200 steps": LearningRate(1e-1, warm_up=200),
}
CALIBRATION_SEEDS, CALIBRATION_SIZE = (0, 1, 2), {"3 layers, d = 64": SIZE}
SEEDS, SIZES = (10, 11, 12, 13, 14), {"2 layers, d = 32": (2, 4, 32), "4 layers, d = 64": (4, 4, 64)}


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


def watched(
    folder: Path,
    texts: Mapping[str, Characters],
    sizes: Mapping[str, tuple[int, int, int]],
    seeds: Sequence[int],
) -> list[Watched]:
    """The training runs of every text, size, seed and rate."""
    return [
        Watched(
            text,
            size,
            rate,
            seed,
            of.peak,
            trained(folder, f"{text} {size} {rate} {seed}", task, of, seed, shape),
        )
        for seed in seeds
        for text, task in texts.items()
        for size, shape in sizes.items()
        for rate, of in RATES.items()
    ]


def lines(table: pd.DataFrame) -> str:
    """The table of docs/monitor-experiment.md."""
    head = (
        "| detector | healthy runs with an alarm | failing runs caught | groups: monitor first, rival first, tie | "
        "steps from rival to monitor, median | the monitor is | in runs that both catch, median |"
    )
    rows = [
        f"| {row.detector} | {row.false_runs} of {row.healthy}: {100 * row.false_runs / row.healthy:.0f} % "
        f"({100 * row.false_low:.0f} to {100 * row.false_high:.0f}) | {row.caught} of {row.failing} | "
        + (
            "| | | |"
            if row.detector == MONITOR
            else f"{row.monitor_first:.0f}, {row.rival_first:.0f}, {row.ties:.0f} ({_chance(row.p)}) | "
            f"{row.median:.0f} ({row.low:.0f} to {row.high:.0f}) | {row.verdict} | "
            f"{row.both_median:.0f} in {row.both:.0f} |"
        )
        for row in table.itertuples()
    ]
    return (
        "\n".join([head, "| --- | --- | --- | --- | --- | --- | --- |", *rows])
        .replace("-", "−")
        .replace("−−−", "---")
    )


def _chance(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.1g}"


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
    shakespeare = {"Shakespeare": Characters.of_file(options.shakespeare, LENGTH)}
    calibration = watched(options.runs, shakespeare, CALIBRATION_SIZE, CALIBRATION_SEEDS)
    runs = watched(options.runs, texts, SIZES, SEEDS)
    result: dict[str, object] = {
        **made_by(
            "python -m benchmarks.monitor_delays --shakespeare FILE --wikitext FILE --runs FOLDER --out "
            "docs/results/monitor-delays.json"
        ),
        "seed": list(SEEDS),
        "calibration": json.loads(run_table(calibration).to_json(orient="records")),
        "runs": json.loads(run_table(runs).to_json(orient="records")),
    }
    of_all = limits(calibration)
    judged = judged_runs(runs, of_all)
    by_monitor = int(judged.loc[~judged["failed"], MONITOR].notna().sum())
    result["alarms of the monitor in healthy runs, all heads and layers"] = sum(
        len(run.tables["alarms"]) for run, failed in zip(runs, judged["failed"], strict=True) if not failed
    )
    choices = {
        "limits of all healthy rates": of_all,
        f"limits of {CHOSEN} alone": limits([run for run in calibration if run.rate == CHOSEN]),
        "limits of hindsight": limits(runs, by_monitor),
    }
    for name, of in choices.items():
        rows = judged_runs(runs, of)
        table = summary(rows)
        result[name] = {
            "limits": of,
            "summary": json.loads(table.to_json(orient="records")),
            "first alarms": {
                detector: json.loads(rows[detector].to_json(orient="values"))
                for detector in table["detector"]
            },
        }
        print(f"{name}\n\n{lines(table)}\n")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
