"""Figure 4 of Bao et al. 2024: the lower bound of the attention entropy. It comes out the same for every model."""

from __future__ import annotations

import math

import pandas as pd
import plotly.graph_objects as go
import torch

from theodolite.report import style
from theodolite.report.exhibit import by_name
from theodolite.report.measures import BAO, ZHAI
from theodolite.report.outcome import Outcome
from theodolite.system.wording import number
from theodolite.theory import entropy_lower_bound
from theodolite_papers.drawing import localization as drawing
from theodolite_papers.drawing.localization import Line
from theodolite_papers.experiment import Study, experiment

LENGTHS = (16, 64, 512, 4096)
NU = torch.linspace(0, 30, 601, dtype=torch.float64)

BOUNDS = {
    "exact": ("corrected", Line("exact bound", style.VERMILLION, width=2.6)),
    "asymptotic": ("asymptotic", Line("large T, with exp(−ν)", style.BLUE, "dot")),
    "published": ("published", Line("large T as printed, with exp(−ν/2)", style.GREY, "dash")),
}
HIGHEST = Line("ln T, the highest entropy", style.GREEN, "dashdot", 1.4)


@experiment(
    "localization/figure4",
    "The lower bound of the attention entropy",
    "The bound is unimodal in ν and vanishes as the spectral norm grows (section 5, eq. 9, Fig. 4)",
    needs=("nothing",),
)
def entropy_bound(study: Study, outcome: Outcome) -> None:
    bounds = {
        length: {name: entropy_lower_bound(NU, length, variant) for name, (variant, _) in BOUNDS.items()}
        for length in LENGTHS
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
        for length in (LENGTHS[0], LENGTHS[-1])
    )
    outcome.read(
        f"largest difference of the large-T form with exp(−ν) from the exact bound, T = {LENGTHS[0]} and "
        f"{LENGTHS[-1]}",
        f"{shortest} and {longest}",
    )
    outcome.tables["bounds"] = pd.DataFrame(
        [
            {"tokens": length, "nu": float(NU[at]), "highest": math.log(length)}
            | {name: float(curve[at]) for name, curve in bounds[length].items()}
            for length in LENGTHS
            for at in range(0, len(NU), 10)
        ]
    )

    def draw(place: int) -> go.Figure:
        length = LENGTHS[place]
        lines = [*(line for _, line in BOUNDS.values()), HIGHEST]
        curves = [
            curve.numpy() for curve in (*bounds[length].values(), torch.full_like(NU, math.log(length)))
        ]
        titles = ("ν = ‖XXᵀ‖₂ ‖W_QK‖₂/λ", "nats")
        return drawing.curves(NU.numpy(), lines, curves, titles, yaxis={"rangemode": "tozero"})

    outcome.figure(
        "bounds",
        "Lower bound of the attention entropy",
        by_name("tokens", [f"T = {length}" for length in LENGTHS], draw),
        "The exact bound for T tokens, its form for large T, eq. 9 as printed, and the highest entropy that T "
        "outcomes have.",
        "a printed curve far above ln T, which no entropy exceeds; the exact one starts at ln T and only falls.",
        f"{ZHAI}, Theorem 3.1; {BAO}, eq. 9 and Fig. 4",
        wide=True,
    )
