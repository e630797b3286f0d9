"""Section 5 of Bao et al. 2024 on expressivity, and section 4 on width: what |tr W| does at a fixed tr W², by d.

Spectra are drawn with both moments exact, attention without skip connections or feed-forward layers (Dong et al. 2021)
is applied layer by layer, and both printed chains of bounds are evaluated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from theodolite.estimates import Estimate, Estimates, Floats
from theodolite.judging import Verdict, mix_of
from theodolite.system.wording import number
from theodolite.theory import curve_width, propagation_exact
from theodolite_papers import drawing
from theodolite_papers.experiment import Outcome, Study, by_name, declared, haar_rotation

SHARES = (-1.0, -0.5, 0.0, 0.5, 1.0)  # tr W over its largest value at this tr W², √(d tr W²): eq. 5
WIDTHS = (8, 32, 128, 512)
RATIOS = (3.0, 5.12, 10.0)  # tr W/λ, kept while d grows: Lemma 2 localizes above 2; 5.12 is Fig. 3's
LENGTH = 64


@dataclass(frozen=True)
class Setting:
    """Sizes of the simulation (ours): T independent N(0, I) tokens, each attending to all."""

    width: int = 64
    length: int = 32
    layers: int = 3
    draws: int = 20  # W_QK of each tr W and scale
    scales: tuple[float, ...] = (0.1, 0.5, 2.0)  # √(tr W²)/λ, λ = √d


SETTING = Setting()


def spectrum(width: int, share: float, root: float, generator: torch.Generator) -> Float64[Tensor, " width"]:
    """Draw eigenvalues with Σw = share · √d · root and Σw² = root², both exact, else as from a normal distribution."""
    drawn = torch.randn(width, generator=generator, dtype=torch.float64)
    drawn = drawn - drawn.mean()
    drawn = drawn / drawn.norm()
    return root * (share / math.sqrt(width) + math.sqrt(max(0.0, 1 - share**2)) * drawn)


def left_by_layer(
    tokens: Float64[Tensor, "length width"],
    w_qk: Float64[Tensor, "width width"],
    temperature: float,
    layers: int,
) -> Float64[Tensor, " layers"]:
    """Compute ‖X − 1x̄ᵀ‖_F/‖X‖_F, not of rank one, after each layer X ← softmax(X W_QK Xᵀ/λ) X (Dong et al. 2021).

    Values are the tokens, and X is scaled back to its first size after each layer, which the ratio does not know.
    """
    size, left = tokens.norm(), []
    for _ in range(layers):
        tokens = (tokens @ w_qk @ tokens.T / temperature).softmax(-1) @ tokens
        left.append((tokens - tokens.mean(0)).norm() / tokens.norm())
        tokens = tokens * (size / tokens.norm())
    return torch.stack(left)


@dataclass(frozen=True)
class Collapse:
    """Simulated heads: what is left and ‖W_QK‖₁ by scale, tr W and draw; (chain, link) → share of heads."""

    left: Tensor
    entry_sum: Tensor
    links: dict[tuple[str, str], float]


LINKS = {
    "trace-printed": ("|tr W|/(√d‖Σ‖₂) ≤ ‖W_QK‖₂", "‖W_QK‖₂ ≤ ‖W_QK‖_F", "‖W_QK‖_F ≤ ‖W_QK‖₁"),
    "trace-corrected": ("|tr W|/(d‖Σ‖₂) ≤ ‖W_QK‖₂", "|tr W|/(√d‖Σ‖₂) ≤ ‖W_QK‖_F", "‖W_QK‖_F ≤ ‖W_QK‖₁"),
    "scale-printed": ("‖Σ⁻¹‖_F√(tr W²) = ‖Σ⁻¹‖_F‖W‖_F", "‖Σ⁻¹‖_F‖W‖_F ≥ ‖W_QK‖_F", "‖W_QK‖_F ≥ ‖W_QK‖₂"),
    "scale-corrected": ("‖Σ⁻¹‖_F‖W‖_F ≥ ‖W_QK‖_F", "‖Σ⁻¹‖₂‖Σ^½W_QKΣ^½‖_F ≥ ‖W_QK‖_F", "‖W_QK‖_F ≥ ‖W_QK‖₂"),
}


ROUNDING = 1e-10  # a link that is violated by less than this share of its larger side holds


def links_of(
    w_qk: Float64[Tensor, "width width"], covariance: Float64[Tensor, "width width"]
) -> Bool[Tensor, "chains links"]:
    """Tell which of `LINKS` hold for a head: the chains of eqs. (7) and (10), of W = W_QK Σ and norms of W_QK.

    ‖W_QK‖₁ is the sum of all |entries|, as the paper means it. √(tr W²) is NaN where tr W² < 0, and no link with it
    holds.
    """
    product, width = w_qk @ covariance, len(w_qk)
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.sqrt() @ vectors.mT
    spectral, frobenius, entries = torch.linalg.matrix_norm(w_qk, 2), w_qk.norm(), w_qk.abs().sum()
    by_width = product.trace().abs() / (width * values[-1])
    by_root = math.sqrt(width) * by_width
    by_norm = (1 / values).norm() * product.norm()
    by_trace = (1 / values).norm() * (product @ product).trace().sqrt()
    by_form = (1 / values[0]) * (root @ w_qk @ root).norm()

    def at_most(*sides: Tensor) -> list[bool]:
        return [
            bool(one <= other * (1 + ROUNDING)) for one, other in zip(sides[::2], sides[1::2], strict=True)
        ]

    equal = all(at_most(by_trace, by_norm, by_norm, by_trace))
    last = frobenius, entries
    return torch.tensor(
        [
            at_most(by_root, spectral, spectral, frobenius, *last),
            at_most(by_width, spectral, by_root, frobenius, *last),
            [equal, *at_most(frobenius, by_norm, spectral, frobenius)],
            at_most(frobenius, by_norm, frobenius, by_form, spectral, frobenius),
        ]
    )


def simulate(setting: Setting, seed: int) -> Collapse:
    """Draw heads and let attention alone act. Draws share their tokens, their basis and the shape of their spectrum."""
    generator = torch.Generator().manual_seed(seed)
    width, temperature = setting.width, math.sqrt(setting.width)
    root = torch.randn(width, width, generator=generator, dtype=torch.float64)
    covariance = root.T @ root / width
    left, sums, held = [], [], []
    for _ in range(setting.draws):
        tokens = torch.randn(setting.length, width, generator=generator, dtype=torch.float64)
        basis = haar_rotation(width, generator)
        shape = generator.get_state()
        for scale, share in product(setting.scales, SHARES):
            generator.set_state(shape)
            values = spectrum(width, share, scale * temperature, generator)
            w_qk = basis * values @ basis.T
            left.append(left_by_layer(tokens, w_qk, temperature, setting.layers))
            sums.append(w_qk.abs().sum())
            held.append(links_of(w_qk, covariance))
    order = (setting.draws, len(setting.scales), len(SHARES))
    shares = torch.stack(held).double().mean(0)
    links = {
        (chain, link): float(shares[row, column])
        for row, (chain, names) in enumerate(LINKS.items())
        for column, link in enumerate(names)
    }
    return Collapse(
        torch.stack(left).unflatten(0, order).movedim(0, 2),
        torch.stack(sums).unflatten(0, order).movedim(0, 2),
        links,
    )


def judge_collapse(outcome: Outcome, simulated: Collapse, setting: Setting) -> None:
    """Judge A2's first bullet by its parts, and the chains that it rests on."""
    middle = SHARES.index(0.0)
    parts: dict[str, list[Verdict]] = {"slower": [], "entry-sum": []}
    for (place, scale), end in product(enumerate(setting.scales), (0, -1)):
        left, sums = simulated.left[place, :, :, -1].log(), simulated.entry_sum[place]
        most = "largest" if end else "most negative"
        where = f"at the {most} tr W less that at tr W = 0, √(tr W²)/λ = {scale:g}"
        relative = (sums[end] - sums[middle]) / sums[middle]
        for (claim, verdicts), values in zip(
            parts.items(), (left[end] - left[middle], relative), strict=True
        ):
            estimate = Estimate.mean(values.numpy(), "draws")
            verdicts.append(outcome.verdict(claim, estimate, layers=setting.layers, where=where))
    outcome.verdicts += [mix_of(outcome.sentence(claim), verdicts) for claim, verdicts in parts.items()]
    for chain, names in LINKS.items():
        held = {link: simulated.links[chain, link] for link in names}
        links = ", ".join(f"{link}: {number(share)}" for link, share in held.items())
        count = len(setting.scales) * len(SHARES) * setting.draws
        # One head for which it does not hold refutes a bound; that it holds for all others takes a proof.
        outcome.judge(chain, Estimate.exact(min(held.values())), count=count, links=links)


@declared("localization/collapse")
def collapse(study: Study, outcome: Outcome) -> None:
    simulated = simulate(SETTING, study.provenance.get("seed") or 0)
    judge_collapse(outcome, simulated, SETTING)
    rows = []
    for (a, scale), (b, share) in product(enumerate(SETTING.scales), enumerate(SHARES)):
        left, entry_sum = simulated.left[a, b], float(simulated.entry_sum[a, b].mean())
        variance = SETTING.width * (scale**2 * SETTING.width) * (1 - share**2)
        errors = left.std(0) / SETTING.draws**0.5
        for layer, numbers in enumerate(zip(left.mean(0).tolist(), errors.tolist(), strict=True), 1):
            rows.append((scale, share, layer, *numbers, entry_sum, variance))
    columns = ["scale", "trace_share", "layer", "left", "left_se", "entry_sum", "variance"]
    outcome.tables["layers"] = pd.DataFrame(rows, columns=columns)
    sizes = f"{SETTING.length}; {SETTING.width}; {SETTING.draws}"
    outcome.read("tokens; width; heads of each kind", sizes, "not simulated")
    lines = drawing.by_category([f"tr W = {share:g} of its largest" for share in SHARES])
    steps: Floats = np.arange(1, SETTING.layers + 1, dtype=np.float64)

    def draw(place: int) -> go.Figure:
        values = list(simulated.left[place].mean(1).numpy())
        return drawing.curves(steps, lines, values, ("layer", "‖X − 1x̄ᵀ‖/‖X‖"), yaxis=drawing.POWERS)

    outcome.draw("layers", by_name("√(tr W²)/λ", [f"{scale:g}" for scale in SETTING.scales], draw, grid=True))


def widths() -> Float64[Tensor, "ratios widths"]:
    """Compute the effective share of positions of the exact ρ where all d eigenvalues are equal and tr W/λ is kept."""
    equal = [torch.full((d,), ratio / d, dtype=torch.float64) for ratio in RATIOS for d in WIDTHS]
    shares = [curve_width(propagation_exact(spectrum, LENGTH, 1.0)) for spectrum in equal]
    return torch.stack(shares).unflatten(0, (len(RATIOS), len(WIDTHS)))


@declared("localization/width")
def width(study: Study, outcome: Outcome) -> None:
    shares = widths()
    small, large = WIDTHS.index(32), WIDTHS.index(128)
    less = Estimates.exact((shares[:, large] - shares[:, small]).numpy(), "values of tr W/λ")
    outcome.judge("wider", less, length=LENGTH, ratios=", ".join(f"{ratio:g}" for ratio in RATIOS))
    for d in WIDTHS:
        outcome.read(f"largest |ξ| at d = {d}", number(math.sqrt(d)), "√d")
    table = pd.DataFrame(product(RATIOS, WIDTHS), columns=["trace_over_temperature", "width"])
    table = table.assign(xi=np.sqrt(table["width"]), share=shares.flatten().numpy())
    outcome.tables["widths"] = table
    lines = drawing.by_category([f"tr W/λ = {ratio:g}" for ratio in RATIOS])
    across, titles = np.array(WIDTHS, dtype=np.float64), ("d", "effective share")
    outcome.draw("widths", drawing.curves(across, lines, list(shares.numpy()), titles, xaxis={"type": "log"}))
