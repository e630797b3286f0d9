"""Accuracy against the number of examples, dense and pruned (Zhang et al. 2025, Fig. 3, section 3.5), on word tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Bool

from theodolite import OpenModel, Run, trace_sinks
from theodolite.comparison.parts import tags as survival_of_tags
from theodolite.comparison.survival import NEW, SURVIVED
from theodolite.estimates import Estimate, Floats
from theodolite.evaluate.few_shot import FewShotPrompts, prompts_for
from theodolite.evaluate.scores import mean_and_error
from theodolite.prune.checkpoint import Pruned
from theodolite.report import style
from theodolite.report.drawing.grammar import line
from theodolite.sinks.interventions import without_low_rank
from theodolite.system.progress import shown
from theodolite.system.wording import for_plotly, percent
from theodolite_papers.catch_tag_release.ablated import all_open
from theodolite_papers.catch_tag_release.pruned_sinks import (
    DENSE,
    METHODS,
    SPARSITY,
    halves,
    kept_sinks,
    loss_difference,
    measured_once,
    pruned_model,
)
from theodolite_papers.experiment import Outcome, Study, declared

FIGURE_HEIGHT = 420
SHOWN = (0, 1, 2, 4, 8, 16)
"""Numbers of examples that are drawn and tabulated."""

PROMPTS, PROMPT_SEED = 40, 1
"""Of each task, that all models answer."""

OATS, WITHOUT, RANDOM = "OATS", "OATS without its low-rank terms", "OATS without random terms as large"

Answers = Bool[np.ndarray, "prompts shots"]


def accuracy_by_shots(answers: Mapping[str, Floats]) -> go.Figure:
    """Draw the accuracy of several models after k examples, with 95 % intervals over prompts."""
    places = np.arange(len(SHOWN), dtype=np.float64)  # as far apart as each other
    traces: list[Any] = []
    for index, (name, right) in enumerate(answers.items()):
        values, errors = np.array([mean_and_error(right[:, shots]) for shots in SHOWN]).T
        texts = [
            [shots, *map(percent, pair)] for shots, *pair in zip(SHOWN, values, 1.96 * errors, strict=True)
        ]
        hover = f"{for_plotly(name)}, %{{customdata[0]}} examples: %{{customdata[1]}} ± %{{customdata[2]}}"
        own: dict[str, Any] = {"error_y": style.error_bars(1.96 * errors), "marker": 6, "customdata": texts}
        shift = 0.04 * (index - (len(answers) - 1) / 2)
        colour = style.CATEGORIES[index % len(style.CATEGORIES)]
        traces += line(places + shift, values, name, colour, hover=f"{hover}<extra></extra>", **own)
    ticks = {"tickmode": "array", "tickvals": places.tolist(), "ticktext": [str(shots) for shots in SHOWN]}
    layout = {"xaxis": ticks | {"zeroline": False}, "yaxis": {"tickformat": ".0%", "zeroline": False}}
    return style.figure(traces, "examples in the prompt", "accuracy", height=FIGURE_HEIGHT, layout=layout)


def answer(model: OpenModel, prompts: FewShotPrompts, batch: int | None = None) -> Answers:
    """Mark which prompts the model answers correctly, after each number of examples."""
    return prompts.asked_of(model, batch).read_all()["right"].numpy()


def tabulated(answers: Mapping[str, Answers], prompts: FewShotPrompts) -> pd.DataFrame:
    """Tabulate `model task shots accuracy accuracy_se prompts`; the task "" is all of them."""
    tasks = np.array(prompts.tasks)
    rows = []
    for name, right in answers.items():
        for task in ("", *dict.fromkeys(prompts.tasks)):
            of_task = right[tasks == task] if task else right
            for shots in SHOWN:
                accuracy, error = mean_and_error(of_task[:, shots].astype(np.float64))
                rows.append((name, task, shots, accuracy, error, len(of_task)))
    return pd.DataFrame(rows, columns=["model", "task", "shots", "accuracy", "accuracy_se", "prompts"])


@declared("sinks/figure3")
def figure_3(study: Study, outcome: Outcome) -> None:
    dense = study.require_model()
    prompts, (_, measured) = prompts_for(dense, PROMPTS, PROMPT_SEED), halves(study)
    untouched = measured_once(study, DENSE, dense)
    traced = trace_sinks(dense, measured, show_progress=study.show)
    answers = {DENSE: answer(dense, prompts)}
    for method, name in shown([*METHODS.items()], "answering after examples", study.show):
        model, pruned = pruned_model(study, method)
        answers[name] = answer(model, prompts)
        sinks = measured_once(study, name, model)
        kept, more = kept_sinks(untouched, sinks), loss_difference(untouched, sinks)
        tags = tags_kept(traced, trace_sinks(model, measured, show_progress=study.show))
        outcome.read(
            f"{name}, beside examples",
            f"keeps {percent(kept.value)} of the dense model's sinks and {tags} of their tags; {more.value:.2f} nats "
            "more",
        )
        if name == OATS:
            for of, control in ((WITHOUT, None), (RANDOM, 0)):
                with all_open(_take_out(model, pruned, control)):
                    answers[of] = answer(model, prompts)
    outcome.tables["accuracy"] = tabulated(answers, prompts)
    show_accuracy(outcome, answers, prompts.tasks)


def tags_kept(before: Run, after: Run) -> str:
    """Report the share of the tags of one trace that another has, weighted by what they catch and explain."""
    table = survival_of_tags(before, after).table
    weights = table["tagged_before"].where(table["status"] != NEW, 0.0)
    kept = weights[table["status"] == SURVIVED].sum()
    return percent(float(kept / weights.sum())) if weights.any() else "none"


def _take_out(
    model: OpenModel, pruned: Pruned, control: int | None
) -> Iterator[AbstractContextManager[object]]:
    """Take out every layer's low-rank terms, or random ones as large."""
    for layer in range(model.layers):
        yield without_low_rank(model, layer, factors=pruned.factors(layer), control=control)


def show_accuracy(outcome: Outcome, answers: Mapping[str, Answers], tasks: Sequence[str]) -> None:
    """Show verdicts, levels and a chart of the answers of every model."""
    right = {name: of.astype(np.float64) for name, of in answers.items()}
    outcome.judge("examples-help", over_tasks(right[DENSE][:, -1] - right[DENSE][:, 0], tasks))
    for name, of in right.items():
        outcome.read(name, by_k(of))
    for name in ("Wanda", "SparseGPT"):
        gap, of_pair = right[OATS] - right[name], {"method": name, "removed": f"{percent(SPARSITY)} removed"}
        if not right[DENSE][:, 0].any():
            outcome.cannot_judge("similar", "nothing is right without examples, in any model", **of_pair)
        else:
            outcome.judge("similar", over_tasks(gap[:, 0], tasks).floored(), **of_pair)
        outcome.judge("widens", over_tasks(gap[:, -1] - gap[:, 0], tasks), **of_pair)
    if right[RANDOM].any():
        outcome.judge("low-rank", over_tasks((right[RANDOM] - right[WITHOUT])[:, -1], tasks))
    else:
        outcome.cannot_judge("low-rank", "without random terms as large nothing is right, either")
    outcome.draw("accuracy", accuracy_by_shots(right), removed=f"{percent(SPARSITY)} removed")


def by_k(right: Floats) -> str:
    """Write the accuracy after each number of examples that is shown."""
    shares = ", ".join(percent(right[:, shots].mean()) for shots in SHOWN)
    return f"{shares} after {', '.join(map(str, SHOWN))} examples"


def over_tasks(values: Floats, tasks: Sequence[str]) -> Estimate:
    """Average over tasks the means of their prompts, which are a sample: the six tasks are all that there are."""
    by_task = [values[np.array(tasks) == task] for task in dict.fromkeys(tasks)]
    errors = [of.var(ddof=1) / len(of) for of in by_task]
    mean, error = np.mean([of.mean() for of in by_task]), np.sqrt(np.sum(errors)) / len(by_task)
    return Estimate(float(mean), float(error), len(values) - len(by_task) + 1, "prompts")
