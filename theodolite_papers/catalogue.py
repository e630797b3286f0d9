"""Every experiment by name: what its paper's `experiments.toml` declares, the look-up, and `reproduce`.

No experiment is imported before it is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from theodolite.errors import UsageError
from theodolite.system.wording import nearest
from theodolite_papers.declarations import aliases, declarations

if TYPE_CHECKING:
    from theodolite import Corpus, OpenModel, Run
    from theodolite.models.texts import Focus
    from theodolite.report.outcome import Outcome
    from theodolite_papers.experiment import Experiment


class _Catalogue(Mapping[str, "Experiment"]):
    """The experiments by name, each imported when it is asked for."""

    def __init__(self) -> None:
        self._read: dict[str, Experiment] = {}

    def __getitem__(self, name: str) -> Experiment:
        module = declarations()[name].module
        if name not in self._read:
            from theodolite_papers.experiment import Experiment, claims

            if module:
                values = vars(import_module(module)).values()
                each = [one for value in values for one in (value if isinstance(value, list) else [value])]
                self._read |= {one.name: one for one in each if isinstance(one, Experiment)}
            else:
                group = name.partition("/")[0]
                others = [self[each] for each in self if each.startswith(f"{group}/") and each != name]
                self._read[name] = claims(declarations()[name], others)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(declarations())

    def __len__(self) -> int:
        return len(declarations())

    def __contains__(self, name: object) -> bool:
        return name in declarations()


EXPERIMENTS: Mapping[str, Experiment] = _Catalogue()


def find(name: str) -> list[Experiment]:
    """Return the experiments that a name means (`names_of`)."""
    return [_named(each) for each in names_of(name)]


def _named(name: str) -> Experiment:
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    alias = aliases()[name]
    original = EXPERIMENTS[alias.of]
    return replace(original, name=name, title=f"{original.title} (published for {alias.published_on})")


def names_of(name: str) -> list[str]:
    """Resolve a name (`fig5` is `figure5`), several with commas, or a group to full names."""
    meant: list[str] = []
    for pattern in filter(None, (part.strip().rstrip("/") for part in name.split(","))):
        pattern = re.sub(r"(^|/)fig(\d+)$", r"\1figure\2", pattern)
        if pattern in EXPERIMENTS or pattern in aliases():
            chosen = [pattern]
        else:
            chosen = [each for each in EXPERIMENTS if each.startswith(f"{pattern}/")]
        if not chosen:
            near = nearest(pattern, [*EXPERIMENTS, *aliases()], "`theodolite reproduce` lists them all")
            raise UsageError(f"there is no experiment {pattern!r}: {near}")
        meant += chosen
    if not meant:
        raise UsageError(f"{name!r} names no experiment: `theodolite reproduce` lists them all")
    return list(dict.fromkeys(meant))


def all_need(experiments: Sequence[Experiment], need: str) -> bool:
    """Return whether every experiment needs `nothing`, or a `prompt` alone."""
    return all(need in experiment.declared.needs for experiment in experiments)


def made_by(experiments: Sequence[Experiment]) -> str | None:
    """Return the command whose folder all of these read; None where they need a model or nothing."""
    commands = [
        {need for need in each.declared.needs if need.startswith("theodolite ")} for each in experiments
    ]
    found = set().union(*commands)
    return found.pop() if len(found) == 1 and all(commands) else None


def check_options(experiments: Sequence[Experiment], given: Sequence[str]) -> None:
    """Refuse an option that none of the experiments takes, rather than ignore it."""
    known = {option for experiment in experiments for option in experiment.declared.options}
    for option in given:
        if option not in known:
            takers = [name for name, one in declarations().items() if option in one.options]
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
        name: such as `geometry/table1`; `theodolite_papers.EXPERIMENTS` has them all.
        run: from `survey` or `Run.load`; None for experiments that read none, or a prompt alone.
        model: the model of the run; only some experiments need it.
        corpus: the text of the run; only some experiments need it.
        other: a second text for those that compare two; None: random tokens.
        focus: the prompt and the head for those that have one; None: random tokens, and heads found by the survey.

    Raises:
        UsageError: no such experiment, or the run, the model or the text lacks what it needs.
    """
    from theodolite_papers.experiment import Study, of_model, of_nothing

    chosen = find(name)
    if len(chosen) != 1:
        raise UsageError(f"{name} is a group of {len(chosen)} experiments: name one")
    read: Run | dict[str, Any] | None = run
    if read is None and model is not None and all_need(chosen, "prompt"):
        read = of_model(model)
    elif read is None:
        if not all_need(chosen, "nothing"):
            raise UsageError(f"{name} needs a run: survey a model, or load a run folder")
        read = of_nothing()
    return Study(read, model, corpus, other, focus=focus).outcome(chosen[0])
