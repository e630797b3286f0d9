"""Measure how well a model trained on addition adds, which every claim about it presupposes (appendix D.3)."""

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

from theodolite import OpenModel, Run
from theodolite.errors import UsageError
from theodolite.estimates import Estimate
from theodolite.judging import HOLDS, UNTESTABLE, Verdict, judge, untestable
from theodolite.report.data import provenance
from theodolite.system.wording import counted, with_error
from theodolite_papers import drawing
from theodolite_papers.experiment import Outcome, Study, criterion, declared
from theodolite_papers.training.tasks import CHARACTERS, QUICK_TEST, Additions

PAPER_ACCURACY = {
    "absolute positions (paper)": (0.326, 0.080, 0.111, 0.099),
    "rotary positions (paper)": (0.356, 0.134, 0.200, 0.385),
}
"""Appendix D.3, on 1, 2, 3 and 4 digits."""

RECORD = "training.json"


def is_adder(model: OpenModel) -> bool:
    """Return whether the model reads the characters of additions alone, as those of `theodolite train addition` do."""
    if model.tokenizer is None or model.vocabulary != len(CHARACTERS):
        return False
    return model.tokenizer.get_vocab() == {character: index for index, character in enumerate(CHARACTERS)}


def task_of(run: Run) -> Additions:
    """Make the task of additions of as many digits as the run's text says, which are those the model was trained on."""
    return Additions.named(provenance(run, "corpus", "name") or "") or Additions()


def trained_on(model: OpenModel) -> Additions:
    """Read which additions an adder learned from the record of its training."""
    with suppress(OSError, ValueError, AttributeError):  # of another program's file
        record = json.loads((Path(model.id) / RECORD).read_text(encoding="utf-8"))
        if task := Additions.named(record.get("task", "")):
            return task
    raise UsageError(
        f"{model.id} has no {RECORD} of `theodolite train addition`, which says what it adds: name a --corpus"
    )


def digits_in_words(digits: tuple[int, int]) -> str:
    """Word a range of digits: `5 to 10 digits`."""
    fewest, most = digits
    return counted(most, "digit") if fewest == most else f"{fewest} to {most} digits"


def on_cpu(model: OpenModel) -> Any:
    """Move the model to where the examples of the task are."""
    return model.hf if model.device.type == "cpu" else copy.deepcopy(model.hf).cpu()


def share_of_sums(share: float, count: int) -> Estimate:
    """Give an accuracy its error, at (k + 2)/(n + 4) (Agresti & Coull 1998): all or none right has one too."""
    moved = (share * count + 2) / (count + 4)
    return Estimate(share, math.sqrt(moved * (1 - moved) / count), count, "sums", by_chance=True)


def why_not_an_adder(model: OpenModel | None, run: Run) -> str | None:
    """Explain why the model is not known to add, with its accuracy where it can be measured; None: it adds."""
    if model is None:
        return "whether the model adds is unknown without it: pass the model together with the run"
    if not is_adder(model):
        return f"{model.id} was not trained on addition alone, so whether it adds is not known"
    task = task_of(run)
    what = f"exact-match accuracy on {QUICK_TEST} sums of {digits_in_words(task.digits)}"
    return why_not_known_to_add(what, share_of_sums(task.accuracy(on_cpu(model)), QUICK_TEST))


def why_not_known_to_add(what: str, accuracy: Estimate) -> str | None:
    """Explain why a model of this accuracy (`what`: on what) is not known to add; None: it adds."""
    verdict = judge("", what, accuracy, criterion("geometry/adds"))
    return None if verdict.answer == HOLDS else f"this model is not known to add: {verdict.evidence}"


def of_an_adder(model: OpenModel | None, run: Run, verdict: Verdict, measured: str) -> Verdict:
    """Judge what the paper says of models trained on addition: not testable where the model is none."""
    characters = set("".join(run.examples["token"].astype(str))) if len(run.examples) else set()
    if not {"+", "="} <= characters <= set(CHARACTERS):
        why = f"the corpus of this run contains no addition problems ({measured})"
        why += ": survey a model trained on addition on addition problems"
        return untestable(verdict.claim, why)
    if verdict.answer != UNTESTABLE and (unknown := why_not_an_adder(model, run)):
        return untestable(verdict.claim, f"{unknown} ({measured})")
    return verdict


def judge_accuracy(outcome: Outcome, accuracies: Sequence[Estimate], trained: str) -> None:
    """Judge accuracy in distribution (`trained` says on what), then on each smaller number of digits."""
    in_distribution, *by_digits = accuracies
    count, words = in_distribution.n, {"count": in_distribution.n, "trained": trained}
    outcome.judge("in-distribution", in_distribution, **words)
    values, errors = np.array([(each.value, each.error) for each in by_digits]).T
    spread = float(np.sqrt(np.square(errors).mean() / len(errors)))
    of_shorter = Estimate(float(values.mean()), spread, count * len(errors), "sums", by_chance=True)
    shorter = outcome.verdict("shorter", of_shorter, **words)
    what = outcome.sentence("in-distribution", "what", **words)
    if unknown := why_not_known_to_add(what, in_distribution):
        shorter = untestable(shorter.claim, f"{unknown} ({shorter.evidence})")
    outcome.verdicts.append(shorter)


@declared("geometry/addition")
def addition(study: Study, outcome: Outcome) -> None:
    model = study.require_model()
    if not is_adder(model):
        raise UsageError(
            f"{model.id} was not trained on addition: pass a folder that `theodolite train addition` wrote"
        )
    task = task_of(study.run)
    trained = digits_in_words(task.digits)
    measured = task.measure(on_cpu(model))
    count, by_digits = measured["tested"], measured["accuracy_by_digits"]
    names = [trained, *(counted(int(digits), "digit") for digits in by_digits)]
    accuracies = [share_of_sums(value, count) for value in (measured["accuracy"], *by_digits.values())]
    values, errors = np.array([(each.value, each.error) for each in accuracies]).T
    absolute, rotary = PAPER_ACCURACY.values()
    printed = [f"absolute {a:.1%}, rotary {r:.1%}" for a, r in zip(absolute, rotary, strict=True)]
    for name, words, accuracy in zip(names, ["“above 99 %”", *printed], accuracies, strict=True):
        outcome.read(f"exact-match accuracy, {name}", with_error(accuracy.value, accuracy.error), words)
    outcome.read("positions of this model", model.positions, "absolute; rotary")
    judge_accuracy(outcome, accuracies, trained)
    outcome.tables["accuracy"] = pd.DataFrame(
        {"examples": names, "accuracy": values, "accuracy_se": errors, "tested": count}
    )
    paper = {name: np.array([np.nan, *row]) for name, row in PAPER_ACCURACY.items()}
    outcome.draw("accuracy", drawing.accuracies(names, (values, errors), paper), count=count)
