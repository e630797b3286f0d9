"""Smooth and unsmooth positional bases: the fixed encoding (Fig. 7), and models trained on addition (Fig. 5).

Every claim about the latter presupposes that they add (appendix D.3).
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float64
from torch import Tensor

from theodolite import Corpus, OpenModel, Run
from theodolite.errors import UsageError
from theodolite.estimates import Estimate, Estimates, Floats
from theodolite.judging import HOLDS, UNTESTABLE, Verdict, judge, untestable
from theodolite.measure.position import CUTOFFS
from theodolite.models.hooks import Hooks, hooked
from theodolite.report import data, style
from theodolite.report.drawing.grammar import dots, heat, line
from theodolite.system.wording import counted, number, percent, with_error
from theodolite.theory import dct2, low_frequency_ratio, normalised_gram, sinusoidal
from theodolite.theory.unbiased import Jackknifed, combined, leaving_out, stacked
from theodolite_papers import drawing
from theodolite_papers.experiment import Outcome, Study, by_layer, by_name, criterion, declared
from theodolite_papers.hidden_geometry import layer_columns, published
from theodolite_papers.hidden_geometry.layer_columns import Basis, energy_within, estimates_of, is_seen, shown
from theodolite_papers.training.tasks import CHARACTERS, QUICK_TEST, Additions

PAPER_ACCURACY = {
    "absolute positions (paper)": (0.326, 0.080, 0.111, 0.099),
    "rotary positions (paper)": (0.356, 0.134, 0.200, 0.385),
}
"""Appendix D.3, on 1, 2, 3 and 4 digits."""

RECORD = "training.json"


def is_adder(model: OpenModel) -> bool:
    """Return whether the model reads the characters of additions alone, as those of `theodolite train addition` do."""
    if model.tokenizer is None or model.vocabulary != len(CHARACTERS):
        return False
    return model.tokenizer.get_vocab() == {character: index for index, character in enumerate(CHARACTERS)}


def task_of(run: Run) -> Additions:
    """Make the task of additions of as many digits as the run's text says, which are those the model was trained on."""
    return Additions.named(data.provenance(run, "corpus", "name") or "") or Additions()


def trained_on(model: OpenModel) -> Additions:
    """Read which additions an adder learned from the record of its training."""
    with suppress(OSError, ValueError, AttributeError):  # of another program's file
        record = json.loads((Path(model.id) / RECORD).read_text(encoding="utf-8"))
        if task := Additions.named(record.get("task", "")):
            return task
    raise UsageError(
        f"{model.id} has no {RECORD} of `theodolite train addition`, which says what it adds: name a --corpus"
    )


def digits_in_words(digits: tuple[int, int]) -> str:
    """Word a range of digits: `5 to 10 digits`."""
    fewest, most = digits
    return counted(most, "digit") if fewest == most else f"{fewest} to {most} digits"


def on_cpu(model: OpenModel) -> Any:
    """Move the model to where the examples of the task are."""
    return model.hf if model.device.type == "cpu" else copy.deepcopy(model.hf).cpu()


def share_of_sums(share: float, count: int) -> Estimate:
    """Give an accuracy its error, at (k + 2)/(n + 4) (Agresti & Coull 1998): all or none right has one too."""
    moved = (share * count + 2) / (count + 4)
    return Estimate(share, math.sqrt(moved * (1 - moved) / count), count, "sums", by_chance=True)


def why_not_an_adder(model: OpenModel | None, run: Run) -> str | None:
    """Explain why the model is not known to add, with its accuracy where it can be measured; None: it adds."""
    if model is None:
        return "whether the model adds is unknown without it: pass the model together with the run"
    if not is_adder(model):
        return f"{model.id} was not trained on addition alone, so whether it adds is not known"
    task = task_of(run)
    what = f"exact-match accuracy on {QUICK_TEST} sums of {digits_in_words(task.digits)}"
    return why_not_known_to_add(what, share_of_sums(task.accuracy(on_cpu(model)), QUICK_TEST))


def why_not_known_to_add(what: str, accuracy: Estimate) -> str | None:
    """Explain why a model of this accuracy (`what`: on what) is not known to add; None: it adds."""
    verdict = judge("", what, accuracy, criterion("geometry/adds"))
    return None if verdict.answer == HOLDS else f"this model is not known to add: {verdict.evidence}"


def of_an_adder(model: OpenModel | None, run: Run, verdict: Verdict, measured: str) -> Verdict:
    """Judge what the paper says of models trained on addition: not testable where the model is none."""
    characters = set("".join(run.examples["token"].astype(str))) if len(run.examples) else set()
    if not {"+", "="} <= characters <= set(CHARACTERS):
        why = f"the corpus of this run contains no addition problems ({measured})"
        why += ": survey a model trained on addition on addition problems"
        return untestable(verdict.claim, why)
    if verdict.answer != UNTESTABLE and (unknown := why_not_an_adder(model, run)):
        return untestable(verdict.claim, f"{unknown} ({measured})")
    return verdict


@declared("geometry/addition")
def addition(study: Study, outcome: Outcome) -> None:
    model = study.require_model()
    if not is_adder(model):
        raise UsageError(
            f"{model.id} was not trained on addition: pass a folder that `theodolite train addition` wrote"
        )
    task = task_of(study.run)
    trained = digits_in_words(task.digits)
    measured = task.measure(on_cpu(model))
    count, by_digits = measured["tested"], measured["accuracy_by_digits"]
    names = [trained, *(counted(int(digits), "digit") for digits in by_digits)]
    accuracies = [share_of_sums(value, count) for value in (measured["accuracy"], *by_digits.values())]
    values, errors = np.array([(each.value, each.error) for each in accuracies]).T
    absolute, rotary = PAPER_ACCURACY.values()
    printed = [f"absolute {a:.1%}, rotary {r:.1%}" for a, r in zip(absolute, rotary, strict=True)]
    for name, paper, accuracy in zip(names, ["“above 99 %”", *printed], accuracies, strict=True):
        outcome.read(f"exact-match accuracy, {name}", with_error(accuracy.value, accuracy.error), paper)
    outcome.read("positions of this model", model.positions, "absolute; rotary")
    in_distribution, words = accuracies[0], {"count": count, "trained": trained}
    outcome.judge("in-distribution", in_distribution, **words)
    spread, shorter_sums = (
        float(np.sqrt(np.square(errors[1:]).mean() / len(by_digits))),
        count * len(by_digits),
    )
    of_shorter = Estimate(float(values[1:].mean()), spread, shorter_sums, "sums", by_chance=True)
    shorter = outcome.verdict("shorter", of_shorter, **words)
    what = outcome.sentence("in-distribution", "what", **words)
    if unknown := why_not_known_to_add(what, in_distribution):
        shorter = untestable(shorter.claim, f"{unknown} ({shorter.evidence})")
    outcome.verdicts.append(shorter)
    columns = {"examples": names, "accuracy": values, "accuracy_se": errors, "tested": count}
    outcome.tables["accuracy"] = pd.DataFrame(columns)

    def points(name: str, values: Floats, colour: str, **own: Any) -> dict[str, Any]:
        texts = [percent(float(value)) for value in values]
        return dots(names, values, texts, name, colour, f"%{{x}}<br>{name}: %{{text}}<extra></extra>", **own)

    traces = [points("this model", values, style.MEASURED, error_y=style.error_bars(errors))]
    for (name, row), colour in zip(PAPER_ACCURACY.items(), (style.BLUE, style.GREEN), strict=True):
        traces.append(points(name, np.array([np.nan, *row]), colour, marker={"symbol": "diamond-open"}))
    layout = {"yaxis": {"range": [-0.03, 1.05], "tickformat": ".0%"}, "xaxis": {"type": "category"}}
    drawn = style.figure(traces, "", "exact-match accuracy", height=360, layout=layout)
    outcome.draw("accuracy", drawn, count=count)


class _Streams(Hooks):
    def __init__(self) -> None:
        self.layers: list[Tensor] = []

    def stream(self, layer: int, hidden: Tensor) -> None:
        self.layers.append(hidden[0, 1:].double().cpu())


def random_stream(model: OpenModel, length: int, seed: int) -> Tensor:
    """Draw one sequence of random tokens; return its states at every layer: (N, T − 1, d), without position 0."""
    ids = Corpus.random_tokens(model.required_vocabulary(), length, 1, seed, below=model.vocabulary).contexts
    streams = _Streams()
    with hooked(model, streams):
        model.forward(ids)
    return torch.stack(streams.layers)


def norms_and_cosines(hidden: Tensor) -> tuple[Floats, Floats, Floats, Floats]:
    """Compute mean norms of vectors (N, n, d), errors over tokens (N); mean cosines of layers, errors (N, N)."""
    norms = torch.linalg.vector_norm(hidden, dim=-1)
    unit = torch.nn.functional.normalize(hidden, dim=-1)
    root = math.sqrt(hidden.shape[1])
    cosines = torch.stack([(unit * layer).sum(-1) for layer in unit])
    of_norms, of_cosines = ((each.mean(-1).numpy(), each.std(-1).numpy() / root) for each in (norms, cosines))
    return *of_norms, *of_cosines


@declared("geometry/figure8")
def figure_8(study: Study, outcome: Outcome) -> None:
    run = study.run
    length = run.provenance["corpus"]["length"]
    hidden = random_stream(study.require_model(), length, run.provenance["seed"])
    norms, errors, cosines, cosine_errors = norms_and_cosines(hidden)
    ratios = norms / norms[0] if norms[0] > 0 else np.full_like(norms, np.nan)
    # The relative errors of a quotient add up at most.
    ratio_errors = ratios * (errors / norms + errors[0] / norms[0])
    last = len(norms) - 1
    printed = {1: published.NORM_RATIO_FIRST, last: published.NORM_RATIO_LAST}
    for layer, ratio in printed.items():
        shown = with_error(ratios[layer], ratio_errors[layer])
        outcome.read(f"norm of layer {layer} over layer 0", shown, f"GPT-2: {ratio:g}")
    others, tokens = cosines[0, 1:], (length - 1, "tokens")
    between = f"{number(others.min())} to {number(others.max())}"
    outcome.read("mean cosine of layer 0 with the others", between, "“close to 0”")
    grown = Estimate(float(ratios[last]), float(ratio_errors[last]), *tokens)
    outcome.judge("growing", grown, last=last, tokens=length - 1)
    far = int(np.abs(others).argmax()) + 1
    cosine = Estimate(float(cosines[0, far]), float(cosine_errors[0, far]), *tokens)
    outcome.judge("unrelated", cosine, layer=far)
    layers = range(len(norms))
    columns = {"layer": layers, "norm": norms, "norm_se": errors, "norm_ratio": ratios}
    names = [f"layer {layer}" for layer in layers]
    outcome.tables |= {"norms": pd.DataFrame(columns), "cosines": pd.DataFrame(cosines, columns=names)}
    outcome.draw("norms", _norms(norms, errors, printed))
    ticks = [(float(layer), str(layer)) for layer in layers[:: max(1, len(layers) // 12)]]
    outcome.draw("cosines", drawing.cosine_map(cosines, names, "mean cosine", ticks))


def _norms(norms: Floats, errors: Floats, ratios: Mapping[int, float]) -> go.Figure:
    """Draw the mean norm of the vectors at every layer, log axis, and dots where the paper's ratios would put it."""
    layers = np.arange(len(norms), dtype=np.float64)
    axis = drawing.TWOS | {"tickformat": "~s"}
    drawn = drawing.over_layers(layers, {"this model": (norms, errors)}, "mean ‖h‖₂", axis)
    hover = "GPT-2: %{text} × layer 0<extra></extra>"
    heights, names = norms[0] * np.array([*ratios.values()]), [number(ratio, 4) for ratio in ratios.values()]
    printed, marker = "layer 0 times the ratio of GPT-2", {"size": 9, "symbol": "diamond-open"}
    return drawn.add_trace(dots([*ratios], heights, names, printed, style.REFERENCE, hover, marker=marker))


SHOWN_POSITIONS, SHOWN_FREQUENCIES = 128, 10
GRAM_CELLS = 50_000  # of all Gram matrices on a page, at most
NEARBY = 32  # the diagonal of a Gram matrix is compared with the diagonal a 32nd of the positions away
ENERGY = 0.9


def spike(gram: Tensor) -> Tensor:
    """Measure how far the diagonal of a Gram matrix (n, n) stands out: 1 − ⟨row, row at distance n/32⟩ over squares."""
    distance = max(1, round(len(gram) / NEARBY))
    squares = gram.diagonal()
    return 1 - 2 * gram.diagonal(distance).sum() / (squares[distance:] + squares[:-distance]).sum()


def spike_between(p: Basis) -> Jackknifed:
    """Estimate the spike by products of different groups; NaN at the noise floor."""
    between = layer_columns.grams_between(p)
    return leaving_out(lambda used: spike(between(used)), len(p)).where(is_seen(p))


def directions_needed(shares: Tensor) -> Tensor:
    """Count the leading directions that hold 0.9 of the energy, of which 1, 2, … hold `shares`."""
    return (shares < ENERGY).sum().double() + 1


def measures(basis: Float64[Tensor, "positions width"]) -> list[float]:
    """Compute spike, directions needed and low-frequency share of a basis that holds no noise."""
    energy = torch.linalg.svdvals(basis).square()
    smooth = low_frequency_ratio(normalised_gram(basis), (10,))[0]
    needed = directions_needed(energy.cumsum(0) / energy.sum())
    return [float(spike(basis @ basis.T)), float(needed), float(smooth)]


DIFFERENCES = {
    "spike": ("how far the diagonal stands out", "“large spiky values”, “smooth”"),
    "directions": (f"directions that hold {percent(ENERGY)} of the energy", "“a sharper drop”"),
    "low_frequency_10": ("share of energy at K = 10", "“more low-frequency”"),
}
"""Of the claims of appendix B.1: how a reading calls it, and the paper's words."""


def learned_measures(study: Study) -> dict[str, Estimates]:
    """Estimate the numbers of `DIFFERENCES` of every layer; NaN at the noise floor; without the text the last alone."""
    learned = {"low_frequency_10": data.layer_estimates(study.run, "low_frequency_10")}
    if bases := layer_columns.bases_by_group(study):
        learned["spike"] = estimates_of(stacked([spike_between(p) for p in bases]))
        needed = [combined(directions_needed, energy_within(p)).where(is_seen(p)) for p in bases]
        learned["directions"] = estimates_of(stacked(needed))
    return learned


def _judge_difference(
    study: Study, outcome: Outcome, name: str, learned: Estimates | None, fixed: Sequence[float]
) -> None:
    """Judge a number of every layer against that of the fixed encoding, centred and as printed."""
    if learned is None:
        outcome.cannot_judge(name, layer_columns.WITHOUT_TEXT)
        return
    what, words = DIFFERENCES[name]
    hidden, mean = np.isnan(learned.values), layer_columns.mean_of(learned)
    outcome.read(f"{what}: sinusoidal, learned", f"{number(fixed[0])}, {shown(mean)}", words)
    numbers = (
        f"learned {number(mean.value)} (mean over {(~hidden).sum()} layers), sinusoidal {number(fixed[0])} "
        f"({number(fixed[1])} uncentred)"
    )
    verdict = outcome.verdict(name, replace(mean, value=mean.value - fixed[0]), numbers=numbers)
    if data.need(study.run, "positional_basis").shape[1] - 1 < layer_columns.LEAST_POSITIONS:
        verdict = untestable(
            verdict.claim, f"{numbers}; fewer than {layer_columns.LEAST_POSITIONS} positions"
        )
    outcome.verdicts.append(layer_columns.unless_hidden(verdict, hidden))


def singular_values(
    learned: Floats, *, ranks: Floats | None = None, most: int | None = None, rounding: float = 1e-10
) -> go.Figure:
    """Draw the singular values of each layer's P over the first, at `most` layers, with ranks marked.

    What is nothing but rounding, as the last value (P's columns sum to 0), is not drawn. Song & Zhong 2024, Fig. 3.
    """
    traces: list[Any] = [drawing.depth_bar(len(learned))]
    index = np.arange(1, learned.shape[1] + 1, dtype=np.int32)
    lines = drawing.in_order([f"layer {layer}" for layer in range(len(learned))])
    for layer in data.evenly(len(learned), most or len(learned)):
        of_layer, largest = learned[layer], learned[layer].max()
        if not largest > 0:
            continue
        rank = 0 if ranks is None or np.isnan(ranks[layer]) else int(ranks[layer])
        hover = f"layer {layer}, number %{{x}}<br>singular value %{{customdata:.4g}}"
        hover += (f"<br>rank {rank}" if rank else "") + "<extra></extra>"
        relative = np.where(of_layer > rounding * largest, of_layer / largest, np.nan)
        name, colour = lines[layer].name, lines[layer].colour
        own: dict[str, Any] = {"customdata": of_layer.astype(np.float32), "showlegend": False, "hover": hover}
        own |= {"marker": {"size": np.where(index == rank, 10, 3), "color": colour}, "width": drawing.LINE}
        traces += line(index, relative, name, colour, **own)
    titles = "number", "singular value over the largest"
    return style.figure(traces, *titles, height=360, layout={"yaxis": drawing.POWERS | {"dtick": 1}})


def dct(magnitudes: Floats) -> go.Figure:
    """Draw the lowest 10 × 10 coefficients of a Gram matrix's 2-D DCT over the largest (Song & Zhong 2024, Fig. 3)."""
    largest = magnitudes.max()
    with np.errstate(divide="ignore", invalid="ignore"):
        decades = np.log10(magnitudes / largest) if largest > 0 else np.full_like(magnitudes, np.nan)
    ticks = {"tickvals": [-4, -3, -2, -1, 0], "ticktext": ["≤ 1/10 000", "1/1000", "1/100", "1/10", "1"]}
    bar = style.colour_bar("share of the largest", **ticks)
    hover = "frequencies %{y}, %{x}<br>magnitude %{customdata:.4g}<extra></extra>"
    amounts = magnitudes.astype(np.float32)
    cells = heat(np.clip(decades, -4, 0), -4, 0, hover, bar=bar, cells=True, customdata=amounts)
    axis = {"dtick": 1, "ticks": "", "constrain": "domain"}
    layout = {"xaxis": axis, "yaxis": axis | {"autorange": "reversed", "scaleanchor": "x"}}
    return style.figure([cells], "frequency", "frequency", height=440, layout=layout)


def gram(cosines: Floats, most: int) -> go.Figure:
    """Draw the normalised Gram matrix of `most` positions, evenly chosen from 1 on (Song & Zhong 2024, Fig. 2)."""
    shown = data.evenly(len(cosines), most)
    names = [f"position {place + 1}" for place in shown]
    ticks = [(len(names) / 2, "positions →")]
    upright: dict[str, Any] = {"height": 440, "yaxis": {"tickangle": -90}}
    return drawing.cosine_map(cosines[np.ix_(shown, shown)], names, "cosine", ticks, **upright)


def low_frequency(run: Run) -> go.Figure:
    """Draw the share of the Gram matrix's energy in its K×K lowest frequencies for every K, beside Table 3."""
    layers, sizes = data.layer_numbers(run), CUTOFFS
    lines = drawing.in_order([f"K = {size}" for size in sizes], marker=5)
    columns, titles = [f"low_frequency_{size}" for size in sizes], ("layer", "share of energy")
    values, errors = ([of(run, name) for name in columns] for of in (data.value_of, data.error_of))
    axes: dict[str, Any] = {"xaxis": style.layer_axis(layers), "yaxis": {"range": [0, 1.05]}}
    drawn = drawing.curves(layers, lines, values, titles, errors=errors, **axes)
    ends = layers[[0, -1]]
    for size, of_size in zip(sizes, lines, strict=True):
        hover = f"GPT-2: %{{y:.3f}} (K = {size}, Table 3)<extra></extra>"
        own: dict[str, Any] = {"dash": "dot", "width": 1.2, "hover": hover, "showlegend": size == 10}
        drawn.add_traces(line(ends, [published.LOW_FREQUENCY[size]] * 2, "GPT-2", of_size.colour, **own))
    return drawn


def pictures(bases: Tensor) -> tuple[Callable[[int], go.Figure], Callable[[int], go.Figure]]:
    """Return what draws the Gram matrix, and its frequencies, of each of some bases (N, n, d), positions 1 … n."""
    grams = normalised_gram(bases)
    frequencies = dct2(grams, SHOWN_FREQUENCIES).abs().numpy()
    most = min(SHOWN_POSITIONS, max(40, int((GRAM_CELLS / len(grams)) ** 0.5)))
    return (
        lambda place: gram(grams[place].numpy(), most),
        lambda place: dct(frequencies[place]),
    )


@declared("geometry/figure7")
def figure_7(study: Study, outcome: Outcome) -> None:
    run = study.run
    bases = torch.from_numpy(data.need(run, "positional_basis")[:, 1:]).double()
    layers, positions, width = bases.shape
    fixed = sinusoidal(positions + 1, width + width % 2)[1:, :width]
    centred = fixed - fixed.mean(0)
    layer_names = [f"layer {layer}" for layer in range(layers)]
    learned, of_fixed = learned_measures(study), np.array([measures(each) for each in (centred, fixed)])
    table = pd.DataFrame({"basis": ["sinusoidal, centred", "sinusoidal, as printed", *layer_names]})
    for name, numbers in zip(DIFFERENCES, of_fixed.T, strict=True):
        _judge_difference(study, outcome, name, learned.get(name), numbers)
        if name in learned:
            table[name] = np.concatenate([numbers, learned[name].values])
    outcome.tables["bases"] = table
    bases = torch.cat([centred[None], bases])
    (picture, frequencies), options = pictures(bases), ["sinusoidal", *layer_names]
    outcome.draw("gram", by_name("basis", options, picture, grid=True))
    of_basis, *learned_values = torch.linalg.svdvals(bases).numpy()
    drawn = singular_values(np.array(learned_values), rounding=1e-8)  # of arrays in float32
    numbers, relative = np.arange(1, len(of_basis) + 1), of_basis / of_basis[0]
    relative[relative <= 1e-8] = np.nan
    drawn.add_traces(line(numbers, relative, "sinusoidal", style.MEASURED, width=3))
    outcome.draw("singular-values", drawn)
    outcome.draw("frequencies", by_name("basis", options, frequencies))


@declared("geometry/figure5")
def figure_5(study: Study, outcome: Outcome) -> None:
    run, (mean, _) = study.run, data.layer_average(study.run, "low_frequency_10")
    paper = f"additions: about {percent(published.LOW_FREQUENCY_ADDITION)}; GPT-2: 99.7 %"
    outcome.read("energy of the 10 × 10 lowest frequencies, mean over layers", shown(mean), paper)
    share = f"its share of energy at K = 10: {shown(mean)}"
    verdict = layer_columns.smooth_verdict(outcome, run, "rough", layer_columns.LEAST_UNSMOOTH_POSITIONS)
    outcome.verdicts.append(of_an_adder(study.model, run, verdict, share))
    shares = [f"low_frequency_{k}" for k in (1, 3, 5, 10)]
    outcome.tables["smoothness"] = run.layers.filter(["layer", *shares])
    picture, frequencies = pictures(torch.from_numpy(data.need(run, "positional_basis")[:, 1:]).double())
    outcome.draw("gram", by_layer(len(run.layers), picture, grid=True))
    outcome.draw("frequencies", by_layer(len(run.layers), frequencies))
    if math.isfinite(mean.value):
        outcome.draw("smoothness", low_frequency(run))
