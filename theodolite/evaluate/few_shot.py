"""Accuracy after 0, 1, …, 5 examples on the offline task of `rules.py`, of any causal model.

The prompts follow from the seed alone, so that models are compared on the same ones.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool

from theodolite.errors import UsageError
from theodolite.evaluate.perplexity import check_predicts
from theodolite.evaluate.scores import Score, mean_and_error
from theodolite.models import OpenModel
from theodolite.reading import ShowProgress
from theodolite.rules import NAME, RULES, TESTED, Rules, prompt_ids
from theodolite.train.few_shot import batch_of_prompts, right_answers

PROMPTS = 4000


def few_shot_answers(
    model: OpenModel,
    *,
    rules: Rules = RULES,
    prompts: int = PROMPTS,
    seed: int = 0,
    batch: int | None = None,
    show_progress: ShowProgress = lambda done, total: None,
) -> Bool[np.ndarray, "prompts words"]:
    """Whether the model's likeliest label is the right one, of every prompt after 0, 1, … examples.

    Args:
        model: causal, with a token for every character of the task.
        rules: the family that hidden rules come from.
        prompts: how many; seed: of them. Models are asked the same.
        batch: prompts a forward pass; None: 4096 tokens' worth.
        show_progress: told (done, total) prompts before each batch and at the end; it may raise to stop.

    Raises:
        UsageError: the model cannot read the prompts, or a number is out of range.
    """
    check_predicts(model)
    if model.tokenizer is None:
        raise UsageError(f"{model.id} has no tokenizer beside its weights: save one there")
    if prompts < 2 or seed < 0:
        raise UsageError(f"{prompts} prompts with seed {seed}: ask for 2 or more, with a seed of 0 or more")
    drawn = rules.draw(prompts, np.random.default_rng([seed, TESTED]))
    ids, asked, label_ids = prompt_ids(drawn, rules, model.tokenizer)
    if model.longest is not None and ids.shape[1] > model.longest:
        raise UsageError(f"{model.id} has positions for {model.longest} tokens; {NAME} needs {ids.shape[1]}")
    right = right_answers(
        model.hf,
        ids,
        asked,
        torch.from_numpy(drawn.labels),
        label_ids,
        batch=batch,
        show_progress=show_progress,
    )
    return right.numpy()


def few_shot_scores(
    name: str,
    right: Bool[np.ndarray, "prompts words"],
    *,
    rules: Rules = RULES,
    seed: int = 0,
    batch: int | None = None,
) -> list[Score]:
    """The accuracy of the model `name` by number of examples, from `few_shot_answers`."""
    best, questions = rules.best_accuracy(), f"{rules} {len(right)} {seed}"
    size = batch_of_prompts(rules.length, batch)
    scores = []
    for shots, each in enumerate(right.astype(np.float64).T):
        value, error = mean_and_error(each)
        shared = (len(right), size, questions, each, 1 / rules.values, float(best[shots]))
        scores.append(Score(name, NAME, shots, "accuracy", value, error, *shared))
    return scores


def few_shot_accuracy(
    model: OpenModel,
    *,
    rules: Rules = RULES,
    prompts: int = PROMPTS,
    seed: int = 0,
    batch: int | None = None,
    show_progress: ShowProgress = lambda done, total: None,
) -> pd.DataFrame:
    """Accuracy by number of examples, a row each: `shots accuracy accuracy_se chance best prompts`.

    `accuracy_se` is the binomial standard error √(p (1 − p)/(n − 1)); `chance` that of guessing a label; `best` that of
    a reader that knows the family of rules (`Rules.best_accuracy`).

    Arguments and errors are those of `few_shot_answers`.
    """
    right = few_shot_answers(
        model, rules=rules, prompts=prompts, seed=seed, batch=batch, show_progress=show_progress
    )
    rows = [
        {
            "shots": score.shots,
            "accuracy": score.value,
            "accuracy_se": score.error,
            "chance": score.chance,
            "best": score.best,
            "prompts": score.count,
        }
        for score in few_shot_scores(model.id, right, rules=rules, seed=seed, batch=batch)
    ]
    return pd.DataFrame(rows)
