"""Smooth and unsmooth positional bases: the fixed encoding (Fig. 7), and models trained on addition (Fig. 5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from theodolite import Corpus, OpenModel, Run
from theodolite.estimates import Estimate, Estimates, Floats
from theodolite.judging import untestable
from theodolite.models.hooks import Hooks, hooked
from theodolite.report.data import evenly, layer_average, layer_estimates, need
from theodolite.system.wording import number, percent, with_error
from theodolite.theory import dct2, low_frequency_ratio, normalised_gram, sinusoidal
from theodolite.theory.unbiased import Jackknifed, combined, leaving_out, stacked
from theodolite_papers import drawing
from theodolite_papers.experiment import Outcome, Study, by_layer, by_name, declared
from theodolite_papers.hidden_geometry import figures, published
from theodolite_papers.hidden_geometry.addition import of_an_adder
from theodolite_papers.hidden_geometry.layer_columns import (
    LEAST_POSITIONS,
    LEAST_UNSMOOTH_POSITIONS,
    WITHOUT_TEXT,
    Basis,
    bases_by_group,
    energy_within,
    estimates_of,
    grams_between,
    is_seen,
    mean_of,
    shown,
    smooth_verdict,
    unless_hidden,
)


class _Streams(Hooks):
    """The residual stream of one sequence by layer, position 0 left out, in float64."""

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
    others = cosines[0, 1:]
    between = f"{number(others.min())} to {number(others.max())}"
    outcome.read("mean cosine of layer 0 with the others", between, "“close to 0”")
    grown = Estimate(float(ratios[last]), float(ratio_errors[last]), length - 1, "tokens")
    outcome.judge("growing", grown, last=last, tokens=length - 1)
    far = int(np.abs(others).argmax()) + 1
    cosine = Estimate(float(cosines[0, far]), float(cosine_errors[0, far]), length - 1, "tokens")
    outcome.judge("unrelated", cosine, layer=far)
    layers = range(len(norms))
    columns = {"layer": layers, "norm": norms, "norm_se": errors, "norm_ratio": ratios}
    outcome.tables["norms"] = pd.DataFrame(columns)
    outcome.tables["cosines"] = pd.DataFrame(cosines, columns=[f"layer {layer}" for layer in layers])
    outcome.draw("norms", drawing.layer_norms(norms, errors, printed))
    outcome.draw("cosines", drawing.layer_cosines(cosines))


SHOWN_POSITIONS = 128
SHOWN_FREQUENCIES = 10
NEARBY = 32
"""The diagonal of a Gram matrix is compared with the diagonal a 32nd of the positions away."""

ENERGY = 0.9


def spike(gram: Tensor) -> Tensor:
    """Measure how far the diagonal of a Gram matrix (n, n) stands out: 1 − ⟨row, row at distance n/32⟩ over squares."""
    distance = max(1, round(len(gram) / NEARBY))
    squares = gram.diagonal()
    return 1 - 2 * gram.diagonal(distance).sum() / (squares[distance:] + squares[:-distance]).sum()


def spike_between(p: Basis) -> Jackknifed:
    """Estimate the spike by products of different groups; NaN at the noise floor."""
    between = grams_between(p)
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
    learned = {"low_frequency_10": layer_estimates(study.run, "low_frequency_10")}
    if bases := bases_by_group(study):
        learned["spike"] = estimates_of(stacked([spike_between(p) for p in bases]))
        needed = [combined(directions_needed, energy_within(p)).where(is_seen(p)) for p in bases]
        learned["directions"] = estimates_of(stacked(needed))
    return learned


def _judge_difference(
    study: Study, outcome: Outcome, name: str, learned: Estimates | None, fixed: Sequence[float]
) -> None:
    """Judge a number of every layer against that of the fixed encoding, centred and as printed."""
    if learned is None:
        outcome.cannot_judge(name, WITHOUT_TEXT)
        return
    what, words = DIFFERENCES[name]
    hidden, mean = np.isnan(learned.values), mean_of(learned)
    outcome.read(f"{what}: sinusoidal, learned", f"{number(fixed[0])}, {shown(mean)}", words)
    numbers = (
        f"learned {number(mean.value)} (mean over {(~hidden).sum()} layers), sinusoidal {number(fixed[0])} "
        f"({number(fixed[1])} uncentred)"
    )
    verdict = outcome.verdict(name, replace(mean, value=mean.value - fixed[0]), numbers=numbers)
    if need(study.run, "positional_basis").shape[1] - 1 < LEAST_POSITIONS:
        verdict = untestable(verdict.claim, f"{numbers}; fewer than {LEAST_POSITIONS} positions")
    outcome.verdicts.append(unless_hidden(verdict, hidden))


def _pictured(run: Run, bases: Tensor) -> Run:
    """Put the Gram matrices and frequencies of other bases (N, n, d), positions 1…n, into the run for its figures."""
    count = bases.shape[1]
    shown = torch.tensor(evenly(count, SHOWN_POSITIONS))
    grams = normalised_gram(bases)
    arrays = {
        "gram": grams[:, shown][:, :, shown].float(),
        "gram_position": shown + 1,
        "gram_label": torch.empty(0, dtype=torch.int64),
        "dct": dct2(grams, SHOWN_FREQUENCIES).abs(),
    }
    return replace(run, arrays=arrays)


@declared("geometry/figure7")
def figure_7(study: Study, outcome: Outcome) -> None:
    run = study.run
    bases = torch.from_numpy(need(run, "positional_basis")[:, 1:]).double()
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
    pictured, options = _pictured(run, bases), ["sinusoidal", *layer_names]
    outcome.draw("gram", by_name("basis", options, lambda place: figures.gram(pictured, place), grid=True))
    values = torch.linalg.svdvals(bases).numpy()
    outcome.draw("singular-values", drawing.singular_values_against(values[1:], values[0], "sinusoidal"))
    outcome.draw("frequencies", by_name("basis", options, lambda place: figures.dct(pictured, place)))


@declared("geometry/figure5")
def figure_5(study: Study, outcome: Outcome) -> None:
    run, (mean, _) = study.run, layer_average(study.run, "low_frequency_10")
    outcome.read(
        "energy of the 10 × 10 lowest frequencies, mean over layers",
        shown(mean),
        f"additions: about {percent(published.LOW_FREQUENCY_ADDITION)}; GPT-2: 99.7 %",
    )
    share = f"its share of energy at K = 10: {shown(mean)}"
    verdict = smooth_verdict(outcome, run, "rough", LEAST_UNSMOOTH_POSITIONS)
    outcome.verdicts.append(of_an_adder(study.model, run, verdict, share))
    shares = [f"low_frequency_{k}" for k in (1, 3, 5, 10)]
    outcome.tables["smoothness"] = run.layers.filter(["layer", *shares])
    pictured = _pictured(run, torch.from_numpy(need(run, "positional_basis")[:, 1:]).double())
    layers = len(run.layers)
    outcome.draw("gram", by_layer(layers, lambda layer: figures.gram(pictured, layer), grid=True))
    outcome.draw("frequencies", by_layer(layers, lambda layer: figures.dct(pictured, layer)))
    if math.isfinite(mean.value):
        outcome.draw("smoothness", figures.low_frequency(run))
