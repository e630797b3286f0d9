"""`compare`: how much of one run's mechanism survives in another run on the same text, in tables and sentences.

It reads runs and sees no model, so it works for any two models of one shape: pruned, retrained, quantised, or under
an intervention. Of models that differ in shape or tokenizer it matches the heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import pandas as pd

import theodolite.comparison.outputs as outputs
import theodolite.comparison.parts as parts_of
from theodolite.comparison.outputs import Loss
from theodolite.comparison.parts import MATCHED
from theodolite.comparison.parts import OUTPUTS as HEAD_OUTPUTS
from theodolite.comparison.survival import LOST, NEW, SURVIVED, UNDECIDED, Change, Survival
from theodolite.corpus.groups import GROUPS
from theodolite.errors import UsageError
from theodolite.estimates import Estimate
from theodolite.judging import Answer, Criterion, Verdict, combined, judge
from theodolite.passes.run import Run
from theodolite.report.data import provenance
from theodolite.system.run_folders import OUTPUTS, TRACE
from theodolite.system.wording import head_name, listed, nearest, percent, with_error

MOST_HARDEST = 3  # if more heads tie for hit hardest, none is named
OF_HEADS = ("sinks", "tags", HEAD_OUTPUTS, "entropies", "head types", "spectra")
ORDER = ("loss", "sinks", "tags", "entropies", "localization", "head types", HEAD_OUTPUTS, "spectra")
"""Parts in the order of the table of all parts; then the others."""

SIMILAR_MEANS = {"localization": ("heads", "propagation"), "context": ("layers", "similarity_within")}
SIMILAR = Criterion("within", 0.1, "ours")  # of the change of a share of all keys, or of a cosine
SHAPE = {
    "layers": "layers",
    "heads": "heads per layer",
    "width": "dimensions of the residual stream",
    "vocabulary": "tokens in the vocabulary",
}
"""What two models have in common whose heads are the same ones: of `OpenModel` and provenance → name in messages."""


@dataclass(frozen=True, repr=False)
class Audit:
    """A comparison of a reference with another run, part by part; `reference` and `other` are their names.

    Attributes:
        parts: sinks, tags (where both traces were given), outlier dimensions, massive activations, positional basis,
            head outputs (where they were given), entropies, head types, spectra. Of models that differ in shape or
            tokenizer: matched heads alone.
        runs: provenance of the two surveys.
        loss: of next tokens, where outputs were given of models that predict them.
        means: means of all heads or layers, with the verdict on their change, by what they are of.
    """

    reference: str
    other: str
    parts: tuple[Survival, ...]
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    loss: Loss | None = None
    means: dict[str, tuple[Change, Verdict]] = field(default_factory=dict)

    @property
    def answer(self) -> Answer:
        """Holds if every compared part survives, fails if none does, else in part.

        Not decided where all parts that are decided agree, and one is not.
        """
        return combined(part.answer for part in self.parts)

    @property
    def summary(self) -> str:
        """The verdict in a few sentences: what survived, the heads hit hardest, the loss; each part has its own."""
        first = self.parts[0]
        if first.name == MATCHED:
            return f"{first.counts()}. The models differ in shape or tokenizer: only their heads are matched."
        groups: dict[Answer, list[str]] = {answer: [] for answer in get_args(Answer)}
        for part in self.parts:
            how_many = f" ({part.count(SURVIVED)} of {part.of_reference})"
            if part.paired is not None:
                how_many = f" ({percent(part.paired.value)} at the same places)"
            groups[part.answer].append(part.name + (how_many if part.answer != "not testable here" else ""))
        answers = "; ".join(f"{answer}: {listed(names, 9)}" for answer, names in groups.items() if names)
        clauses = [f"{answers[0].upper()}{answers[1:]}."]
        same_loss = self.loss is None or self.loss.unchanged
        if same_loss and all(part.exact for part in self.parts if len(part.table)):
            clauses = ["Everything survives exactly: no number differs."]
        if hardest := _hit_hardest(self.parts):
            clauses.append(f"Hit hardest: {'; '.join(hardest)}.")
        if self.loss is not None:
            clauses.append(f"{self.loss}.")
        if all(part.name != HEAD_OUTPUTS for part in self.parts):
            clauses.append("Head outputs were not compared.")
        return " ".join(clauses)

    @property
    def further(self) -> list[Verdict]:
        """Verdicts beside what survives: on head outputs, localization, context, and the loss."""
        more = [verdict for part in self.parts for verdict in part.further]
        more += [verdict for _, verdict in self.means.values()]
        named = [replace(verdict, claim=f"{self.other}, {verdict.claim}") for verdict in more]
        return named + ([self.loss.verdict(f"{self.other} predicts the text as well")] if self.loss else [])

    def __repr__(self) -> str:
        return f"Audit of {self.other} against {self.reference}: {self.summary}"

    def __str__(self) -> str:
        return "\n".join([self.summary, *(f"{part.name}: {part.sentence}" for part in self.parts)])

    def part(self, name: str) -> Survival:
        """Return the part of this name.

        Raises:
            UsageError: there is none.
        """
        parts = {part.name: part for part in self.parts}
        if name not in parts:
            raise UsageError(
                f"no part {name!r}: {nearest(name, parts, f'there are {listed(list(parts), 9)}')}"
            )
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
        """Every part in one number (`measure`), `before` and `after`, and the `verdict` on it; the loss first.

        `change` is that of the number, with its standard error where that is known; `survived` counts the units, and
        `left` is their share.
        """
        rows = {
            part.name: (
                *_cells(part.moved),
                part.answer,
                f"{part.count(SURVIVED)} of {part.of_reference}",
                part.family.value,
            )
            for part in self.parts
        }
        for name, (change, verdict) in self.means.items():
            rows[name] = (*_cells(change), verdict.answer, "", math.nan)
        if self.loss is not None:
            of_loss = Change("next-token loss in nats", self.loss.before, self.loss.after, self.loss.se)
            rows["loss"] = (*_cells(of_loss), self.loss.verdict("").answer, "", math.nan)
        names = dict.fromkeys([*(name for name in ORDER if name in rows), *rows])
        columns = ["part", "measure", "before", "after", "change", "verdict", "survived", "left"]
        return pd.DataFrame([(name, *rows[name]) for name in names], columns=columns)


def _cells(moved: Change) -> tuple[str, float, float, str]:
    """Return a number's cells in the overview: its name, before, after, and the change with its error."""
    change = moved.after - moved.before
    shown = with_error(change, moved.error) if math.isfinite(change) else ""
    return moved.name, moved.before, moved.after, shown


def _hit_hardest(parts: Sequence[Survival]) -> list[str]:
    """Find the heads that lost something in the most parts (two at least), with these parts; none where many tie.

    One that lost its output counts also if nothing else of it is lost: it is cut off.
    """
    lost: dict[tuple[int, int], dict[str, None]] = {}
    for part in parts:
        if part.name in OF_HEADS:
            for head in part.table.loc[part.table["status"] == LOST, parts_of.HEAD].itertuples(
                index=False, name=None
            ):
                lost.setdefault(head, {})[part.name] = None
    hit = {
        head: list(names) for head, names in sorted(lost.items()) if len(names) > 1 or HEAD_OUTPUTS in names
    }
    most = max(map(len, hit.values()), default=0)
    hardest = [
        f"{head_name(*head)} ({listed(names, 9)})" for head, names in hit.items() if len(names) == most
    ]
    return hardest if len(hardest) <= MOST_HARDEST else []


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

    Of models that differ in shape or tokenizer, heads are matched by what they do (`parts.matched_heads`), and
    compared; nothing else is.

    A difference has the jackknife's standard error over the eight groups of contexts, the same ones in both runs: what
    both owe to the text is in neither. Matched heads have the errors of both runs, √(a² + b²). `docs/comparison.md` has
    the criteria.

    Args:
        reference, other: from `survey` or `Run.load`, of the same text.
        reference_trace, other_trace: from `trace_sinks` on that text, both or neither; without, tags are left out.
        outputs_of: both models, from `comparison.read_outputs` on that text; without, nothing is known of what heads
            write, nor of the loss.
        names: what to call the two; None: by their model's path or name.

    Raises:
        UsageError: two runs that cannot be compared, and why.
    """
    runs = (reference, other)
    traces = [trace for trace in (reference_trace, other_trace) if trace is not None]
    if not_runs := [run for run in (*runs, *traces) if not isinstance(run, Run)]:
        what = type(not_runs[0]).__name__
        raise UsageError(f"runs are compared, from survey(…) or Run.load(FOLDER); this is {what}")
    if names is not None and len(names) != 2:
        raise UsageError(f"two models are compared, and names has {len(names)}: give two")
    if len(traces) == 1:
        raise UsageError("tags are compared between two traces: give both or neither")
    names = names or (_name_of(reference), _name_of(other))
    written = outputs_of or ()
    _check(names, runs, traces, written)
    of_names = dict(zip(names, (run.provenance for run in runs), strict=True))
    if not same_shape_and_tokens(reference.provenance, other.provenance):
        return Audit(*names, (parts_of.matched_heads(*runs),), of_names)
    parts = (
        parts_of.sinks(*runs, outputs_of),
        *([parts_of.tags(*traces)] if traces else []),
        parts_of.outlier_dimensions(*runs),
        parts_of.massive_activations(*runs),
        parts_of.positions(*runs),
        *([parts_of.head_outputs(*written)] if written else []),
        parts_of.entropies(*runs),
        parts_of.head_types(*runs),
        parts_of.spectra(*runs),
    )
    if _model_and_interventions(reference) == _model_and_interventions(other):
        parts = tuple(part.of_one_model() for part in parts)
    return Audit(*names, parts, of_names, outputs.loss(*written) if written else None, _means(*runs))


def _means(reference: Run, other: Run) -> dict[str, tuple[Change, Verdict]]:
    """Compare the mean share of keys that propagate and the mean within-label cosine; judge whether each is similar."""
    means = {}
    for name, (table, measure) in SIMILAR_MEANS.items():
        if change := parts_of.mean_change(reference, other, table, measure):
            estimate = Estimate(change.after - change.before, change.error, GROUPS, "groups of contexts")
            estimate = estimate if estimate.value else Estimate.exact(0.0)
            means[name] = (
                change,
                judge(f"{name} is similar", f"change of the {change.name}", estimate, SIMILAR),
            )
    return means


def _name_of(run: Run) -> str:
    """Name the model of a run, and the interventions that it was under."""
    interventions = provenance(run, "fingerprint", "interventions") or []
    return " under ".join([str(run.provenance["model"]["id"]), *map(str, interventions)])


def _check(
    names: tuple[str, str], surveys: Sequence[Run], traces: Sequence[Run], written: Sequence[Run]
) -> None:
    """Raise `UsageError` for runs that cannot be compared, and say why."""
    first, second = (survey.provenance for survey in surveys)
    pair = f"{names[1]} and {names[0]}"
    no_survey = {
        TRACE: "this is a trace of sinks; give the survey, with the trace as FOLDER-sinks",
        OUTPUTS: "these are outputs of heads; give the survey, with the outputs as FOLDER-outputs",
    }
    for name, run in zip(names, surveys, strict=True):
        if run.kind in no_survey:
            raise UsageError(f"{name}: {no_survey[run.kind]}")
        if not run.provenance.get("corpus"):
            raise UsageError(f"{name}: these are spectra of weights only; give a survey of a text")
    if first["model"].get("chosen_layers") != second["model"].get("chosen_layers"):
        raise UsageError(f"{pair} were not surveyed with the same --layers: survey both alike")
    if _shape(first) == _shape(second) and not same_shape_and_tokens(first, second):
        raise UsageError(
            f"{pair} did not read the same tokens: survey both with the same --corpus, --length and --contexts "
            "(where only their tokenizers differ, comparison.matched_heads compares them in Python)"
        )
    if first["corpus"]["name"] != second["corpus"]["name"]:
        raise UsageError(f"{pair} did not read the same text: survey both with one --corpus")
    check_lengths({name: each["corpus"]["length"] for name, each in zip(names, (first, second), strict=True)})
    no_trace = "this is not a trace of sinks; `theodolite trace` makes one"
    no_outputs = "these are not outputs of heads; `comparison.read_outputs` makes them"
    for kind, companions, refusal, noun, verb in (
        (TRACE, traces, no_trace, "trace", "is"),
        (OUTPUTS, written, no_outputs, "outputs", "are"),
    ):
        for name, survey, run in zip(names, surveys, companions, strict=False):
            if run.kind != kind:
                raise UsageError(f"{name}: {refusal}")
            same_model = _model_and_interventions(survey) == _model_and_interventions(run)
            if not same_model or survey.provenance["corpus"]["sha256"] != run.provenance["corpus"]["sha256"]:
                another = f"{verb} of another {'text' if same_model else 'model'} than the survey"
                raise UsageError(f"{name}: its {noun} {another}: make the {noun} again")


def check_lengths(lengths: Mapping[str, int]) -> None:
    """Raise `UsageError` unless the contexts of all models, by name, have one length, on which heads depend."""
    if len(set(lengths.values())) > 1:
        each = listed([f"{name} {length}" for name, length in lengths.items()], 4)
        raise UsageError(
            f"models are compared on contexts of one length, and these differ (tokens per context: {each}): give all "
            f"the same --length, {min(lengths.values())} or less"
        )


def _model_and_interventions(run: Run) -> tuple[object, object]:
    return run.provenance["model"]["sha256"], provenance(run, "fingerprint", "interventions")


def same_shape_and_tokens(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Tell whether two models, by provenance, have one shape and read the same tokens: else heads are matched."""
    return _shape(first) == _shape(second) and first["corpus"]["sha256"] == second["corpus"]["sha256"]


def _shape(provenance: Mapping[str, Any]) -> list[object]:
    return [provenance["model"].get(key) for key in SHAPE]


def most_lost(audits: Sequence[Audit], layer: int | None = None) -> list[tuple[int, int]]:
    """Order the heads (layer, head) of one block or all: most lost sinks first, then by strength of tag, by sinks."""
    heads: dict[tuple[int, int], None] = {}
    orders = (("sinks", "before", True), ("tags", "tagged_before", False), ("sinks", "before", False))
    for name, by, only_lost in orders:
        parts = [part for audit in audits for part in audit.parts if part.name == name]
        tables = [part.table for part in parts if len(part.table)]
        if not tables:
            continue
        rows = pd.concat(tables)
        rows = rows[(rows["status"] == LOST) | (not only_lost)]
        sums = rows[(rows["layer"] == layer) | (layer is None)].groupby(["layer", "head"])[by].sum()
        sums = sums[sums > 0].sort_values(ascending=False, kind="stable")
        heads |= {(int(block), int(head)): None for block, head in sums.index}
    return list(heads)
