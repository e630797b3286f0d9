"""Figure 5 of Bao et al. 2024: simulated signal propagation and entropy, against four predictions of ρ."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from torch import Tensor

from theodolite import theory
from theodolite.estimates import Estimate
from theodolite.judging import Criterion, Verdict, judge, mix_of
from theodolite.measure.rank_correlation import rank_correlation
from theodolite.report.data import Floats
from theodolite.system.wording import number, with_error
from theodolite.theory.walks import COVARIANCES, over_draws
from theodolite_papers import drawing
from theodolite_papers.experiment import Outcome, Study, by_name, declared

SETTING = theory.WalkSetting()

PREDICTED = {
    "published": "Eq. 6 as printed gives ρ of random walks",
    "corrected": "Eq. 6 with the corrected variance gives ρ of random walks",
    "finite": "A Gaussian with the exact moments at finite T gives ρ of random walks",
    "exact": "The exact distribution gives ρ of random walks",
}
"""Each prediction, and the claim that it describes the simulation, in the order in which they are drawn."""

FAR = 3.0  # standard errors

DESCRIBES = Criterion("at most", 0.1, "a tenth of the range of a probability (ours)")
WITHIN_ERROR = Criterion(
    "at most", 0.01, f"0.0027 of normally distributed points are beyond {FAR:g} standard errors (ours)"
)
NARROWER = Criterion("more than", 0.0, "“localizes with smaller scales and larger means”: fewer positions")
HIGHER = Criterion("more than", 0.0, "“high attention entropy”: higher than at the largest scale")
OPPOSED = Criterion(
    "less than", 0.0, "localized (fewer positions) goes with higher entropy, as in A2 of section 5"
)
PROXY = Criterion("at least", 0.9, "“a reasonable proxy” read as: nearly the same order (ours)")

SMALLER = "At a fixed mean, a smaller scale gives a higher entropy (A2 of section 5, Fig. 5)"
LOCALIZED = "At a fixed mean, localized attention has the higher entropy (A2 of section 5, Fig. 5)"

LEAST_ENTROPY = 0.02  # nats, where the axis begins


def predictions(sim: theory.Simulation, setting: theory.WalkSetting) -> dict[str, Tensor]:
    """ρ_1 … ρ_T of every pair and drawn spectrum, (P, D, T): the keys of `PREDICTED`."""
    spectra, size, temperature = sim.eigenvalues, setting.length, setting.temperature
    trace, square = spectra.sum(-1), spectra.square().sum(-1)
    theta = torch.arange(1, size + 1, dtype=torch.float64) / size
    xi, eta = trace / square.sqrt(), square.sqrt() / temperature
    curves = {name: theory.propagation(theta, xi, eta, name) for name in ("published", "corrected")}
    curves["finite"] = theory.propagation_finite(trace, square, square, size, temperature)
    curves["exact"] = theory.propagation_exact(spectra, size, temperature)
    return curves


def share_beyond_error(sim: theory.Simulation, predicted: Tensor) -> Tensor:
    """Share of pairs and positions at which a prediction is more than `FAR` standard errors away, by draw: (D,).

    The error is that of as many walks with the predicted probability, and at least one walk in all.
    """
    error = (predicted * (1 - predicted) / sim.walks).clamp_min(0).sqrt().clamp_min(1 / sim.walks)
    return ((predicted - sim.propagates).abs() > FAR * error).double().mean((0, 2))


@declared("localization/figure5")
def figure_5(study: Study, outcome: Outcome) -> None:
    seed = study.provenance.get("seed") or 0
    sims = {name: theory.simulate_walks(SETTING, name, seed) for name in COVARIANCES}
    of_draws = {name: predictions(sim, SETTING) for name, sim in sims.items()}
    predicted = {name: {key: curve.mean(1) for key, curve in of.items()} for name, of in of_draws.items()}
    for name, sim in sims.items():
        gaps = {key: (curve - sim.propagation).abs().mean() for key, curve in predicted[name].items()}
        means = ", ".join(f"{key} {number(float(gap))}" for key, gap in gaps.items())
        outcome.read(f"mean |predicted − simulated| ρ, {name} Σ", means)
        shares = ", ".join(
            f"{key} {float(share_beyond_error(sim, curve).mean()):.3f}"
            for key, curve in of_draws[name].items()
        )
        outcome.read(f"share of points beyond {FAR:g} standard errors, {name} Σ", shares)
    iso = sims["isotropic"]
    by_mean, errors = _by_scale(iso.entropy.mean(1)), _by_scale(iso.entropy_errors()[1])
    scales = ", ".join(f"{scale:g}" for scale in SETTING.scales)
    for mean, values, error in zip(SETTING.means, by_mean, errors, strict=True):
        entropies = ", ".join(with_error(float(v), float(e)) for v, e in zip(values, error, strict=True))
        outcome.read(f"entropy in nats at mean {mean:g}, scales {scales}, Σ = I", entropies)
    outcome.read("pairs of mean and scale; temperature", "ours; λ = √d", "not printed")
    _judge_predictions(outcome, sims, predicted)
    beyond = [share_beyond_error(sim, of_draws[name]["exact"]) for name, sim in sims.items()]
    outcome.claim(
        "The exact distribution differs from the simulation by the simulation's own error alone",
        f"share of points beyond {FAR:g} standard errors over walks, {len(COVARIANCES)} Σ, {len(SETTING.pairs)} "
        f"pairs, {SETTING.length} positions",
        Estimate.mean(torch.stack(beyond).mean(0).numpy(), "draws"),
        WITHIN_ERROR,
    )
    _judge_localization(outcome, sims)
    outcome.tables |= {"pairs": _pairs(sims, predicted), "propagation": _points(sims, predicted)}
    for name in COVARIANCES:
        _draw_curves(outcome, name, sims[name], predicted[name])

    def draw(place: int) -> go.Figure:
        sim = sims[COVARIANCES[place]]
        grids = _by_scale(sim.entropy.mean(1)), _by_scale(sim.entropy_errors()[1])
        return drawing.entropies(SETTING.scales, SETTING.means, *grids, LEAST_ENTROPY)

    outcome.draw("entropy", by_name("Σ", list(COVARIANCES), draw))


def _by_scale(values: Tensor) -> Floats:
    """One number per pair as (means, scales)."""
    return values.reshape(len(SETTING.means), len(SETTING.scales)).numpy()


def _draw_curves(outcome: Outcome, name: str, sim: theory.Simulation, predicted: dict[str, Tensor]) -> None:
    observed, positions = sim.propagation.numpy(), np.arange(1, SETTING.length + 1, dtype=np.float64)
    walks, draws = (error.numpy() for error in sim.propagation_errors())
    covariance = {"isotropic": "Σ = I", "anisotropic": "Σ = RᵀR/d, entries of R from Unif(−2.5, 2.5)"}[name]

    def draw(place: int) -> go.Figure:
        lines = [curve[place].numpy() for curve in predicted.values()]
        return drawing.simulation(positions, observed[place], (walks[place], draws[place]), lines)

    outcome.draw(
        name,
        by_name("mean ± scale", [f"{mean:g} ± {scale:g}" for mean, scale in SETTING.pairs], draw, grid=True),
        "simulated",
        name=name,
        covariance=covariance,
    )


def _judge_predictions(
    outcome: Outcome, sims: dict[str, theory.Simulation], predicted: dict[str, dict[str, Tensor]]
) -> None:
    points = f"{len(COVARIANCES)} Σ, {len(SETTING.pairs)} pairs, {SETTING.length} positions"
    walks = SETTING.walks * SETTING.draws
    errors = torch.stack([sim.propagation_errors()[0] for sim in sims.values()])
    for name, claim in PREDICTED.items():
        gaps = torch.stack([(predicted[key][name] - sim.propagation).abs() for key, sim in sims.items()])
        worst = int(gaps.argmax())
        sigma, pair, place = np.unravel_index(worst, gaps.shape)
        mean, scale = SETTING.pairs[pair]
        where = f"{COVARIANCES[sigma]} Σ, mean {mean:g}, scale {scale:g}, token {place + 1}"
        what = f"largest |predicted − simulated| ρ, {points} (at {where})"
        gap = Estimate(float(gaps.flatten()[worst]), float(errors.flatten()[worst]), walks, "walks")
        outcome.claim(f"{claim} (section 4, Fig. 5)", what, gap, DESCRIBES)


def _least_gain(
    sims: dict[str, theory.Simulation], values: dict[str, Tensor], along: str
) -> tuple[Estimate, str]:
    """The least favourable of all paired differences along "scale" or "mean", with its error over draws, and where."""
    gains = []
    for name in sims:
        grid = values[name].unflatten(0, (len(SETTING.means), len(SETTING.scales)))[1:]
        rows = grid[:, -1] - grid[:, 0] if along == "scale" else grid[0] - grid[-1]
        levels = SETTING.means[1:] if along == "scale" else SETTING.scales
        for value, row in zip(levels, rows, strict=True):
            what = f"{name} Σ, {'mean' if along == 'scale' else 'scale'} {value:g}"
            gains.append((float(row.mean()), float(over_draws(row[None])[0]), what))
    value, error, where = min(gains)
    return Estimate(value, error, SETTING.draws, "draws"), where


def _judge_localization(outcome: Outcome, sims: dict[str, theory.Simulation]) -> None:
    widths = {name: theory.curve_width(sim.propagates) for name, sim in sims.items()}
    for along, change, contrast in (
        ("scale", "smaller scales", "at the largest scale less that at the smallest, mean not 0"),
        ("mean", "larger means", "at the smallest mean but 0 less that at the largest"),
    ):
        gain, where = _least_gain(sims, widths, along)
        what = f"effective share of positions {contrast}, the smallest ({where})"
        outcome.claim(f"ρ localizes with {change} (section 5, Fig. 5)", what, gain, NARROWER)
    claim = "The spectrum of W_QK stands for that of W_QK Σ (section 5)"
    what = "rank correlation over pairs of the effective share of positions, Σ = I and anisotropic Σ"
    outcome.claim(claim, what, _over_pairs(widths["isotropic"], widths["anisotropic"]), PROXY)
    judge_at_fixed_means(outcome, sims, widths)


def judge_at_fixed_means(
    outcome: Outcome, sims: dict[str, theory.Simulation], widths: dict[str, Tensor]
) -> None:
    """A2 of section 5, of a fixed mean that is not 0: each mean and Σ is a part, and some may be so and others not."""
    entropy: list[Verdict] = []
    localized: list[Verdict] = []
    for name, sim in sims.items():
        by_mean = (values.split(len(SETTING.scales)) for values in (sim.entropy, widths[name]))
        for mean, values, shares in zip(SETTING.means, *by_mean, strict=True):
            if mean == 0:
                continue
            where = f"{name} Σ, mean {mean:g}"
            gain = Estimate.mean((values[0] - values[-1]).numpy(), "draws")
            what = f"entropy at the smallest scale less that at the largest, nats ({where})"
            entropy.append(judge(SMALLER, what, gain, HIGHER))
            what = f"rank correlation over scales of entropy with the effective share of positions ({where})"
            # Of three scales it has four values, between −1 and 1, which all draws may share by chance.
            correlation = _over_pairs(shares, values).floored(2.0)
            localized.append(judge(LOCALIZED, what, correlation, OPPOSED))
    outcome.verdicts += [mix_of(SMALLER, entropy), mix_of(LOCALIZED, localized)]


def _over_pairs(first: Tensor, second: Tensor) -> Estimate:
    """Spearman's correlation over pairs of two numbers (P, D): mean over draws."""
    by_draw = torch.from_numpy(rank_correlation(first.T.numpy(), second.T.numpy())).double()
    return Estimate.mean(by_draw.numpy(), "draws")


def _pairs(sims: dict[str, theory.Simulation], predicted: dict[str, dict[str, Tensor]]) -> pd.DataFrame:
    """One row per covariance and pair."""
    parts = []
    for name, sim in sims.items():
        square, widths = sim.eigenvalues.square().sum(-1), theory.curve_width(sim.propagates)
        xi, eta = sim.eigenvalues.sum(-1) / square.sqrt(), square.sqrt() / SETTING.temperature
        walks, draws = sim.entropy_errors()
        columns = {"xi": xi.mean(1), "eta": eta.mean(1), "r": (xi * eta).mean(1)}
        columns |= {"width": widths.mean(1), "width_se": over_draws(widths), "entropy": sim.entropy.mean(1)}
        columns |= {"entropy_se_walks": walks, "entropy_se_draws": draws}
        for key, curve in predicted[name].items():
            columns[f"error_{key}"] = (curve - sim.propagation).abs().amax(-1)
        part = pd.DataFrame(
            [(name, *pair) for pair in SETTING.pairs], columns=["covariance", "mean", "scale"]
        )
        part = part.assign(**{key: value.numpy() for key, value in columns.items()})
        parts.append(part.assign(regime=theory.regime(part["xi"].to_numpy(), part["eta"].to_numpy())))
    return pd.concat(parts, ignore_index=True)


def _points(sims: dict[str, theory.Simulation], predicted: dict[str, dict[str, Tensor]]) -> pd.DataFrame:
    """One row per covariance, pair and token."""
    rows = []
    for name, sim in sims.items():
        walks, draws = sim.propagation_errors()
        columns = {"simulated": sim.propagation, "se_walks": walks, "se_draws": draws} | predicted[name]
        for place, (mean, scale) in enumerate(SETTING.pairs):
            part = {"covariance": name, "mean": mean, "scale": scale, "token": range(1, SETTING.length + 1)}
            rows.append(pd.DataFrame(part | {key: value[place].numpy() for key, value in columns.items()}))
    return pd.concat(rows, ignore_index=True)
