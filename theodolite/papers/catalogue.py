"""All experiments by name, the published figures that are one of them on another model or text, and the look-up."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.judging import reading_order
from theodolite.models import OpenModel
from theodolite.models.prompts import Focus
from theodolite.papers.catch_tag_release.averaging_models import AVERAGING
from theodolite.papers.catch_tag_release.few_shot import FIGURE_3
from theodolite.papers.catch_tag_release.no_op_option import NO_OP
from theodolite.papers.catch_tag_release.outliers import OUTLIERS
from theodolite.papers.catch_tag_release.prompt_sinks import PROMPT_SINKS
from theodolite.papers.catch_tag_release.pruned_sinks import COMPRESSION
from theodolite.papers.catch_tag_release.pruning_sweep import SWEEPS
from theodolite.papers.catch_tag_release.tag_ablation import ABLATION
from theodolite.papers.catch_tag_release.traced_sinks import TRACING
from theodolite.papers.claims import claims
from theodolite.papers.experiment import Experiment, Study, model_run, theory_run
from theodolite.papers.hidden_geometry.attribution import ATTRIBUTION
from theodolite.papers.hidden_geometry.context_basis import CONTEXTS
from theodolite.papers.hidden_geometry.depth import DEPTH
from theodolite.papers.hidden_geometry.heads import HEADS
from theodolite.papers.hidden_geometry.positional_basis import POSITIONAL
from theodolite.papers.hidden_geometry.positional_logits import POSITIONAL_LOGITS
from theodolite.papers.hidden_geometry.positions_while_learned import TRAINING
from theodolite.papers.hidden_geometry.prompt_logits import QK
from theodolite.papers.hidden_geometry.separation import SEPARATION
from theodolite.papers.hidden_geometry.smoothness import SMOOTHNESS
from theodolite.papers.hidden_geometry.tables import TABLES
from theodolite.papers.hidden_geometry.theorems import THEOREMS
from theodolite.papers.hidden_geometry.weights import WEIGHTS
from theodolite.papers.localization.head_behaviour import BEHAVIOUR
from theodolite.papers.localization.limits import LOCALIZATION_LIMITS
from theodolite.papers.localization.locater_figures import REGULARISED
from theodolite.papers.localization.monitor_warnings import MONITORED
from theodolite.papers.localization.propagation_theory import LOCALIZATION_THEORY
from theodolite.papers.localization.simulated_walks import LOCALIZATION_WALKS
from theodolite.papers.localization.text_as_walk import TEXT_WALK
from theodolite.passes.run import Run
from theodolite.report.outcome import Outcome


@dataclass(frozen=True)
class Alias:
    """A published figure that is another one drawn for another model or text."""

    name: str
    of: str
    published_on: str


_MEASURED = sorted(
    [
        *TABLES,
        *POSITIONAL,
        *CONTEXTS,
        *SMOOTHNESS,
        *DEPTH,
        *WEIGHTS,
        *HEADS,
        *THEOREMS,
        *TRAINING,
        *SEPARATION,
        *QK,
        *POSITIONAL_LOGITS,
        *ATTRIBUTION,
    ],
    key=lambda experiment: reading_order(experiment.name),
)

_LOCALIZATION_ALONE = [*LOCALIZATION_THEORY, *LOCALIZATION_LIMITS, *LOCALIZATION_WALKS, *MONITORED]

_ALONE = [*_LOCALIZATION_ALONE, *AVERAGING]
"""These need no model and no text: theory, and training runs of their own."""

_SINKS = [
    *AVERAGING,
    *PROMPT_SINKS,
    *TRACING,
    *ABLATION,
    *OUTLIERS,
    *NO_OP,
    *FIGURE_3,
    *COMPRESSION,
    *SWEEPS,
]

_LOCALIZATION = [*_LOCALIZATION_ALONE, *REGULARISED, *BEHAVIOUR, *TEXT_WALK]

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in [
        *_MEASURED,
        claims(
            "geometry",
            "Positional bases are low-rank, smooth and significant, contexts cluster, the two are incoherent "
            "(section 2)",
            _MEASURED,
        ),
        *sorted(_LOCALIZATION, key=lambda experiment: reading_order(experiment.name)),
        claims(
            "localization",
            "A small eigenspectrum variance leads attention to be localized, and can prevent both rank and entropy "
            "collapses (abstract)",
            _LOCALIZATION,
        ),
        *sorted(_SINKS, key=lambda experiment: reading_order(experiment.name)),
        claims(
            "sinks",
            "Attention sinks catch tokens, tag them by outlier features, and release them; low-rank weights make "
            "this possible, and simple tasks need it (abstract)",
            _SINKS,
        ),
    ]
}
"""All by name, tables and figures in the order of their numbers; the claims of a group after it."""

_OF_FIGURE_1 = {
    9: "GPT-2 on GitHub",
    10: "GPT-2 on WikiText",
    11: "BLOOM on OpenWebText",
    12: "BERT on OpenWebText",
    13: "Llama 2 on OpenWebText",
    14: "Llama 2 on GitHub",
}
_OF_FIGURE_2 = {15: "BLOOM on OpenWebText", 16: "Llama 2 on OpenWebText", 17: "Llama 2 on GitHub"}
_OF_FIGURE_4 = {
    26: "GPT-2, layer 6",
    27: "GPT-2, layer 10",
    28: "BERT, layer 6",
    29: "BERT, layer 10",
}
_OF_FIGURE_5 = {
    18: "addition with absolute positions, Gram matrices",
    20: "addition with absolute positions, frequencies",
    21: "addition with rotary positions, Gram matrices",
    23: "addition with rotary positions, frequencies",
}
_OF_FIGURE_6 = {32: "BLOOM, layer 10, head 1", 33: "BLOOM, layer 7, head 6", 34: "GPT-2, layer 4, head 11"}
_OF_FIGURE_19 = {22: "addition with rotary positions"}
_OF_FIGURE_30 = {31: "the half without the global mean"}
_OF_SINKS_8 = {10: "another problem, L5H14 and L39H24"}
_OF_SINKS_9 = {11: "another problem, L3H30"}

ALIASES: dict[str, Alias] = {
    f"{group}/figure{number}": Alias(f"{group}/figure{number}", f"{group}/figure{of}", shown)
    for group, of, figures in (
        ("geometry", 1, _OF_FIGURE_1),
        ("geometry", 2, _OF_FIGURE_2),
        ("geometry", 4, _OF_FIGURE_4),
        ("geometry", 5, _OF_FIGURE_5),
        ("geometry", 6, _OF_FIGURE_6),
        ("geometry", 19, _OF_FIGURE_19),
        ("geometry", 30, _OF_FIGURE_30),
        ("sinks", 8, _OF_SINKS_8),
        ("sinks", 9, _OF_SINKS_9),
    )
    for number, shown in figures.items()
}


def find(name: str) -> list[Experiment]:
    """The experiments of a name (one, or several joined by commas), or of a group such as `geometry`.

    A published figure that is another one on another model or text is that experiment, under its own name. `fig5`
    is `figure5`, in every group.

    Raises:
        UsageError: no such name; the error suggests the nearest ones.
    """
    experiments: dict[str, Experiment] = {}
    for pattern in filter(None, (part.strip().rstrip("/") for part in name.split(","))):
        pattern = re.sub(r"(^|/)fig(\d+)$", r"\1figure\2", pattern)
        if pattern in EXPERIMENTS:
            chosen = [EXPERIMENTS[pattern]]
        elif pattern in ALIASES:
            alias = ALIASES[pattern]
            original = EXPERIMENTS[alias.of]
            chosen = [
                replace(
                    original, name=pattern, title=f"{original.title} (published for {alias.published_on})"
                )
            ]
        else:
            chosen = [experiment for key, experiment in EXPERIMENTS.items() if key.startswith(f"{pattern}/")]
        if not chosen:
            raise UsageError(f"there is no experiment {pattern!r}: {_nearest(pattern)}")
        experiments |= {experiment.name: experiment for experiment in chosen}
    if not experiments:
        raise UsageError(f"{name!r} names no experiment: `theodolite reproduce` lists them all")
    return list(experiments.values())


def need_no_model(experiments: list[Experiment]) -> bool:
    """Whether no model need be opened and no text read for any of them."""
    return all(experiment in _ALONE for experiment in experiments)


def on_prompts(experiments: list[Experiment]) -> bool:
    """Whether a model and a prompt are all that each of them reads: no text, and no survey of one."""
    return all("prompt" in experiment.needs for experiment in experiments)


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
    if run is None and model is not None and on_prompts(chosen):
        run = model_run(model)
    elif run is None:
        if not need_no_model(chosen):
            raise UsageError(f"{name} needs a run: survey a model, or load a run folder")
        run = theory_run()
    return Study(run, model, corpus, other, focus=focus or Focus()).outcome(chosen[0])
