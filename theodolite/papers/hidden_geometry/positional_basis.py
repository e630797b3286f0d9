"""The positional basis by layer: Tables 4 to 6, its principal components (Figs. 1 and 24), its spectrum (Fig. 3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from theodolite.judging import UNTESTABLE, Criterion, Estimate, Estimates, Verdict, bracketed, judge
from theodolite.papers.experiment import Experiment
from theodolite.papers.hidden_geometry import criteria
from theodolite.papers.hidden_geometry.layer_columns import closest_model, smooth_verdict
from theodolite.papers.hidden_geometry.low_rank import energy_within_rank, low_rank_verdict
from theodolite.passes.run import Run
from theodolite.report import published
from theodolite.report.data import Floats, error_of, layer_estimates, mean_over_layers, need, value_of
from theodolite.report.drawing import experiments as drawing
from theodolite.report.drawing import geometry
from theodolite.report.exhibit import by_layer, exhibit
from theodolite.report.measures import SONG
from theodolite.report.outcome import Outcome, Reading
from theodolite.system.wording import number, percent, with_error

if TYPE_CHECKING:
    from theodolite.papers.experiment import Study


NOISY = 0.5
"""Share of sampling noise in a curve from which on it is not judged."""


def _against_published(
    run: Run, name: str, title: str, rows: published.Rows, place: str, *, log: bool = False
) -> tuple[list[Reading], dict[str, pd.DataFrame], list]:
    """A layer column beside a published table: the means, all rows as a table, and the figure."""
    values, errors = value_of(run, name), error_of(run, name)
    model = closest_model(run)
    printed = ", ".join(
        f"{bracketed(*mean_over_layers(row)[:2])} on {text}"
        for text, row in zip(published.TEXTS, rows[model], strict=True)
    )
    mean = bracketed(*mean_over_layers(values)[:2])
    readings = [Reading(f"{title}, mean (sd) over layers", mean, f"{model}: {printed}")]
    measured = pd.DataFrame({"layer": range(len(values)), name: values, f"{name}_se": errors})
    paper = pd.DataFrame(
        [
            {"model": model, "text": text} | {f"layer {layer}": value for layer, value in enumerate(row)}
            for model in published.MODELS
            for text, row in zip(published.TEXTS, rows[model], strict=True)
        ]
    )
    figure = exhibit(
        name.replace("_", "-"),
        f"{title[0].upper()}{title[1:]}, layer by layer",
        drawing.against_published(run, name, rows, title, errors, log=log),
        f"The thick line is this run, with its standard errors; the thin ones are {place}: one colour per model, "
        "dotted on GitHub, solid on OpenWebText, dashed on WikiText. Their 13 layers are rescaled to this depth.",
        "the thick line among the thin ones of its kind of model.",
        f"{SONG}, {place}",
        wide=True,
    )
    return readings, {"this_run": measured, "published": paper}, [figure]


def _table_4(study: Study) -> Outcome:
    run = study.run
    readings, tables, exhibits = _against_published(run, "rank", "ScreeNOT rank", published.RANK, "Table 4")
    claim = "The positional basis has a low rank at every layer (Table 4)"
    return Outcome(readings, [low_rank_verdict(run, claim, every=True)], tables, exhibits)


def _highest(run: Run, claim: str, name: str, criterion: Criterion, first: int) -> Verdict:
    values = value_of(run, name)[first:]
    if not np.isfinite(values).any():
        return Verdict(claim, UNTESTABLE, f"this run has no {name}")
    worst = int(np.nanargmax(values))
    what = f"highest {name.replace('_', ' ')} of {len(values)} layers, at layer {worst + first}"
    return judge(
        claim, what, Estimate(float(values[worst]), float(error_of(run, name)[first + worst])), criterion
    )


def _table_5(study: Study) -> Outcome:
    parts = _against_published(
        study.run, "stable_rank", "stable rank", published.STABLE_RANK, "Table 5", log=True
    )
    claim = "The positional basis has a low stable rank at every layer after the first (Table 5)"
    verdict = _highest(study.run, claim, "stable_rank", criteria.STABLE_RANK, first=1)
    return Outcome(parts[0], [verdict], parts[1], parts[2])


def _table_6(study: Study) -> Outcome:
    parts = _against_published(
        study.run, "relative_norm", "relative norm", published.RELATIVE_NORM, "Table 6"
    )
    verdict = judge(
        "The positional basis is a significant part of the hidden states (Table 6, section 3.1)",
        "relative norm",
        layer_estimates(study.run, "relative_norm"),
        criteria.SIGNIFICANT,
    )
    return Outcome(parts[0], [verdict], parts[1], parts[2])


def roughness(basis: Tensor) -> Floats:
    """Σ‖p_{t+1} − p_t‖² / 2Σ‖p_t − p̄‖² · n/(n−1) of (N, n, d): 1 for positions in random order, near 0 on a curve.

    Von Neumann's ratio: one less the correlation of neighbours.
    """
    centred = basis - basis.mean(1, keepdim=True)
    steps = basis.diff(dim=1).square().sum((1, 2)) / (basis.shape[1] - 1)
    spread = centred.square().sum((1, 2)) / basis.shape[1]
    return (steps / (2 * spread) * (basis.shape[1] - 1) / basis.shape[1]).numpy()


def turns(plane: Tensor) -> Floats:
    """Turns about its own centre, net, that a curve makes in its plane: (N, n, 2) → (N)."""
    centred = plane - plane.mean(1, keepdim=True)
    angle = torch.atan2(centred[..., 1], centred[..., 0])
    step = torch.remainder(angle.diff(dim=1) + math.pi, 2 * math.pi) - math.pi
    return (step.sum(1).abs() / (2 * math.pi)).numpy()


def shape_of(run: Run) -> pd.DataFrame:
    """Of every layer: scale, share of energy in two directions, and the curve on these two, as it is drawn.

    `sampling_noise`: share of the curve's variance that the mean over C contexts has by chance, at most (from the
    spread of the kept context vectors). `smooth_roughness` is the roughness with it taken out; where it is half of
    the variance or more there is no curve to judge, and it is NaN.
    """
    basis = torch.from_numpy(need(run, "positional_basis")[:, 1:]).double()
    plane = torch.from_numpy(need(run, "positional_pca")[:, 1:, :2]).double()
    cvec = torch.from_numpy(need(run, "cvec_pca")[:, :, :2]).double()
    contexts = run.provenance["corpus"]["contexts"]
    noise = (cvec.var(1).sum(-1) / contexts / plane.var(1).sum(-1)).numpy()
    rough = roughness(plane)
    within = np.where(noise < NOISY, noise, np.nan)
    return pd.DataFrame(
        {
            "layer": range(len(basis)),
            "scale": (torch.linalg.matrix_norm(basis, 2) / basis.shape[1] ** 0.5).numpy(),
            "share_of_two_directions": (plane.square().sum((1, 2)) / basis.square().sum((1, 2))).numpy(),
            "roughness": rough,
            "sampling_noise": noise,
            "smooth_roughness": np.clip((rough - within) / (1 - within), 0, None),
            "turns": turns(plane),
        }
    )


def _principal_components(run: Run, place: str) -> Outcome:
    shape = shape_of(run)
    layers, smooth = len(shape), shape["smooth_roughness"].to_numpy()
    verdicts = [
        judge(
            f"Positions form a continuous curve ({place})",
            "roughness on two directions (mean squared step over that in random order, sampling noise taken out)",
            Estimate(smooth),
            criteria.CONTINUOUS,
        ),
        judge(
            f"The curve is low-dimensional ({place})",
            "share of its energy in two directions",
            Estimate(shape["share_of_two_directions"].to_numpy()),
            criteria.DOMINANT,
        ),
        judge(
            f"The curve is often a spiral ({place})",
            "turns about its centre, of curves that are continuous",
            Estimates(
                np.where(
                    np.isnan(smooth), np.nan, np.where(criteria.CONTINUOUS.met(smooth), shape["turns"], 0.0)
                )
            ),
            criteria.SPIRAL_TURNS,
        ),
    ]
    means = {name: mean_over_layers(shape[name].to_numpy())[:2] for name in shape.columns[2:]}
    readings = [
        Reading("share of energy in two directions, mean (sd)", bracketed(*means["share_of_two_directions"])),
        Reading(
            "roughness of the curve on these two (random order: 1)",
            bracketed(*means["smooth_roughness"]),
            "“continuous”",
        ),
        Reading("turns about the centre", bracketed(*means["turns"]), "“often spiral”"),
    ]
    picture = exhibit(
        "principal-components",
        "Positions and context vectors on two principal components",
        geometry.spiral(run, layers // 2),
        "Each layer's positional basis (violet: early, green: late) on its two leading directions, with context "
        "vectors (red) on the same plane. Each axis of each picture has its own scale.",
        "a smooth curve in every layer; a spiral makes a whole turn or more about its centre, a random walk about "
        "two thirds of one.",
        f"{SONG}, {place}",
        choice=by_layer(layers, lambda layer: geometry.spiral_traces(run, layer), grid=True),
        wide=True,
    )
    waves = exhibit(
        "waves",
        "The first three components against position",
        geometry.waves(run, layers // 2),
        "The components of the curve, one line each.",
        "slow waves, each with about half a period more than the one before.",
        f"{SONG}, section 3",
        choice=by_layer(layers, lambda layer: geometry.waves_traces(run, layer)),
        wide=True,
    )
    return Outcome(readings, verdicts, {"shape": shape}, [picture, waves])


def _figure_1(study: Study) -> Outcome:
    outcome = _principal_components(study.run, "Fig. 1")
    scale = outcome.tables["shape"]["scale"].to_numpy()
    growth = float(scale.max() / scale[0]) if scale[0] > 0 else math.nan
    widest = int(scale.argmax())
    what = f"scale of the largest component at layer {widest} over that at layer 0"
    claim = "Principal components have dramatically increasing scales across layers (Fig. 1)"
    outcome.verdicts.append(judge(claim, what, growth, criteria.TENFOLD))
    return outcome


def _figure_24(study: Study) -> Outcome:
    run = study.random_run()
    outcome = _principal_components(run, "Fig. 24, on random tokens")
    persists = smooth_verdict(
        run, "On random tokens the positional basis stays smooth (section 4.1, Fig. 24)"
    )
    runs = {} if run is study.run else {"random": run.provenance}
    return Outcome(outcome.readings, [*outcome.verdicts, persists], outcome.tables, outcome.exhibits, runs)


def _figure_3(study: Study) -> Outcome:
    run = study.run
    ranks = np.nan_to_num(value_of(run, "rank")).astype(int)
    energy = energy_within_rank(run)
    table = pd.DataFrame({"layer": range(len(ranks)), "rank": ranks, "energy_within_rank": energy})
    singular_values = need(run, "singular_values")
    for index in range(singular_values.shape[1]):
        table[f"singular_value_{index + 1}"] = singular_values[:, index]
    smooth, _, error = mean_over_layers(value_of(run, "low_frequency_10"), error_of(run, "low_frequency_10"))
    readings = [
        Reading("share of energy within the rank", percent(mean_over_layers(energy)[0])),
        Reading("energy of the 10 × 10 lowest frequencies", with_error(smooth, error), "GPT-2: 99.7 %"),
    ]
    verdicts = [
        judge(
            "A few singular values dominate (Fig. 3, left)",
            f"share of the energy of P within its rank, of {number(ranks.min())} to {number(ranks.max())}",
            Estimates(energy),
            criteria.DOMINANT,
        ),
        smooth_verdict(run, "Energies are concentrated mostly in the low frequencies (Fig. 3, right)"),
    ]
    spectrum = exhibit(
        "singular-values",
        "The 60 largest singular values of P",
        geometry.singular_values(run),
        "Over the largest, with a large dot at the rank that ScreeNOT keeps; violet layers are early, green ones late.",
        "a sharp drop after about ten values.",
        f"{SONG}, Fig. 3, left",
    )
    frequencies = exhibit(
        "frequencies",
        "The 10 × 10 lowest frequencies of the Gram matrix",
        geometry.dct(run, len(ranks) // 2),
        "Magnitude of each coefficient of the two-dimensional cosine transform over the largest, in decades.",
        "weight in the upper left corner.",
        f"{SONG}, Fig. 3, right",
        choice=by_layer(len(ranks), lambda layer: geometry.dct_traces(run, layer)),
    )
    return Outcome(readings, verdicts, {"spectrum": table}, [spectrum, frequencies])


def _experiment(
    name: str, title: str, paper: str, make: Callable[[Study], Outcome], *needs: str
) -> Experiment:
    return Experiment(f"geometry/{name}", title, paper, needs, make)


_BASIS = "arrays.positional_basis"

POSITIONAL = [
    _experiment(
        "table4",
        "ScreeNOT rank at every layer",
        "Ranks of 6 to 18 (Table 4)",
        _table_4,
        "layers.rank",
        _BASIS,
    ),
    _experiment(
        "table5",
        "Stable rank at every layer",
        "Stable ranks below 8 after layer 0 (Table 5)",
        _table_5,
        "layers.stable_rank",
    ),
    _experiment(
        "table6",
        "Relative norm at every layer",
        "Most relative norms are bigger than 10 % (section 3.1, Table 6)",
        _table_6,
        "layers.relative_norm",
    ),
    _experiment(
        "figure1",
        "Principal components of positions, with context vectors, at every layer",
        "Positions form a low-dimensional, continuous and often spiral shape across layers (abstract, Fig. 1)",
        _figure_1,
        "arrays.positional_pca",
        "arrays.cvec_pca",
        _BASIS,
    ),
    _experiment(
        "figure3",
        "Singular values of P and the frequencies of its Gram matrix",
        "A sharp change in the singular values; energies mostly in the low frequencies (sections 3.1 and 3.2, Fig. 3)",
        _figure_3,
        "arrays.singular_values",
        "arrays.dct",
        _BASIS,
    ),
    _experiment(
        "figure24",
        "Principal components of positions on random tokens",
        "The low-rank spiral persists for sequences of randomly sampled tokens (section 4.1, Fig. 24)",
        _figure_24,
        "model",
        _BASIS,
    ),
]
