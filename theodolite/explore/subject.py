"""A model that is explored with its survey: what it does with a prompt, and which prompts can be shown."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from theodolite.accumulate.attention import AttentionStatistics, Tokens
from theodolite.attention.inputs import softmax
from theodolite.comparison.audit import refuse_unlike, shape_of
from theodolite.corpus.sampling import LEAST_LENGTH
from theodolite.errors import TheodoliteError, UsageError, WorkError, first_line
from theodolite.logits.constituents import constituents
from theodolite.measure.constituents import Constituents
from theodolite.measure.heads import head_columns, heads_that_are
from theodolite.models import OpenModel
from theodolite.models.guard import guarded, known_state
from theodolite.models.texts import shipped_prompt, token_text
from theodolite.passes.run import Run
from theodolite.sinks.interventions import attention_knockout, head_knockout
from theodolite.sinks.prompt import LEFT_OUT, HeadView, PromptPass, head_view, read_prompt
from theodolite.system.progress import ShowStage
from theodolite.system.wording import counted
from theodolite.theory.grouping import chance_explained, principal_scores, rgb, variance_explained

MOST_TOKENS = 512  # of a prompt, whose attention is drawn whole: 1.5 MB on their way to the page
MOST_CHARACTERS = 64 * MOST_TOKENS  # what is longer has too many tokens: counting a book's would take minutes
PROMPTS = ("few-shot", "chain-of-thought", "step-by-step", "passage", "inference")

KEPT_PROMPTS, KEPT_LAYERS = 2, 4  # that are cached: of GPT-2 and 512 tokens some 30 MB each

_ONE_SURVEY = threading.Lock()  # two bars at once would draw over each other


@dataclass(frozen=True, eq=False)
class Tags:
    """The vectors that the head writes, by token.

    `colours` (T, 3), 0 to 255: three principal components of the output in the residual stream, stretched over all
    tokens but the first and the sinks. `explained`: η², the share of the output's variance that the grouping by sink
    explains, NaN with one group; `before`: in the stream that enters the block; `chance`: by a random grouping.
    """

    colours: np.ndarray
    explained: float
    before: float
    chance: float


@dataclass(frozen=True)
class PlannedSurvey:
    """A survey that `make` makes once its run is asked for, whose provenance is known before."""

    provenance: dict[str, Any]
    make: Callable[[ShowStage], Run]


class Subject:
    """One model, which is asked one thing at a time, and its survey, which may be made meanwhile.

    `progress` says how far that is. What was computed of the latest prompts is kept.
    """

    def __init__(self, name: str, model: OpenModel, survey: Run | PlannedSurvey) -> None:
        self.name, self.model, self.provenance, self.progress = name, model, survey.provenance, ""
        self._survey: Future[Run] = Future()
        self._planned = survey if isinstance(survey, PlannedSurvey) else None  # and not begun
        if isinstance(survey, Run):
            self._survey.set_result(survey)
        self._unchanged = functools.lru_cache(KEPT_PROMPTS)(self._next)  # whatever head is shown
        self.read = functools.lru_cache(KEPT_PROMPTS)(self._read)
        self.measured = functools.lru_cache(KEPT_PROMPTS)(self._measured)
        self.constituents = functools.lru_cache(KEPT_LAYERS)(self._constituents)

    @property
    def is_surveyed(self) -> bool:
        """False as long as `run` would have to read the text first."""
        return not self.is_pending and self._survey.exception() is None

    @property
    def run(self) -> Run:
        """The survey, waited for if it is only planned; raises what kept it from being made."""
        self.begin()
        return self._survey.result()

    @property
    def is_pending(self) -> bool:
        """True while the survey is still to come: neither made nor given up."""
        return not self._survey.done()

    def begin(self) -> None:
        """Begin the survey in a thread that Python waits for at its end, if it is planned and has not begun."""
        if self._planned is not None:
            threading.Thread(target=self._make, args=[self._planned.make]).start()
        self._planned = None

    def _make(self, make: Callable[[ShowStage], Run]) -> None:
        def note(what: str, done: int, total: int) -> None:
            self.progress = f"{what}: {done} of {total}"

        try:
            with _ONE_SURVEY:
                self._survey.set_result(make(note))
        except TheodoliteError as error:
            self._survey.set_exception(error)
        except BaseException as error:  # nobody else would hear of it
            reason = first_line(error) or type(error).__name__
            self._survey.set_exception(WorkError(f"the survey of {self.name} ended: {reason}"))

    def _read(self, ids: tuple[int, ...]) -> PromptPass:
        return read_prompt(self.model, torch.tensor(ids, device="cpu"))

    @known_state()
    def _measured(self, ids: tuple[int, ...]) -> Run:
        """Return a run whose heads table has what can be measured of every head on this prompt alone."""
        read, model = self.read(ids), self.model
        statistics = AttentionStatistics(model.layers, model.heads, len(read.ids), 1, 0, read.trailing)
        tokens = Tokens.of(read.ids[None], model.device)
        with torch.inference_mode():
            for layer, (inputs, _, _) in read.layers.items():
                statistics.update(layer, inputs, tokens, first_context=0)
        state = statistics.state()
        columns = {name: column.value.tolist() for name, column in head_columns(state).items()}
        arrays = {"visible_keys": state["visible_keys"]}
        return Run(heads=heads_that_are(columns, model.heads_of), arrays=arrays, provenance={})

    def _constituents(self, ids: tuple[int, ...], layer: int) -> Constituents:
        """Split a layer's logits on a prompt; `TheodoliteError` where they cannot be."""
        prompt = torch.tensor(ids, device="cpu")
        return constituents(self.model, prompt, layer, decomposition=self.run)

    def view(self, ids: tuple[int, ...], layer: int, head: int) -> HeadView:
        """Read one head's attention on a prompt; `UsageError` where there is no such head."""
        self.model.check_place(layer, head)
        return head_view(self.read(ids), layer, head)

    def next_tokens(self, ids: tuple[int, ...], layer: int, head: int) -> pd.DataFrame:
        """Compute what the model says next, as it is, without what the head writes, and with its sinks hidden from it.

        Returns probabilities of the most probable tokens, a row each by its text; `UsageError`: it predicts none.
        """
        if not self.model.causal or self.model.source.predict is None:
            raise UsageError(f"{self.name} predicts no next tokens")
        sinks = self.view(ids, layer, head).sink_positions
        with guarded(self.model.root):
            columns = {"as it is": self._unchanged(ids)}
            with head_knockout(self.model, layer, head):
                columns["without the head"] = self._next(ids)
            if sinks:
                with attention_knockout(self.model, layer, head, sinks):
                    columns["without its sinks"] = self._next(ids)
        best = torch.stack(list(columns.values())).topk(5).indices.unique()
        texts = list(map(token_text(self.model), best.tolist()))
        table = pd.DataFrame({name: of[best].numpy() for name, of in columns.items()}, texts)
        return table.sort_values("as it is", ascending=False, kind="stable")

    def _next(self, ids: tuple[int, ...]) -> Tensor:
        last = torch.arange(len(ids)) == len(ids) - 1
        return self.model.logits(torch.tensor([ids]), last[None])[0].double().softmax(dim=-1).cpu()

    def attention(self, ids: tuple[int, ...], layer: int) -> Float[Tensor, "heads queries keys"]:
        """Compute the attention of all heads of a layer."""
        self.model.check_place(layer)
        inputs = self.read(ids).layers[layer][0]
        return softmax(inputs.logits(), inputs.sink)[0].cpu()

    def tags(self, ids: tuple[int, ...], layer: int, head: int) -> Tags:
        """Compute what a head writes at each token, on three principal components, and how far the sinks explain it.

        `UsageError`: all tokens but two are sinks; `WorkError`: the heads' outputs are not added up.
        """
        with guarded(self.model.root):
            group = torch.from_numpy(self.view(ids, layer, head).group)
            others = group != LEFT_OUT
            if int(others.sum()) <= 2:
                raise UsageError("too few tokens besides the sinks")
            read = self.read(ids)
            output = read.written(self.model, layer, head)
            return Tags(
                colours=rgb(principal_scores(output, others), others).numpy(),
                explained=variance_explained(output[others], group[others]),
                before=variance_explained(read.streams[layer].double()[others], group[others]),
                chance=chance_explained(group[others]),
            )


def prompt_ids(subjects: Sequence[Subject], prompt: str) -> tuple[int, ...]:
    """Tokenize the prompt for every model, special tokens included; `UsageError` where it cannot be shown."""
    return ids_of_text({subject.name: subject.model for subject in subjects}, prompt)


def ids_of_text(models: Mapping[str, OpenModel], prompt: str) -> tuple[int, ...]:
    """Tokenize a text for models, by their names on the page, as `prompt_ids` does."""
    if not prompt.strip():
        raise UsageError("the prompt is empty: type some text, or pick a prompt")
    if len(prompt) > MOST_CHARACTERS:
        most_text = f"at most {MOST_CHARACTERS:,}, and {MOST_TOKENS} tokens, can be shown"
        raise UsageError(f"the prompt is {len(prompt):,} characters long: {most_text}")
    ids = _same_ids(models, prompt.encode("utf-8", "replace").decode())
    most = _longest_prompt(models.values())
    if len(ids) > most:
        reason = "" if most == MOST_TOKENS else ", the number of positions of the model"
        raise UsageError(f"the prompt is {len(ids)} tokens long: at most {most} can be shown{reason}")
    if len(ids) < LEAST_LENGTH:
        raise UsageError(f"the prompt is {counted(len(ids), 'token')} long: type at least {LEAST_LENGTH}")
    return ids


def _same_ids(models: Mapping[str, OpenModel], text: str) -> tuple[int, ...]:
    """Tokenize a text, whose tokens must be the same for every model."""
    (name, first), *others = ((name, _ids(model, text)) for name, model in models.items())
    for other, ids in others:
        if ids != first:
            needed = "only models with one tokenizer can be shown side by side"
            raise UsageError(f"{name} and {other} read text as different tokens: {needed}")
    return first


def _ids(model: OpenModel, text: str) -> tuple[int, ...]:
    if model.vocabulary is None:
        raise UsageError(f"{model.id} reads {model.source.reads}, not text: it takes no prompt")
    ids = tuple(model.required_tokenizer()(text, add_special_tokens=True, verbose=False)["input_ids"])
    if not model.has_tokens(torch.tensor(ids, dtype=torch.int64)):
        gives = f"gives tokens that its {model.vocabulary} embeddings do not have"
        raise UsageError(f"the tokenizer of {model.id} {gives}: it belongs to another model")
    return ids


def _longest_prompt(models: Iterable[OpenModel]) -> int:
    return min([MOST_TOKENS, *(model.longest for model in models if model.longest is not None)])


def check_pair(models: Mapping[str, OpenModel]) -> None:
    """Raise `UsageError` where models differ in shape or tokens, before they are surveyed to be shown side by side."""
    (name, model), *others = models.items()
    for other_name, other in others:
        refuse_unlike((name, other_name), shape_of(model), shape_of(other))
    _same_ids(models, "\n".join(map(shipped_prompt, PROMPTS)))


def offered_prompts(subjects: Sequence[Subject]) -> dict[str, str]:
    """Return the prompts that come with the package, of those that the models or surveys are too short for the end."""
    surveyed = (subject.provenance["corpus"]["length"] for subject in subjects)
    most = min(_longest_prompt(subject.model for subject in subjects), *surveyed)
    offered = {}
    for name in PROMPTS:
        words = re.findall(r"\S+\s*", shipped_prompt(name))
        while len(words) > 1 and len(_ids(subjects[0].model, "".join(words))) > most:
            del words[0]
        offered[name] = "".join(words)
    return offered
