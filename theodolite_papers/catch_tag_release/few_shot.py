"""Few-shot accuracy on word tasks: dense, pruned, and with sinks or tags ablated (Zhang et al. 2025, 3.4, 3.5, Fig. 3).

Each ablation has controls, of which the one that costs most after sixteen examples is judged, paired by prompt. Tags
are those of later tokens' sinks, found on other prompts, and are taken from the tokens that such a sink catches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from theodolite import Corpus, OpenModel, Run, trace_sinks
from theodolite.attention.catches import attend_and_catch
from theodolite.attention.inputs import AttentionInputs
from theodolite.comparison.parts import tags as survival_of_tags
from theodolite.comparison.survival import NEW, SURVIVED, UNDECIDED
from theodolite.estimates import Estimate, Floats
from theodolite.evaluate.few_shot import FewShotPrompts, prompts_for
from theodolite.evaluate.scores import mean_and_error
from theodolite.judging import HOLDS, unless_explained
from theodolite.models.guard import measures
from theodolite.models.hooks import Hooks, hooked
from theodolite.report import style
from theodolite.report.drawing.grammar import line
from theodolite.sinks.interventions import ablate_direction, without_low_rank
from theodolite.system.wording import counted, for_plotly, number, percent
from theodolite_papers.catch_tag_release import ablated, pruned_sinks
from theodolite_papers.catch_tag_release.ablated import Ablation, Reading
from theodolite_papers.catch_tag_release.pruned_sinks import DENSE, METHODS, SPARSITY
from theodolite_papers.experiment import Outcome, Study, declared, shown

FIGURE_HEIGHT = 420
SHOWN = (0, 1, 2, 4, 8, 16)  # numbers of examples that are drawn and tabulated
SEED = 1
MODEL_PROMPTS = 40  # of each task, that all models answer
OATS, WITHOUT, RANDOM_TERMS = "OATS", "OATS without its low-rank terms", "OATS without random terms as large"
Answers = Bool[np.ndarray, "prompts shots"]


def accuracy_by_shots(answers: Mapping[str, Floats]) -> go.Figure:
    """Draw the accuracy of several models after k examples, with 95 % intervals over prompts."""
    places = np.arange(len(SHOWN), dtype=np.float64)  # as far apart as each other
    traces: list[Any] = []
    for index, (name, right) in enumerate(answers.items()):
        values, errors = np.array([mean_and_error(right[:, shots]) for shots in SHOWN]).T
        texts = [
            [shots, *map(percent, pair)] for shots, *pair in zip(SHOWN, values, 1.96 * errors, strict=True)
        ]
        hover = f"{for_plotly(name)}, %{{customdata[0]}} examples: %{{customdata[1]}} ± %{{customdata[2]}}"
        own: dict[str, Any] = {"error_y": style.error_bars(1.96 * errors), "marker": 6, "customdata": texts}
        shift = 0.04 * (index - (len(answers) - 1) / 2)
        colour = style.CATEGORIES[index % len(style.CATEGORIES)]
        traces += line(places + shift, values, name, colour, hover=f"{hover}<extra></extra>", **own)
    ticks = {"tickmode": "array", "tickvals": places.tolist(), "ticktext": [str(shots) for shots in SHOWN]}
    layout = {"xaxis": ticks | {"zeroline": False}, "yaxis": {"tickformat": ".0%", "zeroline": False}}
    return style.figure(traces, "examples in the prompt", "accuracy", height=FIGURE_HEIGHT, layout=layout)


def answer(model: OpenModel, prompts: FewShotPrompts, batch: int | None = None) -> Answers:
    """Mark which prompts the model answers correctly, after each number of examples."""
    return prompts.asked_of(model, batch).read_all()["right"].numpy()


def tabulated(answers: Mapping[str, Answers], prompts: FewShotPrompts) -> pd.DataFrame:
    """Tabulate `model task shots accuracy accuracy_se prompts`; the task "" is all of them."""
    tasks = np.array(prompts.tasks)
    rows = []
    for name, right in answers.items():
        for task in ("", *dict.fromkeys(prompts.tasks)):
            of_task = right[tasks == task] if task else right
            for shots in SHOWN:
                accuracy, error = mean_and_error(of_task[:, shots].astype(np.float64))
                rows.append((name, task, shots, accuracy, error, len(of_task)))
    return pd.DataFrame(rows, columns=["model", "task", "shots", "accuracy", "accuracy_se", "prompts"])


@declared("sinks/figure3")
def figure_3(study: Study, outcome: Outcome) -> None:
    dense = study.require_model()
    prompts, (_, measured) = prompts_for(dense, MODEL_PROMPTS, SEED), pruned_sinks.halves(study)
    untouched = pruned_sinks.measured_once(study, DENSE, dense)
    traced = trace_sinks(dense, measured, show_progress=study.show)
    answers = {DENSE: answer(dense, prompts)}
    for method, name in shown([*METHODS.items()], "answering after examples", study.show):
        model, pruned = pruned_sinks.pruned_model(study, method)
        answers[name] = answer(model, prompts)
        sinks = pruned_sinks.measured_once(study, name, model)
        kept, more = pruned_sinks.kept_sinks(untouched, sinks), pruned_sinks.loss_difference(untouched, sinks)
        tags = tags_kept(traced, trace_sinks(model, measured, show_progress=study.show))
        words = f"keeps {percent(kept.value)} of the dense model's sinks and {tags}"
        outcome.read(f"{name}, beside examples", f"{words}; {more.value:.2f} nats more")
        if name == OATS:
            for of, control in ((WITHOUT, None), (RANDOM_TERMS, 0)):
                taken_out = (
                    without_low_rank(model, layer, factors=pruned.factors(layer), control=control)
                    for layer in range(model.layers)
                )
                with ablated.all_open(taken_out):
                    answers[of] = answer(model, prompts)
    outcome.tables["accuracy"] = tabulated(answers, prompts)
    show_accuracy(outcome, answers, prompts.tasks)


def tags_kept(before: Run, after: Run) -> str:
    """Report the share of the tags of one trace that another has, weighted by what they catch and explain."""
    table = survival_of_tags(before, after).table
    weights = table["tagged_before"].where(table["status"] != NEW, 0.0)
    if not weights.any():
        return "none of their tags: it has none"
    kept, undecided = (weights[table["status"] == of].sum() / weights.sum() for of in (SURVIVED, UNDECIDED))
    return f"{percent(kept)} of their tags" + (
        f", of {percent(undecided)} it is not known" if undecided else ""
    )


def show_accuracy(outcome: Outcome, answers: Mapping[str, Answers], tasks: Sequence[str]) -> None:
    """Show verdicts, levels and a chart of the answers of every model."""
    right = {name: of.astype(np.float64) for name, of in answers.items()}
    outcome.judge("examples-help", over_tasks(right[DENSE][:, -1] - right[DENSE][:, 0], tasks))
    for name, of in right.items():
        outcome.read(name, by_k(of))
    for name in ("Wanda", "SparseGPT"):
        gap, of_pair = right[OATS] - right[name], {"method": name, "removed": f"{percent(SPARSITY)} removed"}
        if not right[DENSE][:, 0].any():
            outcome.cannot_judge("similar", "nothing is right without examples, in any model", **of_pair)
        else:
            outcome.judge("similar", over_tasks(gap[:, 0], tasks).floored(), **of_pair)
        outcome.judge("widens", over_tasks(gap[:, -1] - gap[:, 0], tasks), **of_pair)
    if right[RANDOM_TERMS].any():
        outcome.judge("low-rank", over_tasks((right[RANDOM_TERMS] - right[WITHOUT])[:, -1], tasks))
    else:
        outcome.cannot_judge("low-rank", "without random terms as large nothing is right, either")
    outcome.draw("accuracy", accuracy_by_shots(right), removed=f"{percent(SPARSITY)} removed")


def by_k(right: Floats) -> str:
    """Write the accuracy after each number of examples that is shown."""
    shares = ", ".join(percent(right[:, shots].mean()) for shots in SHOWN)
    return f"{shares} after {', '.join(map(str, SHOWN))} examples"


def over_tasks(values: Floats, tasks: Sequence[str]) -> Estimate:
    """Average over tasks the means of their prompts, which are a sample: the six tasks are all that there are."""
    by_task = [values[np.array(tasks) == task] for task in dict.fromkeys(tasks)]
    errors = [of.var(ddof=1) / len(of) for of in by_task]
    mean, error = np.mean([of.mean() for of in by_task]), np.sqrt(np.sum(errors)) / len(by_task)
    return Estimate(float(mean), float(error), len(values) - len(by_task) + 1, "prompts")


PROMPTS = 25  # of each task, answered under every ablation
TAG_PROMPTS, TAG_SEED = 10, 2  # of each task, on which tags are found
LEAST_CAUGHT = 20  # prompts in which a later token's sink catches something, for tags to be judged
HIDDEN = "sinks hidden"
EARLIEST, ATTENDED = "the earliest other keys hidden", "the most attended other keys hidden"
TAGS, RANDOM, OTHERS = "tags taken out", "as much of random directions", "a leading direction at other tokens"
PAIRS = {
    HIDDEN: ("Hiding the sinks", (EARLIEST, ATTENDED)),
    TAGS: ("Taking out the tags of later tokens' sinks", (RANDOM, OTHERS)),
}
"""Ablation → in words, and its controls, each of as many keys or tokens."""

NONE_LEFT = (
    "nothing is right without examples, below which nothing is lost: the loss must grow with the accuracy"
)


@dataclass(frozen=True)
class Tag:
    """The tag of a head's later sinks, and the leading direction of what the head writes."""

    layer: int
    head: int
    direction: Float[Tensor, " width"]
    leading: Float[Tensor, " width"]


def texts_of(prompts: FewShotPrompts) -> list[Tensor]:
    """Return each prompt without its padding."""
    return [ids[:end] for ids, end in zip(prompts.ids, prompts.answers[:, -1, 1].tolist(), strict=True)]


def later_tags(model: OpenModel, prompts: FewShotPrompts, show: Callable[[str, int, int], None]) -> list[Tag]:
    """Find the strongest tag of every head that has a later token's sink in some prompts."""
    mask = torch.arange(prompts.ids.shape[1]) < prompts.answers[:, -1, 1:]
    run = trace_sinks(model, Corpus.from_ids(prompts.ids, attention_mask=mask.long()), show_progress=show)
    rows = run.traces[(run.traces["kind"] == "later") & run.traces["tag"].notna()]
    strongest = rows.drop_duplicates(["layer", "head"])  # the strongest come first
    heads = run.heads.reset_index().set_index(["layer", "head"])["index"]
    tags, leading = run.arrays["tag_direction"], run.arrays["principal_direction"]
    places = zip(strongest.index, strongest["layer"], strongest["head"], strict=True)
    return [Tag(layer, head, tags[row], leading[heads[layer, head]]) for row, layer, head in places]


KEYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    HIDDEN: lambda sinks, mass: sinks,
    EARLIEST: lambda sinks, mass: ablated.other_keys(sinks, torch.arange(mass.shape[-1]).expand_as(mass)),
    ATTENDED: lambda sinks, mass: ablated.other_keys(sinks, -mass),
}
"""From sinks and attention received, (texts, heads, positions), the keys that are hidden."""


def keys_of(name: str, reading: Reading) -> dict[int, Bool[Tensor, "texts heads positions"]]:
    """Choose the keys of every layer that an ablation of `KEYS` hides."""
    return {layer: KEYS[name](of.sinks, of.mass) for layer, of in reading.layers.items()}


def others_of(
    caught: Bool[Tensor, "texts positions"],
    sinks: Bool[Tensor, "texts positions"],
    lengths: Sequence[int],
) -> Bool[Tensor, "texts positions"]:
    """Choose as many other tokens of each text by chance, no sinks, nor the first; fewer where there are fewer."""
    order = torch.rand(caught.shape, generator=torch.Generator().manual_seed(0))
    behind = torch.arange(caught.shape[1]) >= torch.as_tensor(lengths)[:, None]
    order = order.masked_fill(caught | sinks | behind, torch.inf)
    order[:, 0] = torch.inf
    rank = order.argsort(dim=1).argsort(dim=1)
    return (rank < caught.sum(dim=1, keepdim=True)) & order.isfinite()


def ablations(model: OpenModel, tags: Sequence[Tag]) -> dict[str, Ablation]:
    """Return all ablations by name, the model as it is first."""

    def of_keys(name: str) -> Ablation:
        return lambda reading: ablated.hidden(model, keys_of(name, reading))

    def of_tags(name: str) -> Ablation:
        def opened(reading: Reading) -> Iterator[AbstractContextManager[object]]:
            for tag in tags:
                layer = reading.layers[tag.layer]
                rows = layer.caught[:, tag.head]
                if name == OTHERS:
                    rows = others_of(rows, layer.sinks[:, tag.head], reading.lengths)
                if rows.any():
                    direction = tag.leading if name == OTHERS else tag.direction
                    control = 0 if name == RANDOM else None
                    place = model, tag.layer, tag.head
                    yield ablate_direction(*place, direction, queries=rows, control=control)

        return opened

    by_name = {name: of_keys(name) for name in KEYS} | {
        name: of_tags(name) for name in (TAGS, RANDOM, OTHERS)
    }
    return {DENSE: lambda reading: (), **by_name}


class _Sizes(Hooks):
    """How much of its tag each head writes where a later sink catches, and of its leading direction elsewhere."""

    def __init__(self, model: OpenModel, tags: Sequence[Tag]) -> None:
        self.tags, self.sizes = tags, torch.zeros(2, 2, dtype=torch.float64)
        self.weights = {layer: model.output_weights(layer) for layer in {tag.layer for tag in tags}}

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        output, (catches,) = attend_and_catch(inputs)
        for tag in (tag for tag in self.tags if tag.layer == layer):
            of_head = catches.head == tag.head
            caught = catches.caught[of_head & (catches.position > 0)].any(dim=0)
            sinks = torch.zeros_like(caught).index_fill_(0, catches.position[of_head].clamp_min(0), True)
            others = others_of(caught[None].cpu(), sinks[None].cpu(), [len(caught)])[0]
            for row, (direction, rows) in enumerate(((tag.direction, caught.cpu()), (tag.leading, others))):
                unit = functional.normalize(direction.double(), dim=0)
                written = output[0, rows.to(output.device), tag.head].double().cpu() @ (
                    self.weights[layer][tag.head].cpu() @ unit
                )
                self.sizes[row] += torch.stack([written.abs().sum(), rows.sum().double()])
        return output


@measures("model")
def amounts(model: OpenModel, tags: Sequence[Tag], texts: Sequence[Tensor]) -> tuple[float, float]:
    """Average what is taken from a token of a head: of its tag, and of its leading direction elsewhere."""
    tap = _Sizes(model, tags)
    with hooked(model, tap):
        for ids in texts:
            model.forward(ids[None])
    tag, other = (tap.sizes[:, 0] / tap.sizes[:, 1]).tolist()
    return tag, other


def answered(model: OpenModel, prompts: FewShotPrompts, reading: Reading) -> Bool[Tensor, "texts lines"]:
    """Mark which of some prompts the model answers correctly, after each number of examples."""
    return prompts.right(model, reading.part, reading.ids)


@declared("sinks/examples")
def examples(study: Study, outcome: Outcome) -> None:
    model = study.require_model()
    prompts = prompts_for(model, PROMPTS, SEED)
    texts = texts_of(prompts)
    tags = later_tags(model, prompts_for(model, TAG_PROMPTS, TAG_SEED), study.show)

    def measured(reading: Reading) -> dict[str, Tensor]:
        caught = [reading.layers[tag.layer].caught[:, tag.head].sum(dim=1) for tag in tags]
        went = {name: ablated.share_hidden(reading, keys_of(name, reading)) for name in KEYS}
        right = answered(model, prompts, reading)
        return went | {"right": right, "caught": sum(caught, torch.zeros(len(reading.ids)))}

    title = "asking with something taken away"
    rows = ablated.under_ablations(model, texts, ablations(model, tags), measured, study.show, title)
    answers = {name: of["right"] for name, of in rows.items()}
    outcome.tables["accuracy"] = tabulated(answers, prompts)
    went = {name: percent(float(torch.from_numpy(rows[DENSE][name]).nanmean())) for name in KEYS}
    caught = rows[DENSE]["caught"]
    words = "; ".join(f"{name} {of}" for name, of in went.items())
    outcome.read("attention that went there, in heads with sinks", words)
    words = f"in {int((caught > 0).sum())} of {counted(len(texts), 'prompt')}, {number(float(caught.mean()))} a prompt"
    outcome.read("tokens that a later token's sink catches, in heads with a tag", words)
    if caught.any():
        some = [texts[row] for row in np.flatnonzero(caught)[:TAG_PROMPTS]]
        of_tags, elsewhere = map(number, amounts(model, tags, some))
        outcome.read("taken from such a token", f"{of_tags}; {elsewhere} along leading directions at others")
    show_ablations(outcome, answers, prompts.tasks, went, caught > 0)


def show_ablations(
    outcome: Outcome,
    answers: Mapping[str, Answers],
    tasks: Sequence[str],
    went: Mapping[str, str],
    caught: Bool[np.ndarray, " prompts"],
) -> None:
    """Show verdicts, levels and a chart of the answers by ablation.

    went: the share of attention hidden by each. caught: the prompts with tokens that a later token's sink catches, of
    which tags are judged.
    """
    right = {name: of.astype(np.float64) for name, of in answers.items()}
    for name, of in right.items():
        outcome.read(name, by_k(of))
    for name, (words, controls) in PAIRS.items():
        if name == TAGS and caught.sum() < LEAST_CAUGHT:
            few = counted(int(caught.sum()), "prompt")
            for claim in ("costs", "grows"):
                why = f"a later token's sink catches something in {few} of {len(caught)} only"
                outcome.cannot_judge(claim, why, intervention=words)
            continue

        def mean(values: Floats, tags: bool = name == TAGS) -> Estimate:
            return Estimate.mean(values[caught], "prompts") if tags else over_tasks(values, tasks)

        lost, *of_controls = (right[DENSE] - right[each] for each in (name, *controls))
        place = int(np.argmax([mean(each[:, -1]).value for each in of_controls]))
        beyond, hardest = lost - of_controls[place], controls[place]
        attention = ""
        if name in went:
            attention = f", to which {went[hardest]} of the attention went, to the sinks {went[name]}"
        levels = {"lost": mean(lost[:, -1]), "control": mean(of_controls[place][:, -1])}
        what = {"intervention": words, "hardest": hardest, "attention": attention}
        outcome.judge("costs", mean(beyond[:, -1]).floored(), **what, **levels)
        verdict = outcome.verdict("grows", mean(beyond[:, -1] - beyond[:, 0]).floored(), **what)
        floor = "" if right[DENSE][:, 0].any() else NONE_LEFT
        outcome.verdicts.append(unless_explained(verdict, HOLDS, floor))
    outcome.draw("accuracy", accuracy_by_shots(right))
