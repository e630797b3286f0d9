"""What the monitor of collapse is worth: does it warn before the loss does, and does it leave a healthy training alone?

Ours, not the paper's: it says which heads vanish or collapse, not how to notice it in time. The training runs and what
counts as a loss that notices are in `monitor_runs`. That is set on the healthy training runs that are judged here; with
limits that were set on others the monitor and its rivals are compared by `benchmarks/monitor_delays.py`.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from theodolite.corpus.documents import python_topics
from theodolite.judging import Criterion, Estimate
from theodolite.papers.experiment import Study, experiment
from theodolite.papers.localization.monitor_runs import (
    EVERY,
    HEALTHY,
    LEARNING_RATES,
    LENGTH,
    SEEDS,
    STEPS,
    compare_learning_rates,
)
from theodolite.papers.training.tasks import Characters
from theodolite.report.data import Floats
from theodolite.report.drawing import locater as figures_locater
from theodolite.report.drawing import monitor as figures_monitor
from theodolite.report.drawing.locater import Panel
from theodolite.report.outcome import Outcome
from theodolite.system.wording import counted

SHOWN = (
    ("loss", "loss, nats per character"),
    ("entropy_share_min", "lowest entropy of a head over its maximum"),
    ("propagation_min", "lowest ρ of a head"),
    ("alarms", "active alarms"),
)
SOURCE = "theodolite's own; the alarms are those of docs/monitor.md"
EARLIER = Criterion("more than", 0.0, "as early as the loss (ours)")
IN_FEW = Criterion("at most", 0.1, "a tenth of them (ours)")


def judge_warnings(outcome: Outcome, runs: pd.DataFrame) -> None:
    """On `runs` of `compare_learning_rates`: the lead over the loss, and the false alarms.

    Both rest on the seeds: training runs of one seed share their first weights and their batches, so that the lead is a
    mean over seeds of means over learning rates.
    """
    failing, healthy = runs[runs["pace"] != HEALTHY], runs[runs["pace"] == HEALTHY]
    claim = "The monitor warns of a learning rate that is too high before the loss does (ours)"
    if len(failing):
        leads = failing["lead"]
        outcome.claim(
            claim,
            f"steps from the first alarm until the loss rises or stalls more than in any healthy training run, mean "
            f"over learning rates and seeds ({leads.min():.0f} to {leads.max():.0f}; more than 0 in "
            f"{int((leads > 0).sum())} of {len(leads)} failing training runs; in "
            f"{int(failing['loss_notices'].isna().sum())} the loss does not notice, which counts as step {STEPS})",
            Estimate.mean(leads.groupby(failing["seed"]).mean(), "seeds"),
            EARLIER,
        )
    else:
        outcome.cannot_test(claim, "no failing training run")
    outcome.claim(
        "A training run at a good learning rate hardly ever raises an alarm (ours)",
        f"share of {counted(len(healthy), 'healthy training run')} with an alarm",
        Estimate.share(float(healthy["first_alarm"].notna().mean()), len(healthy), "seeds"),
        IN_FEW,
    )


@experiment(
    "localization/monitor",
    "Collapse detected while it happens: the monitor against the loss, at learning rates that are too high",
    "Not in the paper: a small model trained at a good learning rate and at two that are far too high, watched",
    needs=("nothing",),
)
def monitor(study: Study, outcome: Outcome) -> None:
    text = "\n\n".join(document.text for document in python_topics())
    seeds = [study.provenance["seed"] + seed for seed in SEEDS]
    comparison = compare_learning_rates(
        Characters.of_text(text, LENGTH),
        seeds=seeds,
        show_progress=study.show,
    )
    runs = comparison["runs"]
    for pace, rows in runs.groupby("pace", sort=False):
        outcome.read(
            str(pace),
            f"first alarm {_steps(rows['first_alarm'])}; the loss notices {_steps(rows['loss_notices'])}; "
            f"loss at the end {rows['final_loss'].min():.2f} to {rows['final_loss'].max():.2f}",
        )
    judge_warnings(outcome, runs)
    outcome.tables |= {"runs": runs, "looks": comparison["looks"], "alarms": comparison["alarms"]}
    _draw_moments(outcome, runs)
    _draw_course(outcome, comparison["looks"], comparison["losses"])


def _steps(values: pd.Series) -> str:
    if values.isna().all():
        return "never"
    return "at step " + ", ".join("never" if pd.isna(value) else f"{value:.0f}" for value in values)


def _draw_moments(outcome: Outcome, runs: pd.DataFrame) -> None:
    runs = runs.sort_values("pace", key=lambda names: names.map(list(LEARNING_RATES).index), kind="stable")
    rows = [f"{row.pace}, seed {row.seed}" for row in runs.itertuples()]
    columns = ("first_alarm", "loss_notices", "behind_healthy")
    steps = [runs[name].to_numpy(dtype=np.float64) for name in columns]
    names = ("first alarm", "the loss rises or stalls", "the loss is behind the healthy one's")
    outcome.figure(
        "moments",
        "What notices first",
        figures_monitor.moments(rows, dict(zip(names, steps, strict=True)), STEPS),
        "A dot where each kind of sign appeared first; no dot: never. The last kind needs the healthy training run "
        "for comparison, which nobody has in practice.",
        "whether the first alarm is left of the loss, and no alarm in the healthy training runs.",
        SOURCE,
    )


def _draw_course(outcome: Outcome, looks: pd.DataFrame, losses: pd.DataFrame) -> None:
    looks_with_loss = looks.merge(
        losses[["pace", "seed", "step", "smoothed"]], how="left", on=["pace", "seed", "step"]
    )
    looks_with_loss["loss"] = looks_with_loss["smoothed"]
    names = list(LEARNING_RATES)
    shown: dict[str, list[tuple[Floats, Floats, Floats]]] = {name: [] for name, _ in SHOWN}
    steps = []
    for pace in names:
        rows = looks_with_loss[looks_with_loss["pace"] == pace].groupby("step")
        steps.append(np.array(sorted(rows.groups), dtype=np.float64))
        for name, lines in shown.items():
            column = rows[name]
            lines.append(tuple(part.to_numpy() for part in (column.mean(), column.min(), column.max())))
    outcome.figure(
        "course",
        "The same training runs, step by step",
        figures_locater.panels(names, steps, [Panel(title, shown[name]) for name, title in SHOWN]),
        f"Means over seeds, bands from the lowest to the highest. The loss is the mean of the last steps of training; "
        f"the monitor measures every {EVERY} steps.",
        "how far the heads have degenerated while the loss still falls.",
        SOURCE,
        wide=True,
    )
