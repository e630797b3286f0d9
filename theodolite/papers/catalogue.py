"""All experiments by name, the published figures that are one of them on another model or text, and the look-up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.models import OpenModel
from theodolite.models.prompts import Focus
from theodolite.papers.catch_tag_release import (
    averaging_construction,
    averaging_models,
    few_shot,
    few_shot_ablation,
    outliers,
    prompt_sinks,
    pruned_sinks,
    tag_ablation,
    traced_sinks,
)
from theodolite.papers.claims import claims
from theodolite.papers.experiment import Experiment, Study, of_model, of_nothing
from theodolite.papers.hidden_geometry import (
    attribution,
    context_basis,
    depth,
    heads,
    positional_basis,
    positional_logits,
    positions_while_learned,
    prompt_logits,
    separation,
    smoothness,
    tables,
    theorems,
    weights,
)
from theodolite.papers.localization import (
    entropy_bound,
    fixed_spectrum,
    gradient_lens,
    head_behaviour,
    locater_figures,
    propagation_theory,
    simulated_walks,
    text_as_walk,
)
from theodolite.passes.run import Run
from theodolite.report.outcome import Outcome
from theodolite.system.experiment_names import PUBLISHED_ELSEWHERE, named, reading_order


@dataclass(frozen=True)
class Alias:
    """A published figure that is another one drawn for another model or text."""

    name: str
    of: str
    published_on: str


def _declared(modules: Iterable[ModuleType]) -> list[Experiment]:
    """The experiments of some modules, tables and figures in the order of their numbers."""
    found: list[Experiment] = []
    for module in modules:
        for value in vars(module).values():
            found += [
                each
                for each in (value if isinstance(value, list) else [value])
                if isinstance(each, Experiment)
            ]
    return sorted(set(found), key=lambda each: reading_order(each.name))


def _experiments() -> Iterator[Experiment]:
    for name, paper, modules in (
        (
            "geometry",
            "Positional bases are low-rank, smooth and significant, contexts cluster, the two are incoherent "
            "(section 2)",
            (
                tables,
                positional_basis,
                context_basis,
                separation,
                smoothness,
                depth,
                weights,
                heads,
                theorems,
                positions_while_learned,
                prompt_logits,
                positional_logits,
                attribution,
            ),
        ),
        (
            "localization",
            "A small eigenspectrum variance leads attention to be localized, and can prevent both rank and entropy "
            "collapses (abstract)",
            (
                propagation_theory,
                entropy_bound,
                simulated_walks,
                fixed_spectrum,
                locater_figures,
                head_behaviour,
                gradient_lens,
                text_as_walk,
            ),
        ),
        (
            "sinks",
            "Attention sinks catch tokens, tag them by outlier features, and release them; low-rank weights make "
            "this possible, and simple tasks need it (abstract)",
            (
                prompt_sinks,
                few_shot,
                few_shot_ablation,
                pruned_sinks,
                averaging_construction,
                averaging_models,
                traced_sinks,
                tag_ablation,
                outliers,
            ),
        ),
    ):
        declared = _declared(modules)
        yield from declared
        yield claims(name, paper, declared)


EXPERIMENTS = {experiment.name: experiment for experiment in _experiments()}
"""All by name, tables and figures in the order of their numbers; the claims of a group after it."""

ALIASES = {name: Alias(name, *rest) for name, rest in PUBLISHED_ELSEWHERE.items()}


def find(name: str) -> list[Experiment]:
    """The experiments of a name (one, or several joined by commas), or of a group such as `geometry`.

    A published figure that is another one on another model or text is that experiment, under its own name. `fig5`
    is `figure5`, in every group.

    Raises:
        UsageError: no such name; the error suggests the nearest ones.
    """
    return [_named(each) for each in named(name)]


def _named(name: str) -> Experiment:
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    alias = ALIASES[name]
    original = EXPERIMENTS[alias.of]
    return replace(original, name=name, title=f"{original.title} (published for {alias.published_on})")


def need_no_model(experiments: list[Experiment]) -> bool:
    """Whether no model need be opened and no text read for any of them."""
    return all("nothing" in experiment.needs for experiment in experiments)


def on_prompts(experiments: list[Experiment]) -> bool:
    """Whether a model and a prompt are all that each of them reads: no text, and no survey of one."""
    return all("prompt" in experiment.needs for experiment in experiments)


def made_by(experiments: list[Experiment]) -> str | None:
    """The command whose folder all of these are read from; None where they need a model or nothing."""
    commands = {
        need for experiment in experiments for need in experiment.needs if need.startswith("theodolite ")
    }
    return commands.pop() if len(commands) == 1 and all(map(_from_folder, experiments)) else None


def _from_folder(experiment: Experiment) -> bool:
    return any(need.startswith("theodolite ") for need in experiment.needs)


def check_options(experiments: list[Experiment], given: list[str]) -> None:
    """Refuse an option that none of the experiments takes, rather than ignore it.

    Raises:
        UsageError: such an option; the error names the experiments that take it.
    """
    known = {option for experiment in experiments for option in experiment.options}
    for option in given:
        if option not in known:
            takers = [name for name, experiment in EXPERIMENTS.items() if option in experiment.options]
            raise UsageError(
                f"--{option} is not for {', '.join(experiment.name for experiment in experiments)}: "
                f"only {', '.join(takers)} take it"
            )


def reproduce(
    name: str,
    run: Run | None = None,
    model: OpenModel | None = None,
    corpus: Corpus | None = None,
    other: Corpus | None = None,
    focus: Focus | None = None,
) -> Outcome:
    """Make one published table or figure again from a run.

    Args:
        name: such as `geometry/table1`; `theodolite.papers.EXPERIMENTS` has them all.
        run: from `survey` or `Run.load`; None for experiments that read none, or a prompt alone.
        model: the model of the run; only some experiments need it.
        corpus: the text of the run; only some experiments need it.
        other: a second text for those that compare two; None: random tokens.
        focus: the prompt and the head for those that have one; None: random tokens, and heads found by the survey.

    Raises:
        UsageError: no such experiment, or the run, the model or the text lacks what it needs.
    """
    chosen = find(name)
    if len(chosen) != 1:
        raise UsageError(f"{name} is a group of {len(chosen)} experiments: name one")
    read: Run | dict[str, Any] | None = run
    if read is None and model is not None and on_prompts(chosen):
        read = of_model(model)
    elif read is None:
        if not need_no_model(chosen):
            raise UsageError(f"{name} needs a run: survey a model, or load a run folder")
        read = of_nothing()
    return Study(read, model, corpus, other, focus=focus).outcome(chosen[0])
