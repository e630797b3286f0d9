"""Every experiment by name: what its paper's `experiments.toml` declares, the look-up, and `reproduce`.

No experiment is imported before it is asked for.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from theodolite.errors import UsageError
from theodolite.system.wording import nearest, reading_order

if TYPE_CHECKING:
    from theodolite import Corpus, OpenModel, Run
    from theodolite.models.texts import Focus
    from theodolite.report.outcome import Outcome
    from theodolite_papers.experiment import Experiment

PAPERS = {"geometry": "hidden_geometry", "localization": "localization", "sinks": "catch_tag_release"}
"""Group of experiments → the folder of its paper."""

CLAIMS = "Every claim that the other experiments judge, on one page"


@dataclass(frozen=True)
class Declaration:
    """What `experiments.toml` declares of an experiment; nothing is imported for it.

    needs: `layers.COLUMN`, `arrays.NAME`, `labels`, `model`; `prompt`: one, and no text; `nothing`: no model and no
    text; `theodolite train …`: a folder that it wrote. options: `other`, `prompt`, `layer`, `head`. scaled_down: what
    is smaller than in the paper, whatever the model. figures: key → caption: title, shows, look_for, source, wide.
    claims: key → claim, what, criterion, more; or claim and parts, by name, with what and criterion. criteria: of the
    paper, name → side, limit, source, negligible. elsewhere: published figures that are this one of another model or
    text. module: where the function is; empty: of the collected claims.
    """

    name: str
    module: str
    title: str
    paper: str
    needs: Sequence[str] = ()
    options: Sequence[str] = ()
    scaled_down: str = ""
    figures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    claims: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    criteria: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Alias:
    """A published figure that is another one drawn for another model or text."""

    name: str
    of: str
    published_on: str


@cache
def declarations() -> dict[str, Declaration]:
    """Read all declarations by name: of each paper the tables, the figures, the rest, the claims."""
    declared: dict[str, Declaration] = {}
    for group, folder in PAPERS.items():
        text = (files("theodolite_papers") / folder / "experiments.toml").read_text(encoding="utf-8")
        modules = tomllib.loads(text)
        paper, shared, criteria = modules.pop("paper"), modules.pop("claims", {}), modules.pop("criteria", {})
        entries = {name: entry for of_module in modules.values() for name, entry in of_module.items()}
        for module, of_module in modules.items():
            for name, entry in of_module.items():
                place = f"theodolite_papers.{folder}.{module}"
                whole = _like(entries, {"elsewhere": {}, **entry})
                claims = whole.get("claims", {}).items()
                whole["claims"] = {key: _like(shared, claim) for key, claim in claims}
                declared[f"{group}/{name}"] = Declaration(
                    f"{group}/{name}", place, criteria=criteria, **whole
                )
        options = sorted({option for entry in entries.values() for option in entry.get("options", [])})
        name = f"{group}/claims"
        declared[name] = Declaration(name, "", CLAIMS, paper, options=options, criteria=criteria)
    order = sorted(
        declared, key=lambda it: (it.partition("/")[0], not declared[it].module, *reading_order(it))
    )
    return {name: declared[name] for name in order}


def _like(others: Mapping[str, Mapping[str, Any]], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Fill the keys that an entry lacks from the entry that its `like` names."""
    own = dict(entry)
    return {**others.get(own.pop("like", ""), {}), **own}


@cache
def aliases() -> dict[str, Alias]:
    """Read the published figures that are another experiment's, by name."""
    return {
        f"{one.name.partition('/')[0]}/{name}": Alias(f"{one.name.partition('/')[0]}/{name}", one.name, text)
        for one in declarations().values()
        for name, text in one.elsewhere.items()
    }


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
