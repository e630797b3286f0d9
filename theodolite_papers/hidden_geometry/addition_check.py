"""Does the model add? What the paper says of models trained on addition can be judged only of one that does."""

from __future__ import annotations

import copy
import math
from typing import Any

from theodolite import OpenModel, Run
from theodolite.corpus.addition_task import CHARACTERS, DIGITS, digits_of
from theodolite.estimates import Estimate
from theodolite.judging import HOLDS, UNTESTABLE, Verdict, judge, untestable
from theodolite.report.data import provenance
from theodolite.system.wording import counted
from theodolite_papers.experiment import criterion
from theodolite_papers.training.tasks import QUICK_TEST, Additions


def reads_additions(run: Run) -> bool:
    """Return whether the text of the run is additions: its example tokens have no other characters."""
    tokens = "".join(run.examples["token"].astype(str)) if len(run.examples) else ""
    return "=" in tokens and "+" in tokens and set(tokens) <= set(CHARACTERS)


def is_adder(model: OpenModel) -> bool:
    """Return whether the model reads the characters of additions alone, as those of `theodolite train addition` do."""
    if model.tokenizer is None or model.vocabulary != len(CHARACTERS):
        return False
    return model.tokenizer.get_vocab() == {character: index for index, character in enumerate(CHARACTERS)}


def task_of(run: Run) -> Additions:
    """Additions of as many digits as the text of the run says, which are those that the model was trained on."""
    return Additions(digits_of(provenance(run, "corpus", "name") or "") or DIGITS)


def digits_in_words(digits: tuple[int, int]) -> str:
    """Word a range of digits: `5 to 10 digits`."""
    fewest, most = digits
    return counted(most, "digit") if fewest == most else f"{fewest} to {most} digits"


def on_cpu(model: OpenModel) -> Any:
    """The model where the examples of the task are."""
    return model.hf if model.device.type == "cpu" else copy.deepcopy(model.hf).cpu()


def binomial_error(share: float, count: int) -> float:
    """Standard error of a share, at (k + 2)/(n + 4) (Agresti & Coull 1998), so that all or none right has one too."""
    moved = (share * count + 2) / (count + 4)
    return math.sqrt(moved * (1 - moved) / count)


def why_not_an_adder(model: OpenModel | None, run: Run) -> str | None:
    """Why the model is not known to add, with its accuracy where it can be asked; None: it adds."""
    if model is None:
        return "whether the model adds is unknown without it: pass the model together with the run"
    if not is_adder(model):
        return f"{model.id} was not trained on addition alone, so whether it adds is not known"
    task = task_of(run)
    share = task.accuracy(on_cpu(model))
    what = f"exact-match accuracy on {QUICK_TEST} sums of {digits_in_words(task.digits)}"
    error = binomial_error(share, QUICK_TEST)
    return why_not_known_to_add(what, Estimate(share, error, QUICK_TEST, "sums", by_chance=True))


def why_not_known_to_add(what: str, accuracy: Estimate) -> str | None:
    """Why a model of this accuracy, of which `what` says on what, is not known to add; None: it adds."""
    verdict = judge("", what, accuracy, criterion("geometry/adds"))
    return None if verdict.answer == HOLDS else f"this model is not known to add: {verdict.evidence}"


def of_an_adder(model: OpenModel | None, run: Run, verdict: Verdict, measured: str) -> Verdict:
    """A verdict on what the paper says of models trained on addition: not testable where the model is none."""
    if not reads_additions(run):
        why = f"the corpus of this run contains no addition problems ({measured})"
        why += ": survey a model trained on addition on addition problems"
        return untestable(verdict.claim, why)
    if verdict.answer != UNTESTABLE and (unknown := why_not_an_adder(model, run)):
        return untestable(verdict.claim, f"{unknown} ({measured})")
    return verdict
