"""Both theorems in numbers: what the bound on smoothness is worth here, and whether incoherence factorises kernels."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pandas as pd
import torch

from theodolite.judging import FAILS, Criterion, Estimates, Verdict, judge
from theodolite.papers.experiment import Study, experiment
from theodolite.papers.hidden_geometry.kernel_factorisation import (
    FactorisationError,
    KernelSetting,
    factorisation_bound,
    kernel_factorisation,
)
from theodolite.report.data import Floats, evenly, need, value_of
from theodolite.report.drawing import theory as drawing
from theodolite.report.exhibit import Exhibit, by_name
from theodolite.report.measures import SONG
from theodolite.report.outcome import Outcome, Reading
from theodolite.system.wording import number
from theodolite.theory.smoothness import normalised_gram, smoothness_bound

ORDERS = (1, 2, 3)
LARGEST_CUTOFF, CUTOFFS_SHOWN = 64, 13
SHOWN_LAYERS = 13  # all of the twelve-block models of the paper; of deeper ones as many, evenly chosen
MODERATE = 10
"""K up to which Tables 2 and 3 look, taken for a “moderate k”."""

NEVER_ABOVE = Criterion("at most", 1.0, "the theorem")
OF_USE = Criterion(
    "at most",
    1.0,
    f"a bound above the error of no approximation at all says nothing; “moderate k and m” read as k ≤ {MODERATE}, "
    f"m ≤ {max(ORDERS)} (ours)",
)
APPROXIMATED = Criterion("at most", 0.1, "“≈” read as: a tenth of the error of no approximation (ours)")
LINEAR = Criterion("at most", 0.1, "O(incoh): slope 1; the tenth of leeway is ours")

INCOHERENCES = (0.003, 0.01, 0.03, 0.1, 0.2, 0.3)
"""Three of them are above 1/√d of the setting, where the statement with noise is judged."""

DRAWS = 100
SETTING = KernelSetting()
NOISE_FLOOR = SETTING.width**-0.5
"""1/√d: below it the statement with noise says nothing, as its probability is 1 − O(n₁n₂)·exp(−incoh²·d)."""


def cutoffs_of(positions: int) -> list[int]:
    """k from 1 to 64 or to the number of positions, about evenly on a logarithmic scale; 10 among them if possible."""
    last = min(positions, LARGEST_CUTOFF)
    cutoffs = {round(k) for k in np.geomspace(1, last, CUTOFFS_SHOWN)}
    return sorted(cutoffs | {min(MODERATE, last)})


def _bounds(grams: torch.Tensor, cutoffs: list[int]) -> tuple[Floats, Floats, Floats]:
    """Of (N, n, n): the bound for each order and k (N, orders, K), the attained error (N, K), ‖G‖_op/n (N)."""
    bounds, attained = [], []
    for gram in grams:
        first = smoothness_bound(gram, cutoffs, ORDERS[0])
        of_order = [first.bound]
        for order in ORDERS[1:]:
            # The attained error is of every order the same; the bound at k is that at 1 over k^m.
            at_one = smoothness_bound(gram, 1, order).bound
            of_order.append(at_one / torch.tensor(cutoffs, dtype=torch.float64) ** order)
        bounds.append(torch.stack(of_order))
        attained.append(first.attained)
    trivial = torch.linalg.matrix_norm(grams, 2) / grams.shape[-1]
    return torch.stack(bounds).numpy(), torch.stack(attained).numpy(), trivial.numpy()


def _first_useful(bounds: Floats, trivial: Floats, cutoffs: list[int]) -> list[int | None]:
    """The smallest k at which some order's bound is below no approximation, for each layer; None: none shown."""
    below = (bounds.min(axis=1) < trivial[:, None]).tolist()
    return [next((k for k, yes in zip(cutoffs, row, strict=True) if yes), None) for row in below]


@experiment(
    "geometry/theorem1",
    "The smoothness bound of Theorem 1 against the attained error",
    "Smooth Gram matrices are nearly low-frequency even for moderate k and m (section 3.3, Theorem 1)",
    needs=("arrays.positional_basis",),
)
def theorem_1(study: Study, outcome: Outcome) -> None:
    basis = torch.from_numpy(need(study.run, "positional_basis")[:, 1:])
    layers = evenly(len(basis), SHOWN_LAYERS)
    cutoffs = cutoffs_of(basis.shape[1])
    bounds, attained, trivial = _bounds(normalised_gram(basis[layers]), cutoffs)
    moderate = cutoffs.index(min(MODERATE, cutoffs[-1]))
    useful = _first_useful(bounds, trivial, cutoffs)
    rows = [
        {"layer": layer, "k": k, "attained": attained[place, at]}
        | {f"bound_{order}": bounds[place, index, at] for index, order in enumerate(ORDERS)}
        | {"no_approximation": trivial[place]}
        for place, layer in enumerate(layers)
        for at, k in enumerate(cutoffs)
    ]
    middle = len(layers) // 2
    picture = Exhibit(
        "bound",
        "Theorem 1: the bound and the error",
        drawing.smoothness_bounds(cutoffs, bounds, attained, trivial, middle),
        "For the Gram matrix of normalised positions: the error of the proof's approximation by k low frequencies "
        "(attained), the bound from m-th differences (dashed), and the error of no approximation at all (dotted). "
        "Differencing amplifies the sampling noise of means over few contexts: the bound is lower on more contexts.",
        "how far the dashed lines lie above the solid one, and whether they come below the dotted one at all.",
        f"{SONG}, Theorem 1",
        choice=by_name(
            "layer",
            [f"layer {layer}" for layer in layers],
            lambda place: drawing.smoothness_bounds(cutoffs, bounds, attained, trivial, place),
        ),
        wide=True,
    )
    useful_cutoffs = [k for k in useful if k is not None]
    range_text = (
        f"{min(useful_cutoffs)} to {max(useful_cutoffs)}, in {len(useful_cutoffs)} of {len(layers)} layers"
        if useful_cutoffs
        else f"none up to {cutoffs[-1]}"
    )
    ratio = attained[:, moderate] / trivial
    readings = [
        Reading("smallest k at which a bound is informative", range_text, "“moderate k and m”"),
        Reading(
            f"bound over no approximation at k = {cutoffs[moderate]}, best m, median of layers",
            number(float(np.median(bounds[:, :, moderate].min(axis=1) / trivial))),
        ),
        Reading(
            f"attained over no approximation at k = {cutoffs[moderate]}, median of layers",
            number(float(np.median(ratio))),
            "“G ≈”",
        ),
    ]
    outcome.readings += readings
    outcome.verdicts += _verdicts_1(bounds, attained, trivial, cutoffs)
    outcome.tables |= {"bounds": pd.DataFrame(rows)}
    outcome.exhibits += [picture]


def _verdicts_1(bounds: Floats, attained: Floats, trivial: Floats, cutoffs: list[int]) -> list[Verdict]:
    moderate = cutoffs.index(min(MODERATE, cutoffs[-1]))
    # Errors that are nothing but rounding are compared with a bound that is.
    rounding = 1e-12 * trivial[:, None, None]
    worst = float((attained[:, None] / np.maximum(bounds, rounding)).max())
    orders = f"m = {', '.join(map(str, ORDERS))}"
    return [
        judge(
            "The bound of Theorem 1 holds (section 3.3)",
            f"largest of attained error over bound, {len(trivial)} layers, k = 1 to {cutoffs[-1]}, {orders}",
            worst,
            NEVER_ABOVE,
        ),
        judge(
            "The theorem implies the approximation even for moderate k and m (section 3.3)",
            f"bound over the error of no approximation at k = {cutoffs[moderate]}, the best of {orders}",
            Estimates(bounds[:, :, moderate].min(axis=1) / trivial),
            OF_USE,
        ),
        judge(
            "The Gram matrix itself is nearly that of a few low frequencies (section 3.3)",
            f"attained error over that of no approximation at k = {cutoffs[moderate]}",
            Estimates(attained[:, moderate] / trivial),
            APPROXIMATED,
        ),
    ]


def _factorisation(clean: FactorisationError, noisy: FactorisationError, marks: dict[str, float]) -> Exhibit:
    along = torch.logspace(math.log10(INCOHERENCES[0]), math.log10(INCOHERENCES[-1]), 60, dtype=torch.float64)
    curves = {"without noise": clean, "with noise": noisy}
    return Exhibit(
        "factorisation",
        "Theorem 2: error of the factorised kernel against incoherence",
        drawing.factorisation(
            clean.incoherence.numpy(),
            {name: (error.mean.numpy(), error.standard_error.numpy()) for name, error in curves.items()},
            (along.numpy(), factorisation_bound(along, SETTING.sparsity).numpy()),
            marks,
        ),
        f"Mean relative error over {DRAWS} drawn pairs of bases ({SETTING.vectors[0]} vectors each in {SETTING.width} "
        f"dimensions, weights of {SETTING.sparsity} terms), with standard errors, and the bound that no error without "
        "noise exceeds. Vertical lines: this model's incoherence, means over layers.",
        "a straight line of slope 1 without noise; with noise of size 1/√d a flat one, dominated by the noise "
        "throughout.",
        f"{SONG}, Theorem 2; the bound with its constant is ours",
        wide=True,
    )


@experiment(
    "geometry/theorem2",
    "Kernel factorisation: error against incoherence",
    "Incoherence enables a kernel to factorize into smaller components (section 5.3, Theorem 2)",
    needs=(
        "layers.incoherence_mean",
        "layers.incoherence_max",
        "arrays.positional_basis",
        "arrays.context_basis",
    ),
)
def theorem_2(study: Study, outcome: Outcome) -> None:
    run = study.run
    clean = kernel_factorisation(INCOHERENCES, SETTING, DRAWS)
    noisy = kernel_factorisation(INCOHERENCES, replace(SETTING, noise=True), DRAWS)
    mean, largest = (float(np.nanmean(value_of(run, f"incoherence_{name}"))) for name in ("mean", "max"))
    marks = {"this model: mean incoherence": mean, "its maximum": largest}
    columns = {"incoherence": clean.incoherence, "bound": clean.bound}
    for name, errors in (("error", clean), ("noisy_error", noisy)):
        columns |= {
            name: errors.mean,
            f"{name}_se": errors.standard_error,
            f"{name}_max": errors.maximum,
        }
    table = pd.DataFrame({name: values.numpy() for name, values in columns.items()})
    width, positions = run.provenance["model"]["width"], need(run, "positional_basis").shape[1] - 1
    contexts = need(run, "context_basis").shape[1]
    readings = [
        Reading("slope of ln error against ln incoherence, without noise", number(clean.slope), "1"),
        Reading(
            f"the same with noise, of incoherences from 1/√d = {NOISE_FLOOR:.2g} on",
            number(_slope_above_noise(noisy)),
            "1",
        ),
        Reading("this model's mean incoherence, mean over layers", number(mean)),
        Reading("its largest incoherence, mean over layers", number(largest)),
        Reading(
            "incoherence above which the statement with noise is informative "
            f"({positions} positions, {contexts} contexts)",
            number(math.sqrt(math.log(positions * contexts) / width)),
            "√(ln(n₁n₂)/d)",
        ),
    ]
    picture = _factorisation(clean, noisy, marks)
    outcome.readings += readings
    outcome.verdicts += _verdicts_2(clean, noisy)
    outcome.tables |= {"errors": table}
    outcome.exhibits += [picture]


def _slope_above_noise(noisy: FactorisationError) -> float:
    """The slope over incoherences of at least 1/√d."""
    above = noisy.incoherence >= NOISE_FLOOR
    fields_above = {field.name: getattr(noisy, field.name)[above] for field in fields(noisy)}
    return FactorisationError(**fields_above).slope


def _verdicts_2(clean: FactorisationError, noisy: FactorisationError) -> list[Verdict]:
    drawn = "Theorem 2; on random bases, not on this model"
    where = f"{DRAWS} draws, incoherence {INCOHERENCES[0]:g} to {INCOHERENCES[-1]:g}"
    return [
        judge(
            f"The kernel factorises up to an error of order incoherence ({drawn})",
            f"|slope of ln error against ln incoherence − 1|, {where}",
            abs(clean.slope - 1),
            LINEAR,
        ),
        judge(
            f"No factorisation error exceeds the bound of the proof ({drawn})",
            f"largest error over exp(s(8ρ + 4ρ²)) − 1, {where}",
            float((clean.maximum / clean.bound).max()),
            NEVER_ABOVE,
        ),
        _verdict_with_noise(clean, noisy, drawn),
    ]


def _verdict_with_noise(clean: FactorisationError, noisy: FactorisationError, drawn: str) -> Verdict:
    verdict = judge(
        f"The kernel factorises up to an error of order incoherence with noise added to the weights, too ({drawn}, "
        "“moreover”)",
        f"|slope of ln error against ln incoherence − 1|, {DRAWS} draws, incoherence {NOISE_FLOOR:.2g} (1/√d) to "
        f"{INCOHERENCES[-1]:g}",
        abs(_slope_above_noise(noisy) - 1),
        LINEAR,
    )
    errors = ", ".join(
        f"{number(float(error[place]))} {condition} at {INCOHERENCES[place]:g}"
        for error, place, condition in (
            (noisy.mean, 0, ""),
            (noisy.mean, -1, ""),
            (clean.mean, -1, "without noise"),
        )
    ).replace("  ", " ")
    why = (
        f"; at width {SETTING.width} the noise of size 1/√d dominates at every incoherence"
        if verdict.answer == FAILS
        else ""
    )
    return replace(verdict, evidence=f"{verdict.evidence}{why} (mean error {errors})")
