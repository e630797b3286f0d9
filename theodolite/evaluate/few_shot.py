"""Accuracy of a causal model after 0, 1, …, 5 examples on the offline task of `few_shot_task.py`.

Prompts depend on the seed alone, so that models are compared on the same ones.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from theodolite.corpus.few_shot_task import NAME, RULES, TEST_STREAM, Rules, prompt_ids
from theodolite.errors import UsageError
from theodolite.evaluate.perplexity import check_predicts
from theodolite.evaluate.scores import Score, mean_and_error, table
from theodolite.jobs.job import Rows
from theodolite.models import OpenModel
from theodolite.models.guard import measures
from theodolite.passes.corpus_pass import TOKENS_A_BATCH
from theodolite.system.progress import ShowProgress

PROMPTS = 4000


@measures("model")
def few_shot_answers(
    model: OpenModel,
    *,
    rules: Rules = RULES,
    prompts: int = PROMPTS,
    seed: int = 0,
    batch: int | None = None,
    show_progress: ShowProgress = lambda done, total: None,
) -> Bool[np.ndarray, "prompts words"]:
    """Mark the prompts whose most likely label is correct, after 0, 1, … examples.

    Args:
        model: causal, with a token for every character of the task.
        rules: the family that hidden rules come from.
        prompts: how many; seed: which ones, the same for every model.
        batch: prompts per forward pass; None: 4096 tokens' worth.
        show_progress: told (done, total) prompts before each batch and at the end; it may raise to stop.

    Raises:
        UsageError: the model cannot read the prompts, or a number is out of range.
    """
    rows = answer_rows(model, rules=rules, prompts=prompts, seed=seed, batch=batch)
    return rows.whole(show_progress)["right"].numpy()


def answer_rows(model: OpenModel, *, rules: Rules, prompts: int, seed: int, batch: int | None) -> Rows[slice]:
    """Return the steps of `few_shot_answers`, a prompt each; arguments and errors are its own."""
    check_predicts(model)
    tokenizer = model.required_tokenizer()
    if prompts < 2 or seed < 0:
        raise UsageError(f"{prompts} prompts with seed {seed}: ask for 2 or more, with a seed of 0 or more")
    drawn = rules.draw(prompts, np.random.default_rng([seed, TEST_STREAM]))
    ids, asked, label_ids = prompt_ids(drawn, rules, tokenizer)
    if not model.has_positions(ids.shape[1]):
        raise UsageError(f"{model.id} has positions for {model.longest} tokens; {NAME} needs {ids.shape[1]}")
    return _rows(model.hf, ids, asked, torch.from_numpy(drawn.labels), label_ids, batch)


def few_shot_scores(
    name: str,
    right: Bool[np.ndarray, "prompts words"],
    *,
    rules: Rules = RULES,
    seed: int = 0,
    batch: int | None = None,
) -> list[Score]:
    """Score the accuracy of the model `name` by number of examples, from `few_shot_answers`."""
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
    """Tabulate accuracy by number of examples: `shots accuracy accuracy_se chance best prompts`.

    `accuracy_se` is the binomial standard error √(p (1 − p)/(n − 1)), `chance` the accuracy of guessing, `best` that of
    the Bayes-optimal reader (`Rules.best_accuracy`).

    Arguments and errors are those of `few_shot_answers`.
    """
    right = few_shot_answers(
        model, rules=rules, prompts=prompts, seed=seed, batch=batch, show_progress=show_progress
    )
    scores = table(few_shot_scores(model.id, right, rules=rules, seed=seed, batch=batch))
    named = {"value": "accuracy", "value_se": "accuracy_se", "count": "prompts"}
    columns = ["shots", "accuracy", "accuracy_se", "chance", "best", "prompts"]
    return scores.rename(columns=named)[columns]


@torch.no_grad()
def right_answers(
    model: nn.Module,
    ids: Int[Tensor, "prompts positions"],
    asked: Int[Tensor, "prompts words"],
    labels: Int[Tensor, "prompts words"],
    label_ids: list[int],
    *,
    batch: int | None = None,
    show_progress: ShowProgress = lambda done, total: None,
) -> Bool[Tensor, "prompts words"]:
    """Mark the colons after which the most likely label is the correct one.

    Args:
        model: causal: a word must not see its label.
        ids: token ids of the prompts; asked: positions of the colons; labels: the correct ones, from 0.
        label_ids: token ids of the labels.
        batch: prompts per forward pass; None: 4096 tokens' worth.
        show_progress: told (done, total) prompts before each batch; it may raise to stop.
    """
    return _rows(model, ids, asked, labels, label_ids, batch).whole(show_progress)["right"]


def _rows(
    model: nn.Module, ids: Tensor, asked: Tensor, labels: Tensor, label_ids: list[int], batch: int | None
) -> Rows[slice]:
    batch = batch_of_prompts(ids.shape[1], batch)
    device = next((weight.device for weight in model.parameters()), ids.device)

    def read(part: slice) -> dict[str, Tensor]:
        logits = model(input_ids=ids[part].to(device), use_cache=False).logits[..., label_ids].cpu()
        label_logits = logits.gather(1, asked[part, :, None].expand(-1, -1, len(label_ids)))
        return {"right": label_logits.argmax(dim=2) == labels[part]}

    parts = [slice(first, min(first + batch, len(ids))) for first in range(0, len(ids), batch)]
    return Rows(parts, read, lambda part: part.stop - part.start)


def batch_of_prompts(length: int, batch: int | None) -> int:
    """Return the prompts per forward pass: as given, or 4096 tokens' worth.

    Raises:
        UsageError: fewer than one.
    """
    if batch is not None and batch < 1:
        raise UsageError(f"a batch of {batch} prompts reads nothing: use --batch 1 or more")
    return batch or max(1, TOKENS_A_BATCH // length)
