"""`theodolite compare`: survey and trace models on one text, or load their run folders, and compare them.

Models are opened one after another, so that no two are in memory at once. A model under an intervention is a candidate
of its own: without the low-rank term of a layer (Zhang et al. 2025, Fig. 4), and the control.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Protocol, TypeVar

from theodolite.comparison.audit import SHAPE, Audit, check_lengths, compare, most_lost, same_shape_and_tokens
from theodolite.comparison.page import LOW_RANK_CLAIM, Compared, HeadOnPrompt, outcome
from theodolite.comparison.parts import SINK, kept_places
from theodolite.comparison.survival import HALF
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.estimates import Estimate
from theodolite.judging import HOLDS, Criterion, judge, mix_of
from theodolite.models import OpenModel
from theodolite.models.prompts import Focus, prompt_or_shipped
from theodolite.models.token_texts import token_texts
from theodolite.passes.run import Run
from theodolite.prune.checkpoint import Pruned
from theodolite.report.outcome import Outcome
from theodolite.sinks.interventions import without_low_rank
from theodolite.sinks.prompt import PromptTrace, trace_prompt
from theodolite.sinks.trace import trace_sinks
from theodolite.system.checkpoint_folders import SETTINGS
from theodolite.system.run_folders import is_run
from theodolite.system.wording import listed, number, percent

PROMPT = "inference"  # the shipped prompt of the kind that Fig. 5 shows
CONTROL_SEED = 0
FEWEST_SINKS = 8  # of a layer (head × context pairs): below it nothing is tested
GONE = Criterion("less than", HALF, "ours")  # what is left without the low-rank term
STAY = Criterion("at least", HALF, "ours")  # and without a random part as large

Result = TypeVar("Result")
Intervention = Callable[[OpenModel], AbstractContextManager[Mapping[str, float] | None]]


@dataclass(frozen=True)
class Candidate:
    """A model, or a model under an intervention."""

    name: str
    folder: str  # of its run
    source: str  # path or hub name
    intervention: Intervention = lambda model: nullcontext()
    against: int = 0  # place of the candidate that it is compared with


@dataclass(frozen=True)
class Measured:
    """A candidate with its survey, trace and outputs, and what its intervention took out (‖W‖_F² of q, k, v)."""

    candidate: Candidate
    run: Run
    trace: Run
    outputs: Run
    taken: Mapping[str, float] | None


class Work(Protocol):
    """Opens a candidate, reads the text with its tokenizer, and measures it there."""

    def opened(self, source: str) -> OpenModel:
        """Open the checkpoint."""

    def read(self, model: OpenModel) -> Corpus:
        """Read the text as the model's own tokens."""

    def measured(self, candidate: Candidate, model: OpenModel, corpus: Corpus) -> tuple[Run, Run, Run]:
        """Make a candidate's survey, its trace and the outputs of its heads with its loss; reuse finished runs."""


def compare_folders(folders: Sequence[str]) -> Compared:
    """Compare surveys with the first of them.

    Tags too, where each has a trace FOLDER-sinks; head outputs and the loss, where each has FOLDER-outputs.

    Raises:
        UsageError: two runs that cannot be compared, and why.
    """
    runs = [Run.load(folder) for folder in folders]
    companions = []
    for ending in ("-sinks", "-outputs"):
        paths = [Path(f"{Path(folder)}{ending}") for folder in folders]
        companions.append([Run.load(path) for path in paths] if all(map(is_run, paths)) else [])
    traces, written = companions
    first, *others = (candidate.name for candidate in candidates_of(folders))
    audits = []
    for place, other in enumerate(others, 1):
        traced = (traces[0], traces[place]) if traces else ()
        outputs_of = (written[0], written[place]) if written else None
        audits.append(compare(runs[0], runs[place], *traced, outputs_of=outputs_of, names=(first, other)))
    return Compared(audits, outcome(audits), runs[0])


def compare_models(
    sources: Sequence[str], work: Work, focus: Focus, layer: int | None = None, rank: int | None = None
) -> Compared:
    """Survey and trace models, compare them with the first, and trace one head of each on a prompt.

    Args:
        focus: prompt (None: one that the package carries) and head (None: of those with a sink on the prompt the one
            that lost most of its sinks, in `layer` if that is given).
        layer: also the second one without the low-rank term of this block, and without a random part as large; both
            are compared with the second one.
        rank: of the term where the checkpoint has none.

    Raises:
        UsageError: models that cannot be compared, and why.
    """
    if rank is not None and layer is None:
        raise UsageError("--rank is of the term that --without-low-rank LAYER takes out: give both")
    candidates = candidates_of(sources)
    if layer is not None:
        candidates[2:2] = without_term(1, candidates[1], layer, rank)
    _check(candidates, work, focus, layer)

    def measure(candidate: Candidate, model: OpenModel) -> Measured:
        corpus = work.read(model)
        with candidate.intervention(model) as taken:
            return Measured(candidate, *work.measured(candidate, model, corpus), taken)

    measured = _for_each(candidates, work.opened, measure)
    audits = []
    for other in measured[1:]:
        first = measured[other.candidate.against]
        names = (first.candidate.name, other.candidate.name)
        runs = (first.run, other.run, first.trace, other.trace)
        audits.append(compare(*runs, outputs_of=(first.outputs, other.outputs), names=names))
    page = Outcome()
    if layer is not None:
        _judge_term(page, layer, measured[1], measured[2:4], audits[1:3])
    heads, of_first = most_lost(audits, layer), measured[0].run.provenance
    if focus.layer is not None and focus.head is not None:
        heads = [(focus.layer, focus.head)]
    same_heads = [each.candidate for each in measured if same_shape_and_tokens(of_first, each.run.provenance)]
    traced = None
    of_images = "grid" in of_first["corpus"]  # whose model reads no prompt
    if heads and len(same_heads) > 1 and not of_images:
        traced = trace_head(same_heads, work.opened, focus.prompt, heads)
    return Compared(audits, outcome(audits, traced, page), measured[0].run)


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
    factors = None
    if (Path(candidate.source) / SETTINGS).is_file():
        pruned = Pruned.load(candidate.source)
        factors = pruned.factors(layer) if pruned.low_rank else None
    if rank is not None and factors is not None:
        raise UsageError(f"{candidate.name} has a low-rank term of its own: leave out --rank")
    if rank is None and factors is None:
        raise UsageError(
            f"{candidate.name} was not pruned to sparse + low-rank: give the --rank of the leading part of W_Q, W_K "
            "and W_V that is to be taken out"
        )
    intervention = functools.partial(without_low_rank, layer=layer, rank=rank, factors=factors)
    term = "its low-rank term" if rank is None else f"rank {rank}"
    return [
        Candidate(
            f"{candidate.name}, layer {layer} without {what}",
            f"{candidate.folder}-without-{folder}-{layer}",
            candidate.source,
            functools.partial(intervention, control=seed),
            place,
        )
        for what, folder, seed in ((term, "low-rank", None), ("a random part", "random", CONTROL_SEED))
    ]


def _check(candidates: Sequence[Candidate], work: Work, focus: Focus, layer: int | None) -> None:
    """Open each candidate, and raise `UsageError` for what cannot be done, before anything that takes long."""
    shapes: list[object] = []
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
        with candidate.intervention(model):
            pass

    _for_each(candidates, work.opened, check_one)
    check_lengths(lengths)
    if shapes[0] not in shapes[1:] and focus != Focus():
        raise UsageError(
            "models that differ in shape or tokenizer have no head in common to show on a prompt: leave out --prompt, "
            "--layer and --head"
        )


def _for_each(
    candidates: Sequence[Candidate],
    opened: Callable[[str], OpenModel],
    use: Callable[[Candidate, OpenModel], Result],
) -> list[Result]:
    """Apply `use` to every candidate; neighbours share a model, which is freed before the next one opens."""

    def on_model(model: OpenModel, group: Sequence[Candidate]) -> list[Result]:
        return [use(candidate, model) for candidate in group]

    by_source = groupby(candidates, key=lambda candidate: candidate.source)
    return [result for source, group in by_source for result in on_model(opened(source), list(group))]


def _judge_term(
    page: Outcome, layer: int, whole: Measured, ablated: Sequence[Measured], audits: Sequence[Audit]
) -> None:
    """Judge whether ablating a layer's low-rank term removes its sinks, and ablating a random part as large does not.

    By the share of them that are at the same place of the same context, paired by context. Its table has the sinks of
    the layer with the term, without it, and without the random part.
    """
    tables = []
    for audit, name in zip(audits, ("without_term", "without_random_part"), strict=True):
        columns = {"before": "with_term", "after": name, "se": f"{name}_se"}
        sinks = audit.part("sinks").table.query("layer == @layer")
        tables.append(sinks[[*SINK, "token", *columns]].rename(columns=columns))
    table = tables[0].merge(tables[1], "outer", [*SINK, "token", "with_term"])
    table = table.fillna({"with_term": 0.0, "without_term": 0.0, "without_random_part": 0.0})
    table = table.sort_values(["with_term", *SINK], ascending=[False] + [True] * 4, ignore_index=True)
    page.tables["sinks_of_the_layer"] = table
    before, contexts = float(table["with_term"].sum()), whole.run.provenance["corpus"]["contexts"]
    if before * contexts < FEWEST_SINKS:
        page.cannot_test(LOW_RANK_CLAIM, f"layer {layer} has too few sinks in this text, with the term")
        return
    left = [kept_places(whole.outputs, each.outputs, layer) or Estimate(math.nan) for each in ablated]
    judged, control = (
        judge(LOW_RANK_CLAIM, f"left at their place without {what}", share, limit)
        for what, share, limit in zip(("it", "the random part"), left, (GONE, STAY), strict=True)
    )
    taken = [f"{percent(share)} of ‖W_{name.upper()}‖²" for name, share in (ablated[0].taken or {}).items()]
    evidence = (
        f"layer {layer} has {number(before)} sinks per context with the term; ablating it leaves "
        f"{percent(left[0].value)} of them at their place ({listed(taken)}), ablating a random part with the same "
        f"singular values {percent(left[1].value)}; {judged.evidence}; {control.evidence}"
    )
    verdict = judged
    if judged.answer == HOLDS:  # what stays without the term needs no control
        verdict = mix_of(LOW_RANK_CLAIM, [judged, control])
        if control.answer != HOLDS:
            evidence += "; ablating a random part of the same size may remove them, too"
    page.verdicts.append(replace(verdict, evidence=evidence))


def trace_head(
    candidates: Sequence[Candidate],
    opened: Callable[[str], OpenModel],
    prompt: str | None,
    heads: Sequence[tuple[int, int]],
) -> HeadOnPrompt:
    """Trace one head of each candidate on a prompt; None: one like the paper's.

    It is the first of `heads` (layer, head) that has a sink on the prompt in the first candidate, or the first.
    """
    chosen, text, tokens = heads[0], "", list[str]()

    def trace_one(candidate: Candidate, model: OpenModel) -> PromptTrace:
        nonlocal chosen, text
        ids = prompt_or_shipped(model, prompt, PROMPT)
        with candidate.intervention(model):
            if not tokens:
                tokens[:] = token_texts(model, ids)
                text = "".join(tokens) if model.tokenizer is None else str(model.tokenizer.decode(ids))
                if len(heads) > 1:
                    sinks = trace_sinks(model, ids, local_sinks=True).traces
                    with_a_sink = set(zip(sinks["layer"].tolist(), sinks["head"].tolist(), strict=True))
                    chosen = next((head for head in heads if head in with_a_sink), chosen)
            return trace_prompt(model, ids, *chosen)

    traces = _for_each(candidates, opened, trace_one)
    names = [candidate.name for candidate in candidates]
    return HeadOnPrompt(*chosen, text, tokens, dict(zip(names, traces, strict=True)))
