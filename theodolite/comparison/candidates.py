"""Survey and trace the models of a comparison on one text, and trace one head of each on one prompt.

Models are opened one after another, so that no two are in memory at once. A model under an intervention is a candidate
of its own: without the low-rank term of a layer (Zhang et al. 2025, Fig. 4), and the control.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol, TypeVar

from torch import Tensor

from theodolite.comparison.audit import SHAPE, check_lengths
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.models import OpenModel
from theodolite.models.prompts import Focus, prompt_or_shipped
from theodolite.models.token_texts import token_texts
from theodolite.passes.run import Run
from theodolite.prune.checkpoint import Pruned
from theodolite.sinks.interventions import Factors, without_low_rank
from theodolite.sinks.prompt import PromptTrace, trace_prompt
from theodolite.sinks.trace import trace_sinks
from theodolite.system.pruned_folders import SETTINGS

PROMPT = "inference"  # the shipped prompt of the kind that Fig. 5 shows
CONTROL_SEED = 0

Open = Callable[[str], OpenModel]
Result = TypeVar("Result")
Edit = Callable[[OpenModel], AbstractContextManager[Mapping[str, float] | None]]


@dataclass(frozen=True)
class Candidate:
    """A model, or a model under an intervention."""

    name: str
    folder: str  # of its run
    source: str  # path or hub name
    edit: Edit = lambda model: nullcontext()  # the intervention
    against: int = 0  # place of the candidate that it is compared with
    layer: int | None = None  # of the intervention


@dataclass(frozen=True)
class Measured:
    """A candidate with its survey, trace and outputs, and what its intervention took out (‖W‖_F² of q, k, v)."""

    candidate: Candidate
    run: Run
    trace: Run
    outputs: Run
    taken: Mapping[str, float] | None


def candidates_of(sources: Sequence[str]) -> list[Candidate]:
    """Make one candidate per checkpoint, named by the last part of its path, numbered where two share a name."""
    shorts = [Path(source).name or source for source in sources]
    counts = [shorts[: place + 1].count(short) for place, short in enumerate(shorts)]
    names = [f"{short}-{count}" if count > 1 else short for short, count in zip(shorts, counts, strict=True)]
    return [Candidate(name, name, source) for name, source in zip(names, sources, strict=True)]


def without_term(place: int, candidate: Candidate, layer: int, rank: int | None) -> list[Candidate]:
    """Make two candidates of the one at `place`: without a layer's low-rank term of W_Q, W_K, W_V, and its control.

    The term is what the candidate was pruned to, sparse + low-rank, or else the leading part of an SVD, of a `rank`.
    The control is without a random matrix that has the term's singular values.

    Raises:
        UsageError: a rank and a term, or neither.
    """
    factors = low_rank_factors(candidate.source, layer)
    if rank is not None and factors is not None:
        raise UsageError(f"{candidate.name} has a low-rank term of its own: leave out --rank")
    if rank is None and factors is None:
        raise UsageError(
            f"{candidate.name} was not pruned to sparse + low-rank: give the --rank of the leading part of W_Q, W_K "
            "and W_V that is to be taken out"
        )
    description = "its low-rank term" if rank is None else f"rank {rank}"
    intervention = functools.partial(without_low_rank, layer=layer, rank=rank, factors=factors)
    variants = {
        f"layer {layer} without {description}": (f"without-low-rank-{layer}", None),
        f"layer {layer} without a random part": (f"without-random-{layer}", CONTROL_SEED),
    }
    return [
        Candidate(
            f"{candidate.name}, {variant}",
            f"{candidate.folder}-{folder}",
            candidate.source,
            functools.partial(intervention, control=seed),
            place,
            layer,
        )
        for variant, (folder, seed) in variants.items()
    ]


def low_rank_factors(source: str, layer: int) -> Factors | None:
    """The low-rank term of W_Q, W_K, W_V of a layer of a pruned checkpoint; None of another."""
    if not (Path(source) / SETTINGS).is_file():
        return None
    pruned = Pruned.load(source)
    return pruned.factors(layer) if pruned.low_rank else None


class Work(Protocol):
    """Opens a candidate, reads the text with its tokenizer, and measures it there."""

    def opened(self, source: str) -> OpenModel:
        """The checkpoint, opened."""

    def read(self, model: OpenModel) -> Corpus:
        """The text, as the model's own tokens."""

    def measured(self, candidate: Candidate, model: OpenModel, corpus: Corpus) -> tuple[Run, Run, Run]:
        """Its survey, its trace, and what its heads write and how well it predicts; finished ones as they are."""


def check(candidates: Sequence[Candidate], work: Work, focus: Focus, layer: int | None) -> None:
    """Open each candidate, and refuse (`UsageError`) what cannot be done before anything that takes long."""
    shapes: list[tuple[object, str]] = []
    lengths: dict[str, int] = {}

    def check_one(candidate: Candidate, model: OpenModel) -> None:
        corpus = work.read(model)
        shapes.append(([getattr(model, key) for key in SHAPE], corpus.sha256))
        lengths[candidate.name] = corpus.contexts.shape[1]
        if layer is not None:
            model.check_place(layer)
        if focus.layer is not None and focus.head is not None:
            model.check_place(focus.layer, focus.head)
        if corpus.images is None:
            prompt_or_shipped(model, focus.prompt, PROMPT)
        elif focus != Focus():
            raise UsageError("images are no prompt to show a head on: leave out --prompt, --layer and --head")
        with candidate.edit(model):
            pass

    _for_each(candidates, work.opened, check_one)
    check_lengths(lengths)
    if shapes[0] not in shapes[1:] and focus != Focus():
        raise UsageError(
            "models that differ in shape or tokenizer have no head in common to show on a prompt: leave out --prompt, "
            "--layer and --head"
        )


def measure(candidates: Sequence[Candidate], work: Work) -> list[Measured]:
    """Survey and trace each candidate, and read what its heads write."""

    def measure_one(candidate: Candidate, model: OpenModel) -> Measured:
        corpus = work.read(model)
        with candidate.edit(model) as taken:
            return Measured(candidate, *work.measured(candidate, model, corpus), taken)

    return _for_each(candidates, work.opened, measure_one)


def _for_each(
    candidates: Sequence[Candidate], opened: Open, measure_one: Callable[[Candidate, OpenModel], Result]
) -> list[Result]:
    """Apply `measure_one` to every candidate; neighbours share a model, which is freed before the next one opens."""

    def on_model(model: OpenModel, group: Iterable[Candidate]) -> list[Result]:
        return [measure_one(candidate, model) for candidate in group]

    by_source = groupby(candidates, key=lambda candidate: candidate.source)
    return [result for source, group in by_source for result in on_model(opened(source), group)]


@dataclass(frozen=True)
class HeadOnPrompt:
    """One head of every candidate on one prompt: the prompt's text and tokens, name → trace."""

    layer: int
    head: int
    prompt: str
    tokens: list[str]
    traces: dict[str, PromptTrace]


def trace_head(
    candidates: Sequence[Candidate], opened: Open, prompt: str | None, heads: Sequence[tuple[int, int]]
) -> HeadOnPrompt:
    """Trace one head of each candidate on a prompt; None: one like the paper's.

    It is the first of `heads` (layer, head) that has a sink on the prompt in the first candidate, or the first.
    """
    chosen = heads[0]
    text, tokens = "", list[str]()

    def trace_one(candidate: Candidate, model: OpenModel) -> PromptTrace:
        nonlocal chosen, text
        ids = prompt_or_shipped(model, prompt, PROMPT)
        with candidate.edit(model):
            if not tokens:
                tokens[:] = token_texts(model, ids)
                text = "".join(tokens) if model.tokenizer is None else str(model.tokenizer.decode(ids))
                chosen = _first_with_a_sink(model, ids, heads)
            return trace_prompt(model, ids, *chosen)

    names = [candidate.name for candidate in candidates]
    traces = dict(zip(names, _for_each(candidates, opened, trace_one), strict=True))
    return HeadOnPrompt(*chosen, text, tokens, traces)


def _first_with_a_sink(model: OpenModel, ids: Tensor, heads: Sequence[tuple[int, int]]) -> tuple[int, int]:
    if len(heads) == 1:
        return heads[0]
    sinks = trace_sinks(model, ids, stretches=True).traces
    with_a_sink = set(zip(sinks["layer"].tolist(), sinks["head"].tolist(), strict=True))
    return next((head for head in heads if head in with_a_sink), heads[0])
