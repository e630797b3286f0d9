"""Smooth and unsmooth positional bases: the fixed sinusoidal encoding (Fig. 7), and models trained on addition "
"(Fig. 5)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from theodolite.judging import OPEN, UNTESTABLE, Estimate, Verdict, judge
from theodolite.papers.experiment import Study, experiment
from theodolite.papers.hidden_geometry import criteria
from theodolite.papers.hidden_geometry.addition_check import reads_additions, why_not_an_adder
from theodolite.papers.hidden_geometry.layer_columns import smooth_verdict
from theodolite.passes.run import Run
from theodolite.report import published
from theodolite.report.data import error_of, evenly, mean_over_layers, need, value_of
from theodolite.report.drawing import experiments as drawing
from theodolite.report.drawing import geometry
from theodolite.report.drawing import layers as figures_layers
from theodolite.report.exhibit import Exhibit, by_layer, by_name
from theodolite.report.measures import SONG
from theodolite.report.outcome import Outcome, Reading
from theodolite.system.wording import number, percent, with_error
from theodolite.theory.smoothness import dct2, low_frequency_ratio, normalised_gram, sinusoidal

SHOWN_POSITIONS = 128
SHOWN_FREQUENCIES = 10
NEARBY = 32
"""The diagonal of a Gram matrix is compared with the diagonal a 32nd of the positions away."""

ENERGY = 0.9


def spike(gram: Tensor) -> Tensor:
    """How far the diagonal of a normalised Gram matrix (…, n, n) stands out: 1 − mean cosine at distance n/32."""
    distance = max(1, round(gram.shape[-1] / NEARBY))
    return 1 - gram.diagonal(distance, -2, -1).mean(-1)


def directions_needed(basis: Tensor) -> Tensor:
    """Directions that hold 0.9 of the energy of (…, n, d)."""
    energy = torch.linalg.svdvals(basis).square()
    share = energy.cumsum(-1) / energy.sum(-1, keepdim=True)
    return (share < ENERGY).sum(-1) + 1


def _measures(bases: Tensor, names: list[str]) -> pd.DataFrame:
    grams = normalised_gram(bases)
    return pd.DataFrame(
        {
            "basis": names,
            "spike": spike(grams).numpy(),
            "directions": directions_needed(bases).numpy(),
            "low_frequency_10": low_frequency_ratio(grams, (10,))[..., 0].numpy(),
        }
    )


def _pictured(run: Run, bases: Tensor) -> Run:
    """The run with the Gram matrices and frequencies of other bases (N, n, d), positions 1…n, for its figures."""
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


@experiment(
    "geometry/figure7",
    "The sinusoidal encoding of Vaswani et al. against the learned basis",
    "The learned basis is smooth at the diagonal, drops sooner and has more low frequencies (appendix B.1, Fig. 7)",
    needs=("arrays.positional_basis", "layers.low_frequency_10"),
)
def figure_7(study: Study, outcome: Outcome) -> None:
    run = study.run
    learned = torch.from_numpy(need(run, "positional_basis")[:, 1:]).double()
    layers, positions, width = learned.shape
    fixed = sinusoidal(positions + 1, width + width % 2)[1:, :width]
    centred = fixed - fixed.mean(0)
    layer_names = [f"layer {layer}" for layer in range(layers)]
    names = ["sinusoidal, centred", "sinusoidal, as printed", *layer_names]
    table = _measures(torch.cat([centred[None], fixed[None], learned]), names)
    figure_names = ["sinusoidal", *layer_names]
    pictured = _pictured(run, torch.cat([centred[None], learned]))
    values = torch.linalg.svdvals(torch.cat([centred[None], learned])).numpy()
    exhibits = [
        Exhibit(
            "gram",
            "Gram matrices: the fixed encoding, and the learned basis of every layer",
            geometry.gram(pictured, 0),
            "Cosines between positions. The first picture is the sinusoidal encoding of Vaswani et al. 2017 at the "
            "same positions and width, centred as the learned bases are.",
            "a strong ridge on the diagonal of the fixed encoding, smooth shading in the learned ones.",
            f"{SONG}, Fig. 7 against Fig. 2",
            choice=by_name("basis", figure_names, lambda place: geometry.gram(pictured, place), grid=True),
            wide=True,
        ),
        Exhibit(
            "singular-values",
            "Singular values of the fixed encoding and the learned bases",
            drawing.singular_values_against(values[1:], values[0], "sinusoidal"),
            "Over the largest; the thick line is the fixed encoding, violet layers are early, green ones late.",
            "learned curves that drop sooner.",
            f"{SONG}, Fig. 7 against Fig. 3, left",
        ),
        Exhibit(
            "frequencies",
            "The 10 × 10 lowest frequencies",
            geometry.dct(pictured, 0),
            "Magnitude of each coefficient of the two-dimensional cosine transform over the largest, in decades.",
            "more weight away from the corner in the fixed encoding.",
            f"{SONG}, Fig. 7 against Fig. 3, right",
            choice=by_name("basis", figure_names, lambda place: geometry.dct(pictured, place)),
        ),
    ]
    readings = [
        Reading(
            f"{what}: sinusoidal, learned",
            f"{number(table[name][0])}, {number(table[name][2:].mean())}",
            published_words,
        )
        for what, published_words, name in (
            ("how far the diagonal stands out", "“large spiky values”, “smooth”", "spike"),
            (f"directions that hold {percent(ENERGY)} of the energy", "“a sharper drop”", "directions"),
            ("share of energy at K = 10", "“more low-frequency”", "low_frequency_10"),
        )
    ]
    outcome.readings += readings
    outcome.verdicts += _differences(run, table)
    outcome.tables |= {"bases": table}
    outcome.exhibits += exhibits


def _differences(run: Run, table: pd.DataFrame) -> list[Verdict]:
    """The three differences that appendix B.1 lists, of means over layers from the centred fixed encoding."""
    claims = (
        (
            "The learned Gram matrix is smooth where the fixed one spikes at the diagonal",
            "spike",
            criteria.SMALLER,
        ),
        ("The learned basis is more pronouncedly low-rank", "directions", criteria.SMALLER),
        ("The learned basis has more low-frequency coefficients", "low_frequency_10", criteria.LARGER),
    )
    what = {
        "spike": "1 − cosine at a 32nd of the positions from the diagonal",
        "directions": f"directions that hold {percent(ENERGY)} of the energy",
        "low_frequency_10": "share of energy at K = 10",
    }
    verdicts = []
    too_short = len(need(run, "positional_basis")[0]) - 1 < criteria.LEAST_POSITIONS
    for claim, name, criterion in claims:
        column = table[name].to_numpy(dtype=np.float64)
        learned = column[2:].mean()
        values = (
            f"{what[name]}: learned {number(learned)} (mean over {len(column) - 2} layers), sinusoidal "
            f"{number(column[0])} ({number(column[1])} uncentred)"
        )
        if too_short:
            why = f"{values}; fewer than {criteria.LEAST_POSITIONS} positions"
            verdicts.append(Verdict(f"{claim} (appendix B.1)", UNTESTABLE, why))
            continue
        error = mean_over_layers(value_of(run, name), error_of(run, name))[2]
        verdicts.append(
            judge(
                f"{claim} (appendix B.1)",
                f"{values}; difference",
                Estimate(learned - column[0], error),
                criterion,
            )
        )
    return verdicts


@experiment(
    "geometry/figure5",
    "Gram matrix and frequencies of positions at every layer, as for models trained on addition",
    "Models trained on addition have fractured Gram matrices: the ten lowest frequencies hold about 50 % (Fig. 5)",
    needs=("arrays.positional_basis", "layers.low_frequency_10"),
)
def figure_5(study: Study, outcome: Outcome) -> None:
    run = study.run
    basis = torch.from_numpy(need(run, "positional_basis")[:, 1:]).double()
    pictured = _pictured(run, basis)
    layers = len(basis)
    mean, _, error = mean_over_layers(value_of(run, "low_frequency_10"), error_of(run, "low_frequency_10"))
    claim = (
        "A model trained on addition has a positional basis that is not smooth (section 4.3, appendix D.3)"
    )
    share = f"its share of energy at K = 10 is {mean:.3f}"
    if not reads_additions(run):
        why = f"the corpus of this run contains no addition problems ({share})"
        verdict = Verdict(
            claim, UNTESTABLE, f"{why}: survey a model trained on addition on addition problems"
        )
    else:
        verdict = smooth_verdict(run, claim, criteria.UNLIKE_LANGUAGE, criteria.LEAST_UNSMOOTH_POSITIONS)
        if verdict.answer not in OPEN and (unknown := why_not_an_adder(study)):
            verdict = Verdict(claim, UNTESTABLE, f"{unknown} ({share})")
    readings = [
        Reading(
            "energy of the 10 × 10 lowest frequencies, mean over layers",
            with_error(mean, error),
            f"additions: about {percent(published.LOW_FREQUENCY_ADDITION)}; GPT-2: 99.7 %",
        )
    ]
    exhibits = [
        Exhibit(
            "gram",
            "Gram matrix of positions",
            geometry.gram(pictured, layers // 2),
            "Cosines between positions, at every layer.",
            "smooth shading in language models; breaks and fractured regions in models trained on addition.",
            f"{SONG}, Fig. 5, left; Figs. 18 and 21",
            choice=by_layer(layers, lambda layer: geometry.gram(pictured, layer), grid=True),
            wide=True,
        ),
        Exhibit(
            "frequencies",
            "The 10 × 10 lowest frequencies",
            geometry.dct(pictured, layers // 2),
            "Magnitude of each coefficient of the two-dimensional cosine transform over the largest, in decades.",
            "weight beyond the corner where position is not smooth.",
            f"{SONG}, Figs. 20 and 23",
            choice=by_layer(layers, lambda layer: geometry.dct(pictured, layer)),
        ),
        Exhibit(
            "smoothness",
            "Share of low frequencies, layer by layer",
            figures_layers.low_frequency(run),
            "Share of the energy in the K × K lowest frequencies at every layer.",
            "values near 1 at K = 10 in language models, about one half in models trained on addition.",
            f"{SONG}, Table 3 and appendix D.3",
        ),
    ]
    columns = ["layer", *(f"low_frequency_{k}" for k in (1, 3, 5, 10))]
    table = run.layers[[name for name in columns if name in run.layers]].copy()
    outcome.readings += readings
    outcome.verdicts += [verdict]
    outcome.tables |= {"smoothness": table}
    outcome.exhibits += exhibits
