"""The premise of Theorem 1, bounded differences, as it would be of positions that are known without noise."""

from __future__ import annotations

import numpy as np
import torch

from theodolite.corpus.groups import GROUPS
from theodolite.estimates import Estimates, jackknife_error
from theodolite.report.data import OF_GROUPS, Floats
from theodolite.theory import smoothness_bound
from theodolite_papers.hidden_geometry.resampling import GroupedBasis

ORDERS = (1, 2, 3)


def premise_without_noise(
    basis: GroupedBasis | None, layers: list[int], order: Floats, cutoff: int
) -> Estimates:
    """What the bound over no approximation tends to as contexts grow, by layer, at the order of each.

    The noise of means over C contexts stands on the Gram matrix's diagonal like a nugget of size 1/C, and differences
    amplify it by T^{2m}: so the bound is taken of one, two, four and all eight groups, and the line in 1/C through
    these read off at 0. The error is the jackknife's over groups, and with it how much the line changes without the
    smallest part. NaN in layers where the positions are not seen above their noise.
    """
    if basis is None:
        return Estimates(np.full(len(layers), np.nan), np.full(len(layers), np.nan), *OF_GROUPS)
    every = tuple(range(GROUPS))
    parts = [tuple(range(start, start + size)) for size in (1, 2, 4) for start in range(0, GROUPS, size)]
    means = {
        part: basis.of(torch.isin(torch.arange(GROUPS), torch.tensor(part)).double())[layers]
        for part in (*parts, every, *(_without(every, group) for group in every))
    }
    values = _line(means, every, order, cutoff)
    left_out = np.stack([_line(means, _without(every, group), order, cutoff) for group in every])
    misfit = values - _line(means, every, order, cutoff, least=2)
    return Estimates(values, np.hypot(jackknife_error(left_out), misfit), *OF_GROUPS)


def _without(groups: tuple[int, ...], one: int) -> tuple[int, ...]:
    return tuple(group for group in groups if group != one)


def _line(
    means: dict[tuple[int, ...], torch.Tensor],
    whole: tuple[int, ...],
    order: Floats,
    cutoff: int,
    least: int = 1,
) -> Floats:
    """The line in 1/C through the parts of `least` groups or more and the whole, at 0, by layer."""
    # Lengths free of noise, from products of different groups: with a part's own the nugget would saturate.
    groups = torch.stack([means[(group,)] for group in whole])
    products = groups.sum(0).square().sum(-1) - groups.square().sum((0, -1))
    lengths = (products / (len(whole) * (len(whole) - 1))).clamp_min(0).sqrt()
    levels: dict[int, list[Floats]] = {}
    for part in means:
        if part == whole or (least <= len(part) <= GROUPS // 2 and set(part) <= set(whole)):
            levels.setdefault(len(part), []).append(
                _bound_ratio(means[part] / lengths[..., None], order, cutoff)
            )
    design = np.stack([np.ones(len(levels)), [1 / size for size in levels]], axis=1)
    level_means = np.stack([np.mean(ratios, axis=0) for ratios in levels.values()])
    weights: Floats = np.linalg.pinv(design)[0]
    return np.asarray(weights @ level_means)


def _bound_ratio(unit: torch.Tensor, order: Floats, cutoff: int) -> Floats:
    """The bound at k = `cutoff` and each layer's order over the error of no approximation; NaN of no numbers."""
    grams = unit @ unit.mT
    ratios = np.full(len(grams), np.nan)
    for layer, gram in enumerate(grams):
        if gram.isfinite().all():
            bound = smoothness_bound(gram, cutoff, ORDERS[int(order[layer])]).bound
            ratios[layer] = float(bound / torch.linalg.matrix_norm(gram, 2) * len(gram))
    return ratios
