"""Figures 1 to 4 of Bao et al. 2024: the piecewise linear softmax, ρ(θ) and its limit, the bound of the entropy."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from torch import Tensor

from theodolite.report import style
from theodolite.system.wording import number
from theodolite.theory import entropy_lower_bound, piecewise_softmax, propagation
from theodolite_papers import drawing
from theodolite_papers.drawing import CORRECTED, PUBLISHED, Line
from theodolite_papers.experiment import Outcome, Study, by_name, declared

BOUND_LENGTHS = (16, 64, 512, 4096)
NU = torch.linspace(0, 30, 601, dtype=torch.float64)

BOUNDS = {
    "exact": ("corrected", Line("exact bound", style.VERMILLION, width=2.6)),
    "asymptotic": ("asymptotic", Line("large T, with exp(−ν)", style.BLUE, "dot")),
    "published": ("published", Line("large T as printed, with exp(−ν/2)", style.GREY, "dash")),
}
HIGHEST = Line("ln T, the highest entropy", style.GREEN, "dashdot", 1.4)


@declared("localization/figure4")
def entropy_bound(study: Study, outcome: Outcome) -> None:
    bounds = {
        length: {name: entropy_lower_bound(NU, length, variant) for name, (variant, _) in BOUNDS.items()}
        for length in BOUND_LENGTHS
    }
    for length, curves in bounds.items():
        peak = int(curves["published"].argmax())
        exact = f"{number(float(curves['exact'].max()))} at ν = 0; exact bound at the printed peak: "
        outcome.read(
            f"peak of the bound, T = {length}, ln T = {math.log(length):.3f}",
            exact + number(float(curves["exact"][peak])),
            f"{number(float(curves['published'][peak]))} at ν = {number(float(NU[peak]))}",
        )
    shortest, longest = (
        number(float((bounds[length]["asymptotic"] - bounds[length]["exact"]).abs().max()))
        for length in (BOUND_LENGTHS[0], BOUND_LENGTHS[-1])
    )
    what = "largest difference of the large-T form with exp(−ν) from the exact bound"
    lengths = f"T = {BOUND_LENGTHS[0]} and {BOUND_LENGTHS[-1]}"
    outcome.read(f"{what}, {lengths}", f"{shortest} and {longest}")
    tables = []
    for length, curves in bounds.items():
        first = {"tokens": length, "nu": NU[::10].numpy(), "highest": math.log(length)}
        tables.append(pd.DataFrame(first | {name: curve[::10].numpy() for name, curve in curves.items()}))
    outcome.tables["bounds"] = pd.concat(tables, ignore_index=True)

    def draw(place: int) -> go.Figure:
        length = BOUND_LENGTHS[place]
        lines = [*(line for _, line in BOUNDS.values()), HIGHEST]
        values = [*bounds[length].values(), torch.full_like(NU, math.log(length))]
        titles, zero = ("ν = ‖XXᵀ‖₂ ‖W_QK‖₂/λ", "nats"), {"rangemode": "tozero"}
        return drawing.curves(NU.numpy(), lines, [each.numpy() for each in values], titles, yaxis=zero)

    drawn = by_name("tokens", [f"T = {length}" for length in BOUND_LENGTHS], draw)
    outcome.draw("bounds", drawn)


LENGTHS = (2, 8, 40, 64)
"""Numbers of inputs of the softmax: that of Fig. 1, one between, and those of the simulation and the experiments."""

VARIANTS = ("published", "corrected")
THETA = torch.linspace(0, 1, 401, dtype=torch.float64)
TABLE_STEP = 10  # of THETA, in tables and maps

XIS = (-20.0, -10.0, -5.0, -2.0, -1.0, 1.0, 2.0, 5.0, 10.0, 20.0)
ETAS = (0.001, 0.1, 0.5, 1.0, 2.0, 5.0, 20.0)
"""Ours: the text names ξ = ±1 and ±5 and η = 0.001 and 0.5, and the figure's other values are not printed."""
MAP_XI = torch.linspace(-20, 20, 81, dtype=torch.float64)


NEAR_LIMIT = ((128.0, 0.01), (512.0, 0.01), (256.0, 0.02))
"""ξ and η of Fig. 3: both of its caption (ξη = 1.28 and 5.12), and that of the text, η = 0.02 with ξη = 5.12."""
HEAD_WIDTH = 128  # of the largest heads in use


def _one_raised_logit(logit: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """S_1 and S̃_1 where the first of T inputs is `logit` and the others are 0."""
    inputs = torch.zeros(len(logit), length, dtype=torch.float64)
    inputs[:, 0] = logit
    return inputs.softmax(-1)[:, 0], piecewise_softmax(inputs)[:, 0]


@declared("localization/figure1")
def softmax(study: Study, outcome: Outcome) -> None:
    logit = torch.linspace(-10, 80, 1801, dtype=torch.float64)
    pairs = {length: _one_raised_logit(logit, length) for length in LENGTHS}
    for length, (soft, piecewise) in pairs.items():
        gap = (soft - piecewise).abs()
        two = "largest |S − S̃| for two inputs, at |ω₁ − ω₂| = 2"
        others = f"the same for {length} inputs, at ω₁ = {number(float(logit[gap.argmax()]), 2)}"
        outcome.read(two if length == 2 else others, number(float(gap.max())))
    tables = []
    for length, curves in pairs.items():
        columns = zip(("logit", "softmax", "piecewise"), (logit, *curves), strict=True)
        tables.append(pd.DataFrame({"inputs": length} | {name: of[::9].numpy() for name, of in columns}))
    outcome.tables["inputs"] = pd.concat(tables, ignore_index=True)
    side = torch.linspace(-5, 5, 41, dtype=torch.float64)
    logit_pairs = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1)
    first, linear = logit_pairs.softmax(-1)[..., 0].numpy(), piecewise_softmax(logit_pairs)[..., 0].numpy()
    outcome.draw(
        "plane",
        drawing.maps(
            {"softmax S": first, "piecewise linear S̃": linear, "S̃ − S": linear - first},
            (side.numpy(), side.numpy()),
            ("ω₁", "ω₂", "of the first input"),
            (0.0, 1.0),
            signed=("S̃ − S",),
        ),
    )

    def draw(place: int) -> go.Figure:
        lines = (Line("softmax", style.BLUE), Line("piecewise linear", style.VERMILLION))
        values = [curve.numpy() for curve in pairs[LENGTHS[place]]]
        return drawing.curves(logit.numpy(), lines, values, ("ω₁, the others 0", "value of input 1"))

    outcome.draw("inputs", by_name("inputs", [f"T = {length}" for length in LENGTHS], draw, grid=True))


@declared("localization/figure2")
def by_spectrum(study: Study, outcome: Outcome) -> None:
    xi, eta = (torch.tensor(values, dtype=torch.float64) for values in (XIS, ETAS))
    published, corrected = (propagation(THETA, xi[:, None], eta, name).numpy() for name in VARIANTS)
    gap = np.abs(published - corrected)
    at = np.unravel_index(gap.argmax(), gap.shape)
    where = f"ξ = {XIS[at[0]]:g}, η = {ETAS[at[1]]:g}, θ = {float(THETA[at[2]]):g}"
    outcome.read(f"largest |published − corrected| ρ, at {where}", number(float(gap.max())), "0")
    outcome.read("variance of s over η² at θ = 1", "7/12 (2θ² − 2θ + 7/12)", "31/12 (2θ² + 7/12)")
    theta = THETA[::TABLE_STEP]
    table = pd.DataFrame(product(XIS, ETAS, theta.tolist()), columns=["xi", "eta", "theta"])
    for name, curves in zip(VARIANTS, (published, corrected), strict=True):
        table[name] = curves[..., ::TABLE_STEP].ravel()
    outcome.tables["curves"] = table
    planes = [propagation(theta, MAP_XI[:, None], eta, name).permute(1, 2, 0).numpy() for name in VARIANTS]

    def draw_map(place: int) -> go.Figure:
        first, second = (plane[place] for plane in planes)
        pictures = {"published": first, "corrected": second, "published − corrected": first - second}
        axes = (MAP_XI.numpy(), theta.numpy())
        return drawing.maps(pictures, axes, ("ξ", "θ", "ρ"), (0.0, 1.0), signed=("published − corrected",))

    def draw_curves(place: int) -> go.Figure:
        return drawing.propagation_curves(THETA.numpy(), ETAS, published[place], corrected[place])

    drawn = by_name("η", [f"η = {value:g}" for value in ETAS], draw_map)
    outcome.draw("maps", drawn)
    outcome.draw("curves", by_name("ξ", [f"ξ = {value:g}" for value in XIS], draw_curves, grid=True))


def window(r: float) -> tuple[float, float]:
    """Where Lemma 2's limit of ρ is 1, for r > 0: from ½ to 1, or to ½ + 1/r."""
    return 0.5, min(1.0, 0.5 + 1 / r)


@declared("localization/figure3")
def near_the_limit(study: Study, outcome: Outcome) -> None:
    xi, eta = torch.tensor(NEAR_LIMIT, dtype=torch.float64).T
    published, corrected = (propagation(THETA, xi, eta, name).numpy() for name in VARIANTS)
    printed = "caption: 5.12/512 = 0.01; text: 0.02"
    outcome.read("η where ρ is localized", "ξ = 512 or 256: both drawn", printed)
    pairs = (corrected[1], corrected[2]), (published, corrected)
    apart, gap = (float(np.abs(a - b).max()) for a, b in pairs)
    outcome.read("largest difference of the two readings of ξη = 5.12, corrected", number(apart))
    outcome.read("largest |published − corrected| ρ", number(gap), "0")
    for value in (128, 512):
        outcome.read(f"least width d with |ξ| ≤ √d (eq. 5), ξ = {value}", number(float(value**2)))
    outcome.read(
        f"largest |ξ| of a head of width {HEAD_WIDTH}, whose symmetric part has rank {2 * HEAD_WIDTH} at most",
        number(math.sqrt(2 * HEAD_WIDTH)),
        "√d",
    )
    labels = [f"ξ = {xi:g}, η = {eta:g} (ξη = {xi * eta:g})" for xi, eta in NEAR_LIMIT]
    columns = {"theta": THETA.numpy()}
    for label, first, second in zip(labels, published, corrected, strict=True):
        columns |= {f"published, {label}": first, f"corrected, {label}": second}
    outcome.tables["curves"] = pd.DataFrame(columns)

    def draw(place: int) -> go.Figure:
        values, titles, y = [published[place], corrected[place]], ("θ", "ρ(θ)"), {"range": [-0.02, 1.15]}
        lines = drawing.curves(THETA.numpy(), (PUBLISHED, CORRECTED), values, titles, yaxis=y)
        return drawing.with_windows(lines, {"½ ≤ θ ≤ ½ + 1/5.12": window(5.12)})

    outcome.draw("curves", by_name("ξ and η", labels, draw, grid=True))
