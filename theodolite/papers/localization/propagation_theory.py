"""Figures 1 and 2 of Bao et al. 2024: the piecewise linear softmax, and ρ(θ) as published and as corrected.

They need no model and no text. Limits are in `limits`, a simulation is in `simulated_walks`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from theodolite.attention.piecewise import piecewise_softmax
from theodolite.judging import Criterion, Verdict, judge
from theodolite.papers.experiment import Study, experiment
from theodolite.papers.localization.curve_shape import THETA, centre, spread, width
from theodolite.report import style
from theodolite.report.data import Floats
from theodolite.report.drawing import localization as drawing
from theodolite.report.drawing.localization import Line
from theodolite.report.exhibit import Exhibit, by_name
from theodolite.report.measures import BAO
from theodolite.report.outcome import Outcome, Reading
from theodolite.system.wording import number
from theodolite.theory.propagation import propagation

VARIANTS = ("published", "corrected")

LENGTHS_1 = (2, 8, 40, 64)
"""Numbers of inputs of the softmax: that of Fig. 1, one between, and those of the simulation and the experiments."""

CLOSE = Criterion("at most", 0.2, "“as close to the original softmax as possible” read as: a fifth (ours)")
BEST = Criterion("at most", 1.1, "“as possible”: no clamped line is closer; the tenth of leeway is ours")

XIS = (-20.0, -10.0, -5.0, -2.0, -1.0, 1.0, 2.0, 5.0, 10.0, 20.0)
ETAS = (0.001, 0.1, 0.5, 1.0, 2.0, 5.0, 20.0)
"""Ours: the text names ξ = ±1 and ±5 and η = 0.001 and 0.5, and the figure's other values are not printed."""

SOURCE_2 = f"{BAO}, Fig. 2 and eq. 6; corrected: v = 2θ² − 2θ + 7/12"

SMALL, LARGE, TINY, MIDDLE = 1.0, 5.0, 0.001, 0.5
"""Of section 4: “|ξ| ≤ 1”, “|ξ| ≥ 5”, “η = 0.001”, “η ≥ 0.5”."""

MAP_XI = torch.linspace(-20, 20, 81, dtype=torch.float64)
TABLE_STEP = 10  # of THETA, in tables and maps

NARROWS = Criterion(
    "at most",
    1.01,
    "“concentrates on fewer tokens as η increases”: no step up; the hundredth of leeway is ours",
)
FLATTER = Criterion("at most", 1.0, "“by contrast, … relatively uniformly”: less than any curve with |ξ| ≥ 5")
ONE_SIDE = Criterion("at least", 0.95, "“only late-site tokens”; the twentieth of leeway is ours")
AT_HALF = Criterion("at most", 0.1, "“localizes around θ = 0.5”; the tenth of leeway is ours")
VANISHES = Criterion("at most", 0.1, "“degenerates to zero” read as: a tenth at the largest η drawn (ours)")


def _one_raised_logit(logit: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """S_1 and S̃_1 where the first of T inputs is `logit` and the others are 0."""
    inputs = torch.zeros(len(logit), length, dtype=torch.float64)
    inputs[:, 0] = logit
    return inputs.softmax(-1)[:, 0], piecewise_softmax(inputs)[:, 0]


def best_clamped_line() -> tuple[float, float]:
    """Slope a and largest error of the closest clamp(½ + aδ, 0, 1) to softmax of two inputs, by their difference δ."""
    difference = np.linspace(0, 40, 40_001)
    softmax = 1 / (1 + np.exp(-difference))

    def largest(slope: float) -> float:
        return float(np.abs(softmax - np.clip(0.5 + slope * difference, 0, 1)).max())

    minimum = minimize_scalar(largest, bounds=(0.05, 0.25), method="bounded", options={"xatol": 1e-9})
    return float(minimum.x), float(minimum.fun)


Pairs = dict[int, tuple[Tensor, Tensor]]
"""Number of inputs → S_1 and S̃_1 along one input."""


@experiment(
    "localization/figure1",
    "Softmax and its piecewise linear approximation",
    "Softmax is linearised at 0 and clamped, as close to the original as possible (section 2, Fig. 1)",
    needs=("nothing",),
)
def figure_1(study: Study, outcome: Outcome) -> None:
    logit = torch.linspace(-10, 80, 1801, dtype=torch.float64)
    pairs = {length: _one_raised_logit(logit, length) for length in LENGTHS_1}
    gaps = {length: (soft - piecewise).abs() for length, (soft, piecewise) in pairs.items()}
    worst = {length: float(gap.max()) for length, gap in gaps.items()}
    table = pd.DataFrame(
        [
            {"inputs": length, "logit": at, "softmax": s, "piecewise": p}
            for length, (first, second) in pairs.items()
            for at, s, p in zip(logit[::9].tolist(), first[::9].tolist(), second[::9].tolist(), strict=True)
        ]
    )
    readings = [
        Reading("largest |S − S̃| for two inputs, at |ω₁ − ω₂| = 2", number(worst[2])),
        *(
            Reading(
                f"the same for {length} inputs, at ω₁ = {number(float(logit[gaps[length].argmax()]), 2)}",
                number(worst[length]),
            )
            for length in LENGTHS_1[1:]
        ),
    ]
    outcome.readings += readings
    outcome.verdicts += _verdicts_1(worst)
    outcome.tables |= {"inputs": table}
    outcome.exhibits += [_plane(), _by_inputs(logit, pairs)]


def _verdicts_1(worst: dict[int, float]) -> list[Verdict]:
    """`worst`: number of inputs → largest |S − S̃|."""
    slope, best = best_clamped_line()
    claim = "The approximation keeps the structure close to the original softmax (section 2)"
    return [
        *(
            judge(f"{claim}, for {length} inputs", "largest |S − S̃|, one input varied", error, CLOSE)
            for length, error in worst.items()
        ),
        judge(
            "The approximation is as close as possible, for two inputs (section 2)",
            f"its largest error over that of the closest clamped line (slope {slope:.3f} in place of ¼)",
            worst[2] / best,
            BEST,
        ),
    ]


def _plane() -> Exhibit:
    side = torch.linspace(-5, 5, 41, dtype=torch.float64)
    logit_pairs = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1)
    soft, piecewise = logit_pairs.softmax(-1)[..., 0].numpy(), piecewise_softmax(logit_pairs)[..., 0].numpy()
    return Exhibit(
        "plane",
        "Softmax and its approximation for two inputs",
        drawing.maps(
            {"softmax S": soft, "piecewise linear S̃": piecewise, "S̃ − S": piecewise - soft},
            (side.numpy(), side.numpy()),
            ("ω₁", "ω₂", "of the first input"),
            (0.0, 1.0),
            signed=("S̃ − S",),
        ),
        "The value of the first of two inputs under softmax, under its first-order expansion at 0 clamped to "
        "[0, 1], and the difference. Both depend on ω₁ − ω₂ alone.",
        "the diagonal, where both agree, and two bands along it where the clamp sets in and they differ most.",
        f"{BAO}, Fig. 1 and section 2",
        wide=True,
    )


def _by_inputs(logit: Tensor, pairs: Pairs) -> Exhibit:
    lines = (Line("softmax", style.BLUE), Line("piecewise linear", style.VERMILLION))

    def drawn(length: int) -> go.Figure:
        titles = ("ω₁, the others 0", "value of input 1")
        return drawing.curves(logit.numpy(), lines, [curve.numpy() for curve in pairs[length]], titles)

    return Exhibit(
        "inputs",
        "One input above the others, by their number",
        drawn(2),
        "Softmax and its approximation of the first of T inputs, the others being 0.",
        "at T = 2 two curves that nearly agree; at T = 40 and 64 softmax has saturated long before the line rises.",
        f"{BAO}, section 2; more than two inputs are ours",
        choice=by_name(
            "inputs",
            [f"T = {length}" for length in LENGTHS_1],
            lambda place: drawn(LENGTHS_1[place]),
            grid=True,
        ),
        wide=True,
    )


def _grid_2(variant: str) -> Tensor:
    """ρ(θ), (ξ, η, θ), of the grid."""
    xi, eta = (torch.tensor(values, dtype=torch.float64) for values in (XIS, ETAS))
    return propagation(THETA, xi[:, None], eta, variant)


def _claims_2(rho: Tensor) -> list[tuple[str, str, float, Criterion]]:
    """The observations below Fig. 2: claim, what is measured, the number, its criterion."""
    xi, eta = np.array(XIS), np.array(ETAS)
    far, near = np.abs(xi) >= LARGE, np.abs(xi) <= SMALL
    widths, spreads, centres = width(rho).numpy(), spread(rho).numpy(), centre(rho, THETA).numpy()
    later = (rho * (THETA > 0.5)).mean(-1).numpy() / rho.mean(-1).numpy()
    tiny, middle = list(ETAS).index(TINY), eta >= MIDDLE
    sides = (later[-1, tiny], 1 - later[0, tiny])
    grid = f"ξ = ±{', ±'.join(f'{x:g}' for x in XIS if x > 0)}; η = {', '.join(f'{x:g}' for x in ETAS)}"
    return [
        (
            "ρ concentrates on fewer tokens as η increases, for |ξ| ≥ 5",
            f"largest ratio of the effective number of positions at one η to that at the η before; {grid}",
            float((widths[far, 1:] / widths[far, :-1]).max()),
            NARROWS,
        ),
        (
            "ρ is relatively uniform regardless of η for |ξ| ≤ 1",
            "largest (max − min)/max over the smallest with |ξ| ≥ 5",
            float(spreads[near].max() / spreads[far].min()),
            FLATTER,
        ),
        (
            "At small η and large |ξ|, only late-site (ξ > 0) or early-site (ξ < 0) tokens propagate",
            f"smaller share of ∫ρ beyond θ = ½ on its own side, η = {TINY:g}, ξ = ±{XIS[-1]:g}",
            float(min(sides)),
            ONE_SIDE,
        ),
        (
            "For η ≥ 0.5 and |ξ| ≥ 5, ρ localizes around θ = ½",
            "largest distance of its centre ∫θρ/∫ρ from ½",
            float(np.abs(centres[far][:, middle] - 0.5).max()),
            AT_HALF,
        ),
        (
            "As η increases, ρ degenerates to zero regardless of ξ",
            f"largest ρ at η = {ETAS[-1]:g}",
            float(rho[:, -1].max()),
            VANISHES,
        ),
    ]


def _verdicts_2(grids: dict[str, Tensor]) -> list[Verdict]:
    """Each claim judged on the corrected curves, with the number of the published ones beside it."""
    verdicts = []
    for corrected, printed in zip(*(_claims_2(grids[name]) for name in reversed(VARIANTS)), strict=True):
        verdict = judge(f"{corrected[0]} (section 4)", *corrected[1:])
        evidence = f"{verdict.evidence}; with the printed variance: {number(printed[2])}"
        verdicts.append(replace(verdict, evidence=evidence))
    return verdicts


@experiment(
    "localization/figure2",
    "Signal propagation ρ(θ) by ξ and η, as published and as corrected",
    "ρ is late-, early- or middle-site by ξ and η, uniform for small |ξ|, and vanishes for large η (section 4, "
    "Fig. 2)",
    needs=("nothing",),
)
def figure_2(study: Study, outcome: Outcome) -> None:
    grids = {name: _grid_2(name) for name in VARIANTS}
    published, corrected = (grids[name].numpy() for name in VARIANTS)
    gap = np.abs(published - corrected)
    at = np.unravel_index(gap.argmax(), gap.shape)
    where = f"ξ = {XIS[at[0]]:g}, η = {ETAS[at[1]]:g}, θ = {float(THETA[at[2]]):g}"
    readings = [
        Reading(f"largest |published − corrected| ρ, at {where}", number(float(gap.max())), "0"),
        Reading("variance of s over η² at θ = 1", "7/12 (2θ² − 2θ + 7/12)", "31/12 (2θ² + 7/12)"),
    ]
    figures = [_maps_2(), _curves_2(published, corrected)]
    outcome.readings += readings
    outcome.verdicts += _verdicts_2(grids)
    outcome.tables |= {"curves": _table_2(published, corrected)}
    outcome.exhibits += figures


def _maps_2() -> Exhibit:
    eta, theta = torch.tensor(ETAS, dtype=torch.float64), THETA[::TABLE_STEP]
    planes = [  # (η, θ, ξ)
        propagation(theta, MAP_XI[:, None], eta, name).permute(1, 2, 0).numpy() for name in VARIANTS
    ]

    def drawn(place: int) -> go.Figure:
        first, second = planes[0][place], planes[1][place]
        return drawing.maps(
            {"published": first, "corrected": second, "published − corrected": first - second},
            (MAP_XI.numpy(), theta.numpy()),
            ("ξ", "θ", "ρ"),
            (0.0, 1.0),
            signed=("published − corrected",),
        )

    return Exhibit(
        "maps",
        "ρ(θ) over ξ, published and corrected",
        drawn(0),
        "Probability that the token at relative position θ propagates, for every ξ; one η at a time. The printed "
        "variance grows towards the end of the context; the right one is symmetric about its middle.",
        "late sites at the right and early ones at the left for small η, a band at θ = ½ for η ≥ 0.5.",
        SOURCE_2,
        choice=by_name("η", [f"η = {value:g}" for value in ETAS], drawn),
        wide=True,
    )


def _curves_2(published: Floats, corrected: Floats) -> Exhibit:
    def drawn(place: int) -> go.Figure:
        return drawing.propagation_curves(THETA.numpy(), ETAS, published[place], corrected[place])

    return Exhibit(
        "curves",
        "ρ(θ) for every η",
        drawn(0),
        "The same as curves: corrected solid, published dashed.",
        "curves for large |ξ| that move from one side to the middle as η grows, and sink.",
        SOURCE_2,
        choice=by_name("ξ", [f"ξ = {value:g}" for value in XIS], drawn, grid=True),
        wide=True,
    )


def _table_2(published: Floats, corrected: Floats) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"xi": xi, "eta": eta, "theta": float(THETA[at]), "published": published[a, b, at]}
            | {"corrected": corrected[a, b, at]}
            for a, xi in enumerate(XIS)
            for b, eta in enumerate(ETAS)
            for at in range(0, len(THETA), TABLE_STEP)
        ]
    )
