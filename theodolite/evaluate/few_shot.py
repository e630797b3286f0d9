"""Accuracy of a causal model after 0, 1, … examples, on word tasks that need no download (`assets/few-shot.tsv`).

A prompt is lines of one task, as `France: Paris`: each line is a question with the lines before it as examples.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from theodolite.corpus.cutting import padded
from theodolite.corpus.special_tokens import frame_of
from theodolite.errors import UsageError
from theodolite.evaluate.perplexity import check_predicts
from theodolite.evaluate.scores import Score, mean_and_error
from theodolite.jobs.job import Rows
from theodolite.models import OpenModel
from theodolite.models.guard import measures
from theodolite.system.choices import check_whole
from theodolite.system.progress import ShowProgress

NAME = "few-shot"

MOST_SHOTS = 16  # examples before the last line of a prompt, at the most
PROMPTS = 100  # of each task
TOKENS_A_PASS = 2048  # logits of as many tokens are in memory


@functools.cache
def word_tasks() -> dict[str, list[tuple[str, str]]]:
    """Read the tasks by name, each a list of questions and their answers."""
    tasks: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    path = resources.files("theodolite") / "assets" / "few-shot.tsv"
    for line in path.read_text(encoding="utf-8").splitlines():
        task, question, answer = line.split("\t")
        tasks[task].append((question, answer))
    return dict(tasks)


@dataclass(frozen=True)
class FewShotPrompts:
    """N prompts of k examples and a question: k + 1 lines of one task."""

    tasks: tuple[str, ...]  # of each prompt
    ids: Int[Tensor, "prompts positions"]  # with 0 behind the shorter prompts
    answers: Int[Tensor, "prompts lines 2"]  # places of the first token of each answer, and behind its last

    @classmethod
    def draw(
        cls, tokenizer: Any, prompts: int = PROMPTS, seed: int = 0, shots: int = MOST_SHOTS
    ) -> FewShotPrompts:
        """Draw prompts of each task by the seed alone, those of fewer shots begin alike; `UsageError` if it cannot."""
        if not getattr(tokenizer, "is_fast", False):
            raise UsageError(f"{NAME} needs a tokenizer that says where tokens stand (a fast one)")
        check_whole(prompts=prompts, seed=seed, shots=shots)
        if prompts < 2 or seed < 0 or not 0 <= shots <= MOST_SHOTS:
            raise UsageError(
                f"{prompts} prompts with seed {seed} and {shots} examples: ask for 2 prompts or more, with a seed of 0 "
                f"or more, and up to {MOST_SHOTS} examples"
            )
        before = frame_of(tokenizer).before
        rows, answers, tasks = [], [], []
        for number, (task, items) in enumerate(word_tasks().items()):
            random = np.random.default_rng([seed, number])
            for _ in range(prompts):
                lines = [items[item] for item in random.permutation(len(items))[: shots + 1]]
                text = "".join(f"{question}: {answer}\n" for question, answer in lines)
                read = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
                starts, ends = np.array(read["offset_mapping"]).T
                stop = np.cumsum([len(f"{question}: {answer}\n") for question, answer in lines])
                begin = stop - [len(f" {answer}\n") for _, answer in lines]
                places = [np.searchsorted(ends, begin, "right"), np.searchsorted(starts, stop, "left")]
                if (ends[places[1] - 1] != stop).any():
                    raise UsageError(f"{NAME} needs tokens that end with a line: line breaks, say")
                rows.append([*before, *read["input_ids"]])
                answers.append(np.stack(places, axis=1) + len(before))
                tasks.append(task)
        return cls(tuple(tasks), padded(rows, 0), torch.from_numpy(np.stack(answers)))

    def asked_of(self, model: OpenModel, batch: int | None = None) -> Rows[Tensor]:
        """Return the steps of asking a model as it is now, a prompt each: `right`, of all prompts and lines."""
        if batch is not None and batch < 1:
            raise UsageError(f"a batch of {batch} prompts reads nothing: use --batch 1 or more")
        size = batch or max(1, TOKENS_A_PASS // self.ids.shape[1])
        parts = torch.arange(len(self.ids), device="cpu").split(size)
        return Rows(parts, lambda part: {"right": self.right(model, part, self.ids[part])}, len)

    def right(
        self, model: OpenModel, part: slice | Tensor, ids: Int[Tensor, "prompts positions"]
    ) -> Bool[Tensor, "prompts lines"]:
        """Mark the answers that greedy decoding writes, of some prompts; `ids`: their tokens, up to the longest."""
        first, behind = (self.answers[part] - 1).unbind(dim=-1)  # from where an answer's tokens are predicted
        places = torch.arange(ids.shape[1])
        predicting = ((places >= first.unsqueeze(-1)) & (places < behind.unsqueeze(-1))).any(dim=1)
        wrong = torch.zeros_like(predicting)
        predicted = model.logits(ids, predicting).argmax(dim=-1).cpu()
        wrong[predicting] = predicted != ids.roll(-1, dims=1)[predicting]
        upto = torch.nn.functional.pad(wrong[:, :-1].long().cumsum(dim=1), (1, 0))  # [t]: among tokens 1 … t
        return upto.gather(1, behind) == upto.gather(1, first)


@measures("model")
def few_shot_answers(
    model: OpenModel,
    *,
    prompts: int = PROMPTS,
    seed: int = 0,
    shots: int = MOST_SHOTS,
    batch: int | None = None,
    show_progress: ShowProgress = lambda done, total: None,
) -> dict[str, Bool[np.ndarray, "prompts lines"]]:
    """Mark the prompts whose answer a model gets right after 0, 1, …, `shots` examples, by task.

    Args:
        model: causal, with an output head and a fast tokenizer.
        prompts: of each task; seed: which ones, the same for every model.
        batch: prompts per forward pass; None: 2048 tokens' worth.
        show_progress: told (done, total) prompts before each batch and at the end; it may raise to stop.

    Raises:
        UsageError: the model cannot read the prompts, or a number is out of range.
    """
    rows = prompts_for(model, prompts, seed, shots).asked_of(model, batch)
    return by_task(rows.read_all(show_progress)["right"].numpy(), prompts)


def by_task(right: Bool[np.ndarray, "all_prompts lines"], prompts: int) -> dict[str, np.ndarray]:
    """Part the answers to all prompts by task."""
    return dict(zip(word_tasks(), right.reshape(-1, prompts, right.shape[1]), strict=True))


def prompts_for(model: OpenModel, prompts: int, seed: int, shots: int = MOST_SHOTS) -> FewShotPrompts:
    """Draw the prompts that a model is asked; errors are those of `few_shot_answers`."""
    check_predicts(model)
    drawn = FewShotPrompts.draw(model.required_tokenizer(), prompts, seed, shots)
    if not model.has_positions(drawn.ids.shape[1]):
        raise UsageError(
            f"{model.id} has positions for {model.longest} tokens; {NAME} with {shots} examples needs "
            f"{drawn.ids.shape[1]}: ask for fewer --shots"
        )
    return drawn


def few_shot_scores(
    name: str, answers: dict[str, np.ndarray], shots: Sequence[int], seed: int, batch: int | None
) -> list[Score]:
    """Score the accuracy of the model `name` by number of examples: of all tasks, then of each."""
    whole = {NAME: np.mean(list(answers.values()), axis=0)}
    scores = []
    for task, right in (whole | {f"{NAME}, {task}": of for task, of in answers.items()}).items():
        asked = f"{task} {len(right)} {seed}"
        for number in shots:
            each = right[:, number].astype(np.float64)
            measured = (*mean_and_error(each), len(each), batch or 0, asked, each)
            scores.append(Score(name, task, number, "accuracy", *measured))
    return scores
