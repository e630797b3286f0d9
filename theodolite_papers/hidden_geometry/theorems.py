"""Check both theorems numerically: the bound on smoothness (Theorem 1), kernels of random bases (Theorem 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Float64
from scipy import stats
from torch import Tensor
from torch.nn import functional

from theodolite.estimates import Estimate, Estimates, Floats, jackknife_error
from theodolite.judging import all_of
from theodolite.measure.position import squared_lengths
from theodolite.report import style
from theodolite.report.data import OF_GROUPS, evenly, layer_average, need
from theodolite.system.wording import number, with_error
from theodolite.theory import dct2, normalised_gram
from theodolite.theory.unbiased import Jackknifed, leaving_out, product, stacked
from theodolite_papers import drawing
from theodolite_papers.drawing import Line
from theodolite_papers.experiment import Outcome, Study, by_name, declared
from theodolite_papers.hidden_geometry import layer_columns
from theodolite_papers.hidden_geometry.layer_columns import Basis, judge_seen, shown


class SmoothnessBound(NamedTuple):
    """Both sides of Theorem 1: 6/(8k)^m · ‖Δ^{(m,m)}G̃‖_max, as printed, and ‖G − F_k B (F_k B)ᵀ‖_op / T."""

    bound: Float64[Tensor, "*batch frequencies"]
    attained: Float64[Tensor, "*batch frequencies"]


def smoothness_bound(gram: Float64[Tensor, "*batch T T"], k: Sequence[int], m: int) -> SmoothnessBound:
    """Compute both sides of Theorem 1 of Song & Zhong 2024: a Gram matrix with bounded differences is smooth.

    G̃ is G reflected at half samples to 2T×2T (their eq. 6), Δ^{(1,1)} the periodic mixed difference times T²
    (eq. 7). F_k holds f_s[t] = cos(π(s − 1)(t − ½)/T), s = 1 … k, t = 1 … T (the printed f_s swaps frequency
    and position), and B is the proof's: F_k B (F_k B)ᵀ = Π G Π with Π the projection onto F_k.

    When the bound holds. Write d_j = 2T sin(πj/2T), so 2j ≤ d_j ≤ πj, and H = Δ^{(m,m)}G̃.

    - The proof assumes G·1 = 0. Then Parseval's identity gives attained ≤ ‖H‖_max/(d_1 d_k)^m, which is the
      printed bound or less for every m ≤ 7; for k near T the printed one fails at large m. (The printed proof
      rests on |γ_j| ≤ 1/8j, which is false, and on differences times (2T)²: see docs/errata.md.)
    - Where G·1 ≠ 0, G and its centred form have the same H: a difference removes every constant, so H says
      nothing of the row means g = G·1/T, whose high frequencies g_J stay in the error, by at most √(|g_J|²/T).
      For general G that has no bound in H, and the printed one fails.
    - Rows of norm 1 (`normalised_gram`) determine their means, g_t = (1 + ḡ − G^c_tt)/2 with G^c the centred
      G, and then attained ≤ ((d_1 d_k)^−m + ½ d_k^−m) ‖H‖_max: the printed bound for m = 1, and for m = 2 if
      k ≤ 0.7 T; for larger m the same rate k^−m with another constant.

    Rounding of G, ε, enters the differences as up to (2T)^{2m} ε: at T = 512 and m = 3, ε = 1e-16 is seen.

    gram: symmetric positive semidefinite. k: numbers of frequencies, 1 … T. m: order of the difference, from 1.
    """
    factors = torch.tensor([6 / (8 * count) ** m for count in k], dtype=torch.float64)
    spectrum = dct2(gram)
    errors = []
    for count in k:  # the corner of Ĝ is what Π G Π keeps
        beyond = spectrum.clone()
        beyond[..., :count, :count] = 0
        errors.append(torch.linalg.eigvalsh(beyond).abs().amax(-1))
    attained = torch.stack(errors, dim=-1) / gram.shape[-1]
    return SmoothnessBound(_largest_difference(gram, m)[..., None] * factors, attained)


def _largest_difference(gram: Tensor, m: int) -> Tensor:
    """Compute ‖Δ^{(m,m)}G̃‖_max, of the batch's shape, from (T + m + 1)² entries of G̃."""
    size = gram.shape[-1]
    # An m-th difference of G̃ is (anti)symmetric about (m − 1)/2 and T + (m − 1)/2 along each axis.
    index = torch.arange(m // 2 - m, m // 2 + size + 1, device=gram.device) % (2 * size)
    index = torch.minimum(index, 2 * size - 1 - index)
    difference = gram.index_select(-2, index).index_select(-1, index)
    for _ in range(m):
        difference = difference.diff(dim=-2).diff(dim=-1) * size**2
    return difference.abs().amax((-2, -1))


_PAIRS = 64  # query-key pairs evaluated with each drawn set of weights


@dataclass(frozen=True)
class KernelSetting:
    """The distribution of the weights and tokens of one experiment."""

    width: int = 128
    vectors: tuple[int, int] = (96, 96)  # in both bases
    sparsity: int = 4  # terms of each W_αβ
    noise: bool = False  # whether standard normal Z_αβ/√d is added


@dataclass(frozen=True)
class FactorisationError:
    """Relative error |K_W(x^q, x^k) / ∏ K_{W_αβ}(…) − 1| of eq. (14), one entry per incoherence; float64.

    A draw's pairs count as one in the mean and its error. bound: `factorisation_bound`, without noise.
    """

    incoherence: Float64[Tensor, " levels"]
    mean: Float64[Tensor, " levels"]
    standard_error: Float64[Tensor, " levels"]
    maximum: Float64[Tensor, " levels"]
    bound: Float64[Tensor, " levels"]

    @property
    def slope(self) -> float:
        """Slope of ln(mean error) against ln(incoherence): 1 by the theorem, where small."""
        return float(log_slope(self.incoherence, self.mean))


def log_slope(
    x: Float64[Tensor, " points"], y: Float64[Tensor, "*batch points"]
) -> Float64[Tensor, "*batch"]:
    """Fit ln y by least squares on ln x, and return the slope."""
    along = x.log() - x.log().mean()
    return y.log() @ along / along.square().sum()


def kernel_factorisation(
    incoherences: Sequence[float], setting: KernelSetting, draws: int = 100, seed: int = 0
) -> FactorisationError:
    """Measure how the error of the factorised kernel grows with the incoherence of the two bases.

    Every incoherence, from 0 to 1, sees the same random numbers. With noise the error is flat below some incoherence at
    a fixed width, which says nothing of an upper bound.
    """
    levels = torch.tensor(list(incoherences), dtype=torch.float64)
    error = torch.stack([_drawn(incoherence, setting, draws, seed) for incoherence in levels.tolist()])
    by_draw = error.mean(-1)
    return FactorisationError(
        incoherence=levels,
        mean=by_draw.mean(-1),
        standard_error=by_draw.std(-1) / draws**0.5,
        maximum=error.amax((-2, -1)),
        bound=factorisation_bound(levels, setting.sparsity),
    )


def factorisation_bound(incoherence: Float[Tensor, "*levels"], sparsity: int) -> Float64[Tensor, "*levels"]:
    """Compute exp(s(8ρ + 4ρ²)) − 1, the bound on relative errors of eq. (14) at incoherence ρ, s-sparse weights.

    Of the 16 terms of ln K_W twelve are mismatched: eight with one index wrong, at most s·ρ, four with both, at most
    s·ρ². The proof of Theorem 2 bounds all twelve by s·ρ. Attained where every vector is one of two with ⟨c, t⟩ = ρ.
    """
    rho = incoherence.double()
    return torch.expm1(sparsity * (8 * rho + 4 * rho**2))


def _tilted(first: Tensor, second: Tensor, incoherence: float) -> tuple[Tensor, Tensor]:
    """Draw unit vectors of two orthogonal spaces, the second leaning to the first: max |⟨c, t⟩| = `incoherence`."""
    first, second = functional.pad(first, (0, second.shape[1])), functional.pad(second, (first.shape[1], 0))
    towards = first[torch.arange(len(second)) % len(first)]
    return first, (1 - incoherence**2) ** 0.5 * second + incoherence * towards


def _sparse_weight(left: Tensor, right: Tensor, sparsity: int, generator: torch.Generator) -> Tensor:
    """Draw W = Σ a_k u_k v_kᵀ of s terms (eq. 13), a_k uniform in [−1, 1], u_k and v_k from the two bases."""
    u = left[torch.randint(len(left), (sparsity,), generator=generator)]
    v = right[torch.randint(len(right), (sparsity,), generator=generator)]
    a = 2 * torch.rand(sparsity, generator=generator, dtype=torch.float64) - 1
    return u.mT @ (a[:, None] * v)


def factorisation_log_ratio(
    weights: Float64[Tensor, "2 2 width width"],
    query: Float64[Tensor, "2 pairs width"],
    key: Float64[Tensor, "2 pairs width"],
) -> Float64[Tensor, " pairs"]:
    """Compute ln of K_W(x^q, x^k) / ∏ K_{W_αβ}(x^q_α, x^k_β), with W = Σ W_αβ, x_1 = c, x_2 = t and x = c + t."""
    joint = (query.sum(0) @ weights.sum((0, 1)) * key.sum(0)).sum(-1)
    separate = (query[:, None] @ weights * key).sum((0, 1, -1))
    return joint - separate


def _drawn(incoherence: float, setting: KernelSetting, draws: int, seed: int) -> Tensor:
    """Compute the relative errors of some draws, (draws, _PAIRS)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([_draw(incoherence, setting, generator) for _ in range(draws)])


def _draw(incoherence: float, setting: KernelSetting, generator: torch.Generator) -> Tensor:
    """Compute the relative errors of one draw of bases and weights, (_PAIRS,)."""
    half = setting.width // 2
    first = _within_span(setting.vectors[0], half, generator)
    second = _within_span(setting.vectors[1], setting.width - half, generator)
    bases = _tilted(first, second, incoherence)
    query, key = (torch.stack([_tokens(basis, generator) for basis in bases]) for _ in range(2))
    of_queries, of_keys = (torch.linalg.qr(tokens.flatten(0, 1).mT).Q for tokens in (query, key))
    pairs = [(left @ of_queries, right @ of_keys) for left in bases for right in bases]
    weights = torch.stack([_sparse_weight(*pair, setting.sparsity, generator) for pair in pairs])
    weights = weights.unflatten(0, (2, 2))
    if setting.noise:
        noise = torch.randn(weights.shape, generator=generator, dtype=torch.float64)
        weights = weights + noise / setting.width**0.5
    return torch.expm1(factorisation_log_ratio(weights, query @ of_queries, key @ of_keys)).abs()


def _tokens(basis: Tensor, generator: torch.Generator) -> Tensor:
    """Draw elements ±u of the extended basis, (_PAIRS, d): those of full length, where errors are largest."""
    index = torch.randint(len(basis), (_PAIRS,), generator=generator)
    sign = 2 * torch.randint(2, (_PAIRS,), generator=generator) - 1
    return basis[index] * sign[:, None]


def _within_span(count: int, width: int, generator: torch.Generator) -> Tensor:
    """Draw `_directions` in orthonormal coordinates of their span, (count, min(count, width))."""
    if width <= count:
        return _directions(count, width, generator)
    lower = torch.randn(count, count, generator=generator, dtype=torch.float64).tril(-1)
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    squares = stats.chi2.ppf(uniform.numpy(), width - np.arange(count))
    return functional.normalize(lower + torch.from_numpy(squares).sqrt().diag(), dim=-1)


def _directions(count: int, width: int, generator: torch.Generator) -> Tensor:
    normal = torch.randn(count, width, generator=generator, dtype=torch.float64)
    return functional.normalize(normal, dim=-1)


ORDERS = (1, 2, 3)


def cosines_between(p: Basis, used: Float64[Tensor, " groups"] | None = None) -> Float64[Tensor, "n n"]:
    """Estimate the normalised Gram matrix by products of different groups; NaN at positions without a length."""
    lengths = squared_lengths(product(p), torch.arange(1, p.shape[1] + 1))[0][0].sqrt()
    return layer_columns.grams_between(p)(used) / lengths.outer(lengths)


def premise_of(p: Basis, cutoff: int) -> tuple[float, float]:
    """Estimate the bound over the error of no approximation at k = `cutoff`, of the best m, and its standard error.

    A largest difference takes the noise along: that of noise alone, from two halves of the contexts, is how far off it
    is at most, taken for two standard errors.
    """
    cosines, halves = cosines_between(p), torch.arange(len(p)) % 2
    if not cosines.isfinite().all():
        return math.nan, math.nan
    one, other = (cosines_between(p, (halves == half).double()) for half in (0, 1))
    trivial = torch.linalg.matrix_norm(cosines, 2) / len(cosines)
    both = torch.stack([cosines, (one - other) / 2])
    of_orders = [smoothness_bound(both, [cutoff], order).bound[:, 0] / trivial for order in ORDERS]
    value, noise = min(of_order.tolist() for of_order in of_orders)
    return value, noise / 2


def attained_over_none(p: Basis, cutoff: int) -> Jackknifed:
    """Estimate the error of `cutoff` low frequencies over that of none; NaN at positions without a length."""

    def ratio(used: Float64[Tensor, " groups"]) -> Tensor:
        cosines = cosines_between(p, used)
        if not cosines.isfinite().all():
            return torch.tensor(math.nan, dtype=torch.float64)
        trivial = torch.linalg.matrix_norm(cosines, 2) / len(cosines)
        return smoothness_bound(cosines, [cutoff], ORDERS[0]).attained[0] / trivial

    return leaving_out(ratio, len(p)).corrected()


LARGEST_CUTOFF, CUTOFFS_SHOWN = 64, 13
SHOWN_LAYERS = 13  # all of the twelve-block models of the paper; of deeper ones as many, evenly chosen
MODERATE = 10  # K up to which Tables 2 and 3 look, taken for a “moderate k”
INCOHERENCES = (0.003, 0.01, 0.03, 0.1, 0.2, 0.3)
DRAWS = 100
SETTING = KernelSetting()
WIDTHS = (128, 512, 2048, 8192)
EXPONENTS = (0.25, 0.375, 0.5)
"""γ of incoherences d^−γ ≥ 1/√d, where the statement, of probability 1 − O(n₁n₂)·exp(−incoh²·d), says something."""

LARGEST_ERROR = 30.0  # of a kernel: beyond that a bound says nothing and would press the curves together
BELOW_NOISE = 0.75  # d^−γ below 1/√d: noise of size 1/√d must make the error outgrow it, as d^¼


def cutoffs_of(positions: int) -> list[int]:
    """Choose k from 1 to 64 or to the number of positions, evenly on a logarithmic scale; 10 among them if possible."""
    last = min(positions, LARGEST_CUTOFF)
    cutoffs = {round(k) for k in np.geomspace(1, last, CUTOFFS_SHOWN)}
    return sorted(cutoffs | {min(MODERATE, last)})


def _bounds(grams: torch.Tensor, cutoffs: list[int]) -> tuple[Floats, Floats, Floats]:
    """Bound of (N, n, n) for each order and k (N, orders, K), attained error (N, K), and ‖G‖_op/n (N)."""
    # The attained error is of every order the same; the bound at k is that at 1 over k^m.
    first = smoothness_bound(grams, cutoffs, ORDERS[0])
    powers = torch.tensor(cutoffs, dtype=torch.float64)
    others = [smoothness_bound(grams, [1], order).bound / powers**order for order in ORDERS[1:]]
    trivial = torch.linalg.matrix_norm(grams, 2) / grams.shape[-1]
    return torch.stack([first.bound, *others], 1).numpy(), first.attained.numpy(), trivial.numpy()


def _draw_bounds(
    outcome: Outcome, layers: list[int], cutoffs: list[int], bounds: Floats, attained: Floats, trivial: Floats
) -> None:
    """Draw table and figure of every bound, layer by layer."""
    columns = {"layer": np.repeat(layers, len(cutoffs)), "k": np.tile(cutoffs, len(layers))}
    columns["attained"] = attained.ravel()
    columns |= {f"bound_{order}": bounds[:, index].ravel() for index, order in enumerate(ORDERS)}
    columns["no_approximation"] = np.repeat(trivial, len(cutoffs))
    outcome.tables["bounds"] = pd.DataFrame(columns)

    all_values = np.concatenate([bounds.ravel(), attained.ravel(), trivial])
    positive = all_values[np.isfinite(all_values) & (all_values > 0)]
    # What is left at the last k is rounding: a curve may leave the picture below.
    low = max(float(positive.min()), float(trivial.max()) * 1e-7)
    lines = [
        Line(f"bound, m = {order}", colour, "dash", 1.8)
        for order, colour in zip(ORDERS, drawing.ORDERS, strict=True)
    ]
    lines.append(Line("attained", style.MEASURED, width=2.4, marker=6))
    lines.append(Line("no approximation, ‖G‖/T", style.GREY, "dot", 1.5))
    ticks = [k for k in (1, 2, 5, 10, 20, 50, 100) if k <= max(cutoffs)]
    x = {"type": "log", "tickvals": ticks, "ticktext": [str(tick) for tick in ticks]}
    y = drawing.POWERS | {"range": [math.log10(low) - 0.3, math.log10(float(positive.max())) + 0.3]}
    titles = "k, number of frequencies kept", "error, ‖G − approximation‖/T"

    def draw(place: int) -> go.Figure:
        values = [*bounds[place], attained[place], np.full(len(cutoffs), trivial[place])]
        return drawing.curves(np.array(cutoffs), lines, values, titles, height=430, xaxis=x, yaxis=y)

    drawn = by_name("layer", [f"layer {layer}" for layer in layers], draw, start=len(layers) // 2)
    outcome.draw("bound", drawn)


@declared("geometry/theorem1")
def theorem_1(study: Study, outcome: Outcome) -> None:
    basis = torch.from_numpy(need(study.run, "positional_basis")[:, 1:])
    layers = evenly(len(basis), SHOWN_LAYERS)
    cutoffs = cutoffs_of(basis.shape[1])
    bounds, attained, trivial = _bounds(normalised_gram(basis[layers]), cutoffs)
    moderate = min(MODERATE, cutoffs[-1])
    below = bounds.min(axis=1) < trivial[:, None]  # the bound of some order, by layer and k
    useful = [cutoffs[int(row.argmax())] for row in below if row.any()]
    smallest = f"none up to {cutoffs[-1]}"
    if useful:
        smallest = f"{min(useful)} to {max(useful)}, in {len(useful)} of {len(layers)} layers"
    outcome.read("smallest k at which a bound is informative", smallest, "“moderate k and m”")
    # Errors that are nothing but rounding are compared with a bound that is.
    rounding = 1e-12 * trivial[:, None, None]
    orders = f"m = {', '.join(map(str, ORDERS))}"
    # Of this matrix, whatever text it is of: the theorem is about every Gram matrix.
    largest = Estimate.exact(float((attained[:, None] / np.maximum(bounds, rounding)).max()))
    outcome.judge("bound", largest, layers=len(trivial), last=cutoffs[-1], orders=orders)
    _judge_approximation(outcome, layer_columns.bases_by_group(study), layers, moderate)
    _draw_bounds(outcome, layers, cutoffs, bounds, attained, trivial)


def _judge_approximation(
    outcome: Outcome, bases: list[Basis] | None, layers: list[int], moderate: int
) -> None:
    """Judge whether the Gram matrices, without noise, are nearly those of few frequencies, and by the theorem."""
    if bases is None:
        for claim in ("premise", "implied", "approximated"):
            outcome.cannot_judge(claim, layer_columns.WITHOUT_TEXT)
        return
    chosen = [bases[layer] for layer in layers]
    values, errors = np.array([premise_of(p, moderate) for p in chosen]).T
    premise = Estimates(values, errors, *OF_GROUPS)
    near = layer_columns.estimates_of(stacked([attained_over_none(p, moderate) for p in chosen]))
    for name, of_layers, paper in (
        ("bound", values, "“moderate k and m”"),
        ("attained", near.values, "“G ≈”"),
    ):
        median = Estimate(float(pd.Series(of_layers).median()))
        what = f"{name} over no approximation at k = {moderate}, median of layers"
        outcome.read(what, shown(median), paper)
    words = {"k": moderate, "orders": f"m = {', '.join(map(str, ORDERS))}"}
    judge_seen(outcome, "premise", premise, values, **words)
    meets, _ = outcome.criterion("premise").decided(premise.values, premise.margins)
    if meets.any():
        implied = replace(near, values=np.where(meets, near.values, np.nan))
        outcome.judge("implied", implied, k=moderate)
    else:
        outcome.cannot_judge("implied", "no layer is known to have bounded differences, the premise")
    judge_seen(outcome, "approximated", near, values, k=moderate)
    columns = {"bound": values, "bound_se": errors, "attained": near.values, "attained_se": near.errors}
    outcome.tables["premise"] = pd.DataFrame({"layer": layers} | columns)


@declared("geometry/theorem2")
def theorem_2(study: Study, outcome: Outcome) -> None:
    """Judge drawn bases, the same whatever the model; the run's own incoherence is only marked."""
    run = study.run
    clean = kernel_factorisation(INCOHERENCES, SETTING, DRAWS)
    noisy = kernel_factorisation(INCOHERENCES, replace(SETTING, noise=True), DRAWS)
    mean, _ = layer_average(run, "incoherence_mean")
    width, positions = run.provenance["model"]["width"], need(run, "positional_basis").shape[1] - 1
    contexts = need(run, "context_basis").shape[1]
    outcome.read("slope of ln error against ln incoherence, without noise", number(clean.slope), "1")
    of_bound = Estimate.exact(float((clean.maximum / clean.bound).max()))
    outcome.judge("factorises", of_bound, draws=DRAWS, levels=len(INCOHERENCES))
    _with_noise(outcome)
    outcome.read("root mean square cosine of position and context, mean over layers", shown(mean))
    sizes, least = f"{positions} positions, {contexts} contexts", math.log(positions * contexts) / width
    what = f"incoherence above which the statement with noise is informative ({sizes})"
    outcome.read(what, number(math.sqrt(least)), "√(ln(n₁n₂)/d)")
    columns = {"incoherence": clean.incoherence, "bound": clean.bound}
    for name, errors in (("error", clean), ("noisy_error", noisy)):
        columns |= {name: errors.mean, f"{name}_se": errors.standard_error, f"{name}_max": errors.maximum}
    outcome.tables["errors"] = pd.DataFrame({name: values.numpy() for name, values in columns.items()})
    outcome.draw("factorisation", _factorisation(clean, noisy, mean.value))


def _factorisation(clean: FactorisationError, noisy: FactorisationError, here: float) -> go.Figure:
    """Draw the mean error of the factorised kernel against incoherence, log-log, with the bound (dashed).

    here: incoherence of the model; one that is at the noise floor is not drawn.
    """
    levels, low = clean.incoherence.numpy(), float(torch.cat([clean.mean, noisy.mean]).min()) / 2
    shown: list[tuple[Line, Floats, Floats, Floats | None]] = [
        (Line(name, colour, marker=8), levels, of.mean.numpy(), of.standard_error.numpy())
        for name, colour, of in (
            ("without noise", style.MEASURED, clean),
            ("with noise", style.BLUE, noisy),
        )
    ]
    along = torch.from_numpy(np.geomspace(INCOHERENCES[0], INCOHERENCES[-1], 60))
    bound = factorisation_bound(along, SETTING.sparsity)
    informative = bound <= LARGEST_ERROR
    of_bound = along[informative].numpy(), bound[informative].numpy()
    shown.append((Line("bound", style.GREY, "dash", 1.6), *of_bound, None))
    ends = [INCOHERENCES[0], INCOHERENCES[-1]]
    if here > 0:
        vertical = np.full(2, here), np.array([low, LARGEST_ERROR])
        shown.append((Line("this model: root mean square", style.GREEN, width=1.6), *vertical, None))
        ends = [min(ends[0], here), max(ends[1], here)]
    lines, x, values, errors = zip(*shown, strict=True)
    axes: dict[str, Any] = {
        "xaxis": drawing.TWOS | {"range": [math.log10(ends[0]) - 0.1, math.log10(ends[1]) + 0.1]},
        "yaxis": drawing.POWERS | {"dtick": 1, "range": [math.log10(low), math.log10(LARGEST_ERROR)]},
    }
    titles = "incoherence", "relative error of the kernel"
    return drawing.curves(x, lines, values, titles, errors=errors, height=430, **axes)


def _with_noise(outcome: Outcome) -> None:
    """Judge the theorem's “moreover”: with noise 1/√d the error stays within a multiple of incoh = d^−γ ≥ 1/√d."""
    settings = [replace(SETTING, noise=True, width=width) for width in WIDTHS]
    widths, draws = np.array(WIDTHS, dtype=np.float64), DRAWS // 2
    verdicts, tables, curves = [], [], {}
    for gamma in (*EXPONENTS, BELOW_NOISE):
        levels = widths**-gamma
        by_width = [
            _drawn(level, each, draws, 0) / level for level, each in zip(levels, settings, strict=True)
        ]
        ratio = torch.stack(by_width, dim=-1)  # (draws, pairs, widths)
        largest, ratio = ratio.amax((0, 1)), ratio.mean(1)
        left_out = log_slope(torch.from_numpy(widths), (ratio.sum(0) - ratio) / (draws - 1)).numpy()
        slope = Estimate(float(left_out.mean()), float(jackknife_error(left_out)), draws, "draws")
        mean, errors = ratio.mean(0).numpy(), (ratio.std(0) / math.sqrt(draws)).numpy()
        words = {
            "first": number(mean[0]),
            "narrowest": WIDTHS[0],
            "last": number(mean[-1]),
            "widest": WIDTHS[-1],
        }
        verdict = outcome.verdict("with-noise", slope, exponent=gamma, **words)
        what = outcome.sentence("with-noise", "what", exponent=gamma, **words)
        outcome.read(what, with_error(slope.value, slope.error), "0 or less" if gamma <= 0.5 else "left out")
        verdicts.append(verdict)
        curves[f"incoh = d^−{gamma:g}"] = mean, errors
        columns = {"exponent": gamma, "width": WIDTHS, "incoherence": levels}
        columns |= {"error_over_incoherence": mean, "error_over_incoherence_se": errors}
        tables.append(pd.DataFrame(columns | {"largest": largest.numpy()}))
    outcome.verdicts.append(all_of(outcome.sentence("with-noise"), verdicts[:-1]))
    outcome.tables["growth"] = pd.concat(tables, ignore_index=True)
    lines = drawing.by_category(curves, marker=6)
    values, of_values = zip(*curves.values(), strict=True)
    x = {"type": "log", "tickvals": WIDTHS, "ticktext": [str(width) for width in WIDTHS]}
    look: dict[str, Any] = {"errors": of_values, "xaxis": x, "yaxis": drawing.TWOS}
    titles = "width d", "error over incoherence"
    drawn = drawing.curves(widths, lines, values, titles, height=380, **look)
    outcome.draw("growth", drawn)
