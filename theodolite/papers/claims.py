"""Every claim that the other experiments judge, on one page. Nothing is measured here."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import pandas as pd

from theodolite.errors import UsageError
from theodolite.judging import UNTESTABLE, Answer, Verdict
from theodolite.papers.experiment import Experiment
from theodolite.report.outcome import Outcome, Reading

if TYPE_CHECKING:
    from theodolite.papers.experiment import Study


def claims(group: str, paper: str, experiments: list[Experiment]) -> Experiment:
    """The experiment that collects the verdicts of `experiments`.

    Args:
        group: their name before the slash. paper: what the paper claims, in a sentence.
    """

    def make(study: Study) -> Outcome:
        verdicts: list[Verdict] = []
        rows: list[dict[str, str]] = []
        runs: dict[str, dict[str, object]] = {}
        for experiment in experiments:
            try:
                outcome = study.outcome(experiment)
                judged = outcome.verdicts
                runs |= outcome.runs
            except UsageError as error:
                judged = [Verdict(experiment.title, UNTESTABLE, str(error))]
            for verdict in judged:
                verdicts.append(verdict)
                rows.append({"experiment": experiment.name, **vars(verdict)})
        counted = [
            Reading(f"claims: {answer}", str(sum(verdict.answer == answer for verdict in verdicts)))
            for answer in get_args(Answer)
        ]
        return Outcome(counted, verdicts, {"claims": pd.DataFrame(rows)}, runs=runs)

    return Experiment(
        f"{group}/claims",
        "Every claim that the other experiments judge, on one page",
        paper,
        (),
        make,
        tuple(sorted({option for experiment in experiments for option in experiment.options})),
    )
