"""A model that is explored with its survey, and cached results of the latest prompts.

Prompts are checked here; a refusal is one line that the page can show.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from theodolite.comparison.audit import SHAPE
from theodolite.corpus.sampling import LEAST_LENGTH
from theodolite.corpus.special_tokens import refuse_growth
from theodolite.errors import TheodoliteError, UsageError
from theodolite.explore.view import (
    HeadView,
    LayerCatch,
    PromptPass,
    Tags,
    catch_layer,
    head_tags,
    head_view,
    read_prompt,
)
from theodolite.logits.constituents import constituents_of_pass
from theodolite.measure.constituents import Constituents
from theodolite.models import OpenModel
from theodolite.models.prompts import shipped_prompt
from theodolite.passes.run import Run
from theodolite.system.wording import counted

MOST_TOKENS = 512
"""A prompt's attention is drawn whole: 512² numbers are a megabyte and a half on their way to the page."""

MOST_CHARACTERS = 64 * MOST_TOKENS
"""Of a prompt: what is longer has too many tokens, and counting those of a whole book would take minutes."""

PROMPTS = ("few-shot", "chain-of-thought", "step-by-step", "passage", "inference")

KEPT_PROMPTS, KEPT_LAYERS = 2, 4
"""Passes that are kept, and layers whose catches and splits are: of GPT-2 and 512 tokens some 30 MB each."""


@dataclass(frozen=True, eq=False)
class ConstituentsAndTags:
    """What is computed separately because it takes longer; None, with the reason, where it is unavailable."""

    split: Constituents | None
    tags: Tags | None
    not_split: str = ""
    no_tags: str = ""


class Subject:
    """One model, its survey, and cached results of the latest prompts; thread-safe.

    Attributes:
        name: shown on the page.
        model: from `open_model`.
        run: a survey of it on a text.
    """

    def __init__(self, name: str, model: OpenModel, run: Run) -> None:
        self.name, self.model, self.run = name, model, run
        self._lock = threading.RLock()
        self._passes = functools.lru_cache(KEPT_PROMPTS)(lambda ids: read_prompt(model, torch.tensor(ids)))
        self._catches = functools.lru_cache(KEPT_LAYERS)(self._catch)
        self._splits = functools.lru_cache(KEPT_LAYERS)(
            lambda ids, layer: constituents_of_pass(model, self.read(ids).layers[layer], run)
        )

    def read(self, ids: tuple[int, ...]) -> PromptPass:
        """The forward pass of a prompt."""
        with self._lock:
            return self._passes(ids)

    def view(self, ids: tuple[int, ...], layer: int, head: int) -> HeadView:
        """A head on the prompt; `UsageError` where there is no such head."""
        self.model.check_place(layer, head)
        with self._lock:
            read, caught = self.read(ids), self._catches(ids, layer)
            return head_view(read.tokens, read.layers[layer].inputs, caught, layer, head, read.trailing)

    def constituents_and_tags(self, ids: tuple[int, ...], layer: int, head: int) -> ConstituentsAndTags:
        """A layer's constituents on the prompt, and what the head writes."""
        with self._lock:
            forward_pass, view = self.read(ids), self.view(ids, layer, head)
            split, not_split = _or_error(lambda: self._splits(ids, layer))
            caught = self._catches(ids, layer)
            tags, no_tags = _or_error(lambda: head_tags(self.model, forward_pass, caught, view))
            return ConstituentsAndTags(
                split, tags, not_split, no_tags or ("" if tags else "too few tokens besides the sinks")
            )

    def _catch(self, ids: tuple[int, ...], layer: int) -> LayerCatch:
        read = self.read(ids)
        return catch_layer(read.layers[layer].inputs, read.trailing)


def _or_error(work: Any) -> tuple[Any, str]:
    try:
        return work(), ""
    except TheodoliteError as error:
        return None, str(error)


def longest_prompt(models: Sequence[OpenModel]) -> int:
    """Tokens of a prompt at most."""
    return min([MOST_TOKENS, *(model.longest for model in models if model.longest is not None)])


def prompt_ids(subjects: Sequence[Subject], prompt: str) -> tuple[int, ...]:
    """The prompt as every model reads it, special tokens included; `UsageError` where it cannot be shown."""
    models = [subject.model for subject in subjects]
    return ids_of_text(models, prompt, [subject.name for subject in subjects])


def ids_of_text(models: Sequence[OpenModel], prompt: str, names: Sequence[str] = ()) -> tuple[int, ...]:
    """As `prompt_ids`; `names`: of the models."""
    if not prompt.strip():
        raise UsageError("the prompt is empty: type some text, or pick a prompt")
    if len(prompt) > MOST_CHARACTERS:
        raise UsageError(
            f"the prompt is {len(prompt):,} characters long: at most {MOST_CHARACTERS:,}, and {MOST_TOKENS} tokens, "
            "can be shown"
        )
    text = prompt.encode("utf-8", "replace").decode()
    first, *others = (_ids(model, text) for model in models)
    if any(ids != first for ids in others):
        raise UsageError(_DIFFERENT.format(*names))
    most = longest_prompt(models)
    if len(first) > most:
        reason = "" if most == MOST_TOKENS else ", the number of positions of the model"
        raise UsageError(f"the prompt is {len(first)} tokens long: at most {most} can be shown{reason}")
    if len(first) < LEAST_LENGTH:
        raise UsageError(f"the prompt is {counted(len(first), 'token')} long: type at least {LEAST_LENGTH}")
    return first


_DIFFERENT = (
    "{} and {} read text as different tokens: only models with one tokenizer can be shown side by side"
)


def _ids(model: OpenModel, text: str) -> tuple[int, ...]:
    if model.vocabulary is None:
        raise UsageError(f"{model.id} reads {model.source.reads}, not text: it takes no prompt")
    refuse_growth(model.required_tokenizer(), text)
    ids = tuple(model.required_tokenizer()(text, add_special_tokens=True, verbose=False)["input_ids"])
    if not model.has_tokens(torch.tensor(ids, dtype=torch.int64)):
        raise UsageError(
            f"the tokenizer of {model.id} gives tokens that its {model.vocabulary} embeddings do not have: it "
            "belongs to another model"
        )
    return ids


def check_pair(subjects: Sequence[tuple[str, OpenModel]]) -> None:
    """Raise `UsageError` where models differ in shape or tokens, before they are surveyed to be shown side by side."""
    (name, model), *others = subjects
    text = "\n".join(map(shipped_prompt, PROMPTS))
    ids = _ids(model, text)
    for other_name, other in others:
        for key, noun in SHAPE.items():
            first, second = getattr(model, key), getattr(other, key)
            if first != second:
                raise UsageError(
                    f"{other_name} has {second} {noun}, {name} {first}: only models of one shape can be shown side by "
                    "side"
                )
        if _ids(other, text) != ids:
            raise UsageError(_DIFFERENT.format(name, other_name))


def offered_prompts(subjects: Sequence[Subject]) -> dict[str, str]:
    """The prompts that come with the package, without the first words of those that are too long.

    Too long for the models, or for the surveys, which have means of so many positions.
    """
    surveyed = (subject.run.arrays["positional_basis"].shape[1] for subject in subjects)
    most = min(longest_prompt([subject.model for subject in subjects]), *surveyed)
    return {name: _last_words(subjects[0].model, shipped_prompt(name), most) for name in PROMPTS}


def _last_words(model: OpenModel, text: str, most: int) -> str:
    """The last words, of at most so many tokens; one at least."""
    words = re.findall(r"\S+\s*", text)
    while len(words) > 1 and len(_ids(model, "".join(words))) > most:
        del words[0]
    return "".join(words)
