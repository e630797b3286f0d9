"""Smooth and unsmooth positional bases: the fixed encoding (Fig. 7), and models trained on addition (Fig. 5)."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from theodolite import Corpus, OpenModel, Run
from theodolite.estimates import Estimate, Floats
from theodolite.judging import untestable
from theodolite.models.hooks import Hooks, hooked
from theodolite.report import published
from theodolite.report.data import OF_GROUPS, evenly, layer_average, need
from theodolite.report.drawing import geometry
from theodolite.report.drawing import layers as figures_layers
from theodolite.system.wording import number, percent, with_error
from theodolite.theory import dct2, low_frequency_ratio, normalised_gram, sinusoidal
from theodolite_papers import drawing
from theodolite_papers.experiment import Outcome, Study, by_layer, by_name, declared
from theodolite_papers.hidden_geometry import layer_columns
from theodolite_papers.hidden_geometry.addition import of_an_adder
from theodolite_papers.hidden_geometry.layer_columns import (
    LEAST_POSITIONS,
    LEAST_UNSMOOTH_POSITIONS,
    GroupedBasis,
    smooth_verdict,
    unless_noise,
)


class _Streams(Hooks):
    """The residual stream of one sequence by layer, position 0 left out, in float64."""

    def __init__(self) -> None:
        self.layers: list[Tensor] = []

    def stream(self, layer: int, hidden: Tensor) -> None:
        """Keep one layer."""
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
    """Measure how far a normalised Gram matrix' diagonal (…, n, n) stands out: 1 − mean cosine at distance n/32."""
    return 1 - gram.diagonal(_nearby(gram), -2, -1).mean(-1)


def _nearby(gram: Tensor) -> int:
    return max(1, round(gram.shape[-1] / NEARBY))


def directions_needed(basis: Tensor) -> Tensor:
    """Count the directions that hold 0.9 of the energy of (…, n, d)."""
    return _holding(torch.linalg.svdvals(basis).square())


def _holding(energy: Tensor) -> Tensor:
    """Count the largest entries of (…, n) that hold 0.9 of the sum."""
    return (energy.cumsum(-1) / energy.sum(-1, keepdim=True) < ENERGY).sum(-1) + 1


def measures(bases: Tensor) -> Floats:
    """Compute spike, directions needed and low-frequency share of every positional basis: (3, N)."""
    grams = normalised_gram(bases)
    numbers = spike(grams), directions_needed(bases), low_frequency_ratio(grams, (10,))[..., 0]
    return np.stack([each.double().numpy() for each in numbers])


def spike_without_noise(basis: GroupedBasis) -> float:
    """Compute the mean spike over layers, of sums: a position hardly above its noise has no length to divide by."""
    gram = layer_columns.gram_without_noise(basis)
    distance, squares = _nearby(gram), gram.diagonal(0, -2, -1)
    squares = (squares[..., distance:] + squares[..., :-distance]).mean(-1) / 2
    nearby = gram.diagonal(distance, -2, -1).mean(-1)
    return float(torch.where(squares > 0, (1 - nearby / squares).clamp(0, 2), 0).mean())


def directions_without_noise(basis: GroupedBasis) -> float:
    """Compute the directions needed, mean over layers."""
    energy = torch.linalg.eigvalsh(layer_columns.gram_without_noise(basis)).flip(-1).clamp_min(0)
    return float(_holding(energy).double().mean())


def share_without_noise(basis: GroupedBasis) -> float:
    """Compute the share of low frequencies, mean over layers."""
    return float(np.nan_to_num(layer_columns.low_frequency_without_noise(basis), nan=1.0).mean())


DIFFERENCES = {
    "spike": ("how far the diagonal stands out", "“large spiky values”, “smooth”", spike_without_noise),
    "directions": (
        f"directions that hold {percent(ENERGY)} of the energy",
        "“a sharper drop”",
        directions_without_noise,
    ),
    "low_frequency_10": ("share of energy at K = 10", "“more low-frequency”", share_without_noise),
}
"""Of the claims of appendix B.1: how a reading calls it, the paper's words, and the learned number without noise."""


def _judge_difference(study: Study, outcome: Outcome, name: str, of_bases: Floats, error: float) -> None:
    """Judge a number of the fixed encoding, centred and as printed, against that of every layer."""
    what, words, without_noise = DIFFERENCES[name]
    (fixed, uncentred), of_layers = of_bases[:2], of_bases[2:]
    learned = float(np.mean(of_layers))
    outcome.read(f"{what}: sinusoidal, learned", f"{number(fixed)}, {number(learned)}", words)
    numbers = (
        f"learned {number(learned)} (mean over {len(of_layers)} layers), sinusoidal {number(fixed)} "
        f"({number(uncentred)} uncentred)"
    )
    verdict = outcome.verdict(name, Estimate(learned - fixed, error, *OF_GROUPS), numbers=numbers)
    if need(study.run, "positional_basis").shape[1] - 1 < LEAST_POSITIONS:
        verdict = untestable(verdict.claim, f"{numbers}; fewer than {LEAST_POSITIONS} positions")
    criterion = outcome.criterion(name)
    free = unless_noise(study, study.run, verdict, criterion, lambda basis: without_noise(basis) - fixed)
    outcome.verdicts.append(free)


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
    learned = torch.from_numpy(need(run, "positional_basis")[:, 1:]).double()
    layers, positions, width = learned.shape
    fixed = sinusoidal(positions + 1, width + width % 2)[1:, :width]
    centred = fixed - fixed.mean(0)
    layer_names = [f"layer {layer}" for layer in range(layers)]
    names = ["sinusoidal, centred", "sinusoidal, as printed", *layer_names]
    numbers = measures(torch.cat([centred[None], fixed[None], learned]))
    outcome.tables["bases"] = pd.DataFrame({"basis": names} | dict(zip(DIFFERENCES, numbers, strict=True)))
    # The fixed encoding has no error; the error of the mean over layers is taken of that mean.
    basis = layer_columns.grouped_basis(study)
    errors = layer_columns.errors_of(basis, lambda p: measures(p).mean(axis=1), np.zeros(len(DIFFERENCES)))
    for name, of_bases, error in zip(DIFFERENCES, numbers, errors, strict=True):
        _judge_difference(study, outcome, name, of_bases, float(error))
    bases = torch.cat([centred[None], learned])
    pictured, options = _pictured(run, bases), ["sinusoidal", *layer_names]
    outcome.draw("gram", by_name("basis", options, lambda place: geometry.gram(pictured, place), grid=True))
    values = torch.linalg.svdvals(bases).numpy()
    outcome.draw("singular-values", drawing.singular_values_against(values[1:], values[0], "sinusoidal"))
    outcome.draw("frequencies", by_name("basis", options, lambda place: geometry.dct(pictured, place)))


@declared("geometry/figure5")
def figure_5(study: Study, outcome: Outcome) -> None:
    run, (mean, _) = study.run, layer_average(study.run, "low_frequency_10")
    outcome.read(
        "energy of the 10 × 10 lowest frequencies, mean over layers",
        with_error(mean.value, mean.error),
        f"additions: about {percent(published.LOW_FREQUENCY_ADDITION)}; GPT-2: 99.7 %",
    )
    share = f"its share of energy at K = 10 is {mean.value:.3f}"
    verdict = smooth_verdict(outcome, study, run, "rough", LEAST_UNSMOOTH_POSITIONS)
    outcome.verdicts.append(of_an_adder(study.model, run, verdict, share))
    shares = [f"low_frequency_{k}" for k in (1, 3, 5, 10)]
    outcome.tables["smoothness"] = run.layers.filter(["layer", *shares])
    pictured = _pictured(run, torch.from_numpy(need(run, "positional_basis")[:, 1:]).double())
    layers = len(run.layers)
    outcome.draw("gram", by_layer(layers, lambda layer: geometry.gram(pictured, layer), grid=True))
    outcome.draw("frequencies", by_layer(layers, lambda layer: geometry.dct(pictured, layer)))
    outcome.draw("smoothness", figures_layers.low_frequency(run))
