"""Every experiment by name, the published figures that are one of them elsewhere, the look-up, and `reproduce`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from theodolite.errors import UsageError
from theodolite.system.wording import reading_order

if TYPE_CHECKING:
    from theodolite import Corpus, OpenModel, Run
    from theodolite.models.prompts import Focus
    from theodolite.report.outcome import Outcome
    from theodolite_papers.experiment import Experiment

_PAPERS = {
    "geometry": "Positional bases are low-rank, smooth and significant, contexts cluster, the two are incoherent "
    "(section 2)",
    "localization": "A small eigenspectrum variance leads attention to be localized, and can prevent both rank and "
    "entropy collapses (abstract)",
    "sinks": "Attention sinks catch tokens, tag them by outlier features, and release them; low-rank weights make "
    "this possible, and simple tasks need it (abstract)",
}
"""Group → what the paper claims, in a sentence."""

_MODULES = """
geometry  hidden_geometry.tables                  table1 table2 table3
geometry  hidden_geometry.positional_basis        table4 table5 table6 figure1 figure3 figure24
geometry  hidden_geometry.separation              figure2 clusters incoherence
geometry  hidden_geometry.smoothness              figure5 figure7 figure8
geometry  hidden_geometry.weights                 figure4 figure25
geometry  hidden_geometry.theorems                theorem1 theorem2
geometry  hidden_geometry.positions_while_learned addition training
geometry  hidden_geometry.prompt_logits           figure6 figure19 figure30
geometry  hidden_geometry.attribution             attribution constituents
localization  localization.propagation_theory     figure1 figure2 figure3 figure4
localization  localization.simulated_walks        figure5
localization  localization.fixed_spectrum         collapse width
localization  localization.locater_figures        figure6 figure7 figure8 figure9 figure10 figure11 figure12
localization  localization.head_behaviour         behaviour
localization  localization.gradient_lens          gradient
localization  localization.text_as_walk           walk
sinks  catch_tag_release.prompt_sinks             figure2 figure7 figure8 figure9 figure10 figure11
sinks  catch_tag_release.few_shot                 figure3
sinks  catch_tag_release.few_shot_ablation        examples
sinks  catch_tag_release.pruned_sinks             figure4 figure5
sinks  catch_tag_release.averaging_construction   figure6
sinks  catch_tag_release.averaging_models         averaging
sinks  catch_tag_release.tag_ablation             trace ablation
sinks  catch_tag_release.outliers                 outliers
"""

_ELSEWHERE = """
geometry/figure1  9   GPT-2 on GitHub
geometry/figure1  10  GPT-2 on WikiText
geometry/figure1  11  BLOOM on OpenWebText
geometry/figure1  12  BERT on OpenWebText
geometry/figure1  13  Llama 2 on OpenWebText
geometry/figure1  14  Llama 2 on GitHub
geometry/figure2  15  BLOOM on OpenWebText
geometry/figure2  16  Llama 2 on OpenWebText
geometry/figure2  17  Llama 2 on GitHub
geometry/figure4  26  GPT-2, layer 6
geometry/figure4  27  GPT-2, layer 10
geometry/figure4  28  BERT, layer 6
geometry/figure4  29  BERT, layer 10
geometry/figure5  18  addition with absolute positions, Gram matrices
geometry/figure5  20  addition with absolute positions, frequencies
geometry/figure5  21  addition with rotary positions, Gram matrices
geometry/figure5  23  addition with rotary positions, frequencies
geometry/figure6  32  BLOOM, layer 10, head 1
geometry/figure6  33  BLOOM, layer 7, head 6
geometry/figure6  34  GPT-2, layer 4, head 11
geometry/figure19 22  addition with rotary positions
geometry/figure30 31  the half without the global mean
"""


@dataclass(frozen=True)
class Alias:
    """A published figure that is another one drawn for another model or text."""

    name: str
    of: str
    published_on: str


class _Catalogue(Mapping[str, "Experiment"]):
    """The experiments by name, each imported when it is asked for: tables, figures, the rest, the claims of a group."""

    def __init__(self) -> None:
        modules: dict[str, str] = {}
        for row in _MODULES.strip().splitlines():
            group, module, *names = row.split()
            modules |= {f"{group}/{name}": f"theodolite_papers.{module}" for name in names}
        modules |= {f"{group}/claims": "" for group in _PAPERS}
        order = sorted(modules, key=lambda it: (it.partition("/")[0], not modules[it], *reading_order(it)))
        self._modules = {name: modules[name] for name in order}
        self._read: dict[str, Experiment] = {}

    def __getitem__(self, name: str) -> Experiment:
        module = self._modules[name]
        if name not in self._read and module:
            self._read |= _declared(module)
        elif name not in self._read:
            from theodolite_papers.experiment import claims

            group = name.partition("/")[0]
            others = [self[each] for each in self if each.startswith(f"{group}/") and each != name]
            self._read[name] = claims(group, _PAPERS[group], others)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def __contains__(self, name: object) -> bool:
        return name in self._modules


def _declared(module: str) -> dict[str, Experiment]:
    """The experiments of a module by name."""
    from theodolite_papers.experiment import Experiment

    values = vars(import_module(module)).values()
    each = [one for value in values for one in (value if isinstance(value, list) else [value])]
    return {one.name: one for one in each if isinstance(one, Experiment)}


EXPERIMENTS: Mapping[str, Experiment] = _Catalogue()

_ROWS = [row.split(maxsplit=2) for row in _ELSEWHERE.strip().splitlines()]
_ALIASES = [Alias(f"{of.partition('/')[0]}/figure{number}", of, text) for of, number, text in _ROWS]
ALIASES = {alias.name: alias for alias in _ALIASES}


def find(name: str) -> list[Experiment]:
    """The experiments that are meant by a name (`names_of`)."""
    return [_named(each) for each in names_of(name)]


def _named(name: str) -> Experiment:
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    alias = ALIASES[name]
    original = EXPERIMENTS[alias.of]
    return replace(original, name=name, title=f"{original.title} (published for {alias.published_on})")


def names_of(name: str) -> list[str]:
    """The names that are meant by one (`fig5` is `figure5`), by several with commas, or by a group."""
    meant: list[str] = []
    for pattern in filter(None, (part.strip().rstrip("/") for part in name.split(","))):
        pattern = re.sub(r"(^|/)fig(\d+)$", r"\1figure\2", pattern)
        if pattern in EXPERIMENTS or pattern in ALIASES:
            chosen = [pattern]
        else:
            chosen = [each for each in EXPERIMENTS if each.startswith(f"{pattern}/")]
        if not chosen:
            raise UsageError(f"there is no experiment {pattern!r}: {_nearest(pattern)}")
        meant += chosen
    if not meant:
        raise UsageError(f"{name!r} names no experiment: `theodolite reproduce` lists them all")
    return list(dict.fromkeys(meant))


def _nearest(pattern: str) -> str:
    names = [*EXPERIMENTS, *ALIASES]
    # A name without its group is compared with names without theirs.
    short = {key.rsplit("/", 1)[-1]: key for key in names}
    near = (
        sorted({key.split("/")[0] for key in names if key.startswith(pattern)})
        or difflib.get_close_matches(pattern, names, 3, 0.75)
        or [short[key] for key in difflib.get_close_matches(pattern.rsplit("/", 1)[-1], short, 3, 0.6)]
    )
    return f"did you mean {', '.join(near)}?" if near else "`theodolite reproduce` lists them all"


def need_no_model(experiments: list[Experiment]) -> bool:
    """Whether no model need be opened and no text read for any of them."""
    return all("nothing" in experiment.needs for experiment in experiments)


def on_prompts(experiments: list[Experiment]) -> bool:
    """Whether a model and a prompt are all that each of them reads: no text, and no survey of one."""
    return all("prompt" in experiment.needs for experiment in experiments)


def made_by(experiments: list[Experiment]) -> str | None:
    """The command whose folder all of these are read from; None where they need a model or nothing."""
    commands = [{need for need in each.needs if need.startswith("theodolite ")} for each in experiments]
    found = set().union(*commands)
    return found.pop() if len(found) == 1 and all(commands) else None


def check_options(experiments: list[Experiment], given: list[str]) -> None:
    """Refuse an option that none of the experiments takes, rather than ignore it."""
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
    if read is None and model is not None and on_prompts(chosen):
        read = of_model(model)
    elif read is None:
        if not need_no_model(chosen):
            raise UsageError(f"{name} needs a run: survey a model, or load a run folder")
        read = of_nothing()
    return Study(read, model, corpus, other, focus=focus).outcome(chosen[0])
