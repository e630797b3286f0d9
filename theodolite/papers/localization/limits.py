"""Figures 3 and 4 of Bao et al. 2024: the limit in which ρ(θ) localizes, and the lower bound of the entropy.

They need no model and no text.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd
import plotly.graph_objects as go
import torch
from torch import Tensor

from theodolite.judging import Criterion, Verdict, judge
from theodolite.papers.experiment import Study, experiment
from theodolite.papers.localization.curve_shape import THETA
from theodolite.report import style
from theodolite.report.data import Floats
from theodolite.report.drawing import localization as drawing
from theodolite.report.drawing.localization import CORRECTED, PUBLISHED, Line
from theodolite.report.exhibit import Exhibit, by_name
from theodolite.report.measures import BAO, ZHAI
from theodolite.report.outcome import Outcome, Reading
from theodolite.system.wording import number
from theodolite.theory.entropy import entropy_lower_bound
from theodolite.theory.propagation import propagation

VARIANTS = ("published", "corrected")

READINGS_3 = ((128.0, 0.01), (512.0, 0.01), (256.0, 0.02))
"""ξ and η of Fig. 3: both of its caption (ξη = 1.28 and 5.12), and that of the text, η = 0.02 with ξη = 5.12."""

IN_WINDOW = Criterion("at least", 0.9, "of ∫ρ within the limit of Lemma 2; the tenth of leeway is ours")
HEAD_WIDTH = 128  # of the largest heads in use

LENGTHS_4 = (16, 64, 512, 4096)
NU = torch.linspace(0, 30, 601, dtype=torch.float64)
LARGE_NU = 50.0
NO_MORE = Criterion("at most", 0.0, "no entropy of T outcomes is above ln T")
RISES = Criterion("at least", 0.01, "“unimodal”, with a peak away from ν = 0: a hundredth of a nat (ours)")
GONE = Criterion("at most", 1e-3, "“vanishes” read as: a thousandth of a nat (ours)")


def window(r: float) -> tuple[float, float]:
    """Where Lemma 2's limit of ρ is 1, for r > 0: from ½ to 1, or to ½ + 1/r."""
    return 0.5, min(1.0, 0.5 + 1 / r)


def _inside(curve: Tensor, r: float) -> float:
    low, high = window(r)
    return float((curve * ((low <= THETA) & (high >= THETA))).sum() / curve.sum())


LABELS_3 = [f"ξ = {xi:g}, η = {eta:g} (ξη = {xi * eta:g})" for xi, eta in READINGS_3]

Curves = dict[str, list[Tensor]]
"""Variant → ρ(θ) for each of `READINGS_3`."""


@experiment(
    "localization/figure3",
    "ρ(θ) near the limit in which it localizes",
    "ρ localizes at the middle site when ξη is above the threshold of 2 (Fig. 3, Lemma 2)",
    needs=("nothing",),
)
def figure_3(study: Study, outcome: Outcome) -> None:
    xi, eta = torch.tensor(READINGS_3, dtype=torch.float64).T
    curves = {name: list(propagation(THETA, xi, eta, name)) for name in VARIANTS}

    def values(place: int) -> list[Floats]:
        return [curves[name][place].numpy() for name in VARIANTS]

    def lines(place: int) -> go.Figure:
        both, limits = (PUBLISHED, CORRECTED), {"range": [-0.02, 1.15]}
        return drawing.curves(THETA.numpy(), both, values(place), ("θ", "ρ(θ)"), yaxis=limits)

    picture = Exhibit(
        "curves",
        "ρ(θ) at large ξ and small η",
        drawing.with_windows(lines(0), {"½ ≤ θ ≤ ½ + 1/5.12": window(5.12)}),
        "Probability that the token at θ propagates, for both readings of Fig. 3: those of its caption, and the one of "
        "the text. Shaded: where Lemma 2's limit for r = 5.12 is 1.",
        "a step up at ½ that stays up for ξη = 1.28, and comes down again at 0.695 for ξη = 5.12.",
        f"{BAO}, Fig. 3 and Lemma 2",
        choice=by_name("ξ and η", LABELS_3, lines, grid=True),
        wide=True,
    )
    columns = {
        f"{name}, {label}": curves[name][place].numpy()
        for place, label in enumerate(LABELS_3)
        for name in VARIANTS
    }
    table = pd.DataFrame({"theta": THETA.numpy()} | columns)
    outcome.readings += _comparisons_3(curves)
    outcome.verdicts += _verdicts_3(curves)
    outcome.tables |= {"curves": table}
    outcome.exhibits += [picture]


def _verdicts_3(curves: Curves) -> list[Verdict]:
    verdicts = []
    for place, claim in enumerate(
        (
            "Below the threshold r = 2, ρ is late-site (Fig. 3, ξη = 1.28)",
            "Above the threshold r = 2, ρ localizes at the middle site (Fig. 3, ξη = 5.12, as in its caption)",
            "Above the threshold r = 2, ρ localizes at the middle site (ξη = 5.12 with η = 0.02, as in the text)",
        )
    ):
        r = READINGS_3[place][0] * READINGS_3[place][1]
        low, high = window(r)
        what = f"share of ∫ρ at {low:g} ≤ θ ≤ {high:.3g}, corrected"
        verdict = judge(claim, what, _inside(curves["corrected"][place], r), IN_WINDOW)
        printed = f"with the printed variance: {number(_inside(curves['published'][place], r))}"
        verdicts.append(replace(verdict, evidence=f"{verdict.evidence}; {printed}"))
    return verdicts


def _comparisons_3(curves: Curves) -> list[Reading]:
    gap = max(
        float((a - b).abs().max()) for a, b in zip(curves["published"], curves["corrected"], strict=True)
    )
    apart = float((curves["corrected"][1] - curves["corrected"][2]).abs().max())
    return [
        Reading(
            "η where ρ is localized", "ξ = 512 or 256: both drawn", "caption: 5.12/512 = 0.01; text: 0.02"
        ),
        Reading("largest difference of the two readings of ξη = 5.12, corrected", number(apart)),
        Reading("largest |published − corrected| ρ", number(gap), "0"),
        *(
            Reading(f"least width d with |ξ| ≤ √d (eq. 5), ξ = {xi}", number(float(xi**2)))
            for xi in (128, 512)
        ),
        Reading(
            f"largest |ξ| of a head of width {HEAD_WIDTH}, whose symmetric part has rank {2 * HEAD_WIDTH} at most",
            number(math.sqrt(2 * HEAD_WIDTH)),
            "√d",
        ),
    ]


BOUNDS = {
    "exact": ("corrected", Line("exact bound", style.VERMILLION, width=2.6)),
    "asymptotic": ("asymptotic", Line("large T, with exp(−ν)", style.BLUE, "dot")),
    "published": ("published", Line("large T as printed, with exp(−ν/2)", style.GREY, "dash")),
}
HIGHEST = Line("ln T, the highest entropy", style.GREEN, "dashdot", 1.4)


def _bounds(length: int) -> dict[str, Tensor]:
    return {name: entropy_lower_bound(NU, length, variant) for name, (variant, _) in BOUNDS.items()}


def _rise(bound: Tensor) -> float:
    """How far a curve rises above where it starts."""
    return float(bound.max() - bound[0])


@experiment(
    "localization/figure4",
    "The lower bound of the attention entropy",
    "The bound is unimodal in ν and vanishes as the spectral norm grows (section 5, eq. 9, Fig. 4)",
    needs=("nothing",),
)
def figure_4(study: Study, outcome: Outcome) -> None:
    bounds = {length: _bounds(length) for length in LENGTHS_4}

    lines = [*(line for _, line in BOUNDS.values()), HIGHEST]

    def drawn(length: int) -> go.Figure:
        highest = torch.full_like(NU, math.log(length))
        values = [curve.numpy() for curve in (*bounds[length].values(), highest)]
        titles = ("ν = ‖XXᵀ‖₂ ‖W_QK‖₂/λ", "nats")
        return drawing.curves(NU.numpy(), lines, values, titles, yaxis={"rangemode": "tozero"})

    picture = Exhibit(
        "bounds",
        "Lower bound of the attention entropy",
        drawn(LENGTHS_4[0]),
        "The exact bound for T tokens, its form for large T, eq. 9 as printed, and the highest entropy that T "
        "outcomes have.",
        "a printed curve far above ln T, which no entropy exceeds; the exact one starts at ln T and only falls.",
        f"{ZHAI}, Theorem 3.1; {BAO}, eq. 9 and Fig. 4",
        choice=by_name(
            "tokens", [f"T = {length}" for length in LENGTHS_4], lambda place: drawn(LENGTHS_4[place])
        ),
        wide=True,
    )
    table = pd.DataFrame(
        [
            {"tokens": length, "nu": float(NU[at]), "highest": math.log(length)}
            | {name: float(curve[at]) for name, curve in bounds[length].items()}
            for length in LENGTHS_4
            for at in range(0, len(NU), 10)
        ]
    )
    outcome.readings += _comparisons_4(bounds)
    outcome.verdicts += _verdicts_4(bounds)
    outcome.tables |= {"bounds": table}
    outcome.exhibits += [picture]


def _excess(bounds: dict[int, dict[str, Tensor]], name: str) -> tuple[float, int]:
    """How far a form exceeds ln T at most, and the T of that."""
    return max((float(curves[name].max()) - math.log(length), length) for length, curves in bounds.items())


def _verdicts_4(bounds: dict[int, dict[str, Tensor]]) -> list[Verdict]:
    lengths = f"T = {', '.join(map(str, bounds))}; ν up to {float(NU[-1]):g}"
    excess, worst = _excess(bounds, "published")
    far = max(float(entropy_lower_bound(LARGE_NU, length)) for length in bounds)
    rises = {name: max(_rise(curves[name]) for curves in bounds.values()) for name in BOUNDS}
    unimodal = judge(
        "The bound is unimodal in ν, with a peak (section 5, Fig. 4)",
        f"largest rise of the exact bound above its value at ν = 0, in nats; {lengths}",
        rises["exact"],
        RISES,
    )
    other_forms = (
        f"as printed: {number(rises['published'])}, at large T with exp(−ν): {number(rises['asymptotic'])}"
    )
    return [
        judge(
            "Eq. 9 as printed is a lower bound of an entropy (section 5)",
            f"its largest excess over ln T, in nats, at T = {worst}; {lengths}",
            excess,
            NO_MORE,
        ),
        judge(
            "The exact bound of Zhai et al. is a lower bound of an entropy",
            f"its largest excess over ln T, in nats, to nine decimals; {lengths}",
            round(_excess(bounds, "exact")[0], 9),
            NO_MORE,
        ),
        replace(unimodal, evidence=f"{unimodal.evidence}; {other_forms}"),
        judge(
            "The bound vanishes as ‖W_QK‖₂ grows (section 5)",
            f"largest exact bound at ν = {LARGE_NU:g}, in nats",
            far,
            GONE,
        ),
    ]


def _comparisons_4(bounds: dict[int, dict[str, Tensor]]) -> list[Reading]:
    rows = []
    for length, curves in bounds.items():
        peak = int(curves["published"].argmax())
        printed = f"{number(float(curves['published'][peak]))} at ν = {number(float(NU[peak]))}"
        exact = f"{number(float(curves['exact'].max()))} at ν = 0; exact bound at the printed peak: "
        exact += number(float(curves["exact"][peak]))
        rows.append(
            Reading(f"peak of the bound, T = {length}, ln T = {math.log(length):.3f}", exact, printed)
        )
    shortest, longest = (
        float((bounds[length]["asymptotic"] - bounds[length]["exact"]).abs().max())
        for length in (LENGTHS_4[0], LENGTHS_4[-1])
    )
    rows.append(
        Reading(
            f"largest difference of the large-T form with exp(−ν) from the exact bound, T = {LENGTHS_4[0]} and "
            f"{LENGTHS_4[-1]}",
            f"{number(shortest)} and {number(longest)}",
        )
    )
    return rows
