"""An experiment, and what it reads: the run, and on demand the model and its text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float64
from torch import Tensor

from theodolite import Corpus, OpenModel, Run
from theodolite.corpus.groups import halves
from theodolite.errors import UsageError
from theodolite.estimates import SIGMAS, Estimate, Estimates
from theodolite.judging import Answer, Criterion, Verdict, contexts_needed, independent, judge, untestable
from theodolite.models.texts import Focus
from theodolite.passes.run import SCHEMA_VERSION, describe_model, versions
from theodolite.report.data import array
from theodolite.report.exhibit import Choice
from theodolite.report.exhibit import by_layer as by_layer
from theodolite.report.exhibit import by_name as by_name
from theodolite.report.outcome import Heading
from theodolite.report.outcome import Outcome as PageOutcome
from theodolite.system.progress import ShowStage
from theodolite_papers.declarations import Declaration, declarations

Number = Estimate | Estimates | float


@dataclass
class Outcome(PageOutcome):
    """An experiment's outcome; captions, claims and criteria are those of its declaration in `experiments.toml`."""

    declared: Declaration = field(default_factory=lambda: Declaration("", "", "", ""))
    contexts: int = 0  # that the numbers are of
    judged: set[str] = field(default_factory=set)  # the names of claims that were given a verdict

    def draw(self, key: str, figure: go.Figure | Choice, caption: str = "", **values: object) -> None:
        """Show a figure; `values` fill the caption of that name (default: `key`)."""
        self.captioned(key, figure, self.declared.figures[caption or key], values)

    def sentence(self, key: str, entry: str = "claim", /, **values: Any) -> str:
        """Fill the sentence of the claim of that name, or of a part of it (`claim.part`), with `values`.

        entry: `what` instead of the claim, what its number is.
        """
        if entry == "claim":
            self.judged.add(key.partition(".")[0])
        return str(self._claim(key)[entry]).format(**values)

    def criterion(self, key: str, /, **values: Any) -> Criterion:
        """Return the criterion of a claim or part; `limit` is among the values where it depends on the numbers."""
        return _criterion(self.declared.criteria[self._claim(key)["criterion"]], **values)

    def verdict(self, key: str, number: Number | Sequence[bool], /, **values: Any) -> Verdict:
        """Judge a claim or its part, which is not yet shown.

        number: an estimate, or of each head whether it is so: their share (`share_of_heads`).
        """
        criterion = self.criterion(key, **values)
        estimate = share_of_heads(number, criterion) if isinstance(number, Sequence) else number
        claim, what = self.sentence(key, **values), self.sentence(key, "what", **values)
        verdict = judge(claim, what, estimate, criterion)
        evidence = verdict.evidence + self._claim(key).get("more", "").format(**values)
        if needed := contexts_needed(verdict, self.contexts):
            evidence += f"; {needed}"
        return replace(verdict, evidence=evidence)

    def judge(self, key: str, number: Number | Sequence[bool], /, **values: Any) -> Verdict:
        """Show the `verdict` on a claim."""
        self.verdicts.append(self.verdict(key, number, **values))
        return self.verdicts[-1]

    def cannot_judge(self, key: str, why: str, /, **values: Any) -> None:
        """Say why a claim is not testable here."""
        self.verdicts.append(untestable(self.sentence(key, **values), why))

    @property
    def unjudged(self) -> list[str]:
        """The claims that were declared and given no verdict."""
        return sorted(set(self.declared.claims) - self.judged)

    def _claim(self, key: str) -> Mapping[str, Any]:
        """Return the declaration of a claim; of a part, the claim's own where the part has nothing else."""
        name, _, part = key.partition(".")
        of = self.declared.claims[name]
        return {**of, **of[part]} if part else of


def _criterion(declared: Mapping[str, Any], **values: Any) -> Criterion:
    limit = declared["limit"] if "limit" in declared else values["limit"]
    source = declared["source"].format(**values)
    return Criterion(declared["side"], limit, source, declared.get("negligible", 0.0))


def criterion(name: str, **values: Any) -> Criterion:
    """Return the criterion of a group and name (`geometry/rank`), for numbers not judged by a claim alone.

    `limit` is among the values where the declaration has none.
    """
    group, _, own = name.partition("/")
    return _criterion(declarations()[f"{group}/claims"].criteria[own], **values)


def shown(items: Sequence[Item], what: str, show: ShowStage) -> Iterator[Item]:
    """Yield the items, and show how many of them are done."""
    for done, item in enumerate(items):
        show(what, done, len(items))
        yield item
    show(what, len(items), len(items))


def share_of_heads(are_so: Iterable[bool], criterion: Criterion) -> Estimate:
    """Estimate the share of a model's heads that meet a condition, with the error at the criterion's limit.

    √(p(1 − p)/H) at the limit p (the score test), and half a head added to the interval (Yates's correction).
    """
    values = np.array(list(are_so), dtype=bool)
    if not len(values):
        return Estimate(math.nan)
    error = math.sqrt(criterion.limit * (1 - criterion.limit) / len(values)) + 0.5 / len(values) / SIGMAS
    return Estimate(float(values.mean()), error, len(values), "heads", by_chance=True)


@dataclass(frozen=True)
class Experiment(Heading):
    """A published table or figure: what is declared of it, and `fill`, which fills an outcome."""

    declared: Declaration
    fill: Callable[[Study, Outcome], None]


Decorator = Callable[[Callable[["Study", Outcome], None]], Experiment]


def experiment(
    name: str,
    title: str,
    paper: str,
    needs: Sequence[str] = (),
    options: Sequence[str] = (),
    scaled_down: str = "",
) -> Decorator:
    """Declare the function below it an `Experiment`; the arguments are those of `Declaration`."""
    return _made_of(Declaration(name, "", title, paper, needs, options, scaled_down))


def declared(name: str) -> Decorator:
    """Make the function below it the experiment that its paper's `experiments.toml` has under this name."""
    return _made_of(declarations()[name])


def _made_of(of: Declaration) -> Decorator:
    return lambda fill: Experiment(of.name, of.title, of.paper, of, fill)


def claims(of: Declaration, experiments: list[Experiment]) -> Experiment:
    """Make the experiment that collects the verdicts of `experiments`."""

    @_made_of(of)
    def collected(study: Study, outcome: Outcome) -> None:
        rows: list[dict[str, str]] = []
        for each in experiments:
            try:
                judged = study.outcome(each)
                verdicts = judged.verdicts
                outcome.runs |= judged.runs
                outcome.collected[each.name] = study.provenance_of(each).get("asked") or {}
            except UsageError as error:
                verdicts = [untestable(each.title, str(error))]
            verdicts = [replace(verdict, experiment=each.name) for verdict in verdicts]
            outcome.verdicts += verdicts
            rows += [verdict.words for verdict in verdicts]
        for answer in get_args(Answer):
            count = sum(verdict.answer == answer for verdict in independent(outcome.verdicts))
            outcome.read(f"claims: {answer}", str(count))
        outcome.tables["claims"] = pd.DataFrame(rows)

    return collected


Item = TypeVar("Item")
Result = TypeVar("Result")


class Study:
    """A run, with the model and the texts that experiments read besides."""

    def __init__(
        self,
        run: Run | dict[str, Any],
        model: OpenModel | None = None,
        corpus: Corpus | None = None,
        other: Corpus | None = None,
        *,
        folder: Path | None = None,
        focus: Focus | None = None,
        show: ShowStage = lambda what, done, total: None,
    ) -> None:
        """Prepare a run for experiments.

        run: the survey, or the provenance of what is read instead. model, corpus: of the run, where at hand. other: a
        second text; None: random tokens. folder: of traces and pruned models; None: in memory. show: may raise to stop.
        """
        self._run = run if isinstance(run, Run) else None
        self.provenance: dict[str, Any] = run.provenance if isinstance(run, Run) else run
        self.model, self.corpus, self.other = model, corpus, other
        self.folder, self.show = folder, show
        self.focus = focus or Focus()
        self._outcomes: dict[str, Outcome] = {}
        self._shared: dict[str, Any] = {}
        if model is not None and model.weights().sha256 != self.provenance["model"]["sha256"]:
            raise UsageError(f"{model.id} is not the model of this run: pass the model that was surveyed")

    @property
    def run(self) -> Run:
        """The survey."""
        if self._run is None:
            raise UsageError("this experiment needs a run: survey a model, or load a run folder")
        return self._run

    def outcome(self, experiment: Experiment) -> Outcome:
        """Make the experiment's outcome, once."""
        if experiment.name not in self._outcomes:
            for need in experiment.declared.needs:
                self._require(need, experiment.name)
            contexts = (self.provenance.get("corpus") or {}).get("contexts", 0)
            outcome = Outcome(declared=experiment.declared, contexts=contexts)
            experiment.fill(self, outcome)
            self._outcomes[experiment.name] = outcome
        return self._outcomes[experiment.name]

    def provenance_of(self, experiment: Experiment) -> dict[str, Any]:
        """Return the provenance of an outcome, with the prompt, head or second text asked for, where it reads them."""
        asked = self.focus.given() | ({} if self.other is None else {"other": self.other.name})
        read = {name: value for name, value in asked.items() if name in experiment.declared.options}
        return self.provenance | ({"asked": read} if read else {})

    def cached(self, name: str, make: Callable[[], Result]) -> Result:
        """Return what several experiments share under this name; make it the first time."""
        if name not in self._shared:
            self._shared[name] = make()
        return self._shared[name]

    def require_model(self, name: str = "this experiment") -> OpenModel:
        """Return the model; `UsageError` without one."""
        if self.model is None:
            raise UsageError(f"{name} needs the model as well as the run: pass it too")
        return self.model

    def require_corpus(
        self, why: str = "this experiment reads the text of the run again: pass it as well"
    ) -> Corpus:
        """Return the text of the run; `UsageError` without it."""
        if self.corpus is None:
            raise UsageError(why)
        return self.corpus

    def _require(self, need: str, name: str) -> None:
        kind, _, what = need.partition(".")
        if kind in ("prompt", "nothing") or kind.startswith("theodolite "):
            return
        if kind == "model":
            self.require_model(name)
        elif kind == "labels":
            labels = array(self.run, "context_label")
            if labels is None or len(set(labels[labels >= 0].tolist())) < 2:
                raise UsageError(
                    f"{name} needs contexts with at least two labels: use a text with labels "
                    "(a folder of files, or rows with a column label or topic)"
                )
        else:
            # A column without a number is there: it is at the noise floor.
            there = array(self.run, what) is not None if kind == "arrays" else what in getattr(self.run, kind)
            if not there:
                raise UsageError(f"{name} needs {what!r}, which this run lacks: survey the model on a text")


def random_tokens_like(model: OpenModel, run: Run) -> Corpus:
    """Draw as many contexts of random tokens as a run has, as long, by its seed."""
    described = run.provenance["corpus"]
    size = described["length"], described["contexts"], run.provenance["seed"]
    return Corpus.random_tokens(model.required_vocabulary(), *size, below=model.vocabulary)


def chosen_and_judged(corpus: Corpus) -> tuple[Corpus, Corpus]:
    """Split a corpus in two: on one half heads, layers or settings are chosen, on the other they are judged."""
    if len(corpus.contexts) < 2:
        raise UsageError("heads are chosen on half of the contexts and judged on the other: give 2 or more")
    first, second = halves(len(corpus.contexts))
    return corpus.subset(first), corpus.subset(second)


def haar_rotation(
    width: int, generator: torch.Generator, device: torch.device | str = "cpu"
) -> Float64[Tensor, "width width"]:
    """Draw an orthogonal matrix uniformly (Haar): QR of a normal matrix with the diagonal of R positive.

    Drawn by a CPU generator, whatever the device of the result.
    """
    normal = torch.randn(width, width, generator=generator, dtype=torch.float64).to(device)
    q, r = torch.linalg.qr(normal)
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)


def of_model(model: OpenModel, seed: int = 0) -> dict[str, Any]:
    """Describe experiments that read a prompt alone, for their provenance."""
    return describe_model(model) | {"seed": seed, "reads": "a prompt"}


def of_nothing(seed: int = 0, **model: Any) -> dict[str, Any]:
    """Describe experiments that survey no model, for their provenance; `model`: what else they read."""
    described = {
        "id": "no model",
        "sha256": None,
        "architecture": "no model",
        "layers": 0,
        "heads": 0,
    } | model
    return {"schema_version": SCHEMA_VERSION, "versions": versions(), "model": described, "seed": seed}
