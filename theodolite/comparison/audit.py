"""`compare`: how much of one run's mechanism survives in another run on the same text, in tables and sentences.

It reads runs and sees no model, so it works for any two models of one shape and one tokenizer: pruned, retrained,
quantised, or under an intervention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import pandas as pd
import torch

import theodolite.comparison.parts as parts_of
from theodolite.comparison.outputs import Loss, loss
from theodolite.comparison.survival import LOST, NEW, SIDES, SURVIVED, UNDECIDED, Change, Survival
from theodolite.corpus.groups import GROUPS
from theodolite.errors import UsageError
from theodolite.estimates import Estimate
from theodolite.judging import Answer, Criterion, Verdict, combined, judge
from theodolite.models import OpenModel
from theodolite.passes.run import Run
from theodolite.report.data import provenance
from theodolite.system.run_folders import OUTPUTS, TRACE, is_run
from theodolite.system.wording import head_name, listed, names_of, percent

SIMILAR_MEANS = {"localization": ("heads", "propagation"), "context": ("layers", "similarity_within")}
SIMILAR = Criterion("within", 0.1, "ours")  # of the change of a share of all keys, or of a cosine
# What two models have in common whose heads are the same ones: of `OpenModel` and provenance → name in messages.
SHAPE = {"layers": "layers", "heads": "heads per layer", "width": "dimensions of the residual stream"}
COMPARED = "only models of one shape and one tokenizer can be compared"


@dataclass(frozen=True, repr=False)
class Audit:
    """A comparison of a reference with another run, part by part; `reference` and `other` are their names.

    Attributes:
        parts: sinks, tags (where both traces were given), outlier dimensions, massive activations, positional basis,
            head outputs (where they were given), entropies, head types, spectra.
        runs: provenance of the two surveys.
        loss: of next tokens, where outputs were given of models that predict them.
        numbers: of the whole model, with the verdict on their change: the loss, localization, and context.
    """

    reference: str
    other: str
    parts: tuple[Survival, ...]
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    loss: Loss | None = None
    numbers: dict[str, tuple[Change, Verdict]] = field(default_factory=dict)

    @property
    def answer(self) -> Answer:
        """Holds if every compared part survives, fails if none does, in part if they differ; else not decided."""
        return combined(part.answer for part in self.parts)

    @property
    def summary(self) -> str:
        """The verdict in a few sentences: what survived, the heads hit hardest, the loss; each part has its own."""
        groups: dict[Answer, list[str]] = {answer: [] for answer in get_args(Answer)}
        for part in self.parts:
            how_many = f" ({part.count(SURVIVED)} of {part.of_reference})"
            if part.paired is not None:
                how_many = f" ({percent(part.paired.value)} at the same places)"
            groups[part.answer].append(part.name + (how_many if part.answer != "not testable here" else ""))
        answers = "; ".join(f"{answer}: {listed(names, 9)}" for answer, names in groups.items() if names)
        clauses = [f"{answers[0].upper()}{answers[1:]}."]
        if hardest := _hit_hardest(self.parts):
            clauses.append(f"Hit hardest: {'; '.join(hardest)}.")
        if self.loss is not None:
            clauses.append(f"{self.loss}.")
        if all(part.name != parts_of.OUTPUTS for part in self.parts):
            clauses.append("Head outputs were not compared.")
        return " ".join(clauses)

    @property
    def further(self) -> list[Verdict]:
        """Verdicts beside what survives: on head outputs, the loss, localization, and context."""
        more = [verdict for part in self.parts for verdict in part.further]
        more += [verdict for _, verdict in self.numbers.values()]
        return [replace(verdict, claim=f"{self.other}, {verdict.claim}") for verdict in more]

    def __repr__(self) -> str:
        return f"Audit of {self.other} against {self.reference}: {self.summary}"

    def __str__(self) -> str:
        return "\n".join([self.summary, *(f"{part.name}: {part.sentence}" for part in self.parts)])

    def part(self, name: str) -> Survival:
        """Return the part of this name; `UsageError` where there is none."""
        parts = {part.name: part for part in self.parts}
        if name not in parts:
            raise UsageError(f"no part {name!r}: there are {listed(list(parts), 9)}")
        return parts[name]

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """`overview`, `parts` (the counts of each part), `loss`, and each part's own table, with underscores."""
        counts = [
            {"part": part.name, "answer": part.answer}
            | {status: part.count(status) for status in (SURVIVED, LOST, NEW)}
            | {UNDECIDED: part.undecided, "by_chance": part.by_chance, "left": part.family.value}
            for part in self.parts
        ]
        loss = {} if self.loss is None else {"loss": pd.DataFrame([vars(self.loss)])}
        of_parts = {part.name.replace(" ", "_"): part.table for part in self.parts}
        return {"overview": self.overview, "parts": pd.DataFrame(counts)} | loss | of_parts

    @property
    def overview(self) -> pd.DataFrame:
        """The numbers, and every part in one number (`measure`), `before` and `after`, and the `verdict` on it.

        `change` is that of the number, with its standard error where that is known; `survived` counts the units, and
        `left` is their share.
        """
        rows = [
            (name, *of.told, verdict.answer, "", math.nan) for name, (of, verdict) in self.numbers.items()
        ]
        for part in self.parts:
            survived = f"{part.count(SURVIVED)} of {part.of_reference}"
            rows.append((part.name, *part.moved.told, part.answer, survived, part.family.value))
        columns = ("part", "measure", *SIDES, "change", "verdict", "survived", "left")
        return pd.DataFrame(rows, columns=columns)


def _hit_hardest(parts: Sequence[Survival]) -> list[str]:
    """Find the heads that lost something in the most parts, with these parts; none where more than three tie.

    In two at least, or their output: such a head is cut off.
    """
    lost: dict[tuple[int, int], list[str]] = {}
    for part in parts:
        if "head" in part.table:
            heads = part.table.loc[part.table["status"] == LOST, parts_of.HEAD].drop_duplicates()
            for head in heads.itertuples(index=False, name=None):
                lost.setdefault(head, []).append(part.name)
    hit = {head: names for head, names in sorted(lost.items()) if len(names) > 1 or parts_of.OUTPUTS in names}
    most = max(map(len, hit.values()), default=0)
    hardest = [
        f"{head_name(*head)} ({listed(names, 9)})" for head, names in hit.items() if len(names) == most
    ]
    return hardest if len(hardest) <= 3 else []


def compare(
    reference: Run,
    other: Run,
    reference_trace: Run | None = None,
    other_trace: Run | None = None,
    *,
    outputs_of: tuple[Run, Run] | None = None,
    names: tuple[str, str] | None = None,
) -> Audit:
    """Compare two models: which sinks, tags, outliers, positions, head outputs, entropies, roles and spectra survive.

    A difference has the jackknife's standard error over the eight groups of contexts, the same ones in both runs: what
    both owe to the text is in neither. `docs/comparison.md` has the criteria.

    Args:
        reference, other: from `survey` or `Run.load`, of the same tokens and of models of one shape.
        reference_trace, other_trace: from `trace_sinks` on that text, both or neither; without, tags are left out.
        outputs_of: both models, from `comparison.read_outputs` on that text; without, nothing is known of what heads
            write, nor of the loss.
        names: what to call the two; None: by their model's path or name.

    Raises:
        UsageError: two runs that cannot be compared, and why.
    """
    runs = (reference, other)
    traces = [trace for trace in (reference_trace, other_trace) if trace is not None]
    if not_runs := [type(run).__name__ for run in (*runs, *traces) if not isinstance(run, Run)]:
        raise UsageError(f"runs are compared, from survey(…) or Run.load(FOLDER); this is {not_runs[0]}")
    if len(traces) == 1:
        raise UsageError("tags are compared between two traces: give both or neither")
    names = names or (_name_of(reference), _name_of(other))
    written = outputs_of or ()
    _check(names, runs, traces, written)
    parts = [
        parts_of.sinks(*runs, outputs_of),
        *([parts_of.tags(*traces)] if traces else []),
        parts_of.outlier_dimensions(*runs),
        parts_of.massive_activations(*runs),
        parts_of.positions(*runs),
        *([parts_of.head_outputs(*written)] if written else []),
        parts_of.entropies(*runs),
        parts_of.head_types(*runs),
        parts_of.spectra(*runs),
    ]
    numbers, of_loss = _means(*runs), loss(*written) if written else None
    if of_loss is not None:
        change = Change("next-token loss in nats", of_loss.before, of_loss.after, of_loss.se)
        numbers = {"loss": (change, of_loss.verdict())} | numbers
    provenances = {name: run.provenance for name, run in zip(names, runs, strict=True)}
    return Audit(*names, tuple(parts), provenances, of_loss, numbers)


def compare_folders(folders: Sequence[str]) -> list[Audit]:
    """Compare surveys with the first of them.

    Tags too, where each has a trace FOLDER-sinks; head outputs and the loss, where each has FOLDER-outputs.
    """
    loaded = []
    for ending in ("", "-sinks", "-outputs"):
        paths = [f"{Path(folder)}{ending}" for folder in folders]
        loaded.append([Run.load(path) for path in paths] if all(map(is_run, paths)) else [])
    runs, traces, written = loaded
    first, *others = names_of(folders)
    audits = []
    for place, other in enumerate(others, 1):
        traced = (traces[0], traces[place]) if traces else ()
        outputs_of = (written[0], written[place]) if written else None
        audits.append(compare(runs[0], runs[place], *traced, outputs_of=outputs_of, names=(first, other)))
    return audits


def _means(*runs: Run) -> dict[str, tuple[Change, Verdict]]:
    """Compare the mean share of keys that propagate and the mean within-label cosine; judge whether each is similar."""
    means = {}
    for name, (table, measure) in SIMILAR_MEANS.items():
        before, after = (parts_of.number_of(run, table, measure) for run in runs)
        known = before.value.isfinite() & after.value.isfinite()
        if known.any():
            change = Change.of(parts_of.mean_of(table, measure), torch.nanmean, before[known], after[known])
            estimate = Estimate(change.after - change.before, change.error, GROUPS, "groups of contexts")
            estimate = estimate if estimate.value else Estimate.exact(0.0)
            verdict = judge(f"{name} is similar", f"change of the {change.name}", estimate, SIMILAR)
            means[name] = change, verdict
    return means


def _name_of(run: Run) -> str:
    """Name the model of a run, and the interventions that it was under."""
    interventions = provenance(run, "fingerprint", "interventions") or []
    return " under ".join([str(run.provenance["model"]["id"]), *map(str, interventions)])


def _check(
    names: tuple[str, str], surveys: Sequence[Run], traces: Sequence[Run], written: Sequence[Run]
) -> None:
    """Raise `UsageError` for runs that cannot be compared, and say why."""
    for name, run in zip(names, surveys, strict=True):
        if run.kind in (TRACE, OUTPUTS) or not run.provenance.get("corpus"):
            raise UsageError(
                f"{name}: this is no survey of a text; give that, with its trace as FOLDER-sinks and the outputs of "
                "its heads as FOLDER-outputs"
            )
    first, second = (
        {**run.provenance["model"], "tokens": run.provenance["corpus"]["sha256"]} for run in surveys
    )
    if first.get("chosen_layers") != second.get("chosen_layers"):
        raise UsageError(
            f"{names[1]} and {names[0]} were not surveyed with the same --layers: survey both alike"
        )
    refuse_unlike(names, first, second)
    for kind, companions, noun in ((TRACE, traces, "trace of sinks"), (OUTPUTS, written, "outputs of heads")):
        for name, survey, run in zip(names, surveys, companions, strict=False):
            if run.kind != kind or _read(run) != _read(survey):
                raise UsageError(
                    f"{name}: its {noun} must be of the model and text of the survey: make it again"
                )


def shape_of(model: OpenModel) -> dict[str, object]:
    """Describe a model by what `SHAPE` names."""
    return {name: getattr(model, name) for name in SHAPE}


def refuse_unlike(names: tuple[str, str], first: Mapping[str, object], second: Mapping[str, object]) -> None:
    """Raise `UsageError` where two models differ in their `shape_of`, or in the hash of their `tokens`."""
    for name, noun in SHAPE.items():
        if first[name] != second[name]:
            raise UsageError(f"{names[1]} has {second[name]} {noun}, {names[0]} {first[name]}: {COMPARED}")
    if first.get("tokens") != second.get("tokens"):
        raise UsageError(
            f"{names[1]} and {names[0]} did not read the same tokens: {COMPARED}, surveyed with the same --corpus, "
            "--length and --contexts"
        )


def _read(run: Run) -> tuple[object, ...]:
    """Identify the model that a run is of, the interventions that it was under, and the text."""
    model, corpus = (run.provenance[of]["sha256"] for of in ("model", "corpus"))
    return model, provenance(run, "fingerprint", "interventions"), corpus
