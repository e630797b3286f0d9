"""Both theorems in numbers: the bound on smoothness and its worth (Theorem 1), kernels of drawn bases (Theorem 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Float64
from scipy import stats
from torch import Tensor
from torch.nn import functional

from theodolite.corpus.groups import GROUPS
from theodolite.errors import UsageError
from theodolite.estimates import Estimate, Estimates, Floats, jackknife_error
from theodolite.judging import all_of
from theodolite.report.data import OF_GROUPS, evenly, need, value_of
from theodolite.system.wording import number, with_error
from theodolite.theory import normalised_gram, smoothness_bound
from theodolite_papers import drawing
from theodolite_papers.experiment import Outcome, Study, by_name, declared
from theodolite_papers.hidden_geometry.layer_columns import GroupedBasis, errors_of, grouped_basis

_PAIRS = 64
"""Query-key pairs evaluated with each drawn set of weights."""


@dataclass(frozen=True)
class KernelSetting:
    """The distribution of the weights and tokens of one experiment.

    vectors: sizes of both bases. sparsity: terms of each W_αβ. noise: whether standard normal Z_αβ/√d is added.
    """

    width: int = 128
    vectors: tuple[int, int] = (96, 96)
    sparsity: int = 4
    noise: bool = False


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
        """Least-squares slope of ln(mean error) against ln(incoherence): 1 by the theorem, where small."""
        x, y = self.incoherence.log(), self.mean.log()
        x = x - x.mean()
        return float((x * y).sum() / x.square().sum())


def kernel_factorisation(
    incoherences: Sequence[float], setting: KernelSetting, draws: int = 100, seed: int = 0
) -> FactorisationError:
    """Measure how the error of the factorised kernel grows with the incoherence of the two bases.

    Every incoherence sees the same random numbers. With noise the error is flat below some incoherence at a fixed
    width, which says nothing of an upper bound: see `error_growth`.

    Raises:
        UsageError: an incoherence outside [0, 1], or fewer than 2 draws.
    """
    if draws < 2 or not all(0 <= incoherence <= 1 for incoherence in incoherences):
        raise UsageError(
            f"{draws} draws at {list(incoherences)}: give 2 or more, at incoherences from 0 to 1"
        )
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


@dataclass(frozen=True)
class ErrorGrowth:
    """Mean relative error over incoherence, where incoherence falls as d^−γ: is it bounded, as O(incoh) says?"""

    exponent: float
    widths: Float64[Tensor, " widths"]
    ratio: Float64[Tensor, "draws widths"]
    largest: Float64[Tensor, " widths"]

    @property
    def growth(self) -> Float64[Tensor, " leave_one_out"]:
        """Least-squares slope of ln(mean ratio) on ln d, one draw left out after the other: 0 or less if bounded."""
        draws = len(self.ratio)
        means = (self.ratio.sum(0) - self.ratio) / (draws - 1)
        x = self.widths.log() - self.widths.log().mean()
        return means.log() @ x / x.square().sum()


def error_growth(
    widths: Sequence[int], exponent: float, setting: KernelSetting, draws: int = 100, seed: int = 0
) -> ErrorGrowth:
    """Measure the error over an incoherence of d^−`exponent` for growing d: the rest stays, noise included."""
    errors = [
        _drawn(width**-exponent, replace(setting, width=width), draws, seed) / width**-exponent
        for width in widths
    ]
    ratio = torch.stack(errors, dim=-1)
    return ErrorGrowth(exponent, torch.tensor(widths, dtype=torch.float64), ratio.mean(1), ratio.amax((0, 1)))


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


def sparse_weight(
    left: Float64[Tensor, "left width"],
    right: Float64[Tensor, "right width"],
    sparsity: int,
    generator: torch.Generator,
) -> Float64[Tensor, "width width"]:
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
    weights = torch.stack([sparse_weight(*pair, setting.sparsity, generator) for pair in pairs])
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


def premise_without_noise(
    basis: GroupedBasis | None, layers: list[int], order: Floats, cutoff: int
) -> Estimates:
    """Extrapolate the bound over no approximation to infinitely many contexts, by layer, at the order of each.

    Noise of means over C contexts is a nugget of size 1/C, which differences amplify: the bound is taken of one, two,
    four and all eight groups, and the line in 1/C read off at 0. The error is the jackknife's over groups, and with
    it how much the line changes without the smallest part. NaN where positions are not seen above their noise.
    """
    if basis is None:
        return Estimates(np.full(len(layers), np.nan), np.full(len(layers), np.nan), *OF_GROUPS)
    every = tuple(range(GROUPS))
    without = [every[:group] + every[group + 1 :] for group in every]
    parts = [tuple(range(start, start + size)) for size in (1, 2, 4) for start in range(0, GROUPS, size)]
    means = {
        part: basis.of(torch.isin(torch.arange(GROUPS), torch.tensor(part)).double())[layers]
        for part in (*parts, every, *without)
    }
    values = _line(means, every, order, cutoff)
    left_out = np.stack([_line(means, others, order, cutoff) for others in without])
    misfit = values - _line(means, every, order, cutoff, least=2)
    return Estimates(values, np.hypot(jackknife_error(left_out), misfit), *OF_GROUPS)


def _line(
    means: dict[tuple[int, ...], torch.Tensor],
    whole: tuple[int, ...],
    order: Floats,
    cutoff: int,
    least: int = 1,
) -> Floats:
    """Fit a line in 1/C through the parts of `least` groups or more and the whole; its value at 0, by layer."""
    # Lengths free of noise, from products of different groups: with a part's own the nugget would saturate.
    groups = torch.stack([means[(group,)] for group in whole])
    products = groups.sum(0).square().sum(-1) - groups.square().sum((0, -1))
    lengths = (products / (len(whole) * (len(whole) - 1))).clamp_min(0).sqrt()
    levels: dict[int, list[Floats]] = {}
    for part in means:
        if part == whole or (least <= len(part) <= GROUPS // 2 and set(part) <= set(whole)):
            ratio = _bound_ratio(means[part] / lengths[..., None], order, cutoff)
            levels.setdefault(len(part), []).append(ratio)
    design = np.stack([np.ones(len(levels)), [1 / size for size in levels]], axis=1)
    level_means = np.stack([np.mean(ratios, axis=0) for ratios in levels.values()])
    weights: Floats = np.linalg.pinv(design)[0]
    return np.asarray(weights @ level_means)


def _bound_ratio(unit: torch.Tensor, order: Floats, cutoff: int) -> Floats:
    """Divide the bound at k = `cutoff` and each layer's order by the error of no approximation; NaN of no numbers."""
    grams = unit @ unit.mT
    ratios = np.full(len(grams), np.nan)
    for layer, gram in enumerate(grams):
        if gram.isfinite().all():
            bound = smoothness_bound(gram, cutoff, ORDERS[int(order[layer])]).bound
            ratios[layer] = float(bound / torch.linalg.matrix_norm(gram, 2) * len(gram))
    return ratios


LARGEST_CUTOFF, CUTOFFS_SHOWN = 64, 13
SHOWN_LAYERS = 13  # all of the twelve-block models of the paper; of deeper ones as many, evenly chosen
MODERATE = 10
"""K up to which Tables 2 and 3 look, taken for a “moderate k”."""

INCOHERENCES = (0.003, 0.01, 0.03, 0.1, 0.2, 0.3)
DRAWS = 100
SETTING = KernelSetting()

WIDTHS = (128, 512, 2048, 8192)
EXPONENTS = (0.25, 0.375, 0.5)
"""γ of incoherences d^−γ ≥ 1/√d, where the statement with noise says something: its probability is
1 − O(n₁n₂)·exp(−incoh²·d)."""

BELOW_NOISE = 0.75
"""γ of incoherences below 1/√d, where noise of size 1/√d must make the error outgrow them, as d^¼."""


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
    others = [smoothness_bound(grams, 1, order).bound[..., None] / powers**order for order in ORDERS[1:]]
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

    def draw(place: int) -> go.Figure:
        return drawing.smoothness_bounds(cutoffs, bounds, attained, trivial, place)

    drawn = by_name("layer", [f"layer {layer}" for layer in layers], draw, start=len(layers) // 2)
    outcome.draw("bound", drawn)


@declared("geometry/theorem1")
def theorem_1(study: Study, outcome: Outcome) -> None:
    basis = torch.from_numpy(need(study.run, "positional_basis")[:, 1:])
    layers = evenly(len(basis), SHOWN_LAYERS)
    cutoffs = cutoffs_of(basis.shape[1])
    bounds, attained, trivial = _bounds(normalised_gram(basis[layers]), cutoffs)
    moderate = min(MODERATE, cutoffs[-1])
    at_moderate = cutoffs.index(moderate)
    raw = bounds[:, :, at_moderate] / trivial[:, None]
    best, order = raw.min(axis=1), raw.argmin(axis=1)
    ratio = attained[:, at_moderate] / trivial
    below = bounds.min(axis=1) < trivial[:, None]  # the bound of some order, by layer and k
    useful = [cutoffs[int(row.argmax())] for row in below if row.any()]
    smallest = f"none up to {cutoffs[-1]}"
    if useful:
        smallest = f"{min(useful)} to {max(useful)}, in {len(useful)} of {len(best)} layers"
    outcome.read("smallest k at which a bound is informative", smallest, "“moderate k and m”")
    median = f"over no approximation at k = {moderate}"
    outcome.read(f"bound {median}, best m, median of layers", number(float(np.median(best))))
    outcome.read(f"attained {median}, median of layers", number(float(np.median(ratio))), "“G ≈”")
    # Errors that are nothing but rounding are compared with a bound that is.
    rounding = 1e-12 * trivial[:, None, None]
    orders = f"m = {', '.join(map(str, ORDERS))}"
    # Of this matrix, whatever text it is of: the theorem is about every Gram matrix.
    largest = Estimate.exact(float((attained[:, None] / np.maximum(bounds, rounding)).max()))
    outcome.judge("bound", largest, layers=len(trivial), last=cutoffs[-1], orders=orders)
    basis_by_group = grouped_basis(study)
    premise = premise_without_noise(basis_by_group, layers, order, moderate)
    words = {"k": moderate, "orders": orders, "lowest": number(best.min()), "highest": number(best.max())}
    if premise.errors is not None and np.isfinite(premise.errors).any():
        outcome.judge("premise", premise, **words)
    else:
        why = (
            "some position is not seen above the noise of these contexts, or of seven eighths of them, which its "
            "error takes, or the text is not at hand; use more --contexts"
        )
        outcome.cannot_judge("premise", f"{outcome.sentence('premise', 'what', **words)}: {why}")

    def attained_of(part: torch.Tensor) -> Floats:
        grams = normalised_gram(part[layers])
        trivial = torch.linalg.matrix_norm(grams, 2) / grams.shape[-1]
        return (smoothness_bound(grams, moderate, ORDERS[0]).attained / trivial).numpy()

    errors = errors_of(basis_by_group, attained_of, ratio)
    near = Estimates(ratio, errors, *OF_GROUPS)
    meets, _ = outcome.criterion("premise").decided(premise.values, premise.margins)
    if meets.any():
        outcome.judge("implied", replace(near, values=near.values[meets], errors=errors[meets]), k=moderate)
    else:
        outcome.cannot_judge("implied", "no layer is known to have bounded differences, the premise")
    outcome.judge("approximated", near, k=moderate)
    columns = {"layer": layers, "m": np.array(ORDERS)[order], "bound": best}
    columns |= {"bound_without_noise": premise.values, "bound_without_noise_se": premise.errors}
    outcome.tables["premise"] = pd.DataFrame(columns)
    _draw_bounds(outcome, layers, cutoffs, bounds, attained, trivial)


@declared("geometry/theorem2")
def theorem_2(study: Study, outcome: Outcome) -> None:
    """Judge drawn bases, the same whatever the model; the run's own incoherence is only marked."""
    run = study.run
    clean = kernel_factorisation(INCOHERENCES, SETTING, DRAWS)
    noisy = kernel_factorisation(INCOHERENCES, replace(SETTING, noise=True), DRAWS)
    mean, largest = (float(np.nanmean(value_of(run, f"incoherence_{name}"))) for name in ("mean", "max"))
    width, positions = run.provenance["model"]["width"], need(run, "positional_basis").shape[1] - 1
    contexts = need(run, "context_basis").shape[1]
    outcome.read("slope of ln error against ln incoherence, without noise", number(clean.slope), "1")
    of_bound = Estimate.exact(float((clean.maximum / clean.bound).max()))
    outcome.judge("factorises", of_bound, draws=DRAWS, levels=len(INCOHERENCES))
    _with_noise(outcome)
    outcome.read("this model's mean incoherence, mean over layers", number(mean))
    outcome.read("its largest incoherence, mean over layers", number(largest))
    outcome.read(
        f"incoherence above which the statement with noise is informative ({positions} positions, {contexts} contexts)",
        number(math.sqrt(math.log(positions * contexts) / width)),
        "√(ln(n₁n₂)/d)",
    )
    columns = {"incoherence": clean.incoherence, "bound": clean.bound}
    for name, errors in (("error", clean), ("noisy_error", noisy)):
        columns |= {name: errors.mean, f"{name}_se": errors.standard_error, f"{name}_max": errors.maximum}
    outcome.tables["errors"] = pd.DataFrame({name: values.numpy() for name, values in columns.items()})
    along = torch.logspace(math.log10(INCOHERENCES[0]), math.log10(INCOHERENCES[-1]), 60, dtype=torch.float64)
    curves = {"without noise": clean, "with noise": noisy}
    drawn = drawing.factorisation(
        clean.incoherence.numpy(),
        {name: (error.mean.numpy(), error.standard_error.numpy()) for name, error in curves.items()},
        (along.numpy(), factorisation_bound(along, SETTING.sparsity).numpy()),
        {"this model: mean incoherence": mean, "its maximum": largest},
    )
    outcome.draw("factorisation", drawn)


def _with_noise(outcome: Outcome) -> None:
    """Judge the theorem's “moreover”: with noise 1/√d the error stays within a multiple of incoh = d^−γ ≥ 1/√d."""
    noisy = replace(SETTING, noise=True)
    verdicts, tables, curves = [], [], {}
    for gamma in (*EXPONENTS, BELOW_NOISE):
        grown = error_growth(WIDTHS, gamma, noisy, max(2, DRAWS // 2))
        left_out = grown.growth.numpy()
        slope = Estimate(float(left_out.mean()), float(jackknife_error(left_out)), len(left_out), "draws")
        mean = grown.ratio.mean(0).numpy()
        errors = (grown.ratio.std(0) / math.sqrt(len(grown.ratio))).numpy()
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
        columns = {"exponent": gamma, "width": WIDTHS, "incoherence": [width**-gamma for width in WIDTHS]}
        columns |= {"error_over_incoherence": mean, "error_over_incoherence_se": errors}
        tables.append(pd.DataFrame(columns | {"largest": grown.largest.numpy()}))
    outcome.verdicts.append(all_of(outcome.sentence("with-noise"), verdicts[:-1]))
    outcome.tables["growth"] = pd.concat(tables, ignore_index=True)
    outcome.draw("growth", drawing.error_over_incoherence(np.array(WIDTHS, dtype=np.float64), curves))
