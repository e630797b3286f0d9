"""Figures 1 to 5 of Bao et al. 2024: the piecewise linear softmax, ρ(θ) and its limit, the bound of the entropy, and
simulated signal propagation and entropy against four predictions of ρ."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float64
from torch import Tensor
from torch.nn import functional

from theodolite import theory
from theodolite.attention.summary import empirical_propagation
from theodolite.estimates import Estimate, Floats
from theodolite.judging import Verdict, mix_of
from theodolite.report import style
from theodolite.report.drawing.grammar import dots
from theodolite.system.wording import number, with_error
from theodolite.theory import entropy_lower_bound, piecewise_softmax, propagation
from theodolite_papers import drawing
from theodolite_papers.drawing import Line
from theodolite_papers.experiment import Outcome, Study, by_name, declared, haar_rotation
from theodolite_papers.rank_correlation import rank_correlation

UNIFORM_EDGE = 2.5
COVARIANCES = {"isotropic": "Σ = I", "anisotropic": "Σ = RᵀR/d, entries of R from Unif(−2.5, 2.5)"}
"""Of the walks' steps (Bao et al. 2024, section 5)."""


@dataclass(frozen=True)
class WalkSetting:
    """Sizes of the simulation, as in the paper, and pairs of mean and scale, which are ours."""

    width: int = 128
    length: int = 40  # T, tokens per walk
    walks: int = 300  # for each W_QK
    draws: int = 10  # W_QK for each pair
    means: tuple[float, ...] = (0.0, 0.1, 0.3, 1.0)
    scales: tuple[float, ...] = (0.1, 0.5, 2.0)  # of the eigenvalues w ~ N(mean, scale²) of W_QK

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """(mean, scale), the scales of one mean together."""
        return list(product(self.means, self.scales))

    @property
    def temperature(self) -> float:
        """λ = √d, “commonly” (section 2); the paper does not say what its simulation takes."""
        return math.sqrt(self.width)


@dataclass(frozen=True)
class Simulation:
    """The counts of a simulation of P pairs and D draws of W_QK for each, and the exact spectra.

    propagates: share of the walks in which token i propagates to the last query. entropy: mean over walks of the
    entropy of softmax(ω) in nats, ω the logits of the last query. eigenvalues: of Σ^½ W_QK Σ^½. walks: of each W_QK.
    """

    propagates: Float64[Tensor, "pairs draws tokens"]
    entropy: Float64[Tensor, "pairs draws"]
    entropy_variance: Float64[Tensor, "pairs draws"]
    eigenvalues: Float64[Tensor, "pairs draws width"]
    walks: int

    @property
    def propagation(self) -> Tensor:
        """ρ_1 … ρ_T of every pair, (P, T): mean over draws."""
        return self.propagates.mean(1)

    def propagation_errors(self) -> tuple[Tensor, Tensor]:
        """Compute the standard errors of `propagation`: of the walks alone, with these W_QK; of the draws."""
        return (
            over_walks(self.propagates * (1 - self.propagates) * self.walks / (self.walks - 1), self.walks),
            over_draws(self.propagates),
        )

    def entropy_errors(self) -> tuple[Tensor, Tensor]:
        """Compute these two standard errors of the mean entropy of every pair, (P,) each."""
        return over_walks(self.entropy_variance, self.walks), over_draws(self.entropy)


def over_walks(variance: Tensor, walks: int) -> Tensor:
    """Give the standard error of a mean over draws (dimension 1), each itself a mean over walks of this variance."""
    return (variance.mean(1) / (walks * variance.shape[1])).sqrt()


def over_draws(values: Tensor) -> Tensor:
    """Give the standard error of the mean over draws (dimension 1) from their own spread."""
    return values.std(1) / math.sqrt(values.shape[1])


def simulate_walks(setting: WalkSetting, covariance: str, seed: int) -> Simulation:
    """Simulate random walks and count which tokens propagate.

    x_1 ~ N(0, Σ), x_{t+1} ~ N(x_t, Σ) (Assumption 1); W_QK = B diag(w) Bᵀ with B a uniformly random orthogonal
    matrix; ω = X W_QK x_T/λ. Every draw has its own walks, B and standard normal z; w = mean + scale · z, so
    that pairs differ by mean and scale and not by luck. Σ, of a name of `COVARIANCES`, is drawn once.
    """
    generator = torch.Generator().manual_seed(seed)
    width = setting.width
    uniform = torch.rand(width, width, generator=generator, dtype=torch.float64)
    # Rows of independent normals times `root` have covariance rootᵀ root = Σ.
    root = torch.eye(width, dtype=torch.float64)
    if covariance == "anisotropic":
        root = (2 * uniform - 1) * UNIFORM_EDGE / math.sqrt(width)
    drawn = [_draw(setting, root, generator) for _ in range(setting.draws)]
    propagates, entropy, variance, eigenvalues = (torch.stack(part, 1) for part in zip(*drawn, strict=True))
    return Simulation(propagates, entropy, variance, eigenvalues, setting.walks)


def _draw(
    setting: WalkSetting, root: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw one W_QK a pair, on the same walks: shares (P, T), entropy (P), its variance (P), eigenvalues (P, d)."""
    size = setting.walks, setting.length, setting.width
    steps = torch.randn(size, generator=generator, dtype=torch.float64)
    tokens = (steps @ root).cumsum(1)
    basis = haar_rotation(setting.width, generator)
    standard = torch.randn(setting.width, generator=generator, dtype=torch.float64)
    rows = []
    for mean, scale in setting.pairs:
        w_qk = (basis * (mean + scale * standard)) @ basis.T
        logits = (tokens @ (tokens[:, -1:] @ w_qk).mT).squeeze(-1) / setting.temperature
        entropy = torch.special.entr(logits.softmax(-1)).sum(-1)
        rows.append(
            (
                empirical_propagation(logits).double().mean(0),
                entropy.mean(),
                entropy.var(),
                torch.linalg.eigvalsh(root @ w_qk @ root.T),  # those of Σ^½ W_QK Σ^½, as root = QΣ^½
            )
        )
    shares, means, variances, eigenvalues = (torch.stack(part) for part in zip(*rows, strict=True))
    return shares, means, variances, eigenvalues


PUBLISHED, CORRECTED = Line("published", style.GREY, "dash"), Line("corrected", style.BLUE)
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
    tables = []
    for length, curves in bounds.items():
        peak = int(curves["published"].argmax())
        highest, at_peak, printed = (
            number(float(each))
            for each in (curves["exact"].max(), curves["exact"][peak], curves["published"][peak])
        )
        what = f"peak of the bound, T = {length}, ln T = {math.log(length):.3f}"
        here = f"{highest} at ν = 0; exact bound at the printed peak: {at_peak}"
        outcome.read(what, here, f"{printed} at ν = {number(float(NU[peak]))}")
        first = {"tokens": length, "nu": NU[::10].numpy(), "highest": math.log(length)}
        tables.append(pd.DataFrame(first | {name: curve[::10].numpy() for name, curve in curves.items()}))
    outcome.tables["bounds"] = pd.concat(tables, ignore_index=True)
    shortest, longest = (
        number(float((bounds[length]["asymptotic"] - bounds[length]["exact"]).abs().max()))
        for length in (BOUND_LENGTHS[0], BOUND_LENGTHS[-1])
    )
    what = "largest difference of the large-T form with exp(−ν) from the exact bound"
    lengths = f"T = {BOUND_LENGTHS[0]} and {BOUND_LENGTHS[-1]}"
    outcome.read(f"{what}, {lengths}", f"{shortest} and {longest}")

    def draw(place: int) -> go.Figure:
        length = BOUND_LENGTHS[place]
        lines = [*(line for _, line in BOUNDS.values()), HIGHEST]
        values = [*bounds[length].values(), torch.full_like(NU, math.log(length))]
        titles, zero = ("ν = ‖XXᵀ‖₂ ‖W_QK‖₂/λ", "nats"), {"rangemode": "tozero"}
        return drawing.curves(NU.numpy(), lines, [each.numpy() for each in values], titles, yaxis=zero)

    outcome.draw("bounds", by_name("tokens", [f"T = {length}" for length in BOUND_LENGTHS], draw))


LENGTHS = (2, 8, 40, 64)  # of the softmax: that of Fig. 1, one between, the simulation's, ours
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


@declared("localization/figure1")
def softmax(study: Study, outcome: Outcome) -> None:
    logit = torch.linspace(-10, 80, 1801, dtype=torch.float64)
    pairs, tables = {}, []
    for length in LENGTHS:
        raised = functional.pad(logit[:, None], (0, length - 1))  # the first of T inputs, the others 0
        soft, piecewise = pairs[length] = raised.softmax(-1)[:, 0], piecewise_softmax(raised)[:, 0]
        gap = (soft - piecewise).abs()
        two = "largest |S − S̃| for two inputs, at |ω₁ − ω₂| = 2"
        others = f"the same for {length} inputs, at ω₁ = {number(float(logit[gap.argmax()]), 2)}"
        outcome.read(two if length == 2 else others, number(float(gap.max())))
        columns = {"logit": logit, "softmax": soft, "piecewise": piecewise}
        tables.append(
            pd.DataFrame({"inputs": length} | {name: of[::9].numpy() for name, of in columns.items()})
        )
    outcome.tables["inputs"] = pd.concat(tables, ignore_index=True)
    side = torch.linspace(-5, 5, 41, dtype=torch.float64)
    logit_pairs = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1)
    first, linear = logit_pairs.softmax(-1)[..., 0].numpy(), piecewise_softmax(logit_pairs)[..., 0].numpy()
    pictures = {"softmax S": first, "piecewise linear S̃": linear, "S̃ − S": linear - first}
    axes, titles = (side.numpy(), side.numpy()), ("ω₁", "ω₂", "of the first input")
    outcome.draw("plane", drawing.maps(pictures, axes, titles, (0.0, 1.0), signed=("S̃ − S",)))

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

    lines = drawing.in_order([f"η = {value:g}" for value in ETAS])
    lines += [
        replace(line, name=f"{line.name}, published", dash="dash", width=1.4, legend=False) for line in lines
    ]

    def draw_curves(place: int) -> go.Figure:
        values = [*corrected[place], *published[place]]
        return drawing.curves(THETA.numpy(), lines, values, ("θ", "ρ(θ)"), yaxis=drawing.SHARE)

    outcome.draw("maps", by_name("η", [f"η = {value:g}" for value in ETAS], draw_map))
    outcome.draw("curves", by_name("ξ", [f"ξ = {value:g}" for value in XIS], draw_curves, grid=True))


def window(r: float) -> tuple[float, float]:
    """Return where Lemma 2's limit of ρ is 1, for r > 0: from ½ to 1, or to ½ + 1/r."""
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
    rank = 2 * HEAD_WIDTH
    what = f"largest |ξ| of a head of width {HEAD_WIDTH}, whose symmetric part has rank {rank} at most"
    outcome.read(what, number(math.sqrt(rank)), "√d")
    labels = [f"ξ = {xi:g}, η = {eta:g} (ξη = {xi * eta:g})" for xi, eta in NEAR_LIMIT]
    columns = {"theta": THETA.numpy()}
    for label, first, second in zip(labels, published, corrected, strict=True):
        columns |= {f"published, {label}": first, f"corrected, {label}": second}
    outcome.tables["curves"] = pd.DataFrame(columns)

    def draw(place: int) -> go.Figure:
        values, titles, y = [published[place], corrected[place]], ("θ", "ρ(θ)"), {"range": [-0.02, 1.15]}
        drawn = drawing.curves(THETA.numpy(), (PUBLISHED, CORRECTED), values, titles, yaxis=y)
        look = {"fillcolor": style.translucent(style.CATEGORIES[0], style.BAND), "line_width": 0}
        named = {"annotation_text": "½ ≤ θ ≤ ½ + 1/5.12", "annotation_position": "top left"}
        return drawn.add_vrect(*window(5.12), **look, **named)

    outcome.draw("curves", by_name("ξ and η", labels, draw, grid=True))


SETTING = WalkSetting()
PREDICTED = ("published", "corrected", "finite", "exact")
LINES = (PUBLISHED, CORRECTED, Line("finite length", style.GREEN), Line("exact", style.VERMILLION))
"""The predictions of ρ of random walks, and how they are drawn."""

FAR = 3.0  # standard errors
LEAST_ENTROPY = 0.02  # nats, where the axis begins


def predictions(sim: Simulation, setting: WalkSetting) -> Tensor:
    """Predict ρ_1 … ρ_T of every pair and drawn spectrum, (4, P, D, T): those of `PREDICTED`."""
    spectra, size, temperature = sim.eigenvalues, setting.length, setting.temperature
    trace, square = spectra.sum(-1), spectra.square().sum(-1)
    theta = torch.arange(1, size + 1, dtype=torch.float64) / size
    xi, eta = trace / square.sqrt(), square.sqrt() / temperature
    curves = [propagation(theta, xi, eta, name) for name in ("published", "corrected")]
    curves.append(theory.propagation_finite(trace, square, square, size, temperature))
    curves.append(theory.propagation_exact(spectra, size, temperature))
    return torch.stack(curves)


def share_beyond_error(sim: Simulation, predicted: Tensor) -> Tensor:
    """Compute the share of pairs and positions with a prediction over `FAR` standard errors away, by draw: (…, D).

    The error is that of as many walks with the predicted probability, and at least one walk in all.
    """
    error = (predicted * (1 - predicted) / sim.walks).clamp_min(0).sqrt().clamp_min(1 / sim.walks)
    return ((predicted - sim.propagates).abs() > FAR * error).double().mean((-3, -1))


@declared("localization/figure5")
def figure_5(study: Study, outcome: Outcome) -> None:
    seed = study.provenance.get("seed") or 0
    sims = {name: simulate_walks(SETTING, name, seed) for name in COVARIANCES}
    of_draws = {name: predictions(sim, SETTING) for name, sim in sims.items()}
    predicted = {name: of.mean(2) for name, of in of_draws.items()}
    beyond = {name: share_beyond_error(sim, of_draws[name]) for name, sim in sims.items()}
    gaps = {name: (predicted[name] - sim.propagation).abs() for name, sim in sims.items()}
    for name in COVARIANCES:
        means = zip(PREDICTED, gaps[name].mean((1, 2)).tolist(), strict=True)
        shown = ", ".join(f"{key} {number(gap)}" for key, gap in means)
        outcome.read(f"mean |predicted − simulated| ρ, {name} Σ", shown)
        shares = zip(PREDICTED, beyond[name].mean(1).tolist(), strict=True)
        shown = ", ".join(f"{key} {share:.3f}" for key, share in shares)
        outcome.read(f"share of points beyond {FAR:g} standard errors, {name} Σ", shown)
    entropy = {
        name: (_by_scale(sim.entropy.mean(1)), _by_scale(sim.entropy_errors()[1]))
        for name, sim in sims.items()
    }
    scales = ", ".join(f"{scale:g}" for scale in SETTING.scales)
    for mean, *rows in zip(SETTING.means, *entropy["isotropic"], strict=True):
        entropies = ", ".join(with_error(*pair) for pair in zip(*(row.tolist() for row in rows), strict=True))
        outcome.read(f"entropy in nats at mean {mean:g}, scales {scales}, Σ = I", entropies)
    outcome.read("pairs of mean and scale; temperature", "ours; λ = √d", "not printed")
    _judge_predictions(outcome, sims, torch.stack([*gaps.values()]), torch.stack([*beyond.values()]))
    _judge_localization(outcome, sims)
    outcome.tables |= {"pairs": _pairs(sims, gaps), "propagation": _points(sims, predicted)}
    positions = np.arange(1, SETTING.length + 1, dtype=np.float64)
    for name, sim in sims.items():

        def draw(place: int, sim: Simulation = sim, curves: Tensor = predicted[name]) -> go.Figure:
            walks, draws = (error[place].numpy() for error in sim.propagation_errors())
            layout: dict[str, Any] = {"yaxis": drawing.SHARE, "legend": {"font": {"size": 10}}}
            values, titles = [*curves[:, place].numpy()], ("token i", "ρᵢ")
            drawn = drawing.curves(positions, LINES, values, titles, height=440, **layout)
            of, at = "simulated, error over", (positions, sim.propagation[place].numpy(), None)
            hover = "token %{x}: simulated %{y:.3f} ± %{error_y.array:.2g} over draws<extra></extra>"
            bar = style.error_bars(draws, width=4, thickness=1.0)
            own: dict[str, Any] = {"marker": {"size": 5}, "error_y": bar}
            drawn.add_trace(dots(*at, f"{of} draws of W_QK", style.ORANGE, hover, **own))
            own = {"marker": {"size": 1}, "error_y": style.error_bars(walks, width=0, thickness=2.5)}
            return drawn.add_trace(dots(*at, f"{of} walks", style.PURPLE, "", hoverinfo="skip", **own))

        pairs = [f"{mean:g} ± {scale:g}" for mean, scale in SETTING.pairs]
        drawn = by_name("mean ± scale", pairs, draw, grid=True)
        outcome.draw(name, drawn, "simulated", name=name, covariance=COVARIANCES[name])

    of_means = drawing.in_order([f"mean {mean:g}" for mean in SETTING.means], marker=7)

    def draw_entropy(place: int) -> go.Figure:
        """Draw the mean entropy against the scale of the eigenvalues, a line a mean; logarithmic axes."""
        x = {
            "type": "log",
            "tickvals": SETTING.scales,
            "ticktext": [f"{scale:g}" for scale in SETTING.scales],
        }
        y = drawing.TWOS | {"range": [math.log10(LEAST_ENTROPY), math.log10(5)]}
        values, errors = map(list, entropy[[*COVARIANCES][place]])
        titles, at = ("scale of the eigenvalues", "entropy in nats"), np.array(SETTING.scales)
        return drawing.curves(at, of_means, values, titles, errors=errors, xaxis=x, yaxis=y)

    outcome.draw("entropy", by_name("Σ", list(COVARIANCES), draw_entropy))


def _by_scale(values: Tensor) -> Floats:
    return values.reshape(len(SETTING.means), len(SETTING.scales)).numpy()


def _judge_predictions(outcome: Outcome, sims: dict[str, Simulation], gaps: Tensor, beyond: Tensor) -> None:
    """Judge each prediction by its largest gap, and the exact one by `share_beyond_error`, (Σ, 4, …) each."""
    points = f"{len(COVARIANCES)} Σ, {len(SETTING.pairs)} pairs, {SETTING.length} positions"
    walks = SETTING.walks * SETTING.draws
    errors = torch.stack([sim.propagation_errors()[0] for sim in sims.values()])
    for key, of_key in zip(PREDICTED, gaps.unbind(1), strict=True):
        worst = np.unravel_index(int(of_key.argmax()), of_key.shape)
        mean, scale = SETTING.pairs[worst[1]]
        where = f"{[*COVARIANCES][worst[0]]} Σ, mean {mean:g}, scale {scale:g}, token {worst[2] + 1}"
        gap = Estimate(float(of_key[worst]), float(errors[worst]), walks, "walks")
        outcome.judge(key, gap, points=points, where=where)
    of_exact = beyond[:, PREDICTED.index("exact")].mean(0).numpy()
    outcome.judge("own-error", Estimate.mean(of_exact, "draws"), points=points, far=FAR)


def _judge_localization(outcome: Outcome, sims: dict[str, Simulation]) -> None:
    widths = {name: theory.curve_width(sim.propagates) for name, sim in sims.items()}
    for claim, along in (("smaller-scales", "mean"), ("larger-means", "scale")):
        # The least favourable of all differences, paired by draw, with its error, and where it is.
        gains = []
        for name, of in widths.items():
            grid = of.unflatten(0, (len(SETTING.means), len(SETTING.scales)))[1:]
            rows = grid[:, -1] - grid[:, 0] if along == "mean" else grid[0] - grid[-1]
            levels = SETTING.means[1:] if along == "mean" else SETTING.scales
            for level, row in zip(levels, rows, strict=True):
                error = float(over_draws(row[None])[0])
                gains.append((float(row.mean()), error, f"{name} Σ, {along} {level:g}"))
        value, error, where = min(gains)
        outcome.judge(claim, Estimate(value, error, SETTING.draws, "draws"), where=where)
    outcome.judge("stands-for", _over_pairs(widths["isotropic"], widths["anisotropic"]))
    judge_at_fixed_means(outcome, sims, widths)


def judge_at_fixed_means(outcome: Outcome, sims: dict[str, Simulation], widths: dict[str, Tensor]) -> None:
    """Judge A2 of section 5 at fixed means but 0: each mean and Σ is a part, some may be so and others not."""
    parts: dict[str, list[Verdict]] = {"entropy-of-scale": [], "entropy-of-localized": []}
    for name, sim in sims.items():
        by_mean = (values.split(len(SETTING.scales)) for values in (sim.entropy, widths[name]))
        for mean, values, shares in zip(SETTING.means, *by_mean, strict=True):
            if mean == 0:
                continue
            estimates = (
                Estimate.mean((values[0] - values[-1]).numpy(), "draws"),
                # Of three scales it has four values, between −1 and 1, which all draws may share by chance.
                _over_pairs(shares, values).floored(2.0),
            )
            for (key, of_key), estimate in zip(parts.items(), estimates, strict=True):
                of_key.append(outcome.verdict(key, estimate, where=f"{name} Σ, mean {mean:g}"))
    outcome.verdicts += [mix_of(outcome.sentence(key), of_key) for key, of_key in parts.items()]


def _over_pairs(first: Tensor, second: Tensor) -> Estimate:
    """Correlate two numbers (P, D) over pairs by ranks (Spearman): mean over draws."""
    return Estimate.mean(rank_correlation(first.T.numpy(), second.T.numpy()), "draws")


def _pairs(sims: dict[str, Simulation], gaps: dict[str, Tensor]) -> pd.DataFrame:
    parts = []
    for name, sim in sims.items():
        square, widths = sim.eigenvalues.square().sum(-1), theory.curve_width(sim.propagates)
        xi, eta = sim.eigenvalues.sum(-1) / square.sqrt(), square.sqrt() / SETTING.temperature
        walks, draws = sim.entropy_errors()
        columns = {"xi": xi.mean(1), "eta": eta.mean(1), "r": (xi * eta).mean(1)}
        columns |= {"width": widths.mean(1), "width_se": over_draws(widths), "entropy": sim.entropy.mean(1)}
        columns |= {"entropy_se_walks": walks, "entropy_se_draws": draws}
        columns |= {f"error_{key}": gap for key, gap in zip(PREDICTED, gaps[name].amax(-1), strict=True)}
        part = _with_columns(name, pd.DataFrame(SETTING.pairs, columns=["mean", "scale"]), columns)
        parts.append(part.assign(regime=theory.regime(part["xi"].to_numpy(), part["eta"].to_numpy())))
    return pd.concat(parts, ignore_index=True)


def _points(sims: dict[str, Simulation], predicted: dict[str, Tensor]) -> pd.DataFrame:
    tokens = range(1, SETTING.length + 1)
    index = [(mean, scale, token) for (mean, scale), token in product(SETTING.pairs, tokens)]
    parts = []
    for name, sim in sims.items():
        walks, draws = sim.propagation_errors()
        columns = {"simulated": sim.propagation, "se_walks": walks, "se_draws": draws}
        columns |= dict(zip(PREDICTED, predicted[name], strict=True))
        parts.append(_with_columns(name, pd.DataFrame(index, columns=["mean", "scale", "token"]), columns))
    return pd.concat(parts, ignore_index=True)


def _with_columns(covariance: str, table: pd.DataFrame, columns: dict[str, Tensor]) -> pd.DataFrame:
    table.insert(0, "covariance", covariance)
    return table.assign(**{key: value.flatten().numpy() for key, value in columns.items()})
