"""One published table or figure from Python."""

from __future__ import annotations

from typing import Any

from theodolite import Corpus, OpenModel, Run
from theodolite.errors import UsageError
from theodolite.models.prompts import Focus
from theodolite.report.outcome import Outcome
from theodolite_papers.catalogue import find, need_no_model, on_prompts
from theodolite_papers.experiment import Study, of_model, of_nothing


def reproduce(
    name: str,
    run: Run | None = None,
    model: OpenModel | None = None,
    corpus: Corpus | None = None,
    other: Corpus | None = None,
    focus: Focus | None = None,
) -> Outcome:
    """Make one published table or figure again from a run.

    Args:
        name: such as `geometry/table1`; `theodolite_papers.EXPERIMENTS` has them all.
        run: from `survey` or `Run.load`; None for experiments that read none, or a prompt alone.
        model: the model of the run; only some experiments need it.
        corpus: the text of the run; only some experiments need it.
        other: a second text for those that compare two; None: random tokens.
        focus: the prompt and the head for those that have one; None: random tokens, and heads found by the survey.

    Raises:
        UsageError: no such experiment, or the run, the model or the text lacks what it needs.
    """
    chosen = find(name)
    if len(chosen) != 1:
        raise UsageError(f"{name} is a group of {len(chosen)} experiments: name one")
    read: Run | dict[str, Any] | None = run
    if read is None and model is not None and on_prompts(chosen):
        read = of_model(model)
    elif read is None:
        if not need_no_model(chosen):
            raise UsageError(f"{name} needs a run: survey a model, or load a run folder")
        read = of_nothing()
    return Study(read, model, corpus, other, focus=focus).outcome(chosen[0])
