"""Figures 1 to 5 of Bao et al. 2024: the piecewise linear softmax, ρ(θ) and its limit, the bound of the entropy, and
simulated signal propagation and entropy against four predictions of ρ."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from torch import Tensor

from theodolite import theory
from theodolite.estimates import Estimate, Floats
from theodolite.judging import Verdict, mix_of
from theodolite.measure.rank_correlation import rank_correlation
from theodolite.report import style
from theodolite.system.wording import number, with_error
from theodolite.theory import entropy_lower_bound, piecewise_softmax, propagation
from theodolite_papers import drawing
from theodolite_papers.drawing import CORRECTED, PUBLISHED, Line
from theodolite_papers.experiment import Outcome, Study, by_name, declared
from theodolite_papers.localization.walks import (
    COVARIANCES,
    Simulation,
    WalkSetting,
    over_draws,
    simulate_walks,
)

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
    """Compute S_1 and S̃_1 where the first of T inputs is `logit` and the others are 0."""
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
        return drawing.with_window(lines, "½ ≤ θ ≤ ½ + 1/5.12", *window(5.12))

    outcome.draw("curves", by_name("ξ and η", labels, draw, grid=True))


SETTING = WalkSetting()

PREDICTED = ("published", "corrected", "finite", "exact")
"""The predictions of ρ of random walks, in the order in which they are drawn."""

FAR = 3.0  # standard errors
LEAST_ENTROPY = 0.02  # nats, where the axis begins

SIGMA = {"isotropic": "Σ = I", "anisotropic": "Σ = RᵀR/d, entries of R from Unif(−2.5, 2.5)"}


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
            simulated = sim.propagation[place].numpy()
            return drawing.simulation(positions, simulated, (walks, draws), [*curves[:, place].numpy()])

        pairs = [f"{mean:g} ± {scale:g}" for mean, scale in SETTING.pairs]
        drawn = by_name("mean ± scale", pairs, draw, grid=True)
        outcome.draw(name, drawn, "simulated", name=name, covariance=SIGMA[name])

    def draw_entropy(place: int) -> go.Figure:
        grids = entropy[COVARIANCES[place]]
        return drawing.entropies(SETTING.scales, SETTING.means, *grids, LEAST_ENTROPY)

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
        where = f"{COVARIANCES[worst[0]]} Σ, mean {mean:g}, scale {scale:g}, token {worst[2] + 1}"
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
        worst = zip(PREDICTED, gaps[name].amax(-1), strict=True)
        columns |= {f"error_{key}": gap for key, gap in worst}
        part = pd.DataFrame(SETTING.pairs, columns=["mean", "scale"])
        part.insert(0, "covariance", name)
        part = part.assign(**{key: value.numpy() for key, value in columns.items()})
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
        part = pd.DataFrame(index, columns=["mean", "scale", "token"])
        part.insert(0, "covariance", name)
        parts.append(part.assign(**{key: value.flatten().numpy() for key, value in columns.items()}))
    return pd.concat(parts, ignore_index=True)
