"""Every claim that the other experiments judge, on one page. Nothing is measured here."""

from __future__ import annotations

from typing import get_args

import pandas as pd

from theodolite.errors import UsageError
from theodolite.judging import Answer, independent, untestable
from theodolite.report.outcome import Outcome
from theodolite_papers.experiment import Experiment, Study, experiment


def claims(group: str, paper: str, experiments: list[Experiment]) -> Experiment:
    """The experiment that collects the verdicts of `experiments`.

    Args:
        group: their name before the slash. paper: what the paper claims, in a sentence.
    """

    @experiment(
        f"{group}/claims",
        "Every claim that the other experiments judge, on one page",
        paper,
        options=sorted({option for each in experiments for option in each.options}),
    )
    def collected(study: Study, outcome: Outcome) -> None:
        rows: list[dict[str, str]] = []
        for each in experiments:
            try:
                judged = study.outcome(each)
                verdicts = judged.verdicts
                outcome.runs |= judged.runs
            except UsageError as error:
                verdicts = [untestable(each.title, str(error))]
            outcome.verdicts += verdicts
            rows += [{"experiment": each.name, **verdict.words} for verdict in verdicts]
        for answer in get_args(Answer):
            count = sum(verdict.answer == answer for verdict in independent(outcome.verdicts))
            outcome.read(f"claims: {answer}", str(count))
        outcome.tables["claims"] = pd.DataFrame(rows)

    return collected
